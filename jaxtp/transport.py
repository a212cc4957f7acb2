"""Point-to-point moves over a mesh axis: every byte arrives, nothing is added.

All functions run inside `jax.shard_map(..., check_vma=False)` over one axis name, whose
size `tp` may be 1. Each is a fixed list of `lax.ppermute` calls, so the ranks are those
of the axis (`lax.axis_index`) whatever the order of the devices in the mesh.

Bits of every function: results are copies of the operands' bytes, for every dtype, NaN
payloads and -0 included.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from jaxtp.errors import MeshError, ShapeError

_MoveT = TypeVar("_MoveT", bound=Callable[..., jax.Array])


def _exact_bytes(move: _MoveT) -> _MoveT:
    """Makes a move of narrow floats a move of unsigned words, differentiable as before.

    XLA:CPU widens a bf16 or e5m2 operand to float32 on the wire and back, which changes
    NaN payloads. A bitcast has no derivative, so the tangent moves as it is.
    """

    @functools.wraps(move)
    def moved(x: Array, *args: Any, **kwargs: Any) -> jax.Array:
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
        if not narrow:
            return move(x, *args, **kwargs)
        dtype, word = x.dtype, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")

        @jax.custom_jvp
        def of_words(value: Array) -> jax.Array:
            words = lax.bitcast_convert_type(value, word)
            return lax.bitcast_convert_type(move(words, *args, **kwargs), dtype)

        def of_tangents(primals: Any, tangents: Any) -> tuple[Any, jax.Array]:
            return of_words(*primals), move(*tangents, *args, **kwargs)

        of_words.defjvp(of_tangents)

        return of_words(x)

    return cast(_MoveT, moved)


def axis_size(axis_name: str) -> int:
    """Number of ranks of the axis.

    Raises:
        MeshError: If `axis_name` is not one name, or is not bound here.
    """
    if not isinstance(axis_name, str):
        raise MeshError(
            f"`axis_name` must be the name of one mesh axis; got {axis_name!r}."
        )
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise MeshError(
            f"`axis_name` {axis_name!r} is not an axis here; call inside jax.shard_map "
            "over a mesh that has it."
        ) from error


def _check_rank(what: str, rank: int, limit: int, axis_name: str) -> None:
    if not 0 <= rank < limit:
        raise MeshError(
            f"`{what}` must lie in [0, {limit}) on axis {axis_name!r} of size "
            f"{axis_size(axis_name)}; got {rank}."
        )


def _check_blocks(x: Array, axis_name: str) -> int:
    tp = axis_size(axis_name)
    if x.ndim < 1 or x.shape[0] != tp:
        raise ShapeError(
            f"`x` must be [tp, *shape] with tp={tp}, one block for each rank of axis "
            f"{axis_name!r}; got shape {list(x.shape)}."
        )
    return tp


@_exact_bytes
def shift(
    x: Shaped[Array, "*shape"], axis_name: str, offset: int = 1
) -> Shaped[Array, "*shape"]:
    """Rank r sends `x` to rank `(r + offset) % tp`: `result[r] = x[(r - offset) % tp]`.

    Args:
        x: `[*shape]`, any dtype.
        axis_name: The mesh axis.
        offset: Any integer; a multiple of tp moves nothing.

    Raises:
        MeshError: If the axis is not bound here.
    """
    return _ring_shift(x, axis_name, offset)


def _ring_shift(x: Array, axis_name: str, offset: int) -> jax.Array:
    tp = axis_size(axis_name)
    if offset % tp == 0:
        return x
    return lax.ppermute(x, axis_name, [(r, (r + offset) % tp) for r in range(tp)])


@_exact_bytes
def exchange(
    x: Shaped[Array, "*shape"], axis_name: str, distance: int
) -> Shaped[Array, "*shape"]:
    """Swaps `x` with the partner rank: `result[r] = x[r XOR distance]`.

    Args:
        x: `[*shape]`, any dtype.
        axis_name: The mesh axis.
        distance: A power of two such that every rank has a partner.

    Raises:
        MeshError: If `distance` is not a power of two, or `2 * distance` does not
            divide the axis size.
    """
    tp = axis_size(axis_name)
    power = distance > 0 and distance & (distance - 1) == 0
    if not power or tp % (2 * distance):
        legal = [1 << k for k in range(tp.bit_length()) if tp % (2 << k) == 0]
        raise MeshError(
            "`distance` must be a power of two that gives every rank of axis "
            f"{axis_name!r} (size {tp}) a partner; got {distance}. Distances that "
            f"work: {legal}."
        )
    return lax.ppermute(x, axis_name, [(r, r ^ distance) for r in range(tp)])


@_exact_bytes
def chain_step(
    x: Shaped[Array, "*shape"], axis_name: str, step: int
) -> Shaped[Array, "*shape"]:
    """Rank `step` hands `x` to rank `step + 1`; every other rank keeps its own.

    Args:
        x: `[*shape]`, any dtype.
        axis_name: The mesh axis.
        step: The sender, below `tp - 1`.

    Raises:
        MeshError: If `step` is not the index of a rank that has a next one.
    """
    tp = axis_size(axis_name)
    _check_rank("step", step, tp - 1, axis_name)
    received = lax.ppermute(x, axis_name, [(step, step + 1)])
    return lax.select(lax.axis_index(axis_name) == step + 1, received, x)


@_exact_bytes
def ring_all_gather(
    x: Shaped[Array, "*shape"], axis_name: str, axis: int = 0, tiled: bool = True
) -> Shaped[Array, "..."]:
    """All ranks' blocks in rank order, on every rank, after `tp - 1` ring shifts.

    Args:
        x: `[*shape]`, any dtype; the same shape on every rank.
        axis_name: The mesh axis.
        axis: Where the blocks are laid out in the result; may be negative.
        tiled: True concatenates the blocks along `axis`; False stacks them along a
            new axis of length tp, like `lax.all_gather`.

    Raises:
        ShapeError: If `axis` does not exist.
    """
    tp, rank = axis_size(axis_name), lax.axis_index(axis_name)
    ndim = x.ndim if tiled else x.ndim + 1
    if not -ndim <= axis < ndim:
        raise ShapeError(
            f"`axis` must lie in [{-ndim}, {ndim}) for x of shape {list(x.shape)} and "
            f"tiled={tiled}; got {axis}."
        )
    at = axis % ndim
    block = x if tiled else jnp.expand_dims(x, at)
    width = block.shape[at]
    shape = (*block.shape[:at], tp * width, *block.shape[at + 1 :])
    gathered = jnp.zeros(shape, x.dtype)
    for hop in range(tp):
        start = (rank - hop) % tp * width
        gathered = lax.dynamic_update_slice_in_dim(gathered, block, start, at)
        if hop + 1 < tp:
            block = _ring_shift(block, axis_name, 1)
    return gathered


@_exact_bytes
def gather_to(
    x: Shaped[Array, "*shape"], axis_name: str, root: int = 0
) -> Shaped[Array, "tp *shape"]:
    """The root gets all blocks in rank order; the other ranks get zeros.

    Args:
        x: `[*shape]`, any dtype.
        axis_name: The mesh axis.
        root: The rank that receives.

    Returns:
        `[tp, *shape]`: the blocks on the root, zeros of that shape elsewhere.

    Raises:
        MeshError: If `root` is not a rank of the axis.
    """
    tp = axis_size(axis_name)
    _check_rank("root", root, tp, axis_name)
    at_root = lax.axis_index(axis_name) == root
    blocks = [
        lax.select(at_root, x, jnp.zeros_like(x))
        if source == root
        else lax.ppermute(x, axis_name, [(source, root)])
        for source in range(tp)
    ]
    return jnp.stack(blocks)


@_exact_bytes
def broadcast_from(
    x: Shaped[Array, "*shape"], axis_name: str, root: int = 0
) -> Shaped[Array, "*shape"]:
    """Every rank gets the root's `x`, by a binary tree of `ceil(log2 tp)` moves.

    Args:
        x: `[*shape]`, any dtype; only the root's bytes matter.
        axis_name: The mesh axis.
        root: The rank that sends.

    Raises:
        MeshError: If `root` is not a rank of the axis.
    """
    tp = axis_size(axis_name)
    _check_rank("root", root, tp, axis_name)
    # Ranks counted from the root: after each move the first 2 * known ranks hold it.
    place = (lax.axis_index(axis_name) - root) % tp
    known = 1
    while known < tp:
        reached = range(known, min(2 * known, tp))
        moves = [((root + p - known) % tp, (root + p) % tp) for p in reached]
        received = lax.ppermute(x, axis_name, moves)
        x = lax.select((place >= known) & (place < 2 * known), received, x)
        known *= 2
    return x


@_exact_bytes
def scatter_from(
    x: Shaped[Array, "tp *shape"], axis_name: str, root: int = 0
) -> Shaped[Array, "*shape"]:
    """Rank c gets block c of the root's `x`: `result[c] = x_root[c]`.

    Args:
        x: `[tp, *shape]`, any dtype; only the root's bytes matter.
        axis_name: The mesh axis.
        root: The rank that sends.

    Raises:
        MeshError: If `root` is not a rank of the axis.
        ShapeError: If the leading axis of `x` is not tp long.
    """
    tp, rank = _check_blocks(x, axis_name), lax.axis_index(axis_name)
    _check_rank("root", root, tp, axis_name)
    block = x[root]
    for target in range(tp):
        if target != root:
            received = lax.ppermute(x[target], axis_name, [(root, target)])
            block = lax.select(rank == target, received, block)
    return block


@_exact_bytes
def all_to_all_chunks(
    x: Shaped[Array, "tp *shape"], axis_name: str
) -> Shaped[Array, "tp *shape"]:
    """Block c goes to rank c: `result[c][r] = x[r][c]`, after `tp - 1` shifts.

    Args:
        x: `[tp, *shape]`, any dtype; block c is for rank c.
        axis_name: The mesh axis.

    Raises:
        ShapeError: If the leading axis of `x` is not tp long.
    """
    tp, rank = _check_blocks(x, axis_name), lax.axis_index(axis_name)
    result = x  # the block that a rank keeps stands at its own index already
    for offset in range(1, tp):
        block = lax.dynamic_index_in_dim(x, (rank + offset) % tp, keepdims=False)
        received = _ring_shift(block, axis_name, offset)
        source = (rank - offset) % tp
        result = lax.dynamic_update_index_in_dim(result, received, source, 0)
    return result
