"""bfloat16: one rounding of float32, and float32 as an exact sum of three bf16."""

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Float32

from jaxtp.formats.arrays import (
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    AnyArray,
    array_module,
    bitcast,
    floats,
    require_dtype,
    words,
)

_SPLIT_ABOVE = np.float32(2.0**-100).view(np.uint32)
_SPLIT_BELOW = np.float32(3.38e38).view(np.uint32)


def round_to_bf16(values: Float32[AnyArray, "..."]) -> BFloat16[AnyArray, "..."]:
    """The nearest bfloat16, ties to even: `(word + 0x7FFF + bit 16) >> 16`.

    Args:
        values: Float32, any shape.

    Returns:
        bfloat16. NaN stays NaN; values from 2^128 - 2^119 on become infinite.

    Raises:
        DtypeError: If `values` is not float32.

    Bits:
        BYTES: integer arithmetic, subnormals included; no compiler can elide it.
    """
    require_dtype("values", values, np.float32)
    upper = (_round_word(words(values)) >> 16).astype(np.uint16)
    return bitcast(upper, ml_dtypes.bfloat16)


def split_f32(
    x: Float32[AnyArray, "..."],
) -> tuple[
    BFloat16[AnyArray, "..."], BFloat16[AnyArray, "..."], BFloat16[AnyArray, "..."]
]:
    """`h = bf16(x)`, `m = bf16(x - h)`, `l = bf16(x - h - m)`; then `x = h + m + l`.

    Both differences and the last rounding are exact: `x - h` is a multiple of the
    unit of x of at most 2^15 units, `x - h - m` of at most 2^7.

    Args:
        x: Float32, any shape.

    Returns:
        `(h, m, l)`, bfloat16. `m = l = +0` unless `2^-100 < |x| < 3.38e38`, so `h`
        alone carries NaN, infinities and the ends of the range.

    Raises:
        DtypeError: If `x` is not float32.

    Bits:
        BYTES: no step can underflow, and none is a product.
    """
    require_dtype("x", x, np.float32)
    xp = array_module(x)
    word = words(x)
    size = word & MAGNITUDE
    divisible = (size > _SPLIT_ABOVE) & (size < _SPLIT_BELOW)
    high = _round_word(word)
    rest = floats(xp.where(divisible, word, np.uint32(0))) - floats(
        xp.where(divisible, high, np.uint32(0))
    )
    middle = _round_word(words(rest))
    low = _round_word(words(rest - floats(middle)))
    parts = ((part >> 16).astype(np.uint16) for part in (high, middle, low))
    h, m, l = (bitcast(part, ml_dtypes.bfloat16) for part in parts)
    return h, m, l


def _round_word(word: AnyArray) -> AnyArray:
    """The float32 word of the nearest bfloat16; all NaNs made one."""
    xp = array_module(word)
    size = word & MAGNITUDE
    nearest = size + (0x7FFF + ((size >> 16) & 1))
    upper = xp.where(size > INFINITY, NAN, nearest) & np.uint32(0xFFFF_0000)
    return upper | (word & SIGN)
