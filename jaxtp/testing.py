"""The two verbs of a numerics test: the same words, and within the bound."""

from typing import Any

import numpy as np

UNIT = 2.0**-24
"""Unit roundoff of float32."""


def words(values: Any) -> np.ndarray:
    """The bits of an array as unsigned integers, all NaNs made one word.

    Args:
        values: An array of any dtype of 1, 2, 4 or 8 bytes.
    """
    array = np.asarray(values)
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    bits = bits.reshape(array.shape)
    if array.dtype.kind in "iub":
        return bits
    nan = np.isnan(array)
    return np.where(nan, np.array(np.nan, array.dtype).view(bits.dtype), bits)


def count_different_words(actual: Any, expected: Any) -> int:
    """How many elements of two arrays of one shape and dtype differ as words."""
    a, b = np.asarray(actual), np.asarray(expected)
    _check_alike(a, b, "count_different_words")
    return int(np.count_nonzero(words(a) != words(b)))


def assert_same_words(actual: Any, expected: Any, what: str = "result") -> None:
    """Asserts that two arrays hold the same words.

    Unlike a comparison of numbers it tells +0 from -0, and compares dtypes. All NaNs
    count as one word, and NaN never equals a number.

    Args:
        actual: The array under test.
        expected: The array it must equal.
        what: Name for the message.

    Raises:
        AssertionError: With the number of differing words, the first index, and both
            words there.
    """
    a, b = np.asarray(actual), np.asarray(expected)
    _check_alike(a, b, what)
    wa, wb = words(a), words(b)
    different = np.argwhere(wa != wb)
    if len(different):
        at = tuple(int(i) for i in different[0])
        raise AssertionError(
            f"{what}: {len(different)} of {a.size} words differ; first at {at}: "
            f"{a[at]} (0x{int(wa[at]):x}) against {b[at]} (0x{int(wb[at]):x})."
        )


def _check_alike(a: np.ndarray, b: np.ndarray, what: str) -> None:
    if a.shape != b.shape or a.dtype != b.dtype:
        raise AssertionError(
            f"{what}: {a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}."
        )


def error_over_bound(actual: Any, value: Any, magnitude: Any, depth: int) -> float:
    """The worst `|actual - value| / (2 * depth * 2^-24 * magnitude)`.

    Args:
        actual: Float32 results.
        value: Float64 values of the decoded operands.
        magnitude: `sum_k |x_k| |w_k|` in float64.
        depth: Steps in the longest addition chain of the program.

    Returns:
        At most 1 for a result within the bound; infinity where a non-finite result
        meets a finite value.
    """
    y, y64 = np.asarray(actual, np.float64), np.asarray(value, np.float64)
    bound = 2.0 * depth * UNIT * np.asarray(magnitude, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(y - y64)
        ratio = np.where(error == 0.0, 0.0, error / bound)
    if not ratio.size:
        return 0.0
    return float(np.max(np.where(np.isnan(ratio), np.inf, ratio)))


def assert_within_bound(
    actual: Any, value: Any, magnitude: Any, depth: int, what: str = "result"
) -> None:
    """Asserts `|actual - value| <= 2 * depth * 2^-24 * magnitude` everywhere.

    Args:
        actual: Float32 results.
        value: Float64 values of the decoded operands.
        magnitude: `sum_k |x_k| |w_k|` in float64.
        depth: Steps in the longest addition chain of the program.
        what: Name for the message.

    Raises:
        AssertionError: With the worst ratio of error to bound.
    """
    worst = error_over_bound(actual, value, magnitude, depth)
    if not worst <= 1.0:
        raise AssertionError(f"{what}: error is {worst:.3g} times its bound.")
