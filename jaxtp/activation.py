"""SwiGLU in its four named forms, on one exponential that does not depend on shape.

`jnp.exp` on XLA:CPU gives other words in the vector body of a loop than in its tail, so
the exponential is written here, with each rounding stated.
"""

import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxtp import formats
from jaxtp.derivative import with_derivative_of
from jaxtp.errors import ConfigError, DtypeError, ShapeError
from jaxtp.rounding import rounded, runtime_zeros

SwigluForm = Literal["plain", "step", "deepseek_v4", "gpt_oss"]

GPT_OSS_ALPHA = np.float32(1.702)

EXP_LOWEST, EXP_HIGHEST = np.float32(-86.0), np.float32(89.0)
"""Below the first, `exponential` is +0; at the second it is infinite."""

_LOG2_E = np.float32(1.0 / math.log(2.0))
# The high part has ten bits, so its product with an exponent is exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(math.log(2.0) - 0.693359375)
_TAYLOR = tuple(np.float32(1.0 / math.factorial(n)) for n in range(8, 1, -1))


def swiglu(
    gate: Float32[Array, "..."],
    up: Float32[Array, "..."],
    limit: float | None = None,
    form: SwigluForm = "plain",
) -> Float32[Array, "..."]:
    """`silu(g) * u`, `silu(g) = g / (1 + exp(-g))`, with the clamp `L` of a form.

    - "plain": `silu(g) * u`; has no clamp, so `limit` must be None;
    - "step": `min(silu(g), L) * clip(u, -L, L)`, the gate from above, after silu;
    - "deepseek_v4": `silu(min(g, L)) * clip(u, -L, L)`, the gate before silu;
    - "gpt_oss": `g' / (1 + exp(-alpha * g')) * (clip(u, -L, L) + 1)`, `g' = min(g, L)`,
      `alpha = 1.702`.

    Args:
        gate: f32 of any shape.
        up: f32 of the shape of `gate`.
        limit: The clamp `L`, a static number; None is no clamp. A config that writes 0
            for "no clamp" must be read as None.
        form: One of the four names.

    Returns:
        f32 of the shape of `gate`. NaN stays NaN.

    Raises:
        ConfigError: If the form is unknown, or the limit is non-finite, zero, negative,
            or given for "plain".
        DtypeError: If an operand is not float32.
        ShapeError: If the shapes differ.

    Bits:
        ORDERED: the words of `oracle.swiglu`. One exponential (see `exponential`), a
        correctly rounded division, every product and sum rounded by itself.
    """
    check_swiglu_options(limit, form)
    gate, up = _operand("gate", gate), _operand("up", up)
    if gate.shape != up.shape:
        raise ShapeError(
            f"`gate` and `up` must have one shape; got {list(gate.shape)} and "
            f"{list(up.shape)}."
        )
    bound = None if limit is None else float(limit)
    return _swiglu(gate, up, limit=bound, form=form)


def check_swiglu_options(limit: Any, form: Any) -> None:
    """Checks the static options of `swiglu`.

    Raises:
        ConfigError: As `swiglu`.
    """
    if form not in get_args(SwigluForm):
        raise ConfigError(
            f"`form` must be one of {get_args(SwigluForm)}; got {form!r}."
        )
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int | float | np.floating):
        raise ConfigError(f"`limit` must be a static number or None; got {limit!r}.")
    if not (np.isfinite(np.float32(limit)) and np.float32(limit) > 0):
        raise ConfigError(
            f"`limit` must be finite and positive; got {limit!r}. Pass None for no "
            "clamp, which is what a 0 in a model's config means."
        )
    if form == "plain":
        raise ConfigError(
            f"form='plain' has no clamp; got limit={limit!r}. Name the clamped form: "
            "'step', 'deepseek_v4' or 'gpt_oss'."
        )


def _operand(name: str, values: Any) -> Array:
    array = jnp.asarray(values)
    if array.dtype != jnp.float32:
        raise DtypeError(f"`{name}` must be float32; got {array.dtype}.")
    return array


@functools.partial(jax.jit, static_argnames=("limit", "form"))
def _swiglu(gate: Array, up: Array, *, limit: float | None, form: SwigluForm) -> Array:
    if gate.size == 0:
        return gate
    options = {"limit": limit, "form": form}
    plain = functools.partial(_plain_swiglu, **options)
    return with_derivative_of(plain, functools.partial(_exact_swiglu, **options))(
        gate, up
    )


def _exact_swiglu(
    gate: Array, up: Array, *, limit: float | None, form: SwigluForm
) -> Array:
    zero = runtime_zeros(gate, up)
    # An operand that the caller computed as a product with a constant must not be
    # merged with the constants here.
    gate, up = rounded(gate, zero), rounded(up, zero)
    if limit is not None:
        bound = jnp.float32(limit)
        up = jnp.clip(up, -bound, bound)
        gate = gate if form == "step" else jnp.minimum(gate, bound)
    slope = rounded(gate * GPT_OSS_ALPHA, zero) if form == "gpt_oss" else gate
    denominator = jnp.float32(1.0) + exponential(-slope, zero)
    activated = jnp.asarray(formats.rounded_divide(gate, denominator))
    if limit is not None and form == "step":
        activated = jnp.minimum(activated, jnp.float32(limit))
    if form == "gpt_oss":
        up = up + jnp.float32(1.0)
    return rounded(activated * up, zero)


def _plain_swiglu(
    gate: Array, up: Array, *, limit: float | None, form: SwigluForm
) -> Array:
    if limit is not None:
        up = jnp.clip(up, -limit, limit)
        gate = gate if form == "step" else jnp.minimum(gate, limit)
    slope = gate * GPT_OSS_ALPHA if form == "gpt_oss" else gate
    activated = gate * jax.nn.sigmoid(slope)
    if limit is not None and form == "step":
        activated = jnp.minimum(activated, limit)
    return activated * (up + 1.0 if form == "gpt_oss" else up)


def exponential(
    x: Float32[Array, "..."], zero: Int32[Array, "..."]
) -> Float32[Array, "..."]:
    """`e^x = 2^n * (1 + (r + r^2 * q(r)))`, `n = rint(x / ln 2)`, `r = x - n * ln 2`.

    `q` is the Taylor series to `r^8`, by Horner's rule. The relative error is at most
    2^-23: `r` is off by 2^-26 and a quarter, the terms under 1 by 2^-25 together, and
    the last addition by 2^-24 of a value in (0.70, 1.42).

    Args:
        x: f32. Below -86 the result is +0 (no subnormal is ever produced), above
            88.7228 infinity; NaN stays NaN.
        zero: `runtime_zeros` of the data behind `x`.

    Bits:
        ORDERED. Not differentiable: its callers give derivatives.
    """
    clipped = jnp.clip(x, EXP_LOWEST, EXP_HIGHEST)
    nearest = jnp.rint(clipped * _LOG2_E)
    rest = (clipped - nearest * _LN2_HIGH) - rounded(nearest * _LN2_LOW, zero)
    series = jnp.full_like(rest, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        series = coefficient + rounded(series * rest, zero)
    square = rounded(rest * rest, zero)
    mantissa = jnp.float32(1.0) + (rest + rounded(square * series, zero))
    # 2^n itself would be infinite for n = 128; both products here are exact.
    half = lax.bitcast_convert_type(
        (nearest.astype(jnp.int32) + jnp.int32(126)) << 23, jnp.float32
    )
    result = mantissa * half * jnp.float32(2.0)
    result = jnp.where(x < EXP_LOWEST, jnp.float32(0.0), result)
    return jnp.where(jnp.isnan(x), x, result)
