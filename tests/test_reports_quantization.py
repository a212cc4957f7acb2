"""Public reports of codes and scales read or made wrongly: stated values, exactly.

One-hot tokens read a weight back: `project` then gives each decoded element by itself,
through the kernels and the global scale.
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from cases import activations, weight
from checkpoint_cases import FP8_CONFIG, MODELOPT_CONFIG, codes, e4m3, folder

import jaxtp
from jaxtp import Fp8Weight, Nvfp4Weight, ReductionPlan, checkpoint, formats
from jaxtp.errors import NonFiniteError, ShapeError
from jaxtp.testing import assert_same_words, count_different_words

MESHES = (2, 4, 8)


def bf16(values):
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)


def read_back(w):
    """The decoded `[N, K]` as the projection sees it."""
    one_hot = bf16(np.eye(w.shape[1]))
    return np.asarray(jaxtp.project(one_hot, w, activation="bf16")).T


def nvfp4_weight(n, k, *, code=0x2, scale=0x38, g=1.0, kind="multiplier"):
    """One code everywhere; `scale` is a byte, or one for each row."""
    scale = np.broadcast_to(np.uint8(scale).reshape(-1, 1), (n, k // 16))
    packed = np.full((n, k // 2), code * 0x11, np.uint8)
    return Nvfp4Weight(packed, e4m3(scale), np.float32(g).reshape(()), kind)


def ones_times(w, tokens=1, activation="bf16"):
    return np.asarray(
        jaxtp.project(bf16(np.ones((tokens, w.shape[1]))), w, activation=activation)
    )


# FP8 blocks


def test_scales_that_are_no_powers_of_two_keep_their_fraction():
    """A kernel that takes exponents alone gives 0.0009765625.

    https://github.com/sgl-project/sglang/pull/13067
    https://github.com/sgl-project/sglang/issues/39193
    """
    w = Fp8Weight(codes(0x38, 4, 32), np.float32([[1.5 * 2**-10]]))
    assert_same_words(read_back(w), np.full((4, 32), 0.00146484375, np.float32))


def test_bf16_block_scales_are_widened(tmp_path):
    """The scale 0x3B4B is 0.0030975341796875.

    https://github.com/modular/modular/issues/7142
    https://github.com/HabanaAI/vllm-fork/pull/2141
    """
    scale = np.uint16([[0x3B4B]]).view(ml_dtypes.bfloat16)
    tensors = {"a.b.weight": codes(0x7E, 4, 32), "a.b.weight_scale_inv": scale}
    with checkpoint.open(folder(tmp_path, tensors, FP8_CONFIG)) as ckpt:
        y = read_back(ckpt.weight("a.b"))
    assert_same_words(y, np.full((4, 32), 1.3876953125, np.float32))


def test_blocks_of_zeros_are_quantized_without_a_nan():
    """0 / 0 made 49,152 NaN codes of three such blocks.

    https://github.com/THUDM/slime/pull/2256
    https://github.com/huggingface/kernels-community/issues/681
    """
    values = np.zeros((256, 256), np.float32)
    values[0, 0] = 1
    code, scale = formats.quantize_fp8_block(values)
    assert not np.isnan(np.asarray(code, np.float32)).any()
    assert np.isfinite(scale).all()
    assert (scale > 0).all()
    decoded = read_back(Fp8Weight(code, scale))
    assert np.flatnonzero(decoded).tolist() == [0]


def test_a_scale_of_zero_over_zero_codes_decodes_to_zeros():
    """https://github.com/pytorch/ao/issues/4762"""
    w = Fp8Weight(codes(0x00, 4, 32), np.float32([[0]]))
    assert_same_words(read_back(w), np.zeros((4, 32), np.float32))


def test_activations_above_the_range_are_clipped_and_not_nan():
    """A plain cast makes NaN of everything above 464.

    https://github.com/jax-ml/ml_dtypes/issues/400
    """
    values = np.float32([1000, 465, 464, -1000])
    got = np.asarray(formats.encode_e4m3(values)).astype(np.float32)
    assert_same_words(got, np.float32([448, 448, 448, -448]))
    cast = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.isnan(cast).tolist() == [True, True, False, True]
    # With its scale of 4 the activation 1792 is exact.
    w = Fp8Weight(codes(0x38, 4, 32), np.float32([[1]]))
    x = np.full((1, 32), 1792, np.float32)
    y = jaxtp.project(x, w, activation="e4m3")
    assert_same_words(y, np.full((1, 4), 1792 * 32, np.float32))


def test_a_block_keeps_more_than_the_14_bits_of_an_fp8_accumulator():
    """448 * 256 + 127 * 1 in one block of 128 columns.

    https://github.com/deepseek-ai/DeepGEMM/issues/37
    https://github.com/deepseek-ai/DeepGEMM/issues/176
    """
    x, values = np.ones((1, 128), np.float32), np.ones((4, 128), np.float32)
    x[0, 0], values[:, 0] = 448, 256
    w = Fp8Weight(values.astype(ml_dtypes.float8_e4m3fn), np.float32([[1]]))
    y = jaxtp.project(x, w, plan=ReductionPlan(1), activation="e4m3")
    assert_same_words(y, np.full((1, 4), 114815, np.float32))
    # Control: 14 bits round every sum to a multiple of 8, so that the ones are lost.
    total = 448 * 256
    for _ in range(127):
        total = 8 * ((total + 1) // 8)
    assert total == 114688


# NVFP4 global scales


def test_a_divisor_divides_and_a_multiplier_multiplies(tmp_path):
    """amax = 3: the divisor 896 taken as a multiplier gives 2,408,448.

    https://github.com/modular/modular/issues/6600
    """
    divided = nvfp4_weight(4, 16, code=0x7, scale=0x7E, g=896, kind="divisor")
    assert_same_words(read_back(divided), np.full((4, 16), 3, np.float32))
    confused = dataclasses.replace(divided, global_scale_kind="multiplier")
    assert_same_words(read_back(confused), np.full((4, 16), 2408448, np.float32))
    twin = nvfp4_weight(4, 16, code=0x7, scale=0x7E, g=0.0011160715)
    assert_same_words(read_back(twin), np.full((4, 16), 3.0000002, np.float32))


def test_both_conventions_of_the_global_scale_are_read_from_files(tmp_path):
    """https://github.com/modular/modular/issues/6600"""
    packed = np.full((4, 8), 0x77, np.uint8)
    tensors = {
        "a.b.weight_packed": packed,
        "a.b.weight_scale": codes(0x7E, 4, 1),
        "a.b.weight_global_scale": np.float32([896]),
    }
    weights = {"num_bits": 4, "type": "float", "group_size": 16}
    section = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }
    path = folder(tmp_path / "divisor", tensors, {"quantization_config": section})
    with checkpoint.open(path) as ckpt:
        y = read_back(ckpt.weight("a.b"))
    assert_same_words(y, np.full((4, 16), 3, np.float32))
    tensors = {
        "a.b.weight": packed,
        "a.b.weight_scale": codes(0x7E, 4, 1),
        "a.b.weight_scale_2": np.float32(0.0011160715).reshape(()),
    }
    path = folder(tmp_path / "multiplier", tensors, MODELOPT_CONFIG)
    with checkpoint.open(path) as ckpt:
        y = read_back(ckpt.weight("a.b"))
    assert_same_words(y, np.full((4, 16), 3.0000002, np.float32))


@pytest.mark.parametrize(
    ("kind", "scales", "stated"),
    [
        ("multiplier", (3.85e-05, 4.83e-05), ("0.1034880", "0.1298304")),
        (
            "divisor",
            (12343.1035, 5334.3257, 8001.4883),
            ("0.2177734", "0.5039062", "0.3359375"),
        ),
    ],
)
def test_fused_matrices_keep_one_global_scale_each(kind, scales, stated):
    """Gate and up, or q, k and v, with one scale taken for all: 1.25 to 2.3 times off.

    https://github.com/vllm-project/vllm/issues/54974
    https://github.com/NVIDIA/TensorRT-LLM/pull/14199
    https://github.com/vllm-project/vllm/pull/47515
    https://github.com/intel/auto-round/issues/2380
    """
    g, count = np.float32(scales), len(scales)
    parts = nvfp4_weight(4 * count, 16, code=0x7, scale=0x7E)
    bank = Nvfp4Weight(
        parts.code.reshape(count, 4, 8), parts.scale.reshape(count, 4, 1), g, kind
    )
    top = np.float32(2688)
    want = top * g if kind == "multiplier" else top / g
    got = [read_back(bank.expert(i))[0, 0] for i in range(count)]
    assert_same_words(np.stack(got), want)
    assert [f"{value:.7f}" for value in got] == list(stated)
    # Control: the largest of them for all.
    merged = top * g.max() if kind == "multiplier" else top / g.max()
    assert count_different_words(np.full(count, merged), want) == count - 1


# NVFP4 companions


def test_a_nan_block_scale_is_refused_where_it_is_read_and_decodes_to_nan():
    """An exporter wrote 0x7F for a block of zeros.

    https://github.com/NVIDIA/Model-Optimizer/pull/1397
    """
    scale = e4m3([[0x38, 0x7F]])
    w = Nvfp4Weight(np.zeros((1, 16), np.uint8), scale, np.float32(1).reshape(()))
    with pytest.raises(NonFiniteError, match=r"`scale` .*0x7f\) at \(0, 1\)"):
        jaxtp.project(bf16(np.ones((1, 32))), w, activation="bf16")
    with pytest.raises(NonFiniteError, match=r"`scale` .*0x7f\) at \(0, 1\)"):
        jaxtp.place(w, jaxtp.make_mesh(tp=2), parallel="row")
    decoded = np.asarray(w.dequantize())
    assert_same_words(decoded[0, :16], np.zeros(16, np.float32))
    assert np.isnan(decoded[0, 16:]).all()
    # A writer clamps instead.
    ratio = np.float32(448) / (np.float32(0.1) / np.float32(6))
    assert np.asarray(formats.encode_e4m3(ratio)).view(np.uint8) == 0x7E
    _, scale, _ = formats.quantize_nvfp4(np.zeros((1, 32), np.float32))
    assert (scale.view(np.uint8) <= 0x7E).all()


def test_too_few_block_scales_are_refused_with_the_expected_shape():
    """https://github.com/NVIDIA/Model-Optimizer/pull/2038"""
    w = Nvfp4Weight(
        np.zeros((4, 16), np.uint8), codes(0x38, 4, 1), np.float32(1).reshape(())
    )
    with pytest.raises(ShapeError, match=r"`scale` .*\(4, 2\).*got \(4, 1\)"):
        jaxtp.project(bf16(np.ones((1, 32))), w, activation="bf16")


def test_weights_without_an_activation_scale_need_none(tmp_path):
    """An uninitialised `input_scale` of 0 zeroed every expert.

    https://github.com/vllm-project/vllm/issues/54189
    """
    tensors = {
        "a.b.weight": np.full((4, 8), 0x22, np.uint8),
        "a.b.weight_scale": codes(0x38, 4, 1),
        "a.b.weight_scale_2": np.float32(0.5).reshape(()),
    }
    section = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    with checkpoint.open(
        folder(tmp_path, tensors, {"quantization_config": section})
    ) as ckpt:
        y = ones_times(ckpt.weight("a.b"))
    assert_same_words(y, np.full((1, 4), 8, np.float32))


def test_rows_are_permuted_with_their_scales():
    """https://github.com/ggml-org/llama.cpp/pull/22611"""
    w = nvfp4_weight(4, 16, scale=[0x38, 0x40, 0x44, 0x48])
    assert_same_words(read_back(w)[:, 0], np.float32([1, 2, 3, 4]))
    order = [2, 0, 3, 1]
    both = dataclasses.replace(w, code=w.code[order], scale=w.scale[order])
    assert_same_words(read_back(both)[:, 0], np.float32([3, 1, 4, 2]))
    # Control: the codes alone, which are equal, move nothing.
    one = dataclasses.replace(w, code=w.code[order])
    assert_same_words(read_back(one)[:, 0], np.float32([1, 2, 3, 4]))


@pytest.mark.parametrize("activation", ["bf16", "int8"])
def test_fewer_than_eight_rows_have_the_words_of_more(activation):
    """Outputs of N < 8 took the byte of a scale for its value.

    https://github.com/ml-explore/mlx/issues/3762
    """
    w, x = weight("nvfp4", 8, 64), activations(1, 64, activation)
    four = dataclasses.replace(w, code=w.code[:4], scale=w.scale[:4])
    want = np.asarray(jaxtp.project(x, w, activation=activation))[:, :4]
    assert_same_words(jaxtp.project(x, four, activation=activation), want)
    raw = w.scale.view(np.uint8).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    bytes_as_values = dataclasses.replace(four, scale=raw[:4])
    got = jaxtp.project(x, bytes_as_values, activation=activation)
    assert count_different_words(got, want) == 4
