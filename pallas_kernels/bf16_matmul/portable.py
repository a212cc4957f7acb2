"""The bf16 slot program on fixed tiles."""

import functools

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float32

from pallas_kernels import portable_tiles as tiles
from pallas_kernels.rounding import runtime_zero


def bf16_matmul(
    x: BFloat16[Array, "T S*Ks"], weight: BFloat16[Array, "S N Ks"]
) -> Float32[Array, "S T N"]:
    """Slot partials: chunks of 128 columns, ascending, into one accumulator."""
    (slots, n, _), t = weight.shape, x.shape[0]
    weight = tiles.pad_rows(weight, tiles.BLOCK_K)
    steps = weight.shape[2] // tiles.BLOCK_K
    return tiles.call_tiles(
        functools.partial(_bf16_matmul_kernel, steps=steps),
        [
            tiles.as_integers(tiles.pad_tokens(x, slots, tiles.BLOCK_K)),
            tiles.as_integers(weight),
        ],
        zero=runtime_zero(x),
        slots=slots,
        tokens=t,
        rows=n,
        name="bf16_matmul_portable",
    )


def _bf16_matmul_kernel(
    zero_ref: jax.Ref, x_ref: jax.Ref, w_ref: jax.Ref, out_ref: jax.Ref, *, steps: int
) -> None:
    slot, rows, tokens = tiles.tile_index()

    def add_chunk(i: Array, acc: Array) -> Array:
        columns = pl.ds(i * tiles.BLOCK_K, tiles.BLOCK_K)
        x = tiles.as_bf16(x_ref[slot, tokens, columns])
        return acc + tiles.tile_dot(x, tiles.as_bf16(w_ref[slot, rows, columns]))

    out_ref[0] = tiles.ascending(steps, zero_ref[0], add_chunk)
