"""E8M0: a power of two in one byte, the scale format of MX and `ue8m0` checkpoints."""

from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from jaxtp.formats.arrays import (
    NAN,
    AnyArray,
    array_module,
    bitcast,
    floats,
    require_dtype,
)


def decode_e8m0(codes: Any) -> Float32[AnyArray, "..."]:
    """`2^(code - 127)`, and NaN for 255, built from bits.

    Args:
        codes: uint8 or float8_e8m0fnu, any shape.

    Raises:
        DtypeError: If `codes` has another dtype.

    Bits:
        ORDERED. Code 0 is 2^-127, a float32 subnormal (0x00400000): its word is right
        on every platform, but arithmetic on XLA:CPU takes it for zero.
    """
    require_dtype("codes", codes, np.uint8, ml_dtypes.float8_e8m0fnu)
    xp = array_module(codes)
    code = bitcast(codes, np.uint8).astype(np.uint32)
    word = xp.where(code == 0, np.uint32(0x0040_0000), code << 23)
    return floats(xp.where(code == 255, NAN, word))
