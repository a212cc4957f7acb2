"""One source for NumPy and JAX: the array module, and bits seen as another dtype."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtp.errors import DtypeError
from jaxtp.rounding import rounded

AnyArray: TypeAlias = jax.Array | np.ndarray

MAGNITUDE = np.uint32(0x7FFF_FFFF)
"""All bits of a float32 word but its sign."""

SIGN = np.uint32(0x8000_0000)
INFINITY = np.uint32(0x7F80_0000)
NAN = np.uint32(0x7FC0_0000)


def array_module(*operands: Any) -> Any:
    """`jax.numpy` if any operand is a JAX array or tracer, `numpy` otherwise."""
    return jnp if any(isinstance(x, jax.Array) for x in operands) else np


def bitcast(values: Any, dtype: Any) -> Any:
    """The same bits as another dtype of the same size.

    Bits:
        The identity, subnormals and NaN payloads included.
    """
    if isinstance(values, jax.Array):
        return lax.bitcast_convert_type(values, dtype)
    return np.asarray(values).view(dtype)


def words(values: Any) -> Any:
    """The uint32 words of a float32 array."""
    return bitcast(values, np.uint32)


def floats(bits: Any) -> Any:
    """The float32 array that has these uint32 words."""
    return bitcast(bits, np.float32)


def rounded_product(product: Any) -> Any:
    """A product as a word of its own, never part of a fused multiply-add.

    The zero that hides a JAX product from compilers comes from its own bits, element
    by element: it exists at run time wherever the product does, also when an operand
    is a constant of the program.

    Bits:
        The identity.
    """
    if not isinstance(product, jax.Array):
        return product
    n = lax.bitcast_convert_type(product, jnp.int32)
    # Four consecutive integers multiply to a multiple of 8, also modulo 2^32.
    zero = (n * (n + 1) * (n + 2) * (n + 3)) & 7
    return rounded(product, zero)


def require_dtype(name: str, values: Any, *dtypes: Any) -> None:
    """Checks that an array has one of `dtypes`.

    Raises:
        DtypeError: If it has another one.
    """
    found = np.dtype(values.dtype)
    if found not in [np.dtype(d) for d in dtypes]:
        expected = " or ".join(np.dtype(d).name for d in dtypes)
        raise DtypeError(f"`{name}` must be {expected}; got {found.name}.")
