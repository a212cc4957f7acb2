"""A checkpoint is written, opened without reading it, placed, and projected.

Each device's part is read from the file by itself. The result is compared word for
word with the host-bounce oracle, and with float64 against the stated bound.
"""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import tempfile

import numpy as np

import jaxtp
from jaxtp import checkpoint, oracle

EXPERTS, N, K, T = 2, 256, 1280, 3
NAME = "model.layers.1.moe.down_proj.weight"


def main():
    rng = np.random.default_rng(0)
    bank = rng.standard_normal((EXPERTS, N, K), np.float32)
    x = rng.standard_normal((T, K), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        for layout, activation in (("step_fp8", "e4m3"), ("step_nvfp4", "int8")):
            path = os.path.join(folder, layout)
            checkpoint.save(path, {NAME: bank}, layout=layout)
            show(path, x, activation)


def show(path, x, activation):
    plan = jaxtp.ReductionPlan(num_slots=8)
    with checkpoint.open(path) as ckpt:
        row = ckpt.report().rows[0]
        bank = ckpt.weight(NAME)
        assert ckpt.bytes_read == 0, "opening a checkpoint must read no tensor"
        print(f"{row.name}: {row.format} {list(row.shape)}, {row.nbytes} bytes")

        expert = bank.expert(1)
        placed = jaxtp.place(expert, jaxtp.make_mesh(tp=4), parallel="row", plan=plan)
        print(f"  one expert placed on 4 devices after reading {ckpt.bytes_read} bytes")
        y = np.asarray(jaxtp.row_parallel(x, placed, activation=activation))

        bounce = oracle.row_parallel(x, expert, tp=4, plan=plan, activation=activation)
        jaxtp.testing.assert_same_words(y, bounce, f"{activation} against the oracle")

        quantized = oracle.quantized_activation(x, expert, plan, activation)
        error = jaxtp.testing.error_over_bound(
            y,
            *oracle.float64(quantized, expert),
            oracle.depth(expert, plan, activation),
        )
        assert error <= 1.0, f"error is {error} times its bound"
        print(f"  all {y.size} words are the oracle's; error {error:.4f} of its bound")


if __name__ == "__main__":
    main()
