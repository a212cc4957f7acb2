"""Grouping by expert, byte for byte, and the ordered combine, word for word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from jax import lax

from jaxtp import combine_routes, moe_residual, oracle
from jaxtp.errors import ConfigError, DtypeError, ExpertError, ShapeError
from jaxtp.experts import expert_csr, group_routes, partition_by_owner
from jaxtp.testing import assert_same_words, count_different_words

EXAMPLE = np.int32([[2, 0, 2], [1, 0, 3]])


def random_ids(tokens, k, experts, seed=0):
    return np.random.default_rng(seed).integers(0, experts, (tokens, k), np.int32)


def lists(parts):
    return [np.asarray(part).tolist() for part in parts]


def assert_same_groups(ids, experts):
    grouping = group_routes(ids, experts)
    actual = (grouping.pairs, grouping.offsets, grouping.places)
    for a, b in zip(actual, oracle.group_routes(ids, experts), strict=True):
        assert_same_words(a, b)
    csr = zip(expert_csr(ids, experts), oracle.expert_csr(ids, experts), strict=True)
    for a, b in csr:
        assert_same_words(a, b)
    return grouping


def test_the_worked_example_of_a_csr():
    csr = expert_csr(EXAMPLE, 4)
    assert lists(csr) == [
        [0, 1, 2, 3],
        [0, 2, 3, 5, 6],
        [1, 4, 3, 0, 2, 5],
        [0, 0, 0, 1, 1, 1],
    ]
    grouping = assert_same_groups(EXAMPLE, 4)
    assert lists([grouping.pairs, grouping.offsets]) == lists(csr[2:0:-1])


def test_rows_of_pairs_may_be_given():
    ids, rows = np.int32([2, 0, 2]), np.int32([7, 7, 1])
    csr = expert_csr(ids, 3, rows)
    assert lists(csr) == [[0, 2], [0, 1, 3], [1, 0, 2], [7, 7, 1]]
    assert lists(csr) == lists(oracle.expert_csr(ids, 3, rows))
    assert lists(expert_csr(ids[:0], 3, rows[:0])) == [[], [0], [], []]
    with pytest.raises(ShapeError, match="pair_rows"):
        expert_csr(ids, 3, rows[:2])


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 64])
def test_groups_are_those_of_numpy(tokens):
    assert_same_groups(random_ids(tokens, 8, 288), 288)


def test_empty_groups_and_one_expert_for_all():
    for expert in (0, 3, 7):
        grouping = assert_same_groups(np.full((16, 4), expert, np.int32), 8)
        sizes = np.diff(np.asarray(grouping.offsets))
        assert sizes.tolist() == [64 if e == expert else 0 for e in range(8)]
        assert np.asarray(grouping.pairs).tolist() == list(range(64))
    ends = np.int32([[0, 7], [7, 0]])
    sizes = np.diff(np.asarray(assert_same_groups(ends, 8).offsets))
    assert sizes.tolist() == [2, 0, 0, 0, 0, 0, 0, 2]


def test_places_invert_pairs_and_new_routes_compile_nothing():
    count = 0

    @jax.jit
    def grouped(ids):
        nonlocal count
        count += 1
        return group_routes(ids, 6)

    for seed in range(3):
        ids = random_ids(5, 3, 6, seed)
        grouping = grouped(ids)
        pairs, places = np.asarray(grouping.pairs), np.asarray(grouping.places)
        assert places[pairs].tolist() == list(range(15))
        assert np.all(np.diff(ids.reshape(-1)[pairs]) >= 0)
        assert_same_words(pairs, oracle.group_routes(ids, 6)[0])
    assert count == 1


@pytest.mark.parametrize("bad", [-1, 4])
def test_an_expert_id_out_of_range_is_refused(bad):
    ids = np.int32([[0, 1], [bad, 2]])
    calls = (group_routes, expert_csr, oracle.group_routes, oracle.expert_csr)
    for call in calls:
        with pytest.raises(ExpertError, match=rf"\[0, 4\).*{bad}"):
            call(ids, 4)
    with pytest.raises(ExpertError):
        partition_by_owner(ids, 4, 2)


def test_ids_of_another_dtype_or_rank_are_refused():
    with pytest.raises(DtypeError, match="int32"):
        group_routes(EXAMPLE.astype(np.int16), 4)
    with pytest.raises(ShapeError, match="tokens"):
        group_routes(EXAMPLE[0], 4)
    with pytest.raises(ConfigError, match="num_experts"):
        group_routes(EXAMPLE, 0)


def test_owners_hold_consecutive_experts_and_keep_the_order_of_pairs():
    ids = np.arange(0, 288, 36, dtype=np.int32)[None]
    parts = partition_by_owner(ids, 288, 4)
    for rank, part in enumerate(parts):
        assert lists(part) == [[0, 36], [0, 0], [2 * rank, 2 * rank + 1]]
    ids = np.int32(
        [
            [1, 73, 80, 145, 152, 159, 217, 224],
            [12, 84, 91, 156, 163, 170, 228, 235],
        ]
    )
    parts = partition_by_owner(ids, 288, 4)
    assert [len(part.pairs) for part in parts] == [2, 4, 6, 4]
    twins = oracle.partition_by_owner(ids, 288, 4)
    assert [lists(part) for part in parts] == [lists(part) for part in twins]
    for call in (partition_by_owner, oracle.partition_by_owner):
        with pytest.raises(ConfigError, match="30 experts"):
            call(np.zeros((1, 1), np.int32), 30, 8)


def routed(tokens=16, k=8, width=32):
    return normal(tokens, k, width), np.abs(normal(tokens, k, seed=1))


def in_every_way(call, *operands):
    arrays = [jnp.asarray(x) for x in operands]
    yield "eager", call(*arrays)
    yield "under jit", jax.jit(call)(*arrays)
    yield "closed over", jax.jit(lambda: call(*arrays))()
    yield (
        "first closed over",
        jax.jit(lambda *rest: call(arrays[0], *rest))(*arrays[1:]),
    )
    yield (
        "last closed over",
        jax.jit(lambda *head: call(*head, arrays[-1]))(*arrays[:-1]),
    )
    rows = [x[:, None] for x in arrays]
    step = lambda carry, row: (carry, call(*row))
    yield "in scan", jax.jit(lambda r: lax.scan(step, 0, r)[1])(rows)[:, 0]


def fused_in_numpy(values, weights):
    """The sum with fused multiply-adds: each product exact in float64."""
    out = np.zeros(values[:, 0].shape, np.float32)
    for slot in range(values.shape[1]):
        product = weights[:, slot, None].astype(np.float64) * values[:, slot]
        out = (out + product).astype(np.float32)
    return out


def test_routes_are_combined_in_slot_order_with_separate_roundings():
    values, weights = routed()
    want = oracle.combine_routes(values, weights)
    for way, actual in in_every_way(combine_routes, values, weights):
        assert_same_words(actual, want, way)
    assert count_different_words(fused_in_numpy(values, weights), want)
    back = oracle.combine_routes(values[:, ::-1], weights[:, ::-1])
    assert count_different_words(back, want), "another order"
    ranks = [oracle.combine_routes(values[:, j::2], weights[:, j::2]) for j in (0, 1)]
    assert count_different_words(ranks[0] + ranks[1], want), "one sum for each rank"


def test_a_plain_sum_of_products_is_contracted():
    values, weights = routed(64)

    @jax.jit
    def plain(values, weights):
        total = jnp.zeros_like(values[:, 0])
        for slot in range(values.shape[1]):
            total = total + weights[:, slot, None] * values[:, slot]
        return total

    want = oracle.combine_routes(values, weights)
    assert count_different_words(plain(values, weights), want)


def test_a_token_keeps_its_words_whatever_stands_beside_it():
    values, weights = routed(33)
    want = oracle.combine_routes(values, weights)
    for rows in (slice(0, 1), slice(1, 8), slice(32, 33)):
        actual = combine_routes(values[rows], weights[rows])
        assert_same_words(actual, want[rows])


@pytest.mark.parametrize("k", [1, 2, 8])
def test_products_of_minus_zero_alone_give_plus_zero(k):
    values = np.full((4, k, 3), -0.0, np.float32)
    weights = np.ones((4, k), np.float32)
    expected = np.zeros((4, 3), np.float32)
    assert_same_words(oracle.combine_routes(values, weights), expected)
    for way, actual in in_every_way(combine_routes, values, weights):
        assert_same_words(actual, expected, way)


def test_operands_that_are_products_are_rounded_first():
    a, b, w = normal(64, 4, 16), normal(64, 4, 16, seed=1), normal(64, 4, seed=2)
    c = np.float32(1.1)
    want = oracle.combine_routes(a * c, w * c)
    call = jax.jit(lambda a, w: combine_routes(a * c, w * c))
    assert_same_words(call(a, w), want)
    x, y = a[:, 0], b[:, 0]
    want = oracle.moe_residual(x * c, x * y, y * y)
    actual = jax.jit(lambda x, y: moe_residual(x * c, x * y, y * y))(x, y)
    assert_same_words(actual, want)
    plain = jax.jit(lambda x, y: x * c + (x * y + y * y))(x, y)
    assert count_different_words(plain, want)


def test_non_finite_values_follow_ieee_rules():
    values, weights = routed(4, 3, 5)
    values[0, 1, 0], values[1, 0, 1], values[1, 2, 1] = np.nan, np.inf, -np.inf
    weights[2, 1], values[2, 1, 4] = 0.0, np.inf
    want = oracle.combine_routes(values, weights)
    assert np.isnan(want[[0, 1, 2], [0, 1, 4]]).all()
    assert_same_words(combine_routes(values, weights), want)


def test_the_residual_is_added_last():
    one = lambda x: np.float32([x])
    for call in (moe_residual, oracle.moe_residual):
        assert np.asarray(call(one(1e20), one(-1e20), one(1.0))) == 0.0
    operands = [normal(40, 8, seed=seed) for seed in range(3)]
    want = oracle.moe_residual(*operands)
    for way, actual in in_every_way(moe_residual, *operands):
        assert_same_words(actual, want, way)
    x, r, s = operands
    assert count_different_words((x + r) + s, want)


def test_zeros_are_really_added():
    minus, plus = np.full((4, 3), -0.0, np.float32), np.zeros((4, 3), np.float32)
    for operands in ((minus, minus, plus), (plus, minus, minus), (minus, plus, minus)):
        for way, actual in in_every_way(moe_residual, *operands):
            assert_same_words(actual, plus, way)
    for way, actual in in_every_way(moe_residual, minus, minus, minus):
        assert_same_words(actual, minus, way)


def test_derivatives_are_those_of_the_sum():
    values, weights = routed(3, 2, 4)
    total = lambda v, w: combine_routes(v, w).sum()
    dv, dw = jax.grad(total, argnums=(0, 1))(values, weights)
    np.testing.assert_allclose(dv, np.broadcast_to(weights[..., None], dv.shape))
    np.testing.assert_allclose(dw, values.sum(axis=2), rtol=1e-5, atol=1e-6)
    x = normal(5)
    slopes = jax.grad(lambda *o: moe_residual(*o).sum(), argnums=(0, 1, 2))(x, x, x)
    assert all(np.all(np.asarray(s) == 1) for s in slopes)


def test_operands_that_do_not_fit_are_refused():
    values, weights = routed(2, 3, 4)
    for call in (combine_routes, oracle.combine_routes):
        with pytest.raises(ShapeError, match="weights"):
            call(values, weights[:, :2])
        with pytest.raises(ShapeError, match="values"):
            call(values[0], weights[0])
        with pytest.raises(DtypeError, match="weights"):
            call(values, weights.astype(np.float16))
    for call in (moe_residual, oracle.moe_residual):
        with pytest.raises(ShapeError, match=r"residual.*routed.*shared"):
            call(values, values, values[:1])
    assert combine_routes(values[:0], weights[:0]).shape == (0, 4)
