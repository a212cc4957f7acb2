"""Checkpoints of public exporters decode to what the exporters' own libraries decode.

A small part of each stands in `data/checkpoints`. Where the whole checkpoints lie in
`../shared/checkpoints` beside the repository, they are decoded as well.
"""

from pathlib import Path

import numpy as np
import pytest

from jaxtp import checkpoint
from jaxtp.checkpoint import Checkpoint
from jaxtp.errors import NonFiniteError
from jaxtp.formats import dequantize_fp8_block, dequantize_nvfp4
from jaxtp.testing import assert_same_words, count_different_words
from jaxtp.weights import Nvfp4Weight

PARTS = Path(__file__).parent / "data" / "checkpoints"
WHOLE = Path(__file__).parents[2] / "shared" / "checkpoints"
MALFORMED = "malformed_modelopt_allzero_qwen3"


def cases():
    """Every checkpoint with reference values, and a skip where there are none."""
    found = []
    for root, kind in ((PARTS, "part"), (WHOLE, "whole")):
        paths = sorted(root.glob("*/reference.npz"))
        found += [pytest.param(p.parent, id=f"{kind}-{p.parent.name}") for p in paths]
        if not paths:
            skip = pytest.mark.skip(reason="no ../shared/checkpoints beside the repo")
            found.append(pytest.param(None, id=kind, marks=skip))
    return found


def references(path: Path) -> dict[str, np.ndarray]:
    """The float32 weights by tensor name."""
    with np.load(path / "reference.npz") as table:
        return {k[2:]: table[k] for k in table if k.startswith("w/")}


def quantized_names(ckpt: Checkpoint) -> set[str]:
    return {r.name for r in ckpt.report().rows if r.format in ("e4m3", "nvfp4")}


@pytest.mark.parametrize("path", cases())
def test_every_weight_decodes_to_the_exporters_own_value(path: Path) -> None:
    expected = references(path)
    with checkpoint.open(path) as ckpt:
        assert quantized_names(ckpt) == set(expected)
        for name, value in expected.items():
            weight = ckpt.weight(name)
            decoded = weight.dequantize()
            is_modelopt_fp4 = (
                isinstance(weight, Nvfp4Weight)
                and weight.global_scale_kind == "multiplier"
            )
            if is_modelopt_fp4:
                # ModelOpt's table holds integers, so its code 8 is +0; ours is -0.
                zero = value == 0
                assert not np.signbit(value[zero]).any()
                value = np.where(zero, decoded, value)
                assert (decoded[zero] == 0).all()
            assert_same_words(decoded, value, name)


@pytest.mark.parametrize("path", cases())
def test_opening_and_reporting_reads_no_data_and_finds_nothing_wrong(
    path: Path,
) -> None:
    with checkpoint.open(path) as ckpt:
        report = ckpt.report()
        assert ckpt.bytes_read == 0
        assert report.ok, str(report)
        assert not report.notes
        stored = sum(ckpt.tensor(name).nbytes for name in ckpt.tensor_names())
        assert report.nbytes == stored
        assert sorted(t for row in report.rows for t in row.tensors) == sorted(
            ckpt.tensor_names()
        )
        assert ckpt.report(values=True).ok
        assert 0 < ckpt.bytes_read <= stored


def test_a_divisor_taken_for_a_factor_gives_other_words() -> None:
    path = PARTS / "ct_nvfp4_oneshot_qwen3moe"
    different = []
    for name, value in references(path).items():
        weight = checkpoint.open(path).weight(name)
        assert isinstance(weight, Nvfp4Weight)
        code, scale = np.asarray(weight.code), np.asarray(weight.scale)
        factor = np.float32(1) / np.asarray(weight.global_scale)
        wrong = dequantize_nvfp4(code, scale, factor, "multiplier")
        assert np.allclose(wrong, value, rtol=1e-6)
        different.append(count_different_words(wrong, value))
        swapped = (code >> 4) | (code << 4)
        g = np.asarray(weight.global_scale)
        wrong = dequantize_nvfp4(swapped, scale, g, "divisor")
        assert count_different_words(wrong, value) > value.size // 2
    # Some reciprocals are exact enough to change nothing; not all of them.
    assert max(different) > 1000


def test_a_block_inferred_from_shapes_gives_other_words() -> None:
    path = PARTS / "ct_fp8block_oneshot_qwen3moe"
    name = "model.layers.0.mlp.down_proj.weight"
    weight = checkpoint.open(path).weight(name)
    assert (weight.shape, weight.scale.shape) == ((192, 160), (2, 2))
    inferred = dequantize_fp8_block(
        np.asarray(weight.code), np.asarray(weight.scale), (96, 80)
    )
    assert count_different_words(inferred, references(path)[name]) > 1000


@pytest.mark.parametrize("root", [PARTS, WHOLE], ids=["part", "whole"])
def test_the_nan_scales_of_an_all_zero_matrix_are_refused(root: Path) -> None:
    if not (root / MALFORMED).is_dir():
        pytest.skip("no ../shared/checkpoints beside the repo")
    module = "model.layers.0.self_attn.o_proj"
    with checkpoint.open(root / MALFORMED) as ckpt:
        assert ckpt.report().ok
        with pytest.raises(
            NonFiniteError, match=rf"^{module}\.weight_scale: .*at index \[0, 0\]"
        ):
            ckpt.weight(module).dequantize()
        with pytest.raises(NonFiniteError, match=rf"^{module}\.weight_scale_2: .*0\.0"):
            np.asarray(ckpt.weight(module).global_scale)
        ckpt.weight("model.layers.0.self_attn.k_proj").dequantize()
        (problem,) = ckpt.report(values=True).problems
        assert (problem.tensor, problem.kind) == (f"{module}.weight", "NonFiniteError")
    with checkpoint.open(root / MALFORMED, strict=False) as ckpt:
        assert np.isnan(ckpt.weight(module).dequantize()).all()


def test_scales_in_another_file_are_found() -> None:
    ckpt = checkpoint.open(PARTS / "hf_fp8_sharded_qwen3")
    weight = ckpt.weight("model.layers.0.self_attn.o_proj")
    assert weight.code.file_name == "model-00001-of-00002.safetensors"
    assert weight.scale.file_name == "model-00002-of-00002.safetensors"


def test_kv_scales_and_router_biases_keep_their_float32() -> None:
    ckpt = checkpoint.open(PARTS / "modelopt_nvfp4_deepseekv3")
    attn = "model.layers.1.self_attn"
    assert ckpt.array(f"{attn}.k_proj.k_scale") == np.float32(0.00997488853)
    assert ckpt.array(f"{attn}.v_proj.v_scale") == np.float32(0.0152762281)
    assert f"{attn}.k_proj.k_scale" not in ckpt.names()
    bias = ckpt.array("model.layers.1.mlp.gate.e_score_correction_bias")
    assert (bias.dtype, bias.shape) == (np.float32, (6,))


def test_exclusion_lists_of_the_exporters_name_what_they_left_alone() -> None:
    ckpt = checkpoint.open(PARTS / "modelopt_nvfp4_step3p7")
    rows = {row.name: row for row in ckpt.report().rows}
    gate = "model.language_model.layers.1.mlp.gate.weight"
    assert rows[gate].excluded
    assert rows[gate].format == "bf16"
    g_proj = rows["model.language_model.layers.1.self_attn.g_proj.weight"]
    assert (g_proj.format, g_proj.shape, g_proj.excluded) == ("nvfp4", (6, 144), False)


def test_experts_of_an_exporter_make_a_bank() -> None:
    path = PARTS / "modelopt_nvfp4_qwen3moe"
    with checkpoint.open(path) as ckpt:
        bank = ckpt.bank("model.layers.1.mlp.experts", "gate_proj").dequantize()
    for e in (0, 1):
        name = f"model.layers.1.mlp.experts.{e}.gate_proj.weight"
        assert (bank[e] == references(path)[name]).all()


def test_awkward_values_of_an_exporter_decode_as_planted() -> None:
    path = PARTS / "modelopt_w4a16nvfp4_edge_qwen3"
    with checkpoint.open(path) as ckpt:
        attn, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
        q = ckpt.weight(f"{attn}.q_proj")
        assert not np.asarray(q.dequantize())[5].any()
        assert (q.scale[5].view(np.uint8) == 0x38).all()
        up = ckpt.weight(f"{mlp}.up_proj")
        assert up.scale[7, 0].view(np.uint8) == 0x01
        assert not np.asarray(up.dequantize())[8, :16].any()
        assert not np.asarray(ckpt.weight(f"{attn}.k_proj").dequantize())[1, :4].any()
        assert not np.asarray(ckpt.weight(f"{mlp}.gate_proj").dequantize())[
            3, 16:32
        ].any()
