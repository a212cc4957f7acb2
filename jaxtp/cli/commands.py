"""The subcommands: parsed arguments in, text on the console and an exit status out."""

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

import jaxtp
from jaxtp import checkpoint
from jaxtp.checkpoint import Checkpoint
from jaxtp.cli import demo, html, sampling, sweep, tables, verify
from jaxtp.cli.plan import forecast
from jaxtp.cli.records import Settings, Sweep
from jaxtp.cli.roles import WHOLE
from jaxtp.plan import ReductionPlan

PIPE_WIDTH = 240
"""Columns of a table that is not written to a terminal."""


def console() -> Console:
    """Standard output, wide enough for a table where it is no terminal."""
    return Console(
        width=None if sys.stdout.isatty() else PIPE_WIDTH,
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[tuple[Callable[..., Any], Any]]:
    """A progress bar on standard error, if that is a terminal."""
    bar = Progress(
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    with bar:
        yield bar.update, bar.add_task(what, total=total)


def run_sweep(args: argparse.Namespace) -> int:
    """`jaxtp sweep`: status 0 if every word is what it must be, else 1."""
    if args.html:
        html.require_matplotlib()
    with contextlib.ExitStack() as stack:
        subjects = _subjects(args, stack)
        done = _sweep(subjects, args)
    out = console()
    out.print(tables.sweep_table(done))
    for note in done.notes:
        out.print(note)
    if args.json:
        Path(args.json).write_text(json.dumps(as_json(done), indent=2) + "\n")
    if args.html:
        Path(args.html).write_text(html.page(done))
    out.print(f"{done.summary} ({done.seconds:.1f} s)")
    return 0 if done.ok else 1


def _subjects(
    args: argparse.Namespace, stack: contextlib.ExitStack
) -> list[sampling.Subject]:
    """Matrices of the named checkpoint, or of one that is written for the purpose."""
    if args.checkpoint:
        opened = [(stack.enter_context(checkpoint.open(args.checkpoint)), args.formats)]
    else:
        folder = args.keep or stack.enter_context(tempfile.TemporaryDirectory())
        paths = demo.write(Path(folder), args.formats, args.seed)
        opened = [
            (stack.enter_context(checkpoint.open(path)), (format,))
            for format, path in paths.items()
        ]
    return [
        subject
        for ckpt, formats in opened
        for subject in sampling.sample(
            ckpt, pattern=args.tensors, limit=args.limit, formats=formats
        )
    ]


def _sweep(subjects: Sequence[sampling.Subject], args: argparse.Namespace) -> Sweep:
    plans = tuple(ReductionPlan(args.num_slots, order) for order in args.plans)
    meshes, skipped = sweep.usable_meshes(args.tp, args.num_slots)
    choose = sampling.all_cases if args.full else sampling.covering_cases
    cases = choose(subjects, args.tokens)
    settings = Settings(
        meshes=meshes,
        plans=plans,
        max_tokens=max(args.tokens),
        seed=args.seed,
        implementation=args.implementation,
    )
    notes = [*skipped, sampling.COVERAGE["full" if args.full else "covering"], LEGEND]
    with _progress("sweep", len(cases)) as (update, task):
        return sweep.run(
            cases, settings, notes=notes, advance=lambda: update(task, advance=1)
        )


LEGEND = (
    "words: SHA-256 of the float32 words. = oracle: the host bounce with as many ranks "
    "as the largest mesh, run once on all tokens. ms: one run of all plans on the "
    "largest mesh, rough because others compile meanwhile. psum %: words that change "
    "against the first mesh if each rank adds its slots in plan order and `lax.psum` "
    "adds the ranks; 0.0 where psum happens to add in the plan's order."
)


def as_json(done: Sweep) -> dict[str, Any]:
    """A sweep as plain lists and numbers."""
    settings = dataclasses.asdict(done.settings)
    return {
        "jaxtp": jaxtp.__version__,
        "jax": jax.__version__,
        "device": done.device,
        "settings": settings,
        "notes": list(done.notes),
        "results": [{**dataclasses.asdict(r), "ok": r.ok} for r in done.results],
        "psum_changed": done.psum_changed,
        "ok": done.ok,
        "summary": done.summary,
        "seconds": done.seconds,
    }


def run_inspect(args: argparse.Namespace) -> int:
    """`jaxtp inspect`: status 1 if the checkpoint has problems."""
    with checkpoint.open(args.directory) as ckpt:
        report = _checked(ckpt) if args.values else ckpt.report()
    out = console()
    out.print(tables.report_table(report))
    out.print(tables.totals_table(report))
    checked = "values checked" if report.values_checked else "values not read"
    out.print(
        f"{len(report.rows)} entries, {report.nbytes:,} bytes, quant_method "
        f"{report.method}, {checked}"
    )
    for note in report.notes:
        out.print(f"note: {note}")
    return _print_problems(out, [str(problem) for problem in report.problems])


def _checked(ckpt: Checkpoint) -> checkpoint.Report:
    total = verify.bytes_to_check(ckpt.report())
    with _progress("values", total) as (update, task):
        return verify.check_values(ckpt, lambda done: update(task, completed=done))


def _print_problems(out: Console, problems: Sequence[str]) -> int:
    for problem in problems:
        out.print(problem, style="red")
    out.print(f"problems: {len(problems)}")
    return 1 if problems else 0


def run_plan(args: argparse.Namespace) -> int:
    """`jaxtp plan`: status 1 if a tensor cannot be placed."""
    plan = ReductionPlan(args.num_slots)
    with checkpoint.open(args.directory) as ckpt:
        found = forecast(ckpt, tp=args.tp, plan=plan, out_slots=args.out_slots)
        read = ckpt.bytes_read
    out = console()
    out.print(tables.forecast_table(found, each=args.each))
    for line in tables.forecast_totals(found):
        out.print(line)
    out.print(f"whole by name: {', '.join(WHOLE)}; and what is no matrix")
    out.print(f"{read} bytes of tensor data were read")
    return _print_problems(out, found.problems)


def run_verify(args: argparse.Namespace) -> int:
    """`jaxtp verify`: every value checked, then a sweep over a sample."""
    out = console()
    with checkpoint.open(args.checkpoint) as ckpt:
        report = _checked(ckpt)
    out.print(f"{len(report.rows)} entries, {report.nbytes:,} bytes: values checked")
    if _print_problems(out, [str(problem) for problem in report.problems]):
        out.print("the sweep is left out")
        return 1
    return run_sweep(args)
