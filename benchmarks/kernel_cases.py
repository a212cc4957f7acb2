"""Data, programs and NumPy oracles that the kernel benchmarks share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import pallas_kernels

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])
BLOCK = 128
PROGRAMS = ("bf16", "e4m3_bf16", "e4m3_e4m3", "nvfp4_bf16", "nvfp4_int8")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operands of one slotted product, as NumPy arrays.

    Attributes:
        name: For messages.
        x: Activations by program: the leading operand, then its scales.
        weight: Weight operands by program.
        segment: int `[S, Ks]`: the segment of each local column.
    """

    name: str
    x: dict
    weight: dict
    segment: np.ndarray

    @property
    def slots(self):
        """Number of slots."""
        return self.segment.shape[0]

    @property
    def width(self):
        """Columns of a slot."""
        return self.segment.shape[1]


def make_problem(name, slots, n, width, tokens, seed=0):
    """Random normal operands of every program."""
    rng = np.random.default_rng(seed)
    shape, weight_shape = (tokens, slots * width), (slots, n, width)
    start = np.arange(slots)[:, None] * width
    segment = (start + np.arange(width)) // BLOCK - start // BLOCK
    segments = int(segment.max()) + 1
    held = np.arange(segments) <= segment.max(axis=1)[:, None]
    block_scale = rng.uniform(0.5, 2.0, (slots, segments, n)) * held[:, :, None]
    d = rng.uniform(0.01, 0.02, (tokens, slots, segments)).astype(np.float32)
    d_int8 = rng.uniform(0.01, 0.02, (tokens, slots * width // 32))
    bf16 = rng.standard_normal(shape).astype(BF16)
    codes = rng.standard_normal(weight_shape).astype(E4M3)
    packed = rng.integers(0, 256, (slots, n, width // 2), np.uint8)
    # Every finite positive E4M3 scale, subnormals included.
    fine = rng.integers(1, 0x7F, (slots, n, width // 16)).astype(np.uint8).view(E4M3)
    fp8 = (codes, block_scale.astype(np.float32))
    return Problem(
        name,
        x={
            "bf16": (bf16,),
            "e4m3_bf16": (bf16,),
            "e4m3_e4m3": (rng.standard_normal(shape).astype(E4M3), d),
            "nvfp4_bf16": (bf16,),
            "nvfp4_int8": (
                rng.integers(-127, 128, shape).astype(np.int8),
                d_int8.astype(np.float32),
            ),
        },
        weight={
            "bf16": (rng.standard_normal(weight_shape).astype(BF16),),
            "e4m3_bf16": fp8,
            "e4m3_e4m3": fp8,
            "nvfp4_bf16": (packed, fine),
            "nvfp4_int8": (packed, fine),
        },
        segment=segment,
    )


@functools.cache
def program(name, implementation):
    """The jitted function of one program: x operands, weight operands, first slot."""

    def run(x, weight, first_slot):
        options = {"implementation": implementation}
        if name == "bf16":
            return pallas_kernels.bf16_matmul(*x, *weight, **options)
        if name.startswith("e4m3"):
            d = x[1] if len(x) > 1 else None
            return pallas_kernels.fp8_matmul(
                x[0], *weight, d, first_slot, block_k=BLOCK, **options
            )
        if name == "nvfp4_bf16":
            return pallas_kernels.nvfp4_matmul(*x, *weight, **options)
        return pallas_kernels.nvfp4_int8_matmul(*x, *weight, **options)

    return jax.jit(run)


def decoded(name, problem):
    """Float64 activations `[T, S, Ks]` and weights `[S, N, Ks]` of a program."""
    x, *d = problem.x[name]
    value = x.astype(np.float64).reshape(-1, problem.slots, problem.width)
    first, *scales = problem.weight[name]
    if name == "bf16":
        return value, first.astype(np.float64)
    slots = np.arange(problem.slots)[:, None]
    if name.startswith("e4m3"):
        scale = scales[0].astype(np.float64)[slots, problem.segment]
        if d:
            value = value * d[0].astype(np.float64)[:, slots, problem.segment]
        return value, first.astype(np.float64) * scale.transpose(0, 2, 1)
    if d:
        groups = d[0].astype(np.float64).reshape(len(x), problem.slots, -1)
        value = value * np.repeat(groups, 32, axis=2)
    return value, e2m1(first) * np.repeat(scales[0].astype(np.float64), 16, axis=2)


def e2m1(packed):
    """Float64 values of packed codes, low nibble first."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1)
    return E2M1[nibbles.reshape(*packed.shape[:-1], -1)]


def int8_oracle(problem):
    """The ORDERED program of NVFP4 "int8", in separate float32 roundings."""
    q, d = problem.x["nvfp4_int8"]
    packed, scale = problem.weight["nvfp4_int8"]
    slots, width, tokens = problem.slots, problem.width, len(q)
    halves = width // 16
    q = q.astype(np.float32).reshape(tokens, slots, halves, 16)
    codes = (2.0 * e2m1(packed)).astype(np.float32)
    codes = codes.reshape(slots, -1, halves, 16)
    half_scale = scale.astype(np.float32) * np.float32(0.5)
    d = d.reshape(tokens, slots, halves // 2)
    acc = np.zeros((slots, tokens, codes.shape[1]), np.float32)
    for g in range(halves // 2):
        terms = [
            half_scale[:, None, :, h] * slot_products(q[:, :, h], codes[:, :, h])
            for h in (2 * g, 2 * g + 1)
        ]
        u = terms[0] + terms[1]
        acc = acc + d[:, :, g].T[:, :, None] * u
    return acc


def e4m3_oracle(name, problem, bf16_partials):
    """The E4M3 program from the dots of its segments, with exact fused steps.

    Args:
        name: "e4m3_bf16" or "e4m3_e4m3".
        problem: The operands.
        bf16_partials: The bf16 program, a function of x and weight. A segment's dot is
            its slot's dot with x zero outside the segment.
    """
    x, *d = problem.x[name]
    codes, scale = problem.weight[name]
    x = x.astype(np.float32).astype(BF16)
    codes = codes.astype(np.float32).astype(BF16)
    total = np.zeros((problem.slots, len(x), codes.shape[1]), np.float32)
    for j in range(scale.shape[1]):
        mask = (problem.segment == j).reshape(-1)
        dot = np.asarray(bf16_partials(np.where(mask, x, BF16(0)), codes))
        factor = np.broadcast_to(scale[:, j][:, None, :], total.shape)
        if d:
            factor = factor * d[0][:, :, j].T[:, :, None]
        exact = factor.astype(np.longdouble) * dot + total
        total = exact.astype(np.float32)
    return total


def slot_products(x, w):
    """`[T, S, K]` by `[S, N, K]` to `[S, T, N]`."""
    return np.matmul(x.transpose(1, 0, 2), w.transpose(0, 2, 1))


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)
