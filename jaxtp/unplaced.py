"""A weight in slot layout on one device, by array operations that `jit` can trace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array

from jaxtp import packing
from jaxtp.placement import PlacedWeight
from jaxtp.plan import ReductionPlan, SlotLayout
from jaxtp.weights import Bf16Weight, Fp8Weight, Nvfp4Weight, Weight, validate


def unplaced(weight: Weight, plan: ReductionPlan) -> PlacedWeight:
    """Slot layout of a `[N, K]` weight, whose parts may be traced.

    Raises:
        JaxtpError: If the parts do not fit each other; or, where they are concrete,
            if a code or a scale is not a legal number.
    """
    validate(weight)
    layout = packing.weight_layout(weight, plan)
    parts = jax.tree.leaves(weight)
    device = _device(parts)
    if not any(isinstance(part, Tracer) for part in parts):
        check_values(weight, layout)
    scale = global_scale = block_shape = kind = None
    if isinstance(weight, Bf16Weight):
        value = _slots(_array(weight.value), layout, 1)
    elif isinstance(weight, Fp8Weight):
        value, block_shape = _slots(_array(weight.code), layout, 1), weight.block_shape
        scale = _segment_scale(_array(weight.scale), weight, layout)
    else:
        assert isinstance(weight, Nvfp4Weight)
        value, kind = _slots(_array(weight.code), layout, 2), weight.global_scale_kind
        scale = _slots(_array(weight.scale), layout, 16)
        global_scale = _array(weight.global_scale)
    return PlacedWeight(
        value=value,
        scale=scale,
        global_scale=global_scale,
        format=weight.format,
        shape=tuple(weight.shape),
        parallel="replicated",
        plan=plan,
        block_shape=block_shape,
        global_scale_kind=kind,
        mesh=Mesh(np.array([device]), ("tp",)),
    )


def check_values(weight: Weight, layout: SlotLayout) -> None:
    """Reads every scale and code of a concrete matrix and refuses illegal ones.

    Raises:
        NonFiniteError: Naming the part and the first bad index.
    """
    weight = jax.tree.map(_host, weight)
    everything = slice(0, layout.num_slots), slice(0, weight.shape[-2])
    if isinstance(weight, Fp8Weight | Nvfp4Weight) and not weight.is_bank:
        packing.pack_value(weight, layout, *everything)
        packing.pack_scale(weight, layout, *everything)
    if isinstance(weight, Nvfp4Weight):
        packing.pack_global_scale(weight)


def _host(part: Any) -> Any:
    return np.asarray(part) if isinstance(part, jax.Array) else part


def _device(parts: list[Any]) -> Any:
    for part in parts:
        if isinstance(part, jax.Array) and not isinstance(part, Tracer):
            return next(iter(part.devices()))
    return jax.devices()[0]


def _array(part: Any) -> Array:
    return part if isinstance(part, jax.Array) else jnp.asarray(np.asarray(part))


def _slots(part: Array, layout: SlotLayout, per_element: int) -> Array:
    """`[N, K / per_element]` to `[S, N, K_slot / per_element]`."""
    n, columns = part.shape[-2:]
    padded = layout.padded // per_element
    extra = ((0, 0, 0), (0, padded - columns, 0))
    part = lax.pad(part, jnp.zeros((), part.dtype), extra)
    return part.reshape(n, layout.num_slots, -1).transpose(1, 0, 2)


def _segment_scale(scale: Array, weight: Fp8Weight, layout: SlotLayout) -> Array:
    """`[S, J, N]`: the scale of each segment and row, zero where there is none."""
    (n, _), (bn, bk) = weight.shape, weight.block_shape
    block = np.full((layout.num_slots, layout.max_segments(bk)), -1, np.int32)
    for slot in range(layout.num_slots):
        for j, (start, _) in enumerate(layout.segments(slot, bk)):
            block[slot, j] = start // bk
    rows = np.arange(n, dtype=np.int32) // np.int32(bn)
    picked = scale[rows[None, None, :], np.maximum(block, 0)[:, :, None]]
    there = np.broadcast_to((block >= 0)[:, :, None], picked.shape)
    return jnp.where(there, picked, jnp.zeros((), jnp.float32))
