"""Reduction plans and slot arithmetic: pure integers, no arrays.

K is cut into `num_slots` contiguous slots by one rule for every format, so that the
cut depends on the global matrix alone. Ranks hold whole slots.
"""

import dataclasses
import itertools
from typing import Literal

from jaxtp.errors import PlanError, PlanTypeError

Order = Literal["sequential", "tree"]

SLOT_QUANTUM = 32
"""Slots and segments start on multiples of this many columns."""


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """The cut of one axis of length `size` into `num_slots` slots of `width`.

    Slot g holds `[min(g * width, size), min((g + 1) * width, size))`: padding stands
    only at the end of the axis, and trailing slots may be empty.
    """

    size: int
    num_slots: int
    width: int

    @property
    def padded(self) -> int:
        """Length of the axis in slot layout, `num_slots * width`."""
        return self.num_slots * self.width

    def bounds(self, slot: int) -> tuple[int, int]:
        """First column of a slot and the column after its last, in global columns."""
        if not 0 <= slot < self.num_slots:
            raise PlanError(f"slot must lie in [0, {self.num_slots}); got {slot}.")
        start = min(slot * self.width, self.size)
        return start, min(start + self.width, self.size)

    def segments(self, slot: int, block: int) -> tuple[tuple[int, int], ...]:
        """Maximal runs of one slot's columns inside one scale block of `block` columns.

        Bounds are global columns. Segments ascend; padding never opens one.
        """
        start, stop = self.bounds(slot)
        cuts = [start, *range((start // block + 1) * block, stop, block), stop]
        return tuple((a, b) for a, b in itertools.pairwise(cuts) if a < b)

    def max_segments(self, block: int) -> int:
        """The largest number of segments in any slot, at least 1."""
        counts = (len(self.segments(g, block)) for g in range(self.num_slots))
        return max(1, *counts)


def slot_layout(size: int, num_slots: int) -> SlotLayout:
    """Cuts an axis by the common rule: `width = 32 * ceil(size / (32 * num_slots))`."""
    if size < 1:
        raise PlanError(f"an axis must have at least one element; got {size}.")
    if isinstance(num_slots, bool) or not isinstance(num_slots, int) or num_slots < 1:
        raise PlanError(f"slots must be a positive integer; got {num_slots!r}.")
    width = SLOT_QUANTUM * -(-size // (SLOT_QUANTUM * num_slots))
    return SlotLayout(size, num_slots, width)


@dataclasses.dataclass(frozen=True)
class ReductionPlan:
    """How the slot partials of a projection become one float32 result.

    `"sequential"` computes `acc = +0; acc = acc + p_0; ...; acc = acc + p_{S-1}`,
    always S adds, at every mesh size. `"tree"` (S a power of two) adds adjacent pairs,
    then pairs of pairs; it has no initial +0.

    Attributes:
        num_slots: S, or `"blocks"`: one slot for each scale block along K (E4M3
            weights, sequential only).
        order: `"sequential"` or `"tree"`.

    Raises:
        PlanError: If a field is not one of the values above.

    Bits:
        Two calls with equal plans over the same global operands give equal words on
        every mesh whose size divides S. Two different plans are two programs.
    """

    num_slots: int | Literal["blocks"] = 8
    order: Order = "sequential"

    def __post_init__(self) -> None:
        slots, order = self.num_slots, self.order
        if order not in ("sequential", "tree"):
            raise PlanError(f"`order` must be 'sequential' or 'tree'; got {order!r}.")
        if slots == "blocks":
            if order != "sequential":
                raise PlanError(
                    "num_slots='blocks' has order 'sequential' only; got "
                    f"order={order!r}."
                )
            return
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise PlanError(
                f"`num_slots` must be a positive integer or 'blocks'; got {slots!r}."
            )
        if order == "tree" and slots & (slots - 1):
            raise PlanError(
                "order='tree' needs a power of two of slots; got "
                f"num_slots={slots}. Use order='sequential'."
            )

    def layout(self, k: int, block_k: int | None = None) -> SlotLayout:
        """The slots of a weight with K = `k` input features.

        Args:
            k: Number of input features.
            block_k: Columns of a scale block; None for weights without 2-D blocks.

        Raises:
            PlanTypeError: If the plan is `"blocks"` and the weight has no scale blocks.
        """
        if self.num_slots != "blocks":
            return slot_layout(k, self.num_slots)
        if block_k is None:
            raise PlanTypeError(
                "num_slots='blocks' exists for E4M3 block-scaled weights only; give "
                "`num_slots` a number for bf16 and NVFP4 weights."
            )
        return SlotLayout(k, -(-k // block_k), block_k)


def slots_per_rank(num_slots: int, axis_size: int, *, what: str = "slots") -> int:
    """Slots that each rank of an axis holds.

    Raises:
        PlanError: If the axis size does not divide the slots.
    """
    if axis_size < 1 or num_slots % axis_size:
        legal = [n for n in range(1, num_slots + 1) if num_slots % n == 0]
        raise PlanError(
            f"the mesh axis must divide the {num_slots} {what}; got axis size "
            f"{axis_size}. Axis sizes that work: {legal}."
        )
    return num_slots // axis_size
