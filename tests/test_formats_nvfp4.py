"""NVFP4: every code, every scale, both kinds of global scale, and the writer."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from formats_cases import EVERY_BYTE, assert_one_program

from jaxtp import formats
from jaxtp.errors import DtypeError, FormatError, NonFiniteError, ShapeError
from jaxtp.testing import assert_same_words, count_different_words, words

SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_VALUES = np.array([*SIZES, *(-size for size in SIZES)], np.float32)
KINDS = ["multiplier", "divisor"]


def random_weight(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed_weight(lead=(), n=24, k=96, seed=0):
    rng = np.random.default_rng(seed)
    code = rng.integers(0, 256, (*lead, n, k // 2), dtype=np.uint8)
    scale = rng.integers(0, 0x7F, (*lead, n, k // 16), dtype=np.uint8)
    g = np.exp(rng.standard_normal(lead)).astype(np.float32) * np.float32(1e-3)
    return code, scale.view(ml_dtypes.float8_e4m3fn), np.asarray(g, np.float32)


def test_every_nibble_decodes_to_its_value_and_code_8_is_negative_zero():
    nibbles = np.arange(16, dtype=np.uint8)
    actual = assert_one_program(formats.decode_e2m1, nibbles, eager=True)
    assert_same_words(actual, E2M1_VALUES)
    assert words(actual)[8] == 0x8000_0000
    native = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_same_words(actual, native)


def test_the_low_nibble_is_the_even_column():
    actual = assert_one_program(formats.unpack_nvfp4, EVERY_BYTE.reshape(2, 128))
    assert actual.shape == (2, 256)
    assert_same_words(actual.reshape(-1)[0::2], E2M1_VALUES[EVERY_BYTE & 15])
    assert_same_words(actual.reshape(-1)[1::2], E2M1_VALUES[EVERY_BYTE >> 4])


def test_doubled_codes_are_the_integers_of_the_table():
    actual = assert_one_program(
        formats.unpack_nvfp4_doubled, EVERY_BYTE[None], eager=True
    )
    assert actual.dtype == np.int8
    expected = (2 * formats.unpack_nvfp4(EVERY_BYTE[None])).astype(int)
    np.testing.assert_array_equal(actual, expected)
    assert set(np.abs(actual).ravel().tolist()) == {0, 1, 2, 3, 4, 6, 8, 12}


def test_every_product_of_a_code_and_a_block_scale_is_exact_in_bf16():
    code = np.tile(np.arange(0, 256, 17, dtype=np.uint8).reshape(16, 1, 1), (254, 8))
    finite = np.delete(EVERY_BYTE, [0x7F, 0xFF]).view(ml_dtypes.float8_e4m3fn)
    scale = np.tile(finite.reshape(254, 1), (16, 1, 1))
    actual = assert_one_program(formats.nvfp4_to_bf16, code, scale, eager=True)
    values = E2M1_VALUES.astype(np.float64).reshape(16, 1, 1)
    expected = np.broadcast_to(values * scale.astype(np.float64), actual.shape)
    np.testing.assert_array_equal(actual.astype(np.float64), expected)
    np.testing.assert_array_equal(
        np.signbit(actual.astype(np.float32)), np.signbit(expected)
    )


def test_a_global_scale_would_not_be_exact_in_bf16():
    code, scale, g = packed_weight()
    decoded = formats.dequantize_nvfp4(code, scale, g)
    narrow = decoded.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert count_different_words(narrow, decoded) > 0


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantizing_rounds_the_scale_first_and_the_product_second(lead, kind):
    code, scale, g = packed_weight(lead)
    actual = assert_one_program(
        lambda c, s, g: formats.dequantize_nvfp4(c, s, g, kind),
        code,
        scale,
        g,
        eager=True,
    )
    wide, whole = scale.astype(np.float32), g.reshape(*lead, 1, 1)
    s = wide * whole if kind == "multiplier" else wide / whole
    values = formats.unpack_nvfp4(code)
    assert_same_words(actual, values * np.repeat(s, 16, axis=-1))
    scaled_last = formats.nvfp4_to_bf16(code, scale).astype(np.float32) * whole
    if kind == "multiplier":
        assert count_different_words(actual, scaled_last) > 0


def test_a_divisor_is_not_a_multiplication_by_its_reciprocal():
    code, scale, g = packed_weight()
    divided = formats.dequantize_nvfp4(code, scale, g, "divisor")
    inverted = formats.dequantize_nvfp4(code, scale, np.float32(1) / g, "multiplier")
    assert count_different_words(divided, inverted) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("closed_over", [True, False])
def test_a_decoded_word_is_rounded_before_a_later_addition(kind, closed_over):
    code, scale, g = packed_weight(n=64, k=256)
    r = random_weight((64, 256), seed=1) * np.float32(1e-3)
    expected = formats.dequantize_nvfp4(code, scale, g, kind) + r
    c, s, g = jnp.asarray(code), jnp.asarray(scale), jnp.asarray(g)
    if closed_over:
        actual = jax.jit(
            lambda s, r: formats.dequantize_nvfp4(c, s, g, kind) + r  # c is a constant
        )(s, r)
    else:
        actual = jax.jit(
            lambda c, s, g, r: formats.dequantize_nvfp4(c, s, g, kind) + r
        )(c, s, g, r)
    assert_same_words(actual, expected)


def test_the_divisor_of_amax_3_decodes_to_3_and_the_multiplier_nearly():
    code = np.full((1, 8), 0x77, np.uint8)
    scale = np.array([[448]], ml_dtypes.float8_e4m3fn)
    g = np.asarray(896, np.float32)
    assert formats.dequantize_nvfp4(code, scale, g, "divisor")[0, 0] == 3.0
    assert formats.dequantize_nvfp4(code, scale, g, "multiplier")[0, 0] == 2_408_448.0
    w = np.zeros((1, 16), np.float32)
    w[0, 0] = 3.0
    _, _, g = formats.quantize_nvfp4(w)
    assert g == np.float32(0.0011160715)
    assert formats.dequantize_nvfp4(code, scale, g)[0, 0] == 3.0
    assert np.float32(6 * 448) * g == np.float32(3.0000002)


def test_a_nan_block_scale_spoils_its_own_16_columns_only():
    code = np.zeros((1, 16), np.uint8)
    scale = np.array([[0x38, 0x7F]], np.uint8).view(ml_dtypes.float8_e4m3fn)
    for function in (
        formats.nvfp4_to_bf16,
        lambda c, s: formats.dequantize_nvfp4(c, s, jnp.float32(1)),
    ):
        actual = np.asarray(function(jnp.asarray(code), jnp.asarray(scale)))
        assert not words(actual)[0, :16].any()
        assert np.isnan(actual[0, 16:].astype(np.float32)).all()


def test_the_writer_rounds_ties_to_the_even_code():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.000001], np.float32)
    rounded = np.array([0, 1, 1, 2, 2, 4, 4, 6], np.float32)
    w = np.concatenate([ties, -ties])[None] * np.float32(1)
    w = np.concatenate([w, np.full((1, 16), 6 * 448, np.float32)], axis=1)
    w[0, 15] = -6
    code, scale, g = formats.quantize_nvfp4(w)
    assert g == 1
    assert float(scale[0, 0]) == 1
    expected = np.concatenate([rounded, -rounded])
    assert_same_words(formats.unpack_nvfp4(code)[0, :16], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_quantizing_stays_within_half_a_unit_of_the_code(kind):
    w = random_weight((2, 32, 96))
    code, scale, g = formats.quantize_nvfp4(w, kind)
    assert (code.dtype, scale.dtype, g.dtype) == (
        np.uint8,
        ml_dtypes.float8_e4m3fn,
        np.float32,
    )
    assert g.shape == (2,)
    decoded = formats.dequantize_nvfp4(code, scale, g, kind).astype(np.float64)
    whole = g.astype(np.float64).reshape(2, 1, 1)
    s = scale.astype(np.float64) * (whole if kind == "multiplier" else 1 / whole)
    s = np.repeat(s, 16, axis=-1)
    # Codes lie at most 2 apart; a block scale rounded down by 2^-4 clips 6 by 6 / 16.
    assert np.all(np.abs(decoded - w) <= s * (1 + 2.0**-20))


def test_zeros_get_positive_scales_and_zero_codes():
    code, scale, g = formats.quantize_nvfp4(np.zeros((2, 4, 32), np.float32))
    np.testing.assert_array_equal(g, [1, 1])
    np.testing.assert_array_equal(scale.astype(np.float32), 1)
    assert not code.any()
    w = random_weight((4, 32))
    w[:, 16:] = 0
    code, scale, _ = formats.quantize_nvfp4(w)
    np.testing.assert_array_equal(scale[:, 1].astype(np.float32), 1)
    assert not code[:, 8:].any()


def test_block_scales_stay_within_their_normal_and_subnormal_range():
    w = np.full((1, 32), 1e-9, np.float32)
    w[0, 0] = 1.0
    for kind in KINDS:
        code, scale, g = formats.quantize_nvfp4(w, kind)
        np.testing.assert_array_equal(words(scale)[0], [0x7E, 0x01])
        decoded = formats.dequantize_nvfp4(code, scale, g, kind)
        assert not decoded[0, 16:].any()
    tiny = np.full((1, 16), 1e-44, np.float32)
    for kind in KINDS:
        _, scale, g = formats.quantize_nvfp4(tiny, kind)
        assert np.isfinite(g)
        assert g > 0
        assert 1 <= words(scale)[0, 0] <= 0x7E


def test_malformed_parts_are_refused():
    code, scale, g = packed_weight()
    with pytest.raises(ShapeError, match=r"`scale` must have shape \(24, 6\)"):
        formats.nvfp4_to_bf16(code, scale[:, :5])
    with pytest.raises(ShapeError, match=r"`global_scale` must have shape \(\)"):
        formats.dequantize_nvfp4(code, scale, g[None])
    with pytest.raises(FormatError, match="'multiplier' or 'divisor'; got 'inverse'"):
        formats.dequantize_nvfp4(code, scale, g, "inverse")
    with pytest.raises(DtypeError, match="`code` must be uint8"):
        formats.unpack_nvfp4(code.astype(np.int32))
    with pytest.raises(ShapeError, match="multiple of 16; got K=24"):
        formats.quantize_nvfp4(np.ones((2, 24), np.float32))
    with pytest.raises(NonFiniteError, match=r"first at \(0, 0\): nan"):
        formats.quantize_nvfp4(np.full((1, 16), np.nan, np.float32))
