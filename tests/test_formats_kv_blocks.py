"""KV blocks: bytes of q8_0 and q5_1."""

import jax
import numpy as np
import pytest
from formats_cases import (
    SPECIAL_VALUES,
    assert_one_program,
    fixture_values,
    swept_words,
)

from jaxtp import formats
from jaxtp.errors import DtypeError, ShapeError
from jaxtp.formats.kv_blocks import round_to_f16_bits
from jaxtp.testing import assert_same_words, words

QUANTIZERS = [formats.quantize_q8_0, formats.quantize_q5_1]


def random_rows(shape=(6, 128), seed=0):
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.integers(-20, 20, (*shape[:-1], 1))).astype(np.float32)
    return (rng.standard_normal(shape) + 0.5).astype(np.float32) * size


def halves(blocks, start):
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def test_fp16_rounding_is_that_of_ieee_over_the_range_of_words():
    values = np.concatenate([swept_words(), SPECIAL_VALUES])
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    assert_same_words(round_to_f16_bits(values).view(np.float16), expected)
    actual = np.asarray(jax.jit(round_to_f16_bits)(values)).view(np.float16)
    assert_same_words(actual, expected)


def test_q8_0_of_the_fixture_has_the_known_bytes():
    block = assert_one_program(formats.quantize_q8_0, fixture_values(32))
    assert block.shape == (34,)
    assert block[0] | block[1] << np.uint16(8) == 0x2406
    codes = block[2:10].view(np.int8)
    np.testing.assert_array_equal(codes, [55, 109, -91, -36, 18, 73, 127, -73])


def test_q5_1_of_the_fixture_has_the_known_bytes():
    block = assert_one_program(formats.quantize_q5_1, fixture_values(32))
    assert block.shape == (24,)
    header = block[:8].tobytes()
    assert header == bytes.fromhex("bb2f febe 73c69c31")
    np.testing.assert_array_equal(block[8:12], [38, 173, 19, 138])


def test_q8_0_follows_its_formula_and_layout():
    x = random_rows()
    blocks = assert_one_program(formats.quantize_q8_0, x, eager=True).reshape(6, 4, 34)
    groups = x.reshape(6, 4, 32)
    d = np.abs(groups).max(axis=-1) / np.float32(127)
    q = np.rint(groups * (np.float32(1) / d)[..., None])
    assert_same_words(halves(blocks, 0), d.astype(np.float16))
    np.testing.assert_array_equal(blocks[..., 2:].view(np.int8), q)


def test_q5_1_follows_its_formula_and_layout():
    x = random_rows()
    blocks = assert_one_program(formats.quantize_q5_1, x, eager=True).reshape(6, 4, 24)
    groups = x.reshape(6, 4, 32)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    d = (high - low) / np.float32(31)
    q = np.rint((groups - low[..., None]) * (np.float32(1) / d)[..., None])
    q = np.clip(q, 0, 31).astype(np.uint8)
    assert_same_words(halves(blocks, 0), d.astype(np.float16))
    assert_same_words(halves(blocks, 2), low.astype(np.float16))
    fifth = np.packbits(q >> 4, axis=-1, bitorder="little")
    np.testing.assert_array_equal(blocks[..., 4:8], fifth)
    nibbles = (q[..., :16] & 15) | (q[..., 16:] & 15) << 4
    np.testing.assert_array_equal(blocks[..., 8:], nibbles)


def test_q8_0_decodes_to_the_exact_product():
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (64, 3 * 34), dtype=np.uint8)
    actual = assert_one_program(formats.dequantize_q8_0, blocks, eager=True).reshape(
        64, 3, 32
    )
    data = blocks.reshape(64, 3, 34)
    d = halves(data, 0).astype(np.float64)[..., None]
    with np.errstate(invalid="ignore"):
        expected = (d * data[..., 2:].view(np.int8)).astype(np.float32)
    assert_same_words(actual, expected)


def test_q5_1_decodes_with_one_rounding():
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (64, 3 * 24), dtype=np.uint8)
    actual = assert_one_program(formats.dequantize_q5_1, blocks, eager=True).reshape(
        64, 3, 32
    )
    data = blocks.reshape(64, 3, 24)
    fifth = np.unpackbits(data[..., 4:8], axis=-1, bitorder="little")
    low = np.concatenate([data[..., 8:] & 15, data[..., 8:] >> 4], axis=-1)
    q = (low | fifth << 4).astype(np.float32)
    d, m = (halves(data, at).astype(np.float32)[..., None] for at in (0, 2))
    with np.errstate(invalid="ignore"):
        assert_same_words(actual, d * q + m)


@pytest.mark.parametrize(
    ("quantize", "dequantize", "levels"),
    [
        (formats.quantize_q8_0, formats.dequantize_q8_0, 127),
        (formats.quantize_q5_1, formats.dequantize_q5_1, 31),
    ],
)
def test_a_round_trip_stays_within_half_a_code_and_the_fp16_rounding(
    quantize, dequantize, levels
):
    x = random_rows((8, 64))
    x = x / np.abs(x).max(axis=-1, keepdims=True)
    decoded = jax.jit(lambda x: dequantize(quantize(x)))(x)
    groups = x.reshape(8, 2, 32)
    low = 0.0 if levels == 127 else groups.min(axis=-1)
    d = (np.abs(groups) if levels == 127 else groups).max(axis=-1) - low
    step = d.astype(np.float64) / levels
    half = 0.5 * step + 2.0**-11 * (levels * step + np.abs(low)) * (1 + 2.0**-10)
    error = np.abs(np.asarray(decoded).reshape(8, 2, 32) - groups.astype(np.float64))
    assert np.all(error <= half[..., None] * (1 + 2.0**-10))


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_a_batch_has_the_bytes_of_its_rows_one_by_one(quantize):
    x = random_rows((5, 96))
    batch = assert_one_program(quantize, x)
    for row, expected in zip(x, batch, strict=True):
        np.testing.assert_array_equal(quantize(row), expected)


@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_non_finite_element_decodes_to_nan(quantize, bad):
    x = random_rows((1, 64))
    x[0, 40] = bad
    blocks = assert_one_program(quantize, x)
    dequantize = {
        formats.quantize_q8_0: formats.dequantize_q8_0,
        formats.quantize_q5_1: formats.dequantize_q5_1,
    }[quantize]
    decoded = assert_one_program(dequantize, blocks)
    assert np.isfinite(decoded[0, :32]).all()
    assert np.isnan(decoded[0, 32:]).all()


def test_a_constant_block_decodes_to_its_value():
    x = np.full((1, 32), -1.5, np.float32)
    blocks = assert_one_program(formats.quantize_q5_1, x)
    assert_same_words(assert_one_program(formats.dequantize_q5_1, blocks), x)


def test_tiny_blocks_have_zero_codes_and_a_zero_scale():
    x = np.array([1e-42, -1e-42, 2.0**-100, 0.0], np.float32)
    x = np.tile(x[:, None], (1, 32))
    x[:, 1::2] = 0
    assert not assert_one_program(formats.quantize_q8_0, x).any()
    decoded = formats.dequantize_q5_1(assert_one_program(formats.quantize_q5_1, x))
    assert not decoded.any()


def test_stored_scales_may_be_fp16_subnormals_or_infinite():
    amax = np.array([127 * 2.0**-20, 127 * 65519.0, 127 * 65520.0], np.float32)
    blocks = assert_one_program(formats.quantize_q8_0, np.tile(amax[:, None], (1, 32)))
    d = halves(blocks, 0)
    assert_same_words(d, np.array([2.0**-20, 65504, np.inf], np.float16))


def test_of_two_zeros_the_negative_one_is_the_minimum():
    x = np.ones((2, 32), np.float32)
    x[0, 3:5] = 0.0, -0.0
    x[1, 3:5] = -0.0, 0.0
    m = halves(assert_one_program(formats.quantize_q5_1, x), 2)
    np.testing.assert_array_equal(words(m), [0x8000, 0x8000])


def test_a_spread_that_overflows_counts_as_non_finite():
    x = np.zeros((1, 32), np.float32)
    x[0, :2] = 3e38, -3e38
    blocks = assert_one_program(formats.quantize_q5_1, x)
    assert np.isnan(halves(blocks, 0)).all()
    assert not blocks[0, 4:].any()


def test_sizes_and_dtypes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="multiple of 32; got 40"):
        formats.quantize_q8_0(np.ones((2, 40), np.float32))
    with pytest.raises(ShapeError, match="multiple of 24 bytes; got 34"):
        formats.dequantize_q5_1(np.zeros((2, 34), np.uint8))
    with pytest.raises(DtypeError, match="`x` must be float32; got float16"):
        formats.quantize_q5_1(np.ones((2, 32), np.float16))
