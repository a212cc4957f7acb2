"""How each layout stores a weight: suffixes, scale dtypes, and its quantization config.

The reader does not use this table: it looks at the tensors. So a round trip tests both.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxtp import formats
from jaxtp.errors import FormatError
from jaxtp.formats.bf16 import round_to_bf16
from jaxtp.formats.fp8_block import ScaleFormat
from jaxtp.weights import (
    Bf16Weight,
    Fp8Weight,
    GlobalScaleKind,
    Nvfp4Weight,
    Weight,
    validate,
)

LayoutName = Literal[
    "bf16",
    "deepseek",
    "qwen3_fp8",
    "deepseek_v4",
    "step_fp8",
    "modelopt_fp8_pb",
    "compressed_tensors_fp8_block",
    "step_nvfp4",
    "modelopt_nvfp4",
    "compressed_tensors_nvfp4",
]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one family of checkpoints stores a weight.

    Attributes:
        format: `"bf16"`, `"e4m3"` or `"nvfp4"`.
        method: The config's `quant_method`.
        code: Suffix of the codes.
        scale: Suffix of the block scales.
        scale_format: What an FP8 scale is stored as.
        spread: Whether FP8 scales are stored as `[nb, 1, kb, 1]`.
        global_scale: Suffix of the NVFP4 global scale.
        kind: How it is applied.
        global_shape: The shape in which one global scale is stored.
        input_scale: Suffix of the NVFP4 activation scale.
        stacked: Whether the experts of a bank stay one tensor.
    """

    format: Literal["bf16", "e4m3", "nvfp4"]
    method: str | None
    code: str = "weight"
    scale: str = "weight_scale"
    scale_format: ScaleFormat = "f32"
    spread: bool = False
    global_scale: str = "weight_scale_2"
    kind: GlobalScaleKind = "multiplier"
    global_shape: tuple[int, ...] = ()
    input_scale: str = "input_scale"
    stacked: bool = False


LAYOUTS: dict[str, Layout] = {
    "bf16": Layout("bf16", None),
    "deepseek": Layout("e4m3", "fp8", scale="weight_scale_inv"),
    "qwen3_fp8": Layout("e4m3", "fp8", scale="weight_scale_inv", scale_format="bf16"),
    "deepseek_v4": Layout("e4m3", "fp8", scale="scale", scale_format="e8m0"),
    "step_fp8": Layout("e4m3", "fp8", scale="weight_scale_inv", stacked=True),
    "modelopt_fp8_pb": Layout("e4m3", "modelopt", spread=True),
    "compressed_tensors_fp8_block": Layout(
        "e4m3", "compressed-tensors", scale_format="bf16"
    ),
    "step_nvfp4": Layout("nvfp4", "modelopt", stacked=True),
    "modelopt_nvfp4": Layout("nvfp4", "modelopt"),
    "compressed_tensors_nvfp4": Layout(
        "nvfp4",
        "compressed-tensors",
        code="weight_packed",
        global_scale="weight_global_scale",
        kind="divisor",
        global_shape=(1,),
        input_scale="input_global_scale",
    ),
}


def quantize(layout: Layout, w: np.ndarray, block_shape: tuple[int, int]) -> Weight:
    """The weight that a layout stores for a float32 matrix or bank.

    Args:
        layout: The layout.
        w: Float32 `[N, K]` or `[E, N, K]`.
        block_shape: Rows and columns of an FP8 block.
    """
    if layout.format == "bf16":
        return Bf16Weight(np.asarray(round_to_bf16(w)))
    if layout.format == "e4m3":
        code, scale = formats.quantize_fp8_block(w, block_shape, layout.scale_format)
        return Fp8Weight(code, scale, block_shape)
    return Nvfp4Weight(
        *formats.quantize_nvfp4(w, layout.kind), global_scale_kind=layout.kind
    )


def stored_tensors(
    layout: Layout, module: str, weight: Weight, input_scale: float | None
) -> dict[str, np.ndarray]:
    """The tensors that a layout stores for a weight, by name.

    Args:
        layout: The layout.
        module: The module's name.
        weight: A bf16 weight, or one in the layout's format.
        input_scale: Activation scale of NVFP4 layouts; None stores none.

    Raises:
        FormatError: If the layout cannot hold the weight, or not exactly.
    """
    validate(weight)
    if isinstance(weight, Bf16Weight):
        return {f"{module}.weight": np.asarray(weight.value)}
    if isinstance(weight, Fp8Weight) and layout.format == "e4m3":
        return {
            f"{module}.{layout.code}": np.asarray(weight.code),
            f"{module}.{layout.scale}": _stored_scale(layout, module, weight),
        }
    if not isinstance(weight, Nvfp4Weight) or layout.format != "nvfp4":
        raise FormatError(
            f"{module}: this layout stores {layout.format} weights; got "
            f"{weight.format}."
        )
    if weight.global_scale_kind != layout.kind:
        raise FormatError(
            f"{module}: this layout stores the global scale as a {layout.kind}; the "
            f"weight's is a {weight.global_scale_kind}."
        )
    lead = tuple(weight.shape[:-2])
    shape = lead or layout.global_shape
    tensors = {
        f"{module}.{layout.code}": np.asarray(weight.code),
        f"{module}.{layout.scale}": np.asarray(weight.scale),
        f"{module}.{layout.global_scale}": np.asarray(weight.global_scale).reshape(
            shape
        ),
    }
    if input_scale is not None:
        value = np.float32(input_scale)
        value = np.float32(1) / value if layout.kind == "divisor" else value
        tensors[f"{module}.{layout.input_scale}"] = np.full(shape, value, np.float32)
    return tensors


def _stored_scale(layout: Layout, module: str, weight: Fp8Weight) -> np.ndarray:
    """FP8 scales in the layout's dtype and shape, exactly."""
    scale = np.asarray(weight.scale, np.float32)
    if layout.scale_format == "bf16":
        stored = scale.astype(ml_dtypes.bfloat16)
        back = stored.astype(np.float32)
    elif layout.scale_format == "e8m0":
        stored = (scale.view(np.uint32) >> 23).astype(np.uint8)
        stored = stored.view(ml_dtypes.float8_e8m0fnu)
        back = np.asarray(formats.decode_e8m0(stored))
    else:
        stored = back = scale
    if not np.array_equal(back, scale):
        raise FormatError(
            f"{module}: its scales are not exact in {layout.scale_format}, as this "
            "layout stores them."
        )
    if not layout.spread:
        return stored
    *lead, rows, columns = stored.shape
    return stored.reshape(*lead, rows, 1, columns, 1)


def quantization_configs(
    layout: Layout,
    block_shape: tuple[int, int],
    unquantized: Sequence[str],
    weight_only: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`quantization_config` for config.json, and hf_quant_config.json's contents.

    Args:
        layout: The layout.
        block_shape: Rows and columns of an FP8 block.
        unquantized: Modules that were left alone.
        weight_only: Whether NVFP4 activations stay unquantized.

    Returns:
        Two mappings, empty where a layout has no such config.

    Raises:
        FormatError: If the layout's name stands for another block shape.
    """
    if layout.method is None:
        return {}, {}
    block = list(block_shape)
    if layout.method == "fp8":
        scale_fmt = {"scale_fmt": "ue8m0"} if layout.scale_format == "e8m0" else {}
        config: dict[str, Any] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": list(unquantized),
            "quant_method": "fp8",
            "weight_block_size": block,
            **scale_fmt,
        }
        return config, {}
    if layout.method == "compressed-tensors":
        return _compressed_tensors_config(layout, block, unquantized, weight_only), {}
    if layout.format == "e4m3" and block != [128, 128]:
        raise FormatError(f"FP8_PB_WO stands for blocks of 128 x 128; got {block}.")
    nvfp4 = "W4A16_NVFP4" if weight_only else "NVFP4"
    algorithm = "FP8_PB_WO" if layout.format == "e4m3" else nvfp4
    group = {"group_size": 16} if layout.format == "nvfp4" else {}
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": list(unquantized),
        **group,
    }
    quantization = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "exclude_modules": list(unquantized),
        **group,
    }
    return config, {"quantization": quantization}


def _compressed_tensors_config(
    layout: Layout, block: list[int], unquantized: Sequence[str], weight_only: bool
) -> dict[str, Any]:
    is_fp8 = layout.format == "e4m3"
    weights: Mapping[str, Any] = {
        "num_bits": 8 if is_fp8 else 4,
        "type": "float",
        "strategy": "block" if is_fp8 else "tensor_group",
        "block_structure": block if is_fp8 else None,
        "group_size": None if is_fp8 else 16,
        "dynamic": False,
        "symmetric": True,
    }
    inputs = {
        "num_bits": weights["num_bits"],
        "type": "float",
        "strategy": "group" if is_fp8 else "tensor_group",
        "group_size": 128 if is_fp8 else 16,
        "dynamic": True if is_fp8 else "local",
        "symmetric": True,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if is_fp8 else "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(unquantized),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": dict(weights),
                "input_activations": None if weight_only and not is_fp8 else inputs,
            }
        },
    }
