"""Indices of integers and slices, and where a selected element stood before."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtp.errors import ShapeError


def normalize_index(
    index: tuple[Any, ...], shape: tuple[int, ...], name: str
) -> tuple[int | slice, ...]:
    """One non-negative integer or slice for each axis.

    Raises:
        ShapeError: If the index holds anything else, or does not fit the shape.
    """
    dots = [i for i, part in enumerate(index) if part is Ellipsis]
    if dots:
        at = dots[0]
        missing = len(shape) - (len(index) - 1)
        index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    if len(index) > len(shape):
        raise ShapeError(f"{name}: too many indices {index} for shape {shape}.")
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    full: list[int | slice] = []
    for part, size in zip(index, shape, strict=True):
        if isinstance(part, slice):
            full.append(part)
        elif isinstance(part, int | np.integer) and -size <= part < size:
            full.append(int(part) % size)
        else:
            raise ShapeError(
                f"{name}: an index must be integers and slices within shape {shape}; "
                f"got {part!r}."
            )
    return tuple(full)


def global_index(
    local: Sequence[Any], index: tuple[int | slice, ...], shape: tuple[int, ...]
) -> list[int]:
    """Where an element of a selection stands in the tensor selected from."""
    remaining = iter(local)
    at: list[int] = []
    for part, size in zip(index, shape, strict=True):
        if isinstance(part, slice):
            start, _, step = part.indices(size)
            at.append(start + step * int(next(remaining)))
        else:
            at.append(part)
    return at
