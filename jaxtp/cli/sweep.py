"""One projection on many meshes: do the words stay, and do they fit the oracle?

Nothing here prints. Programs are compiled and oracles run in a thread pool; the
compiled programs themselves run one after another.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp import formats, oracle, testing
from jaxtp.cli.control import psum_words
from jaxtp.cli.records import Result, Settings, Sweep
from jaxtp.cli.sampling import Case, Subject
from jaxtp.errors import PlanError
from jaxtp.plan import slots_per_rank

_PARALLEL = {"row": jaxtp.row_parallel, "column": jaxtp.column_parallel}
_ORACLE = {"row": oracle.row_parallel, "column": oracle.column_parallel}


@dataclasses.dataclass(frozen=True)
class _Expected:
    """The oracle's answer for one matrix: words by plan, partials, float64 value."""

    words: tuple[np.ndarray, ...]
    partials: np.ndarray | None
    value: np.ndarray
    magnitude: np.ndarray


def usable_meshes(
    sizes: Sequence[int], num_slots: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The sizes that this machine can show, and a note for each that it cannot.

    Raises:
        PlanError: If a size does not divide the slots, or none is left.
    """
    for tp in sizes:
        slots_per_rank(num_slots, tp)
    count = len(jax.devices())
    usable = tuple(sorted({tp for tp in sizes if tp <= count}))
    notes = tuple(
        f"mesh {tp} was skipped: it needs {tp} devices, and there are {count}."
        for tp in sorted({tp for tp in sizes if tp > count})
    )
    if not usable:
        raise PlanError(f"no mesh of sizes {tuple(sizes)} fits on {count} devices.")
    return usable, notes


def run(
    cases: Sequence[Case],
    settings: Settings,
    *,
    notes: Sequence[str] = (),
    advance: Callable[[], object] = lambda: None,
) -> Sweep:
    """Runs every case on every mesh.

    Args:
        cases: What to run.
        settings: What is common to them.
        notes: Passed on into the result.
        advance: Called after each case.

    Raises:
        JaxtpError: If a weight cannot be placed or multiplied.
    """
    start = time.perf_counter()
    meshes = [jaxtp.make_mesh(tp=tp) for tp in settings.meshes]
    results: list[Result] = []
    pool = concurrent.futures.ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, 8)))
    oracles: dict[tuple[str, ...], concurrent.futures.Future[_Expected]] = {}
    try:
        queue = []
        for case in cases:
            programs = [pool.submit(_compile, case, m, settings) for m in meshes]
            expected = []
            for subject in case.subjects:
                key = (
                    subject.weight.format,
                    subject.name,
                    case.activation,
                    case.operation,
                )
                if key not in oracles:
                    oracles[key] = pool.submit(_expect, subject, case, settings)
                expected.append(oracles[key])
            queue.append((case, programs, expected))
        for case, programs, expected in queue:
            compiled = [program.result() for program in programs]
            for subject, future in zip(case.subjects, expected, strict=True):
                results += _results(
                    case, subject, meshes, compiled, future.result(), settings
                )
            advance()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return Sweep(
        settings,
        jax.devices()[0].device_kind,
        tuple(notes),
        tuple(results),
        time.perf_counter() - start,
    )


def _activations(case: Case, k: int, tokens: int, settings: Settings) -> np.ndarray:
    """The first `tokens` rows of the activations that belong to K."""
    rng = np.random.default_rng([settings.seed, k])
    x = rng.standard_normal((settings.max_tokens, k), np.float32)[:tokens]
    return np.asarray(formats.round_to_bf16(x)) if case.activation == "bf16" else x


def _on_mesh(
    case: Case, subject: Subject, mesh: Mesh, settings: Settings
) -> tuple[jax.Array, jaxtp.PlacedWeight]:
    x = _activations(case, subject.weight.shape[-1], case.tokens, settings)
    placed = jaxtp.place(
        subject.weight, mesh, parallel=case.operation, plan=settings.plans[0]
    )
    return jax.device_put(x, NamedSharding(mesh, P())), placed


def _compile(case: Case, mesh: Mesh, settings: Settings) -> Any:
    """One program that computes the projection under every plan.

    Plans of one number of slots share the placement and the partials.
    """

    def every_plan(x: jax.Array, placed: jaxtp.PlacedWeight) -> tuple[jax.Array, ...]:
        return tuple(
            _PARALLEL[case.operation](
                x,
                dataclasses.replace(placed, plan=plan),
                activation=case.activation,
                implementation=settings.implementation,
            )
            for plan in settings.plans
        )

    operands = _on_mesh(case, case.subjects[0], mesh, settings)
    return jax.jit(every_plan).lower(*operands).compile()


def _expect(subject: Subject, case: Case, settings: Settings) -> _Expected:
    """The oracle, with as many ranks as the largest mesh and all tokens at once."""
    weight, plans = subject.weight, settings.plans
    x = _activations(case, weight.shape[-1], settings.max_tokens, settings)
    call = lambda plan, **more: _ORACLE[case.operation](
        x,
        weight,
        tp=settings.meshes[-1],
        plan=plan,
        activation=case.activation,
        implementation=settings.implementation,
        **more,
    )
    quantized = oracle.quantized_activation(x, weight, plans[0], case.activation)
    is_row = case.operation == "row"
    return _Expected(
        tuple(call(plan) for plan in plans),
        call(plans[0], reduce=False) if is_row else None,
        *oracle.float64(quantized, weight),
    )


def _results(
    case: Case,
    subject: Subject,
    meshes: Sequence[Mesh],
    compiled: Sequence[Any],
    expected: _Expected,
    settings: Settings,
) -> list[Result]:
    """One result for each plan."""
    runs = [
        _timed(program, *_on_mesh(case, subject, mesh, settings))
        for program, mesh in zip(compiled, meshes, strict=True)
    ]
    changed = _control(case, meshes, expected.partials, settings)
    rows = slice(0, case.tokens)
    results = []
    for i, plan in enumerate(settings.plans):
        outputs = [words[i] for words, _ in runs]
        want = expected.words[i][rows]
        depth = oracle.depth(subject.weight, plan, case.activation)
        result = Result(
            format=subject.weight.format,
            activation=case.activation,
            operation=case.operation,
            tensor=subject.name,
            shape=tuple(subject.weight.shape),
            order=plan.order,
            tokens=case.tokens,
            digests=tuple(digest(y) for y in outputs),
            same_on_meshes=all(_same(y, outputs[0]) for y in outputs),
            same_as_oracle=all(_same(y, want) for y in outputs),
            error_over_bound=testing.error_over_bound(
                outputs[-1], expected.value[rows], expected.magnitude[rows], depth
            ),
            milliseconds=tuple(1e3 * seconds for _, seconds in runs),
            psum_changed=None if changed is None else changed[i],
        )
        results.append(result)
    return results


def _timed(
    program: Any, x: jax.Array, placed: jaxtp.PlacedWeight
) -> tuple[tuple[np.ndarray, ...], float]:
    """The words of one run, and the seconds of a second one."""
    words = tuple(np.asarray(y) for y in program(x, placed))
    start = time.perf_counter()
    jax.block_until_ready(program(x, placed))
    return words, time.perf_counter() - start


def _control(
    case: Case,
    meshes: Sequence[Mesh],
    partials: np.ndarray | None,
    settings: Settings,
) -> list[tuple[float, ...]] | None:
    """For each plan, the part of the words that psum changes on each mesh."""
    if partials is None:
        return None
    by_mesh = [psum_words(partials, mesh, settings.plans) for mesh in meshes]
    rows = slice(0, case.tokens)
    return [
        tuple(
            testing.count_different_words(sums[i][rows], by_mesh[0][i][rows])
            / max(1, sums[i][rows].size)
            for sums in by_mesh
        )
        for i in range(len(settings.plans))
    ]


def _same(actual: np.ndarray, expected: np.ndarray) -> bool:
    return testing.count_different_words(actual, expected) == 0


def digest(values: np.ndarray) -> str:
    """The first twelve hexadecimal digits of the SHA-256 of an array's words."""
    words = testing.words(values)
    little = np.ascontiguousarray(words, words.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()[:12]
