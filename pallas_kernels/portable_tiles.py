"""The step of the portable programs: one dot of a fixed tile shape.

XLA:CPU picks the inner order of a dot from its shape, so every dot here has the shape
`[8, 128] x [128, 128]`, with zero padding: tokens, rows and columns are padded to the
tile whatever the call's sizes are. Loops keep a trip count known at run time only, so
that no compiler merges a single step with what stands around it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.padding import pad_to_multiple as pad_to_multiple

BLOCK_T = 8
BLOCK_N = 128
BLOCK_K = 128


def pad_tokens(x: Array, slots: int, column_multiple: int) -> Array:
    """`[T, S * W]` to whole tiles `[S, T', W']`."""
    t, columns = x.shape
    x = x.reshape(t, slots, columns // slots)
    x = pad_to_multiple(pad_to_multiple(x, 2, column_multiple), 0, BLOCK_T)
    return x.transpose(1, 0, 2)


def pad_rows(weight: Array, column_multiple: int) -> Array:
    """`[S, N, W]` to whole tiles `[S, N', W']`."""
    return pad_to_multiple(pad_to_multiple(weight, 2, column_multiple), 1, BLOCK_N)


def as_integers(x: jax.Array) -> jax.Array:
    """The bits of narrow floats, which is how they enter an interpreted kernel.

    XLA:CPU moves narrow floats by converting whole operands to float32 and back.
    """
    size = jnp.dtype(x.dtype).itemsize
    return lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}[size])


def as_bf16(bits: Array) -> BFloat16[Array, "..."]:
    """The bf16 values of 16-bit words."""
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def e4m3_to_bf16(bits: Array) -> BFloat16[Array, "..."]:
    """The bf16 values of E4M3 bytes, exact."""
    code = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    return code.astype(jnp.float32).astype(jnp.bfloat16)


def tile_dot(x: Array, w: Array) -> Float32[Array, "8 128"]:
    """`x @ w.T` of one tile, float32 products and accumulator.

    Args:
        x: bf16 `[8, 128]`.
        w: bf16 `[128, 128]`, rows are output features.
    """
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def ascending(
    steps: int,
    zero: Int32[Array, ""],
    body: Callable[[Array, Array], Array],
) -> Float32[Array, "8 128"]:
    """Runs `acc = body(i, acc)` for i ascending from `acc = +0`.

    The trip count is `steps + zero`, which the compiler cannot see.
    """
    start = jnp.zeros((BLOCK_T, BLOCK_N), jnp.float32)
    return lax.fori_loop(jnp.int32(0), jnp.int32(steps) + zero, body, start)


def call_tiles(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    zero: Int32[Array, ""],
    slots: int,
    tokens: int,
    rows: int,
    name: str,
) -> Float32[Array, "slots tokens rows"]:
    """Runs a kernel once for each (slot, row tile, token tile), interpreted.

    Operands are whole arrays, which the kernel indexes by `pl.program_id`: the
    interpreter copies a blocked operand at every step.

    Args:
        kernel: Body; refs are the run-time zero `[1]`, the operands, and the output
            tile `[1, 8, 128]`.
        operands: Integer or float32 arrays, padded to whole tiles.
        zero: int32 run-time zero.
        slots: Number of slots.
        tokens: Number of tokens, rounded up to tiles here.
        rows: Number of output features, rounded up to tiles here.
        name: Name of the kernel in profiles.
    """
    tiles = (slots, -(-rows // BLOCK_N), -(-tokens // BLOCK_T))
    whole = pl.BlockSpec()
    out = pl.pallas_call(
        kernel,
        grid=tiles,
        in_specs=[whole] * (len(operands) + 1),
        out_specs=pl.BlockSpec((1, BLOCK_T, BLOCK_N), lambda s, n, t: (s, t, n)),
        out_shape=jax.ShapeDtypeStruct(
            (slots, tiles[2] * BLOCK_T, tiles[1] * BLOCK_N), jnp.float32
        ),
        interpret=True,
        name=name,
    )(zero.reshape(1), *operands)
    return out[:, :tokens, :rows]


def tile_index() -> tuple[Array, Any, Any]:
    """This step's slot, rows and tokens."""
    slot, n, t = (pl.program_id(axis) for axis in range(3))
    return slot, pl.ds(n * BLOCK_N, BLOCK_N), pl.ds(t * BLOCK_T, BLOCK_T)
