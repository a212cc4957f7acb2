"""Reports of NVFP4 loading defects in other projects, with the right values.

Each test is a small case of our own; the link names the report. Code 2 is 1.0 and code
7 is 6.0; the scale byte 0x38 is 1.0 and 0x7E is 448.
"""

import numpy as np
import pytest
from checkpoint_cases import MODELOPT_CONFIG, codes, e4m3, folder, nvfp4

from jaxtp import checkpoint
from jaxtp.errors import (
    CheckpointError,
    LeftoverTensorError,
    MissingTensorError,
    NonFiniteError,
    ShapeError,
)
from jaxtp.weights import Nvfp4Weight

F32 = np.float32
FP4_GROUP = {"num_bits": 4, "type": "float", "group_size": 16}
FP8_GROUP = {
    "num_bits": 8,
    "type": "float",
    "strategy": "block",
    "block_structure": [128, 128],
}


def compressed_tensors(**schemes):
    """A config of (weights, targets) pairs."""
    table = {n: {"weights": w, "targets": t} for n, (w, t) in schemes.items()}
    section = {"quant_method": "compressed-tensors", "config_groups": table}
    return {"quantization_config": section}


def constant(module, code, block, g, *, n=1, k=16, divisor=False):
    """A matrix of one code, one block-scale byte and one global scale."""
    main, last = ("weight", "weight_scale_2")
    if divisor:
        main, last = ("weight_packed", "weight_global_scale")
    return {
        f"{module}.{main}": np.full((n, k // 2), code * 17, np.uint8),
        f"{module}.weight_scale": codes(block, n, k // 16),
        f"{module}.{last}": np.full((1,) if divisor else (), g, F32),
    }


def decoded(ckpt, module):
    return np.asarray(ckpt.weight(module).dequantize())


def test_a_divisor_divides_and_a_multiplier_multiplies(tmp_path) -> None:
    """https://github.com/modular/modular/issues/6600."""
    tensors = constant("m", 7, 0x7E, 896, divisor=True)
    config = compressed_tensors(a=(FP4_GROUP, ["Linear"]))
    ckpt = checkpoint.open(folder(tmp_path / "ct", tensors, config))
    assert set(decoded(ckpt, "m").ravel().tolist()) == {3.0}
    assert 6 * 448 * 896 == 2_408_448  # what multiplying would give
    g = F32(0.0011160715)
    tensors = constant("m", 7, 0x7E, g)
    ckpt = checkpoint.open(folder(tmp_path / "modelopt", tensors, MODELOPT_CONFIG))
    assert decoded(ckpt, "m")[0, 0] == F32(6) * (F32(448) * g) == 3.0
    assert (F32(6) * F32(448)) * g == F32(
        3.0000002
    )  # another order, not the contract's


def test_gate_and_up_keep_their_own_global_scales(tmp_path) -> None:
    """https://github.com/vllm-project/vllm/issues/54974."""
    gate = constant("m.gate_proj", 7, 0x7E, 3.85e-05)
    up = constant("m.up_proj", 7, 0x7E, 4.83e-05)
    ckpt = checkpoint.open(folder(tmp_path, {**gate, **up}, MODELOPT_CONFIG))
    values = [decoded(ckpt, f"m.{name}_proj")[0, 0] for name in ("gate", "up")]
    np.testing.assert_allclose(values, [0.103488, 0.1298304], rtol=2.0**-22)


def test_parts_of_a_fused_matrix_keep_their_own_divisors(tmp_path) -> None:
    """https://github.com/vllm-project/vllm/pull/47515."""
    divisors = {"q_proj": 12343.1035, "k_proj": 5334.3257, "v_proj": 8001.4883}
    tensors = {}
    for name, g in divisors.items():
        tensors |= constant(f"m.{name}", 7, 0x7E, g, divisor=True)
    config = compressed_tensors(a=(FP4_GROUP, ["Linear"]))
    ckpt = checkpoint.open(folder(tmp_path, tensors, config))
    values = [decoded(ckpt, f"m.{name}")[0, 0] for name in divisors]
    exact = [6 * 448 / float(F32(g)) for g in divisors.values()]
    np.testing.assert_allclose(values, exact, rtol=2.0**-22)
    np.testing.assert_allclose(values, [0.2177734, 0.5039062, 0.3359375], rtol=1e-6)


def test_a_nan_block_scale_is_found_or_propagates(tmp_path) -> None:
    """https://github.com/NVIDIA/Model-Optimizer/pull/1397."""
    tensors = constant("m", 0, 0x38, 1.0, k=32)
    tensors["m.weight_scale"] = e4m3([[0x38, 0x7F]])
    path = folder(tmp_path, tensors, MODELOPT_CONFIG)
    with pytest.raises(NonFiniteError, match=r"m\.weight_scale: .*index \[0, 1\]"):
        checkpoint.open(path).weight("m").dequantize()
    lenient = decoded(checkpoint.open(path, strict=False), "m")
    assert not lenient[0, :16].any()
    assert np.isnan(lenient[0, 16:]).all()


def test_a_scale_of_half_the_columns_is_a_shape_error(tmp_path) -> None:
    """https://github.com/NVIDIA/Model-Optimizer/pull/2038."""
    tensors = constant("m", 2, 0x38, 1.0, n=4, k=32)
    tensors["m.weight_scale"] = codes(0x38, 4, 1)
    ckpt = checkpoint.open(folder(tmp_path, tensors, MODELOPT_CONFIG))
    with pytest.raises(ShapeError, match=r"weight_scale must have shape \[4, 2\]"):
        ckpt.weight("m")


def test_every_tensor_is_accounted_for(tmp_path) -> None:
    """https://github.com/vllm-project/vllm/pull/37462."""
    tensors = constant("m.experts.0.w1", 2, 0x38, 0.5)
    tensors["m.experts.0.w1.input_scale"] = F32(0.1).reshape(())
    ckpt = checkpoint.open(folder(tmp_path / "whole", tensors, MODELOPT_CONFIG))
    (row,) = ckpt.report().rows
    assert set(row.tensors) == set(tensors)
    assert ckpt.report().ok
    no_global = {k: v for k, v in tensors.items() if not k.endswith("scale_2")}
    ckpt = checkpoint.open(folder(tmp_path / "part", no_global, MODELOPT_CONFIG))
    with pytest.raises(MissingTensorError, match=r"w1\.weight_scale_2"):
        ckpt.weight("m.experts.0.w1")
    with pytest.raises(MissingTensorError, match=r"w1\.weight_scale_2"):
        ckpt.report().raise_problems()
    stray = {**tensors, "m.experts.1.w1.input_scale": F32(0.1).reshape(())}
    ckpt = checkpoint.open(folder(tmp_path / "stray", stray, MODELOPT_CONFIG))
    with pytest.raises(LeftoverTensorError, match=r"experts\.1\.w1\.input_scale"):
        ckpt.report().raise_problems()


def test_weight_only_checkpoints_need_no_input_scale(tmp_path) -> None:
    """https://github.com/vllm-project/vllm/issues/54189."""
    section = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    tensors = constant("m", 2, 0x38, 0.5)
    ckpt = checkpoint.open(folder(tmp_path, tensors, {"quantization_config": section}))
    assert decoded(ckpt, "m").sum() == 8.0
    assert ckpt.report().ok


def test_rows_are_permuted_with_their_scales(tmp_path) -> None:
    """https://github.com/ggml-org/llama.cpp/pull/22611."""
    tensors = constant("m", 2, 0x38, 1.0, n=4)
    tensors["m.weight_scale"] = e4m3([[0x38], [0x40], [0x44], [0x48]])
    ckpt = checkpoint.open(folder(tmp_path, tensors, MODELOPT_CONFIG))
    weight = ckpt.weight("m")
    assert isinstance(weight, Nvfp4Weight)
    rows = [2, 0, 3, 1]
    code, scale = (
        np.stack([part[row] for row in rows]) for part in (weight.code, weight.scale)
    )
    moved = Nvfp4Weight(code, scale, weight.global_scale).dequantize()
    assert moved[:, 0].tolist() == [3, 1, 4, 2]
    assert decoded(ckpt, "m")[:, 0].tolist() == [1, 2, 3, 4]


def test_exclusion_patterns_end_at_the_dot(tmp_path) -> None:
    """https://github.com/sgl-project/sglang/issues/36596."""
    prefix = "model.language_model.layers"
    ignore = [f"{prefix}.1.*", f"{prefix}.0*", "lm_head"]
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
    tensors = {"lm_head.weight": np.ones((4, 32), F32).astype("bfloat16")}
    for layer in (0, 1):
        name = f"{prefix}.{layer}.mlp.up_proj.weight"
        tensors[name] = np.ones((4, 32), F32).astype("bfloat16")
    for layer in (10, 11):
        tensors |= constant(f"{prefix}.{layer}.mlp.up_proj", 2, 0x38, 1.0)
    path = folder(tmp_path, tensors, {"quantization_config": section})
    ckpt = checkpoint.open(path)
    report = ckpt.report()
    assert report.ok
    excluded = {row.name: row.excluded for row in report.rows}
    assert excluded == {row.name: row.format == "bf16" for row in report.rows}
    assert ckpt.quantization.excluded("model.layers.1.mlp.up_proj")
    assert not ckpt.quantization.excluded("model.layers.10.mlp.up_proj")
    attn = f"{prefix}.2.self_attn"
    assert not ckpt.quantization.excluded(f"{attn}.qkv_proj")


def test_an_excluded_matrix_that_ships_scales_is_what_its_tensors_say(tmp_path) -> None:
    """https://github.com/vllm-project/vllm/pull/45132."""
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    config = {"quantization_config": section}
    tensors = constant("lm_head", 7, 0x38, 1.0)
    ckpt = checkpoint.open(folder(tmp_path / "quantized", tensors, config))
    assert set(decoded(ckpt, "lm_head").ravel().tolist()) == {6.0}
    report = ckpt.report()
    assert report.ok
    assert report.notes == (
        "lm_head.weight is quantized although the config excludes it.",
    )
    tensors["lm_head.weight"] = np.ones((4, 32), F32).astype("bfloat16")
    ckpt = checkpoint.open(folder(tmp_path / "bf16", tensors, config))
    with pytest.raises(LeftoverTensorError, match=r"lm_head\.weight_scale"):
        ckpt.weight("lm_head")


def layer(number: int) -> str:
    return f"model.layers.{number}.mlp.up_proj"


def test_overlapping_config_groups_are_resolved_tensor_by_tensor(tmp_path) -> None:
    """https://github.com/charlie12345/ROCmFPX/pull/79."""
    late = [r"re:model\.layers\.(5[6-9]|6[0-3])\..*"]
    config = compressed_tensors(a=(FP4_GROUP, ["Linear"]), b=(FP8_GROUP, late))
    fp8 = {
        f"{layer(60)}.weight": codes(0x38, 192, 128),
        f"{layer(60)}.weight_scale": np.array([[2.0], [4.0]], F32),
    }
    tensors = {**constant(layer(5), 7, 0x38, 2.0, divisor=True), **fp8}
    ckpt = checkpoint.open(folder(tmp_path / "good", tensors, config))
    assert decoded(ckpt, layer(5))[0, 0] == 3.0
    assert decoded(ckpt, layer(60))[[127, 128], 0].tolist() == [2, 4]
    assert ckpt.report().ok
    stray = {name.replace("layers.60", "layers.10"): v for name, v in fp8.items()}
    ckpt = checkpoint.open(folder(tmp_path / "bad", stray, config))
    with pytest.raises(CheckpointError, match=r"layers\.10\..*e4m3.*nvfp4"):
        ckpt.weight(layer(10))
    assert [p.kind for p in ckpt.report().problems] == ["CheckpointError"]


def test_packed_codes_under_an_fp8_config_are_a_conflict(tmp_path) -> None:
    """https://github.com/charlie12345/ROCmFPX/pull/79."""
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors = nvfp4(np.random.default_rng(0), "m", 4, 32)
    ckpt = checkpoint.open(folder(tmp_path, tensors, {"quantization_config": section}))
    with pytest.raises(CheckpointError, match=r"nvfp4, but the config says e4m3"):
        ckpt.weight("m")
