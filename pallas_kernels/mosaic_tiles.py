"""Shared pieces of the Mosaic GPU kernels (Hopper, sm_90a).

Every kernel computes one tile `[64 weight rows, tokens]` of one slot in one warpgroup.
Weight rows are the M operand of `wgmma` and tokens its N operand, so that the K step of
the instruction, and with it every word, is the same for any number of tokens. K is
walked in steps of 128 columns or 256; what lies beyond a slot, a row or a token is
filled with zeros by the copy engine, and products of zeros leave an accumulator as it
is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

from pallas_kernels.padding import pad_to_multiple as pad_to_multiple

TILE_ROWS = 64
"""Weight rows of a tile: the M of `wgmma`."""

TILE_K = 128
"""Columns of a pipeline step. Part of no program: steps are added in one chain."""

MAX_TILE_TOKENS = 64

STAGES = 3
"""Steps in flight. More take shared memory from other blocks of a multiprocessor."""

GRID = ("row_tile", "slot", "token_tile")

ACCUMULATOR = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_TOKEN = plgpu.Layout.WGMMA.reduce(0)

# JAX 0.10 spells transposed views and loads differently.
_LEGACY = not hasattr(plgpu, "InterpretGPUParams")

# The accumulator layout with single elements, which may be stored transposed.
_SINGLE = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)


def pad_rows(x: Array, axis: int) -> Array:
    """Makes weight rows a multiple of 8, as strides and swizzles need."""
    return pad_to_multiple(x, axis, 8)


def slot_view(x: Array, slots: int) -> Array:
    """`[T, S * W]` as `[T', S, W]`; T' is T up to 8, else a multiple of 8."""
    tokens, columns = x.shape
    view = x.reshape(tokens, slots, columns // slots)
    return view if tokens <= 8 else pad_to_multiple(view, 0, 8)


def tile_tokens(tokens: int) -> int:
    """Tokens of a tile: 8, 16, 32 or 64."""
    return min(MAX_TILE_TOKENS, max(8, 1 << (tokens - 1).bit_length()))


def swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Transforms of a shared-memory tile whose swizzle atom is `columns` wide."""
    swizzle = columns * jnp.dtype(dtype).itemsize
    return (
        plgpu.TilingTransform((8, columns)),
        plgpu.SwizzleTransform(swizzle),
    )


def largest_divisor(size: int, choices: Sequence[int]) -> int:
    """The first of `choices` that divides `size`."""
    return next(choice for choice in choices if size % choice == 0)


def transposed(ref: Any) -> Any:
    """A transposed view of a matrix in shared memory."""
    if _LEGACY:
        return plgpu.transpose_ref(ref, (1, 0))
    return ref.transpose((1, 0))


def load(ref: Any, layout: Any, *, optimized: bool = True) -> Array:
    """Reads a whole shared-memory view into registers of the given layout."""
    whole = ((slice(None),) * len(ref.shape),) if _LEGACY else ()
    return plgpu.load(ref, *whole, layout=layout, optimized=optimized)


def accumulator(tokens: int) -> plgpu.WGMMAAccumulatorRef:
    """A float32 accumulator of `wgmma`, zero at first, for `pl.run_scoped`."""
    return plgpu.WGMMAAccumulatorRef((TILE_ROWS, tokens), jnp.float32)


def zeros(tokens: int) -> Float32[Array, "64 tokens"]:
    """A zero tile in the accumulator's layout."""
    return plgpu.layout_cast(jnp.zeros((TILE_ROWS, tokens), jnp.float32), ACCUMULATOR)


def over_rows(values: Array, tokens: int) -> Array:
    """One value a row, for every token."""
    return lax.broadcast_in_dim(values, (TILE_ROWS, tokens), (0,))


def over_tokens(values: Array) -> Array:
    """One value a token, for every row."""
    return lax.broadcast_in_dim(values, (TILE_ROWS, values.shape[0]), (1,))


def weight_spec(
    columns: int, atom: int | None, dtype: Any, *, delay_release: int = 0
) -> plgpu.BlockSpec:
    """Tile `[64, columns]` of a weight `[S, N, W]`, `atom` columns a swizzle."""
    slot, rows = lax.axis_index("slot"), lax.axis_index("row_tile")
    return plgpu.BlockSpec(
        (None, TILE_ROWS, columns),
        lambda k: (slot, rows, k),
        transforms=() if atom is None else swizzled(atom, dtype),
        delay_release=delay_release,
    )


def token_spec(
    tokens: int,
    atom: int,
    dtype: Any,
    *,
    columns: int = TILE_K,
    delay_release: int = 0,
) -> plgpu.BlockSpec:
    """Tile `[tokens, columns]` of activations `[T, S, W]`, `atom` a swizzle."""
    slot, tile = lax.axis_index("slot"), lax.axis_index("token_tile")
    return plgpu.BlockSpec(
        (tokens, None, columns),
        lambda k: (tile, slot, k),
        transforms=swizzled(atom, dtype),
        delay_release=delay_release,
    )


def pipeline(
    body: Callable[..., Any],
    width: int,
    specs: Sequence[plgpu.BlockSpec],
    carry: Any = None,
    *,
    columns: int = TILE_K,
    stages: int = STAGES,
) -> Callable[..., Any]:
    """Walks a slot of `width` columns, copies running `stages` tiles ahead."""
    return plgpu.emit_pipeline(
        body,
        grid=(pl.cdiv(width, columns),),
        in_specs=specs,
        max_concurrent_steps=stages,
        init_carry=carry,
    )


def launch(
    tile: Callable[..., Array],
    operands: Sequence[Array],
    *,
    slots: int,
    tokens: int,
    rows: int,
    name: str,
) -> Float32[Array, "slots tokens rows"]:
    """Runs `tile` for each (row tile, slot, token tile) and stores its transpose.

    Args:
        tile: Gets the operands in global memory; returns float32 `[64, tile tokens]`
            in the accumulator's layout.
        operands: Arrays whose rows are padded to a multiple of 8.
        slots: Number of slots.
        tokens: Number of tokens.
        rows: Number of weight rows.
        name: Name of the kernel in profiles.
    """
    block = tile_tokens(tokens)
    # The copy engine wants strides of whole 16 bytes in the output too. Tokens are
    # whole tiles: where a tile is as wide as the output (64 rows), a store that
    # reaches past the last token lands in the next slot.
    padded = rows + -rows % 4
    padded_tokens = tokens + -tokens % block
    kernel = plgpu.kernel(
        functools.partial(_tile_kernel, tile=tile, block=block),
        out_type=jax.ShapeDtypeStruct((slots, padded_tokens, padded), jnp.float32),
        grid=(pl.cdiv(rows, TILE_ROWS), slots, pl.cdiv(tokens, block)),
        grid_names=GRID,
        scratch_types={"out_smem": plgpu.SMEM((block, TILE_ROWS), jnp.float32)},
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name=name,
    )
    return kernel(*operands)[:, :tokens, :rows]


def _tile_kernel(
    *refs: Any, out_smem: Any, tile: Callable[..., Array], block: int
) -> None:
    *operands, out_gmem = refs
    result = tile(*operands)
    transposed(out_smem)[...] = plgpu.layout_cast(result, _SINGLE)
    plgpu.commit_smem()
    rows, slot, tokens = (lax.axis_index(name) for name in GRID)
    # Rows beyond the array are skipped by the copy engine.
    plgpu.copy_smem_to_gmem(
        out_smem,
        out_gmem.at[
            slot,
            pl.ds(tokens * block, block),
            pl.ds(rows * TILE_ROWS, TILE_ROWS),
        ],
    )
    plgpu.wait_smem_to_gmem(0)
