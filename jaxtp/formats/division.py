"""Correctly rounded float32 division, which `/` is not once a compiler has seen it.

XLA turns a constant or broadcast divisor into a multiplication by its reciprocal, and
GPUs divide approximately. The quotient is therefore corrected by its exact integer
residual, which fits 32 bits because the approximation is off by a few units at most.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int32, UInt32

from jaxtp.errors import DtypeError
from jaxtp.formats.arrays import INFINITY, MAGNITUDE, NAN, SIGN, AnyArray, array_module

_HIDDEN_BIT = 1 << 23
_FRACTION = _HIDDEN_BIT - 1
_ONE = 0x3F80_0000


def rounded_divide(
    numerator: Float32[AnyArray, "..."] | float,
    denominator: Float32[AnyArray, "..."] | float,
) -> Float32[AnyArray, "..."]:
    """`RN(numerator / denominator)`, rounded once to nearest even, on every platform.

    Every pair of operands is supported: signed zeros, subnormal operands and results,
    infinities and NaN follow IEEE 754.

    Args:
        numerator: Float32 array, or a Python number.
        denominator: Float32 array, or a Python number; the shapes broadcast.

    Returns:
        Float32, NumPy if neither operand is a JAX array.

    Raises:
        DtypeError: If an operand is an array of another dtype.

    Bits:
        ORDERED: the words of NumPy's division, subnormal results included.
    """
    a, b = _operand("numerator", numerator), _operand("denominator", denominator)
    if array_module(a, b) is np:
        with np.errstate(all="ignore"):
            return np.divide(a, b)
    shape = np.broadcast_shapes(np.shape(a), np.shape(b))
    words = (lax.bitcast_convert_type(jnp.asarray(x), jnp.uint32) for x in (a, b))
    quotient = _divide_words(*(jnp.broadcast_to(w, shape) for w in words))
    return lax.bitcast_convert_type(quotient, jnp.float32)


def _operand(name: str, value: Any) -> Any:
    if isinstance(value, int | float):
        return np.float32(value)
    if np.dtype(value.dtype) != np.float32:
        raise DtypeError(f"`{name}` must be float32; got {np.dtype(value.dtype).name}.")
    return value


def _divide_words(
    a: UInt32[jax.Array, "..."], b: UInt32[jax.Array, "..."]
) -> UInt32[jax.Array, "..."]:
    """IEEE division of float32 words, special cases included."""
    exponent_a, significand_a = _normalize(a)
    exponent_b, significand_b = _normalize(b)
    less = significand_a < significand_b
    exponent = exponent_a - exponent_b - less.astype(jnp.int32) + jnp.int32(127)
    extended = _extended_quotient(significand_a, significand_b, less)

    # A subnormal quotient loses 1 - exponent more bits; 26 of them lose everything.
    lost = jnp.clip(jnp.int32(1) - exponent, 0, 26).astype(jnp.uint32) + jnp.uint32(2)
    half = (jnp.uint32(1) << (lost - jnp.uint32(1))) - jnp.uint32(1)
    kept = (extended + half + ((extended >> lost) & 1)) >> lost
    word = kept + (jnp.clip(exponent - 1, 0, 254).astype(jnp.uint32) << 23)

    size_a, size_b = a & MAGNITUDE, b & MAGNITUDE
    zero = (size_a == 0) | (size_b == INFINITY)
    infinite = (size_a == INFINITY) | (size_b == 0)
    word = jnp.where(exponent > 254, INFINITY, word)
    word = jnp.where(zero, jnp.uint32(0), jnp.where(infinite, INFINITY, word))
    invalid = (size_a > INFINITY) | (size_b > INFINITY) | (zero & infinite)
    return jnp.where(invalid, NAN, word | ((a ^ b) & SIGN))


def _normalize(
    word: UInt32[jax.Array, "..."],
) -> tuple[Int32[jax.Array, "..."], UInt32[jax.Array, "..."]]:
    """Biased exponent, and a significand in [2^23, 2^24) (0 for zero)."""
    field = ((word & MAGNITUDE) >> 23).astype(jnp.int32)
    fraction = word & _FRACTION
    shift = lax.clz(fraction) - jnp.uint32(8)
    subnormal = field == 0
    exponent = jnp.where(subnormal, jnp.int32(1) - shift.astype(jnp.int32), field)
    significand = jnp.where(subnormal, fraction << shift, fraction | _HIDDEN_BIT)
    return exponent, significand


def _extended_quotient(
    a: UInt32[jax.Array, "..."],
    b: UInt32[jax.Array, "..."],
    less: jax.Array,
) -> UInt32[jax.Array, "..."]:
    """`floor(2^23 * a' / b)` in [2^23, 2^24), then a half bit and a sticky bit.

    `a'` is `a`, or `2a` where `less`. The float quotient may be off by three units:
    its residual is exact modulo 2^32 and gives the number of units.
    """
    unit_a = lax.bitcast_convert_type((a & _FRACTION) | _ONE, jnp.float32)
    unit_b = lax.bitcast_convert_type((b & _FRACTION) | _ONE, jnp.float32)
    scale = jnp.where(less, jnp.float32(2.0**24), jnp.float32(2.0**23))
    guess = (unit_a / unit_b * scale).astype(jnp.int32)

    divisor = b.astype(jnp.int32)
    dividend = jnp.where(less, a << 24, a << 23).astype(jnp.int32)
    residual = dividend - guess * divisor
    units = jnp.zeros_like(guess)
    for k in range(4):
        units += (residual >= divisor * (k + 1)).astype(jnp.int32)
        units -= (residual < divisor * -k).astype(jnp.int32)
    rest = residual - units * divisor

    # A quotient of two 24-bit integers is never half-way between two of them.
    half, sticky = (rest * 2 > divisor), (rest > 0)
    quotient = (guess + units).astype(jnp.uint32)
    return quotient << 2 | half.astype(jnp.uint32) << 1 | sticky.astype(jnp.uint32)
