"""Banks of experts from one tensor for each expert, without reading any."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jaxtp.checkpoint.lazy import LazyStack
from jaxtp.errors import CheckpointError
from jaxtp.weights import Weight, validate

_EXPERT = re.compile(r"(.+)\.(\d+)\.([^.]+)", re.ASCII)


def expert_numbers(modules: Iterable[str]) -> dict[tuple[str, str], list[int]]:
    """The numbers in `<prefix>.<number>.<projection>`, by prefix and projection.

    Args:
        modules: Module names.
    """
    table: dict[tuple[str, str], list[int]] = {}
    for module in modules:
        if match := _EXPERT.fullmatch(module):
            table.setdefault((match[1], match[3]), []).append(int(match[2]))
    return {key: sorted(numbers) for key, numbers in table.items()}


def stack_weights(weights: Sequence[Weight], what: str) -> Weight:
    """The bank `[E, N, K]` of E weights `[N, K]`; its parts stay lazy.

    Args:
        weights: Weights with lazy parts, in the order of their experts.
        what: Name for messages.

    Raises:
        CheckpointError: If they differ in format, block shape or scale kind.
        ShapeError: If they differ in shape.
    """
    statics = {_statics(weight) for weight in weights}
    if len(statics) > 1:
        raise CheckpointError(
            f"{what}: the experts of a bank must have one format; found "
            f"{sorted(map(str, statics))}."
        )
    parts = {
        field.name: LazyStack([getattr(weight, field.name) for weight in weights])
        for field in dataclasses.fields(weights[0])
        if not field.metadata.get("static")
    }
    bank = dataclasses.replace(weights[0], **parts)
    validate(bank)
    return bank


def _statics(weight: Weight) -> tuple[Any, ...]:
    """What must be equal for weights to be one bank."""
    static = [f.name for f in dataclasses.fields(weight) if f.metadata.get("static")]
    return (weight.format, *[getattr(weight, name) for name in static])
