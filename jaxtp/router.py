"""The router: logits, and the selection of experts with an exact tie rule."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxtp.derivative import with_derivative_of
from jaxtp.errors import DtypeError, ShapeError
from jaxtp.placement import PlacedWeight
from jaxtp.plan import ReductionPlan
from jaxtp.projection import column_parallel, project
from jaxtp.rounding import rounded, runtime_zeros
from jaxtp.router_config import RouterConfig, Routes, check_routing
from jaxtp.router_scores import route_weights as route_weights
from jaxtp.router_scores import score_experts as score_experts
from jaxtp.weights import Bf16Weight
from pallas_kernels import Implementation

_LAST = np.int32(0x7FFF_FFFF)


def router_logits(
    x: Any,
    gate: Bf16Weight | PlacedWeight,
    bias: Any = None,
    *,
    plan: ReductionPlan | None = None,
    implementation: Implementation | None = None,
) -> Float32[Array, "T E"]:
    """`logits[t, e] = sum_h x[t, h] * gate[e, h] (+ bias[e])`, the "f32" projection.

    Args:
        x: f32 or bf16 `[T, H]`; f32 is not rounded to bf16.
        gate: bf16 `[E, H]`, or one placed with `parallel="replicated"` or "column".
        bias: A *linear* bias of the gate, f32 or bf16 `[E]` (gpt-oss), or None. Not the
            selection bias, which goes to `route`.
        plan: As in `project`; a placed gate has its own.
        implementation: As in `project`.

    Raises:
        DtypeError: If the gate is not bf16, or the bias neither f32 nor bf16.
        ShapeError: If the bias does not have one element per expert.
        JaxtpError: As `project`.

    Bits:
        DOT: those of `project`, for a replicated and for a column-parallel gate.
    """
    if gate.format != "bf16":
        raise DtypeError(f"`gate` must be a bf16 weight; got {gate.format}.")
    if isinstance(gate, PlacedWeight) and gate.parallel == "column":
        y = column_parallel(x, gate, activation="f32", implementation=implementation)
    else:
        y = project(x, gate, plan=plan, activation="f32", implementation=implementation)
    if bias is None:
        return y
    if np.dtype(bias.dtype).name not in ("float32", "bfloat16"):
        raise DtypeError(f"`bias` must be float32 or bfloat16; got {bias.dtype}.")
    if bias.shape != y.shape[1:]:
        raise ShapeError(
            f"`bias` must be [{y.shape[1]}]; got shape {list(bias.shape)}."
        )
    return _add_bias(y, jnp.asarray(bias))


@jax.jit
def _add_bias(y: Array, bias: Array) -> Array:
    if y.size == 0:
        return y
    plain = lambda y, b: y + b.astype(jnp.float32)[None, :]

    def exact(y: Array, bias: Array) -> Array:
        wide = jnp.broadcast_to(bias.astype(jnp.float32)[None, :], y.shape)
        return y + rounded(wide, runtime_zeros(y, wide))

    return with_derivative_of(plain, exact)(y, bias)


def route(
    logits: Float32[Array, "T E"],
    config: RouterConfig,
    bias: Float32[Array, "E"] | None = None,
    active: Bool[Array, "E"] | None = None,
) -> Routes:
    """Scores, then `k` experts by `score + bias`, weighted by the unbiased scores.

    Args:
        logits: f32 `[T, E]`.
        config: The family's rule.
        bias: f32 `[E]`, where `config.selection_bias`.
        active: bool `[E]`; an inactive expert has score 0 and comes after all others.
            None is all active. With a traced mask the count is not checked.

    Returns:
        `Routes` of the logits, the ids and the weights, in slot order.

    Raises:
        JaxtpError: As `router_config.check_routing`.

    Bits:
        ORDERED given the scores; the scores are DOT (ORDERED where the device's square
        root rounds correctly, or the score has none). See `select_experts` and
        `route_weights`.
    """
    check_routing(logits, config, bias, active)
    return _route(jnp.asarray(logits), bias, active, config=config)


@functools.partial(jax.jit, static_argnames="config")
def _route(
    logits: Array, bias: Array | None, active: Array | None, *, config: RouterConfig
) -> Routes:
    scores = score_experts(logits, config)
    if active is not None:
        worst = -jnp.inf if config.score == "softmax_topk" else 0.0
        scores = jnp.where(active[None, :], scores, jnp.float32(worst))
    ids = _select(scores, bias, active, config=config)
    return Routes(logits, ids, route_weights(scores, ids, config))


def select_experts(
    scores: Float32[Array, "T E"],
    config: RouterConfig,
    bias: Float32[Array, "E"] | None = None,
    active: Bool[Array, "E"] | None = None,
) -> Int32[Array, "T k"]:
    """The `k` highest `scores + bias`, descending; ties go to the lower expert id.

    Keys are ordered as numbers: +0 and -0 tie. Every NaN ranks above infinity, all
    alike, so that a poisoned token cannot hide. An expert is never taken twice,
    whatever the keys (all may be -inf). Groups are chosen by the same rule.

    Args:
        scores: f32 `[T, E]`.
        config: The rule.
        bias: As in `route`.
        active: As in `route`.

    Returns:
        int32 `[T, k]`.

    Raises:
        JaxtpError: As `router_config.check_routing`.

    Bits:
        ORDERED: the ids of `oracle.select_experts`.
    """
    check_routing(scores, config, bias, active, "scores")
    return _select(jnp.asarray(scores), bias, active, config=config)


@functools.partial(jax.jit, static_argnames="config")
def _select(
    scores: Array, bias: Array | None, active: Array | None, *, config: RouterConfig
) -> Array:
    tokens, experts = scores.shape
    if scores.size == 0:
        return jnp.zeros((tokens, config.top_k), jnp.int32)
    keys = scores
    if bias is not None:
        addend = jnp.broadcast_to(bias[None, :], scores.shape)
        zero = runtime_zeros(scores, addend)
        keys = rounded(scores, zero) + rounded(addend, zero)
    rank = _descending(keys)
    if active is not None:
        rank = jnp.where(active[None, :], rank, _LAST)
    if config.num_groups > 1:
        chosen = _choose_groups(keys, rank, config)
        chosen = jnp.repeat(chosen, experts // config.num_groups, axis=1)
        # The last place stays with inactive experts.
        rank = jnp.where(chosen, rank, jnp.maximum(rank, _LAST - 1))
    return _first(rank, config.top_k)


def _descending(keys: Float32[Array, "T E"]) -> Int32[Array, "T E"]:
    """Integers that ascend where the keys descend; the last two values stay free."""
    word = lax.bitcast_convert_type(keys, jnp.int32)
    ascending = jnp.where(word < 0, word ^ _LAST, word)
    ascending = jnp.where(keys == 0, jnp.int32(0), ascending)
    return ~jnp.where(jnp.isnan(keys), _LAST, ascending)


def _first(rank: Int32[Array, "T n"], count: int) -> Int32[Array, "T count"]:
    ids = lax.broadcasted_iota(jnp.int32, rank.shape, 1)
    return lax.sort((rank, ids), dimension=1, is_stable=True, num_keys=1)[1][:, :count]


def _choose_groups(
    keys: Float32[Array, "T E"], rank: Int32[Array, "T E"], config: RouterConfig
) -> Bool[Array, "T groups"]:
    tokens, groups = keys.shape[0], config.num_groups
    lowest = jnp.float32(np.finfo(np.float32).min)
    keys = jnp.where(rank == _LAST, lowest, keys).reshape(tokens * groups, -1)
    pair = _first(rank.reshape(tokens * groups, -1), 2)
    top = jnp.take_along_axis(keys, pair, axis=1)
    score = (top[:, 0] + top[:, 1]).reshape(tokens, groups)
    best = _first(_descending(score), config.top_groups)
    every = lax.iota(jnp.int32, groups)[None, None, :]
    return (best[:, :, None] == every).any(axis=1)
