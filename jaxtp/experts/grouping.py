"""Pairs of token and slot, grouped by expert: a stable counting sort.

Pair `p = token * k + slot`. Inside a group, pairs keep their order.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Int32

from jaxtp.errors import ConfigError, DtypeError, ExpertError, ShapeError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouping:
    """Pairs in expert order, of static shape.

    Attributes:
        pairs: int32 `[T * k]`, the pair at each place.
        offsets: int32 `[E + 1]`; expert e takes places `[offsets[e], offsets[e + 1])`.
        places: int32 `[T * k]`, the place of each pair, the inverse of `pairs`.
    """

    pairs: Any
    offsets: Any
    places: Any


class ExpertCsr(NamedTuple):
    """The groups that are not empty, on the host.

    Attributes:
        ex_ids: int32, experts with at least one pair, ascending.
        ex_off: int32, `len(ex_ids) + 1` offsets into `ex_pairs`.
        ex_pairs: int32 `[P]`, pairs by expert.
        pair_tok: int32 `[P]`, the input row of each pair.
    """

    ex_ids: np.ndarray
    ex_off: np.ndarray
    ex_pairs: np.ndarray
    pair_tok: np.ndarray


class OwnerPart(NamedTuple):
    """The pairs of one owner of experts, in pair order, on the host.

    Attributes:
        experts: int32, local expert ids.
        tokens: int32, token rows.
        pairs: int32, global pair ids.
    """

    experts: np.ndarray
    tokens: np.ndarray
    pairs: np.ndarray


def group_routes(ids: Int32[Array, "T k"], num_experts: int) -> Grouping:
    """Sorts the pairs `[T * k]` by expert, stably.

    Args:
        ids: int32 `[T, k]`; duplicates in a row are legal.
        num_experts: E.

    Raises:
        DtypeError: If the ids are not int32.
        ShapeError: If they are not `[tokens, slots]`.
        ExpertError: If a concrete id is outside `[0, E)`. A traced one is not checked;
            its pair then stands outside every group.

    Bits:
        BYTES.
    """
    _check_ids(ids, num_experts)
    return _group(jnp.asarray(ids), num_experts=int(num_experts))


@functools.partial(jax.jit, static_argnames="num_experts")
def _group(ids: Array, *, num_experts: int) -> Grouping:
    flat = ids.reshape(-1)
    order = lax.iota(jnp.int32, flat.size)
    experts, pairs = lax.sort((flat, order), num_keys=1, is_stable=True)
    edges = lax.iota(jnp.int32, num_experts + 1)
    offsets = jnp.searchsorted(experts, edges, side="left").astype(jnp.int32)
    places = jnp.zeros_like(pairs).at[pairs].set(order, unique_indices=True)
    return Grouping(pairs, offsets, places)


def expert_csr(ids: Any, num_experts: int, pair_rows: Any = None) -> ExpertCsr:
    """The same groups without the empty ones, from concrete ids.

    Args:
        ids: int32 `[T, k]`, or `[P]` where `pair_rows` is given.
        num_experts: E.
        pair_rows: int32 `[P]`, the input row of each pair; None is `p // k`.

    Raises:
        JaxtpError: As `group_routes`; also if a row is missing.

    Bits:
        BYTES.
    """
    found = np.asarray(ids)
    if pair_rows is None:
        _check_ids(found, num_experts)
        rows = np.repeat(np.arange(len(found), dtype=np.int32), found.shape[1])
    else:
        rows = np.asarray(pair_rows)
        _check_ids(found, num_experts, rank=1)
        if rows.shape != found.shape or rows.dtype != np.int32:
            raise ShapeError(
                f"`pair_rows` must be int32 {list(found.shape)}; got {rows.dtype} "
                f"{list(rows.shape)}."
            )
    flat = found.reshape(-1)
    pairs = np.argsort(flat, kind="stable").astype(np.int32)
    experts, starts = np.unique(flat[pairs], return_index=True)
    offsets = np.append(starts, flat.size).astype(np.int32)
    return ExpertCsr(experts.astype(np.int32), offsets, pairs, rows)


def partition_by_owner(
    ids: Any, num_experts: int, owners: int
) -> tuple[OwnerPart, ...]:
    """The pairs of each owner of `E / owners` consecutive experts, in pair order.

    Args:
        ids: int32 `[T, k]`, concrete.
        num_experts: E.
        owners: Number of owners, a divisor of E.

    Raises:
        ConfigError: If `owners` does not divide E.
        JaxtpError: As `group_routes`.

    Bits:
        BYTES.
    """
    found = np.asarray(ids)
    _check_ids(found, num_experts)
    if owners < 1 or num_experts % owners:
        raise ConfigError(
            f"{num_experts} experts are not divisible by {owners} owners; pad the bank "
            "or choose a divisor."
        )
    share = num_experts // owners
    flat, parts = found.reshape(-1), []
    for owner in range(owners):
        pairs = np.flatnonzero(flat // share == owner).astype(np.int32)
        tokens = pairs // np.int32(found.shape[1])
        parts.append(OwnerPart(flat[pairs] % np.int32(share), tokens, pairs))
    return tuple(parts)


def _check_ids(ids: Any, num_experts: int, rank: int = 2) -> None:
    if num_experts < 1:
        raise ConfigError(f"`num_experts` must be at least 1; got {num_experts}.")
    if np.dtype(ids.dtype) != np.int32:
        raise DtypeError(f"`ids` must be int32; got {np.dtype(ids.dtype).name}.")
    if len(ids.shape) != rank or (rank == 2 and ids.shape[1] < 1):
        expected = "[tokens, slots]" if rank == 2 else "[pairs]"
        raise ShapeError(f"`ids` must be {expected}; got shape {list(ids.shape)}.")
    if isinstance(ids, Tracer):
        return
    found = np.asarray(ids)
    wrong = np.argwhere((found < 0) | (found >= num_experts))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise ExpertError(
            f"`ids` must lie in [0, {num_experts}); got {found[at]} at {at}."
        )
