"""An MLP inside a user's own `shard_map` and `jit`, with its residual addition.

The hidden activations never leave their rank: `gather=False` returns them in slot
layout, which a row-parallel weight of as many slots takes. On every mesh the compiled
program gives the words of one device that works step by step.
"""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxtp

T, HIDDEN, WIDTH = 4, 256, 1280
PLAN = jaxtp.ReductionPlan(num_slots=8)


def mlp_local(x, up, down):
    """What one rank does: `x + down(relu(up(x)))`."""
    hidden = jaxtp.column_parallel_local(x, up, axis_name="tp", gather=False)
    hidden = jnp.maximum(hidden, jnp.float32(0)).astype(jnp.bfloat16)
    # row_parallel_local would add the slots itself; here it leaves that to us.
    partials = jaxtp.row_parallel_local(hidden, down, axis_name="tp", reduce=False)
    y = jaxtp.ordered_sum(partials, "tp", PLAN)
    return x.astype(jnp.float32) + y


@jax.jit
def mlp(x, up, down):
    """The whole arrays' view of `mlp_local`."""
    mapped = jax.shard_map(
        mlp_local,
        mesh=up.mesh,
        in_specs=(P(), up.specs(), down.specs()),
        out_specs=P(),
        check_vma=False,
    )
    return mapped(x, up, down)


def on_mesh(tp, x, up, down):
    mesh = jaxtp.make_mesh(tp=tp)
    up = jaxtp.place(up, mesh, parallel="column", plan=PLAN)
    down = jaxtp.place(down, mesh, parallel="row", plan=PLAN)
    x = jax.device_put(x, jax.NamedSharding(mesh, P()))
    return np.asarray(mlp(x, up, down))


def main():
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(
        ml_dtypes.bfloat16
    )
    x = draw(T, HIDDEN)
    up = jaxtp.Bf16Weight(draw(WIDTH, HIDDEN))
    down = jaxtp.Bf16Weight(draw(HIDDEN, WIDTH))

    # The same on one device, step by step.
    hidden = jaxtp.project(x, up, plan=PLAN)
    hidden = jnp.maximum(hidden, jnp.float32(0)).astype(jnp.bfloat16)
    y = jaxtp.project(hidden, down, plan=PLAN)
    expected = np.asarray(x.astype(np.float32) + y)

    for tp in (1, 2, 4, 8):
        y = on_mesh(tp, x, up, down)
        jaxtp.testing.assert_same_words(y, expected, f"tp {tp}")
        print(f"tp {tp}: all {expected.size} words equal")


if __name__ == "__main__":
    main()
