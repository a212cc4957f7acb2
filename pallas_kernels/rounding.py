"""Rounded words: products that no compiler may contract into a later addition.

XLA:CPU and Mosaic fuse `a * b + c` into one rounding where they can. The exclusive or
of a product's bits with an integer zero that exists only at run time stops them, in
every back end tried; a literal zero folds away.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32


def runtime_zero(operand: Array) -> Int32[Array, ""]:
    """An int32 zero computed from one element of `operand`, opaque to compilers.

    The product of four consecutive integers is a multiple of 24, also modulo 2^32, so
    its three low bits are zero whatever the element holds (NaN included).
    """
    # The barrier matters where the operand itself is a constant of the program.
    bits = lax.optimization_barrier(_word(operand.reshape(-1)[0]))
    one = jnp.int32(1)
    n1, n2, n3 = bits + one, bits + one + one, bits + one + one + one
    return (bits * n1 * n2 * n3) & jnp.int32(7)


def _word(element: Array) -> Int32[Array, ""]:
    if jnp.issubdtype(element.dtype, jnp.integer):
        return element.astype(jnp.int32)
    size = jnp.dtype(element.dtype).itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
    word = lax.bitcast_convert_type(element, unsigned)
    return lax.bitcast_convert_type(word.astype(jnp.uint32), jnp.int32)


def rounded(product: Float32[Array, "..."], zero: Int32[Array, ""]) -> jax.Array:
    """Returns `product` as a word of its own: same bits, never part of an FMA.

    Args:
        product: Float32 array, usually a product.
        zero: The result of `runtime_zero`.

    Bits:
        The identity on bits.
    """
    bits = lax.bitcast_convert_type(product, jnp.int32)
    bits = lax.bitwise_xor(bits, jnp.broadcast_to(zero, bits.shape))
    return lax.bitcast_convert_type(bits, jnp.float32)


def positive_zero(zero: Int32[Array, ""]) -> Float32[Array, ""]:
    """The float32 +0 of a run-time zero, for additions that must be performed."""
    return lax.bitcast_convert_type(zero, jnp.float32)
