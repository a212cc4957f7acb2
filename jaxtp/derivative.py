"""Derivatives of functions written on bits, which have none of their own."""

from collections.abc import Callable
from typing import Any

import jax


def with_derivative_of(
    plain: Callable[..., Any], exact: Callable[..., Any]
) -> Callable[..., Any]:
    """`exact`, with the derivative of `plain`: the same function in plain arithmetic.

    Args:
        plain: Differentiable function of the same float arrays.
        exact: The function whose words are promised.

    Bits:
        Those of `exact`, with or without a derivative; the words of the derivative are
        not promised.
    """
    function = jax.custom_jvp(exact)

    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return function(*primals), jax.jvp(plain, primals, tangents)[1]

    function.defjvp(jvp)
    return function
