"""The command line itself: devices, versions, messages and exit statuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxtp
from jaxtp.cli.main import main

ROOT = Path(__file__).parents[1]
SHOW_DEVICES = (
    "import jax; from jaxtp.cli import main; main._show_cpu_devices(); "
    "print(len(jax.devices()))"
)


def python(*arguments, **environment):
    """A fresh interpreter on the CPU, with no XLA flags but those given."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env
    )


def test_a_cpu_shows_eight_devices_without_any_flag_of_the_user():
    done = python("-c", SHOW_DEVICES)
    assert (done.returncode, done.stdout.strip()) == (0, "8"), done.stderr


def test_a_number_of_devices_that_the_user_chose_is_kept():
    flag = "--xla_force_host_platform_device_count=3"
    done = python("-c", SHOW_DEVICES, XLA_FLAGS=flag)
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr


def test_other_xla_flags_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert main(["inspect", "there is no such folder"]) == 2
    first, second = os.environ["XLA_FLAGS"].split()
    assert first == "--xla_cpu_enable_fast_math=false"
    assert second == "--xla_force_host_platform_device_count=8"


def test_the_package_runs_as_a_module():
    done = python("-m", "jaxtp", "--version")
    assert (done.returncode, done.stdout) == (0, f"jaxtp {jaxtp.__version__}\n")


def test_help_names_the_flag_and_the_exit_statuses(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--xla_force_host_platform_device_count=8" in text
    assert "1 if a check failed, 2 if the command cannot run" in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["sing"],
        ["sweep", "--tp", "two"],
        ["sweep", "--tp", "1,0"],
        ["sweep", "--formats", "bf16,int4"],
        ["sweep", "--plans", "pairwise"],
        ["plan", "folder"],
    ],
)
def test_arguments_that_cannot_be_read_exit_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "usage: jaxtp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "no/such"], "CheckpointError: no/such: there is no such file"),
        (["verify", "no/such"], "CheckpointError: no/such: there is no such file"),
        (["plan", "no/such", "--tp", "2"], "CheckpointError: no/such: there is no"),
        (["sweep", "--checkpoint", "no/such"], "CheckpointError: no/such: there is"),
        (
            ["sweep", "--formats", "bf16", "--tp", "1,3"],
            "PlanError: the mesh axis must divide the 8 slots; got axis size 3. Axis "
            "sizes that work: [1, 2, 4, 8].",
        ),
        (
            ["sweep", "--formats", "bf16", "--num-slots", "12"],
            "PlanError: order='tree' needs a power of two of slots; got num_slots=12.",
        ),
        (
            ["sweep", "--formats", "bf16", "--tensors", "*.q_proj.*"],
            "MissingTensorError: no weight of bf16 matches '*.q_proj.*'",
        ),
    ],
)
def test_typed_errors_are_one_line_and_exit_status_two(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"jaxtp: {message}"), captured.err
    assert captured.err.count("\n") == 1


def test_an_implementation_that_cannot_run_here_names_one_that_can(capsys):
    arguments = ["--formats", "bf16", "--limit", "1", "--implementation", "mosaic"]
    if jaxtp.make_mesh(tp=1).devices.flat[0].platform != "cpu":
        pytest.skip("asks for a kernel that a CPU cannot run")
    assert main(["sweep", *arguments]) == 2
    error = capsys.readouterr().err
    assert "implementation='portable' runs there" in error
    assert error.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_a_message(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("not a folder")
    assert main(["sweep", "--formats", "bf16", "--keep", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
