"""Reports: every tensor is listed, every defect found, and no data is read."""

import time

import numpy as np
import pytest
from checkpoint_cases import FP8_CONFIG, MODELOPT_CONFIG, codes, e4m3, folder, nvfp4

from jaxtp import checkpoint
from jaxtp.checkpoint.report import COLUMNS
from jaxtp.errors import ShapeError

F32 = np.float32


def mixed_tensors() -> dict:
    """Weights with one defect each, and good ones between them."""
    rng = np.random.default_rng(2)
    tensors = {"norm.weight": np.ones(8, F32), "x.k_proj.k_scale": np.ones((), F32)}
    for name in ("good", "no_global", "bad_shape", "nan_scale"):
        tensors |= nvfp4(rng, name, 6, 64)
    del tensors["no_global.weight_scale_2"]
    tensors["bad_shape.weight_scale"] = e4m3(np.ones((6, 3)))
    tensors["nan_scale.weight_scale"][5, 2] = e4m3(0x7F)
    tensors["stray.input_scale"] = np.ones((), F32)
    return tensors


def test_every_tensor_is_listed_once_and_every_defect_is_found(tmp_path) -> None:
    tensors = mixed_tensors()
    ckpt = checkpoint.open(folder(tmp_path, tensors, MODELOPT_CONFIG))
    report = ckpt.report()
    assert ckpt.bytes_read == 0
    assert sorted(t for row in report.rows for t in row.tensors) == sorted(tensors)
    assert report.nbytes == sum(value.nbytes for value in tensors.values())
    assert [(p.tensor, p.kind) for p in report.problems] == [
        ("bad_shape.weight", "ShapeError"),
        ("no_global.weight", "MissingTensorError"),
        ("stray.input_scale", "LeftoverTensorError"),
    ]
    assert not report.ok
    with pytest.raises(ShapeError, match=r"bad_shape.*2 more problems"):
        report.raise_problems()


def test_values_are_checked_only_when_asked_for(tmp_path) -> None:
    path = folder(tmp_path, mixed_tensors(), MODELOPT_CONFIG)
    for strict in (True, False):
        ckpt = checkpoint.open(path, strict=strict)
        kinds = [p.kind for p in ckpt.report(values=True).problems]
        assert kinds == [
            "ShapeError",
            "NonFiniteError",
            "MissingTensorError",
            "LeftoverTensorError",
        ]
        found = [p for p in ckpt.report(values=True).problems if "nan" in p.tensor]
        assert "nan_scale.weight_scale" in found[0].message
        assert "[5, 2]" in found[0].message
        assert ckpt.bytes_read > 0


def test_large_weights_are_checked_piece_by_piece(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("jaxtp.checkpoint.report._CHUNK_BYTES", 1000)
    code = codes(0x38, 300, 300)
    code[299, 7] = e4m3(0xFF)
    tensors = {"m.weight": code, "m.weight_scale_inv": np.ones((3, 3), F32)}
    ckpt = checkpoint.open(folder(tmp_path, tensors, FP8_CONFIG))
    (problem,) = ckpt.report(values=True).problems
    assert "[299, 7]" in problem.message
    assert "(1 such values" in problem.message


def test_a_row_says_how_a_weight_is_stored(tmp_path) -> None:
    tensors = {"m.weight": codes(0x38, 200, 300), "m.weight_scale_inv": np.ones((2, 3))}
    tensors["m.weight_scale_inv"] = tensors["m.weight_scale_inv"].astype("bfloat16")
    (row,) = checkpoint.open(folder(tmp_path, tensors, FP8_CONFIG)).report().rows
    assert (row.name, row.format, row.shape) == ("m.weight", "e4m3", (200, 300))
    assert (row.stored, row.scale_dtype, row.scale_shape) == ("F8_E4M3", "BF16", (2, 3))
    assert (row.block_shape, row.files) == ((128, 128), ("model.safetensors",))
    assert row.nbytes == 200 * 300 + 12
    assert len(row.cells()) == len(COLUMNS)
    assert row.problem is None


def test_a_report_prints_as_a_table_with_its_problems(tmp_path) -> None:
    ckpt = checkpoint.open(folder(tmp_path, mixed_tensors(), MODELOPT_CONFIG))
    lines = str(ckpt.report()).splitlines()
    assert lines[0].split()[:3] == ["name", "format", "shape"]
    good = next(line for line in lines if line.startswith("good.weight"))
    assert good.split()[1:4] == ["nvfp4", "[6,", "64]"]
    assert "3 problems" in "\n".join(lines)
    assert lines[-1].startswith("LeftoverTensorError: stray.input_scale")


def test_a_report_is_frozen(tmp_path) -> None:
    report = checkpoint.open(folder(tmp_path, mixed_tensors(), {})).report()
    with pytest.raises(AttributeError):
        report.rows = ()  # type: ignore[misc]


def test_two_hundred_tensors_are_reported_in_well_under_a_second(tmp_path) -> None:
    rng = np.random.default_rng(0)
    tensors = {}
    for i in range(67):
        tensors |= nvfp4(rng, f"model.layers.{i}.mlp.down_proj", 64, 64)
    ignore = [f"model.layers.{i}.mlp.gate" for i in range(67)]
    section = {**MODELOPT_CONFIG["quantization_config"], "ignore": ignore}
    path = folder(tmp_path, tensors, {"quantization_config": section})
    start = time.perf_counter()
    with checkpoint.open(path) as ckpt:
        report = ckpt.report()
    assert report.ok
    assert len(tensors) == 201
    assert time.perf_counter() - start < 0.5
