"""`jaxtp sweep`: what it covers, what it prints, and that its checks can fail."""

import contextlib
import dataclasses
import io
import itertools
import json
import re

import numpy as np
import pytest
from test_cli_main import python

import jaxtp
from jaxtp import oracle
from jaxtp.cli import commands, demo, html, sampling, sweep
from jaxtp.cli.main import main
from jaxtp.program import ACTIVATIONS

FAST = ["--formats", "bf16", "--limit", "1", "--tokens", "3"]


def run(*arguments):
    """Exit status and standard output of one sweep."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["sweep", *map(str, arguments)])
    return status, out.getvalue()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One sweep with all its outputs: status, text, JSON, HTML."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("sweep")
    files = folder / "out.json", folder / "out.html"
    slots = ["--num-slots", 16, "--tp", "1,2,16"]
    outputs = ["--json", files[0], "--html", files[1]]
    status, text = run(*FAST, *slots, *outputs, "--keep", folder / "kept")
    assert (folder / "kept" / "bf16" / "config.json").is_file()
    return status, text, json.loads(files[0].read_text()), files[1].read_text()


def test_without_arguments_everything_is_equal_in_a_minute():
    done = python("-m", "jaxtp", "sweep")
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(
        r"all (\d+) results equal on every mesh and equal to the oracle; psum changes "
        r"(\d+\.\d) % of the words \((\d+\.\d) s\)",
        last,
    )
    assert found, last
    assert int(found[1]) == 48
    assert float(found[2]) > 1.0
    lines = [line.split() for line in done.stdout.splitlines()]
    modes = {(c[0], c[1]) for c in lines if c and c[0] in ACTIVATIONS}
    assert modes == {(f, a) for f, modes in ACTIVATIONS.items() for a in modes}


def test_the_text_has_words_for_each_mesh_and_ends_with_a_summary(small):
    status, text, table, _ = small
    assert status == 0
    assert "mesh 16 was skipped: it needs 16 devices, and there are 8." in text
    assert text.splitlines()[-1].startswith(table["summary"])
    for result in table["results"]:
        for digest in result["digests"]:
            assert digest[:8] in text


def test_the_json_has_a_record_for_each_result(small):
    _, _, table, _ = small
    assert set(table) == {
        *("jaxtp", "jax", "device", "settings", "notes", "results"),
        *("psum_changed", "ok", "summary", "seconds"),
    }
    assert table["settings"]["meshes"] == [1, 2]
    assert table["settings"]["plans"] == [
        {"num_slots": 16, "order": "sequential"},
        {"num_slots": 16, "order": "tree"},
    ]
    fields = {field.name for field in dataclasses.fields(sweep.Result)} | {"ok"}
    assert {frozenset(result) for result in table["results"]} == {frozenset(fields)}
    assert len(table["results"]) == 4
    for result in table["results"]:
        assert result["ok"]
        assert len(set(result["digests"])) == 1
        assert 0 < result["error_over_bound"] <= 1
        assert len(result["milliseconds"]) == 2


def test_the_control_changes_words_where_the_ordered_sum_does_not(small):
    _, _, table, _ = small
    changed = {
        (result["operation"], result["order"]): result["psum_changed"]
        for result in table["results"]
    }
    assert changed["row", "sequential"][0] == 0.0
    assert changed["row", "sequential"][1] > 0.1
    assert changed["column", "sequential"] is None
    assert table["psum_changed"] > 0.0


def test_the_page_loads_nothing(small):
    _, _, table, page = small
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == page.count("</svg>") == 3
    assert table["summary"] in page
    for result in table["results"]:
        assert result["digests"][0] in page
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"'\s)<]+", page)) <= names
    links = re.findall(r"(?:src|href)\s*=\s*[\"']([^\"']*)", page)
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"<script|<link|<iframe|<img|@import|url\((?!#)", page)


def test_a_kept_checkpoint_can_be_swept_again(tmp_path):
    demo.write(tmp_path, ["bf16"], seed=0)
    listed = ["--tensors", "*.o_proj.weight", "--checkpoint", tmp_path / "bf16"]
    status, text = run(*FAST, *listed, "--tp", "1", "--plans", "tree")
    assert status == 0
    assert "self_attn.o_proj" in text
    assert "down_proj" not in text
    assert "psum was not compared" in text


def test_a_page_without_matplotlib_names_the_extra(monkeypatch, capsys, tmp_path):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(html.importlib, "import_module", missing)
    assert main(["sweep", "--html", str(tmp_path / "page.html")]) == 2
    assert "pip install 'jaxtp[plots]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_words_that_are_not_the_oracles_fail_the_sweep(monkeypatch):
    def off_by_one_word(*arguments, **options):
        y = np.array(oracle.row_parallel(*arguments, **options))
        y.reshape(-1).view(np.uint32)[0] ^= 1
        return y

    monkeypatch.setitem(sweep._ORACLE, "row", off_by_one_word)
    status, text = run(*FAST, "--tp", "1,2", "--plans", "sequential")
    assert status == 1
    assert text.splitlines()[-1].startswith("1 of 2 results FAILED; psum changes")


def test_words_that_change_with_the_mesh_fail_the_sweep(monkeypatch):
    def by_psum_like_order(x, placed, **options):
        plan = jaxtp.ReductionPlan(8, "tree" if placed.mesh.size == 2 else "sequential")
        return jaxtp.row_parallel(x, dataclasses.replace(placed, plan=plan), **options)

    monkeypatch.setitem(sweep._PARALLEL, "row", by_psum_like_order)
    status, text = run(*FAST, "--tp", "1,2", "--plans", "sequential")
    assert status == 1
    assert "1 of 2 results FAILED" in text


def subjects():
    """The matrices of the checkpoint that a sweep writes."""
    return [
        sampling.Subject(name, jaxtp.Bf16Weight(np.ones(shape[-2:], "bfloat16")))
        for name, shape in demo.SHAPES.items()
    ]


def test_covering_meets_every_family_activation_operation_and_token_count():
    cases = sampling.covering_cases(subjects(), (1, 5, 64))
    families = {case.subjects[0].family for case in cases}
    assert len(families) == 2
    met = {(case.subjects[0].family, case.activation) for case in cases}
    assert met == set(itertools.product(families, ("bf16", "f32")))
    for family in families:
        operations = {c.operation for c in cases if c.subjects[0].family == family}
        assert operations == {"row", "column"}
    assert {case.tokens for case in cases} == {1, 5, 64}


def test_full_runs_the_whole_product():
    cases = sampling.all_cases(subjects(), (1, 5))
    met = {(c.subjects[0].family, c.activation, c.operation, c.tokens) for c in cases}
    assert len(met) == len(cases)
    assert len(cases) == 2 * 2 * 2 * 2


def test_samples_take_different_shapes_first_and_leave_out_what_is_not_cut(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {"a": (32, 64), "b": (32, 64), "c": (48, 64), "embed_tokens": (80, 64)}
    tensors = {f"{n}.weight": rng.standard_normal(s, "f4") for n, s in shapes.items()}
    jaxtp.checkpoint.save(tmp_path, tensors, layout="bf16")
    with jaxtp.checkpoint.open(tmp_path) as ckpt:
        take = lambda pattern, limit: [
            subject.name
            for subject in sampling.sample(
                ckpt, pattern=pattern, limit=limit, formats=("bf16",)
            )
        ]
        assert take("*", 2) == ["a.weight", "c.weight"]
        assert take("*", 9) == ["a.weight", "c.weight", "b.weight"]
        assert take("embed*", 9) == ["embed_tokens.weight"]
        assert ckpt.bytes_read == 0


def test_digests_tell_minus_zero_from_zero_and_join_all_nans():
    zero = np.zeros(3, np.float32)
    assert sweep.digest(zero) != sweep.digest(-zero)
    quiet, other = (np.array([b], "u4").view("f4") for b in (0x7FC00000, 0xFFC00001))
    assert sweep.digest(quiet) == sweep.digest(other)


def test_the_legend_explains_the_columns():
    for word in ("words", "= oracle", "ms", "psum %"):
        assert f"{word}:" in commands.LEGEND
