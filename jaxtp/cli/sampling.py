"""Which matrices, activations, operations and token counts a sweep runs."""

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Literal

from jaxtp.checkpoint import Checkpoint, Row
from jaxtp.cli.roles import stays_whole
from jaxtp.errors import MissingTensorError
from jaxtp.program import ACTIVATIONS, Activation
from jaxtp.weights import Fp8Weight, Nvfp4Weight, Weight

Operation = Literal["row", "column"]
OPERATIONS: tuple[Operation, ...] = ("row", "column")
FORMATS = ("bf16", "e4m3", "nvfp4")

COVERAGE = {
    "covering": (
        "Covered: every shape with every activation, in turn by row and by column, the "
        "numbers of tokens in turn; both plans and all meshes for each. --full runs "
        "every combination."
    ),
    "full": "Covered: every shape, activation, operation, plan, T and mesh.",
}
"""What `covering_cases` and `all_cases` cover, in words."""

Family = tuple[str, tuple[int, ...], object]
"""Format, shape and static facts: weights of one family share compiled programs."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """One matrix `[N, K]` under test; `weight` may be lazy."""

    name: str
    weight: Weight

    @property
    def family(self) -> Family:
        """What decides the compiled program."""
        w = self.weight
        static = w.block_shape if isinstance(w, Fp8Weight) else None
        if isinstance(w, Nvfp4Weight):
            static = w.global_scale_kind
        return w.format, tuple(w.shape), static


@dataclasses.dataclass(frozen=True)
class Case:
    """Matrices of one family, run by one compiled program on each mesh."""

    subjects: tuple[Subject, ...]
    activation: Activation
    operation: Operation
    tokens: int


def sample(
    ckpt: Checkpoint, *, pattern: str, limit: int, formats: Sequence[str]
) -> list[Subject]:
    """Up to `limit` matrices of a checkpoint, of as many families as possible.

    A bank stands for its last expert. Nothing is read but a bank's global scales.

    Args:
        ckpt: An open checkpoint.
        pattern: Shell pattern of weight names. "*" leaves out matrices that are not
            cut (embeddings, routers).
        limit: Most matrices to return.
        formats: Weight formats to consider.

    Raises:
        MissingTensorError: If nothing fits.
    """
    families: dict[Family, list[Subject]] = {}
    for row in ckpt.report().rows:
        if not _fits(row, pattern, formats):
            continue
        subject = _subject(row.name, ckpt.weight(row.name))
        families.setdefault(subject.family, []).append(subject)
    if not families:
        raise MissingTensorError(
            f"no weight of {ckpt.path.name} matches {pattern!r} with a format in "
            f"{tuple(formats)}; `jaxtp inspect` lists the names."
        )
    longest = max(map(len, families.values()))
    by_turns = [s[i] for i in range(longest) for s in families.values() if i < len(s)]
    return by_turns[:limit]


def _fits(row: Row, pattern: str, formats: Sequence[str]) -> bool:
    if row.problem or row.format not in formats or len(row.shape) not in (2, 3):
        return False
    if pattern == "*" and stays_whole(row.name):
        return False
    return fnmatch.fnmatchcase(row.name, pattern)


def _subject(name: str, weight: Weight) -> Subject:
    if not weight.is_bank:
        return Subject(name, weight)
    last = weight.shape[0] - 1
    return Subject(f"{name}[{last}]", weight.expert(last))


def all_cases(subjects: Sequence[Subject], tokens: Sequence[int]) -> list[Case]:
    """Every family with every activation, operation and token count."""
    return [
        Case(members, activation, operation, t)
        for members in _families(subjects)
        for activation in _activations(members)
        for operation in OPERATIONS
        for t in tokens
    ]


def covering_cases(subjects: Sequence[Subject], tokens: Sequence[int]) -> list[Case]:
    """Every family once with every activation, in turn by row and by column.

    Each activation meets as many token counts as there are families of its format.
    """
    cases: list[Case] = []
    position: dict[str, int] = dict.fromkeys(FORMATS, 0)
    for members in _families(subjects):
        format = members[0].weight.format
        j = position[format]
        position[format] += 1
        for i, activation in enumerate(_activations(members)):
            turn = FORMATS.index(format) + i + j
            operation = OPERATIONS[(i + j) % 2]
            cases.append(
                Case(members, activation, operation, tokens[turn % len(tokens)])
            )
    return cases


def _families(subjects: Sequence[Subject]) -> list[tuple[Subject, ...]]:
    families: dict[Family, list[Subject]] = {}
    for subject in subjects:
        families.setdefault(subject.family, []).append(subject)
    return [tuple(members) for members in families.values()]


def _activations(members: tuple[Subject, ...]) -> tuple[Activation, ...]:
    return ACTIVATIONS[members[0].weight.format]  # pyright: ignore[reportReturnType]
