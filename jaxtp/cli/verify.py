"""Reads every value of a checkpoint, and says how far it has got."""

import concurrent.futures
from collections.abc import Callable

from jaxtp.checkpoint import Checkpoint, Report

_POLL_SECONDS = 0.1


def bytes_to_check(report: Report) -> int:
    """Stored bytes of the quantized weights, whose values are checked."""
    return sum(row.nbytes for row in report.rows if row.format in ("e4m3", "nvfp4"))


def check_values(
    ckpt: Checkpoint, advance_to: Callable[[int], object] = lambda done: None
) -> Report:
    """The report with every weight read and its values checked.

    Args:
        ckpt: An open checkpoint.
        advance_to: Called now and then, and at the end, with the bytes read so far.
    """
    before = ckpt.bytes_read
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        report = pool.submit(ckpt.report, values=True)
        while not report.done():
            concurrent.futures.wait([report], timeout=_POLL_SECONDS)
            advance_to(ckpt.bytes_read - before)
    advance_to(ckpt.bytes_read - before)
    return report.result()
