"""Slot partials of NVFP4 weights, the global scale left out."""

from jaxtyping import Array, BFloat16, Float8e4m3fn, Float32, Int8, UInt8

from pallas_kernels.implementation import Implementation
from pallas_kernels.nvfp4_matmul import mosaic, portable


def nvfp4_matmul(
    x: BFloat16[Array, "T S*Ks"],
    code: UInt8[Array, "S N Ks/2"],
    scale: Float8e4m3fn[Array, "S N Ks/16"],
    *,
    implementation: Implementation,
) -> Float32[Array, "S T N"]:
    """`partial[s, t, n] = sum_k x[t, s, k] * (code * scale)[s, n, k]`.

    Args:
        x: Activations in slot layout; padding columns are zero.
        code: Two E2M1 codes a byte, the low nibble the even column; padding is zero.
        scale: One block scale for 16 columns; padding is zero.
        implementation: "mosaic" or "portable".

    Bits:
        Those of `bf16_matmul` on the weight `code * scale`, which is exact in bf16.
    """
    run = mosaic.nvfp4_matmul if implementation == "mosaic" else portable.nvfp4_matmul
    return run(x, code, scale)


def nvfp4_int8_matmul(
    q: Int8[Array, "T S*Ks"],
    d: Float32[Array, "T S*Ks/32"],
    code: UInt8[Array, "S N Ks/2"],
    scale: Float8e4m3fn[Array, "S N Ks/16"],
    *,
    implementation: Implementation,
) -> Float32[Array, "S T N"]:
    """`acc = RN(acc + RN(d * u))`, `u = RN(s_0 * I_0 + s_1 * I_1)`, groups ascending.

    `I_h` is the integer dot of a 16-column half of a group of 32 with doubled codes,
    `s_h` half its block scale; `s_h * I_h` is exact.

    Args:
        q: Activation codes in slot layout; padding columns are zero.
        d: The activation scale of each group of 32 columns.
        code: Two E2M1 codes a byte, the low nibble the even column; padding is zero.
        scale: One block scale for 16 columns; padding is zero.
        implementation: "mosaic" or "portable".

    Bits:
        ORDERED: the same words from both implementations and from NumPy.
    """
    if implementation == "mosaic":
        return mosaic.nvfp4_int8_matmul(q, d, code, scale)
    return portable.nvfp4_int8_matmul(q, d, code, scale)
