"""Sweeps mesh sizes over your own shapes and writes a CSV file.

Edit SHAPES, MODES and MESHES, then run `python examples/sweep_mesh_sizes.py out.csv`.
One line for each run: what it was, SHA-256 of its words, whether they are those of the
first mesh, and microseconds for one call (on a CPU the devices share its cores).
"""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import csv
import hashlib
import sys
import time

import jax
import ml_dtypes
import numpy as np

import jaxtp
from jaxtp import formats

SHAPES = [(576, 1280), (256, 1024)]
"""N, K."""

MODES = [("bf16", "bf16"), ("e4m3", "bf16"), ("nvfp4", "int8")]
"""Weight format, activation mode."""

MESHES = (1, 2, 4, 8)
TOKENS = 5
PLAN = jaxtp.ReductionPlan(num_slots=8, order="sequential")
REPEATS = 5

COLUMNS = (
    *("format", "activation", "N", "K", "T", "order", "tp"),
    *("sha256", "same", "microseconds"),
)


def make_weight(format, values):
    if format == "bf16":
        return jaxtp.Bf16Weight(values.astype(ml_dtypes.bfloat16))
    if format == "e4m3":
        return jaxtp.Fp8Weight(*formats.quantize_fp8_block(values))
    return jaxtp.Nvfp4Weight(*formats.quantize_nvfp4(values))


def timed(x, placed, activation):
    """The words of one call, and the median microseconds of the following ones."""
    call = lambda: jaxtp.row_parallel(x, placed, activation=activation)
    y, times = np.asarray(call()), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e6 * (time.perf_counter() - start))
    return y, sorted(times)[REPEATS // 2]


def sweep(rng):
    for n, k in SHAPES:
        values = rng.standard_normal((n, k), np.float32)
        x32 = rng.standard_normal((TOKENS, k), np.float32)
        for format, activation in MODES:
            weight = make_weight(format, values)
            x = x32.astype(ml_dtypes.bfloat16) if activation == "bf16" else x32
            first = None
            for tp in MESHES:
                mesh = jaxtp.make_mesh(tp=tp)
                placed = jaxtp.place(weight, mesh, parallel="row", plan=PLAN)
                y, microseconds = timed(x, placed, activation)
                first = y if first is None else first
                same = jaxtp.testing.count_different_words(y, first) == 0
                digest = hashlib.sha256(jaxtp.testing.words(y).tobytes()).hexdigest()
                what = (format, activation, n, k, TOKENS, PLAN.order, tp)
                yield (*what, digest, same, round(microseconds))


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else "sweep_mesh_sizes.csv"
    rows = []
    for row in sweep(np.random.default_rng(0)):
        print(*row[:7], row[7][:12], "same" if row[8] else "DIFFERENT", row[9], "us")
        rows.append(row)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    different = sum(not row[8] for row in rows)
    print(f"{len(rows)} runs, {different} with other words; written to {path}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
