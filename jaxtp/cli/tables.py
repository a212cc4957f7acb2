"""Records as rich tables."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from jaxtp.checkpoint import Report
from jaxtp.checkpoint.report import COLUMNS
from jaxtp.cli.inspect import totals
from jaxtp.cli.plan import Cut, Forecast, same_but_numbers
from jaxtp.cli.records import Result, Sweep

DIGEST = 8
"""Hexadecimal digits of a digest in a table."""


def sweep_table(sweep: Sweep) -> Table:
    """One line for each result: words on each mesh, the checks, and the control."""
    meshes = sweep.settings.meshes
    table = _table(
        *("format", "x", "cut", "matrix", "N x K", "plan", ">T"),
        *(f"words, tp {tp}" for tp in meshes),
        *("= meshes", "= oracle", ">error/bound", ">ms"),
        *(f">psum % tp {tp}" for tp in meshes[1:]),
    )
    for result in sweep.results:
        table.add_row(
            *_identity(result),
            *(digest[:DIGEST] for digest in result.digests),
            _verdict(result.same_on_meshes),
            _verdict(result.same_as_oracle),
            f"{result.error_over_bound:.4f}",
            f"{result.milliseconds[-1]:.1f}",
            *psum_cells(result, len(meshes) - 1),
            style=None if result.ok else "red",
        )
    return table


def _identity(result: Result) -> tuple[str, ...]:
    return (
        result.format,
        result.activation,
        result.operation,
        short_name(result.tensor),
        "x".join(map(str, result.shape)),
        result.order,
        str(result.tokens),
    )


def psum_cells(result: Result, columns: int) -> list[str]:
    """Percentages on the meshes beyond the first; dashes where psum takes no part."""
    if result.psum_changed is None:
        return ["-"] * columns
    return [f"{100 * fraction:.1f}" for fraction in result.psum_changed[1:]]


def short_name(name: str) -> str:
    """A weight's name without the parts that all names share."""
    return name.removeprefix("model.").replace(".weight", "")


def _verdict(good: bool) -> str:
    return "yes" if good else "NO"


def report_table(report: Report) -> Table:
    """One line for each weight and unquantized tensor."""
    table = _table(*COLUMNS)
    for row in report.rows:
        table.add_row(*row.cells(), style="red" if row.problem else None)
    return table


def totals_table(report: Report) -> Table:
    """One line for each format."""
    table = _table("format", ">entries", ">elements", ">bytes")
    for total in totals(report):
        cells = (total.entries, total.elements, total.nbytes)
        table.add_row(total.format, *(f"{cell:,}" for cell in cells))
    return table


def forecast_table(forecast: Forecast, *, each: bool) -> Table:
    """Bytes a device and split scale blocks.

    Args:
        forecast: The forecast.
        each: Whether every tensor gets its own line; otherwise tensors that differ in
            the numbers of their names share one.
    """
    table = _table(
        *("tensor", ">count", "format", "shape", ">row B/device", ">column B/device"),
        *(">expert B/device", ">slot", ">segments", ">K blocks split"),
        *(">N blocks split", "placement"),
    )
    groups = (
        [(line.row.name, [line]) for line in forecast.lines]
        if each
        else same_but_numbers(forecast.lines)
    )
    for name, members in groups:
        line = members[0]
        head = (name, str(len(members)), line.row.format, str(list(line.row.shape)))
        if line.problem:
            table.add_row(*head, *[""] * 7, "problem", style="red")
        elif line.cut:
            table.add_row(*head, *_cut_cells(line.cut), "cut")
        else:
            held = f"{line.row.nbytes:,}"
            table.add_row(*head, held, held, *[""] * 5, "whole on every device")
    return table


def _cut_cells(cut: Cut) -> Sequence[str]:
    return (
        f"{cut.row_bytes:,}",
        f"{cut.column_bytes:,}",
        "" if cut.expert_bytes is None else f"{cut.expert_bytes:,}",
        str(cut.slot_width),
        "" if cut.segments is None else str(cut.segments),
        *(
            "{} of {}".format(*s) if s else ""
            for s in (cut.row_split, cut.column_split)
        ),
    )


def _split(counts: tuple[int, int] | None) -> str:
    return "{} of {}".format(*counts) if counts else ""


def forecast_totals(forecast: Forecast) -> list[str]:
    """The sums over all tensors, as lines of text."""
    rows = sum(cut.row_bytes for cut in forecast.cuts)
    columns = sum(cut.column_bytes for cut in forecast.cuts)
    whole = forecast.whole_bytes
    kept = len(forecast.lines) - len(forecast.cuts)
    slots = forecast.plan.num_slots
    return [
        f"tp {forecast.tp}, {slots} slots of K, {forecast.out_slots} slots of N",
        f"{len(forecast.cuts)} tensors are cut, {kept} are held whole",
        f"all by row:    {rows + whole:,} bytes a device ({whole:,} of them whole)",
        f"all by column: {columns + whole:,} bytes a device ({whole:,} of them whole)",
    ]


def _table(*columns: str) -> Table:
    """An empty table; a column whose name starts with ">" is set to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        side = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=side, overflow="fold")
    return table
