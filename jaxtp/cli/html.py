"""A sweep as one self-contained page: a table and three plots, nothing to load."""

import html
import importlib
import io
import re
from collections.abc import Callable
from typing import Any

from jaxtp.cli.records import Result, Sweep
from jaxtp.cli.tables import psum_cells, short_name
from jaxtp.errors import UnsupportedError

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem;
  padding: 0 1rem; color: #1a1a1a; background: #fff; }
figure { margin: 1.5rem 0; } figcaption { color: #555; }
svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; }
th, td { padding: 2px 10px; text-align: left; border-bottom: 1px solid #ddd; }
td.word { font-family: ui-monospace, monospace; }
td.number { text-align: right; } tr.bad { background: #fdd; }
.ok { color: #060; } .failed { color: #a00; }
"""


def require_matplotlib() -> Any:
    """The module `matplotlib.figure`.

    Raises:
        UnsupportedError: If matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError(
            "`--html` draws its plots with matplotlib, which is not installed; install "
            "the extra: pip install 'jaxtp[plots]'."
        ) from error


def page(sweep: Sweep) -> str:
    """The whole page.

    Args:
        sweep: The results to show.

    Raises:
        UnsupportedError: If matplotlib is not installed.
    """
    figures = (
        _figure(
            "Words that change against the first mesh. Ordered sums change none.",
            lambda axes: _draw_changes(axes, sweep),
        ),
        _figure(
            "Worst error against float64, as a part of its bound.",
            lambda axes: _draw_errors(axes, sweep),
        ),
        _figure(
            "One run of a program with all plans, one point for each result.",
            lambda axes: _draw_times(axes, sweep),
        ),
    )
    state = "ok" if sweep.ok else "failed"
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in sweep.notes)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>jaxtp sweep</title><style>{STYLE}</style></head><body>"
        f'<h1>jaxtp sweep</h1><p class="{state}">{html.escape(sweep.summary)}</p>'
        f"<p>{html.escape(sweep.device)}, meshes "
        f"{', '.join(map(str, sweep.settings.meshes))}, seed {sweep.settings.seed}</p>"
        f"{''.join(figures)}{_table(sweep)}{notes}</body></html>\n"
    )


def _table(sweep: Sweep) -> str:
    meshes = sweep.settings.meshes
    heads = (
        *("format", "x", "cut", "matrix", "N x K", "plan", "T"),
        *(f"words, tp {tp}" for tp in meshes),
        *("= meshes", "= oracle", "error/bound"),
        *(f"ms, tp {tp}" for tp in meshes),
        *(f"psum %, tp {tp}" for tp in meshes[1:]),
    )
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    rows = "".join(_row(result, len(meshes)) for result in sweep.results)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(result: Result, meshes: int) -> str:
    cells = [
        ("", result.format),
        ("", result.activation),
        ("", result.operation),
        ("", short_name(result.tensor)),
        ("", "x".join(map(str, result.shape))),
        ("", result.order),
        ("number", str(result.tokens)),
        *(("word", digest) for digest in result.digests),
        ("", "yes" if result.same_on_meshes else "NO"),
        ("", "yes" if result.same_as_oracle else "NO"),
        ("number", f"{result.error_over_bound:.4f}"),
        *(("number", f"{ms:.2f}") for ms in result.milliseconds),
        *(("number", cell) for cell in psum_cells(result, meshes - 1)),
    ]
    kind = "" if result.ok else ' class="bad"'
    body = "".join(f'<td class="{c}">{html.escape(text)}</td>' for c, text in cells)
    return f"<tr{kind}>{body}</tr>"


def _figure(caption: str, draw: Callable[[Any], None]) -> str:
    figure = require_matplotlib().Figure(figsize=(9, 3.6), layout="constrained")
    draw(figure.add_subplot())
    text = io.StringIO()
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": caption}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    # The prolog names a DTD and the metadata a vocabulary, both by URL.
    svg = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg") :]
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _draw_changes(axes: Any, sweep: Sweep) -> None:
    """Bars for each mesh: ordered sums, and psum under each plan."""
    meshes = sweep.settings.meshes
    orders = [plan.order for plan in sweep.settings.plans]
    series = {"ordered sum": [_changed_words(sweep, i) for i in range(len(meshes))]}
    for order in orders:
        fractions = [
            r.psum_changed
            for r in sweep.results
            if r.order == order and r.psum_changed is not None
        ]
        series[f"psum, slots {order}"] = [
            100 * sum(f[i] for f in fractions) / max(1, len(fractions))
            for i in range(len(meshes))
        ]
    width = 0.8 / len(series)
    for j, (label, heights) in enumerate(series.items()):
        places = [i + (j - (len(series) - 1) / 2) * width for i in range(len(meshes))]
        bars = axes.bar(places, heights, width, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(meshes)), [f"tp {tp}" for tp in meshes])
    axes.set_ylabel("% of words")
    axes.margins(y=0.15)
    axes.legend()


def _changed_words(sweep: Sweep, mesh: int) -> float:
    """Percentage of results whose words on one mesh are not those on the first."""
    different = sum(r.digests[mesh] != r.digests[0] for r in sweep.results)
    return 100 * different / max(1, len(sweep.results))


def _by_mode(sweep: Sweep) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in sweep.results:
        label = f"{result.format} x {result.activation}"
        groups.setdefault(label, []).append(result)
    return groups


def _draw_errors(axes: Any, sweep: Sweep) -> None:
    groups = _by_mode(sweep)
    for i, results in enumerate(groups.values()):
        errors = [max(r.error_over_bound, 1e-6) for r in results]
        axes.plot([i] * len(errors), errors, "o", alpha=0.5)
    axes.axhline(1.0, color="0.3", linestyle="--", label="bound")
    axes.set_yscale("log")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel("error / bound")
    axes.legend()


def _draw_times(axes: Any, sweep: Sweep) -> None:
    meshes = sweep.settings.meshes
    groups = _by_mode(sweep)
    step = 0.7 / max(1, len(groups))
    for j, (label, results) in enumerate(groups.items()):
        places = [i + (j - len(groups) / 2) * step for i in range(len(meshes))]
        points = [(p, r.milliseconds[i]) for r in results for i, p in enumerate(places)]
        axes.plot(*zip(*points, strict=True), ".", label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(meshes)), [f"tp {tp}" for tp in meshes])
    axes.set_ylabel("ms")
    axes.legend(fontsize=8, ncols=2)
