"""E2M1 codes to bf16 in registers, by byte permutations over eight magnitudes."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector
from jaxtyping import Array, BFloat16, Float8e4m3fn, Float32, UInt8

ROWS = 64
COLUMNS = 64
"""Columns decoded at a time."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

ROW_BYTES = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 16), (16, 16), (8, 16))),
    warp_dims=(-6,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)
"""Sixteen bytes of a row at a time, the same in the four lanes that share a row."""

_PER_ROW = plgpu.Layout.WGMMA.reduce(1)
_ROW_LAYOUT = mgpu.WGMMA_LAYOUT.reduce((1,))
_PER_ROW_REGISTERS = _ROW_LAYOUT.registers_shape((ROWS,))

# `prmt` selectors: nibble i names byte i of the result among the bytes of (a, b).
_INTERLEAVE = (0x5140, 0x7362)
_SIGNS = 0x1504


def scaled(
    code: UInt8[Array, "64 B"], scale: Float8e4m3fn[Array, "64 16"], first: int
) -> BFloat16[Array, "64 64"]:
    """`value(code) * scale` of 64 columns, exact, one scale for 16 columns.

    Args:
        code: Two codes a byte, low nibble first, in the layout `ROW_BYTES`.
        scale: Block scales of each 16 columns, in the layout `ROW_BYTES`.
        first: The first of the 64 columns.
    """

    def build(_: Any, code: Any, scale: Any) -> Any:
        return _decode(
            code, MAGNITUDES, first, _scale_pairs(scale, first // 16, COLUMNS // 16)
        )

    return _inline(build, (ROW_BYTES, ROW_BYTES))(code, scale)


def doubled(code: UInt8[Array, "64 B"], first: int) -> BFloat16[Array, "64 64"]:
    """Twice the values of the codes of 64 columns: integers up to 12.

    Args:
        code: Two codes a byte, low nibble first, in the layout `ROW_BYTES`.
        first: The first of the 64 columns.
    """

    def build(_: Any, code: Any) -> Any:
        return _decode(code, tuple(2.0 * m for m in MAGNITUDES), first, None)

    return _inline(build, (ROW_BYTES,))(code)


def row_scales(
    scale: Float8e4m3fn[Array, "64 16"],
) -> list[BFloat16[Array, "64"]]:
    """The sixteen columns of block scales, each as one bf16 value a row.

    Args:
        scale: Block scales, in the layout `ROW_BYTES`.
    """

    def build(_: Any, scale: Any) -> Any:
        pairs = _scale_pairs(scale, 0, 16)
        columns = []
        for column in range(len(pairs) * 2):
            registers = np.empty(_PER_ROW_REGISTERS, dtype=object)
            for half_row in range(2):
                value = _element(pairs[column // 2][half_row], column % 2)
                one = ir.VectorType.get((1,), value.type)
                registers[0, 0, half_row, 0, 0] = vector.broadcast(one, value)
            columns.append(
                mgpu.FragmentedArray(
                    _registers=registers, _layout=_ROW_LAYOUT, _is_signed=None
                )
            )
        return columns

    shape = plgpu.ShapeDtypeStruct((ROWS,), jnp.bfloat16, layout=_PER_ROW)
    return plgpu.inline_mgpu(arg_types=(ROW_BYTES,), return_type=[shape] * 16)(build)(
        scale
    )


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


def _inline(build: Any, arg_types: tuple[Any, ...]) -> Any:
    shape = plgpu.ShapeDtypeStruct(
        (ROWS, COLUMNS), jnp.bfloat16, layout=plgpu.Layout.WGMMA
    )
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=shape)(build)


def _decode(
    code: Any, magnitudes: Sequence[float], first: int, scales: Sequence[Any] | None
) -> Any:
    """Builds the registers of the `wgmma` operand, 16 columns at a time.

    In 16 columns lane c of the four that share a row holds columns 2c, 2c + 1, 2c + 8
    and 2c + 9: bytes c and c + 4 of the eight.
    """
    registers = np.empty(
        mgpu.WGMMA_LAYOUT.registers_shape((ROWS, COLUMNS)), dtype=object
    )
    tables = _tables(magnitudes)
    select = _byte_selector()
    for at, packed in np.ndenumerate(code.registers):
        block, half_row = at[1] - first // 32, at[4]
        if not 0 <= block < COLUMNS // 32:
            continue
        words = _words(packed)
        for step in range(2):
            codes = _permute(words[2 * step], words[2 * step + 1], select)
            index = 2 * block + step
            for pair, value in enumerate(_values(codes, tables)):
                if scales is not None:
                    scale = _element(scales[index // 2][half_row], index % 2)
                    both = vector.broadcast(value.type, scale)
                    value = arith.mulf(value, both)
                registers[0, 2 * index + pair, 0, 0, half_row, 0, 0, 0, 0] = value
    return mgpu.FragmentedArray(
        _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
    )


def _scale_pairs(scale: Any, first: int, count: int) -> list[tuple[ir.Value, ir.Value]]:
    """Scales from `first`, as pairs of bf16, for both rows of a lane."""
    pairs = []
    for word in range(first // 4, (first + count) // 4):
        rows = [_words(scale.registers[_row_register(r)])[word] for r in range(2)]
        pairs += [tuple(_bf16_pair(row, half) for row in rows) for half in ("l", "h")]
    return pairs


def _row_register(half_row: int) -> tuple[int, ...]:
    return (0, 0, 0, 0, half_row, 0, 0, 0)


def _bf16_pair(word: ir.Value, half: str) -> ir.Value:
    """Two E4M3 codes of a word as bf16: every code is exact in f16, f32 and bf16."""
    i32 = ir.IntegerType.get_signless(32)
    text = f"""{{
        .reg .b16 l, h, a, b;
        .reg .b32 both, x, y;
        mov.b32 {{l, h}}, $1;
        cvt.rn.f16x2.e4m3x2 both, {half};
        mov.b32 {{a, b}}, both;
        cvt.f32.f16 x, a;
        cvt.f32.f16 y, b;
        cvt.rn.bf16x2.f32 $0, y, x;
    }}"""
    pair: Any = llvm.inline_asm(i32, [word], text, "=r,r")
    return _as_pair(pair)


def _values(
    codes: ir.Value, tables: Sequence[tuple[ir.Value, ir.Value]]
) -> list[ir.Value]:
    """Four codes in the low half of a word as two vectors of two bf16."""
    magnitude = arith.andi(codes, _constant(0x7777))
    low, high = (_permute(first, second, magnitude) for first, second in tables)
    # Bit 3 of each nibble, brought to bit 7 of its own byte.
    shifted = arith.shli(codes, _constant(4))
    signs = _permute(codes, shifted, _constant(_SIGNS))
    high = arith.ori(high, arith.andi(signs, _constant(0x80808080)))
    pairs = (_permute(low, high, _constant(select)) for select in _INTERLEAVE)
    return [_as_pair(pair) for pair in pairs]


def _as_pair(word: ir.Value) -> ir.Value:
    """A word as a vector of two bf16."""
    pair_type = ir.VectorType.get((2,), ir.BF16Type.get())
    word_type = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    return vector.bitcast(pair_type, vector.broadcast(word_type, word))


def _tables(magnitudes: Sequence[float]) -> list[tuple[ir.Value, ir.Value]]:
    """Low bytes and high bytes of eight bf16 values, four bytes a word."""
    bits = np.asarray(magnitudes, jnp.bfloat16).view(np.uint16).astype(np.uint32)
    tables = []
    for plane in (bits & 0xFF, bits >> 8):
        first, second = (
            int(sum(int(byte) << (8 * i) for i, byte in enumerate(four)))
            for four in (plane[:4], plane[4:])
        )
        tables.append((_held(first), _constant(second)))
    return tables


def _held(value: int) -> Any:
    """A constant that stays in a register: only one operand of `prmt` is immediate.

    The assembler would otherwise move it there again for every `prmt`. The two masks
    of a lane have no bit in common.
    """
    i32 = ir.IntegerType.get_signless(32)
    text = f"""{{
        .reg .b32 below, own;
        mov.u32 below, %lanemask_lt;
        mov.u32 own, %lanemask_eq;
        and.b32 below, below, own;
        xor.b32 $0, below, {value};
    }}"""
    return llvm.inline_asm(i32, [], text, "=r")


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


def _element(pair: ir.Value, index: int) -> Any:
    return llvm.extractelement(pair, _constant(index))


def _permute(a: ir.Value, b: ir.Value, select: ir.Value) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [a, b, select], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def _constant(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return arith.constant(i32, ir.IntegerAttr.get(i32, signed))
