"""Which tensors make one weight: names, companions, dtypes and shapes.

A module's tensor with companion scales is quantized; one without is not, and an FP8 or
packed tensor without its companions is an error. The tensor's dtype names the format.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from jaxtp.checkpoint.config import NVFP4_GROUP, Quantization
from jaxtp.checkpoint.inventory import Module
from jaxtp.checkpoint.safetensors import Entry
from jaxtp.errors import (
    CheckpointError,
    DtypeError,
    LeftoverTensorError,
    MissingTensorError,
    ShapeError,
    UnsupportedError,
)
from jaxtp.weights import GlobalScaleKind

FP8_SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""Suffixes of an FP8 scale. Whatever the name says, it is a multiplier."""

_ACTIVATION_SCALES = ("input_scale", "input_global_scale")
_FP8_SCALE_TAGS = ("F32", "BF16", "F16", "F8_E8M0")


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A weight found among the tensors, checked except for its values.

    Attributes:
        module: The module's name.
        format: `"e4m3"`, `"nvfp4"`, `"bf16"`, or the dtype of an unquantized tensor.
        shape: The logical shape.
        code: The tensor of codes, or of the values themselves.
        scale: The block scales and the shape to read them in.
        global_scale: The global scale and the shape to read it in.
        global_scale_kind: How the global scale is applied.
        block_shape: Rows and columns of an FP8 block.
        unused: Companions that belong here and take no part in the weight's values.
    """

    module: str
    format: str
    shape: tuple[int, ...]
    code: Entry
    scale: tuple[Entry, tuple[int, ...]] | None = None
    global_scale: tuple[Entry, tuple[int, ...]] | None = None
    global_scale_kind: GlobalScaleKind = "multiplier"
    block_shape: tuple[int, int] | None = None
    unused: tuple[Entry, ...] = ()

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor holds codes."""
        return self.scale is not None

    @property
    def is_weight(self) -> bool:
        """Whether it is a matrix or a bank that projections take."""
        is_matrix = len(self.shape) in (2, 3) and 0 not in self.shape
        return self.is_quantized or (self.format == "bf16" and is_matrix)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All tensors of the weight, the codes first."""
        scales = [pair[0] for pair in (self.scale, self.global_scale) if pair]
        return (self.code, *scales, *self.unused)


def resolve(module: Module, quantization: Quantization) -> WeightSpec:
    """Finds out what a module's tensors are, and checks all but their values.

    Raises:
        MissingTensorError: If a needed tensor is absent.
        LeftoverTensorError: If a companion takes no part in the weight.
        DtypeError: If a scale is stored in a dtype that it cannot have.
        ShapeError: If shapes do not fit each other.
        UnsupportedError: If the tensors are in a format that is not read.
        CheckpointError: If the config contradicts the tensors or lacks a block shape.
    """
    if not module.mains:
        found = [entry.name for entry in module.companions.values()]
        raise MissingTensorError(
            f"{module.name}.weight is missing; its companion {found[0]} is there."
        )
    if len(module.mains) > 1:
        raise LeftoverTensorError(
            f"{module.name} has both weight and weight_packed; one of them is stale."
        )
    suffix, main = next(iter(module.mains.items()))
    if suffix == "weight_packed" or main.tag == "U8":
        return _nvfp4(module, suffix, main, quantization)
    if main.tag == "F8_E4M3":
        return _fp8(module, main, quantization)
    if main.tag == "I8" or main.tag.startswith("F8_"):
        raise UnsupportedError(
            f"{main.name}: {main.tag} weights are not read. Formats that are: E4M3 "
            "codes with block scales, NVFP4, bf16."
        )
    _no_leftovers(module, main, ())
    return WeightSpec(module.name, main.tag.lower(), main.shape, main)


def _fp8(module: Module, main: Entry, quantization: Quantization) -> WeightSpec:
    suffixes = [s for s in FP8_SCALES if s in module.companions]
    if not suffixes:
        raise MissingTensorError(
            f"{main.name} holds FP8 codes, but its scale is missing: there is none of "
            f"{', '.join(f'{module.name}.{s}' for s in FP8_SCALES)}."
        )
    unused = _no_leftovers(module, main, suffixes[:1])
    scale = module.companions[suffixes[0]]
    _check_tag(scale, _FP8_SCALE_TAGS, "an FP8 scale")
    scheme = quantization.scheme(module.name, "e4m3")
    if scheme is None or scheme.block_shape is None:
        raise CheckpointError(
            f"{main.name}: the config gives no block size for its scales. It must "
            "hold quantization_config with weight_block_size or block_structure; the "
            "block is never inferred from shapes."
        )
    block = scheme.block_shape
    *lead, n, k = _matrix_shape(main, main.shape)
    expected = (*lead, -(-n // block[0]), -(-k // block[1]))
    why = f"blocks of {block[0]} x {block[1]} over {n} x {k}; {scheme.label}"
    view = _scale_view(scale, expected, why)
    return WeightSpec(
        module.name,
        "e4m3",
        main.shape,
        main,
        scale=(scale, view),
        block_shape=block,
        unused=unused,
    )


def _scale_view(scale: Entry, expected: tuple[int, ...], why: str) -> tuple[int, ...]:
    """The shape to read FP8 scales in, for the three ways in which they are stored.

    Axes of length 1 may stand between (`[N/128, 1, K/128, 1]`) or have been squeezed
    out. The block shape of the config leaves one reading of such a shape, or none.
    """
    *lead, rows, columns = expected
    spread = (*lead, rows, 1, columns, 1)
    squeezed = tuple(d for d in expected if d != 1)
    if scale.shape in (expected, spread, squeezed, squeezed or (1,)):
        return expected
    raise ShapeError(
        f"{scale.name} must have shape {list(expected)} ({why}); got "
        f"{list(scale.shape)}."
    )


def _nvfp4(
    module: Module, suffix: str, main: Entry, quantization: Quantization
) -> WeightSpec:
    packed = suffix == "weight_packed"
    global_suffix = "weight_global_scale" if packed else "weight_scale_2"
    scale = module.companions.get("weight_scale")
    if main.tag != "U8" or (scale is not None and scale.tag in ("U8", "F8_E8M0")):
        found = f" with {scale.tag} scales" if scale else ""
        raise UnsupportedError(
            f"{main.name}: packed weights of {main.tag}{found} are not read. Of packed "
            "formats only NVFP4 is: U8 codes with F8_E4M3 scales."
        )
    absent = [s for s in ("weight_scale", global_suffix) if s not in module.companions]
    if absent or scale is None:
        raise MissingTensorError(
            f"{main.name} holds packed codes, but its companion is missing: "
            f"{', '.join(f'{module.name}.{s}' for s in absent)}."
        )
    unused = _no_leftovers(module, main, ("weight_scale", global_suffix))
    global_scale = module.companions[global_suffix]
    _check_tag(scale, ("F8_E4M3",), "an NVFP4 block scale")
    _check_tag(global_scale, ("F32", "BF16"), "a global scale")
    quantization.scheme(module.name, "nvfp4")
    *lead, n, half = _matrix_shape(main, main.shape)
    k = 2 * half
    if k % NVFP4_GROUP:
        raise ShapeError(
            f"{main.name}: NVFP4 needs K to be a multiple of 16; {list(main.shape)} "
            f"packs K={k}."
        )
    expected = (*lead, n, k // NVFP4_GROUP)
    if scale.shape != expected:
        raise ShapeError(
            f"{scale.name} must have shape {list(expected)} (groups of 16 over K={k}); "
            f"got {list(scale.shape)}."
        )
    return WeightSpec(
        module.name,
        "nvfp4",
        (*lead, n, k),
        main,
        scale=(scale, expected),
        global_scale=(global_scale, _global_view(global_scale, tuple(lead))),
        global_scale_kind="divisor" if packed else "multiplier",
        unused=unused,
    )


def _global_view(entry: Entry, lead: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to read a global scale in: `[]`, or `[E]` for a bank."""
    if entry.shape in (lead, (*lead, 1), (*lead, 1, 1)):
        return lead
    raise ShapeError(
        f"{entry.name} must have shape {list(lead)} (one scalar for each matrix); got "
        f"{list(entry.shape)}."
    )


def _matrix_shape(main: Entry, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) in (2, 3) and 0 not in shape:
        return shape
    raise ShapeError(
        f"{main.name}: a quantized weight is [N, K] or [E, N, K] with no empty axis; "
        f"got {list(shape)}."
    )


def _check_tag(entry: Entry, tags: tuple[str, ...], what: str) -> None:
    if entry.tag not in tags:
        raise DtypeError(
            f"{entry.name}: {what} is stored as {' or '.join(tags)}; got {entry.tag}."
        )


def _no_leftovers(
    module: Module, main: Entry, used: Iterable[str]
) -> tuple[Entry, ...]:
    """The known but unused companions; anything beyond them is an error."""
    rest: Mapping[str, Entry] = {
        s: e for s, e in module.companions.items() if s not in tuple(used)
    }
    quantized = main.tag in ("U8", "F8_E4M3")
    known = [s for s in rest if quantized and s in _ACTIVATION_SCALES]
    strange = [e.name for s, e in rest.items() if s not in known]
    if strange:
        with_what = ", ".join(f"{module.name}.{s}" for s in used) or "nothing"
        raise LeftoverTensorError(
            f"{strange[0]} belongs to no weight: {main.name} is {main.tag} and goes "
            f"with {with_what}."
        )
    return tuple(rest[s] for s in known)
