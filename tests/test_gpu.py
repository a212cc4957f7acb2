"""The public calls on a Hopper GPU, by the Mosaic kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLANS, PROGRAMS, activations, normal, weight
from jax import lax

import jaxtp
from jaxtp import Bf16Weight, ReductionPlan, formats, oracle, packing
from jaxtp.testing import assert_same_words, assert_within_bound

pytestmark = pytest.mark.gpu

SHAPES = ((200, 416), (64, 416), (24, 1280), (576, 1024), (3, 16))
MESHES = [n for n in (1, 2, 4, 8) if n <= len(jax.devices())]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_call_has_the_words_of_the_oracle_on_every_mesh(shape, program, plan):
    format, activation = program
    k, w = shape[1], weight(format, *shape)
    x, plan = activations(9, k, activation), PLANS[plan]
    want = oracle.row_parallel(x, w, tp=8, plan=plan, activation=activation)
    again = oracle.column_parallel(x, w, tp=4, plan=plan, activation=activation)
    assert_same_words(again, want, what="the oracle by columns")
    assert_same_words(jaxtp.project(x, w, plan=plan, activation=activation), want)
    for tp in MESHES:
        mesh = jaxtp.make_mesh(tp=tp)
        row = jaxtp.place(w, mesh, parallel="row", plan=plan)
        column = jaxtp.place(w, mesh, parallel="column", plan=plan)
        for got in (
            jaxtp.row_parallel(x, row, activation=activation),
            jaxtp.column_parallel(x, column, activation=activation),
        ):
            assert_same_words(got, want, what=f"tp={tp}")
    decoded = oracle.quantized_activation(x, w, plan, activation)
    depth = oracle.depth(w, plan, activation)
    assert_within_bound(want, *oracle.float64(decoded, w), depth)


@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
def test_contexts_change_no_word(program):
    format, activation = program
    w, x = weight(format, 200, 416), jnp.asarray(activations(5, 416, activation))
    r = jnp.asarray(normal(5, 200, seed=3))
    p = jaxtp.place(w, jaxtp.make_mesh(tp=MESHES[-1]), parallel="row")
    want = oracle.row_parallel(x, w, tp=2, activation=activation)

    def f(x, p):
        return jaxtp.row_parallel(x, p, activation=activation)

    assert_same_words(jax.jit(f)(x, p), want)
    assert_same_words(jax.jit(lambda x: f(x, p))(x), want, what="closed over")
    looped = jax.jit(lambda x, p: lax.scan(lambda c, _: (c, f(x, p)), 0, None, 3)[1])
    assert_same_words(looped(x, p)[2], want, what="scan")
    added = jax.jit(lambda x, p, r: f(x, p) + r)(x, p, r)
    assert_same_words(added, want + np.asarray(r), what="plus r")
    primal, _ = jax.vjp(lambda x: f(x, p), x)
    assert_same_words(primal, want, what="primal of a gradient")


@pytest.mark.parametrize("program", PROGRAMS, ids="-".join)
def test_a_row_keeps_its_words_whatever_stands_beside_it(program):
    format, activation = program
    w, x = weight(format, 40, 160), activations(129, 160, activation)
    whole = np.asarray(jaxtp.project(x, w, activation=activation))
    for t in (1, 7, 8, 15, 16, 31, 32, 33, 64, 65, 127, 128):
        got = jaxtp.project(x[-t:], w, activation=activation)
        assert_same_words(got, whole[-t:], what=f"last {t}")


def test_nvfp4_int8_has_the_words_of_numpy_and_of_the_portable_form():
    w, x, plan = weight("nvfp4", 200, 416), activations(5, 416, "int8"), ReductionPlan()
    partials = oracle.nvfp4_int8_partials(x, w, packing.weight_layout(w, plan))
    want = oracle.sum_slots(partials, plan) * w.global_scale
    assert_same_words(jaxtp.project(x, w, activation="int8"), want)
    cpu = jax.devices("cpu")[0]
    portable = oracle.project(
        x, w, activation="int8", implementation="portable", device=cpu
    )
    assert_same_words(portable, want, what="portable, on the host's CPU")


def test_nvfp4_bf16_has_the_words_of_bf16_on_the_decoded_weight():
    w, x = weight("nvfp4", 200, 416), activations(5, 416, "bf16")
    decoded = Bf16Weight(np.asarray(formats.nvfp4_to_bf16(w.code, w.scale)))
    got = oracle.row_parallel(x, w, activation="bf16", reduce=False)
    want = oracle.row_parallel(x, decoded, activation="bf16", reduce=False)
    assert_same_words(got, want)


def test_a_plan_of_blocks():
    w, x = weight("e4m3", 40, 1280), activations(3, 1280, "e4m3")
    plan = ReductionPlan("blocks")
    want = oracle.row_parallel(x, w, tp=10, plan=plan, activation="e4m3")
    p = jaxtp.place(w, jaxtp.make_mesh(), parallel="row", plan=plan)
    assert_same_words(jaxtp.row_parallel(x, p, activation="e4m3"), want)
