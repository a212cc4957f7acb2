"""Public reports of words that change with what a compiler sees around the call.

Shardings, scans, batching and gradients around a projection; each test names its report
and has a control that must change words.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import activations, normal, weight
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp import Bf16Weight, formats
from jaxtp.testing import assert_same_words, count_different_words

MESHES = (2, 4, 8)


def to_bf16(values):
    return np.asarray(formats.round_to_bf16(np.asarray(values, np.float32)))


def put(w, tp, parallel="row"):
    return jaxtp.place(w, jaxtp.make_mesh(tp=tp), parallel=parallel)


def ascending(partials):
    return list(itertools.accumulate(partials))[-1]


def test_a_contraction_cut_over_eight_devices_is_the_unsharded_one():
    """(1024, 2048) times (2048, 256) was not even close to the unsharded product.

    https://github.com/jax-ml/jax/issues/20694
    """
    x, w = normal(1024, 2048), weight("bf16", 256, 2048)
    want = np.asarray(jaxtp.project(x, w))
    assert_same_words(jaxtp.row_parallel(x, put(w, 8)), want)
    # Control: `jnp.dot`, its contraction cut by the compiler.
    mesh = jaxtp.make_mesh(tp=8)
    values = np.asarray(w.dequantize()).T
    cut = (
        jax.device_put(x, NamedSharding(mesh, P(None, "tp"))),
        jax.device_put(values, NamedSharding(mesh, P("tp"))),
    )
    dot = functools.partial(jnp.dot, precision="highest")
    plain, sharded = jax.jit(dot)(x, values), jax.jit(dot)(*cut)
    assert count_different_words(sharded, plain) >= 0.01 * plain.size


@pytest.mark.parametrize("format", ["bf16", "e4m3", "nvfp4"])
def test_placed_bytes_do_not_depend_on_the_mesh(format):
    """Weights made inside a sharded jit followed the mesh; placed ones are copied.

    https://github.com/jax-ml/jax/issues/21232
    """
    w = weight(format, 64, 416)
    want = jax.tree.map(np.asarray, jax.tree.leaves(put(w, 1)))
    for tp in MESHES:
        for part, first in zip(jax.tree.leaves(put(w, tp)), want, strict=True):
            assert_same_words(part, first, what=f"tp={tp}")


def test_roundings_survive_jit():
    """A compiler dropped float32 -> bf16 -> float32.

    https://github.com/openxla/xla/issues/41605
    https://github.com/jax-ml/jax/issues/23007
    """
    x = normal(16, 128)
    rounded = jax.jit(lambda x: formats.round_to_bf16(x).astype(jnp.float32))(x)
    assert_same_words(rounded, to_bf16(x).astype(np.float32))
    assert count_different_words(rounded, x) >= 0.99 * x.size
    # Three roundings of "f32" give back x itself, which one of them does not.
    one = Bf16Weight(to_bf16(np.eye(128)))
    project = jax.jit(lambda x, w: jaxtp.project(x, w))
    assert_same_words(project(x, one), x)
    assert_same_words(project(to_bf16(x), one), to_bf16(x).astype(np.float32))


def test_a_sum_inside_a_loop_is_not_moved_out_of_it():
    """All-reduce code motion: 109,628 wrong elements.

    https://github.com/openxla/xla/issues/49143
    """
    w, xs = weight("bf16", 64, 512), normal(6, 16, 512)
    p = put(w, 4)

    @jax.jit
    def loop(xs, p):
        def step(total, x):
            y = jaxtp.row_parallel(x, p)
            return total + y, y

        return lax.scan(step, jnp.zeros((16, 64), jnp.float32), xs)

    total, ys = loop(xs, p)
    unrolled = [np.asarray(jaxtp.row_parallel(x, p)) for x in xs]
    assert_same_words(ys, np.stack(unrolled))
    want = ascending([np.zeros((16, 64), np.float32), *unrolled])
    assert_same_words(total, want)
    # Control: partials are added over the steps, and over the ranks at the end.
    partials = [np.asarray(jaxtp.row_parallel(x, p, reduce=False)) for x in xs]
    moved = ascending(ascending(partials))
    assert count_different_words(moved, want) >= 0.01 * want.size


def test_no_output_sharding_chooses_another_sum():
    """Four output shardings of one product, four results.

    https://github.com/tenstorrent/tt-xla/issues/902
    """
    x, w = normal(16, 512), weight("bf16", 64, 512)
    p = put(w, 4)
    want = np.asarray(jaxtp.project(x, w))
    for spec in (P(), P("tp"), P(None, "tp")):
        run = jax.jit(
            lambda x, p: jaxtp.row_parallel(x, p),
            out_shardings=NamedSharding(p.mesh, spec),
        )
        y = run(x, p)
        assert y.sharding.spec == spec
        assert_same_words(y, want, what=str(spec))
    # Control: a sum over ranks first, as a reduce-scatter of `jnp.dot` has it.
    partials = np.asarray(jaxtp.row_parallel(x, p, reduce=False))
    ranks = partials[::2] + partials[1::2]
    assert count_different_words(ascending(ranks), want) >= 0.01 * want.size


@pytest.mark.parametrize(
    "program", [("bf16", "bf16"), ("e4m3", "e4m3"), ("nvfp4", "int8")], ids="-".join
)
def test_batching_by_vmap_changes_no_word(program):
    """A batch of one under `vmap` had other words than the eager call, on CPU.

    https://github.com/jax-ml/jax/issues/38768
    """
    format, activation = program
    x, w = activations(6, 512, activation), weight(format, 64, 512)
    project = functools.partial(jaxtp.project, weight=w, activation=activation)
    want = np.asarray(project(x))
    for shape in ((1, 6), (6, 1)) if format == "bf16" else ((6, 1),):
        y = jax.vmap(project)(jnp.asarray(x.reshape(*shape, 512)))
        assert_same_words(np.asarray(y).reshape(6, 64), want, what=f"vmap {shape}")
    # Control: `jnp.dot` of vectors, under `vmap` and one by one.
    x, values = normal(6, 512), normal(512, 512, seed=1)
    eager = np.stack([np.asarray(jnp.dot(row, values)) for row in x])
    batched = jax.vmap(lambda row: jnp.dot(row, values))(x)
    assert count_different_words(batched, eager) >= 0.01 * eager.size


def small_integers(*shape, seed):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames="project")
def input_gradient(x, p, cotangent, *, project):
    return jax.vjp(lambda x: project(x, p), x)[1](cotangent)[0]


CUTS = {"row": jaxtp.row_parallel, "column": jaxtp.column_parallel}


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("cut", list(CUTS))
def test_gradients_of_sparse_cotangents_reach_every_rank(cut, tp):
    """A missing all-reduce, and one after a slice.

    https://github.com/openxla/xla/issues/42481
    https://github.com/openxla/xla/issues/40034
    """
    values = small_integers(256, 512, seed=0)
    x = to_bf16(small_integers(4, 512, seed=1))
    dy = np.zeros((4, 256), np.float32)
    dy[2, [3, 130, 255]] = 2, -3, 5
    p = put(Bf16Weight(to_bf16(values)), tp, cut)
    dx = input_gradient(x, p, dy, project=CUTS[cut])
    # Integers up to 40: exact in bf16 whatever the order.
    assert_same_words(dx, to_bf16(dy @ values + np.float32(0)))
    # Control: the part of the first half of the rows alone.
    part = to_bf16(dy[:, :128] @ values[:128])
    assert count_different_words(part, to_bf16(dy @ values)) >= 0.01 * part.size


@pytest.mark.parametrize("tp", [2, 8])
def test_gradients_are_added_in_float32_and_rounded_last(tp):
    """257 + 1 is 258; with bf16 partials it is 256.

    https://github.com/jax-ml/jax/issues/27496
    """
    p = put(Bf16Weight(to_bf16(np.ones((256, 512)))), tp, "column")
    dy = np.zeros((4, 256), np.float32)
    dy[:, 0], dy[:, 128] = 257, 1
    x = to_bf16(np.ones((4, 512)))
    dx = input_gradient(x, p, dy, project=jaxtp.column_parallel)
    assert_same_words(dx, to_bf16(np.full((4, 512), 258)))
    lowered = input_gradient.lower(x, p, dy, project=jaxtp.column_parallel).as_text()
    moves = [line for line in lowered.splitlines() if "collective_permute" in line]
    assert moves
    assert all("f32>" in line for line in moves)
    early = to_bf16(to_bf16([257]).astype(np.float32) + to_bf16([1]).astype(np.float32))
    assert early == 256


def test_36_layers_end_in_one_scalar_at_every_size():
    """A reward model's loss moved from 0.6035 to 0.5864 with the number of ranks.

    https://github.com/NVIDIA-NeMo/RL/pull/1767
    https://github.com/ndif-team/nnsight/issues/631
    """
    weights = [Bf16Weight(to_bf16(normal(256, 256, seed=i) / 16)) for i in range(36)]
    x = normal(8, 256, seed=99)

    def stack(tp, add):
        h = x
        for i, w in enumerate(weights):
            p = put(w, tp, ("column", "row")[i % 2])
            h = add(h, p) if i % 2 else jaxtp.column_parallel(h, p, gather=False)
        return np.asarray(h)

    def by_rank(h, p):
        partials = np.asarray(jaxtp.row_parallel(h, p, reduce=False))
        return ascending([ascending(part) for part in np.split(partials, p.mesh.size)])

    want = stack(1, jaxtp.row_parallel)
    for tp in MESHES:
        y = stack(tp, jaxtp.row_parallel)
        assert_same_words(y, want, what=f"tp={tp}")
        assert y.sum(dtype=np.float64) == want.sum(dtype=np.float64)
    # Control: each rank adds its own slots before the ranks are added.
    other = stack(4, by_rank)
    assert count_different_words(other, want) >= 0.01 * want.size
    assert other.sum(dtype=np.float64) != want.sum(dtype=np.float64)
