"""E2M1 codes to bf16 in registers, by byte permutations over eight magnitudes."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector
from jaxtyping import Array, BFloat16, Float32, UInt8

ROWS = 64
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

ROW_BYTES = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 16), (16, 16), (8, 16))),
    warp_dims=(-6,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)
"""Sixteen bytes of a row at a time, the same in the four lanes that share a row."""

_PER_ROW = plgpu.Layout.WGMMA.reduce(1)

# `prmt` selectors: nibble i names byte i of the result among the bytes of (a, b).
_INTERLEAVE = (0x5140, 0x7362)
_SIGNS = 0x1504


def scaled(
    code: UInt8[Array, "64 B"], scales: Sequence[BFloat16[Array, "64"]]
) -> BFloat16[Array, "64 2*B"]:
    """`value(code) * scale`, exact, one scale for 16 columns.

    Args:
        code: Two codes a byte, low nibble first, in the layout `ROW_BYTES`.
        scales: Block scales of each 16 columns, ascending.
    """

    def build(_: Any, code: Any, *scales: Any) -> Any:
        return _decode(code, MAGNITUDES, scales)

    arg_types = (ROW_BYTES, *[_PER_ROW] * len(scales))
    return _inline(build, arg_types, 2 * code.shape[1])(code, *scales)


def doubled(code: UInt8[Array, "64 B"]) -> BFloat16[Array, "64 2*B"]:
    """Twice the values of the codes: integers up to 12.

    Args:
        code: Two codes a byte, low nibble first, in the layout `ROW_BYTES`.
    """

    def build(_: Any, code: Any) -> Any:
        return _decode(code, tuple(2.0 * m for m in MAGNITUDES), ())

    return _inline(build, (ROW_BYTES,), 2 * code.shape[1])(code)


def rounded_product(
    a: Float32[Array, "64 T"], b: Float32[Array, "64 T"]
) -> Float32[Array, "64 T"]:
    """`RN(a * b)`: a product that no later addition may absorb."""

    def build(_: Any, a: Any, b: Any) -> Any:
        # Unlike Mosaic's own product this one carries no `contract` flag.
        registers = np.empty_like(a.registers)
        for at, register in np.ndenumerate(a.registers):
            registers[at] = arith.mulf(register, b.registers[at])
        return mgpu.FragmentedArray(
            _registers=registers, _layout=a.layout, _is_signed=None
        )

    layout = plgpu.Layout.WGMMA
    shape = plgpu.ShapeDtypeStruct(a.shape, jnp.float32, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout, layout), return_type=shape)(build)(a, b)


def _inline(build: Any, arg_types: tuple[Any, ...], columns: int) -> Any:
    shape = plgpu.ShapeDtypeStruct(
        (ROWS, columns), jnp.bfloat16, layout=plgpu.Layout.WGMMA
    )
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=shape)(build)


def _decode(code: Any, magnitudes: Sequence[float], scales: Sequence[Any]) -> Any:
    """Builds the registers of the `wgmma` operand, 16 columns at a time.

    In 16 columns lane c of the four that share a row holds columns 2c, 2c + 1, 2c + 8
    and 2c + 9: bytes c and c + 4 of the eight.
    """
    columns = 2 * code.shape[1]
    registers = np.empty(
        mgpu.WGMMA_LAYOUT.registers_shape((ROWS, columns)), dtype=object
    )
    tables = _tables(magnitudes)
    select = _byte_selector()
    for at, packed in np.ndenumerate(code.registers):
        block, half_row = at[1], at[4]
        words = _words(packed)
        for step in range(2):
            codes = _permute(words[2 * step], words[2 * step + 1], select)
            index = 2 * block + step
            for pair, value in enumerate(_values(codes, tables)):
                if scales:
                    value = arith.mulf(value, _pair(scales[index], half_row))
                registers[0, 2 * index + pair, 0, 0, half_row, 0, 0, 0, 0] = value
    return mgpu.FragmentedArray(
        _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
    )


def _values(codes: ir.Value, tables: tuple[tuple[int, ...], ...]) -> list[ir.Value]:
    """Four codes in the low half of a word as two vectors of two bf16."""
    magnitude = arith.andi(codes, _constant(0x7777))
    low, high = (
        _permute(_constant(first), _constant(second), magnitude)
        for first, second in tables
    )
    # Bit 3 of each nibble, brought to bit 7 of its own byte.
    shifted = arith.shli(codes, _constant(4))
    signs = _permute(codes, shifted, _constant(_SIGNS))
    high = arith.ori(high, arith.andi(signs, _constant(0x80808080)))
    pairs = (_permute(low, high, _constant(select)) for select in _INTERLEAVE)
    pair_type = ir.VectorType.get((2,), ir.BF16Type.get())
    word_type = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    return [
        vector.bitcast(pair_type, vector.broadcast(word_type, pair)) for pair in pairs
    ]


def _tables(magnitudes: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Low bytes and high bytes of eight bf16 values, four bytes a word."""
    bits = np.asarray(magnitudes, jnp.bfloat16).view(np.uint16).astype(np.uint32)
    return tuple(
        tuple(
            int(sum(int(byte) << (8 * i) for i, byte in enumerate(four)))
            for four in (plane[:4], plane[4:])
        )
        for plane in (bits & 0xFF, bits >> 8)
    )


def _byte_selector() -> ir.Value:
    """Selects bytes c and c + 4 of two words, c the lane's place in its row."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
    lane = arith.andi(thread, _constant(3))
    return arith.addi(arith.muli(lane, _constant(0x11)), _constant(0x40))


def _words(packed: ir.Value) -> list[ir.Value]:
    """Sixteen bytes as four words."""
    i32 = ir.IntegerType.get_signless(32)
    words = vector.bitcast(ir.VectorType.get((4,), i32), packed)
    return [llvm.extractelement(words, _constant(i)) for i in range(4)]


def _pair(scale: Any, half_row: int) -> ir.Value:
    """A row's scale twice, as a vector of two bf16."""
    register = scale.registers[0, 0, half_row, 0, 0]
    value = llvm.extractelement(register, _constant(0))
    return vector.broadcast(ir.VectorType.get((2,), value.type), value)


def _permute(a: ir.Value, b: ir.Value, select: ir.Value) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [a, b, select], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def _constant(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return arith.constant(i32, ir.IntegerAttr.get(i32, signed))
