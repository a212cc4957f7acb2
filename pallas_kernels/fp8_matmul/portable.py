"""The two E4M3 slot programs on fixed tiles."""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float8e4m3fn, Float32, Int32

from pallas_kernels import portable_tiles as tiles
from pallas_kernels.fp8_matmul.segments import segment_columns
from pallas_kernels.rounding import rounded, runtime_zero


def fp8_matmul(
    x: Array,
    code: Float8e4m3fn[Array, "S N Ks"],
    scale: Float32[Array, "S J N"],
    x_scale: Float32[Array, "T S J"] | None,
    first_slot: Int32[Array, ""],
    *,
    block_k: int,
) -> Float32[Array, "S T N"]:
    """Slot partials: segments ascending, each product rounded before it is added."""
    (slots, n, width), (t, _), segments = code.shape, x.shape, scale.shape[1]
    columns = segment_columns(first_slot, slots, width, segments, block_k)
    padded = block_k + -block_k % tiles.BLOCK_K
    x = _by_segment(
        x.reshape(t, slots, width).transpose(1, 0, 2), columns, block_k, padded
    )
    code = _by_segment(code, columns, block_k, padded)
    operands = [
        tiles.pad_to_multiple(x, 1, tiles.BLOCK_T),
        tiles.pad_to_multiple(code, 1, tiles.BLOCK_N),
        tiles.pad_to_multiple(scale, 2, tiles.BLOCK_N),
    ]
    if x_scale is not None:
        operands.append(
            tiles.pad_to_multiple(x_scale.transpose(1, 0, 2), 1, tiles.BLOCK_T)
        )
    return tiles.call_tiles(
        functools.partial(
            _fp8_matmul_kernel, segments=segments, chunks=padded // tiles.BLOCK_K
        ),
        operands,
        zero=runtime_zero(x),
        slots=slots,
        tokens=t,
        rows=n,
        name="fp8_matmul_portable",
    )


def _by_segment(
    values: Array, columns: Array | None, block_k: int, padded: int
) -> Array:
    """`[S, R, Ks]` as words `[S, R, J * padded]`, every segment zero-padded."""
    bits = tiles.as_integers(values)
    if columns is None:
        slots, rows, width = bits.shape
        bits = bits.reshape(slots, rows, width // block_k, block_k)
    else:
        bits = jax.vmap(lambda b, c: b.at[:, c].get(mode="fill", fill_value=0))(
            bits, columns
        )
    bits = tiles.pad_to_multiple(bits, 3, padded)
    return bits.reshape(*bits.shape[:2], -1)


def _fp8_matmul_kernel(
    zero_ref: jax.Ref,
    x_ref: jax.Ref,
    code_ref: jax.Ref,
    scale_ref: jax.Ref,
    *refs: jax.Ref,
    segments: int,
    chunks: int,
) -> None:
    *x_scale_ref, out_ref = refs
    slot, rows, tokens = tiles.tile_index()
    zero = zero_ref[0]
    decode = tiles.e4m3_to_bf16 if x_scale_ref else tiles.as_bf16

    def chunk(i: Array) -> Array:
        columns = pl.ds(i * tiles.BLOCK_K, tiles.BLOCK_K)
        x = decode(x_ref[slot, tokens, columns])
        return tiles.tile_dot(x, tiles.e4m3_to_bf16(code_ref[slot, rows, columns]))

    def add_segment(j: Array, total: Array) -> Array:
        product = chunk(j * chunks)
        for c in range(1, chunks):
            product = product + chunk(j * chunks + c)
        scale = lax.broadcast_in_dim(scale_ref[slot, j, rows], total.shape, (1,))
        if x_scale_ref:
            d = x_scale_ref[0][slot, tokens, j]
            scale = rounded(scale * lax.broadcast_in_dim(d, total.shape, (0,)), zero)
        return total + rounded(scale * product, zero)

    out_ref[0] = tiles.ascending(segments, zero, add_segment)
