"""bf16 slot partials."""

from jaxtyping import Array, BFloat16, Float32

from pallas_kernels.bf16_matmul import mosaic, portable
from pallas_kernels.implementation import Implementation


def bf16_matmul(
    x: BFloat16[Array, "T S*Ks"],
    weight: BFloat16[Array, "S N Ks"],
    *,
    implementation: Implementation,
) -> Float32[Array, "S T N"]:
    """`partial[s, t, n] = sum_k x[t, s * Ks + k] * weight[s, n, k]`.

    Args:
        x: Activations in slot layout; padding columns are zero.
        weight: Slots of the weight; padding is zero. Ks is a multiple of 32.
        implementation: "mosaic" or "portable".

    Returns:
        One partial for each slot: bf16 products in one float32 accumulator from +0,
        K ascending in the implementation's step.

    Bits:
        A partial's words depend on its token's row, its weight row and its slot alone:
        not on T, N, S, or the position of either row.
    """
    if implementation == "mosaic":
        return mosaic.bf16_matmul(x, weight)
    return portable.bf16_matmul(x, weight)
