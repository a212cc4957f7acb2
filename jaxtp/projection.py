"""Column-parallel, row-parallel and unsharded projections: one program, three cuts.

These take whole arrays; `local_projection` has the forms for a user's own `shard_map`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32

from jaxtp.errors import PlanError
from jaxtp.gradient import input_gradient, with_input_gradient
from jaxtp.local_projection import (
    all_slots,
    check_call,
    column_parallel_local,
    implementation_of,
    row_parallel_local,
    to_slot_layout,
)
from jaxtp.on_mesh import on_mesh, refuse_explicit_axes, spread_on
from jaxtp.placement import PlacedWeight
from jaxtp.plan import ReductionPlan
from jaxtp.program import (
    Activation,
    apply_global_scale,
    check_activation_dtype,
    resolve_activation,
)
from jaxtp.reduction import Schedule, check_schedule, ordered_sum
from jaxtp.unplaced import unplaced
from jaxtp.weights import Weight
from pallas_kernels import Implementation


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
    check_call(weight, ("row",))
    check_schedule(schedule, weight.plan)
    x = spread_on(x, weight)
    return _row_parallel(
        x,
        weight,
        activation=resolve_activation(weight.format, activation, x.dtype),
        reduce=reduce,
        schedule=schedule,
        implementation=implementation_of(weight, implementation),
    )


@functools.partial(
    jax.jit, static_argnames=("activation", "reduce", "schedule", "implementation")
)
def _row_parallel(x: Array, p: PlacedWeight, *, reduce: bool, **options: Any) -> Array:
    axis = str(p.axis_name)

    def local(x: Array, p: PlacedWeight) -> Array:
        return row_parallel_local(x, p, axis_name=axis, reduce=reduce, **options)

    def forward(x: Array, p: PlacedWeight) -> Array:
        x = to_slot_layout(x, p.layout)
        out = P() if reduce else P(axis)
        return on_mesh(local, x, p, P(None, axis), out)

    def local_gradient(dy: Array, p: PlacedWeight) -> Array:
        slots = jnp.int32(p.value.shape[0])
        return input_gradient(dy, p, lax.axis_index(axis).astype(jnp.int32) * slots)

    def backward(dy: Array, p: PlacedWeight) -> Array:
        dy = apply_global_scale(dy, p.global_scale, p.global_scale_kind)
        return on_mesh(local_gradient, dy, p, P(), P(None, axis))[:, :columns]

    columns = x.shape[-1]
    return with_input_gradient(forward, backward if reduce else None)(x, p)


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
    check_call(weight, ("column",))
    x = spread_on(x, weight)
    return _column_parallel(
        x,
        weight,
        activation=resolve_activation(weight.format, activation, x.dtype),
        gather=gather,
        implementation=implementation_of(weight, implementation),
    )


@functools.partial(jax.jit, static_argnames=("activation", "gather", "implementation"))
def _column_parallel(
    x: Array, p: PlacedWeight, *, gather: bool, **options: Any
) -> Array:
    axis = str(p.axis_name)

    def local(x: Array, p: PlacedWeight) -> Array:
        return column_parallel_local(x, p, axis_name=axis, gather=gather, **options)

    def forward(x: Array, p: PlacedWeight) -> Array:
        return on_mesh(local, x, p, P(), P() if gather else P(None, axis))

    def local_gradient(dy: Array, p: PlacedWeight) -> Array:
        dx = input_gradient(dy, p, jnp.int32(0))[None]
        ranks = ReductionPlan(lax.axis_size(axis))
        return ordered_sum(dx, axis, ranks)

    def backward(dy: Array, p: PlacedWeight) -> Array:
        dy = apply_global_scale(dy, p.global_scale, p.global_scale_kind)
        dy = to_slot_layout(dy, p.out_layout)
        return on_mesh(local_gradient, dy, p, P(None, axis), P())[:, :columns]

    columns = x.shape[-1]
    return with_input_gradient(forward, backward if gather else None)(x, p)


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
        JaxtpError: As `row_parallel`; also `PlanError` if a plan is given for a placed
            weight that has another, and `MeshError` if `x` is on Explicit mesh axes
            and the weight is not placed.

    Bits:
        As `row_parallel`.
    """
    if isinstance(weight, PlacedWeight):
        check_call(weight, ("replicated",))
        if plan is not None and plan != weight.plan:
            raise PlanError(
                f"the placed weight has {weight.plan}; got plan={plan}. Leave `plan` "
                "out, or place the weight under that plan."
            )
        x = spread_on(x, weight)
        placed = weight
    else:
        check_activation_dtype(x)
        placed = unplaced(weight, ReductionPlan() if plan is None else plan)
        check_call(placed, ("replicated",))
        x = jnp.asarray(x)
        refuse_explicit_axes(x)
    return _project(
        x,
        placed,
        activation=resolve_activation(placed.format, activation, x.dtype),
        implementation=implementation_of(placed, implementation),
    )


@functools.partial(jax.jit, static_argnames=("activation", "implementation"))
def _project(x: Array, p: PlacedWeight, **options: Any) -> Array:
    def local(x: Array, p: PlacedWeight) -> Array:
        return all_slots(to_slot_layout(x, p.layout), p, **options)

    def local_gradient(dy: Array, p: PlacedWeight) -> Array:
        return input_gradient(dy, p, jnp.int32(0))

    def spread(run: Callable[..., Array], x: Array, p: PlacedWeight) -> Array:
        if p.mesh.size > 1 or AxisType.Explicit in p.mesh.axis_types:
            return on_mesh(run, x, p, P(), P())
        return run(x, p)

    def backward(dy: Array, p: PlacedWeight) -> Array:
        dy = apply_global_scale(dy, p.global_scale, p.global_scale_kind)
        return spread(local_gradient, dy, p)[:, :columns]

    columns = x.shape[-1]
    return with_input_gradient(lambda x, p: spread(local, x, p), backward)(x, p)
