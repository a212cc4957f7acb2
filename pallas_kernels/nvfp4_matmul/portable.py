"""The two NVFP4 slot programs on fixed tiles."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float8e4m3fn, Float32, Int8, UInt8

from pallas_kernels import portable_tiles as tiles
from pallas_kernels.rounding import rounded, runtime_zero

GROUP = 16
HALVES = tiles.BLOCK_K // GROUP


def nvfp4_matmul(
    x: BFloat16[Array, "T S*Ks"],
    code: UInt8[Array, "S N Ks/2"],
    scale: Float8e4m3fn[Array, "S N Ks/16"],
) -> Float32[Array, "S T N"]:
    """Slot partials: each chunk decoded to bf16, then the bf16 program."""
    (slots, n, _), t = code.shape, x.shape[0]
    code, scale = _pad_weight(code, scale)
    return tiles.call_tiles(
        functools.partial(_nvfp4_matmul_kernel, steps=scale.shape[2] // HALVES),
        [tiles.as_integers(tiles.pad_tokens(x, slots, tiles.BLOCK_K)), code, scale],
        zero=runtime_zero(x),
        slots=slots,
        tokens=t,
        rows=n,
        name="nvfp4_matmul_portable",
    )


def nvfp4_int8_matmul(
    q: Int8[Array, "T S*Ks"],
    d: Float32[Array, "T S*Ks/32"],
    code: UInt8[Array, "S N Ks/2"],
    scale: Float8e4m3fn[Array, "S N Ks/16"],
) -> Float32[Array, "S T N"]:
    """Slot partials in separate roundings: groups of 32 columns ascending."""
    (slots, n, _), t = code.shape, q.shape[0]
    code, scale = _pad_weight(code, scale)
    return tiles.call_tiles(
        functools.partial(_nvfp4_int8_kernel, steps=scale.shape[2] // HALVES),
        [
            tiles.pad_tokens(q, slots, tiles.BLOCK_K),
            tiles.pad_tokens(d, slots, HALVES // 2),
            code,
            scale,
        ],
        zero=runtime_zero(d),
        slots=slots,
        tokens=t,
        rows=n,
        name="nvfp4_int8_matmul_portable",
    )


def _pad_weight(code: Array, scale: Array) -> tuple[Array, Array]:
    return (
        tiles.pad_rows(code, tiles.BLOCK_K // 2),
        tiles.as_integers(tiles.pad_rows(scale, HALVES)),
    )


def _doubled(code: UInt8[Array, "R C"]) -> Int8[Array, "R 2*C"]:
    """E2M1 values times two (integers up to 12), low nibble first."""
    nibbles = jnp.stack([code & jnp.uint8(15), code >> jnp.uint8(4)], axis=-1)
    nibbles = nibbles.reshape(code.shape[0], -1).astype(jnp.int32)
    exponent = (nibbles >> jnp.int32(1)) & jnp.int32(3)
    mantissa = nibbles & jnp.int32(1)
    normal = (jnp.int32(2) + mantissa) << jnp.maximum(
        exponent - jnp.int32(1), jnp.int32(0)
    )
    magnitude = jnp.where(exponent == jnp.int32(0), mantissa, normal)
    return jnp.where(nibbles >= jnp.int32(8), -magnitude, magnitude)


def _half_scale(bits: UInt8[Array, "R H"]) -> Float32[Array, "R H"]:
    """Half of each block scale, exact; it undoes the doubling of the codes."""
    scale = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
    return scale * jnp.float32(0.5)


def _nvfp4_matmul_kernel(
    zero_ref: jax.Ref,
    x_ref: jax.Ref,
    code_ref: jax.Ref,
    scale_ref: jax.Ref,
    out_ref: jax.Ref,
    *,
    steps: int,
) -> None:
    slot, rows, tokens = tiles.tile_index()

    def add_chunk(i: Array, acc: Array) -> Array:
        code = code_ref[slot, rows, pl.ds(i * (tiles.BLOCK_K // 2), tiles.BLOCK_K // 2)]
        scale = _half_scale(scale_ref[slot, rows, pl.ds(i * HALVES, HALVES)])
        value = _doubled(code).astype(jnp.float32).reshape(-1, HALVES, GROUP)
        weight = value * lax.broadcast_in_dim(scale, value.shape, (0, 1))
        weight = weight.reshape(-1, tiles.BLOCK_K)
        x = tiles.as_bf16(x_ref[slot, tokens, pl.ds(i * tiles.BLOCK_K, tiles.BLOCK_K)])
        return acc + tiles.tile_dot(x, weight.astype(jnp.bfloat16))

    out_ref[0] = tiles.ascending(steps, zero_ref[0], add_chunk)


def _nvfp4_int8_kernel(
    zero_ref: jax.Ref,
    q_ref: jax.Ref,
    d_ref: jax.Ref,
    code_ref: jax.Ref,
    scale_ref: jax.Ref,
    out_ref: jax.Ref,
    *,
    steps: int,
) -> None:
    slot, rows, tokens = tiles.tile_index()
    zero = zero_ref[0]

    def add_chunk(i: Array, acc: Array) -> Array:
        code = code_ref[slot, rows, pl.ds(i * (tiles.BLOCK_K // 2), tiles.BLOCK_K // 2)]
        scale = _half_scale(scale_ref[slot, rows, pl.ds(i * HALVES, HALVES)]).T
        q = q_ref[slot, tokens, pl.ds(i * tiles.BLOCK_K, tiles.BLOCK_K)]
        # Integers below 2^15: exact in float32 in any order of addition.
        halves = lax.dot_general(
            q.astype(jnp.float32).reshape(-1, HALVES, GROUP),
            _doubled(code).astype(jnp.float32).reshape(-1, HALVES, GROUP),
            (((2,), (2,)), ((1,), (1,))),
        )
        scaled = lax.broadcast_in_dim(scale, halves.shape, (0, 2)) * halves
        for g in range(HALVES // 2):
            u = scaled[2 * g] + scaled[2 * g + 1]
            d = d_ref[slot, tokens, i * (HALVES // 2) + g]
            d = lax.broadcast_in_dim(d, u.shape, (0,))
            acc = acc + rounded(d * u, zero)
        return acc

    out_ref[0] = tiles.ascending(steps, zero, add_chunk)
