"""The rank-local program: slot partials of one rank's slots, from its own arrays.

What is multiplied, in which blocks and with which roundings is all here and in
`pallas_kernels`. Nothing here knows a mesh, and nothing here adds slots together.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

import pallas_kernels
from jaxtp import formats
from jaxtp.errors import ActivationError, DtypeError
from jaxtp.rounding import rounded, runtime_zero
from pallas_kernels.fp8_matmul.segments import columns_to_segments, segment_columns

Activation = Literal["bf16", "f32", "e4m3", "int8"]
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "bf16": ("bf16", "f32"),
    "e4m3": ("bf16", "e4m3"),
    "nvfp4": ("bf16", "int8"),
}


def check_activation_dtype(x: Any) -> None:
    """Refuses what is not a bf16 or f32 array, before anything converts it.

    Raises:
        DtypeError: Showing the dtype, or the type of what is no array.
    """
    dtype = getattr(x, "dtype", None)
    if dtype is None or jnp.dtype(dtype).name not in ("bfloat16", "float32"):
        found = type(x).__name__ if dtype is None else jnp.dtype(dtype).name
        raise DtypeError(f"`x` must be a bfloat16 or float32 array; got {found}.")


def resolve_activation(format: str, activation: str | None, dtype: Any) -> Activation:
    """The activation mode of a call, checked against the weight format and `x.dtype`.

    Raises:
        DtypeError: If the mode "bf16" meets f32.
        ActivationError: If the mode is missing or does not exist for the format.
    """
    name = jnp.dtype(dtype).name
    legal = ACTIVATIONS[format]
    if activation is None and format == "bf16":
        return "bf16" if name == "bfloat16" else "f32"
    if activation not in legal:
        raise ActivationError(
            f"`activation` must be one of {legal} for {format} weights; got "
            f"{activation!r}."
        )
    if activation == "bf16" and name != "bfloat16":
        raise DtypeError(
            "activation='bf16' takes bfloat16 `x` and rounds nothing by itself; got "
            f"{name}. Cast `x`, or pass another of {legal}."
        )
    return activation  # pyright: ignore[reportReturnType]


@functools.partial(
    jax.jit, static_argnames=("format", "activation", "block_k", "implementation")
)
def slot_partials(
    x: Array,
    value: Array,
    scale: Array | None,
    first_slot: Int32[Array, ""],
    *,
    format: str,
    activation: Activation,
    block_k: int | None,
    implementation: pallas_kernels.Implementation,
) -> Float32[Array, "S T N"]:
    """One float32 partial for each slot here; the global scale is left out.

    Args:
        x: bf16 or f32 `[T, S * K_slot]`, the rank's slots in slot layout.
        value: `[S, N, K_slot]` (or packed), the rank's slots of the weight.
        scale: The placed scale part, or None.
        first_slot: Global index of the first slot here.
        format: "bf16", "e4m3" or "nvfp4".
        activation: One of `ACTIVATIONS[format]`.
        block_k: Columns of a scale block (e4m3).
        implementation: Kernel form.

    Bits:
        Each partial depends on its token's row of `x`, its weight row and its global
        slot alone.
    """
    if x.shape[0] == 0:
        return jnp.zeros((value.shape[0], 0, value.shape[1]), jnp.float32)
    if format == "bf16" and activation == "bf16":
        return pallas_kernels.bf16_matmul(x, value, implementation=implementation)
    if format == "bf16":
        return _three_term(x.astype(jnp.float32), value, implementation)
    assert scale is not None
    if format == "e4m3":
        assert block_k is not None
        x_scale = None
        if activation == "e4m3":
            x, x_scale = _quantize_segments(
                x.astype(jnp.float32), value, scale, first_slot, block_k
            )
        return pallas_kernels.fp8_matmul(
            x,
            value,
            scale,
            x_scale,
            first_slot,
            block_k=block_k,
            implementation=implementation,
        )
    if activation == "bf16":
        return pallas_kernels.nvfp4_matmul(
            x, value, scale, implementation=implementation
        )
    t, columns = x.shape
    q, d = formats.quantize_int8(x.astype(jnp.float32).reshape(t, columns // 32, 32))
    return pallas_kernels.nvfp4_int8_matmul(
        jnp.asarray(q).reshape(t, columns),
        jnp.asarray(d),
        value,
        scale,
        implementation=implementation,
    )


def _three_term(
    x: Float32[Array, "T K"],
    value: Array,
    implementation: pallas_kernels.Implementation,
) -> Float32[Array, "S T N"]:
    """The bf16 program on three bf16 parts of x, smallest parts added first.

    For finite weights, a bf16-valued x gives the words of "bf16": the smaller parts
    are zeros, whose products are zeros.
    """
    parts = jnp.concatenate(formats.split_f32(x), axis=0)
    dots = pallas_kernels.bf16_matmul(parts, value, implementation=implementation)
    high, middle, low = jnp.split(dots, 3, axis=1)
    return (low + middle) + high


def _quantize_segments(
    x: Float32[Array, "T C"],
    value: Array,
    scale: Array,
    first_slot: Int32[Array, ""],
    block_k: int,
) -> tuple[Array, Float32[Array, "T S J"]]:
    """E4M3 codes in slot layout, and one scale for each token and segment."""
    (t, total), (slots, _, width), segments = x.shape, value.shape, scale.shape[1]
    x = x.reshape(t, slots, width)
    columns = segment_columns(first_slot, slots, width, segments, block_k)
    if columns is None:
        code, d = formats.quantize_e4m3(x.reshape(t, slots, segments, block_k))
        return jnp.asarray(code).reshape(t, total), jnp.asarray(d)
    gather = jax.vmap(
        lambda row, c: row.at[:, c].get(mode="fill", fill_value=0),
        in_axes=(1, 0),
        out_axes=1,
    )
    code, d = formats.quantize_e4m3(gather(x, columns))
    back = columns_to_segments(first_slot, slots, width, block_k)
    flat = lax.bitcast_convert_type(code, jnp.uint8).reshape(t, slots, -1)
    code = jax.vmap(lambda row, c: row[:, c], in_axes=(1, 0), out_axes=1)(flat, back)
    code = lax.bitcast_convert_type(code, jnp.float8_e4m3fn)
    return code.reshape(t, total), jnp.asarray(d)


def apply_global_scale(
    y: Float32[Array, "*shape"], global_scale: Array | None, kind: str | None
) -> Float32[Array, "*shape"]:
    """Multiplies or divides a reduced result once by the global scale, rounded.

    Bits:
        ORDERED, and a word of its own: no later addition absorbs the product.
    """
    if global_scale is None:
        return y
    scale = jnp.broadcast_to(global_scale, y.shape)
    if y.size == 0:
        return y
    if kind == "divisor":
        return rounded(jnp.asarray(formats.rounded_divide(y, scale)), runtime_zero(y))
    return rounded(y * scale, runtime_zero(y))
