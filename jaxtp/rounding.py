"""Rounded words: products that no compiler may contract into a later addition."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_kernels.rounding import positive_zero as positive_zero
from pallas_kernels.rounding import rounded as rounded
from pallas_kernels.rounding import runtime_zero as runtime_zero


def runtime_zeros(*operands: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """An int32 zero for each element, from the bits of all operands at that element.

    For element-wise work whose operands may be constants of the program: one zero for
    a whole array of constants folds away where the array itself does not, and an
    operand that is not constant keeps the zeros from folding.
    """
    bits = [lax.bitcast_convert_type(x, jnp.int32) for x in operands]
    n = bits[0]
    for other in bits[1:]:
        n = lax.bitwise_xor(n, other)
    one = jnp.int32(1)
    # Four consecutive integers multiply to a multiple of 8, also modulo 2^32.
    return (n * (n + one) * (n + one + one) * (n + one + one + one)) & jnp.int32(7)
