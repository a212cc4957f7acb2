"""The router in plain IEEE NumPy: one token after another, by sorting its experts."""

import math
from typing import Any

import numpy as np

from jaxtp.errors import DtypeError
from jaxtp.oracle.bounce import project
from jaxtp.oracle.moe import exponential
from jaxtp.router_config import WEIGHT_FLOOR, RouterConfig, Routes, check_routing
from jaxtp.weights import Bf16Weight

_F = np.float32


def router_logits(
    x: Any, gate: Bf16Weight, bias: Any = None, **options: Any
) -> np.ndarray:
    """What `jaxtp.router_logits` must return: `project` in "f32", plus a linear bias.

    Args:
        x: f32 or bf16 `[T, H]`.
        gate: bf16 `[E, H]`.
        bias: f32 or bf16 `[E]`, or None.
        **options: `plan`, `implementation`, `device`.

    Bits:
        As `oracle.project`.
    """
    if gate.format != "bf16":
        raise DtypeError(f"`gate` must be a bf16 weight; got {gate.format}.")
    y = project(x, gate, activation="f32", **options)
    return y if bias is None else y + np.asarray(bias).astype(_F)


def route(
    logits: Any, config: RouterConfig, bias: Any = None, active: Any = None
) -> Routes:
    """What `jaxtp.route` must return.

    Args:
        logits: f32 `[T, E]`.
        config: The rule.
        bias: f32 `[E]`, or None.
        active: bool `[E]`, or None.

    Bits:
        ORDERED, the scores included.
    """
    logits = np.asarray(logits)
    check_routing(logits, config, bias, active)
    scores = score_experts(logits, config)
    if active is not None:
        worst = -np.inf if config.score == "softmax_topk" else 0.0
        scores = np.where(np.asarray(active), scores, _F(worst))
    ids = select_experts(scores, config, bias, active)
    return Routes(logits, ids, route_weights(scores, ids, config))


def score_experts(logits: Any, config: RouterConfig) -> np.ndarray:
    """What `router.score_experts` must return where square roots round correctly.

    Args:
        logits: f32 `[T, E]`.
        config: The rule.

    Bits:
        ORDERED.
    """
    l = np.asarray(logits, _F)
    if config.score == "softmax_topk" or l.size == 0:
        return l
    with np.errstate(all="ignore"):
        if config.score == "sigmoid":
            return _F(1) / (_F(1) + exponential(-l))
        if config.score == "softmax":
            e = exponential(l - l.max(axis=1, keepdims=True))
            return e / _sum_pairs(e)
        e = exponential(-np.abs(l))
        s = e / (_F(2) + e)
        series = np.full_like(s, 1 / 17)
        for odd in range(15, 0, -2):
            series = _F(1 / odd) + series * (s * s)
        return np.sqrt(np.maximum(l, _F(0)) + (_F(2) * s) * series)


def _sum_pairs(e: np.ndarray) -> np.ndarray:
    while e.shape[1] > 1:
        # Padding with zeros at each level is padding to a power of two at the first.
        e = np.concatenate([e, np.zeros((len(e), e.shape[1] % 2), _F)], axis=1)
        e = e[:, 0::2] + e[:, 1::2]
    return e


def select_experts(
    scores: Any, config: RouterConfig, bias: Any = None, active: Any = None
) -> np.ndarray:
    """What `router.select_experts` must return, int32 `[T, k]`.

    Args:
        scores: f32 `[T, E]`.
        config: The rule.
        bias: f32 `[E]`, or None.
        active: bool `[E]`, or None.

    Bits:
        ORDERED.
    """
    scores = np.asarray(scores)
    check_routing(scores, config, bias, active, "scores")
    experts = scores.shape[1]
    keys = scores if bias is None else scores + np.asarray(bias)
    on = np.ones(experts, bool) if active is None else np.asarray(active)
    rows = [_select_token(row, on, config) for row in keys]
    return np.asarray(rows, np.int32).reshape(len(rows), config.top_k)


def _select_token(
    keys: np.ndarray, active: np.ndarray, config: RouterConfig
) -> list[int]:
    experts = range(len(keys))
    chosen = set(experts)
    if config.num_groups > 1:
        size = len(keys) // config.num_groups
        scores = []
        for group in range(config.num_groups):
            members = range(group * size, (group + 1) * size)
            first = sorted(
                members, key=lambda e: (not active[e], *_descending(keys[e]))
            )
            lowest = np.finfo(_F).min
            a, b = (keys[e] if active[e] else lowest for e in first[:2])
            with np.errstate(all="ignore"):
                scores.append(a + b)
        groups = sorted(range(config.num_groups), key=lambda g: _descending(scores[g]))
        best = set(groups[: config.top_groups])
        chosen = {e for e in experts if e // size in best}

    def order(expert: int) -> tuple[Any, ...]:
        if not active[expert]:
            return (2,)
        if expert not in chosen:
            return (1,)
        return (0, *_descending(keys[expert]))

    # Python's sort is stable, so equal keys keep the order of ids.
    return sorted(experts, key=order)[: config.top_k]


def _descending(key: np.floating) -> tuple[bool, float]:
    """NaN first, all alike; then the larger number; +0 and -0 are equal."""
    value = float(key)
    return (False, 0.0) if math.isnan(value) else (True, -value)


def route_weights(scores: Any, ids: Any, config: RouterConfig) -> np.ndarray:
    """What `router.route_weights` must return, f32 `[T, k]`.

    Args:
        scores: f32 `[T, E]`, unbiased.
        ids: int32 `[T, k]`.
        config: The rule.

    Bits:
        ORDERED.
    """
    s = np.take_along_axis(np.asarray(scores), np.asarray(ids), axis=1)
    with np.errstate(all="ignore"):
        if config.score == "softmax_topk":
            s = exponential(s - s[:, :1])
        if config.route_norm or config.score == "softmax_topk":
            total = s[:, 0]
            for slot in range(1, s.shape[1]):
                total = total + s[:, slot]
            s = s / np.maximum(total, WEIGHT_FLOOR)[:, None]
        return s * _F(config.scale)
