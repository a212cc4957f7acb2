"""Public reports of sums that change with the mesh, the message or the call.

Each test names the report it comes from, compares float32 words, and has a control: the
order or the rounding of the reported program, in NumPy or by `psum`, which must change
words. A rate in a comment is the share of words that such a program changes.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import activations, normal, weight
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ranks import permuted_devices

import jaxtp
from jaxtp import Bf16Weight, ReductionPlan, formats, oracle
from jaxtp.testing import assert_same_words, count_different_words

T, N, K = 16, 64, 512
MESHES = (2, 4, 8)


def row_weight(w, tp, plan=None):
    return jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="row", plan=plan)


def to_bf16(values):
    return np.asarray(formats.round_to_bf16(np.asarray(values)))


def ascending(partials):
    """`((p_0 + p_1) + p_2) + ...` in float32."""
    return list(itertools.accumulate(partials))[-1]


def share_of_different_words(actual, expected):
    return count_different_words(actual, expected) / np.size(expected)


def slot_partials(x, w, plan=None):
    return np.asarray(jaxtp.row_parallel(x, row_weight(w, 8, plan), reduce=False))


@pytest.mark.parametrize(("order", "value"), [("sequential", 1.0), ("tree", 0.0)])
def test_products_that_cancel_across_ranks_have_one_value(order, value):
    """Products 1e8, 1, -1e8 and 1, one in each of four slots.

    https://github.com/sgl-project/sglang/pull/15041
    https://github.com/RL-Align/RL-Kernel/issues/102
    https://github.com/vllm-project/vllm/issues/2891
    """
    w = Bf16Weight(to_bf16(np.ones((8, 128), np.float32)))
    x = normal(8, 128)
    x[3] = 0
    x[3, ::32] = 1e8, 1, -1e8, 1
    for tp in (1, 2, 4):
        p = row_weight(w, tp, ReductionPlan(4, order))
        y = np.asarray(jaxtp.row_parallel(x, p))[3]
        assert_same_words(y, np.full(8, value, np.float32), what=f"tp={tp}")
        alone = jaxtp.row_parallel(x[3:4], p) if tp == 4 else y[None]
        assert_same_words(alone, y[None], what=f"alone at tp={tp}")


def test_products_that_cancel_inside_a_slot_have_one_value():
    """The reported K = 4, whose control gives 1, 0 and 1 on one, two and four ranks.

    https://github.com/sgl-project/sglang/pull/15041
    """
    w = Bf16Weight(to_bf16(np.ones((8, 4), np.float32)))
    x = np.float32([[1e8, 1, -1e8, 1]])
    want = np.asarray(jaxtp.project(x, w))
    naive = []
    for tp in (1, 2, 4):
        assert_same_words(jaxtp.row_parallel(x, row_weight(w, tp)), want)
        add = jax.shard_map(
            lambda part: lax.psum(jnp.sum(part), "tp"),
            mesh=jaxtp.make_mesh(tp=tp),
            in_specs=P("tp"),
            out_specs=P(),
        )
        naive.append(float(jax.jit(add)(x[0])))
    assert naive == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("tp", MESHES)
def test_a_sum_and_its_residual_repeat_their_words_fused_or_not(tp):
    """A fused all-reduce and norm gave other words for the same bytes.

    https://github.com/vllm-project/vllm/issues/51290
    """
    x, w, r = activations(T, K, "bf16"), weight("bf16", N, K), normal(T, N, seed=3)
    p = row_weight(w, tp)
    want = np.asarray(jaxtp.row_parallel(x, p)) + r
    fused = jax.jit(lambda x, p, r: jaxtp.row_parallel(x, p) + r)
    for _ in range(100):
        assert_same_words(fused(x, p, r), want)
    # Control: the residual enters as the accumulator's start.
    first = ascending([r, *slot_partials(x, w)])
    assert share_of_different_words(first, want) >= 0.01


@pytest.mark.parametrize("tp", [4, 8])
@pytest.mark.parametrize("schedule", ["exchange", "chain"])
def test_a_row_keeps_its_words_whichever_rank_owns_its_chunk(schedule, tp):
    """A ring's order depends on the owner of the chunk: 41 to 61 % of words.

    https://github.com/vllm-project/vllm/issues/56370
    """
    x, w = activations(T, K, "bf16"), weight("bf16", N, K)
    p = row_weight(w, tp)
    want = np.asarray(jaxtp.row_parallel(x, p))
    for distance in (1, 4, 13):
        moved = np.roll(x, distance, axis=0)
        y = np.asarray(jaxtp.row_parallel(moved, p, schedule=schedule))
        assert_same_words(np.roll(y, -distance, axis=0), want)
    partials = slot_partials(x, w)

    def ring(partials):
        owners = np.split(partials, 8, axis=1)
        rows = [ascending(np.roll(own, -c, axis=0)) for c, own in enumerate(owners)]
        return np.concatenate(rows)

    moved = np.roll(ring(np.roll(partials, 4, axis=1)), -4, axis=0)
    assert share_of_different_words(moved, ring(partials)) >= 0.01


@pytest.mark.parametrize("k", [2048, 6144])
def test_output_projections_have_one_set_of_words_at_every_size(k):
    """A bf16 wire changes 37, 50 and 59 % of bf16 results on 2, 4 and 8 ranks.

    https://github.com/nanomaoli/llm_reproducibility/issues/7
    https://github.com/ndif-team/nnsight/issues/631
    https://github.com/sgl-project/sglang/issues/7916
    """
    x, w = activations(8, k, "bf16"), weight("bf16", 256, k)
    want = np.asarray(jaxtp.project(x, w))
    partials = np.asarray(jaxtp.row_parallel(x, row_weight(w, 8), reduce=False))
    for tp in MESHES:
        assert_same_words(jaxtp.row_parallel(x, row_weight(w, tp)), want)
        ranks = [ascending(part) for part in np.split(partials, tp)]
        wire = ascending([to_bf16(part).astype(np.float32) for part in ranks])
        assert share_of_different_words(to_bf16(wire), to_bf16(want)) >= 0.01


def test_two_ranks_prove_no_order_and_more_do():
    """Two ranks were fine where four gave several answers.

    https://github.com/sgl-project/sglang/issues/10785
    """
    x, w = activations(T, K, "bf16"), weight("bf16", N, K)
    for slots in MESHES:
        partials = slot_partials(x, w)[:slots]
        share = share_of_different_words(ascending(partials[::-1]), ascending(partials))
        assert (share == 0) if slots == 2 else (share >= 0.01)


def test_shared_rows_of_two_message_sizes_have_the_same_words():
    """(1664, 5120) and (2048, 5120) over four ranks: 34 % of elements differed.

    https://github.com/ROCm/rocm-systems/issues/11661
    """
    rng = np.random.default_rng(0)
    partials = rng.standard_normal((4, 2048, 5120), np.float32)
    mesh, plan = jaxtp.make_mesh(tp=4), ReductionPlan(4)
    spread = NamedSharding(mesh, P("tp"))
    add = jax.jit(
        jax.shard_map(
            lambda p: jaxtp.ordered_sum(p, "tp", plan),
            mesh=mesh,
            in_specs=P("tp"),
            out_specs=P(),
            check_vma=False,
        )
    )
    want = np.asarray(add(jax.device_put(partials, spread)))
    got = np.asarray(add(jax.device_put(partials[:, :1664], spread)))
    assert_same_words(got, want[:1664])

    def ring(rows):
        """Row 500's sum in a ring whose chunks are quarters of the message."""
        return ascending(np.roll(partials[:, 500], -(500 * 4 // rows), axis=0))

    assert share_of_different_words(ring(1664), ring(2048)) >= 0.01


def test_repeats_between_other_buffers_and_meshes_keep_their_words():
    """Results followed the history of allocations.

    https://github.com/NVIDIA/nccl/issues/1497
    https://github.com/NVIDIA/nccl/issues/2360
    """
    x, w = activations(T, K, "bf16"), weight("bf16", N, K)
    meshes = [row_weight(w, tp) for tp in MESHES]
    want = np.asarray(jaxtp.project(x, w))
    for repeat in range(99):
        p = meshes[repeat % 3]
        dummy = jax.device_put(
            np.zeros(1 << (repeat % 18), np.float32), p.mesh.devices.flat[-1]
        )
        assert_same_words(jaxtp.row_parallel(x, p), want)
        dummy.delete()


def test_all_ranks_hold_the_words_that_a_rotated_sum_makes_them_disagree_on():
    """https://github.com/pytorch/pytorch/pull/129501"""
    x, w = activations(T, K, "bf16"), weight("bf16", N, K)
    y = jaxtp.row_parallel(x, row_weight(w, 8))
    held = [np.asarray(shard.data) for shard in y.addressable_shards]
    assert len(held) == 8
    for words in held:
        assert_same_words(words, held[0])
    partials = slot_partials(x, w)
    rotated = [ascending(np.roll(partials, -rank, axis=0)) for rank in range(8)]
    assert share_of_different_words(rotated[3], rotated[0]) >= 0.01


@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_38_tiles_of_256_have_one_sum(order):
    """K = 9728 on two ranks: halves of 19 against one tree over 38 tiles, 71 %.

    https://github.com/radixark/miles/issues/1485
    https://github.com/radixark/Megatron-LM/pull/65
    """
    x, w = activations(4, 9728, "bf16"), weight("bf16", N, 9728)
    plan = ReductionPlan(8, order)
    want = np.asarray(jaxtp.project(x, w, plan=plan))
    for tp in (2, 8):
        assert_same_words(jaxtp.row_parallel(x, row_weight(w, tp, plan)), want)
    tiles = np.einsum(
        "tjk,njk->jtn",
        x.astype(np.float32).reshape(4, 38, 256),
        np.asarray(w.dequantize()).reshape(N, 38, 256),
    )
    add = lambda a, b: to_bf16(a + b).astype(np.float32)
    level = halves = [to_bf16(tile).astype(np.float32) for tile in tiles]
    while len(level) > 1:
        odd = [level[-1]] if len(level) % 2 else []
        level = [*map(add, level[0:-1:2], level[1::2]), *odd]
    ranks = [list(itertools.accumulate(h, add))[-1] for h in (halves[:19], halves[19:])]
    assert share_of_different_words(add(*ranks), level[0]) >= 0.01


def test_the_result_is_rounded_once_whatever_the_number_of_ranks():
    """One backend rounded to bf16 after every rank, another once.

    https://github.com/sgl-project/sglang/pull/36143
    """
    x, w = activations(T, K, "bf16"), weight("bf16", N, K)
    partials = slot_partials(x, w)
    once = to_bf16(ascending([np.zeros_like(partials[0]), *partials]))
    for tp in MESHES:
        assert_same_words(to_bf16(jaxtp.row_parallel(x, row_weight(w, tp))), once)
    add = lambda a, b: to_bf16(a + b).astype(np.float32)
    every = list(itertools.accumulate(map(np.float32, map(to_bf16, partials)), add))
    assert share_of_different_words(to_bf16(every[-1]), once) >= 0.01


def test_a_gather_keeps_rank_order_on_permuted_devices():
    """An all-gather followed the order of devices and not that of ranks.

    https://github.com/NVIDIA/nccl/issues/1906
    """
    x, w = activations(T, K, "bf16"), weight("bf16", 256, K)
    mesh = jaxtp.make_mesh(tp=8, devices=permuted_devices(8))
    p = jaxtp.place(w, mesh, parallel="column")
    want = oracle.column_parallel(x, w, tp=8)
    assert_same_words(jaxtp.column_parallel(x, p), want)
    blocks = np.split(want, 8, axis=1)
    by_device = [blocks[device.id] for device in mesh.devices.flat]
    assert share_of_different_words(np.concatenate(by_device, axis=1), want) >= 0.01
