"""`rounded_divide` against NumPy's division, word for word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats_cases import (
    EVERY_MANTISSA,
    SPECIAL_VALUES,
    assert_one_program,
    random_words,
)

from jaxtp.errors import DtypeError
from jaxtp.formats import rounded_divide
from jaxtp.testing import assert_same_words, count_different_words

DIVISORS = [448.0, 127.0, 31.0]


@pytest.mark.parametrize("divisor", DIVISORS)
def test_every_mantissa_over_a_constant_divisor_is_correctly_rounded(divisor):
    actual = jax.jit(lambda a: rounded_divide(a, divisor))(EVERY_MANTISSA)
    assert_same_words(actual, EVERY_MANTISSA / np.float32(divisor))


@pytest.mark.parametrize("divisor", DIVISORS)
def test_the_slash_operator_is_not_correctly_rounded_under_jit(divisor):
    actual = jax.jit(lambda a: a / np.float32(divisor))(EVERY_MANTISSA)
    expected = EVERY_MANTISSA / np.float32(divisor)
    assert count_different_words(actual, expected) > EVERY_MANTISSA.size // 100


@pytest.mark.parametrize("numerator", [448.0, 1.0])
def test_a_constant_over_every_mantissa_is_correctly_rounded(numerator):
    actual = jax.jit(lambda d: rounded_divide(numerator, d))(EVERY_MANTISSA)
    assert_same_words(actual, np.float32(numerator) / EVERY_MANTISSA)


def test_a_broadcast_divisor_is_correctly_rounded():
    rng = np.random.default_rng(1)
    a = rng.standard_normal((64, 513)).astype(np.float32)
    b = rng.standard_normal((64, 1)).astype(np.float32)
    assert_same_words(assert_one_program(rounded_divide, a, b, eager=True), a / b)
    row = b[:1, 0]
    assert_same_words(rounded_divide(jnp.asarray(a), jnp.asarray(row)), a / row)


def test_random_words_divide_as_in_numpy_with_subnormal_results():
    a, b = random_words(2**21, 2), random_words(2**21, 3)
    with np.errstate(all="ignore"):
        expected = a / b
    subnormal = (expected != 0) & (np.abs(expected) < 2.0**-126)
    assert np.count_nonzero(subnormal) > 1000
    assert_same_words(jax.jit(rounded_divide)(a, b), expected)


def test_every_pair_of_special_values_divides_as_in_numpy():
    a, b = (x.reshape(-1) for x in np.meshgrid(SPECIAL_VALUES, SPECIAL_VALUES))
    with np.errstate(all="ignore"):
        assert_same_words(assert_one_program(rounded_divide, a, b), a / b)


def test_subnormal_quotients_round_ties_to_even():
    odd = np.arange(1, 4097, 2, dtype=np.uint32).view(np.float32)
    for power in (2.0, 4.0, 2.0**20):
        expected = odd / np.float32(power)
        assert_same_words(rounded_divide(jnp.asarray(odd), power), expected)


def test_other_dtypes_are_refused_by_name():
    with pytest.raises(DtypeError, match="`denominator` must be float32; got bfloat16"):
        rounded_divide(jnp.ones(3), jnp.ones(3, jnp.bfloat16))
