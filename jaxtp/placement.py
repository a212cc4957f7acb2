"""Host weights to devices: slot layout, shardings, and reads of single shards."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtp import packing
from jaxtp.errors import MeshError, PlanError, ShapeError
from jaxtp.plan import ReductionPlan, SlotLayout, slot_layout, slots_per_rank
from jaxtp.weights import Fp8Weight, Nvfp4Weight, Weight, validate

Parallel = Literal["row", "column", "replicated", "expert"]
PARALLEL = ("row", "column", "replicated", "expert")
TENSOR_AXIS = "tp"
EXPERT_AXIS = "ep"


def make_mesh(
    *,
    tp: int = 1,
    ep: int = 1,
    devices: Any = None,
    axis_types: AxisType = AxisType.Auto,
) -> Mesh:
    """A mesh with axis "tp", and an axis "ep" in front of it where `ep` is above 1.

    Args:
        tp: Size of the tensor-parallel axis.
        ep: Size of the expert-parallel axis.
        devices: Devices in mesh order; None takes the first `ep * tp`.
        axis_types: `AxisType.Auto` or `AxisType.Explicit` for every axis.

    Raises:
        MeshError: If a size is below 1 or there are too few devices.

    Bits:
        Results do not depend on the mesh, nor on the order of its devices.
    """
    for name, size in (("tp", tp), ("ep", ep)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MeshError(f"`{name}` must be a positive integer; got {size!r}.")
    devices = list(jax.devices()[: tp * ep] if devices is None else devices)
    if len(devices) != tp * ep:
        raise MeshError(
            f"tp={tp} and ep={ep} need {tp * ep} devices; got {len(devices)}. On CPU, "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 shows eight."
        )
    shape, names = ((tp,), (TENSOR_AXIS,))
    if ep > 1:
        shape, names = ((ep, tp), (EXPERT_AXIS, TENSOR_AXIS))
    return Mesh(
        np.array(devices).reshape(shape), names, axis_types=(axis_types,) * len(names)
    )


_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedWeight:
    """A weight on a mesh, in slot layout. A pytree: arrays are data, the rest static.

    Attributes:
        value: bf16 or e4m3 `[S, N, K_slot]`, or uint8 `[S, N, K_slot / 2]`; a bank has
            E in front. N is padded to `out_slots * N_slot` for column-parallel.
        scale: None (bf16); float32 `[S, J, N]` (e4m3, one for each segment and row);
            e4m3 `[S, N, K_slot / 16]` (NVFP4).
        global_scale: None, or float32 `[]` or `[E]` (NVFP4).
        format: "bf16", "e4m3" or "nvfp4".
        shape: Logical `(N, K)` or `(E, N, K)`.
        parallel: "row", "column", "replicated" or "expert".
        plan: The reduction plan.
        out_slots: Slots of N, for column-parallel.
        block_shape: Of the checkpoint's scale blocks (e4m3).
        global_scale_kind: "multiplier" or "divisor" (NVFP4).
        mesh: Where the arrays are.
        axis_name: The mesh axis that cuts the weight; None when replicated.
    """

    value: Any
    scale: Any = None
    global_scale: Any = None
    format: str = dataclasses.field(metadata=_STATIC)
    shape: tuple[int, ...] = dataclasses.field(metadata=_STATIC)
    parallel: Parallel = dataclasses.field(metadata=_STATIC)
    plan: ReductionPlan = dataclasses.field(metadata=_STATIC)
    out_slots: int | None = dataclasses.field(default=None, metadata=_STATIC)
    block_shape: tuple[int, int] | None = dataclasses.field(
        default=None, metadata=_STATIC
    )
    global_scale_kind: str | None = dataclasses.field(default=None, metadata=_STATIC)
    mesh: Mesh = dataclasses.field(metadata=_STATIC)
    axis_name: str | None = dataclasses.field(default=None, metadata=_STATIC)

    @property
    def layout(self) -> SlotLayout:
        """The slots of K."""
        block = None if self.block_shape is None else self.block_shape[1]
        return self.plan.layout(self.shape[-1], block)

    @property
    def out_layout(self) -> SlotLayout:
        """The slots of N, for column-parallel weights."""
        if self.out_slots is None:
            raise ShapeError("only a column-parallel weight has slots of N.")
        return slot_layout(self.shape[-2], self.out_slots)

    def specs(self) -> "PlacedWeight":
        """The same tree with a `PartitionSpec` in place of every array."""
        value, scale = _part_specs(
            self.format, self.parallel, self.axis_name, len(self.shape) == 3
        )
        return dataclasses.replace(
            self,
            value=value,
            scale=None if self.scale is None else scale,
            global_scale=None if self.global_scale is None else P(),
        )


def _part_specs(
    format: str, parallel: str, axis: str | None, is_bank: bool
) -> tuple[P, P]:
    if parallel == "replicated":
        return P(), P()
    if parallel == "expert":
        return P(axis), P(axis)
    lead = (None,) if is_bank else ()
    if parallel == "row":
        return P(*lead, axis), P(*lead, axis)
    rows_last = P(*lead, None, None, axis)
    rows_middle = P(*lead, None, axis)
    return rows_middle, rows_last if format == "e4m3" else rows_middle


def place(
    weight: Weight,
    mesh: Mesh,
    *,
    parallel: Parallel,
    plan: ReductionPlan | None = None,
    out_slots: int = 8,
    axis_name: str | None = None,
) -> PlacedWeight:
    """Puts a host weight or a lazily read checkpoint weight on a mesh, in slot layout.

    Each device's part is read by itself, and only that part.

    Args:
        weight: `[N, K]`, or a bank `[E, N, K]`.
        mesh: The mesh; `make_mesh` makes one.
        parallel: "row" cuts K by slots, "column" cuts N by output slots, "replicated"
            cuts nothing, "expert" cuts E into contiguous runs of whole experts.
        plan: How slot partials are added; None is `ReductionPlan()`.
        out_slots: Slots of N for "column". Placement only: no word depends on it.
        axis_name: The mesh axis to cut along; None is "tp" ("ep" for "expert").

    Returns:
        A frozen pytree that the projections take.

    Raises:
        PlanError: If the axis size does not divide the slots, output slots or experts.
        PlanTypeError: If the plan does not exist for the weight's format.
        MeshError: If the mesh has no such axis, or `parallel` is unknown.
        NonFiniteError: If a code or a scale is not a legal number.
        JaxtpError: If the weight's parts do not fit each other (see `validate`).

    Bits:
        BYTES: what a device holds are the checkpoint's own codes and scales.
    """
    plan = ReductionPlan() if plan is None else plan
    validate(weight)
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"`mesh` must be a jax.sharding.Mesh; got {type(mesh).__name__}. "
            "`make_mesh` makes one."
        )
    if parallel not in PARALLEL:
        raise MeshError(f"`parallel` must be one of {PARALLEL}; got {parallel!r}.")
    layout = packing.weight_layout(weight, plan)
    axis = _mesh_axis(mesh, parallel, axis_name)
    rows = _check_divides(weight, mesh, parallel, axis, layout, plan, out_slots)
    shapes = packing.part_shapes(weight, layout, rows)
    value_spec, scale_spec = _part_specs(weight.format, parallel, axis, weight.is_bank)
    lead = weight.shape[:-2]
    put = lambda shape, spec, read: jax.make_array_from_callback(
        shape, NamedSharding(mesh, spec), read
    )
    scale = global_scale = None
    value = put(
        lead + shapes.value[0],
        value_spec,
        _reader(weight, layout, packing.pack_value, lead + shapes.value[0], -3, -2),
    )
    if shapes.scale is not None:
        shape = lead + shapes.scale[0]
        rows_axis = -1 if isinstance(weight, Fp8Weight) else -2
        read = _reader(weight, layout, packing.pack_scale, shape, -3, rows_axis)
        scale = put(shape, scale_spec, read)
    if isinstance(weight, Nvfp4Weight):
        whole = packing.pack_global_scale(weight)
        global_scale = put(whole.shape, P(), lambda index: whole[index])
    return PlacedWeight(
        value=value,
        scale=scale,
        global_scale=global_scale,
        format=weight.format,
        shape=tuple(weight.shape),
        parallel=parallel,
        plan=plan,
        out_slots=out_slots if parallel == "column" else None,
        block_shape=weight.block_shape if isinstance(weight, Fp8Weight) else None,
        global_scale_kind=getattr(weight, "global_scale_kind", None),
        mesh=mesh,
        axis_name=axis,
    )


def _mesh_axis(mesh: Mesh, parallel: str, axis_name: str | None) -> str | None:
    if parallel == "replicated":
        return None
    axis = axis_name or (EXPERT_AXIS if parallel == "expert" else TENSOR_AXIS)
    if axis not in mesh.axis_names:
        raise MeshError(
            f"parallel={parallel!r} cuts along mesh axis {axis!r}; the mesh has axes "
            f"{mesh.axis_names}. Pass `axis_name`."
        )
    return axis


def _check_divides(
    weight: Weight,
    mesh: Mesh,
    parallel: str,
    axis: str | None,
    layout: SlotLayout,
    plan: ReductionPlan,
    out_slots: int,
) -> int:
    """Checks the axis against what it cuts; returns N, padded where N is cut."""
    n = weight.shape[-2]
    if axis is None:
        return n
    size = mesh.shape[axis]
    if parallel == "row":
        slots_per_rank(layout.num_slots, size)
        if plan.order == "tree" and size & (size - 1):
            raise PlanError(f"order='tree' needs a power-of-two axis; got {size}.")
    if parallel == "column":
        if isinstance(out_slots, bool) or not isinstance(out_slots, int):
            raise PlanError(f"`out_slots` must be an integer; got {out_slots!r}.")
        if out_slots < 1:
            raise PlanError(f"`out_slots` must be at least 1; got {out_slots}.")
        slots_per_rank(out_slots, size, what="output slots (`out_slots`)")
        return slot_layout(n, out_slots).padded
    if parallel == "expert":
        if not weight.is_bank:
            raise ShapeError(
                f"parallel='expert' needs a bank [E, N, K]; got shape {weight.shape}."
            )
        slots_per_rank(weight.shape[0], size, what="experts")
    return n


def _reader(
    weight: Weight,
    layout: SlotLayout,
    pack: Callable[..., np.ndarray],
    shape: tuple[int, ...],
    slot_axis: int,
    row_axis: int,
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """The callback that packs what one shard's index asks for."""

    def read(index: tuple[slice, ...]) -> np.ndarray:
        ranges = [slice(*s.indices(size)) for s, size in zip(index, shape, strict=True)]
        slots, rows = ranges[slot_axis], ranges[row_axis]
        if not weight.is_bank:
            return pack(weight, layout, slots, rows)
        experts = range(ranges[0].start, ranges[0].stop)
        parts = [pack(weight.expert(e), layout, slots, rows) for e in experts]
        return np.stack(parts)

    return read
