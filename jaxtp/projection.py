"""Column-parallel, row-parallel and unsharded projections: one program, three cuts.

`*_local` functions run inside a user's own `shard_map`; the others take whole arrays.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32

from jaxtp import transport
from jaxtp.errors import MeshError, ShapeError, UnsupportedError
from jaxtp.placement import PlacedWeight
from jaxtp.plan import ReductionPlan, SlotLayout
from jaxtp.program import (
    Activation,
    apply_global_scale,
    resolve_activation,
    slot_partials,
)
from jaxtp.reduction import Schedule, ordered_sum, sum_slots
from jaxtp.unplaced import unplaced
from jaxtp.weights import Weight
from pallas_kernels import Implementation, resolve_implementation


def row_parallel_local(
    x_local: Array,
    weight_local: PlacedWeight,
    *,
    axis_name: str,
    activation: Activation | None = None,
    reduce: bool = True,
    schedule: Schedule | None = None,
    implementation: Implementation | None = None,
) -> Float32[Array, "..."]:
    """`y = x @ w.T` inside a `shard_map` whose axis `axis_name` cuts K.

    Args:
        x_local: bf16 or f32 `[T, S/tp * K_slot]`: this rank's slots in slot layout.
        weight_local: This rank's shard of a row-parallel weight (pass it through
            `shard_map` with `in_specs=weight.specs()`).
        axis_name: The mesh axis.
        activation: See `row_parallel`.
        reduce: Whether to add the slots.
        schedule: How the sequential sum travels; see `ordered_sum`.
        implementation: "mosaic", "portable" or None.

    Returns:
        f32 `[T, N]`, equal on every rank; or with `reduce=False` this rank's partials
        `[S/tp, T, N]`, without the global scale.

    Raises:
        JaxtpError: As `row_parallel`.

    Bits:
        As `row_parallel`.
    """
    p = weight_local
    _check_call(p, ("row",))
    slots, width = p.value.shape[0], p.layout.width
    _check_columns(x_local, (slots * width,), "this rank's slots in slot layout")
    first_slot = lax.axis_index(axis_name).astype(jnp.int32) * jnp.int32(slots)
    partials = _partials(x_local, p, first_slot, activation, implementation)
    if not reduce:
        return partials
    y = ordered_sum(partials, axis_name, p.plan, schedule=schedule)
    return apply_global_scale(y, p.global_scale, p.global_scale_kind)


def column_parallel_local(
    x: Array,
    weight_local: PlacedWeight,
    *,
    axis_name: str,
    activation: Activation | None = None,
    gather: bool = True,
    implementation: Implementation | None = None,
) -> Float32[Array, "T N"]:
    """`y = x @ w.T` inside a `shard_map` whose axis `axis_name` cuts N.

    Args:
        x: bf16 or f32 `[T, K]`, equal on every rank.
        weight_local: This rank's shard of a column-parallel weight.
        axis_name: The mesh axis.
        activation: See `row_parallel`.
        gather: Whether every rank gets the whole result.
        implementation: "mosaic", "portable" or None.

    Returns:
        f32 `[T, N]` on every rank, or with `gather=False` this rank's
        `[T, out_slots/tp * N_slot]` of the slot layout, zero where it is padding.

    Raises:
        JaxtpError: As `column_parallel`.

    Bits:
        As `column_parallel`.
    """
    p = weight_local
    _check_call(p, ("column",))
    y = _all_slots(to_slot_layout(x, p.layout), p, activation, implementation)
    if not gather:
        return y
    n = p.shape[-2]
    return transport.ring_all_gather(y, axis_name, axis=1)[:, :n]


def row_parallel(
    x: Any,
    weight: PlacedWeight,
    *,
    activation: Activation | None = None,
    reduce: bool = True,
    schedule: Schedule | None = None,
    implementation: Implementation | None = None,
) -> Float32[Array, "..."]:
    """`y[t, n] = sum_k x[t, k] * w[n, k]` with K cut over the mesh.

    Args:
        x: bf16 or f32 `[T, K]`, or `[T, S * K_slot]` in slot layout (what
            `column_parallel(gather=False)` returns for equal slots).
        weight: Placed with `parallel="row"`.
        activation: "bf16" (refuses f32 `x`), "f32", "e4m3" or "int8", as the format
            has it; may be left out for bf16 weights only, and then follows `x.dtype`.
        reduce: Whether to add the slots.
        schedule: How the sequential sum travels ("exchange" or "chain"); moves bytes
            only.
        implementation: "mosaic", "portable", or None for the device's default.

    Returns:
        f32 `[T, N]`, replicated; or with `reduce=False` the partials `[S, T, N]`,
        sharded over their first axis, without the global scale.

    Raises:
        ShapeError: If `x` does not fit the weight.
        DtypeError: If `x` is neither bf16 nor f32, or is f32 under "bf16".
        ActivationError: If the mode does not exist for the format.
        MeshError: If the weight was not placed with `parallel="row"`.
        NotImplementedError: If the implementation cannot run on the mesh.

    Bits:
        DOT (ORDERED for NVFP4 "int8"): equal to `project`, to `column_parallel` and to
        `oracle.row_parallel` under the same plan and implementation, for every mesh
        whose size divides the slots, every T and row position, eager or under `jit`.
    """
    _check_call(weight, ("row",))
    x = _spread(x, weight.mesh)
    return _row_parallel(
        x,
        weight,
        activation=resolve_activation(weight.format, activation, x.dtype),
        reduce=reduce,
        schedule=schedule,
        implementation=_implementation(weight, implementation),
    )


@functools.partial(
    jax.jit, static_argnames=("activation", "reduce", "schedule", "implementation")
)
def _row_parallel(x: Array, p: PlacedWeight, *, reduce: bool, **options: Any) -> Array:
    axis = p.axis_name
    body = functools.partial(
        row_parallel_local, axis_name=str(axis), reduce=reduce, **options
    )
    x = _constrain(to_slot_layout(x, p.layout), p.mesh, P(None, axis))
    # check_vma=False: the kernel's interpreter carries do not state their axes.
    return jax.shard_map(
        body,
        mesh=p.mesh,
        in_specs=(P(None, axis), p.specs()),
        out_specs=P() if reduce else P(axis),
        check_vma=False,
    )(x, p)


def column_parallel(
    x: Any,
    weight: PlacedWeight,
    *,
    activation: Activation | None = None,
    gather: bool = True,
    implementation: Implementation | None = None,
) -> Float32[Array, "T N"]:
    """`y[t, n] = sum_k x[t, k] * w[n, k]` with N cut over the mesh.

    Args:
        x: bf16 or f32 `[T, K]` (or slot layout `[T, S * K_slot]`).
        weight: Placed with `parallel="column"`.
        activation: See `row_parallel`.
        gather: Whether to return the whole result on every device.
        implementation: "mosaic", "portable", or None for the device's default.

    Returns:
        f32 `[T, N]` replicated; or with `gather=False` `[T, out_slots * N_slot]` in
        slot layout, sharded over its last axis, zero where it is padding.

    Raises:
        JaxtpError: As `row_parallel`.

    Bits:
        As `row_parallel`; `out_slots` is placement only.
    """
    _check_call(weight, ("column",))
    x = _spread(x, weight.mesh)
    return _column_parallel(
        x,
        weight,
        activation=resolve_activation(weight.format, activation, x.dtype),
        gather=gather,
        implementation=_implementation(weight, implementation),
    )


@functools.partial(jax.jit, static_argnames=("activation", "gather", "implementation"))
def _column_parallel(
    x: Array, p: PlacedWeight, *, gather: bool, **options: Any
) -> Array:
    axis = p.axis_name
    body = functools.partial(
        column_parallel_local, axis_name=str(axis), gather=gather, **options
    )
    return jax.shard_map(
        body,
        mesh=p.mesh,
        in_specs=(P(), p.specs()),
        out_specs=P() if gather else P(None, axis),
        check_vma=False,
    )(_constrain(x, p.mesh, P()), p)


def project(
    x: Any,
    weight: Weight | PlacedWeight,
    *,
    plan: ReductionPlan | None = None,
    activation: Activation | None = None,
    implementation: Implementation | None = None,
) -> Float32[Array, "T N"]:
    """`y[t, n] = sum_k x[t, k] * w[n, k]` on one device, or replicated on a mesh.

    Args:
        x: bf16 or f32 `[T, K]`.
        weight: A weight `[N, K]`, or one placed with `parallel="replicated"`.
        plan: How slot partials are added; None is `ReductionPlan()`. A placed weight
            has its own.
        activation: See `row_parallel`.
        implementation: "mosaic", "portable", or None for the device's default.

    Returns:
        f32 `[T, N]`.

    Raises:
        JaxtpError: As `row_parallel`; also `MeshError` if a plan is given for a placed
            weight that has another.

    Bits:
        As `row_parallel`.
    """
    if isinstance(weight, PlacedWeight):
        _check_call(weight, ("replicated",))
        if plan is not None and plan != weight.plan:
            raise MeshError(
                f"the placed weight has {weight.plan}; got plan={plan}. Leave `plan` "
                "out, or place the weight under that plan."
            )
        x = _spread(x, weight.mesh)
        placed = weight
    else:
        placed = unplaced(weight, ReductionPlan() if plan is None else plan)
        _check_call(placed, ("replicated",))
        x = jnp.asarray(x)
    return _project(
        x,
        placed,
        activation=resolve_activation(placed.format, activation, x.dtype),
        implementation=_implementation(placed, implementation),
    )


@functools.partial(jax.jit, static_argnames=("activation", "implementation"))
def _project(x: Array, p: PlacedWeight, **options: Any) -> Array:
    def body(x: Array, p: PlacedWeight) -> Array:
        return _all_slots(to_slot_layout(x, p.layout), p, **options)

    if p.mesh.size == 1:
        return body(x, p)
    return jax.shard_map(
        body, mesh=p.mesh, in_specs=(P(), p.specs()), out_specs=P(), check_vma=False
    )(_constrain(x, p.mesh, P()), p)


def to_slot_layout(x: Array, layout: SlotLayout) -> Array:
    """`[T, K]` to `[T, S * K_slot]`, zero past K.

    An array that is in slot layout already keeps its columns; those past K become zero.

    Raises:
        ShapeError: If `x` is not 2-D, or has neither number of columns.
    """
    k, padded = layout.size, layout.padded
    _check_columns(x, (k, padded), "K, or K in slot layout")
    if padded == k:
        return x
    if x.shape[1] == k:
        return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, padded - k, 0)))
    inside = lax.broadcasted_iota(jnp.int32, x.shape, 1) < jnp.int32(k)
    return jnp.where(inside, x, jnp.zeros((), x.dtype))


def _all_slots(
    x: Array,
    p: PlacedWeight,
    activation: Activation | None,
    implementation: Implementation | None,
) -> Array:
    """All slots of a weight that this rank holds whole, added in plan order."""
    partials = _partials(x, p, jnp.int32(0), activation, implementation)
    y = sum_slots(partials, p.plan)
    return apply_global_scale(y, p.global_scale, p.global_scale_kind)


def _partials(
    x: Array,
    p: PlacedWeight,
    first_slot: Array,
    activation: Activation | None,
    implementation: Implementation | None,
) -> Array:
    return slot_partials(
        x,
        p.value,
        p.scale,
        first_slot,
        format=p.format,
        activation=resolve_activation(p.format, activation, x.dtype),
        block_k=None if p.block_shape is None else p.block_shape[1],
        implementation=_implementation(p, implementation),
    )


def _implementation(
    p: PlacedWeight, implementation: Implementation | None
) -> Implementation:
    return resolve_implementation(implementation, p.mesh.devices.flat[0])


def _check_call(p: Any, parallel: tuple[str, ...]) -> None:
    if not isinstance(p, PlacedWeight):
        raise MeshError(
            f"`weight` must be a placed weight; got {type(p).__name__}. Call "
            f"`jaxtp.place(weight, mesh, parallel={parallel[0]!r})` first."
        )
    if p.parallel not in parallel:
        raise MeshError(
            f"this call takes weights placed with parallel={parallel[0]!r}; got "
            f"parallel={p.parallel!r}."
        )
    if len(p.shape) == 3:
        raise UnsupportedError(
            f"projections take one matrix [N, K]; got a bank of shape {p.shape}. Place "
            "`weight.expert(e)` to project with one expert."
        )


def _check_columns(x: Array, columns: tuple[int, ...], what: str) -> None:
    if x.ndim != 2 or x.shape[1] not in columns:
        raise ShapeError(
            f"`x` must be [T, {' or '.join(map(str, dict.fromkeys(columns)))}] ({what})"
            f"; got shape {x.shape}."
        )


def _spread(x: Any, mesh: Mesh) -> Array:
    """Puts an array that is not on the mesh onto all its devices, replicated."""
    if isinstance(x, jax.core.Tracer):
        return x
    if isinstance(x, jax.Array) and x.sharding.device_set == set(mesh.devices.flat):
        return x
    return jax.device_put(x, NamedSharding(mesh, P()))


def _constrain(x: Array, mesh: Mesh, spec: P) -> Array:
    """States the sharding of a traced array, for Auto and Explicit mesh axes alike."""
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
