"""Quantizers of activations: one scale for each segment (E4M3) or group (int8).

Both share the rule for groups that have no scale: one with a non-finite element gets
codes 0 and a NaN scale, so that it poisons its result and nothing else; one whose
scale would lie below 2^-93 gets codes 0 and scale 0.
"""

from typing import Any

import numpy as np
from jaxtyping import Float32, Int8

from jaxtp.formats.arrays import (
    INFINITY,
    MAGNITUDE,
    AnyArray,
    array_module,
    floats,
    require_dtype,
    words,
)
from jaxtp.formats.division import rounded_divide
from jaxtp.formats.e4m3 import E4M3_MAX, encode_e4m3

INT8_MAX = 127.0

SMALLEST_SCALE = np.float32(2.0**-93)
"""Below it a group counts as zero; every step above it stays clear of subnormals."""


def quantize_e4m3(
    x: Float32[AnyArray, "*T J B"],
) -> tuple[AnyArray, Float32[AnyArray, "*T J"]]:
    """`code = e4m3(clip(x * (448 / amax), -448, 448))`, `d = amax / 448`.

    Args:
        x: Float32 segments; amax is taken over the last axis. Padding must be zero.

    Returns:
        `(code, d)`: float8_e4m3fn of the shape of `x`, and one float32 for each
        segment.

    Raises:
        DtypeError: If `x` is not float32.

    Bits:
        ORDERED: rounded quotients, a rounded product, one rounding to nearest even.
    """
    require_dtype("x", x, np.float32)
    xp = array_module(x)
    amax, d, usable = group_scale(max_magnitude(x), E4M3_MAX)
    inverse = rounded_divide(E4M3_MAX, amax)
    x = xp.where(xp.expand_dims(usable, -1), x, np.float32(0))
    return encode_e4m3(x * xp.expand_dims(inverse, -1)), d


def quantize_int8(
    x: Float32[AnyArray, "*T G B"],
) -> tuple[Int8[AnyArray, "*T G B"], Float32[AnyArray, "*T G"]]:
    """`d = amax / 127`, `q = rint(x * (1 / d))`.

    Args:
        x: Float32 groups; amax is taken over the last axis. Padding must be zero.

    Returns:
        `(q, d)`: int8 of the shape of `x`, at most 127 in size, and one float32 for
        each group.

    Raises:
        DtypeError: If `x` is not float32.

    Bits:
        ORDERED: two rounded quotients, a rounded product, ties to even.
    """
    require_dtype("x", x, np.float32)
    xp = array_module(x)
    _, d, usable = group_scale(max_magnitude(x), INT8_MAX)
    inverse = rounded_divide(1.0, xp.where(usable, d, np.float32(1)))
    x = xp.where(xp.expand_dims(usable, -1), x, np.float32(0))
    return xp.rint(x * xp.expand_dims(inverse, -1)).astype(np.int8), d


def max_magnitude(x: Float32[AnyArray, "*T B"]) -> AnyArray:
    """The uint32 word of `max |x|` over the last axis; above infinity's if any is NaN.

    Words of magnitudes are ordered as the magnitudes, so the maximum is exact and
    sees subnormals and NaN on every platform.
    """
    xp = array_module(x)
    return xp.max(words(x) & MAGNITUDE, axis=-1)


def group_scale(size: AnyArray, levels: float) -> tuple[Any, Any, Any]:
    """`d = amax / levels`, with the rule for groups that have no scale.

    Args:
        size: uint32 words of amax.
        levels: The largest code.

    Returns:
        `(amax, d, usable)`: float32, float32 and bool. Where a group is not usable
        amax is 1, and d is NaN or 0.
    """
    xp = array_module(size)
    finite = size < INFINITY
    amax = floats(xp.where(finite, size, np.uint32(0)))
    d = rounded_divide(amax, levels)
    usable = d >= SMALLEST_SCALE
    unusable_scale = xp.where(finite, np.float32(0), np.float32(np.nan))
    d = xp.where(usable, d, unusable_scale)
    return xp.where(usable, amax, np.float32(1)), d, usable
