"""Route-weighted sums in slot order, and the residual; every rounding separate."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxtp.derivative import with_derivative_of
from jaxtp.errors import DtypeError, ShapeError
from jaxtp.rounding import positive_zero, rounded, runtime_zeros


def combine_routes(
    values: Float32[Array, "T k H"], weights: Float32[Array, "T k"]
) -> Float32[Array, "T H"]:
    """`out = +0; out = out + (w[t, j] * v[t, j])` for the slots `j = 0, ..., k - 1`.

    The order is that of the top-k positions, never of the ranks that hold the experts.

    Args:
        values: f32 `[T, k, H]`, an expert's result for each token and slot.
        weights: f32 `[T, k]`.

    Returns:
        f32 `[T, H]`.

    Raises:
        DtypeError: If an operand is not float32.
        ShapeError: If the shapes do not fit each other.

    Bits:
        ORDERED: the words of `oracle.combine_routes`, eager, under jit and in scan, for
        operands that are arguments or constants. The first addition to +0 is performed:
        products of -0 alone give +0.
    """
    values, weights = _operand("values", values), _operand("weights", weights)
    if values.ndim != 3 or values.shape[:2] != weights.shape or values.shape[1] < 1:
        raise ShapeError(
            "`values` and `weights` must be [tokens, slots, width] and [tokens, slots] "
            f"with at least one slot; got {list(values.shape)} and "
            f"{list(weights.shape)}."
        )
    return _combine(values, weights)


@jax.jit
def _combine(values: Array, weights: Array) -> Array:
    if values.size == 0:
        return jnp.zeros((values.shape[0], values.shape[2]), jnp.float32)
    return with_derivative_of(_plain_combine, _exact_combine)(values, weights)


def _exact_combine(values: Array, weights: Array) -> Array:
    weights = jnp.broadcast_to(weights[:, :, None], values.shape)
    zeros = runtime_zeros(values, weights)
    # XLA merges constant factors of consecutive products, the caller's included.
    products = rounded(rounded(weights, zeros) * rounded(values, zeros), zeros)
    total = positive_zero(zeros[:, 0])
    for slot in range(values.shape[1]):
        total = total + products[:, slot]
    return total


def _plain_combine(values: Array, weights: Array) -> Array:
    return jnp.sum(values * weights[:, :, None], axis=1)


def moe_residual(
    residual: Float32[Array, "*shape"],
    routed: Float32[Array, "*shape"],
    shared: Float32[Array, "*shape"],
) -> Float32[Array, "*shape"]:
    """`residual + (routed + shared)`.

    Args:
        residual: f32, what the layer received.
        routed: f32, what `combine_routes` returned.
        shared: f32, what the shared expert returned.

    Returns:
        f32 of the same shape.

    Raises:
        DtypeError: If an operand is not float32.
        ShapeError: If the shapes differ.

    Bits:
        ORDERED: two additions, both performed, the words of `oracle.moe_residual`. An
        operand that the caller computed as a product is rounded first.
    """
    operands = {"residual": residual, "routed": routed, "shared": shared}
    arrays = [_operand(name, values) for name, values in operands.items()]
    if len({array.shape for array in arrays}) > 1:
        found = ", ".join(
            f"{name} {list(array.shape)}"
            for name, array in zip(operands, arrays, strict=True)
        )
        raise ShapeError(f"MoE residual operands must have one shape; got {found}.")
    return _residual(*arrays)


@jax.jit
def _residual(residual: Array, routed: Array, shared: Array) -> Array:
    if residual.size == 0:
        return residual
    plain = lambda a, b, c: a + (b + c)

    def exact(a: Array, b: Array, c: Array) -> Array:
        zero = runtime_zeros(a, b, c)
        return rounded(a, zero) + (rounded(b, zero) + rounded(c, zero))

    return with_derivative_of(plain, exact)(residual, routed, shared)


def _operand(name: str, values: Any) -> Array:
    array = jnp.asarray(values)
    if array.dtype != jnp.float32:
        raise DtypeError(f"`{name}` must be float32; got {array.dtype}.")
    return array
