"""NVFP4: E2M1 codes, an E4M3 scale for each 16 columns, a float32 scale for all.

Two codes share a byte; the low nibble is the even column. The values of the codes are
0, 0.5, 1, 1.5, 2, 3, 4, 6, with bit 3 for the sign: code 8 is -0.
"""

from typing import Any, Literal

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Float32, Int8

from jaxtp.errors import FormatError, ShapeError
from jaxtp.formats.arrays import (
    AnyArray,
    array_module,
    floats,
    require_dtype,
    rounded_product,
)
from jaxtp.formats.division import rounded_divide
from jaxtp.formats.e4m3 import decode_e4m3, encode_e4m3
from jaxtp.formats.fp8_block import expand_blocks, require_finite

NVFP4_GROUP = 16
"""Columns that share one block scale."""

GlobalScaleKind = Literal["multiplier", "divisor"]

_E2M1_MAX = np.float32(6)
_RANGE = np.float32(6 * 448)
_SMALLEST_BLOCK_SCALE = np.float32(2.0**-9)
_SMALLEST_GLOBAL = np.float32(2.0**-126)
_LARGEST_GLOBAL = np.float32(2.0**126)


def decode_e2m1(nibbles: Any) -> Float32[AnyArray, "..."]:
    """The float32 value of each E2M1 code, exactly.

    Args:
        nibbles: uint8 codes in [0, 16), one to an element; higher bits are ignored.

    Raises:
        DtypeError: If `nibbles` is not uint8.

    Bits:
        ORDERED: built from bits. Code 8 is -0.
    """
    require_dtype("nibbles", nibbles, np.uint8)
    xp = array_module(nibbles)
    code = nibbles.astype(np.uint32)
    size = code & 7
    # Sizes from 2 on are (exponent + 126, fraction); 1 is the subnormal 0.5.
    word = xp.where(size < 2, size * np.uint32(126 << 23), (size << 22) + (126 << 23))
    return floats(word | ((code & 8) << 28))


def unpack_nibbles(code: Any) -> AnyArray:
    """Splits bytes into codes: `[..., K/2]` to `[..., K]`, the low nibble first."""
    require_dtype("code", code, np.uint8)
    xp = array_module(code)
    pairs = xp.stack([code & 0xF, code >> 4], axis=-1)
    return pairs.reshape(*code.shape[:-1], 2 * code.shape[-1])


def unpack_nvfp4(code: Any) -> Float32[AnyArray, "*R K"]:
    """The values of packed codes, without any scale.

    Args:
        code: uint8 `[*R, K/2]`.

    Raises:
        DtypeError: If `code` is not uint8.

    Bits:
        ORDERED: exact.
    """
    return decode_e2m1(unpack_nibbles(code))


def unpack_nvfp4_doubled(code: Any) -> Int8[AnyArray, "*R K"]:
    """Twice the values of packed codes, which are integers: 0, 1, 2, 3, 4, 6, 8, 12.

    Args:
        code: uint8 `[*R, K/2]`.

    Raises:
        DtypeError: If `code` is not uint8.

    Bits:
        BYTES.
    """
    return (unpack_nvfp4(code) * np.float32(2)).astype(np.int8)


def nvfp4_to_bf16(code: Any, scale: Any) -> BFloat16[AnyArray, "*R K"]:
    """`code * scale`, exact in bfloat16 for every pair; no global scale.

    Args:
        code: uint8 `[*R, K/2]`.
        scale: float8_e4m3fn `[*R, K/16]`.

    Raises:
        DtypeError: If a dtype is another.
        ShapeError: If `scale` does not have one entry for each 16 columns.

    Bits:
        ORDERED: exact, so that no order of multiplications matters. -0 is kept, a NaN
        scale propagates.
    """
    xp = array_module(code, scale)
    code, scale = xp.asarray(code), xp.asarray(scale)
    values = unpack_nvfp4(code)
    return (values * _expand_groups(decode_e4m3(scale), values.shape)).astype(
        ml_dtypes.bfloat16
    )


def dequantize_nvfp4(
    code: Any, scale: Any, global_scale: Any, kind: GlobalScaleKind = "multiplier"
) -> Float32[AnyArray, "*E N K"]:
    """`RN(code * s)` with `s = RN(scale * g)`, or `RN(scale / g)` for a divisor.

    Args:
        code: uint8 `[*E, N, K/2]`.
        scale: float8_e4m3fn `[*E, N, K/16]`.
        global_scale: float32 `[*E]`, g.
        kind: `"multiplier"` (modelopt) or `"divisor"` (compressed-tensors).

    Returns:
        Float32 `[*E, N, K]`, NumPy if no operand is a JAX array.

    Raises:
        DtypeError: If a dtype is another.
        ShapeError: If the shapes do not fit.
        FormatError: If `kind` is unknown.

    Bits:
        ORDERED: two rounded operations. -0 is kept (code 8), NaN scales propagate. In
        JAX the result is a rounded word.
    """
    _check_kind(kind)
    xp = array_module(code, scale, global_scale)
    code, scale, g = (xp.asarray(part) for part in (code, scale, global_scale))
    require_dtype("global_scale", g, np.float32)
    if tuple(g.shape) != tuple(code.shape[:-2]):
        raise ShapeError(
            f"`global_scale` must have shape {tuple(code.shape[:-2])} (one scalar for "
            f"each matrix); got {tuple(g.shape)}."
        )
    g = g.reshape(*g.shape, 1, 1)
    values, block = unpack_nvfp4(code), decode_e4m3(scale)
    with np.errstate(all="ignore"):
        s = (
            rounded_product(block * g)
            if kind == "multiplier"
            else rounded_divide(block, g)
        )
        return rounded_product(values * _expand_groups(s, values.shape))


def quantize_nvfp4(
    w: Any, kind: GlobalScaleKind = "multiplier"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`g = amax / 2688`, a block scale of `amax_block / 6 / g`: the rule of modelopt.

    For a divisor `g = 2688 / amax` and the block's scale is `amax_block / 6 * g`.
    Block scales are rounded to E4M3 and clamped to [2^-9, 448]; codes are `w / s`, with
    the `s` that `dequantize_nvfp4` uses, to the nearest, ties to the even code.

    Args:
        w: Float32 `[*E, N, K]`, K a multiple of 16; computed with NumPy.
        kind: `"multiplier"` or `"divisor"`.

    Returns:
        `(code, scale, global_scale)` as `dequantize_nvfp4` takes them. The global
        scale of a matrix of zeros is 1, and so is the scale of a block of zeros, whose
        codes are 0 (8 for -0).

    Raises:
        DtypeError: If `w` is not float32.
        ShapeError: If K is no multiple of 16.
        FormatError: If `kind` is unknown.
        NonFiniteError: If an element of `w` is not finite.

    Bits:
        BYTES: rounded quotients, ties to even.
    """
    _check_kind(kind)
    w = np.asarray(w)
    require_dtype("w", w, np.float32)
    require_finite("w", w)
    *lead, k = w.shape
    if k % NVFP4_GROUP:
        raise ShapeError(f"NVFP4 needs K to be a multiple of {NVFP4_GROUP}; got K={k}.")
    amax = np.abs(w).reshape(*lead, k // NVFP4_GROUP, NVFP4_GROUP).max(axis=-1)
    g = _global_scale(amax.max(axis=(-2, -1), keepdims=True), kind)
    with np.errstate(all="ignore"):
        sixth = amax / _E2M1_MAX
        ideal = sixth / g if kind == "multiplier" else sixth * g
        ideal = np.where(amax == 0, np.float32(1), ideal)
        scale = np.asarray(encode_e4m3(np.maximum(ideal, _SMALLEST_BLOCK_SCALE)))
        block = np.asarray(decode_e4m3(scale))
        s = block * g if kind == "multiplier" else block / g
        code = _encode_e2m1(w / _expand_groups(s, w.shape))
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, scale, g[..., 0, 0]


def _check_kind(kind: str) -> None:
    if kind not in ("multiplier", "divisor"):
        raise FormatError(
            f"`kind` of a global scale must be 'multiplier' or 'divisor'; got {kind!r}."
        )


def _expand_groups(scale: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    return expand_blocks(scale, shape, (1, NVFP4_GROUP))


def _global_scale(amax: np.ndarray, kind: GlobalScaleKind) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        if kind == "multiplier":
            g = np.maximum(amax / _RANGE, _SMALLEST_GLOBAL)
        else:
            g = np.minimum(_RANGE / amax, _LARGEST_GLOBAL)
    return np.where(amax == 0, np.float32(1), g)


def _encode_e2m1(values: np.ndarray) -> np.ndarray:
    """The nearest E2M1 code in [0, 16), saturating at 6, ties to the even code."""
    return values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & np.uint8(0xF)
