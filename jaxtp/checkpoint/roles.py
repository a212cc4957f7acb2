"""What the stored values of a tensor must be, and the dtype they are handed out in."""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

from jaxtp.formats.e8m0 import decode_e8m0

Bad = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Role:
    """What the values of a tensor must be, and the dtype they are handed out in.

    Attributes:
        rule: The rule in words, for messages.
        bad: Marks the values that break the rule, given decoded values.
        widen: Whether values are handed out as float32, exactly.
    """

    rule: str
    bad: Bad | None = None
    widen: bool = False


def _nan_code(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint8) & 0x7F == 0x7F


def _nan_or_negative_code(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint8) >= 0x7F


def _not_finite_or_negative(values: np.ndarray) -> np.ndarray:
    return ~np.isfinite(values) | np.signbit(values)


def _not_finite_or_not_positive(values: np.ndarray) -> np.ndarray:
    return ~(np.isfinite(values) & (values > 0))


PLAIN = Role("any value")
E4M3_CODE = Role("E4M3 codes must not be NaN (0x7F, 0xFF)", _nan_code)
FP8_SCALE = Role(
    "FP8 scales must be finite and not negative", _not_finite_or_negative, widen=True
)
NVFP4_SCALE = Role(
    "NVFP4 block scales must be E4M3 codes 0x00 to 0x7E", _nan_or_negative_code
)
GLOBAL_SCALE = Role(
    "global scales must be finite and positive",
    _not_finite_or_not_positive,
    widen=True,
)


def widen_scale(values: np.ndarray) -> np.ndarray:
    """A scale in float32, exactly, whatever its storage."""
    if values.dtype == np.dtype(ml_dtypes.float8_e8m0fnu):
        return np.asarray(decode_e8m0(values))
    return values.astype(np.float32)
