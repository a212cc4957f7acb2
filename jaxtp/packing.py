"""Weights in slot layout, on the host: the bytes that one range of a placement needs.

Slot layout of a matrix `[N, K]` is `[S, N, K_slot]`, zero where a slot reaches past K.
Scales of E4M3 blocks are looked up here by global row and column, once for each segment
and row: `[S, J, N]`, zero where a slot has no segment j.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from jaxtp.errors import NonFiniteError, PlanTypeError
from jaxtp.plan import ReductionPlan, SlotLayout
from jaxtp.weights import Bf16Weight, Fp8Weight, Nvfp4Weight, Weight

CHUNK_BYTES = 1 << 22
"""Most bytes of a weight that are in flight between the file and a placed buffer."""


@dataclasses.dataclass(frozen=True)
class PartShapes:
    """Shapes and dtypes of the placed parts of one matrix; None where there is none."""

    value: tuple[tuple[int, ...], np.dtype]
    scale: tuple[tuple[int, ...], np.dtype] | None
    has_global_scale: bool


def block_columns(weight: Weight) -> int | None:
    """Columns of a 2-D scale block; None for formats without one."""
    return weight.block_shape[1] if isinstance(weight, Fp8Weight) else None


def weight_layout(weight: Weight, plan: ReductionPlan) -> SlotLayout:
    """The slots of a weight's K under a plan.

    Raises:
        PlanTypeError: If `plan` is no plan, or does not exist for the format.
    """
    if not isinstance(plan, ReductionPlan):
        raise PlanTypeError(
            f"`plan` must be a ReductionPlan; got {plan!r}, a {type(plan).__name__}."
        )
    return plan.layout(weight.shape[-1], block_columns(weight))


def part_shapes(weight: Weight, layout: SlotLayout, rows: int) -> PartShapes:
    """Placed shapes of one matrix with `rows` (padded) output features."""
    slots, width = layout.num_slots, layout.width
    if isinstance(weight, Bf16Weight):
        return PartShapes(
            ((slots, rows, width), np.dtype(ml_dtypes.bfloat16)), None, False
        )
    if isinstance(weight, Fp8Weight):
        segments = layout.max_segments(weight.block_shape[1])
        return PartShapes(
            ((slots, rows, width), np.dtype(ml_dtypes.float8_e4m3fn)),
            ((slots, segments, rows), np.dtype(np.float32)),
            False,
        )
    return PartShapes(
        ((slots, rows, width // 2), np.dtype(np.uint8)),
        ((slots, rows, width // 16), np.dtype(ml_dtypes.float8_e4m3fn)),
        True,
    )


def pack_value(weight: Weight, layout: SlotLayout, slots: slice, rows: slice) -> Any:
    """The value or code part for a range of slots and (padded) rows.

    Raises:
        NonFiniteError: If an E4M3 code is NaN.
    """
    if isinstance(weight, Bf16Weight):
        part, per_column, name = weight.value, 1, None
    elif isinstance(weight, Fp8Weight):
        part, per_column, name = weight.code, 1, "code"
    else:
        part, per_column, name = weight.code, 2, None
    return _pack_columns(part, layout, per_column, slots, rows, name)


def pack_scale(weight: Weight, layout: SlotLayout, slots: slice, rows: slice) -> Any:
    """The scale part for a range of slots and (padded) rows.

    Raises:
        NonFiniteError: If a scale is not finite, or negative.
    """
    if isinstance(weight, Nvfp4Weight):
        return _pack_columns(weight.scale, layout, 16, slots, rows, "scale")
    assert isinstance(weight, Fp8Weight)
    return _pack_block_scale(weight, layout, slots, rows)


def pack_global_scale(weight: Nvfp4Weight) -> np.ndarray:
    """The global scale, `[]` or `[E]`.

    Raises:
        NonFiniteError: If it is not finite and positive.
    """
    value = np.asarray(weight.global_scale)
    bad = ~(np.isfinite(value) & (value > 0))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise NonFiniteError(
            f"`global_scale` must be finite and positive; got {value[at]} at {at}."
        )
    return value


def _pack_columns(
    part: Any,
    layout: SlotLayout,
    per_element: int,
    slots: slice,
    rows: slice,
    name: str | None,
) -> np.ndarray:
    """`[S, N, K_slot / per_element]` of a part with `per_element` columns an element.

    Reads at most `CHUNK_BYTES` at a time straight into the placed buffer.
    """
    dtype, n = np.dtype(part.dtype), part.shape[0]
    height = rows.stop - rows.start
    width = layout.width // per_element
    out = _aligned_zeros((slots.stop - slots.start, height, width), dtype)
    for slot in range(slots.start, slots.stop):
        start, stop = (-(-b // per_element) for b in layout.bounds(slot))
        if start == stop:
            continue
        step = max(1, CHUNK_BYTES // ((stop - start) * dtype.itemsize))
        for top in range(rows.start, min(rows.stop, n), step):
            bottom = min(top + step, rows.stop, n)
            read = np.asarray(part[top:bottom, start:stop])
            if name is not None:
                _check_codes(name, read, top, start)
            target = out[slot - slots.start, top - rows.start : bottom - rows.start]
            target[:, : stop - start] = read
    return out


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros on a 64-byte boundary, which a CPU device takes without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.zeros(size + 64, np.uint8)
    offset = -buffer.ctypes.data % 64
    return buffer[offset : offset + size].view(dtype).reshape(shape)


def _check_codes(name: str, read: np.ndarray, top: int, left: int) -> None:
    """Refuses E4M3 NaN codes; in a scale, negative ones too."""
    bits = read.view(np.uint8)
    bad = (bits & 0x7F) == 0x7F
    if name == "scale":
        bad |= bits > 0x80
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise NonFiniteError(
            f"`{name}` holds {read[row, column]} (byte 0x{bits[row, column]:02x}) at "
            f"{(top + row, left + column)}; codes must be numbers and scales must be "
            "numbers that are not negative."
        )


def _pack_block_scale(
    weight: Fp8Weight, layout: SlotLayout, slots: slice, rows: slice
) -> np.ndarray:
    (n, k), (bn, bk) = weight.shape, weight.block_shape
    segments = layout.max_segments(bk)
    stop = min(rows.stop, n)
    shape = (slots.stop - slots.start, segments, rows.stop - rows.start)
    out = _aligned_zeros(shape, np.dtype(np.float32))
    if rows.start >= stop:
        return out
    top = rows.start // bn
    scale = np.asarray(weight.scale[top : -(-stop // bn), 0 : -(-k // bk)])
    bad = ~(np.isfinite(scale) & (scale >= 0))
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise NonFiniteError(
            f"`scale` must be finite and not negative; got {scale[row, column]} at "
            f"{(top + row, column)}."
        )
    block_row = np.arange(rows.start, stop) // bn - top
    for slot in range(slots.start, slots.stop):
        for j, (start, _) in enumerate(layout.segments(slot, bk)):
            line = scale[block_row, start // bk]
            out[slot - slots.start, j, : stop - rows.start] = line
    return out
