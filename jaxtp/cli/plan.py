"""What a placement would cost, from a checkpoint's headers alone."""

import dataclasses
import math
from collections.abc import Iterable

from jaxtp import packing
from jaxtp.checkpoint import Checkpoint, Row
from jaxtp.cli.roles import stays_whole
from jaxtp.errors import JaxtpError
from jaxtp.plan import ReductionPlan, SlotLayout, slot_layout, slots_per_rank
from jaxtp.weights import Fp8Weight, Nvfp4Weight, Weight

NVFP4_BLOCK = (1, 16)
"""Rows and columns that share one NVFP4 scale."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one weight would be cut.

    Attributes:
        row_bytes: Bytes a device under `parallel="row"`, padding included.
        column_bytes: The same under `parallel="column"`.
        expert_bytes: The same under `parallel="expert"`; None if it is no bank or the
            experts cannot be divided.
        slot_width: Columns of a slot.
        segments: The most segments in a slot; None without two-dimensional blocks.
        row_split: Scale-block columns that lie on two ranks, and all of them; None
            without scales.
        column_split: The same for scale-block rows.
    """

    row_bytes: int
    column_bytes: int
    expert_bytes: int | None
    slot_width: int
    segments: int | None
    row_split: tuple[int, int] | None
    column_split: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Line:
    """One tensor of the checkpoint.

    Attributes:
        row: What the checkpoint's report says of it.
        cut: How it would be cut; None if every device holds it whole.
        problem: Why it cannot be placed.
    """

    row: Row
    cut: Cut | None = None
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Forecast:
    """All tensors under one mesh size and plan."""

    tp: int
    plan: ReductionPlan
    out_slots: int
    lines: tuple[Line, ...]

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Those that are cut."""
        return tuple(line.cut for line in self.lines if line.cut)

    @property
    def whole_bytes(self) -> int:
        """Bytes that every device holds."""
        return sum(line.row.nbytes for line in self.lines if not line.cut)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why tensors cannot be placed."""
        return tuple(line.problem for line in self.lines if line.problem)


def forecast(
    ckpt: Checkpoint, *, tp: int, plan: ReductionPlan, out_slots: int = 8
) -> Forecast:
    """The bytes a device of every tensor of a checkpoint; reads no tensor data.

    Args:
        ckpt: An open checkpoint.
        tp: Size of the mesh axis.
        plan: The reduction plan, with a number of slots.
        out_slots: Slots of N for column-parallel placement.

    Raises:
        PlanError: If `tp` does not divide the slots or the output slots.
    """
    if plan.num_slots != "blocks":
        slots_per_rank(plan.num_slots, tp)
    slots_per_rank(out_slots, tp, what="output slots (`out_slots`)")
    lines = [_line(ckpt, row, tp, plan, out_slots) for row in ckpt.report().rows]
    return Forecast(tp, plan, out_slots, tuple(lines))


def _line(
    ckpt: Checkpoint, row: Row, tp: int, plan: ReductionPlan, out_slots: int
) -> Line:
    if row.problem:
        return Line(row, problem=str(row.problem))
    if not _is_cut(row):
        return Line(row)
    try:
        return Line(row, _cut(ckpt.weight(row.name), tp, plan, out_slots))
    except JaxtpError as error:
        return Line(row, problem=f"{type(error).__name__}: {row.name}: {error}")


def _is_cut(row: Row) -> bool:
    is_matrix = len(row.shape) in (2, 3) and row.name.endswith(".weight")
    is_weight = row.format in ("bf16", "e4m3", "nvfp4")
    return is_matrix and is_weight and not stays_whole(row.name)


def _cut(weight: Weight, tp: int, plan: ReductionPlan, out_slots: int) -> Cut:
    *lead, n, k = weight.shape
    layout, out = packing.weight_layout(weight, plan), slot_layout(n, out_slots)
    slots_per_rank(layout.num_slots, tp)
    block = _block(weight)
    experts = math.prod(lead)
    scalars = 4 * experts if isinstance(weight, Nvfp4Weight) else 0
    row_bytes = experts * _matrix_bytes(weight, layout, n)
    column_bytes = experts * _matrix_bytes(weight, layout, out.padded)
    whole_experts = lead and experts % tp == 0
    return Cut(
        row_bytes=row_bytes // tp + scalars,
        column_bytes=column_bytes // tp + scalars,
        expert_bytes=row_bytes // tp + scalars if whole_experts else None,
        slot_width=layout.width,
        segments=layout.max_segments(weight.block_shape[1])
        if isinstance(weight, Fp8Weight)
        else None,
        row_split=_split_blocks(layout, k, block[1], tp) if block else None,
        column_split=_split_blocks(out, n, block[0], tp) if block else None,
    )


def _block(weight: Weight) -> tuple[int, int] | None:
    if isinstance(weight, Fp8Weight):
        return weight.block_shape
    return NVFP4_BLOCK if isinstance(weight, Nvfp4Weight) else None


def _matrix_bytes(weight: Weight, layout: SlotLayout, rows: int) -> int:
    """Bytes of one matrix in slot layout on all devices together."""
    shapes = packing.part_shapes(weight, layout, rows)
    parts = [part for part in (shapes.value, shapes.scale) if part]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)


def _split_blocks(
    layout: SlotLayout, size: int, block: int, tp: int
) -> tuple[int, int]:
    """How many scale blocks along an axis have elements on two ranks, and of how many.

    Args:
        layout: The slots of the axis.
        size: Its length.
        block: Elements of a scale block along it.
        tp: Number of ranks.
    """
    per_rank = layout.padded // tp
    borders = [r * per_rank for r in range(1, tp) if r * per_rank < size]
    split = {border // block for border in borders if border % block}
    return len(split), -(-size // block)


def same_but_numbers(lines: Iterable[Line]) -> list[tuple[str, list[Line]]]:
    """Groups tensors that differ in the numbers of their names alone.

    `model.layers.0.mlp.down_proj.weight` and its likes of other layers become
    `model.layers.*.mlp.down_proj.weight`, if format and shape agree.
    """
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        name = ".".join(
            "*" if part.isdecimal() else part for part in line.row.name.split(".")
        )
        key = (name, line.row.format, line.row.shape, line.cut, line.problem is None)
        groups.setdefault(key, []).append(line)
    return [
        (str(key[0]) if len(members) > 1 else members[0].row.name, members)
        for key, members in groups.items()
    ]
