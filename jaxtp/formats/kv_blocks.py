"""Quantized blocks of a KV cache: q8_0 (keys) and q5_1 (values), 32 elements each.

A q8_0 block is `[fp16 d][32 x int8]`, 34 bytes; a q5_1 block is
`[fp16 d][fp16 m][32 fifth bits][16 bytes of low nibbles]`, 24 bytes. All little-endian.
A block with a non-finite element has codes 0 and NaN for d (and m). One whose d would
lie below 2^-93 has codes 0 and d = 0, which decodes to the same values as the
codes that an unguarded quotient would give, because fp16 holds no such d.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, UInt8

from jaxtp.errors import ShapeError
from jaxtp.formats.activations import SMALLEST_SCALE, max_magnitude, quantize_int8
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
from jaxtp.formats.division import rounded_divide

KV_BLOCK = 32
"""Elements of a block."""

Q8_0_BYTES = 34
Q5_1_BYTES = 24

_Q5_MAX = 31.0
_F16_MIN_NORMAL = np.float32(2.0**-14).view(np.uint32)
_F16_OVERFLOW = np.float32(65520).view(np.uint32)


def quantize_q8_0(x: Float32[AnyArray, "*T D"]) -> UInt8[AnyArray, "*T B"]:
    """`d = amax / 127`, `q = rint(x * (1 / d))`; d is then rounded to fp16 for storage.

    Args:
        x: Float32 `[*T, D]`, D a multiple of 32.

    Returns:
        uint8 `[*T, 34 * D / 32]`.

    Raises:
        DtypeError: If `x` is not float32.
        ShapeError: If D is no multiple of 32.

    Bits:
        BYTES: rounded quotients, ties to even. The stored d may be an fp16 subnormal,
        0, or infinity (from amax = 127 * 65520 on).
    """
    xp = array_module(x)
    q, d = quantize_int8(_blocks(x))
    return _join(xp, _half_bytes(d), bitcast(q, np.uint8))


def dequantize_q8_0(blocks: UInt8[AnyArray, "*T B"]) -> Float32[AnyArray, "*T D"]:
    """`d * q`, exact in float32.

    Args:
        blocks: uint8 `[*T, 34 * n]`.

    Returns:
        Float32 `[*T, 32 * n]`.

    Raises:
        DtypeError: If `blocks` is not uint8.
        ShapeError: If the last axis is no multiple of 34.

    Bits:
        ORDERED: exact, so a compiler may contract it into an addition.
    """
    data = _split(blocks, Q8_0_BYTES)
    with np.errstate(invalid="ignore"):
        values = _half_value(data, 0) * bitcast(data[..., 2:], np.int8).astype(
            np.float32
        )
    return values.reshape(*blocks.shape[:-1], -1)


def quantize_q5_1(x: Float32[AnyArray, "*T D"]) -> UInt8[AnyArray, "*T B"]:
    """`d = (max - min) / 31`, `q = clip(rint((x - min) * (1 / d)), 0, 31)`, `m = min`.

    Args:
        x: Float32 `[*T, D]`, D a multiple of 32.

    Returns:
        uint8 `[*T, 24 * D / 32]`; d and m are rounded to fp16 for storage.

    Raises:
        DtypeError: If `x` is not float32.
        ShapeError: If D is no multiple of 32.

    Bits:
        BYTES: rounded quotients, ties to even; of two zeros -0 is the smaller. A block
        whose `max - min` overflows counts as non-finite.
    """
    xp = array_module(x)
    x = _blocks(x)
    finite = max_magnitude(x) < INFINITY
    x = xp.where(xp.expand_dims(finite, -1), x, np.float32(0))
    low, high = _extremes(x)
    with np.errstate(over="ignore"):
        spread = high - low
        offset = x - xp.expand_dims(low, -1)
    finite = finite & (words(spread) < INFINITY)
    d = rounded_divide(xp.where(finite, spread, np.float32(0)), _Q5_MAX)
    usable = d >= SMALLEST_SCALE
    inverse = rounded_divide(1.0, xp.where(usable, d, np.float32(1)))
    offset = xp.where(xp.expand_dims(usable, -1), offset, np.float32(0))
    q = xp.clip(xp.rint(offset * xp.expand_dims(inverse, -1)), 0, _Q5_MAX)
    nan = np.float32(np.nan)
    d = xp.where(finite, xp.where(usable, d, np.float32(0)), nan)
    m = xp.where(finite, low, nan)
    return _join(xp, _half_bytes(d), _half_bytes(m), _pack_q5(q.astype(np.uint8)))


def dequantize_q5_1(blocks: UInt8[AnyArray, "*T B"]) -> Float32[AnyArray, "*T D"]:
    """`RN(d * q + m)`.

    Args:
        blocks: uint8 `[*T, 24 * n]`.

    Returns:
        Float32 `[*T, 32 * n]`.

    Raises:
        DtypeError: If `blocks` is not uint8.
        ShapeError: If the last axis is no multiple of 24.

    Bits:
        ORDERED: the product is exact, so that contraction does not change the sum.
    """
    data = _split(blocks, Q5_1_BYTES)
    q = _unpack_q5(data[..., 4:8], data[..., 8:])
    with np.errstate(invalid="ignore"):
        values = _half_value(data, 0) * q.astype(np.float32) + _half_value(data, 2)
    return values.reshape(*blocks.shape[:-1], -1)


def round_to_f16_bits(values: Float32[AnyArray, "..."]) -> AnyArray:
    """The uint16 bits of the nearest fp16, ties to even.

    Args:
        values: Float32, any shape.

    Bits:
        BYTES: subnormal results are kept, values from 65520 on are infinite, all NaNs
        are 0x7E00.
    """
    xp = array_module(values)
    word = words(values)
    size = word & MAGNITUDE
    large = xp.maximum(size, _F16_MIN_NORMAL)
    normal = ((large + (0xFFF + ((large >> 13) & 1))) >> 13) - ((127 - 15) << 10)
    small = xp.where(size < _F16_MIN_NORMAL, size, np.uint32(0))
    subnormal = xp.rint(floats(small) * np.float32(2.0**24)).astype(np.uint32)
    half = xp.where(size < _F16_MIN_NORMAL, subnormal, normal)
    half = xp.where(size >= _F16_OVERFLOW, np.uint32(0x7C00), half)
    half = half | ((word >> 16) & 0x8000)
    return xp.where(size > INFINITY, np.uint32(0x7E00), half).astype(np.uint16)


def _blocks(x: Any) -> Any:
    require_dtype("x", x, np.float32)
    size = x.shape[-1]
    if size % KV_BLOCK:
        raise ShapeError(
            f"the last axis of `x` must be a multiple of {KV_BLOCK}; got {size}."
        )
    return x.reshape(*x.shape[:-1], size // KV_BLOCK, KV_BLOCK)


def _split(blocks: Any, block_bytes: int) -> Any:
    require_dtype("blocks", blocks, np.uint8)
    size = blocks.shape[-1]
    if size % block_bytes:
        raise ShapeError(
            f"the last axis of `blocks` must be a multiple of {block_bytes} bytes; "
            f"got {size}."
        )
    return blocks.reshape(*blocks.shape[:-1], size // block_bytes, block_bytes)


def _join(xp: Any, *parts: Any) -> Any:
    data = xp.concatenate(parts, axis=-1)
    return data.reshape(*data.shape[:-2], -1)


def _half_bytes(values: Any) -> Any:
    xp = array_module(values)
    bits = round_to_f16_bits(values)
    return xp.stack([bits & 0xFF, bits >> 8], axis=-1).astype(np.uint8)


def _half_value(data: Any, start: int) -> Any:
    """The fp16 at a byte offset of each block, as float32 `[..., 1]`."""
    pair = data[..., start : start + 2].astype(np.uint16)
    bits = pair[..., 0:1] | (pair[..., 1:2] << 8)
    return bitcast(bits, np.float16).astype(np.float32)


def _extremes(x: Any) -> tuple[Any, Any]:
    """Minimum and maximum over the last axis, with -0 below +0.

    Compared as integers, which orders zeros and subnormals on every platform.
    """
    xp = array_module(x)
    word = bitcast(x, np.int32)
    key = word ^ ((word >> 31) & 0x7FFF_FFFF)
    low, high = xp.min(key, axis=-1), xp.max(key, axis=-1)
    low, high = (k ^ ((k >> 31) & 0x7FFF_FFFF) for k in (low, high))
    return floats(low), floats(high)


def _pack_q5(q: Any) -> Any:
    """20 bytes: fifth bit of element j at bit j, then low nibbles of j and j + 16."""
    xp = array_module(q)
    bits = (q >> 4).reshape(*q.shape[:-1], 4, 8) << _bit_positions(xp, q.ndim + 1)
    high = xp.sum(bits, axis=-1, dtype=np.uint8)
    low = (q[..., :16] & 0xF) | ((q[..., 16:] & 0xF) << 4)
    return xp.concatenate([high, low], axis=-1)


def _unpack_q5(high: Any, low: Any) -> Any:
    xp = array_module(high)
    bits = (xp.expand_dims(high, -1) >> _bit_positions(xp, high.ndim + 1)) & 1
    fifth = bits.reshape(*high.shape[:-1], KV_BLOCK)
    return xp.concatenate([low & 0xF, low >> 4], axis=-1) | (fifth << 4)


def _bit_positions(xp: Any, rank: int) -> Any:
    return xp.arange(8, dtype=jnp.uint8).reshape(*(1,) * (rank - 1), 8)
