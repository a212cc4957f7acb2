"""Routing: the exact tie rule, weights word for word, each family, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import normal
from jax import lax

import jaxtp
from jaxtp import Bf16Weight, RouterConfig, oracle, route, router_logits
from jaxtp.errors import ConfigError, DtypeError, ExpertError, ShapeError
from jaxtp.router import route_weights, score_experts, select_experts
from jaxtp.router_config import FAMILIES
from jaxtp.testing import (
    UNIT,
    assert_same_words,
    assert_within_bound,
    count_different_words,
)

TOP_2 = RouterConfig("sigmoid", 2)
EXPERTS = {"step": 288, "deepseek_v3": 256, "kimi_k2": 384, "glm_45": 160}
SCORES = ("sigmoid", "softmax", "sqrt_softplus", "softmax_topk")


def case(family, tokens=9):
    config, experts = RouterConfig.of(family), EXPERTS.get(family, 128)
    logits = 3 * normal(tokens, experts)
    bias = normal(experts, seed=1) if config.selection_bias else None
    return logits, config, bias


def assert_same_routes(actual, expected, what):
    for name in ("logits", "ids", "weights"):
        pair = getattr(actual, name), getattr(expected, name)
        assert_same_words(*pair, what=f"{what} {name}")


def selected(scores, config=TOP_2, bias=None, active=None):
    """Ids of one token, from both forms, which must agree."""
    scores = np.asarray([scores], np.float32)
    bias = None if bias is None else np.asarray(bias, np.float32)
    ids = select_experts(scores, config, bias, active)
    assert_same_words(ids, oracle.select_experts(scores, config, bias, active))
    return np.asarray(ids)[0].tolist()


def biased(**changes):
    return dataclasses.replace(TOP_2, selection_bias=True, **changes)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_routes_are_those_of_numpy_for_each_family(family):
    logits, config, bias = case(family)
    want = oracle.route(logits, config, bias)
    assert_same_routes(route(logits, config, bias), want, family)
    assert all(len(set(row)) == config.top_k for row in want.ids.tolist())
    closed = jax.jit(lambda: route(jnp.asarray(logits), config, bias))()
    assert_same_routes(closed, want, "closed over")
    row = lambda c, l: (c, route(l[None], config, bias))
    scanned = jax.jit(lambda l: lax.scan(row, 0, l)[1])(logits)
    scanned = jax.tree.map(lambda x: x[:, 0], scanned)
    assert_same_routes(scanned, want, "in scan, a token at a time")


@pytest.mark.parametrize("score", SCORES)
def test_scores_are_within_their_bound(score):
    logits = 6 * normal(16, 77)
    config = RouterConfig(score, 4, route_norm=False)
    actual = np.asarray(score_experts(logits, config), np.float64)
    l = logits.astype(np.float64)
    top = l.max(axis=1, keepdims=True)
    e = np.exp(l - top)
    value = {
        "sigmoid": 1 / (1 + np.exp(-l)),
        "softmax": e / e.sum(axis=1, keepdims=True),
        "sqrt_softplus": np.sqrt(np.log1p(np.exp(-np.abs(l))) + np.maximum(l, 0)),
        "softmax_topk": l,
    }[score]
    # exp is within 2 units, and one for each further rounding: 1 + e and the division;
    # l - max (an absolute error of |l - max| units) and the 7 levels of the sum; the
    # logarithm's quotient, 3 for its series and products, its sum, and the root.
    units = {
        "sigmoid": 4,
        "softmax": 2 + np.abs(l - top) + 2 + np.abs(l - top).max() + 7 + 1,
        "sqrt_softplus": 2 + 2 + 3 + 1 + 1,
        "softmax_topk": 0,
    }[score]
    assert np.all(np.abs(actual - value) <= 1.001 * units * UNIT * np.abs(value))


@pytest.mark.parametrize("score", SCORES)
def test_random_ties_go_to_the_lower_id(score):
    # Few distinct values: most choices are ties.
    rng = np.random.default_rng(3)
    scores = rng.integers(0, 3, (64, 24)).astype(np.float32)
    config = RouterConfig(
        score, 5, selection_bias=True, num_groups=4, top_groups=2, route_norm=False
    )
    bias = rng.integers(0, 2, 24).astype(np.float32)
    active = np.ones(24, bool)
    active[[0, 7, 13]] = False
    for mask in (None, active):
        want = oracle.select_experts(scores, config, bias, mask)
        assert_same_words(select_experts(scores, config, bias, mask), want)
        assert mask is None or not np.isin(want, [0, 7, 13]).any()
    reverse = 23 - np.asarray(
        oracle.select_experts(scores[:, ::-1], config, bias[::-1])
    )
    same = oracle.select_experts(scores, config, bias)
    assert count_different_words(reverse.astype(np.int32), same)


def test_weights_come_from_the_unbiased_score():
    scores, bias = np.float32([[0.9, 0.8, 0.7, 0.1]]), np.float32([0, 0, 0, 1])
    for scale, stated in ((1.0, [0.1, 0.9]), (3.0, [0.3, 2.7])):
        config = biased(scale=scale)
        ids = select_experts(scores, config, bias)
        assert np.asarray(ids).tolist() == [[3, 0]]
        weights = np.asarray(route_weights(scores, ids, config))
        # One rounding each of the sum, the division and the scale.
        np.testing.assert_allclose(weights[0], stated, rtol=4 * UNIT)
        assert_same_words(weights, oracle.route_weights(scores, ids, config))


def test_the_worked_example_of_sigmoid_routing():
    logits, bias = np.float32([[0, 2, 2, -1]]), np.float32([0, 0, 0, 1])
    routes = route(logits, biased(scale=3.0), bias)
    assert np.asarray(routes.ids).tolist() == [[3, 1]]
    np.testing.assert_allclose(routes.weights[0], [0.7017, 2.2983], atol=6e-5)


def test_a_bias_keeps_its_float32_values():
    bias = np.float32([6.90, 6.91])
    config = RouterConfig("sigmoid", 1, selection_bias=True)
    logits = np.float32([[0.5, 0.5]])
    assert np.asarray(route(logits, config, bias).ids).tolist() == [[1]]
    coarse = bias.astype(ml_dtypes.bfloat16)
    assert coarse[0] == coarse[1], "bf16 cannot tell the two experts apart"
    for call in (route, oracle.route):
        with pytest.raises(DtypeError, match="bias"):
            call(logits, config, coarse)


def test_ties_keep_their_ids_when_experts_live_on_other_ranks():
    assert selected([0.5, 0.7, 0.7, 0.7]) == [1, 2]
    rows = normal(2, 32).astype(ml_dtypes.bfloat16)
    gate = Bf16Weight(rows[[0, 1, 1, 1, 0, 0, 0, 0]])
    x = normal(5, 32, seed=1)
    want = route(router_logits(x, gate), TOP_2)
    for tp in (2, 8):
        placed = jaxtp.place(gate, jaxtp.make_mesh(tp=tp), parallel="column")
        assert_same_routes(route(router_logits(x, placed), TOP_2), want, f"tp {tp}")
    assert_same_words(router_logits(x, gate), oracle.router_logits(x, gate))
    upper = np.asarray(want.logits)[:, 1] > np.asarray(want.logits)[:, 0]
    ids = np.asarray(want.ids)
    np.testing.assert_array_equal(ids, np.where(upper[:, None], [[1, 2]], [[0, 4]]))


def test_masking_with_minus_infinity_never_selects_an_expert_twice():
    three = dataclasses.replace(TOP_2, top_k=3)
    assert selected([-np.inf, -np.inf, 0], three) == [2, 0, 1]
    logits = np.float32([[-np.inf, -np.inf, 0]])
    for score, weights in (
        ("softmax_topk", [1, 0, 0]),
        ("softmax", [1, 0, 0]),
        ("sigmoid", [1, 0, 0]),
    ):
        config = RouterConfig(score, 3, route_norm=score != "softmax_topk")
        routes = route(logits, config)
        assert np.asarray(routes.ids).tolist() == [[2, 0, 1]]
        np.testing.assert_array_equal(routes.weights, [weights])


def test_the_scale_multiplies_routed_weights_once_and_not_the_shared_expert():
    config = RouterConfig("sigmoid", 2, scale=3.0)
    routes = route(np.float32([[1.0, 1.0, -1.0]]), config)
    values = np.ones((1, 2, 4), np.float32)
    routed = jaxtp.combine_routes(values, routes.weights)
    ones, zeros = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    assert np.all(np.asarray(jaxtp.moe_residual(zeros, routed, ones)) == 4.0)


def test_the_gate_is_not_rounded_to_bf16():
    x = np.float32([[1.0, 2.0**-9]])
    gate = Bf16Weight(np.array([[1, 0], [1, 1]], ml_dtypes.bfloat16))
    logits = router_logits(x, gate)
    np.testing.assert_array_equal(logits, [[1.0, 1.001953125]])
    one = RouterConfig("sigmoid", 1)
    assert np.asarray(route(logits, one).ids).tolist() == [[1]]
    coarse = np.asarray(logits).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.asarray(route(coarse, one).ids).tolist() == [[0]], "control"


def test_logits_are_the_float32_projection_plus_a_linear_bias():
    x, bias = normal(3, 96), normal(16, seed=1).astype(ml_dtypes.bfloat16)
    gate = Bf16Weight(normal(16, 96, seed=2).astype(ml_dtypes.bfloat16))
    y = router_logits(x, gate)
    assert_same_words(y, jaxtp.project(x, gate, activation="f32"))
    depth = oracle.depth(gate, jaxtp.ReductionPlan(), "f32")
    assert_within_bound(y, *oracle.float64(x, gate), depth)
    want = oracle.router_logits(x, gate, bias)
    assert_same_words(router_logits(x, gate, bias), want)
    assert_same_words(want, np.asarray(y) + bias.astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_selection_bias_that_is_not_finite_is_refused(bad):
    for call in (route, oracle.route):
        with pytest.raises(ExpertError, match=r"bias.*expert 1"):
            call(np.zeros((1, 3), np.float32), biased(), np.float32([0, bad, 0]))


def test_a_missing_or_left_over_bias_is_refused():
    logits, bias = np.zeros((1, 3), np.float32), np.zeros(3, np.float32)
    for call in (route, oracle.route):
        with pytest.raises(ExpertError, match="missing"):
            call(logits, biased())
        with pytest.raises(ExpertError, match="router_logits"):
            call(logits, TOP_2, bias)
        with pytest.raises(ShapeError, match="bias"):
            call(logits, biased(), bias[:2])


def test_inactive_experts_come_last_with_score_zero():
    active = np.array([True, False, True, False])
    assert selected([0.1, 0.9, 0.2, 0.8], active=active) == [2, 0]
    logits = np.float32([[0, 5, 0, 5]])
    weights = route(logits, TOP_2, active=active).weights
    np.testing.assert_array_equal(weights, [[0.5, 0.5]])
    for call in (route, oracle.route):
        with pytest.raises(ExpertError, match="active"):
            call(logits, TOP_2, active=np.array([True, False, False, False]))
    # A traced mask is not counted: what it leaves is never counted as a weight.
    late = jax.jit(lambda m: route(logits, TOP_2, active=m))
    routes = late(np.array([False, False, True, False]))
    assert np.asarray(routes.ids).tolist() == [[2, 0]]
    np.testing.assert_array_equal(routes.weights, [[1, 0]])


def test_equal_keys_of_either_sign_tie_and_every_nan_comes_first():
    assert selected([-0.0, 0.0, -1, -0.0]) == [0, 1]
    assert selected([0.0, -0.0, 0.0, -1]) == [0, 1]
    negative_nan = np.array([0xFFC00001], np.uint32).view(np.float32)[0]
    assert selected([np.inf, np.nan, 1, negative_nan]) == [1, 3]
    logits = np.float32([[1, np.nan, 2, 3]])
    for score in ("sigmoid", "softmax", "sqrt_softplus"):
        config = RouterConfig(score, 2)
        routes = route(logits, config)
        assert_same_routes(routes, oracle.route(logits, config), score)
        assert np.isnan(routes.weights).all(), "a poisoned token stays visible"


def test_groups_are_chosen_by_the_sum_of_their_two_best_keys():
    config = RouterConfig("sigmoid", 2, num_groups=2, top_groups=1)
    # The best single expert stands in the group with the lower sum.
    assert selected([0.9, 0.0, 0.5, 0.6], config) == [3, 2]
    assert selected([0.9, 0.0, 0.5, 0.6], TOP_2) == [0, 3]
    assert selected([0.5, 0.25, 0.25, 0.5], config) == [0, 1], "equal groups"
    active = np.array([True, True, True, False])
    with pytest.raises(ExpertError, match="groups"):
        selected([0.9, 0.0, 0.5, 0.6], config, active=active)


def test_weights_are_rounded_separately_and_floored():
    scores = np.abs(normal(512, 8)) + np.float32(0.01)
    config = RouterConfig("sigmoid", 8, scale=2.827)
    ids = oracle.select_experts(scores, config)
    want = oracle.route_weights(scores, ids, config)
    assert_same_words(route_weights(scores, ids, config), want)
    picked = np.take_along_axis(scores, ids, axis=1)
    total = picked.sum(axis=1, keepdims=True, dtype=np.float32)
    other = picked * (np.float32(2.827) / total)
    assert count_different_words(other, want), "scaled before the division"
    tiny = np.full((1, 8), 1e-30, np.float32)
    expected = tiny / np.float32(1e-20) * np.float32(2.827)
    assert_same_words(route_weights(tiny, ids[:1], config), expected)
    free = dataclasses.replace(config, route_norm=False)
    expected = picked * np.float32(2.827)
    assert_same_words(route_weights(scores, ids, free), expected)


def test_weights_have_the_derivative_of_the_formula():
    logits, config = normal(3, 6), RouterConfig("sigmoid", 2, scale=2.0)

    def value(l):
        return (route(l, config).weights * jnp.float32([[1.0, -1.0]])).sum()

    slope = np.asarray(jax.grad(value)(logits))
    ids = np.asarray(route(logits, config).ids)
    s = 1 / (1 + np.exp(-logits.astype(np.float64)))
    a, b = (np.take_along_axis(s, ids[:, j : j + 1], axis=1) for j in (0, 1))
    # d/da of 2 (a - b) / (a + b), times the sigmoid's own slope.
    expected = np.zeros(logits.shape)
    outer = 4 / (a + b) ** 2
    np.put_along_axis(expected, ids[:, :1], outer * b * a * (1 - a), axis=1)
    np.put_along_axis(expected, ids[:, 1:], -outer * a * b * (1 - b), axis=1)
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"score": "relu"},
        {"top_k": 0},
        {"top_k": 2.0},
        {"top_k": True},
        {"top_groups": 2},
        {"scale": 0.0},
        {"scale": np.inf},
        {"scale": "3"},
        {"route_norm": 1},
        {"score": "softmax_topk"},
    ],
)
def test_a_contradictory_config_is_refused(wrong):
    with pytest.raises(ConfigError):
        dataclasses.replace(TOP_2, **wrong)


def test_a_config_that_does_not_fit_the_experts_is_refused():
    logits = np.zeros((1, 6), np.float32)
    with pytest.raises(ConfigError, match="top_k"):
        route(logits, RouterConfig("sigmoid", 7))
    for groups in (4, 6):
        with pytest.raises(ConfigError, match="groups"):
            route(logits, RouterConfig("sigmoid", 1, num_groups=groups))
    with pytest.raises(ConfigError, match="step"):
        RouterConfig.of("unheard_of")
    with pytest.raises(DtypeError, match="logits"):
        route(logits.astype(np.float16), TOP_2)
    with pytest.raises(ShapeError, match="logits"):
        route(logits[0], TOP_2)
    with pytest.raises(DtypeError, match="gate"):
        router_logits(logits, jaxtp.Fp8Weight(None, None))


def test_no_tokens_give_no_routes():
    for family in FAMILIES:
        logits, config, bias = case(family)
        routes = route(logits[:0], config, bias)
        assert routes.ids.shape == routes.weights.shape == (0, config.top_k)
