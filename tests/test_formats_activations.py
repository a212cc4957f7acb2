"""Activation quantizers against the contract's formulas in NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from formats_cases import assert_one_program, fixture_values

from jaxtp import formats
from jaxtp.errors import DtypeError
from jaxtp.testing import assert_same_words, count_different_words, words

QUANTIZERS = [formats.quantize_e4m3, formats.quantize_int8]
LEVELS = {formats.quantize_e4m3: 448.0, formats.quantize_int8: 127.0}


def random_groups(shape=(16, 10, 32), seed=0):
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.integers(-60, 60, (*shape[:-1], 1))).astype(np.float32)
    return rng.standard_normal(shape).astype(np.float32) * size


def test_e4m3_codes_and_scales_follow_the_contract():
    x = random_groups((16, 10, 128))
    code, d = assert_one_program(formats.quantize_e4m3, x, eager=True)
    amax = np.abs(x).max(axis=-1, keepdims=True)
    scaled = np.clip(x * (np.float32(448) / amax), -448, 448)
    assert_same_words(code, scaled.astype(ml_dtypes.float8_e4m3fn))
    assert_same_words(d, amax[..., 0] / np.float32(448))
    assert np.all(np.abs(code.astype(np.float32)).max(axis=-1) == 448)


def test_int8_codes_and_scales_follow_the_contract():
    x = random_groups()
    q, d = assert_one_program(formats.quantize_int8, x, eager=True)
    expected_d = np.abs(x).max(axis=-1) / np.float32(127)
    assert_same_words(d, expected_d)
    expected = np.rint(x * (np.float32(1) / expected_d)[..., None]).astype(np.int8)
    np.testing.assert_array_equal(q, expected)
    assert np.all(np.abs(q.astype(int)).max(axis=-1) == 127)


def test_int8_of_the_fixture_has_the_known_codes():
    q, d = assert_one_program(formats.quantize_int8, fixture_values(32)[None])
    np.testing.assert_array_equal(q[0, :8], [55, 109, -91, -36, 18, 73, 127, -73])
    assert d[0] == np.float32(0.015713429)


def test_a_plain_division_gives_other_scales_under_jit():
    x = random_groups((64, 10, 32))
    naive = jax.jit(lambda x: jnp.max(jnp.abs(x), axis=-1) / jnp.float32(448))(x)
    _, d = formats.quantize_e4m3(x)
    assert count_different_words(naive, d) > d.size // 10


@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_with_a_non_finite_element_has_zero_codes_and_a_nan_scale(
    quantize, bad
):
    x = random_groups((2, 3, 32))
    clean_codes, clean_d = quantize(x)
    x[1, 1, 7] = bad
    codes, d = assert_one_program(quantize, x)
    assert not words(codes)[1, 1].any()
    assert np.isnan(d[1, 1])
    others = np.arange(6).reshape(2, 3) != 4
    assert_same_words(codes[others], clean_codes[others])
    assert_same_words(d[others], clean_d[others])


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_groups_below_the_smallest_scale_are_zero_groups(quantize):
    edge = np.float32(2.0**-93) * np.float32(LEVELS[quantize])
    below = np.nextafter(edge, np.float32(0))
    amaxes = np.array([edge, below, 1e-42, 0.0], np.float32)
    x = np.tile(amaxes[:, None], (1, 32)) * np.float32(-1)
    codes, d = assert_one_program(quantize, x)
    assert_same_words(d, np.array([2.0**-93, 0, 0, 0], np.float32))
    assert np.all(codes[0].astype(np.float32) == -LEVELS[quantize])
    assert not words(codes)[1:].any()


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_the_largest_float_quantizes_to_the_largest_code(quantize):
    x = np.full((1, 32), np.finfo(np.float32).max, np.float32)
    x[0, 1::2] *= -1
    codes, d = assert_one_program(quantize, x)
    assert np.isfinite(d).all()
    assert set(codes.astype(np.float32).ravel()) == {
        LEVELS[quantize],
        -LEVELS[quantize],
    }


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_padding_with_zeros_changes_no_code_and_no_scale(quantize):
    x = random_groups((4, 2, 16))
    padded = np.concatenate([x, np.zeros_like(x)], axis=-1)
    codes, d = quantize(x)
    padded_codes, padded_d = assert_one_program(quantize, padded)
    assert_same_words(padded_codes[..., :16], codes)
    assert not words(padded_codes)[..., 16:].any()
    assert_same_words(padded_d, d)


def test_subnormal_codes_and_negative_zero_come_out_of_a_wide_group():
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = 448, 2.0**-9, -1.5 * 2.0**-9, -(2.0**-11), 1e-40
    codes, _ = assert_one_program(formats.quantize_e4m3, x)
    np.testing.assert_array_equal(words(codes)[0, :5], [0x7E, 0x01, 0x82, 0x80, 0x00])


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_bf16_activations_must_be_widened_by_the_caller(quantize):
    with pytest.raises(DtypeError, match="`x` must be float32; got bfloat16"):
        quantize(jnp.ones((2, 32), jnp.bfloat16))
