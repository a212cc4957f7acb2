"""NVFP4 and banks: companions, shapes, experts stacked or one by one."""

import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import MODELOPT_CONFIG, codes, e4m3, folder, nvfp4

from jaxtp import checkpoint
from jaxtp.errors import (
    CheckpointError,
    DtypeError,
    LeftoverTensorError,
    MissingTensorError,
    ShapeError,
    UnsupportedError,
)
from jaxtp.testing import assert_same_words
from jaxtp.weights import Nvfp4Weight

F32, BF16 = np.float32, ml_dtypes.bfloat16


def open_one(path, tensors, config=MODELOPT_CONFIG):
    return checkpoint.open(folder(path, tensors, config))


def nvfp4_tensors(**changes):
    tensors = nvfp4(np.random.default_rng(0), "a.b", 6, 64)
    for suffix, value in changes.items():
        if value is None:
            del tensors[f"a.b.{suffix}"]
        else:
            tensors[f"a.b.{suffix}"] = value
    return tensors


def test_modelopt_nvfp4_multiplies_by_its_global_scale(tmp_path) -> None:
    weight = open_one(tmp_path, nvfp4_tensors(), MODELOPT_CONFIG).weight("a.b")
    assert isinstance(weight, Nvfp4Weight)
    assert weight.shape == (6, 64)
    assert weight.global_scale_kind == "multiplier"
    assert np.asarray(weight.global_scale).shape == ()


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_compressed_tensors_nvfp4_divides_by_its_global_scale(
    tmp_path, shape, dtype
) -> None:
    tensors = nvfp4_tensors(weight_scale_2=None)
    tensors["a.b.weight_packed"] = tensors.pop("a.b.weight")
    tensors["a.b.weight_global_scale"] = np.full(shape, 824, dtype)
    weights = {"num_bits": 4, "type": "float", "group_size": 16}
    section = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }
    ckpt = open_one(tmp_path, tensors, {"quantization_config": section})
    weight = ckpt.weight("a.b")
    assert weight.global_scale_kind == "divisor"
    assert weight.global_scale.dtype == F32
    assert_same_words(np.asarray(weight.global_scale), np.array(824, F32))
    assert ckpt.names() == ("a.b.weight",)
    assert ckpt.weight("a.b.weight_packed").shape == (6, 64)


@pytest.mark.parametrize("missing", ["weight_scale", "weight_scale_2"])
def test_packed_codes_without_a_companion_name_it(tmp_path, missing) -> None:
    tensors = nvfp4_tensors(**{missing: None})
    ckpt = open_one(tmp_path, tensors, MODELOPT_CONFIG)
    with pytest.raises(MissingTensorError, match=rf"a\.b\.weight .*a\.b\.{missing}\."):
        ckpt.weight("a.b")


def test_packed_codes_alone_are_an_error(tmp_path) -> None:
    tensors = {"a.b.weight": np.zeros((6, 32), np.uint8)}
    ckpt = open_one(tmp_path, tensors, MODELOPT_CONFIG)
    with pytest.raises(MissingTensorError, match=r"weight_scale, .*weight_scale_2"):
        ckpt.weight("a.b")
    assert not ckpt.report().ok


def test_both_spellings_of_the_codes_are_an_error(tmp_path) -> None:
    tensors = nvfp4_tensors(weight_packed=np.zeros((6, 32), np.uint8))
    with pytest.raises(LeftoverTensorError, match="both weight and weight_packed"):
        open_one(tmp_path, tensors, MODELOPT_CONFIG).weight("a.b")


@pytest.mark.parametrize(
    ("suffix", "value", "expected"),
    [
        ("weight", np.zeros((6, 31), np.uint8), r"K=62"),
        ("weight", np.zeros(32, np.uint8), r"\[N, K\] or \[E, N, K\]"),
        ("weight", np.zeros((0, 32), np.uint8), r"no empty axis"),
        ("weight_scale", e4m3(np.ones((6, 5))), r"\[6, 4\] .*got \[6, 5\]"),
        ("weight_scale", e4m3(np.ones((128, 4))), r"\[6, 4\] .*got \[128, 4\]"),
        ("weight_scale_2", np.ones(2, F32), r"weight_scale_2 must have shape \[\]"),
        ("weight_scale_2", np.ones(6, F32), r"weight_scale_2 must have shape \[\]"),
    ],
)
def test_nvfp4_shapes_that_do_not_fit_are_named(
    tmp_path, suffix, value, expected
) -> None:
    ckpt = open_one(tmp_path, nvfp4_tensors(**{suffix: value}), MODELOPT_CONFIG)
    with pytest.raises(ShapeError, match=expected):
        ckpt.weight("a.b")


def test_nvfp4_scales_of_another_dtype_are_named(tmp_path) -> None:
    tensors = nvfp4_tensors(weight_scale=np.ones((6, 4), F32))
    with pytest.raises(DtypeError, match=r"a\.b\.weight_scale: .*F8_E4M3; got F32"):
        open_one(tmp_path / "a", tensors, MODELOPT_CONFIG).weight("a.b")
    tensors = nvfp4_tensors(weight_scale_2=np.ones((), np.float64))
    with pytest.raises(DtypeError, match=r"weight_scale_2: .*got F64"):
        open_one(tmp_path / "b", tensors, MODELOPT_CONFIG).weight("a.b")


UNREAD = {
    "int8 weights": {"a.b.weight": np.zeros((4, 32), np.int8)},
    "FP4 bytes with E8M0 scales": {
        "a.b.weight": np.zeros((4, 32), np.int8),
        "a.b.scale": np.zeros((4, 2), np.uint8).view(ml_dtypes.float8_e8m0fnu),
    },
    "E5M2 weights": {"a.b.weight": np.zeros((4, 32), ml_dtypes.float8_e5m2)},
    "MXFP4": {
        "a.b.weight_packed": np.zeros((4, 32), np.uint8),
        "a.b.weight_scale": np.zeros((4, 2), np.uint8),
    },
    "packed int32": {"a.b.weight_packed": np.zeros((4, 8), np.int32)},
}


@pytest.mark.parametrize("what", UNREAD)
def test_formats_that_are_not_read_are_named(tmp_path, what) -> None:
    ckpt = open_one(tmp_path, UNREAD[what])
    with pytest.raises(UnsupportedError, match=r"^a\.b\.weight"):
        ckpt.weight("a.b")
    assert [p.kind for p in ckpt.report().problems] == ["UnsupportedError"]


def test_fp8_codes_under_another_name_are_a_problem(tmp_path) -> None:
    tensors = {"experts.gate_up_proj": codes(0x38, 2, 64, 64)}
    ckpt = open_one(tmp_path, tensors)
    with pytest.raises(MissingTensorError, match="no scale belongs to it"):
        ckpt.array("experts.gate_up_proj")
    assert [p.kind for p in ckpt.report().problems] == ["MissingTensorError"]


def expert_tensors(count=3, prefix="m.experts", projection="gate_proj"):
    rng = np.random.default_rng(7)
    tensors = {}
    for e in range(count):
        tensors |= nvfp4(rng, f"{prefix}.{e}.{projection}", 6, 64, g=0.01 * (e + 1))
    return tensors


def test_experts_of_their_own_become_one_lazy_bank(tmp_path) -> None:
    ckpt = open_one(tmp_path, expert_tensors(12), MODELOPT_CONFIG)
    bank = ckpt.bank("m.experts", "gate_proj")
    assert bank.shape == (12, 6, 64)
    assert ckpt.bytes_read == 0
    whole = bank.dequantize()
    for e in (0, 2, 10, 11):
        alone = ckpt.weight(f"m.experts.{e}.gate_proj").dequantize()
        assert_same_words(whole[e], alone)
        assert_same_words(bank.expert(e).dequantize(), alone)
    assert not np.array_equal(whole[2], whole[10])


def test_a_stacked_bank_and_one_made_of_experts_hold_the_same_words(tmp_path) -> None:
    one_by_one = expert_tensors(3)
    stacked = {
        f"m.moe.gate_proj.{s}": np.stack(
            [one_by_one[f"m.experts.{e}.gate_proj.{s}"] for e in range(3)]
        )
        for s in ("weight", "weight_scale", "weight_scale_2")
    }
    ckpt = open_one(tmp_path, {**one_by_one, **stacked}, MODELOPT_CONFIG)
    bank = ckpt.weight("m.moe.gate_proj")
    assert bank.global_scale.shape == (3,)
    expected = ckpt.bank("m.experts", "gate_proj").dequantize()
    assert_same_words(bank.dequantize(), expected)
    assert_same_words(ckpt.bank("m.moe", "gate_proj").dequantize(), expected)


def test_a_bank_with_a_gap_is_an_error(tmp_path) -> None:
    tensors = {k: v for k, v in expert_tensors(4).items() if ".2." not in k}
    ckpt = open_one(tmp_path, tensors, MODELOPT_CONFIG)
    with pytest.raises(MissingTensorError, match=r"found \[0, 1, 3\]"):
        ckpt.bank("m.experts", "gate_proj")
    with pytest.raises(MissingTensorError, match="found none"):
        ckpt.bank("m.experts", "w1")


def test_a_bank_of_two_formats_is_an_error(tmp_path) -> None:
    tensors = expert_tensors(2)
    tensors["m.experts.2.gate_proj.weight"] = np.ones((6, 64), BF16)
    ckpt = open_one(tmp_path, tensors, MODELOPT_CONFIG)
    with pytest.raises(CheckpointError, match="must have one format"):
        ckpt.bank("m.experts", "gate_proj")


def test_a_bank_of_two_shapes_is_an_error(tmp_path) -> None:
    tensors = expert_tensors(2)
    tensors |= nvfp4(np.random.default_rng(0), "m.experts.2.gate_proj", 8, 64)
    ckpt = open_one(tmp_path, tensors, MODELOPT_CONFIG)
    with pytest.raises(ShapeError, match=r"experts\.2\.gate_proj.* must be alike"):
        ckpt.bank("m.experts", "gate_proj")
