"""E4M3 weights with one scale for each two-dimensional block."""

from typing import Any, Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from jaxtp.errors import FormatError, NonFiniteError, ShapeError
from jaxtp.formats.arrays import (
    AnyArray,
    array_module,
    require_dtype,
    rounded_product,
    words,
)
from jaxtp.formats.bf16 import round_to_bf16
from jaxtp.formats.division import rounded_divide
from jaxtp.formats.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3
from jaxtp.formats.e8m0 import decode_e8m0

ScaleFormat = Literal["f32", "bf16", "e8m0"]

_SMALLEST_SCALE = np.float32(2.0**-126)


def dequantize_fp8_block(
    code: Any, scale: Any, block_shape: tuple[int, int]
) -> Float32[AnyArray, "*E N K"]:
    """`RN(code[n, k] * scale[n // bn, k // bk])`.

    Args:
        code: float8_e4m3fn (or its bytes as uint8), `[*E, N, K]`.
        scale: float32, bfloat16 or float8_e8m0fnu, `[*E, ceil(N / bn), ceil(K / bk)]`:
            the blocks at the ragged edges have a scale of their own.
        block_shape: `(bn, bk)`.

    Returns:
        Float32 `[*E, N, K]`, NumPy if neither operand is a JAX array.

    Raises:
        DtypeError: If a dtype is none of these.
        ShapeError: If `scale` does not have one entry for each block.

    Bits:
        ORDERED: one rounded product. -0 is kept, NaN codes and scales propagate, a
        zero scale gives zeros. In JAX the result is a rounded word.
    """
    xp = array_module(code, scale)
    code, scale = xp.asarray(code), decode_scale(xp.asarray(scale))
    expanded = expand_blocks(scale, code.shape, block_shape)
    with np.errstate(all="ignore"):
        return rounded_product(decode_e4m3(code) * expanded)


def decode_scale(scale: AnyArray) -> Float32[AnyArray, "..."]:
    """A block scale as float32, exactly, from any dtype a checkpoint stores it in."""
    if np.dtype(scale.dtype) == ml_dtypes.float8_e8m0fnu:
        return decode_e8m0(scale)
    require_dtype("scale", scale, np.float32, ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        return scale.astype(np.float32)


def expand_blocks(
    scale: AnyArray, shape: tuple[int, ...], block_shape: tuple[int, int]
) -> AnyArray:
    """Repeats each block's entry over the rows and columns of its block.

    Args:
        scale: `[*E, ceil(N / bn), ceil(K / bk)]`.
        shape: `(*E, N, K)`.
        block_shape: `(bn, bk)`.

    Raises:
        ShapeError: If the shapes do not fit.
    """
    *lead, n, k = shape
    bn, bk = block_shape
    expected = (*lead, -(-n // bn), -(-k // bk))
    if tuple(scale.shape) != expected:
        raise ShapeError(
            f"`scale` must have shape {expected} (blocks of {bn} x {bk} over {n} x "
            f"{k}); got {tuple(scale.shape)}."
        )
    xp = array_module(scale)
    rows = xp.repeat(scale, bn, axis=-2)[..., :n, :]
    return xp.repeat(rows, bk, axis=-1)[..., :k]


def quantize_fp8_block(
    w: Any,
    block_shape: tuple[int, int] = (128, 128),
    scale_format: ScaleFormat = "f32",
) -> tuple[np.ndarray, np.ndarray]:
    """`scale = amax / 448` for each block, `code = e4m3(clip(w / scale, -448, 448))`.

    The scale is rounded to its format first, and the codes belong to the rounded
    scale: to nearest for `"bf16"`, up to a power of two for `"e8m0"`.

    Args:
        w: Float32 `[*E, N, K]`; computed with NumPy.
        block_shape: `(bn, bk)`.
        scale_format: The values that a scale may have.

    Returns:
        `(code, scale)`: float8_e4m3fn `[*E, N, K]`, and float32 `[*E, ceil(N / bn),
        ceil(K / bk)]` whose values are exact in `scale_format`. The scale of a block
        of zeros is 1, and no scale lies below 2^-126.

    Raises:
        DtypeError: If `w` is not float32.
        FormatError: If `scale_format` is unknown.
        NonFiniteError: If an element of `w` is not finite.

    Bits:
        BYTES: rounded quotients, ties to even.
    """
    w = np.asarray(w)
    require_dtype("w", w, np.float32)
    require_finite("w", w)
    scale = _block_scale(_block_amax(w, block_shape), scale_format)
    with np.errstate(over="ignore"):
        ratio = rounded_divide(w, expand_blocks(scale, w.shape, block_shape))
    return np.asarray(encode_e4m3(ratio)), scale


def require_finite(name: str, values: np.ndarray) -> None:
    """Checks that no element is NaN or infinite.

    Raises:
        NonFiniteError: If one is; names its index.
    """
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise NonFiniteError(
            f"`{name}` must be finite to be quantized; {len(bad)} elements are not, "
            f"the first at {at}: {values[at]}."
        )


def _block_amax(w: np.ndarray, block_shape: tuple[int, int]) -> np.ndarray:
    *lead, n, k = w.shape
    bn, bk = block_shape
    rows, columns = -(-n // bn), -(-k // bk)
    pad = [(0, 0)] * len(lead) + [(0, rows * bn - n), (0, columns * bk - k)]
    blocks = np.pad(np.abs(w), pad).reshape(*lead, rows, bn, columns, bk)
    return blocks.max(axis=(-3, -1))


def _block_scale(amax: np.ndarray, scale_format: ScaleFormat) -> np.ndarray:
    scale = np.maximum(amax / np.float32(E4M3_MAX), _SMALLEST_SCALE)
    if scale_format == "bf16":
        scale = np.asarray(round_to_bf16(scale)).astype(np.float32)
    elif scale_format == "e8m0":
        # Adding all fraction bits carries into the exponent unless they are zero.
        word = (words(scale) + 0x007F_FFFF) & np.uint32(0xFF80_0000)
        scale = word.view(np.float32)
    elif scale_format != "f32":
        raise FormatError(
            f"`scale_format` must be 'f32', 'bf16' or 'e8m0'; got {scale_format!r}."
        )
    return np.where(amax == 0, np.float32(1), scale)
