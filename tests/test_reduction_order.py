"""The order of additions: special values, compilers, and sums that break it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from ranks import on_ranks
from reduction_cases import (
    PROGRAMS,
    SEQUENTIAL,
    TREE,
    assert_every_rank_has,
    in_numpy,
    normal,
    reduced,
    sequential_in_numpy,
    share_of_different_words,
    split,
    tree_in_numpy,
)

from jaxtp.errors import PlanError
from jaxtp.plan import ReductionPlan
from jaxtp.reduction import ordered_sum, sum_slots
from jaxtp.testing import assert_same_words, count_different_words


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("plan", "schedule"), PROGRAMS)
def test_partials_of_minus_zero_follow_the_plan(plan, schedule, tp):
    partials = np.full((8, 5), -0.0, np.float32)
    partials[:, 4] = normal(8)
    actual = reduced(partials, tp, plan, schedule)
    assert_every_rank_has(actual, in_numpy(partials, plan), "minus zero")
    assert np.all(np.signbit(actual[:, :4]) == (plan.order == "tree"))


@pytest.mark.parametrize("slots", [1, 8])
def test_the_first_addition_is_performed_on_closed_over_partials(slots):
    plan = ReductionPlan(slots, "sequential")
    minus = np.full((slots, 6), -0.0, np.float32)
    expected = np.zeros(6, np.float32)

    def with_a_literal_zero(p):
        total = jnp.zeros(p.shape[1:], jnp.float32)
        for slot in range(slots):
            total = total + p[slot]
        return total

    def in_every_way(add):
        constant = jnp.asarray(minus)
        scanned = lambda x: lax.scan(lambda c, _: (c, add(constant)), x, None, 2)[1][0]
        yield "argument", jax.jit(add)(minus)
        yield "closed over", jax.jit(lambda: add(constant))()
        yield "in scan", jax.jit(scanned)(jnp.float32(1.0))

    for way, actual in in_every_way(lambda p: sum_slots(p, plan)):
        assert_same_words(actual, expected, way)
    literal = dict(in_every_way(with_a_literal_zero))
    assert any(count_different_words(y, expected) for y in literal.values())


@pytest.mark.parametrize("position", [0, 1, 3])
def test_constant_slots_are_not_gathered_into_one_constant(position):
    # XLA folds (x + c1) + c2 into x + (c1 + c2) where c1 and c2 are constants.
    rows = [np.full(4, c, np.float32) for c in (1e8, -1e8, 3.0)]
    x = np.ones(4, np.float32)

    def stacked(value):
        return jnp.stack([*rows[:position], value, *rows[position:]])

    def plain_sum(value):
        partials = stacked(value)
        total = partials[0]
        for slot in range(1, 4):
            total = total + partials[slot]
        return total

    expected = sequential_in_numpy(np.stack([*rows[:position], x, *rows[position:]]))
    plan = ReductionPlan(4, "sequential")
    actual = jax.jit(lambda value: sum_slots(stacked(value), plan))(x)
    assert_same_words(actual, expected, "constants")
    if position == 0:
        assert count_different_words(jax.jit(plain_sum)(x), expected) == 4


def test_a_slot_of_literal_zeros_does_not_let_products_contract():
    a, b = normal(7, 32, 16), normal(7, 32, 16, seed=1)
    zeros = np.zeros((1, 32, 16), np.float32)
    expected = np.concatenate([zeros, a * b])
    for plan in (SEQUENTIAL, TREE):
        f = jax.jit(
            lambda x, y, plan=plan: sum_slots(jnp.concatenate([zeros, x * y]), plan)
        )
        assert_same_words(f(a, b), in_numpy(expected, plan), f"{plan}")


@pytest.mark.parametrize(("plan", "schedule"), PROGRAMS)
def test_non_finite_partials_follow_ieee_rules_on_every_rank(plan, schedule):
    partials = normal(8, 6)
    partials[3, 0] = np.nan
    partials[2, 1], partials[6, 1] = np.inf, -np.inf
    partials[5, 2] = -np.inf
    partials.view(np.uint32)[7, 3] = 0xFFC12345
    actual = reduced(partials, 4, plan, schedule)
    assert_every_rank_has(actual, in_numpy(partials, plan), "non-finite")
    assert np.isnan(actual[:, [0, 1, 3]]).all()
    replicas = actual.view(np.uint32)
    np.testing.assert_array_equal(replicas, np.stack([replicas[0]] * 4))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_products_that_cancel_give_one_value_on_every_mesh(tp):
    partials = np.array([[1e8], [1.0], [-1e8], [1.0]], np.float32)
    for schedule in ("exchange", "chain"):
        plan = ReductionPlan(4, "sequential")
        assert np.all(reduced(partials, tp, plan, schedule) == 1.0)
    assert np.all(reduced(partials, tp, ReductionPlan(4, "tree")) == 0.0)
    naive = on_ranks(lambda p: lax.psum(jnp.sum(p, axis=0), "tp"), split(partials, tp))
    assert np.all(naive == (0.0 if tp == 2 else 1.0))


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize(("plan", "schedule"), PROGRAMS)
def test_products_are_not_contracted_into_the_additions(plan, schedule, tp):
    a, b = normal(8, 32, 16), normal(8, 32, 16, seed=1)
    f = lambda x, y: ordered_sum(x * y, "tp", plan, schedule)
    actual = on_ranks(f, split(a, tp), split(b, tp))
    assert_every_rank_has(actual, in_numpy(a * b, plan), "products")


def test_a_plain_sum_of_products_is_contracted_on_cpu():
    a, b = normal(8, 32, 16), normal(8, 32, 16, seed=1)

    @jax.jit
    def contracted(x, y):
        products = x * y
        total = products[0]
        for slot in range(1, 8):
            total = total + products[slot]
        return total

    assert count_different_words(contracted(a, b), sequential_in_numpy(a * b)) > 0


def folded_at_ranks(partials, tp):
    """The broken sum in which each rank adds its own slots first."""
    return sequential_in_numpy(
        np.stack([sequential_in_numpy(p) for p in split(partials, tp)])
    )


def ring_in_numpy(partials, owners):
    """The broken sum whose order starts after the rank that owns the element."""
    count = len(partials)
    order = (owners + 1 + np.arange(count)[:, None]) % count
    rotated = np.take_along_axis(partials, order[:, :, None], axis=0)
    return sequential_in_numpy(rotated)


@pytest.mark.parametrize("tp", [4, 8])
def test_psum_does_not_give_the_words_of_the_plan(tp):
    # Two or more slots a rank: XLA:CPU adds single slots in rank order by chance.
    partials, plan = normal(16, 64, 64), ReductionPlan(16)
    psum = on_ranks(
        lambda p: lax.psum(sum_slots(p, ReductionPlan(16 // tp)), "tp"),
        split(partials, tp),
    )
    expected = sequential_in_numpy(partials)
    assert share_of_different_words(psum[0], expected) >= 0.1
    assert_every_rank_has(reduced(partials, tp, plan), expected, "16 slots")


@pytest.mark.parametrize("tp", [2, 4])
def test_a_fold_at_rank_boundaries_does_not_give_the_words_of_the_plan(tp):
    partials = normal(8, 64, 64)
    folded = folded_at_ranks(partials, tp)
    assert share_of_different_words(folded, sequential_in_numpy(partials)) >= 0.1
    actual = reduced(partials, tp, SEQUENTIAL)
    assert_every_rank_has(actual, sequential_in_numpy(partials), "no fold")


def test_a_bfloat16_wire_and_the_other_order_give_other_words():
    partials = normal(8, 64, 64)
    expected = sequential_in_numpy(partials)
    wire = partials.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert share_of_different_words(sequential_in_numpy(wire), expected) >= 0.9
    assert share_of_different_words(tree_in_numpy(partials), expected) >= 0.1


@pytest.mark.parametrize("schedule", ["exchange", "chain"])
def test_a_row_keeps_its_words_whichever_rank_owns_it(schedule):
    """A reduce-scatter whose order depends on the owner moves 41 to 61 % of words."""
    tp, partials = 8, normal(8, 16, 24)
    moved = np.roll(partials, 2, axis=1)
    here = reduced(partials, tp, SEQUENTIAL, schedule)
    there = reduced(moved, tp, SEQUENTIAL, schedule)
    assert_same_words(there, np.roll(here, 2, axis=1), "rows of another owner")
    owners = np.repeat(np.arange(8), 2)
    broken_here = ring_in_numpy(partials, owners)
    broken_there = ring_in_numpy(moved, owners)
    broken = share_of_different_words(np.roll(broken_here, 2, axis=0), broken_there)
    assert 0.25 <= broken <= 0.75


def test_two_terms_commute_so_only_four_ranks_and_more_find_an_order():
    for slots, least, most in ((2, 0.0, 0.0), (4, 0.2, 1.0), (8, 0.4, 1.0)):
        partials = normal(slots, 64, 64)
        expected = sequential_in_numpy(partials)
        backwards = sequential_in_numpy(partials[::-1])
        share = share_of_different_words(backwards, expected)
        assert least <= share <= most, f"{slots} terms: {share}"
        actual = reduced(partials, slots, ReductionPlan(slots))
        assert_every_rank_has(actual, expected, f"{slots} terms")


@pytest.mark.parametrize("schedule", ["exchange", "chain"])
def test_rows_keep_their_words_inside_messages_of_every_size(schedule):
    rows = normal(8, 512, 24)
    expected = sequential_in_numpy(rows)
    for count in (1, 16, 17, 512):
        actual = reduced(rows[:, :count], 4, SEQUENTIAL, schedule)
        assert_every_rank_has(actual, expected[:count], f"{count} rows")
        at_end = reduced(rows[:, 512 - count :], 4, SEQUENTIAL, schedule)
        assert_every_rank_has(at_end, expected[512 - count :], f"last {count} rows")


def test_ranks_agree_where_a_rotated_one_shot_sum_makes_them_disagree():
    partials = normal(8, 32, 32)
    rotated = np.stack(
        [sequential_in_numpy(np.roll(partials, -rank, axis=0)) for rank in range(8)]
    )
    assert share_of_different_words(rotated[1], rotated[0]) >= 0.25
    actual = reduced(partials, 8, SEQUENTIAL)
    assert_every_rank_has(actual[1:], actual[0], "agreement")


def test_an_odd_number_of_tiles_has_one_sum_and_no_tree():
    """K = 9728 makes 38 tiles of 256: halves of 19, against a tree of pairs."""
    tiles = normal(38, 32, 32)
    expected = sequential_in_numpy(tiles)
    for tp in (1, 2):
        actual = reduced(tiles, tp, ReductionPlan(38))
        assert_every_rank_has(actual, expected, "38 tiles")
    halves = sequential_in_numpy(
        np.stack([sequential_in_numpy(tiles[:19]), sequential_in_numpy(tiles[19:])])
    )
    padded = np.concatenate([tiles, np.zeros((26, 32, 32), np.float32)])
    assert share_of_different_words(halves, tree_in_numpy(padded)) >= 0.5
    with pytest.raises(PlanError, match="power of two"):
        ReductionPlan(38, "tree")
    with pytest.raises(PlanError, match="must divide the 38 slots; got axis size 4"):
        on_ranks(lambda p: ordered_sum(p, "tp", ReductionPlan(38)), normal(4, 9, 3))
