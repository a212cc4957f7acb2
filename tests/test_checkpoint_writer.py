"""Every layout that is written is read back, word for word."""

import hashlib
import json

import ml_dtypes
import numpy as np
import pytest

from jaxtp import checkpoint, formats
from jaxtp.checkpoint.encoding import LAYOUTS
from jaxtp.checkpoint.safetensors import TAGS
from jaxtp.errors import (
    CheckpointError,
    DtypeError,
    FormatError,
    NonFiniteError,
    ShapeError,
)
from jaxtp.testing import assert_same_words, count_different_words
from jaxtp.weights import Bf16Weight, Fp8Weight, Nvfp4Weight

BF16 = ml_dtypes.bfloat16
DOWN = "model.layers.0.mlp.down_proj"
EXPERTS = "model.layers.1.mlp.experts"
BANK = "model.layers.1.moe.gate_proj"


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def tensors() -> dict:
    """A matrix with partial blocks, two kinds of banks, and what stays as it is."""
    draw = rng()
    return {
        f"{DOWN}.weight": draw.standard_normal((192, 272), dtype=np.float32),
        f"{EXPERTS}.gate_proj.weight": draw.standard_normal((3, 130, 144), np.float32),
        f"{BANK}.weight": draw.standard_normal((2, 160, 288), dtype=np.float32),
        "model.norm.weight": draw.standard_normal(64, dtype=np.float32),
        "model.layers.1.moe.router_bias": draw.standard_normal(3, dtype=np.float32),
        "lm_head.weight": draw.standard_normal((32, 64), np.float32).astype(BF16),
    }


def expected(layout: str, w: np.ndarray, block_shape=(128, 128)) -> np.ndarray:
    """What the quantizers' own decoders make of the quantized matrix."""
    spec = LAYOUTS[layout]
    if spec.format == "bf16":
        return np.asarray(formats.round_to_bf16(w)).astype(np.float32)
    if spec.format == "e4m3":
        parts = formats.quantize_fp8_block(w, block_shape, spec.scale_format)
        return np.asarray(formats.dequantize_fp8_block(*parts, block_shape))
    parts = formats.quantize_nvfp4(w, spec.kind)
    return np.asarray(formats.dequantize_nvfp4(*parts, spec.kind))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_decodes_as_its_quantizer_decodes_it(
    tmp_path, layout: str, shards: int
) -> None:
    given = tensors()
    checkpoint.save(tmp_path, given, layout=layout, shards=shards)
    with checkpoint.open(tmp_path) as ckpt:
        report = ckpt.report(values=True)
        assert report.ok, str(report)
        assert not report.notes
        down = ckpt.weight(DOWN)
        assert down.format == LAYOUTS[layout].format
        w = given[f"{DOWN}.weight"]
        assert_same_words(down.dequantize(), expected(layout, w))
        assert count_different_words(down.dequantize(), w) > w.size // 2
        for prefix, name in (
            (EXPERTS, "gate_proj"),
            ("model.layers.1.moe", "gate_proj"),
        ):
            bank = given[f"{prefix}.{name}.weight"]
            read = ckpt.bank(prefix, name)
            assert_same_words(read.dequantize(), expected(layout, bank))
            assert_same_words(read.expert(1).dequantize(), expected(layout, bank[1]))
        for name in ("model.norm.weight", "model.layers.1.moe.router_bias"):
            assert_same_words(ckpt.array(name), given[name])
        assert_same_words(ckpt.weight("lm_head").value[...], given["lm_head.weight"])
        assert ckpt.quantization.excluded("lm_head") == (layout != "bf16")


STORED = {
    "deepseek": {"weight": "F8_E4M3", "weight_scale_inv": "F32"},
    "qwen3_fp8": {"weight": "F8_E4M3", "weight_scale_inv": "BF16"},
    "deepseek_v4": {"weight": "F8_E4M3", "scale": "F8_E8M0"},
    "step_fp8": {"weight": "F8_E4M3", "weight_scale_inv": "F32"},
    "modelopt_fp8_pb": {"weight": "F8_E4M3", "weight_scale": "F32"},
    "compressed_tensors_fp8_block": {"weight": "F8_E4M3", "weight_scale": "BF16"},
    "modelopt_nvfp4": {
        "weight": "U8",
        "weight_scale": "F8_E4M3",
        "weight_scale_2": "F32",
        "input_scale": "F32",
    },
    "compressed_tensors_nvfp4": {
        "weight_packed": "U8",
        "weight_scale": "F8_E4M3",
        "weight_global_scale": "F32",
        "input_global_scale": "F32",
    },
    "bf16": {"weight": "BF16"},
}


@pytest.mark.parametrize("layout", STORED)
def test_names_and_dtypes_are_those_of_the_layout(tmp_path, layout: str) -> None:
    checkpoint.save(tmp_path, tensors(), layout=layout, input_scale=0.5)
    ckpt = checkpoint.open(tmp_path)
    found = {
        name.removeprefix(f"{DOWN}."): checkpoint_tag(ckpt, name)
        for name in ckpt.tensor_names()
        if name.startswith(f"{DOWN}.")
    }
    assert found == STORED[layout]
    assert f"{EXPERTS}.2.gate_proj.weight" in ckpt.names() or layout == "step_fp8"


def checkpoint_tag(ckpt, name: str) -> str:
    return TAGS[ckpt.tensor(name).stored_dtype]


def test_step_layouts_stack_their_experts(tmp_path) -> None:
    checkpoint.save(tmp_path, tensors(), layout="step_nvfp4", input_scale=0.25)
    ckpt = checkpoint.open(tmp_path)
    assert ckpt.tensor(f"{BANK}.weight").shape == (2, 160, 144)
    assert ckpt.tensor(f"{BANK}.weight_scale").shape == (2, 160, 18)
    assert ckpt.array(f"{BANK}.weight_scale_2").shape == (2,)
    assert ckpt.array(f"{BANK}.input_scale").tolist() == [0.25, 0.25]
    checkpoint.save(tmp_path / "fp8", tensors(), layout="step_fp8")
    ckpt = checkpoint.open(tmp_path / "fp8")
    assert ckpt.tensor(f"{BANK}.weight").shape == (2, 160, 288)
    assert ckpt.tensor(f"{BANK}.weight_scale_inv").shape == (2, 2, 3)


def test_modelopt_fp8_scales_are_spread_over_four_axes(tmp_path) -> None:
    checkpoint.save(tmp_path, tensors(), layout="modelopt_fp8_pb")
    ckpt = checkpoint.open(tmp_path)
    assert ckpt.tensor(f"{DOWN}.weight_scale").shape == (2, 1, 3, 1)
    assert ckpt.weight(DOWN).scale.shape == (2, 3)
    with pytest.raises(FormatError, match="128 x 128"):
        checkpoint.save(
            tmp_path / "x", tensors(), layout="modelopt_fp8_pb", block_shape=(64, 64)
        )


def test_modelopt_writes_both_configs(tmp_path) -> None:
    checkpoint.save(tmp_path, tensors(), layout="modelopt_nvfp4", config={"a": 1})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["a"] == 1
    assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
    hf_quant = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert hf_quant["quantization"]["exclude_modules"] == ["lm_head"]
    (tmp_path / "config.json").unlink()
    assert checkpoint.open(tmp_path).weight(DOWN).format == "nvfp4"


def test_another_block_shape_is_written_and_read(tmp_path) -> None:
    given = tensors()
    checkpoint.save(tmp_path, given, layout="deepseek", block_shape=(64, 96))
    weight = checkpoint.open(tmp_path).weight(DOWN)
    assert weight.block_shape == (64, 96)
    words = expected("deepseek", given[f"{DOWN}.weight"], (64, 96))
    assert_same_words(weight.dequantize(), words)
    assert count_different_words(words, expected("deepseek", given[f"{DOWN}.weight"]))


def test_ready_weights_are_stored_as_they_are(tmp_path) -> None:
    w = tensors()[f"{DOWN}.weight"]
    fp8 = Fp8Weight(*formats.quantize_fp8_block(w))
    checkpoint.save(tmp_path, {f"{DOWN}.weight": fp8}, layout="deepseek")
    assert_same_words(
        checkpoint.open(tmp_path).weight(DOWN).dequantize(), fp8.dequantize()
    )
    for value, layout, what in [
        (fp8, "modelopt_nvfp4", "stores nvfp4"),
        (fp8, "qwen3_fp8", "not exact in bf16"),
        (fp8, "deepseek_v4", "not exact in e8m0"),
        (Nvfp4Weight(*formats.quantize_nvfp4(w)), "deepseek", "stores e4m3"),
        (
            Nvfp4Weight(*formats.quantize_nvfp4(w)),
            "compressed_tensors_nvfp4",
            "as a divisor",
        ),
    ]:
        with pytest.raises(FormatError, match=what):
            checkpoint.save(tmp_path / "x", {"m.weight": value}, layout=layout)


def test_a_bf16_weight_is_left_alone_by_every_layout(tmp_path) -> None:
    value = Bf16Weight(np.ones((32, 64), BF16))
    for layout in LAYOUTS:
        path = tmp_path / layout
        checkpoint.save(path, {"m.weight": value}, layout=layout)
        assert_same_words(checkpoint.open(path).weight("m").value[...], value.value)


def test_a_checkpoint_can_be_saved_from_the_lazy_weights_of_another(tmp_path) -> None:
    checkpoint.save(tmp_path / "a", tensors(), layout="deepseek")
    ckpt = checkpoint.open(tmp_path / "a")
    again = {f"{DOWN}.weight": ckpt.weight(DOWN)}
    bank = ckpt.bank(EXPERTS, "gate_proj")
    again[f"{EXPERTS}.gate_proj.weight"] = bank
    checkpoint.save(tmp_path / "b", again, layout="deepseek", shards=2)
    read = checkpoint.open(tmp_path / "b").bank(EXPERTS, "gate_proj")
    assert_same_words(read.dequantize(), bank.dequantize())


def test_excluded_matrices_stay_float32(tmp_path) -> None:
    given = tensors()
    checkpoint.save(tmp_path, given, layout="deepseek", exclude=["mlp.down_proj"])
    ckpt = checkpoint.open(tmp_path)
    assert_same_words(ckpt.array(f"{DOWN}.weight"), given[f"{DOWN}.weight"])
    assert ckpt.quantization.excluded(DOWN)


def test_equal_arguments_give_equal_files(tmp_path) -> None:
    digests = []
    for name in ("a", "b"):
        checkpoint.save(tmp_path / name, tensors(), layout="modelopt_nvfp4", shards=2)
        files = sorted((tmp_path / name).iterdir())
        digests.append([hashlib.sha256(f.read_bytes()).hexdigest() for f in files])
    assert digests[0] == digests[1]
    assert len(digests[0]) == 5


def test_bad_requests_are_refused_before_anything_is_written(tmp_path) -> None:
    path = tmp_path / "new"
    bad = np.full((32, 64), np.nan, np.float32)
    odd = np.ones((32, 40), np.float32)
    for changes, error, what in [
        ({"layout": "gguf"}, CheckpointError, "known: "),
        ({"shards": 0}, CheckpointError, r"\[1, 2\]"),
        ({"shards": 3}, CheckpointError, r"\[1, 2\]"),
        ({"tensors": {"m.weight": bad}}, NonFiniteError, "finite"),
        ({"tensors": {"m": np.zeros(2, complex)}}, DtypeError, "complex128"),
        ({"tensors": {"m.weight": odd}, "layout": "step_nvfp4"}, ShapeError, "K=40"),
    ]:
        arguments = {
            "tensors": {"a": np.ones(1, np.float32), "b": np.ones(1, np.float32)},
            "layout": "deepseek",
            **changes,
        }
        with pytest.raises(error, match=what):
            checkpoint.save(path, **arguments)
        assert not list(path.glob("*.safetensors"))


def test_an_existing_checkpoint_is_not_overwritten(tmp_path) -> None:
    checkpoint.save(tmp_path, tensors(), layout="bf16")
    with pytest.raises(CheckpointError, match="empty folder"):
        checkpoint.save(tmp_path, tensors(), layout="deepseek")


def test_as_many_files_as_tensors_can_be_written(tmp_path) -> None:
    given = {f"t{i}": np.ones(10 ** (3 - i), np.float32) for i in range(4)}
    checkpoint.save(tmp_path, given, layout="bf16", shards=4)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    assert checkpoint.open(tmp_path).tensor_names() == ("t0", "t1", "t2", "t3")
