"""Single elements: E4M3, E8M0 and bfloat16."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from formats_cases import (
    EVERY_BYTE,
    SPECIAL_VALUES,
    assert_one_program,
    random_words,
    swept_words,
)

from jaxtp import formats
from jaxtp.errors import DtypeError
from jaxtp.testing import assert_same_words, count_different_words, words


def e4m3_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code >> 3) & 15, code & 7
    if (exponent, fraction) == (15, 7):
        return float("nan")
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def test_every_e4m3_code_decodes_to_its_closed_form():
    expected = np.array([e4m3_value(int(c)) for c in EVERY_BYTE], np.float32)
    for dtype in (np.uint8, ml_dtypes.float8_e4m3fn):
        actual = assert_one_program(
            formats.decode_e4m3, EVERY_BYTE.view(dtype), eager=True
        )
        assert_same_words(actual, expected)
    assert words(expected)[0x80] == 0x8000_0000


def test_every_e4m3_code_survives_decoding_and_encoding():
    actual = assert_one_program(
        lambda c: formats.encode_e4m3(formats.decode_e4m3(c)), EVERY_BYTE, eager=True
    )
    assert_same_words(actual, EVERY_BYTE.view(ml_dtypes.float8_e4m3fn))


def test_e4m3_midpoints_round_to_the_even_code_and_neighbours_to_the_nearest():
    codes = np.arange(0x7E, dtype=np.uint8)
    low, high = formats.decode_e4m3(codes), formats.decode_e4m3(codes + 1)
    middle = (low + high) / 2
    below = np.nextafter(middle, np.float32(0))
    above = np.nextafter(middle, np.float32(np.inf))
    for sign in (0, 0x80):
        factor = np.float32(-1 if sign else 1)
        for values, codes_expected in (
            (middle, codes + (codes & 1)),
            (below, codes),
            (above, codes + 1),
        ):
            actual = assert_one_program(formats.encode_e4m3, values * factor)
            np.testing.assert_array_equal(actual.view(np.uint8), codes_expected | sign)


def test_e4m3_encoding_is_the_conversion_of_the_clipped_value():
    values = swept_words()
    expected = np.clip(values, -448, 448)
    with np.errstate(invalid="ignore"):
        expected = expected.astype(ml_dtypes.float8_e4m3fn)
    assert_same_words(jax.jit(formats.encode_e4m3)(values), expected)
    assert_same_words(formats.encode_e4m3(values), expected)


def test_e4m3_encoding_saturates_where_a_conversion_gives_nan():
    values = np.array([448, 464, 465, 1000, np.inf, -1000, -np.inf], np.float32)
    actual = assert_one_program(formats.encode_e4m3, values)
    np.testing.assert_array_equal(actual.view(np.uint8), [0x7E] * 5 + [0xFE] * 2)
    raw = jnp.asarray(values).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    assert raw[1] == 448
    assert np.isnan(raw[2:]).all()


def test_every_e8m0_code_decodes_to_its_power_of_two():
    with np.errstate(over="ignore"):
        expected = np.exp2(EVERY_BYTE.astype(np.float64) - 127).astype(np.float32)
    expected[255] = np.nan
    for dtype in (np.uint8, ml_dtypes.float8_e8m0fnu):
        actual = assert_one_program(
            formats.decode_e8m0, EVERY_BYTE.view(dtype), eager=True
        )
        assert_same_words(actual, expected)
    assert words(expected)[0] == 0x0040_0000


def test_exp2_and_a_plain_shift_do_not_decode_e8m0():
    exact = formats.decode_e8m0(EVERY_BYTE)
    power = jax.jit(lambda c: jnp.exp2(c.astype(jnp.float32) - 127))(EVERY_BYTE)
    assert count_different_words(power, exact) >= 2
    shifted = (EVERY_BYTE.astype(np.uint32) << 23).view(np.float32)
    assert count_different_words(shifted, exact) == 2


def test_bf16_rounding_is_that_of_ieee_over_the_range_of_words():
    values = np.concatenate([swept_words(), SPECIAL_VALUES])
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    assert_same_words(jax.jit(formats.round_to_bf16)(values), expected)
    assert_same_words(formats.round_to_bf16(values), expected)


def test_bf16_rounding_overflows_to_infinity_and_keeps_subnormals():
    bits = np.array([0x7F7F_7FFF, 0x7F7F_8000, 0xFF7F_FFFF, 0x0000_8001], np.uint32)
    actual = assert_one_program(
        formats.round_to_bf16, bits.view(np.float32), eager=True
    )
    expected = [0x7F7F, 0x7F80, 0xFF80, 0x0001]
    np.testing.assert_array_equal(actual.view(np.uint16), expected)


def test_three_bf16_parts_add_up_to_the_float32_exactly():
    values = random_words(2**18, 4)
    size = np.abs(values)
    values = values[(size > 2.0**-100) & (size < np.float32(3.38e38))]
    parts = assert_one_program(formats.split_f32, values, eager=True)
    high, middle, low = (part.astype(np.float64) for part in parts)
    np.testing.assert_array_equal(high + middle + low, values.astype(np.float64))
    assert np.count_nonzero(high + middle != values) > len(values) // 2
    assert_same_words(parts[0], values.astype(ml_dtypes.bfloat16))


def test_the_ends_of_the_range_are_carried_by_the_first_part_alone():
    edges = np.array([2.0**-100, 3.38e38, 3e-39, np.inf, np.nan, -0.0], np.float32)
    first = np.array([0x0D80_0000 | 0x1234, 0x7F7F_FFFF], np.uint32).view(np.float32)
    values = np.concatenate([edges, -edges, first[1:], SPECIAL_VALUES[:6]])
    high, middle, low = assert_one_program(formats.split_f32, values)
    assert_same_words(high, values.astype(ml_dtypes.bfloat16))
    assert not words(middle).any()
    assert not words(low).any()
    inside = np.nextafter(np.float32(2.0**-100), np.float32(1))
    _, middle, _ = formats.split_f32(np.array([inside]))
    assert words(middle).any()


def test_bf16_values_have_zero_for_their_other_parts():
    values = np.random.default_rng(5).standard_normal(4096).astype(ml_dtypes.bfloat16)
    high, middle, low = assert_one_program(formats.split_f32, values.astype(np.float32))
    assert_same_words(high, values)
    assert not words(middle).any()
    assert not words(low).any()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (formats.decode_e4m3, "codes"),
        (formats.decode_e8m0, "codes"),
        (formats.encode_e4m3, "values"),
        (formats.round_to_bf16, "values"),
        (formats.split_f32, "x"),
    ],
)
def test_other_dtypes_are_refused_by_name(function, name):
    with pytest.raises(DtypeError, match=f"`{name}` must be .*; got float16"):
        function(np.zeros(4, np.float16))
