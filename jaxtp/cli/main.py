"""The `jaxtp` command.

Exit status: 0 if all is well, 1 if a check failed, 2 if the command cannot run.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import jaxtp
from jaxtp.cli import commands
from jaxtp.cli.sampling import FORMATS
from jaxtp.errors import JaxtpError
from pallas_kernels import IMPLEMENTATIONS

CPU_FLAG = "--xla_force_host_platform_device_count"
CPU_DEVICES = 8

ORDERS = ("sequential", "tree")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    Args:
        argv: Arguments without the program's name; None takes the process's.
    """
    args = _parser().parse_args(argv)
    _show_cpu_devices()
    try:
        return args.run(args)
    except (JaxtpError, NotImplementedError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"jaxtp: {type(error).__name__}: {message}", file=sys.stderr)
        return 2


def _show_cpu_devices() -> None:
    """Makes a CPU show eight devices, unless the user has chosen a number.

    XLA reads the variable when its backend starts, which no import of jaxtp does.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if CPU_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {CPU_FLAG}={CPU_DEVICES}".strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxtp",
        description="Tensor-parallel projections with the same words on every mesh.",
        epilog=f"On a CPU the command sets XLA_FLAGS={CPU_FLAG}={CPU_DEVICES} for "
        "itself, unless XLA_FLAGS has that flag already. Exit status: 0 if all is "
        "well, 1 if a check failed, 2 if the command cannot run.",
    )
    parser.add_argument(
        "--version", action="version", version=f"jaxtp {jaxtp.__version__}"
    )
    add = parser.add_subparsers(title="commands", required=True).add_parser
    _add_sweep(add)
    _add_inspect(add)
    _add_plan(add)
    _add_verify(add)
    return parser


def _add_sweep(add: Callable[..., argparse.ArgumentParser]) -> None:
    text = (
        "Projects on several meshes and compares all words with each other, with the "
        "oracle and with what psum would give."
    )
    parser = add("sweep", help=text, description=text)
    parser.set_defaults(run=commands.run_sweep)
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="take matrices of this checkpoint; without it a small one is written",
    )
    parser.add_argument("--keep", metavar="DIR", help="write the small one here")
    _add_sweep_options(parser, limit=8)


def _add_sweep_options(parser: argparse.ArgumentParser, limit: int) -> None:
    option = parser.add_argument
    option("--tensors", metavar="PATTERN", default="*", help="names, shell pattern")
    option("--limit", metavar="N", type=_count, default=limit, help="most matrices")
    option("--formats", type=_choices(FORMATS), default=FORMATS, metavar="A,B")
    option("--plans", type=_choices(ORDERS), default=ORDERS, metavar="A,B")
    option("--num-slots", type=_count, default=8, metavar="S", help="slots of K")
    option("--tp", type=_counts, default=(1, 2, 4, 8), metavar="1,2,..")
    option("--tokens", type=_counts, default=(1, 5, 64), metavar="T,T,..")
    option("--full", action="store_true", help="every combination; many compilations")
    option("--seed", type=int, default=0)
    option("--implementation", choices=IMPLEMENTATIONS, default=None)
    option("--json", metavar="FILE", help="write all results here")
    option("--html", metavar="FILE", help="write one page with plots (needs the extra)")


def _add_inspect(add: Callable[..., argparse.ArgumentParser]) -> None:
    text = "Lists a checkpoint's weights, and everything that is wrong with them."
    parser = add("inspect", help=text, description=text)
    parser.set_defaults(run=commands.run_inspect)
    parser.add_argument("directory", help="checkpoint folder or safetensors file")
    parser.add_argument(
        "--values", action="store_true", help="read all weights and check their values"
    )


def _add_plan(add: Callable[..., argparse.ArgumentParser]) -> None:
    text = "Forecasts bytes a device and split scale blocks; reads headers only."
    parser = add("plan", help=text, description=text)
    parser.set_defaults(run=commands.run_plan)
    parser.add_argument("directory", help="checkpoint folder or safetensors file")
    parser.add_argument("--tp", type=_count, required=True, help="size of the mesh")
    parser.add_argument("--num-slots", type=_count, default=8, help="slots of K")
    parser.add_argument("--out-slots", type=_count, default=8, help="slots of N")
    parser.add_argument(
        "--each", action="store_true", help="one line for each tensor, not each kind"
    )


def _add_verify(add: Callable[..., argparse.ArgumentParser]) -> None:
    text = "Checks every value of a checkpoint, then sweeps over a sample."
    parser = add("verify", help=text, description=text)
    parser.set_defaults(run=commands.run_verify)
    parser.add_argument(
        "checkpoint", metavar="directory", help="checkpoint folder or safetensors file"
    )
    _add_sweep_options(parser, limit=3)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0; got {text!r}")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _choices(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        parts = tuple(dict.fromkeys(text.split(",")))
        strange = [part for part in parts if part not in known]
        if strange:
            raise argparse.ArgumentTypeError(
                f"expected some of {','.join(known)}; got {strange[0]!r}"
            )
        return parts

    return parse
