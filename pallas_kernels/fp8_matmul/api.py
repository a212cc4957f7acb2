"""Slot partials of E4M3 block-scaled weights."""

from jaxtyping import Array, Float8e4m3fn, Float32, Int32

from pallas_kernels.fp8_matmul import mosaic, portable
from pallas_kernels.implementation import Implementation


def fp8_matmul(
    x: Array,
    code: Float8e4m3fn[Array, "S N Ks"],
    scale: Float32[Array, "S J N"],
    x_scale: Float32[Array, "T S J"] | None,
    first_slot: Int32[Array, ""],
    *,
    block_k: int,
    implementation: Implementation,
) -> Float32[Array, "S T N"]:
    """`partial[s, t, n] = sum_j (scale * x_scale) * C_j`, `C_j` a dot of one segment.

    Segment j of global slot g = `first_slot + s` is the part of the slot inside scale
    block `g * Ks // block_k + j`.

    Args:
        x: bf16 `[T, S * Ks]` in slot layout, or float8_e4m3fn codes with `x_scale`.
        code: Slots of the weight's codes; padding is zero. Ks is a multiple of 32.
        scale: The scale of each segment and row; zero where there is no segment.
        x_scale: The activation scale of each token and segment, or None.
        first_slot: Global index of slot 0 of `code`.
        block_k: Columns of a scale block, a multiple of 32.
        implementation: "mosaic" or "portable".

    Returns:
        One partial for each slot. Per segment ascending a float32 dot of the codes,
        which are exact in bf16; then one add of the scaled dot (a fused multiply-add
        on "mosaic", a rounded product and an add on "portable").

    Bits:
        A partial's words depend on its token's row, its weight row and its global slot
        alone: not on T, N, S, or the position of either row.
    """
    run = mosaic.fp8_matmul if implementation == "mosaic" else portable.fp8_matmul
    return run(x, code, scale, x_scale, first_slot, block_k=block_k)
