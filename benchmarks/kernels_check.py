"""Words, bounds and times: `PYTHONPATH=. python benchmarks/kernels_check.py`.

On an H200 it checks the Mosaic kernels word for word and times the decode shapes with a
cold L2; with `--tiny` it runs the portable kernels on a CPU, without times. A check
that fails is recorded and the rest goes on. JSON goes to the path argument, or into
`$OUT`, or nowhere; a short table is printed last.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import time
import traceback

import jax
import kernel_cases as cases
import kernel_times
import numpy as np

from jaxtp import testing

FULL = {
    "unaligned": ((8, 576, 160), (1, 7, 8, 20, 64)),
    "slots": ((8, 80, 512), (1, 7, 8, 64)),
    "one_slot": ((1, 576, 4096), (1, 8, 16)),
    "wide": ((2, 72, 1184), (1, 8, 24)),
    "one_tile": ((4, 64, 96), (1, 9, 20)),
    "ragged": ((2, 20, 96), (7,)),
}
TINY = {"unaligned": ((8, 48, 160), (1, 7)), "ragged": ((2, 20, 96), (7,))}
"""Name to (slots, rows, columns of a slot) and the token counts compared with all."""


@dataclasses.dataclass
class Report:
    """Outcomes in the order of the checks."""

    path: pathlib.Path | None
    started: float = dataclasses.field(default_factory=time.monotonic)
    results: list = dataclasses.field(default_factory=list)
    times: list = dataclasses.field(default_factory=list)

    def check(self, name, function, *args):
        """Runs one check; a failure is written down, with its text."""
        entry = {"check": name, "ok": True}
        try:
            entry["detail"] = function(*args)
        except Exception as error:
            entry["ok"] = False
            entry["detail"] = f"{type(error).__name__}: {str(error)[:600]}"
            if not isinstance(error, AssertionError):
                entry["trace"] = traceback.format_exc()[-3000:]
        entry["at_s"] = round(time.monotonic() - self.started, 1)
        self.results.append(entry)
        print("ok  " if entry["ok"] else "FAIL", name, entry["detail"], flush=True)
        self.write()

    def write(self):
        """Writes what is known so far, so that a cut run is not lost."""
        if self.path is not None:
            body = {"checks": self.results, "times": self.times}
            self.path.write_text(json.dumps(body, indent=1))

    def table(self):
        """Prints the failures and the times."""
        failed = [entry for entry in self.results if not entry["ok"]]
        print(f"\n{len(self.results)} checks, {len(failed)} failed")
        for entry in failed:
            print(f"  FAIL {entry['check']}: {entry['detail'][:300]}")
        kernel_times.print_table(self.times)


class Runner:
    """Runs the programs of one implementation on one problem."""

    def __init__(self, problem, implementation):
        self.problem = problem
        self.implementation = implementation

    def __call__(self, name, *, rows=slice(None), slots=slice(None), x=None):
        """Slot partials of some tokens and slots, in memory that held NaN before."""
        problem = self.problem
        x = problem.x[name] if x is None else x

        def cut(a):
            by_slot = a.reshape(len(a), problem.slots, -1)[rows, slots]
            return by_slot if a.ndim == 3 else by_slot.reshape(len(by_slot), -1)

        weight = tuple(w[slots] for w in problem.weight[name])
        first = np.int32(range(problem.slots)[slots][0])
        tokens = len(np.empty(len(x[0]))[rows])
        rows_out = weight[0].shape[1]
        poison = np.full((len(weight[0]), tokens, rows_out), np.nan, np.float32)
        jax.block_until_ready(jax.device_put(poison)).delete()
        run = cases.program(name, self.implementation)
        operands = cases.on_device((tuple(map(cut, x)), weight))
        return np.asarray(run(*operands, first))


def same_rows(run, name, full, counts):
    """A row's words do not depend on how many others there are, or which."""
    for tokens in counts:
        testing.assert_same_words(
            run(name, rows=slice(0, tokens)), full[:, :tokens], f"T = {tokens}"
        )
    order = np.random.default_rng(5).permutation(full.shape[1])
    testing.assert_same_words(run(name, rows=order), full[:, order], "permuted rows")
    return f"T = {counts} and a permutation"


def same_again(run, name, full):
    for _ in range(3):
        testing.assert_same_words(run(name), full, "a repeated run")
    return "3 more runs"


def same_slots(run, name, full):
    """A subset of slots, with its first slot's number, has the words of the whole."""
    part = slice(3, 5) if len(full) > 4 else slice(len(full) - 1, None)
    testing.assert_same_words(run(name, slots=part), full[part], "some slots")
    return f"slots {part.start}:{part.stop}"


def within_bound(run, name, full):
    x, w = cases.decoded(name, run.problem)
    value = cases.slot_products(x, w)
    magnitude = cases.slot_products(abs(x), abs(w))
    # One addition a column, and a rounding and an addition a segment.
    depth = run.problem.width + 2 * (int(run.problem.segment.max()) + 1)
    worst = testing.error_over_bound(full, value, magnitude, depth)
    assert worst <= 1.0, f"{worst:.3g} times the bound of depth {depth}"
    control = testing.error_over_bound(full, np.roll(value, 1, 2), magnitude, depth)
    assert control > 1.0, "the control must fail"
    return f"{worst:.3g} of the bound of depth {depth}"


def nan_stays_in_its_row(run, name, full):
    """A NaN in one token's last slot reaches that token alone."""
    x = [np.array(a) for a in run.problem.x[name]]
    if name == "e4m3_e4m3":
        # The first segment: a slot may have fewer than the weight's largest number.
        x[1][2, -1, 0] = np.nan
    else:
        spoiled = x[1] if name == "nvfp4_int8" else x[0]
        spoiled.reshape(len(spoiled), -1)[2, -1] = np.nan
    y = run(name, x=tuple(x))
    assert np.isnan(y[-1, 2]).all(), "the NaN is lost"
    expected = full.copy()
    expected[-1, 2] = np.nan
    testing.assert_same_words(y, expected, "the other rows and slots")
    return "row 2 of the last slot"


def zeros_are_positive(run, name, full):
    """A token of zeros of both signs gives +0."""
    x = [np.array(a) for a in run.problem.x[name]]
    x[0][1] = 0
    if name != "nvfp4_int8":
        x[0][1, ::2] = -0.0
    y = run(name, x=tuple(x))
    testing.assert_same_words(y[:, 1], np.zeros_like(y[:, 1]), "the zero token")
    testing.assert_same_words(y[:, 2:], full[:, 2:], "the other tokens")
    return "row 1"


def decoded_weight(run, full):
    """NVFP4 "bf16" has the words of the bf16 program on the decoded weight."""
    problem = run.problem
    _, w = cases.decoded("nvfp4_bf16", problem)
    exact = w.astype(cases.BF16)
    assert (exact.astype(np.float64) == w).all(), "the decoded weight is not exact"
    program = cases.program("bf16", run.implementation)
    operands = cases.on_device((problem.x["bf16"], (exact,)))
    testing.assert_same_words(full, program(*operands, np.int32(0)), "decoded")
    return f"{full.size} words"


def ordered(run, full):
    testing.assert_same_words(full, cases.int8_oracle(run.problem), "NumPy")
    return f"{full.size} words"


def fused_segments(run, name, full):
    """Dots of the bf16 program, joined by exact fused multiply-adds."""
    program = cases.program("bf16", run.implementation)

    def partials(x, w):
        return program(*cases.on_device(((x,), (w,))), np.int32(0))

    expected = cases.e4m3_oracle(name, run.problem, partials)
    different = testing.count_different_words(full, expected)
    assert different == 0, f"{different} of {full.size} words differ"
    return f"{full.size} words"


def check_program(report, run, name, counts):
    label = f"{run.problem.name} {name}"
    held = {}

    def first():
        held["full"] = run(name)
        return f"{held['full'].shape}"

    report.check(f"{label}: runs", first)
    if "full" not in held:
        return
    full = held["full"]
    report.check(f"{label}: bound", within_bound, run, name, full)
    report.check(f"{label}: rows", same_rows, run, name, full, counts)
    report.check(f"{label}: again", same_again, run, name, full)
    report.check(f"{label}: NaN", nan_stays_in_its_row, run, name, full)
    report.check(f"{label}: zeros", zeros_are_positive, run, name, full)
    if run.problem.slots > 1:
        report.check(f"{label}: slots", same_slots, run, name, full)
    if name == "nvfp4_bf16":
        report.check(f"{label}: decoded weight", decoded_weight, run, full)
    if name == "nvfp4_int8":
        report.check(f"{label}: NumPy", ordered, run, full)
    if name.startswith("e4m3") and run.implementation == "mosaic":
        report.check(f"{label}: segments", fused_segments, run, name, full)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="portable, on a CPU")
    parser.add_argument("--only", nargs="*", choices=cases.PROGRAMS, help="programs")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds")
    options = parser.parse_args()
    path = options.path
    if path is None and os.environ.get("OUT"):
        path = os.path.join(os.environ["OUT"], "kernels_check.json")
    report = Report(pathlib.Path(path) if path else None)
    implementation = "portable" if options.tiny else "mosaic"
    problems, tokens = (TINY, 9) if options.tiny else (FULL, 129)
    for name, (sizes, counts) in problems.items():
        problem = cases.make_problem(name, *sizes, tokens)
        run = Runner(problem, implementation)
        for program in options.only or cases.PROGRAMS:
            check_program(report, run, program, counts)
    if not options.tiny and not options.no_times:
        deadline = report.started + options.budget
        programs = options.only or cases.PROGRAMS
        report.check(
            "times", kernel_times.measure_all, report.times, deadline, programs
        )
    report.write()
    report.table()


if __name__ == "__main__":
    main()
