"""The two NVFP4 slot programs on Hopper tensor cores.

Codes are decoded to bf16 in registers, which is the left operand of `wgmma`. "bf16"
multiplies each 16 columns by their block scale, exact, and runs the bf16 program.
"int8" multiplies doubled codes by integer activations, both exact in bf16, 16 columns
into a fresh accumulator: integers below 2^15, exact in any order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float8e4m3fn, Float32, Int8, UInt8

from pallas_kernels import mosaic_tiles as tiles
from pallas_kernels.nvfp4_matmul import mosaic_decode

HALF = 16
"""Columns of a block scale, and of one `wgmma` step."""

HALVES = tiles.TILE_K // HALF
GROUPS = HALVES // 2


def nvfp4_matmul(
    x: BFloat16[Array, "T S*Ks"],
    code: UInt8[Array, "S N Ks/2"],
    scale: Float8e4m3fn[Array, "S N Ks/16"],
) -> Float32[Array, "S T N"]:
    """`partial[s, t, n] = sum_k x[t, s, k] * (code * scale)[s, n, k]`.

    Args:
        x: Activations in slot layout; padding columns are zero.
        code: Two E2M1 codes a byte, the low nibble the even column; padding is zero.
        scale: One block scale for 16 columns; padding is zero.

    Bits:
        Those of `bf16_matmul` on the weight `code * scale`: the same products in the
        same `wgmma` steps of 16 columns.
    """
    slots, n, _ = code.shape
    width, tokens = 2 * code.shape[2], x.shape[0]
    return tiles.launch(
        functools.partial(_bf16_tile, width=width, tokens=tiles.tile_tokens(tokens)),
        [
            tiles.slot_view(x, slots),
            tiles.pad_rows(code, 1),
            tiles.pad_rows(_columns_first(scale), 2),
        ],
        slots=slots,
        tokens=tokens,
        rows=n,
        name="nvfp4_matmul",
    )


def nvfp4_int8_matmul(
    q: Int8[Array, "T S*Ks"],
    d: Float32[Array, "T S*Ks/32"],
    code: UInt8[Array, "S N Ks/2"],
    scale: Float8e4m3fn[Array, "S N Ks/16"],
) -> Float32[Array, "S T N"]:
    """`acc = RN(acc + RN(d * u))`, `u = RN(s_0 * I_0 + s_1 * I_1)`, groups ascending.

    Args:
        q: Activation codes in slot layout; padding columns are zero.
        d: The activation scale of each group of 32 columns.
        code: Two E2M1 codes a byte, the low nibble the even column; padding is zero.
        scale: One block scale for 16 columns; padding is zero.

    Bits:
        ORDERED: the words of NumPy. `d * u` is a product without contraction.
    """
    slots, n, _ = code.shape
    width, tokens = 2 * code.shape[2], q.shape[0]
    d = d.reshape(tokens, slots, width // 32).transpose(1, 2, 0)
    return tiles.launch(
        functools.partial(_int8_tile, width=width, tokens=tiles.tile_tokens(tokens)),
        [
            tiles.slot_view(q.astype(jnp.bfloat16), slots),
            tiles.pad_to_multiple(d, 2, 8),
            tiles.pad_rows(code, 1),
            tiles.pad_rows(_columns_first(scale), 2),
        ],
        slots=slots,
        tokens=tokens,
        rows=n,
        name="nvfp4_int8_matmul",
    )


def _columns_first(
    scale: Float8e4m3fn[Array, "S N H"],
) -> BFloat16[Array, "S H N"]:
    """Block scales as the copy engine can tile them: bf16, exact, rows last."""
    return scale.transpose(0, 2, 1).astype(jnp.float32).astype(jnp.bfloat16)


def _weight_specs(width: int) -> list[plgpu.BlockSpec]:
    """Tiles of the codes and of their block scales.

    Codes are swizzled, against bank conflicts, where their rows are whole atoms.
    """
    slot, rows = lax.axis_index("slot"), lax.axis_index("row_tile")
    half = tiles.TILE_K // 2
    atom = half if width % tiles.TILE_K == 0 else None
    return [
        tiles.weight_spec(half, atom, jnp.uint8),
        plgpu.BlockSpec((None, HALVES, tiles.TILE_ROWS), lambda k: (slot, k, rows)),
    ]


def _bf16_tile(
    x_gmem: jax.Ref,
    code_gmem: jax.Ref,
    scale_gmem: jax.Ref,
    *,
    width: int,
    tokens: int,
) -> Array:
    def accumulate(acc: Any) -> Array:
        def step(
            _: object, code_smem: jax.Ref, scale_smem: jax.Ref, x_smem: jax.Ref
        ) -> None:
            code = tiles.load(code_smem, mosaic_decode.ROW_BYTES, optimized=False)
            scales = [
                tiles.load(scale_smem.at[h], tiles.PER_ROW) for h in range(HALVES)
            ]
            weight = mosaic_decode.scaled(code, scales)
            plgpu.wgmma(acc, weight, tiles.transposed(x_smem))
            plgpu.wgmma_wait(0)

        atom = tiles.largest_divisor(width, (64, 32))
        specs = [*_weight_specs(width), tiles.token_spec(tokens, atom, jnp.bfloat16)]
        tiles.pipeline(step, width, specs)(code_gmem, scale_gmem, x_gmem)
        return acc[...]

    return pl.run_scoped(accumulate, tiles.accumulator(tokens))


def _int8_tile(
    q_gmem: jax.Ref,
    d_gmem: jax.Ref,
    code_gmem: jax.Ref,
    scale_gmem: jax.Ref,
    *,
    width: int,
    tokens: int,
) -> Array:
    slot, first = lax.axis_index("slot"), lax.axis_index("token_tile") * tokens

    def step(
        _: object,
        code_smem: jax.Ref,
        scale_smem: jax.Ref,
        q_smem: jax.Ref,
        d_smem: jax.Ref,
        acc: Array,
    ) -> Array:
        code = tiles.load(code_smem, mosaic_decode.ROW_BYTES, optimized=False)
        weight = mosaic_decode.doubled(code)
        for g in range(GROUPS):
            dots = _half_dots(weight, q_smem, g, tokens)
            u = _scaled_sum(dots, scale_smem, g, tokens)
            d = tiles.load(d_smem.at[g, pl.ds(0, tokens)], tiles.PER_TOKEN)
            acc = acc + mosaic_decode.rounded_product(tiles.over_tokens(d), u)
        return acc

    specs = [
        *_weight_specs(width),
        tiles.token_spec(tokens, HALF, jnp.bfloat16),
        plgpu.BlockSpec(
            # A copy moves whole 128 bytes.
            (None, GROUPS, pl.Element(max(tokens, 32))),
            lambda k: (slot, k, first),
        ),
    ]
    run = tiles.pipeline(step, width, specs, tiles.zeros(tokens))
    return run(code_gmem, scale_gmem, q_gmem, d_gmem)


def _half_dots(
    weight: Array, q_smem: jax.Ref, group: int, tokens: int
) -> tuple[Array, Array]:
    """The integer dots of both halves of a group, each from a zero accumulator."""

    def both(acc_0: Any, acc_1: Any) -> tuple[Array, Array]:
        for h, acc in enumerate((acc_0, acc_1)):
            columns = slice((2 * group + h) * HALF, (2 * group + h + 1) * HALF)
            part = q_smem.at[:, columns]
            plgpu.wgmma(acc, weight[:, columns], tiles.transposed(part))
        return acc_0[...], acc_1[...]

    acc = tiles.accumulator(tokens)
    return pl.run_scoped(both, acc, acc)


def _scaled_sum(
    dots: tuple[Array, Array], scale_smem: jax.Ref, group: int, tokens: int
) -> Array:
    """`RN(s_0 * I_0 + s_1 * I_1)`; both products are exact, so a fused add is too."""
    halves = []
    for h, dot in enumerate(dots):
        scale = tiles.load(scale_smem.at[2 * group + h], tiles.PER_ROW)
        half = scale.astype(jnp.float32) * jnp.float32(0.5)
        halves.append(tiles.over_rows(half, tokens) * dot)
    return halves[0] + halves[1]
