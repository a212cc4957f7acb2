"""Projections inside a user's own `shard_map`: one rank's part of the program."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from jaxtp import transport
from jaxtp.errors import MeshError, ShapeError, UnsupportedError
from jaxtp.placement import PlacedWeight
from jaxtp.plan import SlotLayout
from jaxtp.program import (
    Activation,
    apply_global_scale,
    check_activation_dtype,
    resolve_activation,
    slot_partials,
)
from jaxtp.reduction import Schedule, ordered_sum, sum_slots
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

    The `shard_map` needs `check_vma=False`: kernels do not state their axes.

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
    check_call(p, ("row",))
    _check_axis(p, axis_name)
    check_activation_dtype(x_local)
    slots, width = p.value.shape[0], p.layout.width
    _check_columns(x_local, (slots * width,), "this rank's slots in slot layout")
    first_slot = lax.axis_index(axis_name).astype(jnp.int32) * jnp.int32(slots)
    if p.layout.padded != p.layout.size:
        # Padding is zero whatever memory held: 0 * inf is NaN.
        column = lax.broadcasted_iota(jnp.int32, x_local.shape, 1)
        inside = column + first_slot * jnp.int32(width) < jnp.int32(p.layout.size)
        x_local = jnp.where(inside, x_local, jnp.zeros((), x_local.dtype))
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

    The `shard_map` needs `check_vma=False`: kernels do not state their axes.

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
    check_call(p, ("column",))
    _check_axis(p, axis_name)
    check_activation_dtype(x)
    y = all_slots(to_slot_layout(x, p.layout), p, activation, implementation)
    if not gather:
        return y
    n = p.shape[-2]
    return transport.ring_all_gather(y, axis_name, axis=1)[:, :n]


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


def all_slots(
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
        implementation=implementation_of(p, implementation),
    )


def implementation_of(
    p: PlacedWeight, implementation: Implementation | None
) -> Implementation:
    """The kernel form of a call, by the devices that hold the weight."""
    return resolve_implementation(implementation, p.mesh.devices.flat[0])


def check_call(p: Any, parallel: tuple[str, ...]) -> None:
    """Refuses what is not a matrix placed in one of the ways `parallel`.

    Raises:
        MeshError: If it is not placed, or placed another way.
        UnsupportedError: If it is a bank.
    """
    if not isinstance(p, PlacedWeight):
        raise MeshError(
            f"`weight` must be a placed weight; got {type(p).__name__}. Call "
            f"`jaxtp.place(weight, mesh, parallel={parallel[0]!r})` first."
        )
    if len(p.shape) == 3:
        raise UnsupportedError(
            f"projections take one matrix [N, K]; got a bank of shape {p.shape}. Place "
            "`weight.expert(e)` to project with one expert."
        )
    if p.parallel not in parallel:
        raise MeshError(
            f"this call takes weights placed with parallel={parallel[0]!r}; got "
            f"parallel={p.parallel!r}."
        )


def _check_axis(p: PlacedWeight, axis_name: str) -> None:
    """Refuses an axis that is not bound here, or that does not cut the weight."""
    transport.axis_size(axis_name)
    if axis_name != p.axis_name:
        raise MeshError(
            f"`axis_name` must be {p.axis_name!r}, the axis that cuts the weight; got "
            f"{axis_name!r}."
        )


def _check_columns(x: Array, columns: tuple[int, ...], what: str) -> None:
    if x.ndim != 2 or x.shape[1] not in columns:
        raise ShapeError(
            f"`x` must be [T, {' or '.join(map(str, dict.fromkeys(columns)))}] ({what})"
            f"; got shape {x.shape}."
        )
