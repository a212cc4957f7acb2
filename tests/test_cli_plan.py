"""`jaxtp plan`: what it forecasts is what placing takes, and it reads no tensor."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxtp
from jaxtp import checkpoint
from jaxtp.cli.main import main
from jaxtp.cli.plan import forecast, same_but_numbers

SHAPES = {
    "model.layers.0.mlp.down_proj.weight": (96, 1280),
    "model.layers.1.mlp.down_proj.weight": (96, 1280),
    "model.layers.0.self_attn.o_proj.weight": (576, 1024),
    "model.layers.1.moe.gate_proj.weight": (2, 80, 160),
}
LAYOUTS = {"bf16": "bf16", "e4m3": "step_fp8", "nvfp4": "step_nvfp4"}


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request, tmp_path_factory):
    rng = np.random.default_rng(3)
    tensors = {n: rng.standard_normal(s, np.float32) for n, s in SHAPES.items()}
    for name in ("model.embed_tokens", "model.layers.1.moe.gate"):
        value = rng.standard_normal((64, 160)).astype(ml_dtypes.bfloat16)
        tensors[f"{name}.weight"] = value
    tensors["model.norm.weight"] = np.ones(160, ml_dtypes.bfloat16)
    path = tmp_path_factory.mktemp("plan") / request.param
    checkpoint.save(path, tensors, layout=LAYOUTS[request.param])
    return path


def bytes_a_device(placed):
    shards = [s for part in jax.tree.leaves(placed) for s in part.addressable_shards]
    return {
        device: sum(s.data.nbytes for s in shards if s.device == device)
        for device in placed.mesh.devices.flat
    }


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_forecast_is_what_placing_takes(folder, tp):
    plan, mesh = jaxtp.ReductionPlan(), jaxtp.make_mesh(tp=tp)
    with checkpoint.open(folder) as ckpt:
        found = forecast(ckpt, tp=tp, plan=plan)
        assert ckpt.bytes_read == 0
        assert {line.row.name for line in found.lines if line.cut} == set(SHAPES)
        for line in found.lines:
            if line.cut is None:
                continue
            for parallel, nbytes in (
                ("row", line.cut.row_bytes),
                ("column", line.cut.column_bytes),
            ):
                weight = ckpt.weight(line.row.name)
                placed = jaxtp.place(weight, mesh, parallel=parallel, plan=plan)
                assert set(bytes_a_device(placed).values()) == {nbytes}, line.row.name


def test_experts_are_forecast_where_the_mesh_divides_them(folder):
    plan = jaxtp.ReductionPlan()
    with checkpoint.open(folder) as ckpt:
        by_tp = {tp: forecast(ckpt, tp=tp, plan=plan) for tp in (2, 4)}
        bank = ckpt.weight("model.layers.1.moe.gate_proj.weight")
        mesh = jaxtp.make_mesh(tp=2)
        placed = jaxtp.place(bank, mesh, parallel="expert", plan=plan, axis_name="tp")
    two, four = (
        [c.expert_bytes for c in by_tp[tp].cuts if c.expert_bytes] for tp in (2, 4)
    )
    # Global scales are replicated in the forecast's other placements as well.
    assert two == [max(bytes_a_device(placed).values())]
    assert four == []


def cuts(folder, tp):
    with checkpoint.open(folder) as ckpt:
        found = forecast(ckpt, tp=tp, plan=jaxtp.ReductionPlan())
    return {line.row.name.split(".")[-2]: line.cut for line in found.lines if line.cut}


@pytest.mark.parametrize("folder", ["e4m3"], indirect=True)
def test_scale_blocks_that_ranks_share_are_counted(folder):
    # Slots of 160 columns: the borders 160, 320, 480, 800, 960, 1120 cut a block of
    # 128, the border 640 does not. Slots of 96 rows: 96, 192, 288 and 480 cut one.
    eight = cuts(folder, 8)
    assert eight["down_proj"].row_split == (6, 10)
    assert eight["down_proj"].slot_width == 160
    assert eight["down_proj"].segments == 2
    assert eight["o_proj"].row_split == (0, 8)
    assert eight["o_proj"].column_split == (4, 5)
    assert cuts(folder, 2)["down_proj"].row_split == (0, 10)


@pytest.mark.parametrize("folder", ["nvfp4"], indirect=True)
def test_no_slot_cuts_an_nvfp4_scale(folder):
    assert {cut.row_split[0] for cut in cuts(folder, 8).values()} == {0}


@pytest.mark.parametrize("folder", ["bf16"], indirect=True)
def test_bf16_has_no_scales_to_cut(folder):
    assert {cut.row_split for cut in cuts(folder, 8).values()} == {None}


def test_the_command_prints_every_kind_of_tensor(folder, capsys):
    assert main(["plan", str(folder), "--tp", "8"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*.mlp.down_proj.weight" in out
    for name in ("model.embed_tokens", "model.norm", "model.layers.1.moe.gate"):
        (line,) = [text for text in out.splitlines() if f"{name}.weight" in text]
        assert "whole on every device" in line
    assert "4 tensors are cut, 3 are held whole" in out
    assert "\n0 bytes of tensor data were read\n" in out
    assert out.endswith("problems: 0\n")


def test_each_tensor_gets_a_line_when_asked(folder, capsys):
    assert main(["plan", str(folder), "--tp", "2", "--each"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SHAPES)


def test_a_mesh_that_does_not_divide_the_slots_names_those_that_do(folder, capsys):
    assert main(["plan", str(folder), "--tp", "16"]) == 2
    assert "Axis sizes that work: [1, 2, 4, 8]" in capsys.readouterr().err
    assert main(["plan", str(folder), "--tp", "16", "--num-slots", "16"]) == 2
    assert "output slots (`out_slots`)" in capsys.readouterr().err
    wide = ["--tp", "16", "--num-slots", "16", "--out-slots", "16"]
    assert main(["plan", str(folder), *wide]) == 0


def test_lines_that_differ_beyond_numbers_are_not_joined(folder):
    with checkpoint.open(folder) as ckpt:
        lines = forecast(ckpt, tp=1, plan=jaxtp.ReductionPlan()).lines
    groups = dict(same_but_numbers(lines))
    assert len(groups["model.layers.*.mlp.down_proj.weight"]) == 2
    assert len(groups["model.layers.0.self_attn.o_proj.weight"]) == 1
    assert sum(map(len, groups.values())) == len(lines)


def test_a_file_that_claims_two_hundred_gigabytes_is_planned_from_its_header(
    tmp_path, capsys
):
    n, k, layers = 16384, 53248, 120
    header, position = {}, 0
    for layer in range(layers):
        stop = position + 2 * n * k
        header[f"model.layers.{layer}.mlp.down_proj.weight"] = {
            "dtype": "BF16",
            "shape": [n, k],
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        try:
            file.truncate(8 + len(text) + position)
        except OSError:
            pytest.skip("this file system has no sparse files of 200 GB")
    (tmp_path / "config.json").write_text("{}")
    assert position > 200e9
    assert main(["plan", str(tmp_path), "--tp", "8"]) == 0
    out = capsys.readouterr().out
    assert f"{position // 8:,} bytes a device" in out
    assert "\n0 bytes of tensor data were read\n" in out


def test_a_tensor_that_cannot_be_placed_is_a_problem(tmp_path, capsys):
    codes = np.full((4, 32), 1, np.uint8).view(ml_dtypes.float8_e4m3fn)
    checkpoint.write_file(tmp_path / "model.safetensors", {"a.weight": codes})
    (tmp_path / "config.json").write_text("{}")
    assert main(["plan", str(tmp_path), "--tp", "2"]) == 1
    out = capsys.readouterr().out
    assert "a.weight" in out
    assert "MissingTensorError" in out
    assert out.endswith("problems: 1\n")
