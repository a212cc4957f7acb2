"""Operands and checks that the tests of `jaxtp.formats` share."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtp.testing import assert_same_words

EVERY_BYTE = np.arange(256, dtype=np.uint8)

EVERY_MANTISSA = (np.arange(2**23, dtype=np.uint32) | 0x3F80_0000).view(np.float32)
"""All float32 in [1, 2)."""

SPECIAL_WORDS = np.array(
    [
        *(0x0000_0000, 0x0000_0001, 0x0000_0003, 0x007F_FFFF, 0x0080_0000),
        *(0x00FF_FFFF, 0x3F7F_FFFF, 0x3F80_0000, 0x3F80_0001, 0x3FFF_FFFF),
        *(0x4000_0000, 0x7E80_0000, 0x7F7F_FFFF, 0x7F80_0000, 0x7FC0_0001),
    ],
    dtype=np.uint32,
)
SPECIAL_VALUES = np.concatenate([SPECIAL_WORDS, SPECIAL_WORDS | 0x8000_0000]).view(
    np.float32
)


def swept_words(step: int = 1025) -> np.ndarray:
    """Float32 over the whole range of words, at an odd step."""
    return np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32).view(np.float32)


def random_words(count: int, seed: int) -> np.ndarray:
    """Float32 with uniformly random bits."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return bits.view(np.float32)


def fixture_values(count: int) -> np.ndarray:
    """`((i * 1664525 + 1013904223) mod 8191 - 4095) / 2048`."""
    i = np.arange(count, dtype=np.uint64)
    residue = (i * np.uint64(1664525) + np.uint64(1013904223)) % np.uint64(8191)
    return (residue.astype(np.float32) - np.float32(4095)) / np.float32(2048)


def assert_one_program(function, *operands: np.ndarray, eager: bool = False):
    """Asserts that NumPy and jit give the same words; returns NumPy's.

    Args:
        function: From arrays to arrays.
        *operands: NumPy arrays.
        eager: Whether to compare the call without jit too, which compiles every
            operation by itself.
    """
    expected = function(*operands)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(expected))
    arrays = [jnp.asarray(operand) for operand in operands]
    ways = {"jit": jax.jit(function)} | ({"eager": function} if eager else {})
    for way, run in ways.items():
        leaves = zip(
            jax.tree.leaves(run(*arrays)), jax.tree.leaves(expected), strict=True
        )
        for actual, reference in leaves:
            assert isinstance(actual, jax.Array)
            assert_same_words(actual, reference, what=way)
    return expected
