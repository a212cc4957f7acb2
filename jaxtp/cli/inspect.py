"""Totals of a checkpoint's report."""

import dataclasses

from jaxtp.checkpoint import Report


@dataclasses.dataclass(frozen=True)
class Total:
    """All entries of one format."""

    format: str
    entries: int
    elements: int
    nbytes: int


def totals(report: Report) -> tuple[Total, ...]:
    """Entries, logical elements and stored bytes by format, the largest first."""
    sums: dict[str, tuple[int, int, int]] = {}
    for row in report.rows:
        elements = 1
        for extent in row.shape:
            elements *= extent
        count, all_elements, nbytes = sums.get(row.format, (0, 0, 0))
        sums[row.format] = (count + 1, all_elements + elements, nbytes + row.nbytes)
    found = [Total(format, *values) for format, values in sums.items()]
    return tuple(sorted(found, key=lambda total: (-total.nbytes, total.format)))
