"""Ordered sums: the one place where partials are added, in the plan's order.

This module adds and moves nothing itself: `jaxtp.transport` brings each operand to the
rank that adds it. Partials become rounded words first, so a product that produced one
is never contracted into an addition here.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from jaxtp import transport
from jaxtp.errors import DtypeError, PlanError, ShapeError
from jaxtp.plan import ReductionPlan, slots_per_rank
from jaxtp.rounding import positive_zero, rounded, runtime_zero

Schedule = Literal["exchange", "chain"]

CHAIN_MIN_ELEMENTS = 1 << 20
"""Below it a result is exchanged by default: the chain's latency would rule."""

CHAIN_CHUNKS = 16
"""Pieces of the result in flight along the chain."""


def sum_slots(
    partials: Float32[Array, "slots *shape"], plan: ReductionPlan
) -> Float32[Array, "*shape"]:
    """`((+0 + p_0) + p_1) + ... + p_{S-1}`, or the plan's tree, on one device.

    Args:
        partials: `[S, *shape]`, float32, all slots in order.
        plan: The reduction plan; its `num_slots` is S or "blocks".

    Raises:
        DtypeError: If `partials` is not float32.
        ShapeError: If `partials` has no slot axis.
        PlanError: If the plan has another number of slots.

    Bits:
        ORDERED. "sequential" performs S additions, the first one to a +0 that only
        exists at run time, so -0 partials give +0; "tree" has no initial +0. The same
        words under jit, in scan, and for partials closed over by jit.
    """
    _check_partials(partials)
    slots = partials.shape[0]
    if plan.num_slots not in ("blocks", slots):
        raise PlanError(
            f"`partials` holds {slots} slots, but the plan has "
            f"num_slots={plan.num_slots}; pass all slots of the plan."
        )
    if partials.size == 0:
        return jnp.zeros(partials.shape[1:], jnp.float32)
    zero = runtime_zero(partials)
    words = _words(partials, zero)
    if plan.order == "tree":
        return _add_tree(words)
    return _add_ascending(_run_time_zeros(zero, partials.shape[1:]), words)


def ordered_sum(
    partials_local: Float32[Array, "slots_local *shape"],
    axis_name: str,
    plan: ReductionPlan,
    schedule: Schedule | None = None,
) -> Float32[Array, "*shape"]:
    """`sum_slots` of all ranks' partials, on every rank; called like `lax.psum`.

    Rank r holds slots `[r * S/tp, (r + 1) * S/tp)`. Call inside
    `jax.shard_map(..., check_vma=False)`.

    Args:
        partials_local: `[S/tp, *shape]`, float32, this rank's slots in order.
        axis_name: The mesh axis.
        plan: The reduction plan; `tp * S/tp` must be its `num_slots`, unless that is
            "blocks".
        schedule: How a sequential sum travels. "exchange": rank c receives all
            partials of piece c of the result, adds them, and the pieces are gathered.
            "chain": the running accumulator passes from rank to rank, piece by piece.
            None: the chain if the result has `CHAIN_MIN_ELEMENTS` and an exchange would
            send more bytes, else the exchange.

    Returns:
        `[*shape]`, float32, the same words on every rank.

    Raises:
        DtypeError: If the partials are not float32.
        ShapeError: If the partials have no slot axis.
        PlanError: If the ranks do not hold the plan's slots, or the schedule is
            unknown, or a schedule is given for a tree.
        MeshError: If `axis_name` is not an axis here.

    Bits:
        ORDERED. The words of `sum_slots` on the stacked partials, for every axis size,
        device order and schedule. Differentiable like `lax.psum`; the words of a
        derivative are not promised.
    """
    _check_partials(partials_local)
    tp = transport.axis_size(axis_name)
    slots = _check_slots(partials_local.shape[0], tp, plan)
    check_schedule(schedule, plan)
    local = partials_local.shape[0]
    if tp == 1 or partials_local.size == 0:
        return sum_slots(partials_local, _part_of(plan, local))
    if plan.order == "tree":
        subtree = sum_slots(partials_local, _part_of(plan, local))
        return _join_subtrees(subtree, axis_name)
    if schedule is None:
        schedule = default_schedule(partials_local[0].size, slots, tp)
    if schedule == "chain":
        return _sum_by_chain(partials_local, axis_name)
    return _sum_by_exchange(partials_local, axis_name, plan)


def default_schedule(elements: int, num_slots: int, axis_size: int) -> Schedule:
    """The schedule of a sequential sum whose result has `elements` float32 words.

    A rank sends `(S/tp + 1) * (tp - 1)/tp` times the result in an exchange, and at most
    twice the result along the chain, which takes more steps.

    Bits:
        None: a schedule moves bytes only.
    """
    s, tp = num_slots, axis_size
    exchange_sends_more = (s + tp) * (tp - 1) > 2 * tp * tp
    if elements >= CHAIN_MIN_ELEMENTS and exchange_sends_more:
        return "chain"
    return "exchange"


def _check_partials(partials: Array) -> None:
    if partials.dtype != jnp.float32:
        raise DtypeError(
            f"`partials` must be float32, one rounding for each slot; got "
            f"{partials.dtype}. Let the kernel accumulate in float32."
        )
    if partials.ndim < 1 or partials.shape[0] < 1:
        raise ShapeError(
            "`partials` must be [slots, *shape] with at least one slot; got shape "
            f"{list(partials.shape)}."
        )


def _check_slots(local: int, tp: int, plan: ReductionPlan) -> int:
    if plan.num_slots == "blocks":
        return tp * local
    expected = slots_per_rank(plan.num_slots, tp)
    if local != expected:
        raise PlanError(
            f"`partials_local` holds {local} slots on each of {tp} ranks, but the plan "
            f"has num_slots={plan.num_slots}: each rank must hold {expected}."
        )
    return plan.num_slots


def check_schedule(schedule: Schedule | None, plan: ReductionPlan) -> None:
    """Refuses an unknown schedule, or one for a tree.

    Raises:
        PlanError: Naming what the plan allows.
    """
    if schedule not in (None, "exchange", "chain"):
        raise PlanError(
            f"`schedule` must be 'exchange', 'chain' or None; got {schedule!r}."
        )
    if schedule is not None and plan.order == "tree":
        raise PlanError(
            f"order='tree' has one schedule; got schedule={schedule!r}. Leave it out."
        )


def _part_of(plan: ReductionPlan, local: int) -> ReductionPlan:
    """The plan of one rank's slots: under "tree" they are a whole subtree."""
    return plan if plan.num_slots == "blocks" else ReductionPlan(local, plan.order)


@jax.custom_jvp
def _words(partials: Array, zero: Array) -> jax.Array:
    """Rounded words; the derivative is that of the identity, which bits do not have."""
    return rounded(partials, zero)


def _words_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _words(*primals), tangents[0]


_words.defjvp(_words_jvp)


def _run_time_zeros(zero: Array, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    return jnp.broadcast_to(positive_zero(zero), shape)


def _add_ascending(
    accumulator: Float32[Array, "*shape"], words: Float32[Array, "slots *shape"]
) -> Float32[Array, "*shape"]:
    for slot in range(words.shape[0]):
        accumulator = accumulator + words[slot]
    return accumulator


def _add_tree(words: Float32[Array, "slots *shape"]) -> Float32[Array, "*shape"]:
    while words.shape[0] > 1:
        words = words[0::2] + words[1::2]
    return words[0]


def _join_subtrees(
    subtree: Float32[Array, "*shape"], axis_name: str
) -> Float32[Array, "*shape"]:
    """Adds the ranks' subtrees level by level; both partners add the same operands."""
    tp, rank = transport.axis_size(axis_name), lax.axis_index(axis_name)
    distance = 1
    while distance < tp:
        other = transport.exchange(subtree, axis_name, distance)
        # The lower rank's operand comes first on both sides: a NaN's payload may follow
        # the order of the operands, and replicas must be equal to the byte.
        upper = (rank & distance) != 0
        left = lax.select(upper, other, subtree)
        right = lax.select(upper, subtree, other)
        subtree = left + right
        distance *= 2
    return subtree


def _sum_by_exchange(
    partials: Float32[Array, "slots_local *shape"], axis_name: str, plan: ReductionPlan
) -> Float32[Array, "*shape"]:
    """Rank c adds all slots of piece c of the flattened result."""
    tp, local = transport.axis_size(axis_name), partials.shape[0]
    pieces = _cut(partials, tp)
    received = transport.all_to_all_chunks(jnp.swapaxes(pieces, 0, 1), axis_name)
    piece = sum_slots(received.reshape(tp * local, -1), plan)
    return _uncut(transport.ring_all_gather(piece, axis_name), partials)


def _sum_by_chain(
    partials: Float32[Array, "slots_local *shape"], axis_name: str
) -> Float32[Array, "*shape"]:
    """Accumulators travel the ring from rank 0 to the last, finished pieces go round.

    At tick t rank r adds its slots to piece `t - r`, and the finished piece
    `t - tp - r` passes through it. Before and after its pieces a rank computes on
    left-over values, which no rank keeps.
    """
    tp, rank = transport.axis_size(axis_name), lax.axis_index(axis_name)
    zero = runtime_zero(partials)
    pieces = _cut(_words(partials, zero), CHAIN_CHUNKS)
    start = _run_time_zeros(zero, pieces.shape[2:])
    first, last = rank == 0, rank == tp - 1

    def tick(t: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        message, result = state
        message = transport.shift(message, axis_name)
        adding, passing = t - rank, t - tp - rank
        at = jnp.clip(adding, 0, CHAIN_CHUNKS - 1)
        words = lax.dynamic_index_in_dim(pieces, at, 1, keepdims=False)
        accumulator = _add_ascending(lax.select(first, start, message[0]), words)
        finished = lax.select(last, accumulator, message[1])
        index = lax.select(last, adding, passing)
        kept = lax.dynamic_update_index_in_dim(
            result, finished, jnp.clip(index, 0, CHAIN_CHUNKS - 1), 0
        )
        keep = (index >= 0) & (index < CHAIN_CHUNKS)
        result = lax.select(keep, kept, result)
        return jnp.stack([accumulator, finished]), result

    ticks = CHAIN_CHUNKS + 2 * tp - 2
    message = jnp.zeros((2, *start.shape), jnp.float32)
    result = jnp.zeros((CHAIN_CHUNKS, *start.shape), jnp.float32)
    _, result = lax.fori_loop(0, ticks, tick, (message, result))
    return _uncut(result, partials)


def _cut(
    partials: Float32[Array, "slots *shape"], pieces: int
) -> Float32[Array, "slots pieces width"]:
    flat = partials.reshape(partials.shape[0], -1)
    padding = -flat.shape[1] % pieces
    flat = jnp.pad(flat, ((0, 0), (0, padding)))
    return flat.reshape(partials.shape[0], pieces, -1)


def _uncut(
    pieces: Float32[Array, "..."], partials: Float32[Array, "slots *shape"]
) -> Float32[Array, "*shape"]:
    shape = partials.shape[1:]
    return pieces.reshape(-1)[: partials[0].size].reshape(shape)
