"""Reports of FP8 loading defects in other projects, with the right values.

Each test is a small case of our own; the link names the report. Byte 0x38 is 1.0 and
0x7E is 448.
"""

import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import FP8_CONFIG, codes, e4m3, entry, file_bytes, folder

from jaxtp import checkpoint
from jaxtp.errors import CheckpointError, MissingTensorError, UnsupportedError
from jaxtp.formats import dequantize_fp8_block
from jaxtp.testing import assert_same_words, words

F32 = np.float32
MODULE = "model.layers.0.mlp.down_proj"


def decode(path, code, scale, suffix="weight_scale_inv", *, strict=True):
    """The decoded weight of a one-weight checkpoint."""
    tensors = {f"{MODULE}.weight": code, f"{MODULE}.{suffix}": np.asarray(scale)}
    ckpt = checkpoint.open(folder(path, tensors, FP8_CONFIG), strict=strict)
    return np.asarray(ckpt.weight(MODULE).dequantize())


def runs(column):
    """A column of numbers as (value, how many in a row)."""
    edges = np.flatnonzero(np.diff(column)) + 1
    return [(float(part[0]), len(part)) for part in np.split(column, edges)]


def powers(rows: int) -> np.ndarray:
    return (2.0 ** np.arange(rows)).astype(F32).reshape(rows, 1)


def test_a_shard_of_half_a_block_keeps_the_scale_of_its_global_rows(tmp_path) -> None:
    """https://github.com/vllm-project/vllm/issues/52997."""
    w = decode(tmp_path, codes(0x38, 256, 128), np.array([[2.0], [8.0]], F32))
    sums = w.sum(axis=1).reshape(4, 64)
    assert [set(rank) for rank in sums.tolist()] == [{256}, {256}, {1024}, {1024}]


def test_fused_parts_keep_scale_rows_of_their_own(tmp_path) -> None:
    """https://github.com/vllm-project/vllm/pull/52915."""
    sizes, first = {"q_proj": 384, "k_proj": 64, "v_proj": 64}, 1.0
    tensors, expected = {}, []
    for name, rows in sizes.items():
        blocks = -(-rows // 128)
        scale = first * powers(blocks)
        tensors[f"a.{name}.weight"] = codes(0x38, rows, 128)
        tensors[f"a.{name}.weight_scale_inv"] = scale
        expected += scale[:, 0].tolist()
        first *= 2.0**blocks
    ckpt = checkpoint.open(folder(tmp_path, tensors, FP8_CONFIG))
    parts = [np.asarray(ckpt.weight(f"a.{name}").dequantize()) for name in sizes]
    fused = np.concatenate(parts)[:, 0]
    assert expected == [1, 2, 4, 8, 16]
    assert runs(fused) == [(1, 128), (2, 128), (4, 128), (8, 64), (16, 64)]


def test_1280_rows_over_four_ranks_straddle_blocks(tmp_path) -> None:
    """https://github.com/sgl-project/sglang/issues/26107."""
    w = decode(tmp_path, codes(0x38, 1280, 128), powers(10))
    assert runs(w[320:640].sum(axis=1)) == [(512, 64), (1024, 128), (2048, 128)]
    ranks = [runs(w[320 * r : 320 * (r + 1), 0]) for r in range(4)]
    assert ranks == [
        [(1, 128), (2, 128), (4, 64)],
        [(4, 64), (8, 128), (16, 128)],
        [(32, 128), (64, 128), (128, 64)],
        [(128, 64), (256, 128), (512, 128)],
    ]
    assert runs(w[160:320, 0]) == [(2, 96), (4, 64)]


def test_columns_of_a_straddling_shard_keep_their_block(tmp_path) -> None:
    """https://github.com/sgl-project/sglang/issues/3345."""
    scale = np.arange(1, 10, dtype=F32).reshape(1, 9)
    w = decode(tmp_path, codes(0x38, 1, 1152), scale)
    assert [w[0, :576].sum(), w[0, 576:].sum(), w.sum()] == [1600, 4160, 5760]


def test_192_rows_a_rank_are_one_and_a_half_blocks(tmp_path) -> None:
    """https://github.com/vllm-project/vllm/issues/17569."""
    w = decode(tmp_path, codes(0x38, 1536, 128), powers(12))
    assert runs(w[192:384, 0]) == [(2, 64), (4, 128)]
    assert runs(w[5 * 192 : 6 * 192, 0]) == [(128, 64), (256, 128)]


def test_eight_rows_a_rank_share_one_scale(tmp_path) -> None:
    """https://github.com/sgl-project/sglang/issues/19045."""
    w = decode(tmp_path, codes(0x38, 64, 128), np.full((1, 1), 3.0, F32))
    assert set(w.sum(axis=1).tolist()) == {384}


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
def test_576_rows_have_five_scales_of_128_rows(tmp_path, suffix) -> None:
    """https://github.com/vllm-project/compressed-tensors/pull/547."""
    w = decode(tmp_path, codes(0x38, 576, 256), np.repeat(powers(5), 2, 1), suffix)
    assert [w[row, 255] for row in (511, 512, 575, 116)] == [8, 16, 16, 1]


def test_a_scale_in_another_file_is_the_same_scale(tmp_path) -> None:
    """https://github.com/ModelCloud/GPTQModel/pull/2875."""
    w = np.random.default_rng(5).standard_normal((576, 256), dtype=F32)
    given = {f"{MODULE}.weight": w}
    checkpoint.save(tmp_path / "one", given, layout="deepseek")
    checkpoint.save(tmp_path / "two", given, layout="deepseek", shards=2)
    one, two = (checkpoint.open(tmp_path / name) for name in ("one", "two"))
    weight = two.weight(MODULE)
    assert weight.code.file_name != weight.scale.file_name
    assert_same_words(weight.dequantize(), one.weight(MODULE).dequantize())
    (tmp_path / "two" / weight.scale.file_name).unlink()
    with pytest.raises(MissingTensorError, match=rf"{MODULE}\.weight_scale_inv"):
        checkpoint.open(tmp_path / "two")


def test_a_scale_that_no_file_holds_is_named_with_its_weight(tmp_path) -> None:
    """https://github.com/ModelCloud/GPTQModel/pull/2875."""
    tensors = {f"{MODULE}.weight": codes(0x38, 576, 256)}
    ckpt = checkpoint.open(folder(tmp_path, tensors, FP8_CONFIG))
    with pytest.raises(
        MissingTensorError, match=rf"{MODULE}\.weight .*{MODULE}\.weight_scale_inv"
    ):
        ckpt.weight(MODULE)


def test_a_block_of_125_rows_is_not_inferred(tmp_path) -> None:
    """https://github.com/NVIDIA/TensorRT-Model-Connect/pull/1115."""
    scale = np.arange(8, dtype=F32).reshape(8, 1)
    w = decode(tmp_path, codes(0x38, 1000, 128), scale)[:, 0]
    assert [w[row] for row in (126, 127, 128, 999)] == [0, 0, 1, 7]
    inferred = np.repeat(scale[:, 0], 125)
    assert np.count_nonzero(inferred != w) == 84


def test_codes_without_a_known_scale_are_not_values(tmp_path) -> None:
    """https://github.com/wuwangzhang1216/abliterix/pull/93."""
    tensors = {f"{MODULE}.weight": codes(0x7E, 128, 128)}
    ckpt = checkpoint.open(folder(tmp_path / "bare", tensors, FP8_CONFIG))
    for read in (ckpt.weight, ckpt.array):
        with pytest.raises(MissingTensorError, match="scale"):
            read(f"{MODULE}.weight")
    scale = np.full((1, 1), 115, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    w = decode(tmp_path / "scaled", codes(0x7E, 128, 128), scale, "scale")
    assert set(w.ravel().tolist()) == {0.109375}


def test_e8m0_bytes_are_exponents_not_numbers(tmp_path) -> None:
    """https://github.com/vllm-project/vllm/pull/51946."""
    byte = np.array([[120, 0, 1, 127, 254]], np.uint8)
    e8m0 = byte.view(ml_dtypes.float8_e8m0fnu)
    tensors = {
        f"{MODULE}.weight": codes(0x38, 1, 640),
        f"{MODULE}.weight_scale_inv": e8m0,
    }
    weight = checkpoint.open(folder(tmp_path, tensors, FP8_CONFIG)).weight(MODULE)
    expected = np.array([[2.0**-7, 2.0**-127, 2.0**-126, 1, 2.0**127]], F32)
    assert_same_words(np.asarray(weight.scale), expected)
    assert words(expected)[0, 1] == 0x0040_0000
    nan = np.array([[255]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    w = decode(tmp_path / "nan", codes(0x38, 1, 128), nan, strict=False)
    assert np.isnan(w).all()


def test_all_bits_of_a_float32_scale_count(tmp_path) -> None:
    """https://github.com/sgl-project/sglang/pull/13067."""
    w = decode(tmp_path, codes(0x38, 1, 128), np.full((1, 1), 1.5 * 2.0**-10, F32))
    assert w[0, 0] == 0.00146484375


def test_a_bfloat16_scale_is_widened_exactly(tmp_path) -> None:
    """https://github.com/modular/modular/issues/7142."""
    scale = np.array([[0x3B4B]], np.uint16).view(ml_dtypes.bfloat16)
    w = decode(tmp_path, codes(0x7E, 1, 128), scale)
    assert w.dtype == F32
    assert w[0, 0] == 1.3876953125


def test_a_zero_scale_of_zero_codes_decodes_to_zero(tmp_path) -> None:
    """https://github.com/THUDM/slime/pull/2256."""
    w = decode(tmp_path, codes(0x00, 130, 128), np.zeros((2, 1), F32))
    assert_same_words(w, np.zeros((130, 128), F32))


def test_a_block_of_zeros_survives_a_round_trip(tmp_path) -> None:
    """https://github.com/huggingface/kernels-community/issues/681."""
    w = np.zeros((256, 256), F32)
    w[0, 0] = 1
    checkpoint.save(tmp_path, {f"{MODULE}.weight": w}, layout="deepseek")
    weight = checkpoint.open(tmp_path).weight(MODULE)
    scale = np.asarray(weight.scale)
    assert (np.isfinite(scale) & (scale > 0)).all()
    assert_same_words(weight.dequantize(), w)


def test_bytes_are_those_of_the_format_without_fnuz(tmp_path) -> None:
    """https://github.com/sgl-project/sglang/pull/2667."""
    code = np.tile(e4m3([[0x38, 0x80]]), (1, 64))
    w = decode(tmp_path, code, np.ones((1, 1), F32))
    assert_same_words(w[0, :2], np.array([1.0, -0.0], F32))
    data = file_bytes({"w.weight": entry("F8_E4M3FNUZ", [1], 0, 1)}, b"\x38")
    (tmp_path / "fnuz.safetensors").write_bytes(data)
    with pytest.raises(UnsupportedError, match="the same bytes as F8_E4M3"):
        checkpoint.open(tmp_path / "fnuz.safetensors")


def test_an_inferred_block_would_have_failed_these_tests() -> None:
    """The control: the block that shapes suggest gives other numbers."""
    code, scale = codes(0x38, 576, 128), powers(5)
    right = dequantize_fp8_block(code, scale, (128, 128))
    inferred = dequantize_fp8_block(code, scale, (116, 128))
    assert np.count_nonzero(right[:, 0] != inferred[:, 0]) == 120


def test_no_config_is_an_error_and_not_a_guess(tmp_path) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/pull/3486."""
    tensors = {"m.weight": codes(0x38, 1000, 128), "m.weight_scale_inv": powers(8)}
    with pytest.raises(CheckpointError, match="never inferred"):
        checkpoint.open(folder(tmp_path, tensors)).weight("m")
