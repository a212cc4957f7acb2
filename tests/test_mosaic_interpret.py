"""Mosaic kernels on the GPU interpreter: copies, edges, segments, scales and races.

The interpreter has no `wgmma` with a register operand or a given accumulator, and no
inline MLIR, so those steps are replaced by what they mean; everything around them is
the kernel's own. It adds in the order of NumPy, hence bounds here and words on the GPU.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtp.testing import assert_same_words, assert_within_bound
from pallas_kernels import mosaic_tiles
from pallas_kernels.bf16_matmul import mosaic as bf16
from pallas_kernels.fp8_matmul import mosaic as fp8
from pallas_kernels.nvfp4_matmul import mosaic as nvfp4
from pallas_kernels.nvfp4_matmul import mosaic_decode

pytestmark = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="the GPU interpreter is public from JAX 0.11",
)

E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = np.array([*mosaic_decode.MAGNITUDES, *(-m for m in mosaic_decode.MAGNITUDES)])


def interpreted(function, *args):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return np.asarray(jax.jit(function)(*args))


@pytest.fixture
def register_operands(monkeypatch):
    """`wgmma` of a register operand by way of shared memory; decoding in jnp."""
    wgmma = plgpu.wgmma

    def through_smem(acc, a, b):
        atom = 64 if a.shape[1] % 64 == 0 else a.shape[1]

        def product(smem):
            smem[...] = a
            wgmma(acc, smem, b)

        transforms = mosaic_tiles.swizzled(atom, a.dtype)
        pl.run_scoped(product, plgpu.SMEM(a.shape, a.dtype, transforms=transforms))

    def values(code):
        nibbles = jnp.stack([code & jnp.uint8(15), code >> jnp.uint8(4)], axis=-1)
        nibbles = nibbles.reshape(code.shape[0], -1).astype(jnp.int32)
        magnitude = nibbles & jnp.int32(7)
        value = jnp.zeros(nibbles.shape, jnp.float32)
        for index, m in enumerate(mosaic_decode.MAGNITUDES):
            value = jnp.where(magnitude == jnp.int32(index), jnp.float32(m), value)
        return jnp.where(nibbles > jnp.int32(7), -value, value)

    def scaled(code, scale, first):
        columns = mosaic_decode.COLUMNS
        wide = jnp.repeat(scale.astype(jnp.float32), 16, axis=1)
        value = (values(code) * wide)[:, first : first + columns]
        return value.astype(jnp.bfloat16)

    def doubled(code, first):
        value = values(code)[:, first : first + mosaic_decode.COLUMNS]
        return (value * jnp.float32(2.0)).astype(jnp.bfloat16)

    def row_scales(scale):
        columns = scale.astype(jnp.float32).astype(jnp.bfloat16)
        return [columns[:, column] for column in range(columns.shape[1])]

    def multiply(dot, weight, x_smem, cut):
        def fresh(acc):
            plgpu.wgmma(acc, weight, mosaic_tiles.transposed(x_smem))
            return acc[...]

        product = pl.run_scoped(fresh, mosaic_tiles.accumulator(dot.shape[1]))
        return product if cut.every_unit_ends else dot + product

    monkeypatch.setattr(fp8, "_multiply", multiply)
    monkeypatch.setattr(plgpu, "wgmma", through_smem)
    monkeypatch.setattr(mosaic_decode, "scaled", scaled)
    monkeypatch.setattr(mosaic_decode, "doubled", doubled)
    monkeypatch.setattr(mosaic_decode, "row_scales", row_scales)
    monkeypatch.setattr(mosaic_decode, "rounded_product", lambda a, b: a * b)


@pytest.mark.parametrize(
    ("slots", "n", "width", "tokens"), [(2, 80, 160, 3), (1, 64, 256, 9), (2, 7, 32, 1)]
)
def test_bf16_tiles_meet_every_edge(slots, n, width, tokens):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, slots * width)).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal((slots, n, width)).astype(ml_dtypes.bfloat16)
    y = interpreted(bf16.bf16_matmul, x, w)
    check(y, x.astype(np.float64), w.astype(np.float64), width)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("slots", "first", "n", "width", "block", "tokens"),
    [
        (2, 0, 80, 256, 128, 3),
        (2, 3, 80, 160, 128, 9),
        (1, 1, 7, 96, 32, 1),
        (1, 5, 64, 96, 256, 8),
        (1, 1, 64, 1056, 128, 8),
    ],
)
def test_e4m3_scales_follow_global_segments(
    register_operands, quantized, slots, first, n, width, block, tokens
):
    rng = np.random.default_rng(1)
    kind = E4M3 if quantized else ml_dtypes.bfloat16
    x = rng.standard_normal((tokens, slots * width)).astype(kind)
    code = rng.standard_normal((slots, n, width)).astype(E4M3)
    start = (first + np.arange(slots)) * width
    segment = (start[:, None] + np.arange(width)) // block - (start // block)[:, None]
    segments = int(segment.max()) + 1
    scale = rng.uniform(0.5, 2.0, (slots, segments, n)).astype(np.float32)
    d = rng.uniform(0.5, 2.0, (tokens, slots, segments)).astype(np.float32)
    for s in range(slots):
        scale[s, segment[s].max() + 1 :] = 0.0
    x64 = x.astype(np.float64)
    w64 = code.astype(np.float64)
    for s in range(slots):
        w64[s] *= scale[s].T[:, segment[s]]
        if quantized:
            x64[:, s * width : (s + 1) * width] *= d[:, s][:, segment[s]]
    function = functools.partial(fp8.fp8_matmul, block_k=block)
    y = interpreted(
        lambda *a: function(*a[:3], a[3] if quantized else None, a[4]),
        *(x, code, scale, d, np.int32(first)),
    )
    check(y, x64, w64, width + 2 * segments)


@pytest.mark.parametrize("mode", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("slots", "n", "width", "tokens"), [(2, 80, 160, 3), (1, 64, 256, 9), (2, 7, 32, 1)]
)
def test_nvfp4_halves_meet_their_scales(
    register_operands, mode, slots, n, width, tokens
):
    rng = np.random.default_rng(2)
    code = rng.integers(0, 256, (slots, n, width // 2), np.uint8)
    scale = rng.uniform(0.25, 4.0, (slots, n, width // 16)).astype(E4M3)
    nibbles = np.stack([code & 15, code >> 4], axis=-1).reshape(slots, n, width)
    w64 = E2M1[nibbles] * np.repeat(scale.astype(np.float64), 16, axis=2)
    shape = (tokens, slots * width)
    if mode == "bf16":
        x = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        y = interpreted(nvfp4.nvfp4_matmul, x, code, scale)
        check(y, x.astype(np.float64), w64, width)
        return
    q = rng.integers(-127, 128, shape).astype(np.int8)
    d = rng.uniform(0.5, 2.0, (tokens, slots * width // 32)).astype(np.float32)
    y = interpreted(nvfp4.nvfp4_int8_matmul, q, d, code, scale)
    check(y, q * np.repeat(d.astype(np.float64), 32, axis=1), w64, width)


def check(y, x64, w64, depth):
    slots, _, width = w64.shape
    x64 = x64.reshape(-1, slots, width)
    value = np.einsum("tsk,snk->stn", x64, w64)
    magnitude = np.einsum("tsk,snk->stn", abs(x64), abs(w64))
    assert_within_bound(y, value, magnitude, depth)
    assert not np.allclose(y, np.roll(value, 1, axis=2), rtol=1e-2), "control"


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_byte_permutations_decode_every_four_codes(monkeypatch, factor):
    words = SimpleNamespace(
        andi=np.bitwise_and, ori=np.bitwise_or, shli=lambda a, b: a << b
    )
    types = SimpleNamespace(
        VectorType=SimpleNamespace(get=lambda *_: None),
        BF16Type=SimpleNamespace(get=lambda: None),
        IntegerType=SimpleNamespace(get_signless=lambda _: None),
    )
    plain = SimpleNamespace(
        bitcast=lambda _, value: value, broadcast=lambda _, value: value
    )
    monkeypatch.setattr(mosaic_decode, "arith", words)
    monkeypatch.setattr(mosaic_decode, "ir", types)
    monkeypatch.setattr(mosaic_decode, "vector", plain)
    monkeypatch.setattr(mosaic_decode, "_permute", permuted_bytes)
    monkeypatch.setattr(mosaic_decode, "_constant", np.uint32)
    monkeypatch.setattr(mosaic_decode, "_held", np.uint32)
    codes = np.arange(1 << 16, dtype=np.uint32)
    tables = mosaic_decode._tables([factor * m for m in mosaic_decode.MAGNITUDES])
    pairs = np.stack(mosaic_decode._values(codes, tables), axis=-1)
    value = pairs.view(np.uint16).view(ml_dtypes.bfloat16)
    nibbles = (codes[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    assert_same_words(value, (factor * E2M1[nibbles]).astype(ml_dtypes.bfloat16))


def permuted_bytes(a, b, select):
    """`prmt.b32` of PTX in its default mode, whose selectors may copy a sign."""
    a, b, select = np.broadcast_arrays(a, b, select)
    both = np.stack([a, b], axis=-1).astype("<u4").view(np.uint8)
    result = np.zeros(a.shape, np.uint32)
    for i in range(4):
        nibble = (select >> np.uint32(4 * i)) & 15
        byte = np.take_along_axis(both, (nibble & 7)[..., None].astype(int), -1)[..., 0]
        byte = np.where(nibble > 7, np.where(byte > 127, 255, 0), byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result
