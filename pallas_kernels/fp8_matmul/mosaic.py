"""The two E4M3 slot programs on Hopper tensor cores.

Codes are exact in bf16 and go through the bf16 tensor cores, whose accumulator keeps
24 bits. Columns are walked in units that never straddle two segments; a unit's product
joins the accumulator of its segment, which is scaled into the total where it ends.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float8e4m3fn, Float32, Int32

from pallas_kernels import mosaic_tiles as tiles

WIDE_SLOT = 1024
"""Slots of this many columns are walked in wider steps, which wait less often."""

MANY_TOKENS = 32
"""Tiles of this many tokens take most of a step's shared memory."""


def fp8_matmul(
    x: Array,
    code: Float8e4m3fn[Array, "S N Ks"],
    scale: Float32[Array, "S J N"],
    x_scale: Float32[Array, "T S J"] | None,
    first_slot: Int32[Array, ""],
    *,
    block_k: int,
) -> Float32[Array, "S T N"]:
    """`partial[s, t, n] = sum_j (scale[s, j, n] * x_scale[t, s, j]) * C_j[t, n]`.

    `C_j` is the dot of segment j: the columns of slot `first_slot + s` inside scale
    block `(first_slot + s) * Ks // block_k + j`.

    Args:
        x: bf16 `[T, S * Ks]` in slot layout, or float8_e4m3fn codes with `x_scale`.
        code: Slots of the weight's codes; padding is zero. Ks is a multiple of 32.
        scale: The scale of each segment and row; zero where there is no segment.
        x_scale: The activation scale of each token and segment, or None.
        first_slot: Global index of slot 0 of `code`.
        block_k: Columns of a scale block, a multiple of 32.

    Bits:
        Per segment ascending: `C_j` in one float32 accumulator from +0 in `wgmma`
        steps of 16 columns; then one fused multiply-add into the total, from +0, of
        `scale` or of the rounded product `scale * x_scale`.
    """
    (slots, n, width), tokens = code.shape, x.shape[0]
    block = tiles.tile_tokens(tokens)
    operands = [
        first_slot.reshape(1).astype(jnp.int32),
        tiles.slot_view(x.astype(jnp.bfloat16), slots),
        tiles.pad_rows(code, 1),
        tiles.pad_rows(scale, 2),
    ]
    if x_scale is not None:
        operands.append(tiles.pad_to_multiple(x_scale.transpose(1, 2, 0), 2, 8))
    return tiles.launch(
        functools.partial(
            _tile,
            cut=_Cut(width, block_k, _step_columns(width, block)),
            tokens=block,
            stages=2 if block >= MANY_TOKENS or width >= WIDE_SLOT else 4,
        ),
        operands,
        slots=slots,
        tokens=tokens,
        rows=n,
        name="fp8_matmul",
    )


def _step_columns(width: int, tokens: int) -> int:
    """Part of no program: the steps of a segment are one chain in its accumulator."""
    wide = width >= WIDE_SLOT and tokens < MANY_TOKENS
    return 2 * tiles.TILE_K if wide else tiles.TILE_K


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Static facts of slots of `width` columns under scale blocks of `block` columns.

    Attributes:
        width: Columns of a slot.
        block: Columns of a scale block.
        step: Columns of a pipeline step.
    """

    width: int
    block: int
    step: int

    @property
    def unit(self) -> int:
        """Columns that never straddle two segments, counted from any slot's start."""
        return tiles.largest_divisor(math.gcd(self.width, self.block), (128, 64, 32))

    @property
    def aligned(self) -> bool:
        """Whether every slot starts and ends with a whole block."""
        return self.width % self.block == 0

    @property
    def every_unit_ends(self) -> bool:
        """Whether every unit is a whole segment."""
        return self.aligned and self.unit == self.block

    @property
    def segments_per_tile(self) -> int:
        """The most segments that one step's columns can meet."""
        if self.aligned and self.block % self.step == 0:
            return 1
        if self.aligned and self.step % self.block == 0:
            return self.step // self.block
        return (self.step - 1) // self.block + 2

    def atom(self) -> int:
        """Columns of a swizzle atom of the codes."""
        return tiles.largest_divisor(self.width, (128, 64, 32))


def _tile(
    first_gmem: jax.Ref,
    x_gmem: jax.Ref,
    code_gmem: jax.Ref,
    scale_gmem: jax.Ref,
    *x_scale_gmem: jax.Ref,
    cut: _Cut,
    tokens: int,
    stages: int,
) -> Array:
    slot = lax.axis_index("slot")
    start = (first_gmem[0] + slot) * jnp.int32(cut.width)
    # Columns from the start of the first segment's block to the start of the slot.
    offset = lax.rem(start, jnp.int32(cut.block))

    def step(
        index: tuple[Array], code_smem: jax.Ref, x_smem: jax.Ref, *rest: Any
    ) -> tuple[Array, Array]:
        *scales, carry = rest
        column = index[0] * jnp.int32(cut.step)
        return _add_tile(code_smem, x_smem, scales, column, offset, carry, cut)

    specs = [
        tiles.weight_spec(cut.step, cut.atom(), jnp.float8_e4m3fn),
        tiles.token_spec(tokens, min(64, cut.unit), jnp.bfloat16, columns=cut.step),
        _scale_spec(tiles.TILE_ROWS, "row_tile", offset, cut),
    ]
    if x_scale_gmem:
        specs.append(_scale_spec(tokens, "token_tile", offset, cut))
    carry = (tiles.zeros(tokens), tiles.zeros(tokens))
    run = tiles.pipeline(step, cut.width, specs, carry, columns=cut.step, stages=stages)
    return run(code_gmem, x_gmem, scale_gmem, *x_scale_gmem)[1]


def _scale_spec(size: int, axis: str, offset: Array, cut: _Cut) -> plgpu.BlockSpec:
    """The scales of the segments that a tile of columns can meet.

    A copy moves whole 128 bytes, so it may bring more tokens than the tile has.
    """
    slot, first = lax.axis_index("slot"), lax.axis_index(axis) * jnp.int32(size)

    def first_segment(k: Array) -> Array:
        return (offset + k * jnp.int32(cut.step)) // jnp.int32(cut.block)

    return plgpu.BlockSpec(
        (None, pl.Element(cut.segments_per_tile), pl.Element(max(size, 32))),
        lambda k: (slot, first_segment(k), first),
    )


def _add_tile(
    code_smem: jax.Ref,
    x_smem: jax.Ref,
    scales: list[jax.Ref],
    column: Array,
    offset: Array,
    carry: tuple[Array, Array],
    cut: _Cut,
) -> tuple[Array, Array]:
    """Adds the units of one tile; the carry is (open segment's dot, total)."""
    dot, total = carry
    first = (offset + column) // jnp.int32(cut.block)
    weight = _decoded(code_smem)
    for begin in range(0, cut.step, cut.unit):
        columns = slice(begin, begin + cut.unit)
        dot = _multiply(dot, weight[:, columns], x_smem.at[:, columns], cut)
        last = column + jnp.int32(begin + cut.unit)
        end = offset + last
        row = (end - jnp.int32(1)) // jnp.int32(cut.block) - first
        if cut.segments_per_tile == 1:
            row = 0
        scaled = total + _factor(scales, row, dot.shape[1]) * dot
        if cut.every_unit_ends:
            total = scaled
            continue
        ends = lax.rem(end, jnp.int32(cut.block)) == jnp.int32(0)
        # Units of zeros beyond the slot end nothing.
        ends = (ends & (last < jnp.int32(cut.width))) | (last == jnp.int32(cut.width))
        total = jnp.where(ends, scaled, total)
        dot = jnp.where(ends, tiles.zeros(dot.shape[1]), dot)
    return dot, total


def _decoded(code_smem: jax.Ref) -> Array:
    """Codes as bf16, exact, in the layout of a `wgmma` operand in registers."""
    code = tiles.load(code_smem, tiles.ACCUMULATOR, optimized=False)
    return code.astype(jnp.float32).astype(jnp.bfloat16)


def _multiply(dot: Array, weight: Array, x_smem: jax.Ref, cut: _Cut) -> Array:
    """`dot + weight @ x.T`, or the product alone where every unit is a segment."""

    def product(acc: Any) -> None:
        plgpu.wgmma(acc, weight, tiles.transposed(x_smem))

    def fresh(acc: Any) -> Array:
        product(acc)
        return acc[...]

    if cut.every_unit_ends:
        return pl.run_scoped(fresh, tiles.accumulator(dot.shape[1]))
    start: Any = plgpu.WGMMAAccumulatorRef.init(dot)
    return pl.run_state(product)(start)


def _factor(scales: list[jax.Ref], row: Array | int, tokens: int) -> Array:
    """The scale of one segment: the weight's, or its rounded product with x's."""
    weight = tiles.load(scales[0].at[row], tiles.PER_ROW)
    factor = tiles.over_rows(weight, tokens)
    if len(scales) == 1:
        return factor
    token = tiles.load(scales[1].at[row, pl.ds(0, tokens)], tiles.PER_TOKEN)
    return factor * tiles.over_tokens(token)
