"""One program, whatever the mesh, the cut, the context and the transport."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from allpairspy import AllPairs
from cases import PLANS, PROGRAMS, activations, normal, weight
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp import oracle
from jaxtp.testing import assert_same_words, assert_within_bound

T, N, K = 5, 200, 416


def row(x, p, **options):
    return jaxtp.row_parallel(x, p, **options)


def row_chain(x, p, **options):
    return jaxtp.row_parallel(x, p, schedule="chain", **options)


def column(x, p, **options):
    return jaxtp.column_parallel(x, p, **options)


def replicated(x, p, **options):
    return jaxtp.project(x, p, **options)


def row_local(x, p, *, activation):
    def local(x, p):
        return jaxtp.row_parallel_local(x, p, axis_name="tp", activation=activation)

    x = jnp.pad(x, ((0, 0), (0, p.layout.padded - x.shape[1])))
    x = _put(x, p.mesh, P(None, "tp"))
    return jax.shard_map(
        local,
        mesh=p.mesh,
        in_specs=(P(None, "tp"), p.specs()),
        out_specs=P(),
        check_vma=False,
    )(x, p)


def column_local(x, p, *, activation):
    def local(x, p):
        return jaxtp.column_parallel_local(x, p, axis_name="tp", activation=activation)

    return jax.shard_map(
        local,
        mesh=p.mesh,
        in_specs=(P(), p.specs()),
        out_specs=P(),
        check_vma=False,
    )(_put(x, p.mesh, P()), p)


def _put(x, mesh, spec):
    sharding = jax.sharding.NamedSharding(mesh, spec)
    if AxisType.Explicit in mesh.axis_types and isinstance(x, jax.core.Tracer):
        return jax.sharding.reshard(x, sharding)
    return jax.device_put(x, sharding)


OPS = {
    "row": (row, "row"),
    "row_chain": (row_chain, "row"),
    "row_local": (row_local, "row"),
    "column": (column, "column"),
    "column_local": (column_local, "column"),
    "replicated": (replicated, "replicated"),
}


def eager(f, x, p, r):
    return f(x, p)


def jit(f, x, p, r):
    return jax.jit(f)(x, p)


def jit_closed_over(f, x, p, r):
    return jax.jit(lambda x: f(x, p))(x)


def jit_all_closed_over(f, x, p, r):
    return jax.jit(lambda: f(x, p))()


def scan(f, x, p, r):
    steps = jax.jit(lambda x, p: lax.scan(lambda c, _: (c, f(x, p)), 0, None, 3)[1])
    return steps(x, p)[1]


def primal_of_gradient(f, x, p, r):
    def loss(x):
        y = f(x, p)
        return jnp.sum(y * r), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(x)[0][1]


def plus_r(f, x, p, r):
    """The result with `r` added in the same jit; the caller adds `r` eagerly."""
    return jax.jit(lambda x, p, r: f(x, p) + r)(x, p, r)


CONTEXTS = {
    "eager": eager,
    "jit": jit,
    "jit_closed_over": jit_closed_over,
    "jit_all_closed_over": jit_all_closed_over,
    "scan": scan,
    "primal_of_gradient": primal_of_gradient,
    "plus_r": plus_r,
}
AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
FACTORS = [
    list(PROGRAMS),
    list(OPS),
    [1, 2, 4, 8],
    list(PLANS),
    list(CONTEXTS),
    list(AXIS_TYPES),
]


def legal(values: list[Any]) -> bool:
    """`*_local` forms have no gradient, and a tree has no chain."""
    op = values[1] if len(values) > 1 else ""
    plan = values[3] if len(values) > 3 else ""
    context = values[4] if len(values) > 4 else ""
    return not (
        (op.endswith("local") and context == "primal_of_gradient")
        or (op == "row_chain" and plan == "tree")
    )


@functools.cache
def expected(format: str, activation: str, plan: str) -> np.ndarray:
    """The oracle with four ranks."""
    return oracle.row_parallel(
        activations(T, K, activation),
        weight(format, N, K),
        tp=4,
        plan=PLANS[plan],
        activation=activation,
    )


def check(program, op, tp, plan, context, axis_types):
    format, activation = program
    f, parallel = OPS[op]
    mesh = jaxtp.make_mesh(tp=tp, axis_types=AXIS_TYPES[axis_types])
    p = jaxtp.place(weight(format, N, K), mesh, parallel=parallel, plan=PLANS[plan])
    x, r = activations(T, K, activation), normal(T, N, seed=3)
    x, r = (_put(jnp.asarray(a), mesh, P()) for a in (x, r))
    f = functools.partial(f, activation=activation)
    y = np.asarray(CONTEXTS[context](f, x, p, r))
    want = expected(format, activation, plan)
    if context == "plus_r":
        want = want + np.asarray(r)
    assert_same_words(y, want, what=f"{program} {op} tp={tp} {plan} {context}")


def ident(values) -> str:
    (format, activation), *rest = values
    return "-".join([format, activation, *map(str, rest)])


PAIRWISE = [tuple(v) for v in AllPairs(FACTORS, filter_func=legal)]
PRODUCT = [v for v in itertools.product(*FACTORS) if legal(list(v))]


@pytest.mark.parametrize("values", PAIRWISE, ids=map(ident, PAIRWISE))
def test_every_pair_of_choices_gives_the_words_of_the_oracle(values):
    check(*values)


@pytest.mark.full
@pytest.mark.parametrize("values", PRODUCT, ids=map(ident, PRODUCT))
def test_every_choice_gives_the_words_of_the_oracle(values):
    check(*values)


@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
def test_the_oracle_gives_one_set_of_words_at_every_rank_count(program):
    format, activation = program
    x, w = activations(T, K, activation), weight(format, N, K)
    want = expected(format, activation, "sequential")
    for tp in (1, 2, 8):
        got = oracle.row_parallel(x, w, tp=tp, activation=activation)
        assert_same_words(got, want, what=f"oracle.row_parallel tp={tp}")
        got = oracle.column_parallel(x, w, tp=tp, activation=activation)
        assert_same_words(got, want, what=f"oracle.column_parallel tp={tp}")
    assert_same_words(oracle.project(x, w, activation=activation), want)
    assert_same_words(jaxtp.project(x, w, activation=activation), want)


@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
def test_partials_are_those_of_the_oracle_and_sharded_by_slot(program):
    format, activation = program
    x, w = activations(T, K, activation), weight(format, N, K)
    p = jaxtp.place(w, jaxtp.make_mesh(tp=8), parallel="row")
    got = jaxtp.row_parallel(x, p, activation=activation, reduce=False)
    want = oracle.row_parallel(x, w, tp=2, activation=activation, reduce=False)
    assert_same_words(got, want, what="partials")
    assert {s.data.shape for s in got.addressable_shards} == {(1, T, N)}


@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
def test_a_sharded_column_output_is_slot_layout_with_zero_padding(program):
    format, activation = program
    x, w = activations(T, K, activation), weight(format, N, K)
    p = jaxtp.place(w, jaxtp.make_mesh(tp=4), parallel="column")
    y = jaxtp.column_parallel(x, p, activation=activation, gather=False)
    assert y.shape == (T, 8 * 32)
    assert {s.data.shape for s in y.addressable_shards} == {(T, 64)}
    want = oracle.column_parallel(x, w, tp=2, activation=activation, gather=False)
    assert_same_words(y, want)
    assert_same_words(np.asarray(y)[:, N:], np.zeros((T, 256 - N), np.float32))


def test_a_column_output_feeds_a_row_weight_of_equal_slots():
    up, down = weight("e4m3", N, K), weight("e4m3", K, N, seed=9)
    x = activations(T, K, "e4m3")
    want = oracle.row_parallel(
        oracle.project(x, up, activation="e4m3"), down, activation="e4m3"
    )
    for tp in (1, 2, 4, 8):
        mesh = jaxtp.make_mesh(tp=tp)
        a = jaxtp.place(up, mesh, parallel="column")
        b = jaxtp.place(down, mesh, parallel="row")
        hidden = jaxtp.column_parallel(x, a, activation="e4m3", gather=False)
        y = jaxtp.row_parallel(hidden, b, activation="e4m3")
        assert_same_words(y, want, what=f"two layers at tp={tp}")


def test_every_device_holds_the_same_words():
    x, w = activations(T, K, "bf16"), weight("bf16", N, K)
    p = jaxtp.place(w, jaxtp.make_mesh(tp=8), parallel="row")
    for shard in jaxtp.row_parallel(x, p).addressable_shards:
        assert_same_words(shard.data, expected("bf16", "bf16", "sequential"))


def test_the_order_of_devices_in_the_mesh_changes_no_word():
    devices = [jax.devices()[i] for i in (5, 2, 7, 0, 3, 6, 1, 4)]
    x, w = activations(T, K, "e4m3"), weight("e4m3", N, K)
    for plan in PLANS:
        p = jaxtp.place(
            w,
            jaxtp.make_mesh(tp=8, devices=devices),
            parallel="row",
            plan=PLANS[plan],
        )
        y = jaxtp.row_parallel(x, p, activation="e4m3")
        assert_same_words(y, expected("e4m3", "e4m3", plan))


@pytest.mark.parametrize("axis_types", AXIS_TYPES)
@pytest.mark.parametrize("op", ["row", "column", "replicated"])
def test_x_may_lie_on_the_mesh_in_any_way(op, axis_types):
    f, parallel = OPS[op]
    mesh = jaxtp.make_mesh(tp=4, axis_types=AXIS_TYPES[axis_types])
    w = weight("e4m3", N, K)
    p = jaxtp.place(w, mesh, parallel=parallel)
    x = activations(8, K, "e4m3")
    want = oracle.project(x, w, activation="e4m3")
    value = np.asarray(w.dequantize(), np.float64).sum(0)
    for spec in (P(), P("tp"), P(None, "tp")):
        on_mesh = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

        def loss(x):
            y = f(x, p, activation="e4m3")
            return y.sum(), y

        (_, y), dx = jax.jit(jax.value_and_grad(loss, has_aux=True))(on_mesh)
        assert_same_words(y, want, what=f"{op} {spec}")
        # Every cotangent is 1: dx is a sum of N weights, whatever the token.
        magnitude = np.abs(np.asarray(w.dequantize(), np.float64)).sum(0)
        assert_within_bound(dx, value[None], magnitude[None], depth=2 * N)
