"""E4M3 weights with block scales: decoding, and the writer."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from formats_cases import EVERY_BYTE, assert_one_program

from jaxtp import formats
from jaxtp.errors import DtypeError, FormatError, NonFiniteError, ShapeError
from jaxtp.testing import assert_same_words, count_different_words, words

BLOCK = (128, 128)


def dequantize(code, scale):
    return formats.dequantize_fp8_block(code, scale, BLOCK)


def random_weight(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_codes(shape, seed=0):
    codes = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return codes.view(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("lead", [(), (3,)])
def test_each_element_takes_the_scale_of_its_block_at_ragged_edges(lead):
    n, k = 576, 160
    code = random_codes((*lead, n, k))
    scale = np.exp(random_weight((*lead, 5, 2), seed=1))
    actual = assert_one_program(dequantize, code, scale, eager=True)
    rows, columns = np.arange(n)[:, None] // 128, np.arange(k) // 128
    expected = code.astype(np.float32) * scale[..., rows, columns]
    assert_same_words(actual, expected)
    assert count_different_words(actual, code.astype(np.float32)) > 0


def test_signed_zero_and_nan_codes_and_zero_and_nan_scales_propagate():
    code = np.tile(EVERY_BYTE, (3, 1)).view(ml_dtypes.float8_e4m3fn)
    scale = np.array([[0.5, 0.5], [0.0, 0.0], [np.nan, np.nan]], np.float32)
    actual = assert_one_program(
        lambda c, s: formats.dequantize_fp8_block(c, s, (1, 128)), code, scale
    )
    assert words(actual)[0, 0x80] == 0x8000_0000
    assert np.isnan(actual[0]).sum() == 2
    assert not actual[1, :0x7F].any()
    assert np.isnan(actual[2]).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_narrow_scales_are_widened_exactly(dtype):
    code = random_codes((130, 130))
    scale = np.array([[0.25, 2.0], [1.0, 2.0**-60]]).astype(dtype)
    actual = assert_one_program(dequantize, code, scale)
    wide = scale.astype(np.float32)
    assert_same_words(actual, dequantize(code, wide))


@pytest.mark.parametrize("closed_over", ["nothing", "code", "scale", "both"])
def test_a_decoded_word_is_rounded_before_a_later_addition(closed_over):
    code, scale = formats.quantize_fp8_block(random_weight((256, 256)))
    r = random_weight((256, 256), seed=1)
    expected = dequantize(code, scale) + r
    c, s = jnp.asarray(code), jnp.asarray(scale)
    programs = {
        "nothing": lambda: jax.jit(lambda c, s, r: dequantize(c, s) + r)(c, s, r),
        "code": lambda: jax.jit(lambda s, r: dequantize(c, s) + r)(s, r),
        "scale": lambda: jax.jit(lambda c, r: dequantize(c, s) + r)(c, r),
        "both": lambda: jax.jit(lambda r: dequantize(c, s) + r)(r),
    }
    assert_same_words(programs[closed_over](), expected)


def test_a_plain_product_is_contracted_into_a_later_addition_on_the_cpu():
    code, scale = formats.quantize_fp8_block(random_weight((128, 128)))
    r = random_weight((128, 128), seed=1)
    naive = jax.jit(lambda c, s, r: c.astype(jnp.float32) * s + r)
    with jax.default_device(jax.devices("cpu")[0]):
        actual = naive(code, scale, r)
    assert count_different_words(actual, dequantize(code, scale) + r) > 0


def test_a_scale_that_does_not_fit_is_refused():
    code = random_codes((576, 160))
    with pytest.raises(ShapeError, match=r"must have shape \(5, 2\).*got \(4, 1\)"):
        dequantize(code, np.ones((4, 1), np.float32))
    with pytest.raises(DtypeError, match="`scale` must be float32 or bfloat16"):
        dequantize(code, np.ones((5, 2), np.float16))


@pytest.mark.parametrize("scale_format", ["f32", "bf16", "e8m0"])
def test_quantizing_stays_within_half_a_unit_of_the_code(scale_format):
    w = random_weight((2, 300, 200))
    code, scale = formats.quantize_fp8_block(w, BLOCK, scale_format)
    assert code.dtype == ml_dtypes.float8_e4m3fn
    assert scale.shape == (2, 3, 2)
    rows, columns = np.arange(300)[:, None] // 128, np.arange(200) // 128
    s = scale[..., rows, columns].astype(np.float64)
    # A scale rounded down to bf16 clips 448 by 2^-9 of itself, less than half a unit.
    bound = np.maximum(np.abs(w) * 2.0**-4, s * 2.0**-10) * (1 + 2.0**-20)
    assert np.all(np.abs(dequantize(code, scale) - w.astype(np.float64)) <= bound)


def test_scales_are_exact_in_the_format_they_are_written_in():
    w = random_weight((256, 256))
    _, scale = formats.quantize_fp8_block(w, BLOCK, "bf16")
    assert_same_words(scale.astype(ml_dtypes.bfloat16).astype(np.float32), scale)
    _, powers = formats.quantize_fp8_block(w, BLOCK, "e8m0")
    assert_same_words(
        powers.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32), powers
    )
    _, exact = formats.quantize_fp8_block(w)
    assert np.all((powers >= exact) & (powers < 2 * exact))


def test_a_power_of_two_scale_is_rounded_before_the_codes():
    w = np.zeros((128, 128), np.float32)
    w[0, :2] = 300, 288
    code, scale = formats.quantize_fp8_block(w, BLOCK, "e8m0")
    assert scale[0, 0] == 1.0
    assert float(code[0, 1]) == 288.0
    late = formats.encode_e4m3(w / (w.max() / np.float32(448)))
    assert float(late[0, 0]) == 448.0


def test_blocks_of_zeros_get_a_positive_scale_and_no_nan():
    w = np.zeros((256, 256), np.float32)
    w[0, 0] = 1
    code, scale = formats.quantize_fp8_block(w)
    assert np.all(np.isfinite(scale) & (scale > 0))
    decoded = dequantize(code, scale)
    assert decoded[0, 0] == 1
    assert np.count_nonzero(words(decoded)) == 1


def test_the_smallest_weights_keep_a_normal_scale():
    w = np.full((1, 1), 1e-42, np.float32)
    for scale_format in ("f32", "bf16", "e8m0"):
        code, scale = formats.quantize_fp8_block(w, BLOCK, scale_format)
        assert scale[0, 0] == 2.0**-126
        assert words(code)[0, 0] == 0


def test_what_cannot_be_written_is_refused():
    w = np.ones((4, 4), np.float32)
    w[2, 3] = np.inf
    with pytest.raises(NonFiniteError, match=r"first at \(2, 3\): inf"):
        formats.quantize_fp8_block(w)
    with pytest.raises(FormatError, match="'f32', 'bf16' or 'e8m0'; got 'f16'"):
        formats.quantize_fp8_block(np.ones((4, 4), np.float32), BLOCK, "f16")
