"""Public reports of blocks, groups and widths that ranks would cut.

Each test names the report it comes from. A width that no rank count divides well gives
the words of the unsharded call, and a control shows what the reported program gives.
"""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from cases import activations, normal, weight

import jaxtp
from jaxtp import Fp8Weight, Nvfp4Weight, ReductionPlan, formats
from jaxtp.plan import slot_layout
from jaxtp.testing import assert_same_words, count_different_words

MESHES = (2, 4, 8)


def bf16(values):
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("activation", "one"), [("bf16", 1.0), ("int8", 127.0)])
def test_group_scales_are_cut_along_k_with_the_codes(activation, one):
    """Each rank has its own groups of the scales, not the first ones.

    https://github.com/vllm-project/vllm/issues/41511
    https://github.com/vllm-project/vllm-omni/pull/5761
    """
    scale = np.float32([[1, 2, 4, 8]] * 8).astype(ml_dtypes.float8_e4m3fn)
    w = Nvfp4Weight(np.full((8, 32), 0x22, np.uint8), scale, np.float32(1).reshape(()))
    # int8 codes of 127 have the scale 1, so that the values are exact there as well.
    x = bf16(np.full((1, 64), one))
    p = jaxtp.place(w, jaxtp.make_mesh(tp=2), parallel="row", plan=ReductionPlan(2))
    partials = jaxtp.row_parallel(x, p, activation=activation, reduce=False)
    want = np.float32(one) * np.float32([[[48]], [[192]]])
    assert_same_words(partials, np.broadcast_to(want, (2, 1, 8)))
    y = np.asarray(jaxtp.row_parallel(x, p, activation=activation))
    assert_same_words(y, np.full((1, 8), 240 * one, np.float32))
    assert y[0, 0] != 96 * one


def shard_by_shard(values, width):
    """Every shard of K quantized by itself, blocks from its own first column."""
    parts = []
    for start in range(0, values.shape[1], width):
        code, scale = formats.quantize_fp8_block(values[:, start : start + width])
        parts.append(formats.dequantize_fp8_block(code, scale, (128, 128)))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("k_local", [64, 80, 96, 192, 576])
def test_block_scales_that_ranks_share_give_one_set_of_words(k_local):
    """K per rank is no multiple of the block.

    https://github.com/vllm-project/vllm/issues/52997 (64)
    https://github.com/vllm-project/vllm/issues/54178 (80)
    https://github.com/vllm-project/vllm/issues/42384 (192)
    https://github.com/sgl-project/sglang/issues/3345 (576)
    """
    w, x = weight("e4m3", 64, 8 * k_local), activations(3, 8 * k_local, "e4m3")
    want = np.asarray(jaxtp.project(x, w, activation="e4m3"))
    p = jaxtp.place(w, jaxtp.make_mesh(tp=8), parallel="row")
    assert_same_words(jaxtp.row_parallel(x, p, activation="e4m3"), want)
    # Control: quantizing each shard again changes 38 % of the values at 192.
    values = np.asarray(w.dequantize())
    again = shard_by_shard(values, k_local)
    assert count_different_words(again, values) >= 0.01 * values.size


@pytest.mark.parametrize(("k", "tp"), [(1856, 8), (1856, 4), (1280, 8)])
def test_groups_of_16_that_a_shard_would_cut_are_cut_by_slots(k, tp):
    """232, 464 and 160 columns a rank; 232 / 16 is 14 and a half groups.

    https://github.com/vllm-project/vllm/pull/49951
    https://github.com/vllm-project/vllm/pull/30260
    """
    w, x = weight("nvfp4", 64, k), activations(3, k, "int8")
    want = np.asarray(jaxtp.project(x, w, activation="int8"))
    p = jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="row")
    assert_same_words(jaxtp.row_parallel(x, p, activation="int8"), want)
    if k // tp % 16:
        # Control: groups counted from the first column of every shard of 232.
        groups = np.asarray(formats.decode_e4m3(w.scale))
        column = np.arange(k)
        wrong = np.minimum(column // 232 * 15 + column % 232 // 16, k // 16 - 1)
        right = groups[:, column // 16]
        assert count_different_words(groups[:, wrong], right) >= 0.01 * right.size


@pytest.mark.parametrize("format", ["e4m3", "nvfp4"])
def test_the_last_expert_of_a_width_of_2880_reads_its_own_scales(format):
    """Scales padded by another rule than weights shift every expert after the first.

    https://github.com/vllm-project/vllm/pull/35497
    """
    values, x = normal(3, 160, 2880), activations(1, 2880, "bf16")
    if format == "e4m3":
        bank, alone = (
            Fp8Weight(*formats.quantize_fp8_block(v)) for v in (values, values[2])
        )
    else:
        bank, alone = (
            Nvfp4Weight(*formats.quantize_nvfp4(v)) for v in (values, values[2])
        )
    want = jaxtp.project(x, alone, activation="bf16")
    p = jaxtp.place(bank.expert(2), jaxtp.make_mesh(tp=8), parallel="row")
    assert_same_words(jaxtp.row_parallel(x, p, activation="bf16"), want)
    # Control: one entry too far for each expert before this one.
    late = np.roll(bank.scale.reshape(-1), -2).reshape(bank.scale.shape)[2]
    wrong = dataclasses.replace(alone, scale=late)
    got = jaxtp.project(x, wrong, activation="bf16")
    assert count_different_words(got, want) >= 0.01 * want.size


@pytest.mark.parametrize("tp", MESHES)
def test_five_groups_on_two_ranks_lose_no_column(tp):
    """K = 80 in groups of 16: never 64.

    https://github.com/sgl-project/sglang/pull/9433
    https://github.com/NVIDIA/TensorRT-LLM/pull/7214
    """
    scale = np.ones((8, 5), np.float32).astype(ml_dtypes.float8_e4m3fn)
    w = Nvfp4Weight(np.full((8, 40), 0x22, np.uint8), scale, np.float32(1).reshape(()))
    p = jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="row")
    y = jaxtp.row_parallel(bf16(np.ones((1, 80))), p, activation="bf16")
    assert_same_words(y, np.full((1, 8), 80, np.float32))


def test_90_blocks_of_32_over_four_slots_are_23_23_23_and_21():
    """https://github.com/sgl-project/sglang/pull/9473"""
    layout = slot_layout(2880, 4)
    blocks = [np.diff(layout.bounds(slot)).item() / 32 for slot in range(4)]
    assert blocks == [23, 23, 23, 21]


@pytest.mark.parametrize(("n", "k"), [(1, 16), (3, 48), (80, 640), (160, 80)])
def test_any_k_of_whole_groups_and_any_n_work(n, k):
    """640 / 8 = 80 rows or columns a rank are no whole tile.

    https://github.com/1CatAI/1Cat-vLLM/issues/642
    """
    rng = np.random.default_rng(n * k)
    code = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    scale = np.exp2(rng.integers(-2, 4, (n, k // 16)).astype(np.float32))
    w = Nvfp4Weight(
        code, scale.astype(ml_dtypes.float8_e4m3fn), np.float32(0.5).reshape(())
    )
    x = rng.integers(-8, 9, (2, k)).astype(np.float32)
    # Multiples of 1/16 below 2^19: every product and sum is exact in any order.
    want = (x.astype(np.float64) @ np.asarray(w.dequantize(), np.float64).T) + 0.0
    want = want.astype(np.float32)
    mesh = jaxtp.make_mesh(tp=8)
    row, column = (jaxtp.place(w, mesh, parallel=cut) for cut in ("row", "column"))
    assert_same_words(jaxtp.row_parallel(bf16(x), row, activation="bf16"), want)
    assert_same_words(jaxtp.column_parallel(bf16(x), column, activation="bf16"), want)


def rank_scales(x, tp):
    """Activations through E4M3 with one scale a token and rank, decoded."""
    shards = x.reshape(len(x), tp, -1)
    code, d = formats.quantize_e4m3(shards)
    decoded = np.asarray(code, np.float32) * np.asarray(d)[..., None]
    return decoded.reshape(x.shape)


@pytest.mark.parametrize("tp", MESHES)
@pytest.mark.parametrize(
    ("format", "activation"), [("e4m3", "e4m3"), ("nvfp4", "int8")]
)
def test_an_outlier_column_scales_the_same_columns_on_every_mesh(
    format, activation, tp
):
    """A path without the amax all-reduce gives each rank a scale of its own.

    https://github.com/NVIDIA/TransformerEngine/pull/3073
    https://github.com/NVIDIA/TransformerEngine/issues/656
    https://github.com/vllm-project/vllm/pull/54683
    """
    w, x = weight(format, 64, 640), activations(3, 640, activation)
    x[:, 77] *= 1000
    want = np.asarray(jaxtp.project(x, w, activation=activation))
    p = jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="row")
    assert_same_words(jaxtp.row_parallel(x, p, activation=activation), want)
    # Control: amax of the rank's columns, against amax of all (47 to 82 % reported).
    whole = rank_scales(x, 1)
    assert count_different_words(rank_scales(x, tp), whole) >= 0.01 * x.size


@pytest.mark.parametrize(
    ("format", "activation"), [("bf16", "f32"), ("e4m3", "e4m3"), ("nvfp4", "int8")]
)
def test_left_over_numbers_past_k_reach_no_result(format, activation):
    """160 columns a rank, the last 16 of them padding full of NaN.

    https://github.com/vllm-project/vllm/pull/48898
    https://github.com/vllm-project/vllm/pull/30260
    """
    k = 1264
    w, x = weight(format, 64, k), activations(3, k, activation)
    p = jaxtp.place(w, jaxtp.make_mesh(tp=8), parallel="row")
    assert p.layout.width == 160
    clean = np.pad(x, ((0, 0), (0, p.layout.padded - k)))
    want = np.asarray(jaxtp.row_parallel(clean, p, activation=activation))
    for poison in (1e30, np.inf, np.nan):
        in_slots = np.full_like(clean, poison)
        in_slots[:, :k] = x
        y = jaxtp.row_parallel(in_slots, p, activation=activation)
        assert_same_words(y, want, what=f"padding of {poison}")
    # Control: the zeros of a weight's padding do not stop a NaN.
    values = np.pad(np.asarray(w.dequantize()), ((0, 0), (0, p.layout.padded - k)))
    assert np.isnan(in_slots @ values.T).all()


@pytest.mark.parametrize("format", ["bf16", "e4m3", "nvfp4"])
def test_the_padding_of_a_placed_weight_is_zero_bytes(format):
    """Never memory as it was found.

    https://github.com/vllm-project/vllm/pull/48898
    https://github.com/vllm-project/vllm/pull/30260
    """
    k = 1264
    w = weight(format, 64, k)
    for tp in MESHES:
        p = jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="row")
        for part, an_element in (
            (p.value, 2 if format == "nvfp4" else 1),
            (p.scale, 16),
        ):
            if part is None or (part is p.scale and format == "e4m3"):
                continue
            pad = np.asarray(part)[-1, :, (k - 7 * 160) // an_element :]
            assert pad.size
            assert not pad.view(np.uint8).any()


def test_an_expert_held_whole_has_the_words_of_one_cut_over_ranks():
    """Garbled under tensor parallelism, and right under expert parallelism.

    https://github.com/vllm-project/vllm/issues/47528
    """
    experts = [weight("nvfp4", 64, 640, seed=seed) for seed in (2, 3)]
    x = activations(3, 640, "int8")
    for rank, expert in enumerate(experts):
        whole = jax.device_put(expert, jax.devices()[rank])
        y = np.asarray(jaxtp.project(x, whole, activation="int8"))
        for tp in MESHES:
            p = jaxtp.place(expert, jaxtp.make_mesh(tp=tp), parallel="row")
            cut = jaxtp.row_parallel(x, p, activation="int8")
            assert_same_words(cut, y, what=f"expert {rank} on {tp} ranks")
    # Control: the last expert's codes under the scales of the first.
    mixed = dataclasses.replace(experts[0], code=experts[1].code)
    got = np.asarray(jaxtp.project(x, mixed, activation="int8"))
    assert count_different_words(got, y) >= 0.01 * y.size
