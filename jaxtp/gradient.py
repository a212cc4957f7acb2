"""Gradients with respect to activations; weights are constants.

The forward words are those of the call without a gradient. Backward dots are XLA's own:
they are accurate, and their words are not promised.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Float32, Int32

from jaxtp import formats
from jaxtp.errors import UnsupportedError
from jaxtp.placement import PlacedWeight
from pallas_kernels.fp8_matmul.segments import columns_to_segments


def with_input_gradient(
    forward: Callable[[Array, PlacedWeight], Array],
    backward: Callable[[Array, PlacedWeight], Array] | None,
) -> Callable[[Array, PlacedWeight], Array]:
    """Gives a projection a gradient with respect to `x`.

    Rounding and quantizing `x` count as the identity (straight through).

    Args:
        forward: `(x, weight) -> y`.
        backward: `(dy, weight) -> dx` in float32, or None where there is none.

    Raises:
        NotImplementedError: When a gradient with respect to the weight is taken, or
            any gradient where `backward` is None.
    """

    def call(x: Array, weight: PlacedWeight) -> Array:
        return _custom_vjp(forward, backward, jax.typeof(x))(x, weight)

    return call


def _custom_vjp(
    forward: Callable[[Array, PlacedWeight], Array],
    backward: Callable[[Array, PlacedWeight], Array] | None,
    like: Any,
) -> Callable[[Array, PlacedWeight], Array]:
    """The rule for an `x` of type `like` (dtype, and sharding on Explicit axes)."""

    @jax.custom_vjp
    def run(x: Array, weight: PlacedWeight) -> Array:
        return forward(x, weight)

    def run_forward(x: Any, weight: Any) -> tuple[Array, PlacedWeight]:
        if any(leaf.perturbed for leaf in jax.tree.leaves(weight)):
            raise UnsupportedError(
                "projections have a gradient with respect to `x` alone; stop the "
                "gradient of the weight with jax.lax.stop_gradient."
            )
        values = jax.tree.map(lambda leaf: leaf.value, weight)
        return forward(x.value, values), values

    def run_backward(weight: PlacedWeight, dy: Any) -> tuple[Array, None]:
        if backward is None:
            raise UnsupportedError(
                "reduce=False and gather=False have no gradient; take it through the "
                "whole result."
            )
        if isinstance(dy, jax.custom_derivatives.SymbolicZero):
            dy = jnp.zeros(dy.shape, jnp.float32)
        dx = backward(dy, weight).astype(like.dtype)
        if AxisType.Explicit in like.sharding.mesh.axis_types:
            dx = jax.sharding.reshard(dx, like.sharding)
        return dx, None

    run.defvjp(run_forward, run_backward, symbolic_zeros=True)
    return run


def dequantize_slots(
    p: PlacedWeight, first_slot: Int32[Array, ""]
) -> Float32[Array, "S N Ks"]:
    """The slots of a weight that a rank holds, decoded, without the global scale.

    Args:
        p: A weight, or a rank's shard of one.
        first_slot: Global index of the first slot here.
    """
    if p.format == "bf16":
        return p.value.astype(jnp.float32)
    if p.format == "nvfp4":
        return jnp.asarray(formats.nvfp4_to_bf16(p.value, p.scale)).astype(jnp.float32)
    assert p.block_shape is not None
    (slots, _, width), block_k = p.value.shape, p.block_shape[1]
    place = columns_to_segments(first_slot, slots, width, block_k)
    segment = place // jnp.int32(block_k)
    scale = jax.vmap(lambda s, j: s[j])(p.scale, segment)
    return p.value.astype(jnp.float32) * scale.transpose(0, 2, 1)


def input_gradient(
    dy: Float32[Array, "T N"], p: PlacedWeight, first_slot: Int32[Array, ""]
) -> Float32[Array, "T S*Ks"]:
    """`dx = dy @ w` for a rank's slots, in slot layout, without the global scale."""
    w = dequantize_slots(p, first_slot)
    dx = lax.dot_general(
        dy, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    return dx.reshape(dy.shape[0], w.shape[0] * w.shape[2])
