"""E4M3 (`float8_e4m3fn`): one sign, four exponent and three fraction bits, no infinity.

The largest value is 448; the codes 0x7F and 0xFF are NaN.
"""

from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from jaxtp.formats.arrays import (
    INFINITY,
    MAGNITUDE,
    AnyArray,
    array_module,
    bitcast,
    floats,
    require_dtype,
    words,
)

E4M3_MAX = 448.0

_MAX_WORD = np.float32(E4M3_MAX).view(np.uint32)
_MIN_NORMAL_WORD = np.float32(2.0**-6).view(np.uint32)


def decode_e4m3(codes: Any) -> Float32[AnyArray, "..."]:
    """The float32 value of each code, exactly.

    Args:
        codes: float8_e4m3fn or uint8, any shape.

    Raises:
        DtypeError: If `codes` has another dtype.

    Bits:
        ORDERED: -0 is kept, 0x7F and 0xFF give NaN.
    """
    require_dtype("codes", codes, np.uint8, ml_dtypes.float8_e4m3fn)
    return bitcast(codes, ml_dtypes.float8_e4m3fn).astype(np.float32)


def encode_e4m3(values: Float32[AnyArray, "..."]) -> AnyArray:
    """The nearest E4M3 code of `clip(value, -448, 448)`, ties to the even code.

    Args:
        values: Float32, any shape.

    Returns:
        float8_e4m3fn. Infinities saturate, NaN stays NaN, -0 is kept.

    Raises:
        DtypeError: If `values` is not float32.

    Bits:
        BYTES: integer arithmetic, one rounding. A conversion by `astype` is not this
        function: it makes NaN of everything above 464.
    """
    require_dtype("values", values, np.float32)
    xp = array_module(values)
    word = words(values)
    size = word & MAGNITUDE
    capped = xp.minimum(size, _MAX_WORD)
    large = xp.maximum(capped, _MIN_NORMAL_WORD)
    normal = ((large + (0x7FFFF + ((large >> 20) & 1))) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 codes count multiples of 2^-9; eight of them are the first normal.
    small = xp.where(capped < _MIN_NORMAL_WORD, capped, np.uint32(0))
    subnormal = xp.rint(floats(small) * np.float32(2.0**9)).astype(np.uint32)
    code = xp.where(capped < _MIN_NORMAL_WORD, subnormal, normal)
    code = xp.where(size > INFINITY, np.uint32(0x7F), code)
    byte = (code | ((word >> 24) & 0x80)).astype(np.uint8)
    return bitcast(byte, ml_dtypes.float8_e4m3fn)
