"""Rank-local kernels run one rank after another; transport and sums in NumPy."""

import functools
from typing import Any

import jax
import numpy as np

from jaxtp import packing, program
from jaxtp.errors import ShapeError, UnsupportedError
from jaxtp.plan import ReductionPlan, SlotLayout, slot_layout, slots_per_rank
from jaxtp.program import Activation
from jaxtp.weights import Fp8Weight, Nvfp4Weight, Weight, validate
from pallas_kernels import Implementation, resolve_implementation


def row_parallel(
    x: Any,
    weight: Weight,
    *,
    tp: int = 1,
    plan: ReductionPlan | None = None,
    activation: Activation | None = None,
    reduce: bool = True,
    implementation: Implementation | None = None,
    device: Any = None,
) -> np.ndarray:
    """What `jaxtp.row_parallel` must return, word for word.

    Each of `tp` ranks computes the partials of its own slots on `device`, one rank
    after another; NumPy collects them and adds them in plan order.

    Args:
        x: bf16 or f32 `[T, K]`.
        weight: `[N, K]`.
        tp: Number of ranks.
        plan: How slot partials are added; None is `ReductionPlan()`.
        activation: As in `jaxtp.row_parallel`.
        reduce: Whether to add the slots and apply the global scale.
        implementation: "mosaic", "portable", or None for the device's default.
        device: Where the kernels run; None is the first device.

    Returns:
        f32 `[T, N]`, or the partials `[S, T, N]`.

    Raises:
        PlanError: If `tp` does not divide the slots.
        JaxtpError: As `jaxtp.row_parallel`.

    Bits:
        DOT: the kernels are the device's own; everything after them is IEEE NumPy.
    """
    plan = ReductionPlan() if plan is None else plan
    _check_matrix(weight)
    layout = packing.weight_layout(weight, plan)
    local = slots_per_rank(layout.num_slots, tp)
    run = functools.partial(
        slot_partials,
        x,
        weight,
        layout,
        rows=slice(0, weight.shape[0]),
        activation=activation,
        implementation=implementation,
        device=device,
    )
    ranks = [run(slots=slice(r * local, (r + 1) * local)) for r in range(tp)]
    partials = np.concatenate(ranks)
    if not reduce:
        return partials
    return _global_scale(sum_slots(partials, plan), weight)


def column_parallel(
    x: Any,
    weight: Weight,
    *,
    tp: int = 1,
    plan: ReductionPlan | None = None,
    activation: Activation | None = None,
    out_slots: int = 8,
    gather: bool = True,
    implementation: Implementation | None = None,
    device: Any = None,
) -> np.ndarray:
    """What `jaxtp.column_parallel` must return, word for word.

    Args:
        x: bf16 or f32 `[T, K]`.
        weight: `[N, K]`.
        tp: Number of ranks.
        plan: How slot partials are added; None is `ReductionPlan()`.
        activation: As in `jaxtp.column_parallel`.
        out_slots: Slots of N.
        gather: Whether to crop the slot layout `[T, out_slots * N_slot]` to `[T, N]`.
        implementation: "mosaic", "portable", or None for the device's default.
        device: Where the kernels run; None is the first device.

    Raises:
        PlanError: If `tp` does not divide `out_slots`.

    Bits:
        As `row_parallel`.
    """
    plan = ReductionPlan() if plan is None else plan
    _check_matrix(weight)
    out = slot_layout(weight.shape[0], out_slots)
    local = slots_per_rank(out_slots, tp, what="output slots") * out.width
    layout = packing.weight_layout(weight, plan)
    ranks = []
    for rank in range(tp):
        partials = slot_partials(
            x,
            weight,
            layout,
            slots=slice(0, layout.num_slots),
            rows=slice(rank * local, (rank + 1) * local),
            activation=activation,
            implementation=implementation,
            device=device,
        )
        ranks.append(_global_scale(sum_slots(partials, plan), weight))
    y = np.concatenate(ranks, axis=1)
    return y[:, : weight.shape[0]] if gather else y


def project(x: Any, weight: Weight, **options: Any) -> np.ndarray:
    """What `jaxtp.project` must return: `row_parallel` on one rank.

    Args:
        x: bf16 or f32 `[T, K]`.
        weight: `[N, K]`.
        **options: `plan`, `activation`, `implementation`, `device`.

    Bits:
        As `row_parallel`.
    """
    return row_parallel(x, weight, tp=1, **options)


def slot_partials(
    x: Any,
    weight: Weight,
    layout: SlotLayout,
    *,
    slots: slice,
    rows: slice,
    activation: Activation | None,
    implementation: Implementation | None = None,
    device: Any = None,
) -> np.ndarray:
    """Partials `[slots, T, rows]` of one rank, computed on one device.

    Args:
        x: bf16 or f32 `[T, K]`.
        weight: `[N, K]`.
        layout: The slots of K.
        slots: The rank's slots.
        rows: The rank's rows, padding included.
        activation: As in `jaxtp.row_parallel`.
        implementation: "mosaic", "portable", or None for the device's default.
        device: Where the kernels run; None is the first device.
    """
    device = jax.devices()[0] if device is None else device
    program.check_activation_dtype(x)
    x = np.asarray(x)
    if x.ndim != 2 or x.shape[1] not in (layout.size, layout.padded):
        raise ShapeError(
            f"`x` must be [T, {layout.size}] (K), or [T, {layout.padded}] (K in slot "
            f"layout); got shape {x.shape}."
        )
    padded = np.zeros((x.shape[0], layout.padded), x.dtype)
    padded[:, : layout.size] = x[:, : layout.size]
    columns = slice(slots.start * layout.width, slots.stop * layout.width)
    scale = None
    if isinstance(weight, Fp8Weight | Nvfp4Weight):
        scale = jax.device_put(packing.pack_scale(weight, layout, slots, rows), device)
    out = program.slot_partials(
        jax.device_put(padded[:, columns], device),
        jax.device_put(packing.pack_value(weight, layout, slots, rows), device),
        scale,
        jax.device_put(np.int32(slots.start), device),
        format=weight.format,
        activation=program.resolve_activation(weight.format, activation, x.dtype),
        block_k=packing.block_columns(weight),
        implementation=resolve_implementation(implementation, device),
    )
    return np.asarray(out)


def sum_slots(partials: np.ndarray, plan: ReductionPlan) -> np.ndarray:
    """Adds slot partials `[S, ...]` in plan order, in NumPy.

    Bits:
        ORDERED.
    """
    if plan.order == "sequential":
        total = np.zeros(partials.shape[1:], np.float32)
        for partial in partials:
            total = total + partial
        return total
    while partials.shape[0] > 1:
        partials = partials[0::2] + partials[1::2]
    return partials[0]


def _check_matrix(weight: Weight) -> None:
    validate(weight)
    if weight.is_bank:
        raise UnsupportedError(
            f"projections take one matrix [N, K]; got a bank of shape {weight.shape}. "
            "`weight.expert(e)` is one."
        )


def _global_scale(y: np.ndarray, weight: Weight) -> np.ndarray:
    if not isinstance(weight, Nvfp4Weight):
        return y
    scale = packing.pack_global_scale(weight)
    with np.errstate(over="ignore", invalid="ignore"):
        return y / scale if weight.global_scale_kind == "divisor" else y * scale
