"""`jaxtp inspect` and `jaxtp verify` on third-party checkpoints, good and malformed."""

from pathlib import Path

import pytest

from jaxtp import checkpoint
from jaxtp.cli import verify
from jaxtp.cli.inspect import totals
from jaxtp.cli.main import main

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
MALFORMED = CHECKPOINTS / "malformed_modelopt_allzero_qwen3"
GOOD = sorted(
    path for path in CHECKPOINTS.iterdir() if path.is_dir() and path != MALFORMED
)
SMALL = ["--limit", "1", "--tp", "1,2", "--tokens", "3"]


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_every_value_of_a_good_checkpoint_is_good(path, capsys):
    assert main(["inspect", str(path), "--values"]) == 0
    out = capsys.readouterr().out
    assert "values checked" in out
    assert out.endswith("problems: 0\n")


def test_inspect_lists_names_formats_shapes_and_totals(capsys):
    path = CHECKPOINTS / "modelopt_nvfp4_qwen3moe"
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    with checkpoint.open(path) as ckpt:
        report = ckpt.report()
    for row in report.rows:
        assert row.name in out
    assert "values not read" in out
    assert f"{report.nbytes:,} bytes, quant_method modelopt" in out
    assert sum(total.nbytes for total in totals(report)) == report.nbytes
    assert {total.format for total in totals(report)} >= {"bf16", "nvfp4"}


def test_inspect_reads_values_only_when_asked(capsys):
    assert main(["inspect", str(MALFORMED)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(MALFORMED), "--values"]) == 1
    out = capsys.readouterr().out
    assert "model.layers.0.self_attn.o_proj.weight_scale" in out
    assert "got nan at index [0, 0]" in out
    assert out.endswith("problems: 1\n")


def test_verify_names_tensor_and_index_of_a_bad_value_and_runs_nothing(capsys):
    assert main(["verify", str(MALFORMED)]) == 1
    out = capsys.readouterr().out
    assert "model.layers.0.self_attn.o_proj.weight_scale" in out
    assert "got nan at index [0, 0]" in out
    assert out.endswith("the sweep is left out\n")


@pytest.mark.parametrize(
    "name", ["hf_fp8_qwen3moe", "ct_nvfp4_oneshot_qwen3moe"], ids=str
)
def test_verify_passes_on_a_good_checkpoint(name, capsys):
    assert main(["verify", str(CHECKPOINTS / name), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "problems: 0" in out
    assert "results equal on every mesh and equal to the oracle" in out


def test_checking_values_reports_how_far_it_is():
    with checkpoint.open(CHECKPOINTS / "hf_fp8_qwen3moe") as ckpt:
        total = verify.bytes_to_check(ckpt.report())
        seen = []
        report = verify.check_values(ckpt, seen.append)
    assert report.ok
    assert report.values_checked
    assert seen == sorted(seen)
    assert seen[-1] == total > 0
