"""Named shapes and seeded operands that the projection tests share."""

import functools
from typing import Any

import ml_dtypes
import numpy as np

from jaxtp import Bf16Weight, Fp8Weight, Nvfp4Weight, ReductionPlan, formats

PROGRAMS = (
    ("bf16", "bf16"),
    ("bf16", "f32"),
    ("e4m3", "bf16"),
    ("e4m3", "e4m3"),
    ("nvfp4", "bf16"),
    ("nvfp4", "int8"),
)
"""Every (weight format, activation mode) of the contract's table."""

PLANS = {
    "sequential": ReductionPlan(8, "sequential"),
    "tree": ReductionPlan(8, "tree"),
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Float32 normal deviates, made on the host."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def activations(tokens: int, k: int, activation: str, seed: int = 1) -> np.ndarray:
    """`x` in the dtype that an activation mode takes."""
    x = normal(tokens, k, seed=seed)
    return x.astype(ml_dtypes.bfloat16) if activation == "bf16" else x


@functools.cache
def weight(format: str, n: int, k: int, seed: int = 2) -> Any:
    """A weight whose scales vary from block to block."""
    values = normal(n, k, seed=seed)
    # Rows and columns of several magnitudes, so that no two blocks share a scale.
    values *= np.exp2(np.arange(n, dtype=np.float32) % 5 - 2)[:, None]
    values *= (1 + np.arange(k, dtype=np.float32) / k)[None, :]
    if format == "bf16":
        return Bf16Weight(values.astype(ml_dtypes.bfloat16))
    if format == "e4m3":
        return Fp8Weight(*map(np.asarray, formats.quantize_fp8_block(values)))
    return Nvfp4Weight(*map(np.asarray, formats.quantize_nvfp4(values)))
