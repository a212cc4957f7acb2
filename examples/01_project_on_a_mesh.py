"""One row-parallel projection on meshes of 1, 2, 4 and 8 devices: the same words.

Run it with `python examples/01_project_on_a_mesh.py`. K = 1280 does not divide into
eight equal blocks of 128 columns, and nothing special has to be said about that.
"""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import ml_dtypes
import numpy as np

import jaxtp

T, N, K = 5, 576, 1280

rng = np.random.default_rng(0)
x = rng.standard_normal((T, K)).astype(ml_dtypes.bfloat16)
weight = jaxtp.Bf16Weight(rng.standard_normal((N, K)).astype(ml_dtypes.bfloat16))
plan = jaxtp.ReductionPlan(num_slots=8, order="sequential")

results = {}
for tp in (1, 2, 4, 8):
    mesh = jaxtp.make_mesh(tp=tp)
    placed = jaxtp.place(weight, mesh, parallel="row", plan=plan)
    results[tp] = np.asarray(jaxtp.row_parallel(x, placed))
    jaxtp.testing.assert_same_words(results[tp], results[1], f"tp {tp}")

# The comparison can fail: another plan is another order of additions, so other words.
tree = jaxtp.project(x, weight, plan=jaxtp.ReductionPlan(8, "tree"))
changed = jaxtp.testing.count_different_words(tree, results[1])
assert changed > 0, "two different plans gave the same words"

print(f"y[0, 0] is {results[1][0, 0]:.6f}, word 0x{results[1].view('u4')[0, 0]:08x}")
print(f"all {T * N} words are equal on meshes {', '.join(map(str, results))}")
print(f"the plan 'tree' has {changed} other words, on every mesh alike")
