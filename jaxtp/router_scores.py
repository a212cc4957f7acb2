"""What logits become before the selection, and the weights of what was selected."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxtp import formats
from jaxtp.activation import exponential
from jaxtp.derivative import with_derivative_of
from jaxtp.rounding import rounded, runtime_zeros
from jaxtp.router_config import WEIGHT_FLOOR, RouterConfig

_ATANH = tuple(np.float32(1.0 / n) for n in range(17, 1, -2))
_ONE = np.float32(1.0)


def score_experts(
    logits: Float32[Array, "T E"], config: RouterConfig
) -> Float32[Array, "T E"]:
    """What the logits become before the selection; "softmax_topk" keeps them.

    "sigmoid": `1 / (1 + exp(-l))`. "softmax": `exp(l - max) / sum`, the sum a tree of
    adjacent pairs over the experts. "sqrt_softplus": `sqrt(max(l, 0) + log(1 +
    exp(-|l|)))`.

    Args:
        logits: f32 `[T, E]`.
        config: The rule.

    Bits:
        DOT: as `route`.
    """
    return _scores(jnp.asarray(logits), config)


def route_weights(
    scores: Float32[Array, "T E"], ids: Int32[Array, "T k"], config: RouterConfig
) -> Float32[Array, "T k"]:
    """`w = s / max(sum, 1e-20) * scale`, the sum in slot order; or `w = s * scale`.

    "softmax_topk": `s = exp(l - l_0)`, and `w = s / sum * scale`.

    Args:
        scores: f32 `[T, E]`, unbiased.
        ids: int32 `[T, k]`.
        config: The rule.

    Bits:
        ORDERED: the words of `oracle.route_weights`.
    """
    return _weights(jnp.asarray(scores), jnp.asarray(ids), config=config)


@functools.partial(jax.jit, static_argnames="config")
def _scores(logits: Array, config: RouterConfig) -> Array:
    if config.score == "softmax_topk" or logits.size == 0:
        return logits
    score, plain = _SCORES[config.score]

    def exact(logits: Array) -> Array:
        zero = runtime_zeros(logits)
        return score(rounded(logits, zero), zero)

    return with_derivative_of(plain, exact)(logits)


def _sigmoid(logits: Array, zero: Array) -> Array:
    e = exponential(-logits, zero)
    return jnp.asarray(formats.rounded_divide(1.0, _ONE + e))


def _softmax(logits: Array, zero: Array) -> Array:
    top = _fold(logits, jnp.maximum, -jnp.inf)
    e = exponential(logits - top, zero)
    return jnp.asarray(formats.rounded_divide(e, _fold(e, jnp.add, 0.0)))


def _sqrt_softplus(logits: Array, zero: Array) -> Array:
    e = exponential(-jnp.abs(logits), zero)
    # log(1 + e) = 2 atanh(e / (2 + e)), a series in the square of a third at most.
    s = jnp.asarray(formats.rounded_divide(e, jnp.float32(2.0) + e))
    square = rounded(s * s, zero)
    series = jnp.full_like(s, _ATANH[0])
    for coefficient in (*_ATANH[1:], _ONE):
        series = coefficient + rounded(series * square, zero)
    logarithm = rounded(jnp.float32(2.0) * s * series, zero)
    return jnp.sqrt(jnp.maximum(logits, jnp.float32(0.0)) + logarithm)


_SCORES: dict[str, tuple[Callable[..., Array], Callable[[Array], Array]]] = {
    "sigmoid": (_sigmoid, jax.nn.sigmoid),
    "softmax": (_softmax, jax.nn.softmax),
    "sqrt_softplus": (_sqrt_softplus, lambda l: jnp.sqrt(jax.nn.softplus(l))),
}


def _fold(values: Array, combine: Callable[..., Array], neutral: float) -> Array:
    """`[T, 1]`: adjacent pairs, then pairs of pairs; padded to a power of two."""
    experts = values.shape[-1]
    extra = (1 << (experts - 1).bit_length()) - experts
    values = jnp.pad(values, ((0, 0), (0, extra)), constant_values=neutral)
    while values.shape[-1] > 1:
        values = combine(values[:, 0::2], values[:, 1::2])
    return values


@functools.partial(jax.jit, static_argnames="config")
def _weights(scores: Array, ids: Array, *, config: RouterConfig) -> Array:
    picked = jnp.take_along_axis(scores, ids, axis=1)
    if picked.size == 0:
        return picked
    exact = functools.partial(_exact_weights, config=config)
    plain = functools.partial(_plain_weights, config=config)
    return with_derivative_of(plain, exact)(picked)


def _exact_weights(picked: Array, *, config: RouterConfig) -> Array:
    zero = runtime_zeros(picked)
    picked = rounded(picked, zero)
    if config.score == "softmax_topk":
        picked = exponential(picked - picked[:, :1], zero)
    if config.route_norm or config.score == "softmax_topk":
        total = picked[:, :1]
        for slot in range(1, config.top_k):
            total = total + picked[:, slot : slot + 1]
        total = jnp.maximum(total, WEIGHT_FLOOR)
        picked = jnp.asarray(formats.rounded_divide(picked, total))
    return rounded(picked * jnp.float32(config.scale), zero)


def _plain_weights(picked: Array, *, config: RouterConfig) -> Array:
    if config.score == "softmax_topk":
        return jax.nn.softmax(picked, axis=-1) * config.scale
    if config.route_norm:
        total = jnp.sum(picked, axis=-1, keepdims=True)
        picked = picked / jnp.maximum(total, WEIGHT_FLOOR)
    return picked * config.scale
