"""Float64 values, and the depth that bounds a program's error."""

from typing import Any

import numpy as np

from jaxtp import formats, packing
from jaxtp.errors import ShapeError
from jaxtp.plan import ReductionPlan
from jaxtp.program import Activation
from jaxtp.weights import Weight


def float64(x: Any, weight: Weight) -> tuple[np.ndarray, np.ndarray]:
    """`(x @ w.T, |x| @ |w|.T)` of the decoded operands in float64.

    Args:
        x: `[T, K]` of any float dtype; for a quantized activation pass
            `quantized_activation`.
        weight: `[N, K]`.
    """
    w64 = np.asarray(weight.dequantize()).astype(np.float64)
    x64 = np.asarray(x).astype(np.float64)
    if w64.ndim != 2 or x64.ndim != 2 or x64.shape[1] != w64.shape[1]:
        raise ShapeError(
            f"`x` must be [T, K] and the weight [N, K]; got shapes {x64.shape} and "
            f"{w64.shape}."
        )
    return x64 @ w64.T, np.abs(x64) @ np.abs(w64).T


def quantized_activation(
    x: Any, weight: Weight, plan: ReductionPlan, activation: Activation
) -> np.ndarray:
    """The activation that the program multiplies, decoded, in float64 `[T, K]`.

    "bf16" and "f32" return `x` itself. The error of quantizing is `x` minus this.

    Args:
        x: bf16 or f32 `[T, K]`.
        weight: The weight, whose scale blocks fix the segments.
        plan: The plan, whose slots fix groups and segments.
        activation: The mode.

    Bits:
        ORDERED codes and scales; the product is exact in float64.
    """
    x = np.asarray(x)
    if activation in ("bf16", "f32"):
        return x.astype(np.float64)
    layout = packing.weight_layout(weight, plan)
    out = np.zeros(x.shape, np.float64)
    for slot in range(layout.num_slots):
        runs = layout.segments(slot, packing.block_columns(weight) or 32)
        if activation == "int8":
            first, last = layout.bounds(slot)
            runs = tuple((a, min(a + 32, last)) for a in range(first, last, 32))
        for start, stop in runs:
            part = x[:, None, start:stop].astype(np.float32)
            quantize = (
                formats.quantize_e4m3 if activation == "e4m3" else formats.quantize_int8
            )
            code, d = quantize(part)
            decoded = np.asarray(code).astype(np.float64)
            out[:, start:stop] = (decoded * np.asarray(d)[..., None])[:, 0]
    return out


def depth(weight: Weight, plan: ReductionPlan, activation: Activation) -> int:
    """Roundings on the longest way from a product to the result.

    One for each product of a slot's accumulator, the scales and sums of its segments or
    groups, the slot sum, and the global scale.
    """
    layout = packing.weight_layout(weight, plan)
    slots = layout.num_slots
    adds = slots if plan.order == "sequential" else slots.bit_length() - 1
    steps = min(layout.width, layout.size) + adds + 1
    block = packing.block_columns(weight)
    if block is not None:
        # Per segment: s * d, the product with C, and the add.
        steps += 3 * layout.max_segments(block)
    if activation == "f32":
        # Two adds, and the part of x below its third term (for |x| above 2^-100,
        # where the program has three terms).
        steps += 3
    return steps
