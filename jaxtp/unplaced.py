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

    Concrete parts are packed and checked on the host, as `place` does.

    Raises:
        JaxtpError: If the parts do not fit each other; or, where they are concrete,
            if a code or a scale is not a legal number.
    """
    validate(weight)
    layout = packing.weight_layout(weight, plan)
    parts = jax.tree.leaves(weight)
    pack = _traced if any(isinstance(part, Tracer) for part in parts) else _packed
    value, scale, global_scale = (None,) * 3 if weight.is_bank else pack(weight, layout)
    return PlacedWeight(
        value=value,
        scale=scale,
        global_scale=global_scale,
        format=weight.format,
        shape=tuple(weight.shape),
        parallel="replicated",
        plan=plan,
        block_shape=weight.block_shape if isinstance(weight, Fp8Weight) else None,
        global_scale_kind=getattr(weight, "global_scale_kind", None),
        mesh=Mesh(np.array([_device(parts)]), ("tp",)),
    )


def _device(parts: list[Any]) -> Any:
    for part in parts:
        if isinstance(part, jax.Array) and not isinstance(part, Tracer):
            return next(iter(part.devices()))
    return jax.devices()[0]


def _packed(weight: Weight, layout: SlotLayout) -> tuple[Any, Any, Any]:
    """The parts of a concrete weight, from the host's packing."""
    weight = jax.tree.map(_host, weight)
    everything = slice(0, layout.num_slots), slice(0, weight.shape[-2])
    value = jnp.asarray(packing.pack_value(weight, layout, *everything))
    scale = global_scale = None
    if isinstance(weight, Fp8Weight | Nvfp4Weight):
        scale = jnp.asarray(packing.pack_scale(weight, layout, *everything))
    if isinstance(weight, Nvfp4Weight):
        global_scale = jnp.asarray(packing.pack_global_scale(weight))
    return value, scale, global_scale


def _host(part: Any) -> Any:
    return np.asarray(part) if isinstance(part, jax.Array) else part


def _traced(weight: Weight, layout: SlotLayout) -> tuple[Any, Any, Any]:
    """The parts of a weight that is an argument of a traced function."""
    if isinstance(weight, Bf16Weight):
        return _slots(_array(weight.value), layout, 1), None, None
    if isinstance(weight, Fp8Weight):
        scale = _segment_scale(_array(weight.scale), weight, layout)
        return _slots(_array(weight.code), layout, 1), scale, None
    assert isinstance(weight, Nvfp4Weight)
    return (
        _slots(_array(weight.code), layout, 2),
        _slots(_array(weight.scale), layout, 16),
        _array(weight.global_scale),
    )


def _array(part: Any) -> Array:
    return part if isinstance(part, jax.Array) else jnp.asarray(np.asarray(part))


def _slots(part: Array, layout: SlotLayout, per_element: int) -> Array:
    """`[N, K / per_element]` to `[S, N, K_slot / per_element]`.

    Narrow floats move as integers: an E4M3 constant that was padded and transposed as
    floats came out of XLA:CPU with other codes.
    """
    n, columns = part.shape[-2:]
    bits = jnp.dtype(f"uint{8 * jnp.dtype(part.dtype).itemsize}")
    words = lax.bitcast_convert_type(part, bits)
    extra = ((0, 0, 0), (0, layout.padded // per_element - columns, 0))
    words = lax.pad(words, jnp.zeros((), bits), extra)
    words = words.reshape(n, layout.num_slots, -1).transpose(1, 0, 2)
    return lax.bitcast_convert_type(words, part.dtype)


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
