"""SwiGLU: the stated values of each form, its words everywhere, and its refusals."""

from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp import oracle, swiglu
from jaxtp.activation import exponential
from jaxtp.errors import ConfigError, DtypeError, ShapeError
from jaxtp.rounding import runtime_zeros
from jaxtp.testing import UNIT, assert_same_words, count_different_words

FORMS = (
    ("plain", None),
    ("step", None),
    ("step", 7.0),
    ("deepseek_v4", 10.0),
    ("gpt_oss", 7.0),
)
STATED = (
    # form, limit, gate, up, value as stated
    ("plain", None, 1.0, 2.0, "1.4621172"),
    ("plain", None, 2.0, 3.0, "5.2847825"),
    ("step", None, 2.0, 3.0, "5.2847825"),
    ("plain", None, 10.0, 20.0, "199.99092"),
    ("plain", None, 5.0, -8.0, "-39.732286"),
    ("step", 7.0, 20.0, 9.0, "49.0"),
    ("step", 7.0, 20.0, -9.0, "-49.0"),
    ("step", 7.0, 3.5, -8.0, "-23.78185"),
    ("step", 7.0, 10.0, 20.0, "49.0"),
    ("step", 16.0, 10.0, 20.0, "159.99274"),
    ("step", 7.0, 10.0, 3.0, "21.0"),
    ("deepseek_v4", 7.0, 10.0, 3.0, "20.980868"),
    ("deepseek_v4", 7.0, -20.0, -9.0, "2.8856e-07"),
    ("step", 7.0, 5.0, -8.0, "-34.765750"),
    ("deepseek_v4", 7.0, 5.0, -8.0, "-34.765750"),
    ("gpt_oss", 7.0, 5.0, -8.0, "-29.993958"),
    ("gpt_oss", None, 1.0, 0.0, "0.8457958"),
    ("gpt_oss", 7.0, 1.0, 0.0, "0.8457958"),
)


def in_float64(gate, up, limit, form):
    """The value of a form, and the bound on the relative error of its program.

    `exponential` is within 2 units; `1 + e`, the division and the product add one each.
    gpt-oss adds one for `u + 1`, and its exponent is off by half a unit of alpha and
    one of the product.
    """
    g, u = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    bound = np.inf if limit is None else limit
    g = g if form == "step" else np.minimum(g, bound)
    u = np.clip(u, -bound, bound)
    slope = 1.702 * g if form == "gpt_oss" else g
    silu = g / (1 + np.exp(-slope))
    if form == "step":
        silu = np.minimum(silu, bound)
    if form != "gpt_oss":
        return silu * u, 5 * UNIT
    return silu * (u + 1), (6 + 1.5 * np.abs(slope)) * UNIT


def operands(size=4099):
    return 8 * normal(size), 8 * normal(size, seed=1)


@pytest.mark.parametrize(("form", "limit", "gate", "up", "stated"), STATED)
def test_each_form_gives_its_stated_value(form, limit, gate, up, stated):
    actual = swiglu(jnp.float32([gate]), jnp.float32([up]), limit, form)
    value, bound = in_float64(gate, up, limit, form)
    assert abs(float(actual[0]) - value) <= bound * abs(value) * 1.001
    last_digit = 10.0 ** int(Decimal(stated).as_tuple().exponent)
    assert abs(value - float(stated)) <= last_digit, "as printed"
    assert_same_words(actual, oracle.swiglu([_f(gate)], [_f(up)], limit, form))


def _f(value):
    return np.float32(value)


def test_the_forms_differ_where_the_field_confuses_them():
    one = lambda gate, up, limit, form: float(
        swiglu(jnp.float32([gate]), jnp.float32([up]), limit, form)[0]
    )
    assert one(10, 20, 7.0, "step") != one(10, 20, None, "step")
    assert one(10, 3, 7.0, "step") != one(10, 3, 7.0, "deepseek_v4")
    assert abs(one(-20, -9, 7.0, "deepseek_v4")) < 1e-6, "no lower clamp of the gate"
    assert one(1, 0, None, "plain") == 0.0 != one(1, 0, None, "gpt_oss")
    assert abs(one(-20, 9, 7.0, "step")) < abs(one(-20, 9, None, "plain"))


@pytest.mark.parametrize(("form", "limit"), FORMS)
def test_words_are_those_of_numpy_and_within_the_bound(form, limit):
    gate, up = operands()
    actual = np.asarray(swiglu(gate, up, limit, form))
    assert_same_words(actual, oracle.swiglu(gate, up, limit, form), form)
    value, bound = in_float64(gate, up, limit, form)
    # u + 1 may cancel, exactly only up to the rounding that is in the bound.
    assert np.all(np.abs(actual - value) <= 1.001 * bound * np.abs(value))


def test_the_exponential_is_within_two_units_and_never_subnormal():
    x = np.linspace(-86, 88.72, 400_001).astype(np.float32)
    fast = jax.jit(lambda x: exponential(x, runtime_zeros(x)))
    actual = np.asarray(fast(x))
    assert_same_words(actual, oracle.exponential(x))
    value = np.exp(x.astype(np.float64))
    assert np.max(np.abs(actual - value) / value) <= 2 * UNIT
    edge = np.float32([-np.inf, -200, -86.1, 0, -0.0, 88.8, 500, np.inf, np.nan])
    expected = np.float32([0, 0, 0, 1, 1, np.inf, np.inf, np.inf, np.nan])
    assert_same_words(fast(edge), expected)
    assert_same_words(oracle.exponential(edge), expected)


@pytest.mark.parametrize(("form", "limit"), FORMS)
def test_words_do_not_depend_on_shape_position_or_compilation(form, limit):
    gate, up = operands(263)
    want = oracle.swiglu(gate, up, limit, form)
    call = lambda g, u: swiglu(g, u, limit, form)
    g, u = jnp.asarray(gate), jnp.asarray(up)
    assert_same_words(call(g[3:4], u[3:4]), want[3:4], "one element")
    assert_same_words(call(g[1:8], u[1:8]), want[1:8], "seven elements")
    assert_same_words(jax.jit(lambda: call(g, u))(), want, "closed over")
    assert_same_words(jax.jit(lambda g: call(g, u))(g), want, "up closed over")
    r = normal(263, seed=2)
    added = jax.jit(lambda u, r: call(g, u) + r)(u, r)
    assert_same_words(added, want + r, "gate closed over, and a residual")
    scanned = lax.scan(lambda c, p: (c, call(*p)), 0, (g[:, None], u[:, None]))[1]
    assert_same_words(scanned[:, 0], want, "in scan")
    spread = jax.shard_map(
        call,
        mesh=jaxtp.make_mesh(tp=8),
        in_specs=(P("tp"), P("tp")),
        out_specs=P("tp"),
        check_vma=False,
    )
    assert_same_words(jax.jit(spread)(g[:256], u[:256]), want[:256], "on ranks")


def test_the_result_is_a_rounded_word_and_so_are_its_operands():
    a, b, c = normal(4096), normal(4096, seed=1), normal(4096, seed=2)
    want = oracle.swiglu(a * np.float32(1.7), b * c) + c
    scaled = lambda a, b, c: (a * jnp.float32(1.7), b * c)
    actual = jax.jit(lambda a, b, c: swiglu(*scaled(a, b, c)) + c)(a, b, c)
    assert_same_words(actual, want)

    def plain(a, b, c):
        gate, up = scaled(a, b, c)
        return gate / (1 + jnp.exp(-gate)) * up + c

    assert count_different_words(jax.jit(plain)(a, b, c), want)


def test_special_values_follow_ieee_rules():
    gate = np.float32([np.nan, 1, np.inf, -np.inf, -0.0, 0.0, -200, 3])
    up = np.float32([1, np.nan, 2, 2, 3, -3, 5, np.inf])
    for form, limit in FORMS:
        want = oracle.swiglu(gate, up, limit, form)
        assert_same_words(swiglu(gate, up, limit, form), want, form)
    plain = np.asarray(swiglu(gate, up))
    assert np.isnan(plain[[0, 1]]).all()
    # -inf / (1 + inf) is invalid; a gate of -200 is flushed by 1 + exp(200) to -0.
    assert np.isnan(plain[3])
    assert np.signbit(plain[6])
    assert plain[6] == 0


def test_the_derivative_is_that_of_the_formula():
    gate, up = 3 * normal(16), normal(16, seed=1)
    for form, limit in FORMS:
        total = lambda g, u, f=form, l=limit: swiglu(g, u, l, f).sum()
        slope = jax.grad(total)(gate, up)
        step = 1e-4
        value = lambda g, f=form, l=limit: in_float64(g, up, l, f)[0]
        wide = gate.astype(np.float64)
        numeric = (value(wide + step) - value(wide - step)) / (2 * step)
        np.testing.assert_allclose(slope, numeric, rtol=1e-3, atol=1e-5)
        assert np.any(np.asarray(slope) != 0)


@pytest.mark.parametrize("limit", [0, 0.0, -1.0, np.inf, np.nan, 1e-60, True, "7"])
@pytest.mark.parametrize("call", [swiglu, oracle.swiglu])
def test_a_limit_that_is_not_finite_and_positive_is_refused(limit, call):
    x = np.ones(2, np.float32)
    with pytest.raises(ConfigError, match="limit"):
        call(x, x, limit, "step")


@pytest.mark.parametrize("call", [swiglu, oracle.swiglu])
def test_other_bad_operands_are_refused_by_name(call):
    x = np.ones(2, np.float32)
    with pytest.raises(ConfigError, match="plain"):
        call(x, x, 7.0)
    with pytest.raises(ConfigError, match="swiglustep"):
        call(x, x, 7.0, "swiglustep")
    with pytest.raises(DtypeError, match="up"):
        call(x, x.astype(np.float16))
    with pytest.raises(ShapeError, match="gate"):
        call(x, x[:1])


def test_no_tokens_give_no_results():
    empty = np.zeros((0, 5), np.float32)
    assert swiglu(empty, empty).shape == (0, 5)
