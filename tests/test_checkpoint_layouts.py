"""Which tensors make a weight: companions, dtypes, shapes, and contradictions."""

import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import FP8_CONFIG, codes, folder

from jaxtp import checkpoint
from jaxtp.errors import (
    CheckpointError,
    DtypeError,
    FormatError,
    LeftoverTensorError,
    MissingTensorError,
    ShapeError,
)
from jaxtp.testing import assert_same_words
from jaxtp.weights import Bf16Weight, Fp8Weight

F32, BF16 = np.float32, ml_dtypes.bfloat16
SCALE = np.array([[1.5, 2.0, 3.0], [4.0, 5.0, 6.0]], F32)


def open_one(path, tensors, config=FP8_CONFIG):
    return checkpoint.open(folder(path, tensors, config))


def fp8_tensors(suffix="weight_scale_inv", scale=SCALE, **more):
    return {
        "a.b.weight": codes(0x38, 200, 300),
        f"a.b.{suffix}": scale,
        **{f"a.b.{name}": value for name, value in more.items()},
    }


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize("dtype", [F32, BF16, np.float16])
def test_an_fp8_scale_is_a_float32_multiplier_under_each_name(
    tmp_path, suffix, dtype
) -> None:
    ckpt = open_one(tmp_path, fp8_tensors(suffix, SCALE.astype(dtype)))
    weight = ckpt.weight("a.b.weight")
    assert isinstance(weight, Fp8Weight)
    assert (weight.shape, weight.block_shape) == ((200, 300), (128, 128))
    assert weight.scale.dtype == F32
    assert_same_words(np.asarray(weight.scale), SCALE)
    assert weight.dequantize()[199, 299] == 6.0
    assert ckpt.names() == ("a.b.weight",)
    assert ckpt.report().ok


def test_a_name_with_and_without_weight_is_the_same_weight(tmp_path) -> None:
    ckpt = open_one(tmp_path, fp8_tensors())
    for name in ("a.b", "a.b.weight"):
        assert ckpt.weight(name).shape == (200, 300)


@pytest.mark.parametrize(
    ("matrix", "scale"),
    [
        ((128, 128), ()),
        ((128, 128), (1,)),
        ((200, 100), (2,)),
        ((100, 300), (3,)),
        ((200, 300), (2, 1, 3, 1)),
        ((4, 200, 100), (4, 2)),
        ((4, 200, 300), (4, 2, 1, 3, 1)),
        ((4, 128, 128), (4,)),
        ((1, 200, 300), (2, 3)),
    ],
)
def test_scales_with_squeezed_or_spread_axes_are_read_where_one_reading_fits(
    tmp_path, matrix, scale
) -> None:
    values = 1 + np.arange(np.prod(scale, dtype=int), dtype=F32).reshape(scale)
    tensors = {"m.weight": codes(0x38, *matrix), "m.weight_scale_inv": values}
    weight = open_one(tmp_path, tensors).weight("m")
    *lead, n, k = matrix
    assert weight.scale.shape == (*lead, -(-n // 128), -(-k // 128))
    assert np.asarray(weight.scale).ravel().tolist() == values.ravel().tolist()


@pytest.mark.parametrize(
    "scale",
    [(), (1,), (2,), (3,), (6,), (3, 2), (2, 4), (2, 3, 1), (1, 2, 3), (200, 1)],
)
def test_any_other_scale_shape_is_an_error_with_both_shapes(tmp_path, scale) -> None:
    ckpt = open_one(tmp_path, fp8_tensors(scale=np.ones(scale, F32)))
    with pytest.raises(
        ShapeError, match=r"a\.b\.weight_scale_inv must have shape \[2, 3\]"
    ):
        ckpt.weight("a.b")
    assert [p.kind for p in ckpt.report().problems] == ["ShapeError"]


def test_the_block_is_never_inferred_from_shapes(tmp_path) -> None:
    for config in (None, {"quantization_config": {"quant_method": "fp8"}}):
        ckpt = open_one(tmp_path / str(config)[:4], fp8_tensors(), config)
        with pytest.raises(CheckpointError, match=r"a\.b.*weight_block_size"):
            ckpt.weight("a.b")


def test_a_block_that_no_slot_can_hold_is_an_error(tmp_path) -> None:
    section = {"quant_method": "fp8", "weight_block_size": [100, 100]}
    ckpt = open_one(tmp_path, fp8_tensors(), {"quantization_config": section})
    with pytest.raises(FormatError, match="block_shape"):
        ckpt.weight("a.b")
    assert not ckpt.report().ok


def test_an_fp8_weight_without_its_scale_names_both(tmp_path) -> None:
    ckpt = open_one(tmp_path, {"a.b.weight": codes(0x38, 200, 300)})
    with pytest.raises(
        MissingTensorError, match=r"a\.b\.weight .*a\.b\.weight_scale_i"
    ):
        ckpt.weight("a.b")
    with pytest.raises(MissingTensorError, match="no scale belongs to it"):
        ckpt.array("a.b.weight")
    assert ckpt.tensor("a.b.weight")[0, :3].view(np.uint8).tolist() == [0x38] * 3


def test_a_scale_without_its_weight_names_both(tmp_path) -> None:
    ckpt = open_one(tmp_path, {"a.b.weight_scale_inv": SCALE, "n": SCALE})
    with pytest.raises(
        MissingTensorError, match=r"a\.b\.weight is missing; .*a\.b\.weight_scale_inv"
    ):
        ckpt.weight("a.b")
    problems = ckpt.report().problems
    assert [(p.tensor, p.kind) for p in problems] == [
        ("a.b.weight_scale_inv", "LeftoverTensorError")
    ]
    with pytest.raises(LeftoverTensorError, match=r"a\.b\.weight_scale_inv"):
        ckpt.report().raise_problems()


@pytest.mark.parametrize(
    "extra",
    ["weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point"],
)
def test_a_companion_too_many_is_an_error(tmp_path, extra) -> None:
    ckpt = open_one(tmp_path, fp8_tensors(**{extra: np.ones((), F32)}))
    with pytest.raises(LeftoverTensorError, match=rf"a\.b\.{extra} belongs to no"):
        ckpt.weight("a.b")
    assert not ckpt.report().ok


@pytest.mark.parametrize("suffix", ["weight_scale", "scale", "input_scale"])
def test_scales_of_an_unquantized_weight_are_left_over(tmp_path, suffix) -> None:
    tensors = {"a.b.weight": np.ones((4, 32), BF16), f"a.b.{suffix}": SCALE}
    with pytest.raises(LeftoverTensorError, match=rf"a\.b\.{suffix} .*BF16"):
        open_one(tmp_path, tensors).weight("a.b")


def test_an_activation_scale_is_known_and_unused(tmp_path) -> None:
    ckpt = open_one(tmp_path, fp8_tensors(input_scale=np.ones((), F32)))
    ckpt.weight("a.b")
    (row,) = ckpt.report().rows
    assert row.tensors == ("a.b.weight", "a.b.weight_scale_inv", "a.b.input_scale")


@pytest.mark.parametrize(
    "name", ["x.k_proj.k_scale", "x.v_proj.v_scale", "x.attn.k_scale"]
)
def test_scales_of_a_kv_cache_belong_to_no_weight_and_are_allowed(
    tmp_path, name
) -> None:
    ckpt = open_one(tmp_path, {name: np.float32(0.5).reshape(())})
    assert ckpt.report().ok
    assert ckpt.names() == ()
    assert ckpt.array(name) == F32(0.5)


def test_a_parameter_named_scale_is_a_parameter_in_a_plain_checkpoint(tmp_path) -> None:
    tensors = {"norm.scale": np.ones(8, F32), "m.weight": np.ones((4, 32), BF16)}
    ckpt = open_one(tmp_path / "plain", tensors, {})
    assert ckpt.names() == ("m.weight", "norm.scale")
    assert ckpt.report().ok
    assert not open_one(tmp_path / "quantized", tensors).report().ok


@pytest.mark.parametrize("scale", [np.int8, np.float64, ml_dtypes.float8_e4m3fn])
def test_a_scale_of_another_dtype_is_named(tmp_path, scale) -> None:
    ckpt = open_one(tmp_path, fp8_tensors(scale=np.ones((2, 3), scale)))
    with pytest.raises(DtypeError, match=r"a\.b\.weight_scale_inv: .*F32 or BF16"):
        ckpt.weight("a.b")


def test_unquantized_tensors_keep_their_dtype(tmp_path) -> None:
    bias = np.array([6.9, 6.91], F32)
    tensors = {
        "mlp.gate.e_score_correction_bias": bias,
        "gate.weight": np.ones((2, 32), F32),
        "norm.weight": np.ones(8, BF16),
        "m.weight": np.full((4, 32), 1.5, BF16),
    }
    ckpt = open_one(tmp_path, tensors)
    assert_same_words(ckpt.array("mlp.gate.e_score_correction_bias"), bias)
    assert ckpt.array("norm.weight").dtype == BF16
    weight = ckpt.weight("m")
    assert isinstance(weight, Bf16Weight)
    assert (weight.dequantize() == 1.5).all()
    for name in ("gate", "norm"):
        with pytest.raises(DtypeError, match=r"which is no weight.*array\(\)"):
            ckpt.weight(name)
    assert ckpt.report().ok


def test_codes_are_no_array(tmp_path) -> None:
    ckpt = open_one(tmp_path, fp8_tensors())
    with pytest.raises(DtypeError, match=r"weight\('a\.b'\)"):
        ckpt.array("a.b.weight")
    assert_same_words(ckpt.array("a.b.weight_scale_inv"), SCALE)


def test_an_unknown_name_shows_names_nearby(tmp_path) -> None:
    ckpt = open_one(tmp_path, fp8_tensors())
    with pytest.raises(MissingTensorError, match=r"no weight 'a\.c'.*nearby: a\.b"):
        ckpt.weight("a.c")
    with pytest.raises(MissingTensorError, match="no tensor 'zzz'"):
        ckpt.array("zzz")
