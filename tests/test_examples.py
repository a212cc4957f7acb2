"""Each example runs on a CPU, says what it showed, and exits with status 0."""

from pathlib import Path

import pytest
from test_cli_main import python

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("01_project_on_a_mesh.py", "words are equal on meshes 1, 2, 4, 8"),
        ("02_from_a_checkpoint.py", "words are the oracle's"),
        ("03_inside_your_own_shard_map.py", "tp 8: all 1024 words equal"),
    ],
)
def test_the_example_shows_what_it_says(name, shown):
    done = python(str(EXAMPLES / name))
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown in done.stdout


def test_the_sweep_to_edit_writes_a_table(tmp_path):
    path = tmp_path / "out.csv"
    done = python(str(EXAMPLES / "sweep_mesh_sizes.py"), str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows = [line.split(",") for line in path.read_text().splitlines()]
    assert len(rows) == 24
    assert {row[head.index("same")] for row in rows} == {"True"}
    digests = {tuple(row[:4]): row[head.index("sha256")] for row in rows}
    assert len(set(digests.values())) == 6
    assert f"{len(rows)} runs, 0 with other words" in done.stdout


def test_every_example_is_tested():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {
        "01_project_on_a_mesh.py",
        "02_from_a_checkpoint.py",
        "03_inside_your_own_shard_map.py",
        "sweep_mesh_sizes.py",
    }
