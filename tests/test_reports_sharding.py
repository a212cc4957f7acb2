"""Public reports of rows and their scales cut by ranks: stated values, exactly.

Each test names the report it comes from. All operands are powers of two or small
integers, so that the right value is one float32 word.
"""

import ml_dtypes
import numpy as np
import pytest

import jaxtp
from jaxtp import Fp8Weight, ReductionPlan
from jaxtp.errors import PlanError, ShapeError
from jaxtp.plan import slot_layout
from jaxtp.testing import assert_same_words, count_different_words

MESHES = (2, 4, 8)


def bf16(values):
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)


def block_weight(n, k, scale, block_shape=(128, 128)):
    """An E4M3 weight of ones, whose blocks differ by their scales alone."""
    code = np.ones((n, k), np.float32).astype(ml_dtypes.float8_e4m3fn)
    return Fp8Weight(code, np.asarray(scale, np.float32), block_shape)


def rows_of(values, size=128):
    """The value of each row, for runs of `size` rows."""
    return np.repeat(np.asarray(values, np.float32), size)


def column_outputs(w, tp, out_slots=8):
    """`(y, parts)` of a row of ones: the result, and what each rank holds of it."""
    mesh = jaxtp.make_mesh(tp=tp)
    p = jaxtp.place(w, mesh, parallel="column", out_slots=out_slots)
    x = bf16(np.ones((1, w.shape[1])))
    y = jaxtp.column_parallel(x, p, activation="bf16", gather=False)
    shards = {s.device: np.asarray(s.data)[0] for s in y.addressable_shards}
    parts = [shards[device] for device in mesh.devices.flat]
    assert sum(len(part) for part in parts) == slot_layout(w.shape[0], out_slots).padded
    return np.concatenate(parts)[: w.shape[0]], parts


def test_ranks_that_share_a_scale_row_each_find_it():
    """64 rows a rank under blocks of 128.

    https://github.com/vllm-project/vllm/issues/52997
    """
    w = block_weight(256, 128, [[2], [8]])
    for tp in MESHES:
        y, parts = column_outputs(w, tp)
        assert_same_words(y, rows_of([256, 1024]), what=f"tp={tp}")
        if tp == 4:
            for rank, value in enumerate((256, 256, 1024, 1024)):
                assert_same_words(parts[rank], rows_of([value], 64), what=f"{rank=}")


def test_concatenated_matrices_keep_five_distinct_scale_rows():
    """384, 64 and 64 rows need 3 + 1 + 1 scale rows, not ceil(512 / 128) = 4.

    https://github.com/vllm-project/vllm/pull/52915
    """
    scales = np.float32([[1], [2], [4], [8], [16]])
    with pytest.raises(ShapeError, match=r"\(4, 1\).*got \(5, 1\)"):
        jaxtp.project(bf16(np.ones((1, 128))), block_weight(512, 128, scales))
    # Finer blocks hold the same scales, each repeated for the rows it covers.
    fine = np.concatenate([np.repeat(scales[:3], 2, axis=0), scales[3:]])
    y, _ = column_outputs(block_weight(512, 128, fine, (64, 128)), 8)
    want = np.concatenate([rows_of([128, 256, 512]), rows_of([1024, 2048], 64)])
    assert_same_words(y, want)


@pytest.mark.parametrize("tp", MESHES)
def test_a_width_of_2_and_a_half_blocks_keeps_global_scale_rows(tp):
    """1280 rows: 320 a rank at four ranks, 160 at eight.

    https://github.com/sgl-project/sglang/issues/26107
    """
    y, parts = column_outputs(
        block_weight(1280, 128, np.exp2(np.arange(10))[:, None]), tp
    )
    assert_same_words(y, rows_of(128 * np.exp2(np.arange(10))))
    runs = {
        4: (
            ((0, 128), (1, 128), (2, 64)),
            ((2, 64), (3, 128), (4, 128)),
            ((5, 128), (6, 128), (7, 64)),
            ((7, 64), (8, 128), (9, 128)),
        ),
        8: (((0, 128), (1, 32)), ((1, 96), (2, 64))),
    }
    for rank, run in enumerate(runs.get(tp, ())):
        want = np.concatenate([rows_of([128.0 * 2**i], count) for i, count in run])
        assert_same_words(parts[rank], want, what=f"{rank=}")


@pytest.mark.parametrize("tp", [4, 8])
def test_192_rows_a_rank_keep_global_scale_rows(tp):
    """1536 rows over eight ranks: no rank starts at a block but rank 0, 2, 4 and 6.

    https://github.com/vllm-project/vllm/issues/17569
    https://github.com/vllm-project/vllm/issues/25292
    https://github.com/vllm-project/vllm/pull/48173
    """
    y, parts = column_outputs(
        block_weight(1536, 128, np.exp2(np.arange(12))[:, None]), tp
    )
    assert_same_words(y, rows_of(128 * np.exp2(np.arange(12))))
    if tp == 8:
        rank1 = np.concatenate([rows_of([128 * 2.0], 64), rows_of([128 * 4.0])])
        rank5 = np.concatenate([rows_of([128 * 2.0**7], 64), rows_of([128 * 2.0**8])])
        assert_same_words(parts[1], rank1)
        assert_same_words(parts[5], rank5)


def test_blocks_of_64_are_right_with_repeated_scales_and_wrong_without():
    """Halving the block to fit 192 rows must repeat each scale for both halves.

    https://github.com/ROCm/ATOM/pull/1488
    """
    scale = np.exp2(np.arange(12, dtype=np.float32))[:, None]
    want = rows_of(128 * np.exp2(np.arange(12)))
    fine = block_weight(1536, 128, np.repeat(scale, 2, axis=0), (64, 128))
    y, _ = column_outputs(fine, 8)
    assert_same_words(y, want)
    # Control: the scale rows as they are, two cycles of them.
    wrong = block_weight(1536, 128, np.tile(scale, (2, 1)), (64, 128))
    got, _ = column_outputs(wrong, 8)
    assert count_different_words(got, want) >= 0.01 * want.size


@pytest.mark.parametrize("tp", MESHES)
def test_every_rank_of_a_tiny_projection_uses_its_one_scale(tp):
    """64 rows over eight ranks.

    https://github.com/sgl-project/sglang/issues/19045
    """
    y, parts = column_outputs(block_weight(64, 128, [[3]]), tp)
    assert_same_words(y, rows_of([384], 64))
    # Output slots are 32 rows wide at least, so trailing ranks hold padding: zeros.
    assert {v for part in parts for v in part.tolist()} <= {384.0, 0.0}


@pytest.mark.parametrize("tp", MESHES)
def test_576_rows_take_the_block_of_the_config_and_not_one_that_fits(tp):
    """576 rows and 5 scale rows.

    https://github.com/vllm-project/compressed-tensors/pull/547
    https://github.com/huggingface/transformers/pull/36026
    """
    scale = np.float32([[1], [2], [4], [8], [16]])
    y, _ = column_outputs(block_weight(576, 128, scale), tp)
    want = 128 * rows_of([1, 2, 4, 8, 16])[:576]
    assert_same_words(y, want)
    assert [y[r] / 128 for r in (116, 511, 512, 575)] == [1, 8, 16, 16]
    # Control: 116 rows to a block also make five scale rows.
    inferred = np.asarray(block_weight(576, 128, scale, (116, 128)).dequantize())
    assert count_different_words(128 * inferred[:, 0], want) == 120


@pytest.mark.parametrize("tp", MESHES)
def test_1000_rows_take_the_block_of_the_config_and_not_one_that_divides(tp):
    """1000 rows and 8 scale rows; the first scale is zero.

    https://github.com/NVIDIA/TensorRT-Model-Connect/pull/1115
    https://github.com/axolotl-ai-cloud/axolotl/pull/3486
    """
    scale = np.arange(8, dtype=np.float32)[:, None]
    y, _ = column_outputs(block_weight(1000, 128, scale), tp)
    want = 128 * rows_of(range(8))[:1000]
    assert_same_words(y, want)
    assert [y[r] / 128 for r in (126, 127, 128, 999)] == [0, 0, 1, 7]
    # Control: 125 rows to a block divide evenly.
    inferred = np.asarray(block_weight(1000, 128, scale, (125, 128)).dequantize())
    assert count_different_words(128 * inferred[:, 0], want) == 84


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_boundary_inside_a_block_splits_its_columns(tp):
    """4 and a half blocks a rank.

    https://github.com/sgl-project/sglang/issues/3345
    https://github.com/vllm-project/vllm/issues/12256
    """
    w = block_weight(8, 1152, [np.arange(1, 10)])
    x = bf16(np.ones((1, 1152)))
    p = jaxtp.place(
        w, jaxtp.make_mesh(tp=tp), parallel="row", plan=ReductionPlan(2, "sequential")
    )
    partials = jaxtp.row_parallel(x, p, activation="bf16", reduce=False)
    assert_same_words(
        partials, np.broadcast_to(np.float32([[[1600]], [[4160]]]), (2, 1, 8))
    )
    y = jaxtp.row_parallel(x, p, activation="bf16")
    assert_same_words(y, np.full((1, 8), 5760, np.float32))


@pytest.mark.parametrize("tp", MESHES)
def test_eight_slots_of_1152_columns_have_the_same_sum(tp):
    """144 columns a rank at eight ranks.

    https://github.com/sgl-project/sglang/issues/3345
    """
    w = block_weight(8, 1152, [np.arange(1, 10)])
    p = jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="row")
    y = jaxtp.row_parallel(bf16(np.ones((1, 1152))), p, activation="bf16")
    assert_same_words(y, np.full((1, 8), 5760, np.float32))


# A fused QKV matrix in stripes, one for each of four KV heads: 64 rows of Q (four heads
# of 16), 16 of K, 16 of V. Stripes of 96 rows straddle the scale blocks of 128.
# https://github.com/vllm-project/vllm/pull/46755
# https://github.com/sgl-project/sglang/pull/24379
STRIPE, Q_ROWS, HEADS = 96, 64, 4


def striped_weight():
    """Row r gives `r * 2^(r // 128)` for `x = [1, 8, 64, 0, ...]`."""
    row = np.arange(STRIPE * HEADS)
    code = np.zeros((row.size, 128), np.float32)
    code[:, 0], code[:, 1], code[:, 2] = row % 8, row // 8 % 8, row // 64
    scale = np.exp2(np.arange(3, dtype=np.float32))[:, None]
    return Fp8Weight(code.astype(ml_dtypes.float8_e4m3fn), scale)


def labels(w, tp, out_slots=8):
    """The fused row of each output, times the scale of its block."""
    p = jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel="column", out_slots=out_slots)
    x = np.zeros((1, 128), np.float32)
    x[0, :3] = 1, 8, 64
    y = jaxtp.column_parallel(bf16(x), p, activation="bf16", gather=False)
    return np.asarray(y)[0]


def test_one_output_slot_a_stripe_never_cuts_a_stripe():
    fused, row = striped_weight(), np.arange(STRIPE * HEADS)
    for tp in (2, 4):
        # Four slots of 96 rows: a rank holds whole stripes, and slot layout has no gap.
        want = (row * 2.0 ** (row // 128)).astype(np.float32)
        assert_same_words(labels(fused, tp, out_slots=HEADS), want)
    with pytest.raises(PlanError, match=r"4 output slots.*got axis size 8"):
        labels(fused, 8, out_slots=HEADS)


def test_more_ranks_than_kv_heads_share_k_and_v_and_split_q():
    fused = striped_weight()
    ranks = []
    for rank in range(8):
        head, half = divmod(rank, 2)
        q = np.arange(32) + head * STRIPE + half * 32
        ranks.append(np.concatenate([q, np.arange(Q_ROWS, STRIPE) + head * STRIPE]))
    row = np.concatenate(ranks)
    # Rows move with their own scales once every row has one.
    rearranged = Fp8Weight(fused.code[row], fused.scale[row // 128], (1, 128))
    got = labels(rearranged, 8).reshape(8, 64)
    assert_same_words(got.reshape(-1), (row * 2.0 ** (row // 128)).astype(np.float32))
    assert_same_words(got[0, 32:], got[1, 32:])
    assert not set(got[0, :32]) & set(got[1, :32])
