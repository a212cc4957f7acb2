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

TILE_K = 256
"""Columns of a pipeline step: the copy engine needs 16 scales of a row."""

SCALES = TILE_K // HALF
GROUPS = TILE_K // 32
MAX_DOT_TOKENS = 32
"""Groups times tokens whose integer dots are in registers at once."""


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
            tiles.pad_to_multiple(tiles.pad_rows(scale, 1), 2, SCALES),
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
            tiles.pad_to_multiple(tiles.pad_rows(scale, 1), 2, SCALES),
        ],
        slots=slots,
        tokens=tokens,
        rows=n,
        name="nvfp4_int8_matmul",
    )


def _stages(tokens: int) -> int:
    """Steps in flight: many tokens take most of a step's shared memory."""
    return 3 if tokens < 32 else 2


def _weight_specs(width: int) -> list[plgpu.BlockSpec]:
    """Tiles of the codes and of their block scales.

    Codes are swizzled, against bank conflicts, where their rows are whole atoms.
    """
    half = TILE_K // 2
    atom = next((a for a in (128, 64) if width % (2 * a) == 0), None)
    return [
        tiles.weight_spec(half, atom, jnp.uint8),
        tiles.weight_spec(SCALES, None, jnp.float8_e4m3fn),
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
            scale = tiles.load(scale_smem, mosaic_decode.ROW_BYTES, optimized=False)
            for first in range(0, TILE_K, mosaic_decode.COLUMNS):
                # The next columns are decoded while these are multiplied.
                weight = mosaic_decode.scaled(code, scale, first)
                columns = slice(first, first + mosaic_decode.COLUMNS)
                plgpu.wgmma(acc, weight, tiles.transposed(x_smem.at[:, columns]))
            plgpu.wgmma_wait(0)

        atom = tiles.largest_divisor(width, (64, 32))
        specs = [
            *_weight_specs(width),
            tiles.token_spec(tokens, atom, jnp.bfloat16, columns=TILE_K),
        ]
        run = tiles.pipeline(step, width, specs, columns=TILE_K, stages=_stages(tokens))
        run(code_gmem, scale_gmem, x_gmem)
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
        scale = tiles.load(scale_smem, mosaic_decode.ROW_BYTES, optimized=False)
        scales = mosaic_decode.row_scales(scale)
        weights = [
            mosaic_decode.doubled(code, first)
            for first in range(0, TILE_K, mosaic_decode.COLUMNS)
        ]
        # As many accumulators at once as registers allow: products wait less often.
        batch = max(1, MAX_DOT_TOKENS // tokens)
        for begin in range(0, GROUPS, batch):
            groups = range(begin, begin + batch)
            dots = _half_dots(weights, q_smem, groups, tokens)
            for g, pair in zip(groups, dots, strict=True):
                u = _scaled_sum(pair, scales[2 * g : 2 * g + 2], tokens)
                d = tiles.load(d_smem.at[g, pl.ds(0, tokens)], tiles.PER_TOKEN)
                acc = acc + mosaic_decode.rounded_product(tiles.over_tokens(d), u)
        return acc

    specs = [
        *_weight_specs(width),
        tiles.token_spec(tokens, HALF, jnp.bfloat16, columns=TILE_K),
        plgpu.BlockSpec(
            # A copy moves whole 128 bytes.
            (None, GROUPS, pl.Element(max(tokens, 32))),
            lambda k: (slot, k, first),
        ),
    ]
    run = tiles.pipeline(
        step, width, specs, tiles.zeros(tokens), columns=TILE_K, stages=_stages(tokens)
    )
    return run(code_gmem, scale_gmem, q_gmem, d_gmem)


def _half_dots(
    weights: list[Array], q_smem: jax.Ref, groups: range, tokens: int
) -> list[tuple[Array, Array]]:
    """The integer dots of both halves of groups, each from a zero accumulator."""
    halves = [2 * g + h for g in groups for h in range(2)]

    def all_halves(*accs: Any) -> list[tuple[Array, Array]]:
        for half, acc in zip(halves, accs, strict=True):
            column = half * HALF
            part = q_smem.at[:, column : column + HALF]
            block, begin = divmod(column, mosaic_decode.COLUMNS)
            weight = weights[block][:, begin : begin + HALF]
            plgpu.wgmma(acc, weight, tiles.transposed(part))
        dots = [acc[...] for acc in accs]
        return list(zip(dots[::2], dots[1::2], strict=True))

    accs = [tiles.accumulator(tokens)] * len(halves)
    return pl.run_scoped(all_halves, *accs)


def _scaled_sum(dots: tuple[Array, Array], scales: list[Array], tokens: int) -> Array:
    """`RN(s_0 * I_0 + s_1 * I_1)`; both products are exact, so a fused add is too."""
    halves = []
    for scale, dot in zip(scales, dots, strict=True):
        half = scale.astype(jnp.float32) * jnp.float32(0.5)
        halves.append(tiles.over_rows(half, tokens) * dot)
    return halves[0] + halves[1]
