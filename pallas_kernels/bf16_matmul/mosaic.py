"""The bf16 slot program on Hopper tensor cores."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32

from pallas_kernels import mosaic_tiles as tiles


def bf16_matmul(
    x: BFloat16[Array, "T S*Ks"], weight: BFloat16[Array, "S N Ks"]
) -> Float32[Array, "S T N"]:
    """`partial[s, t, n] = sum_k x[t, s * Ks + k] * weight[s, n, k]`.

    Weights with N no multiple of 8 are copied once to pad it.

    Args:
        x: Activations in slot layout; padding columns are zero.
        weight: Slots of the weight; padding is zero. Ks is a multiple of 32.

    Bits:
        One float32 accumulator from +0 in `wgmma` steps of 16 columns, K ascending.
        The step, and so the words, are those of every T.
    """
    slots, n, width = weight.shape
    tokens = x.shape[0]
    return tiles.launch(
        functools.partial(
            _tile,
            width=width,
            tokens=tiles.tile_tokens(tokens),
            atom=tiles.largest_divisor(width, (64, 32)),
        ),
        [tiles.slot_view(x, slots), tiles.pad_rows(weight, 1)],
        slots=slots,
        tokens=tokens,
        rows=n,
        name="bf16_matmul",
    )


def _tile(
    x_gmem: jax.Ref, w_gmem: jax.Ref, *, width: int, tokens: int, atom: int
) -> Array:
    """One tile; `atom` is the width of the swizzle, which depends on Ks alone."""

    def accumulate(acc: Any) -> Array:
        def step(_: object, w_smem: jax.Ref, x_smem: jax.Ref) -> None:
            plgpu.wgmma(acc, w_smem, tiles.transposed(x_smem))
            # One product stays in flight; its operands are released one step late.
            plgpu.wgmma_wait(1)

        specs = [
            tiles.weight_spec(tiles.TILE_K, atom, jnp.bfloat16, delay_release=1),
            tiles.token_spec(tokens, atom, jnp.bfloat16, delay_release=1),
        ]
        tiles.pipeline(step, width, specs)(w_gmem, x_gmem)
        return acc[...]

    return pl.run_scoped(accumulate, tiles.accumulator(tokens))
