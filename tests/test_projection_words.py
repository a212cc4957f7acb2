"""What the words depend on: shapes, neighbours and formats; and controls that fail."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import PLANS, PROGRAMS, activations, normal, weight
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp import Bf16Weight, Fp8Weight, ReductionPlan, formats, oracle, packing
from jaxtp.testing import (
    assert_same_words,
    assert_within_bound,
    count_different_words,
)

TOKENS = (1, 7, 8, 15, 16, 31, 32, 33, 64, 65, 127, 128, 129)
FEW_TOKENS = (1, 8, 33, 129)
SHAPES = {
    "step_expert_down": (24, 1280),
    "gpt_oss_down": (16, 2880),
    "qwen3_4b_down": (8, 9728),
    "qwen2_7b_down": (8, 18944),
    "qwen2_72b_down": (8, 29568),
    "deepseek_kv_a_rows": (576, 96),
    "qwen3_8_flash_next": (33, 80),
    "one_group": (3, 16),
}


def row(x, w, tp, activation, plan=None):
    p = jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="row", plan=plan)
    return np.asarray(jaxtp.row_parallel(x, p, activation=activation))


@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_any_n_and_k_go_on_any_mesh_that_divides_the_slots(program, shape):
    format, activation = program
    (n, k), w = shape, weight(format, *shape)
    x = activations(2, k, activation)
    want = oracle.row_parallel(x, w, tp=4, activation=activation)
    assert want.shape == (2, n)
    assert_same_words(row(x, w, 8, activation), want)
    plan = ReductionPlan()
    decoded = oracle.quantized_activation(x, w, plan, activation)
    depth = oracle.depth(w, plan, activation)
    assert_within_bound(want, *oracle.float64(decoded, w), depth)


@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
def test_a_row_keeps_its_words_whatever_stands_beside_it(program):
    format, activation = program
    w = weight(format, 40, 160)
    x = activations(max(TOKENS), 160, activation)
    counts = TOKENS if program in (("bf16", "bf16"), ("nvfp4", "int8")) else FEW_TOKENS
    whole = np.asarray(jaxtp.project(x, w, activation=activation))
    for t in counts:
        head = jaxtp.project(x[:t], w, activation=activation)
        assert_same_words(head, whole[:t], what=f"first {t} of 129 tokens")
        tail = jaxtp.project(x[-t:], w, activation=activation)
        assert_same_words(tail, whole[-t:], what=f"last {t} of 129 tokens")
    loud = x.copy()
    loud[1::2] *= np.asarray(1000, x.dtype)
    loud[3] = np.inf
    again = np.asarray(jaxtp.project(loud, w, activation=activation))
    assert_same_words(again[0::2], whole[0::2], what="rows beside outliers")


@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
def test_a_weight_row_keeps_its_words_wherever_it_stands(program):
    format, activation = program
    w = weight(format, 200, 160)
    x = activations(3, 160, activation)
    whole = np.asarray(jaxtp.project(x, w, activation=activation))
    rows = slice(128, 136)
    part = jax.tree.map(lambda a: a, w)
    if format == "bf16":
        part = Bf16Weight(w.value[rows])
    elif format == "e4m3":
        part = Fp8Weight(w.code[rows], w.scale[1:2])
    else:
        part = jaxtp.Nvfp4Weight(w.code[rows], w.scale[rows], w.global_scale)
    got = jaxtp.project(x, part, activation=activation)
    assert_same_words(got, whole[:, rows])


def test_nvfp4_bf16_has_the_words_of_bf16_on_the_decoded_weight():
    w, x = weight("nvfp4", 200, 416), activations(5, 416, "bf16")
    decoded = Bf16Weight(np.asarray(formats.nvfp4_to_bf16(w.code, w.scale)))
    got = oracle.row_parallel(x, w, activation="bf16", reduce=False)
    want = oracle.row_parallel(x, decoded, activation="bf16", reduce=False)
    assert_same_words(got, want)
    y = jaxtp.project(x, decoded) * jnp.float32(w.global_scale)
    assert_same_words(jaxtp.project(x, w, activation="bf16"), y)


@pytest.mark.parametrize("k", [16, 80, 416, 1280])
@pytest.mark.parametrize("plan", [*PLANS.values(), ReductionPlan(1)], ids=str)
def test_nvfp4_int8_has_the_words_of_numpy(k, plan):
    w, x = weight("nvfp4", 24, k), activations(5, k, "int8")
    partials = oracle.nvfp4_int8_partials(x, w, packing.weight_layout(w, plan))
    want = oracle.sum_slots(partials, plan) * w.global_scale
    got = jaxtp.project(x, w, plan=plan, activation="int8")
    assert_same_words(got, want)


def test_unit_scales_give_the_words_of_the_segment_wise_bf16_program():
    code = weight("e4m3", 40, 512).code
    ones = Fp8Weight(code, np.ones((1, 4), np.float32))
    x = activations(5, 512, "bf16")
    plan = ReductionPlan("blocks")
    got = oracle.row_parallel(x, ones, plan=plan, activation="bf16", reduce=False)
    for g in range(4):
        columns = slice(128 * g, 128 * (g + 1))
        block = Bf16Weight(code[:, columns].astype(ml_dtypes.bfloat16))
        want = jaxtp.project(x[:, columns], block, plan=ReductionPlan(1))
        assert_same_words(got[g], want)


def test_f32_activations_that_are_bf16_values_have_the_words_of_bf16():
    w, x = weight("bf16", 200, 416), activations(5, 416, "bf16")
    wide = x.astype(np.float32)
    assert_same_words(jaxtp.project(wide, w), jaxtp.project(x, w))
    assert_same_words(
        jaxtp.project(x, w, activation="f32"), jaxtp.project(x, w, activation="bf16")
    )


def test_f32_activations_are_more_accurate_than_their_bf16_rounding():
    w, x = weight("bf16", 64, 416), activations(5, 416, "f32")
    plan = ReductionPlan()
    value, magnitude = oracle.float64(x, w)
    depth = oracle.depth(w, plan, "f32")
    assert_within_bound(jaxtp.project(x, w), value, magnitude, depth)
    rounded = np.asarray(jaxtp.project(x.astype(ml_dtypes.bfloat16), w))
    with pytest.raises(AssertionError, match="times its bound"):
        assert_within_bound(rounded, value, magnitude, depth)


@pytest.mark.parametrize("format", ["bf16", "e4m3", "nvfp4"])
def test_4096_columns_on_every_mesh(format):
    activation = {"bf16": "bf16", "e4m3": "e4m3", "nvfp4": "int8"}[format]
    x, w = activations(3, 4096, activation), weight(format, 256, 4096)
    want = oracle.row_parallel(x, w, tp=2, activation=activation)
    for tp in (1, 4, 8):
        assert_same_words(row(x, w, tp, activation), want, what=f"tp={tp}")


@pytest.mark.parametrize("tp", [1, 2, 5])
def test_a_plan_of_blocks_runs_on_meshes_that_divide_the_blocks(tp):
    plan = ReductionPlan("blocks")
    x, w = activations(3, 1280, "e4m3"), weight("e4m3", 40, 1280)
    want = oracle.row_parallel(x, w, tp=10, plan=plan, activation="e4m3")
    assert_same_words(row(x, w, tp, "e4m3", plan), want)


def _control(partials, tp, wire):
    """Each rank adds its own slots, and the ranks' sums meet by `wire`."""

    def local(partials):
        total = partials[0]
        for partial in partials[1:]:
            total = total + partial
        return wire(total)

    run = jax.shard_map(
        local,
        mesh=jaxtp.make_mesh(tp=tp),
        in_specs=P("tp"),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(run)(partials)


def _psum(total):
    return lax.psum(total, "tp")


def _psum_on_a_bf16_wire(total):
    return lax.psum(lax.reduce_precision(total, 8, 7), "tp")


@pytest.mark.parametrize("wire", [_psum, _psum_on_a_bf16_wire])
def test_control_a_psum_changes_words_with_the_mesh(wire):
    x, w = activations(8, 4096, "bf16"), weight("bf16", 128, 4096)
    plan = ReductionPlan(16)
    partials = oracle.row_parallel(x, w, plan=plan, reduce=False)
    want = oracle.sum_slots(partials, plan)
    for tp in (2, 4, 8):
        assert_same_words(row(x, w, tp, "bf16", plan), want, what=f"tp={tp}")
        changed = count_different_words(_control(partials, tp, wire), want)
        assert changed >= 0.01 * want.size, f"tp={tp}: {changed} words"


@pytest.mark.parametrize("tp", [2, 4])
def test_control_a_fold_at_the_rank_boundary_changes_words(tp):
    x, w = activations(8, 1280, "bf16"), weight("bf16", 128, 1280)
    partials = oracle.row_parallel(x, w, reduce=False)
    ranks = partials.reshape(tp, 8 // tp, *partials.shape[1:])
    folded = oracle.sum_slots(
        np.stack([oracle.sum_slots(r, ReductionPlan(8 // tp)) for r in ranks]),
        ReductionPlan(tp),
    )
    want = oracle.sum_slots(partials, ReductionPlan())
    assert count_different_words(folded, want) >= 0.01 * want.size


def test_control_an_unrounded_product_is_absorbed_by_the_next_addition():
    scale = jnp.float32(0.1)
    y, r = normal(64, 64, seed=5), normal(64, 64, seed=6)
    want = y * np.float32(0.1) + r
    naive = jax.jit(lambda y, r: y * scale + r)(y, r)
    assert count_different_words(naive, want) >= 0.01 * want.size
