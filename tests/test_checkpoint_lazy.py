"""Lazy tensors: what NumPy indexing gives, only the bytes asked for, checked."""

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import FP8_CONFIG, MODELOPT_CONFIG, codes, e4m3, folder, nvfp4
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtp import checkpoint
from jaxtp.checkpoint.lazy import LazyStack
from jaxtp.errors import CheckpointError, NonFiniteError, ShapeError
from jaxtp.testing import assert_same_words
from jaxtp.weights import HostArray

SHAPE = (4, 5, 6)
VALUES = np.random.default_rng(3).standard_normal(SHAPE, dtype=np.float32)


@pytest.fixture(scope="module")
def opened():
    """A bank of matrices, and the same matrices one by one."""
    with tempfile.TemporaryDirectory() as path:
        tensors = {"bank": VALUES, **{f"m.{i}": VALUES[i] for i in range(4)}}
        with checkpoint.open(folder(Path(path), tensors)) as ckpt:
            stack = LazyStack([ckpt.tensor(f"m.{i}") for i in range(4)])
            yield ckpt, ckpt.tensor("bank"), stack


AXIS = st.integers(-4, 3) | st.slices(5)


@settings(deadline=None)
@given(st.lists(AXIS, min_size=1, max_size=3).map(tuple))
def test_indexing_gives_what_numpy_gives(opened, index) -> None:
    ckpt, bank, stack = opened
    expected = VALUES[index]
    for lazy in (bank, stack):
        before = ckpt.bytes_read
        read = lazy[index]
        assert_same_words(np.asarray(read), expected, f"{lazy}[{index}]")
        assert ckpt.bytes_read - before == expected.nbytes


def test_an_ellipsis_stands_for_the_axes_between(opened) -> None:
    _, bank, stack = opened
    for lazy in (bank, stack):
        assert_same_words(lazy[..., 2:4], VALUES[..., 2:4])
        assert_same_words(lazy[1:3, ..., 0], VALUES[1:3, ..., 0])
        assert_same_words(lazy[...], VALUES)
        assert_same_words(np.asarray(lazy), VALUES)


def test_one_integer_on_a_bank_reads_nothing(opened) -> None:
    ckpt, bank, stack = opened
    before = ckpt.bytes_read
    for lazy in (bank, stack):
        for i in (0, 3, -1):
            expert = lazy[i]
            assert (expert.shape, expert.ndim) == ((5, 6), 2)
            assert isinstance(expert, HostArray)
            assert ckpt.bytes_read == before
    assert_same_words(bank[2][1:, ::2], VALUES[2, 1:, ::2])
    assert_same_words(stack[-2][1:, ::2], VALUES[2, 1:, ::2])


def test_a_lazy_tensor_knows_its_shape_and_size(opened) -> None:
    _, bank, stack = opened
    for lazy in (bank, stack):
        assert lazy.shape == SHAPE
        assert lazy.dtype == np.float32
        assert lazy.nbytes == VALUES.nbytes
        assert len(lazy) == 4
    assert bank.reshape((20, 6))[7].tolist() == VALUES.reshape(20, 6)[7].tolist()
    assert np.asarray(bank, np.float64).dtype == np.float64
    assert "bank" in repr(bank)
    assert "and 3 more" in repr(stack)


@pytest.mark.parametrize(
    "index", [4, -5, (0, 5), (0, 0, 0, 0), "a", 1.5, None, [0, 1], (0, None)]
)
def test_an_index_that_does_not_fit_is_a_typed_error(opened, index) -> None:
    _, bank, stack = opened
    for lazy in (bank, stack):
        with pytest.raises(ShapeError):
            lazy[index]


def test_matrices_of_different_shapes_make_no_bank(opened) -> None:
    ckpt, bank, _ = opened
    with pytest.raises(ShapeError, match="must be alike"):
        LazyStack([ckpt.tensor("m.0"), bank])


def fp8(path, code, scale, *, strict: bool = True):
    tensors = {"m.weight": code, "m.weight_scale_inv": scale}
    return checkpoint.open(folder(path, tensors, FP8_CONFIG), strict=strict).weight("m")


def test_a_nan_code_is_found_when_its_slice_is_read(tmp_path) -> None:
    code = codes(0x38, 200, 300)
    code[150, 290] = e4m3(0xFF)
    weight = fp8(tmp_path, code, np.ones((2, 3), np.float32))
    assert weight.code[:150].shape == (150, 300)
    assert weight.code[:, :290].shape == (200, 290)
    with pytest.raises(NonFiniteError, match=r"^m\.weight: .*0x7F, 0xFF.*\[150, 290\]"):
        weight.code[100:, 280:]
    with pytest.raises(NonFiniteError, match=r"\[150, 290\]"):
        weight.code[150, 290]
    with pytest.raises(NonFiniteError, match=r"\[150, 290\]"):
        weight.code[199:100:-7, 298::-8]
    with pytest.raises(NonFiniteError, match=r"\[150, 290\]"):
        weight.dequantize()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0, -0.0])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_an_fp8_scale_must_be_finite_and_not_negative(tmp_path, value, dtype) -> None:
    scale = np.ones((2, 3), dtype)
    scale[1, 2] = value
    weight = fp8(tmp_path, codes(0x38, 200, 300), scale)
    assert weight.scale[0].tolist() == [1, 1, 1]
    with pytest.raises(NonFiniteError, match=r"m\.weight_scale_inv: .*\[1, 2\]"):
        weight.scale[:, 1:]


def test_the_e8m0_code_255_is_no_scale(tmp_path) -> None:
    scale = np.full((2, 3), 127, np.uint8)
    scale[0, 1] = 255
    e8m0 = scale.view(ml_dtypes.float8_e8m0fnu)
    weight = fp8(tmp_path, codes(0x38, 200, 300), e8m0)
    with pytest.raises(NonFiniteError, match=r"weight_scale_inv: .*nan at .*\[0, 1\]"):
        np.asarray(weight.scale)


def test_a_zero_fp8_scale_is_legal(tmp_path) -> None:
    weight = fp8(tmp_path, codes(0x00, 200, 300), np.zeros((2, 3), np.float32))
    assert not np.asarray(weight.dequantize()).any()


def test_lenient_reading_hands_out_what_is_there(tmp_path) -> None:
    code = codes(0x38, 130, 128)
    code[129, 0] = e4m3(0x7F)
    scale = np.array([[-2.0], [np.inf]], np.float32)
    weight = fp8(tmp_path, code, scale, strict=False)
    values = np.asarray(weight.dequantize())
    assert np.isnan(values[129, 0])
    assert values[0, 0] == -2.0
    assert np.isposinf(values[128, 0])


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8])
def test_an_nvfp4_block_scale_must_not_be_nan_or_negative(tmp_path, byte: int) -> None:
    tensors = nvfp4(np.random.default_rng(0), "m", 6, 64)
    tensors["m.weight_scale"][4, 3] = e4m3(byte)
    weight = checkpoint.open(folder(tmp_path, tensors, MODELOPT_CONFIG)).weight("m")
    assert weight.scale[:4].shape == (4, 4)
    with pytest.raises(NonFiniteError, match=r"m\.weight_scale: .*\[4, 3\]"):
        weight.scale[3:, 2:]


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_global_scale_must_be_finite_and_positive(tmp_path, value: float) -> None:
    tensors = nvfp4(np.random.default_rng(0), "m", 6, 64, g=value)
    weight = checkpoint.open(folder(tmp_path, tensors, MODELOPT_CONFIG)).weight("m")
    with pytest.raises(NonFiniteError, match=r"m\.weight_scale_2: .*at index \[\]"):
        np.asarray(weight.global_scale)


def test_the_bad_value_of_a_bank_is_named_with_its_expert(tmp_path) -> None:
    rng = np.random.default_rng(0)
    parts = [nvfp4(rng, "m", 6, 64) for _ in range(3)]
    tensors = {name: np.stack([p[name] for p in parts]) for name in parts[0]}
    tensors["m.weight_scale"][2, 5, 1] = e4m3(0x7F)
    tensors["m.weight_scale_2"][1] = 0
    ckpt = checkpoint.open(folder(tmp_path, tensors, MODELOPT_CONFIG))
    bank = ckpt.weight("m")
    assert bank.expert(0).dequantize().shape == (6, 64)
    with pytest.raises(NonFiniteError, match=r"\[2, 5, 1\]"):
        bank.expert(2).dequantize()
    with pytest.raises(NonFiniteError, match=r"\[2, 5, 1\]"):
        bank.scale[1:, 5:]
    with pytest.raises(NonFiniteError, match=r"weight_scale_2: .*at index \[1\]"):
        bank.expert(1)


def test_an_expert_of_a_bank_reads_its_own_bytes_only(tmp_path) -> None:
    rng = np.random.default_rng(0)
    parts = [nvfp4(rng, "m", 6, 64) for _ in range(5)]
    tensors = {name: np.stack([p[name] for p in parts]) for name in parts[0]}
    ckpt = checkpoint.open(folder(tmp_path, tensors, MODELOPT_CONFIG))
    bank = ckpt.weight("m")
    assert ckpt.bytes_read == 0
    bank.expert(3).dequantize()
    assert ckpt.bytes_read == 6 * 32 + 6 * 4 + 4


def test_a_shard_reads_its_own_columns_only(tmp_path) -> None:
    weight_bytes = codes(0x38, 256, 512)
    tensors = {"m.weight": weight_bytes, "m.weight_scale_inv": np.ones((2, 4), "f4")}
    ckpt = checkpoint.open(folder(tmp_path, tensors, FP8_CONFIG))
    weight = ckpt.weight("m")
    weight.code[:, 64:128]
    assert ckpt.bytes_read == 256 * 64
    weight.scale[:, 0:1]
    assert ckpt.bytes_read == 256 * 64 + 2 * 4


def test_reading_gives_copies_that_outlive_the_checkpoint(tmp_path) -> None:
    ckpt = checkpoint.open(folder(tmp_path, {"a": np.arange(4, dtype=np.int32)}))
    lazy = ckpt.tensor("a")
    read = lazy[1:]
    read[0] = 99
    assert lazy[1:].tolist() == [1, 2, 3]
    assert read.flags.writeable
    assert read.flags.aligned
    ckpt.close()
    assert read.tolist() == [99, 2, 3]
    with pytest.raises(CheckpointError, match="closed"):
        np.asarray(lazy)
