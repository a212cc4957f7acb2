"""Where the segments of a slot stand: runs of columns inside one scale block."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32


def segment_columns(
    first_slot: Int32[Array, ""], slots: int, width: int, segments: int, block_k: int
) -> Int32[Array, "S J block_k"] | None:
    """The local column of every element of every segment, `width` where there is none.

    Global slot g holds columns `[g * width, (g + 1) * width)`; its segment j lies in
    scale block `g * width // block_k + j`.

    Args:
        first_slot: Global index of the first slot here.
        slots: Number of slots here.
        width: Columns of a slot.
        segments: The largest number of segments of any slot of the weight.
        block_k: Columns of a scale block.

    Returns:
        None where a slot is a whole number of blocks: then segments are plain runs of
        `block_k` columns.
    """
    if width % block_k == 0:
        return None
    shape = (slots, segments, block_k)
    slot, segment, place = (_iota(shape, axis) for axis in range(3))
    start = (first_slot + slot) * jnp.int32(width)
    block_start = (start // jnp.int32(block_k) + segment) * jnp.int32(block_k)
    # A segment starts at its first own column, so that chunks count from there.
    first = jnp.maximum(block_start - start, jnp.int32(0))
    stop = jnp.minimum(block_start - start + jnp.int32(block_k), jnp.int32(width))
    return jnp.where(first + place < stop, first + place, jnp.int32(width))


def columns_to_segments(
    first_slot: Int32[Array, ""], slots: int, width: int, block_k: int
) -> Int32[Array, "S width"]:
    """For each local column, its place in `[J, block_k]` flattened; see above."""
    slot, column = (_iota((slots, width), axis) for axis in range(2))
    start = (first_slot + slot) * jnp.int32(width)
    block = (start + column) // jnp.int32(block_k)
    segment = block - start // jnp.int32(block_k)
    first = jnp.maximum(block * jnp.int32(block_k) - start, jnp.int32(0))
    return segment * jnp.int32(block_k) + column - first


def _iota(shape: tuple[int, ...], axis: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)
