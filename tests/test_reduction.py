"""Ordered sums: the same words on every mesh and schedule, and typed refusals."""

import inspect
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from ranks import make_axis, mapped, on_ranks, permuted_devices
from reduction_cases import (
    PROGRAMS,
    SEQUENTIAL,
    TREE,
    assert_every_rank_has,
    in_numpy,
    normal,
    reduced,
    sequential_in_numpy,
    split,
)

from jaxtp import reduction
from jaxtp.errors import DtypeError, MeshError, PlanError, ShapeError
from jaxtp.plan import ReductionPlan
from jaxtp.reduction import default_schedule, ordered_sum, sum_slots
from jaxtp.testing import assert_same_words


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("plan", "schedule"), PROGRAMS)
def test_words_are_those_of_numpy_on_permuted_devices(plan, schedule, tp):
    partials = normal(8, 3, 5, 7)
    actual = reduced(partials, tp, plan, schedule)
    assert_every_rank_has(actual, in_numpy(partials, plan), f"{plan}")


@pytest.mark.parametrize("tp", [1, 2, 5])
@pytest.mark.parametrize("schedule", ["exchange", "chain"])
def test_ten_blocks_are_added_on_one_two_and_five_ranks(schedule, tp):
    partials = normal(10, 4, 9)
    actual = reduced(partials, tp, ReductionPlan("blocks"), schedule)
    assert_every_rank_has(actual, sequential_in_numpy(partials), "blocks")


def test_the_order_of_devices_and_the_axis_type_change_no_word():
    partials = normal(8, 6, 11)
    explicit = make_axis(4, axis_type=AxisType.Explicit)
    in_id_order = make_axis(4, devices=jax.devices()[:4])
    backwards = make_axis(4, devices=jax.devices()[7:3:-1])
    for plan in (SEQUENTIAL, TREE):
        expected = in_numpy(partials, plan)
        for mesh in (explicit, in_id_order, backwards):
            actual = reduced(partials, 4, plan, mesh=mesh)
            assert_every_rank_has(actual, expected, f"{plan} on {mesh}")


@pytest.mark.parametrize(("plan", "schedule"), PROGRAMS)
def test_replicas_of_a_replicated_output_are_equal_on_every_device(plan, schedule):
    partials = normal(8, 5, 6)
    mesh = Mesh(np.array(permuted_devices(8)).reshape(2, 4), ("dp", "tp"))
    f = jax.shard_map(
        lambda local: ordered_sum(local, "tp", plan, schedule),
        mesh=mesh,
        in_specs=P("tp"),
        out_specs=P(),
        check_vma=False,
    )
    jitted = jax.jit(f)(partials)
    assert len(jitted.addressable_shards) == 8
    for shard in jitted.addressable_shards:
        assert_same_words(shard.data, in_numpy(partials, plan), f"{shard.device}")


def test_an_eager_shard_map_gives_the_words_of_jit():
    partials = normal(8, 3, 4)
    mesh = make_axis(2)
    f = jax.shard_map(
        lambda local: ordered_sum(local, "tp", SEQUENTIAL),
        mesh=mesh,
        in_specs=P("tp"),
        out_specs=P(),
        check_vma=False,
    )
    assert_same_words(f(partials), sequential_in_numpy(partials), "eager")


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(("plan", "schedule"), PROGRAMS)
def test_every_call_in_a_scan_has_the_words_of_a_call_alone(plan, schedule, tp):
    partials = normal(3, 8, 5, 3)

    def scanned(steps):
        body = lambda carry, p: (carry, ordered_sum(p, "tp", plan, schedule))
        return lax.scan(body, None, steps)[1]

    by_rank = partials.reshape(3, tp, 8 // tp, 5, 3).swapaxes(0, 1)
    actual = on_ranks(scanned, np.ascontiguousarray(by_rank))
    expected = np.stack([in_numpy(p, plan) for p in partials])
    assert_every_rank_has(actual, expected, "scan")


def test_a_thousand_chains_in_a_scan_are_those_of_the_host():
    tp, width, repeats = 4, 32, 1000
    partials, odd = normal(8, width), np.uint32(1664525)

    def thousand(local):
        def body(carry, _):
            p, digest = carry
            y = ordered_sum(p, "tp", SEQUENTIAL, "chain")
            word = lax.bitcast_convert_type(y, jnp.uint32)
            return (jnp.roll(p, 1, axis=-1), digest * jnp.uint32(odd) + word), None

        start = jnp.zeros(width, jnp.uint32)
        return lax.scan(body, (local, start), None, length=repeats)[0][1]

    words = sequential_in_numpy(partials).view(np.uint32)
    digest = np.zeros(width, np.uint32)
    for repeat in range(repeats):
        digest = digest * odd + np.roll(words, repeat)
    actual = on_ranks(thousand, split(partials, tp))
    assert_every_rank_has(actual, digest, "a thousand chains")


def test_empty_results_and_scalars_are_reduced():
    assert reduced(np.zeros((8, 0, 3), np.float32), 4, SEQUENTIAL).shape == (4, 0, 3)
    partials = normal(8)
    for schedule in ("exchange", "chain"):
        actual = reduced(partials, 4, SEQUENTIAL, schedule)
        assert_same_words(actual, np.full(4, sequential_in_numpy(partials)), "scalars")


def test_the_default_schedule_follows_the_bytes_that_a_rank_sends():
    large = reduction.CHAIN_MIN_ELEMENTS
    assert default_schedule(large, 8, 2) == "chain"
    assert default_schedule(large, 8, 4) == "chain"
    assert default_schedule(large, 8, 8) == "exchange"
    assert default_schedule(large - 1, 8, 2) == "exchange"


def test_a_large_result_is_chained_to_the_same_words():
    partials = normal(2, reduction.CHAIN_MIN_ELEMENTS + 3)
    partials = np.concatenate([partials, partials[::-1] * np.float32(0.1)] * 2)
    actual = reduced(partials, 2, SEQUENTIAL)
    assert_every_rank_has(actual, sequential_in_numpy(partials), "large")


@pytest.mark.parametrize(("plan", "schedule"), PROGRAMS)
def test_the_gradient_of_every_partial_is_that_of_the_sum(plan, schedule):
    partials, weight = normal(8, 6), normal(6, seed=1)

    def loss(local, w):
        # Each of the four replicas carries its share of the loss.
        return jnp.sum(ordered_sum(local, "tp", plan, schedule) * w) / 4

    gradient = on_ranks(jax.grad(loss), split(partials, 4), np.stack([weight] * 4))
    assert_same_words(gradient, np.broadcast_to(weight, (4, 2, 6)), "gradient")


@pytest.mark.parametrize(("plan", "schedule"), PROGRAMS)
def test_the_compiled_sum_has_no_collective_that_adds(plan, schedule):
    f = mapped(lambda p: ordered_sum(p, "tp", plan, schedule), make_axis(4))
    partials = split(normal(8, 6, 5), 4)
    assert "psum" not in str(jax.make_jaxpr(f)(partials))
    text = f.lower(partials).compile().as_text()
    kinds = r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    assert set(re.findall(kinds + r"(?:-start)?\(", text)) == {"collective-permute"}
    naive = mapped(lambda p: lax.psum(p, "tp"), make_axis(4))
    assert "psum" in str(jax.make_jaxpr(naive)(partials))
    assert "all-reduce(" in naive.lower(partials).compile().as_text()


def test_the_module_moves_nothing_itself():
    source = inspect.getsource(reduction)
    assert not re.search(r"lax\.(p[a-z_]+|all_\w+)\(", source)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.int32])
def test_partials_that_are_not_float32_are_refused(dtype):
    partials = np.ones((4, 2, 3), dtype)
    message = f"`partials` must be float32.*{np.dtype(dtype).name}"
    with pytest.raises(DtypeError, match=message):
        on_ranks(lambda p: ordered_sum(p, "tp", SEQUENTIAL), partials)
    with pytest.raises(DtypeError, match=message):
        sum_slots(partials[0], ReductionPlan(2))


@pytest.mark.parametrize(
    ("tp", "local", "plan", "schedule", "message"),
    [
        (4, 1, SEQUENTIAL, None, "1 slots on each of 4 ranks.*num_slots=8.*hold 2"),
        (2, 8, TREE, None, "8 slots on each of 2 ranks.*must hold 4"),
        (5, 2, SEQUENTIAL, None, r"divide the 8 slots; got axis size 5.*\[1, 2, 4, 8"),
        (4, 2, SEQUENTIAL, "ring", "'exchange', 'chain' or None; got 'ring'"),
        (4, 2, TREE, "chain", "'tree' has one schedule; got schedule='chain'"),
    ],
)
def test_slots_that_do_not_fit_the_plan_are_refused(tp, local, plan, schedule, message):
    with pytest.raises(PlanError, match=message):
        on_ranks(
            lambda p: ordered_sum(p, "tp", plan, schedule),
            np.ones((tp, local, 3), np.float32),
        )


def test_a_sum_on_one_device_wants_all_slots_of_the_plan():
    with pytest.raises(PlanError, match="holds 4 slots, but the plan has num_slots=8"):
        sum_slots(normal(4, 3), SEQUENTIAL)
    with pytest.raises(ShapeError, match=r"shape \[\]"):
        sum_slots(jnp.float32(1.0), SEQUENTIAL)
    with pytest.raises(MeshError, match="'tp' is not an axis here"):
        ordered_sum(normal(8, 3), "tp", SEQUENTIAL)
