"""What a checkpoint holds, tensor by tensor, and everything that is wrong with it."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxtp.checkpoint.inventory import Module
from jaxtp.checkpoint.layouts import WeightSpec
from jaxtp.checkpoint.safetensors import Entry
from jaxtp.errors import (
    JaxtpError,
    LeftoverTensorError,
    MissingTensorError,
    NonFiniteError,
)

if TYPE_CHECKING:
    from jaxtp.checkpoint.reader import Checkpoint

_CHUNK_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        tensor: The weight or tensor that it concerns.
        error: The error that reading it would raise.
    """

    tensor: str
    error: JaxtpError

    @property
    def kind(self) -> str:
        """The error's class name."""
        return type(self.error).__name__

    @property
    def message(self) -> str:
        """The error's message."""
        return str(self.error)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One weight, or one unquantized tensor.

    Attributes:
        name: Its name.
        format: `"e4m3"`, `"nvfp4"`, `"bf16"` or a stored dtype; `"?"` if unknown.
        shape: The logical shape.
        stored: The dtype in the file.
        scale_dtype: The stored dtype of its block scales.
        scale_shape: Their stored shape.
        global_scale_kind: `"multiplier"` or `"divisor"`, for NVFP4.
        block_shape: Rows and columns of an FP8 block.
        excluded: Whether the config's exclusion list names it.
        files: The files that hold its tensors.
        tensors: The stored tensors that make it.
        nbytes: Stored bytes, companions included.
        problem: What is wrong with it.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    stored: str
    scale_dtype: str | None = None
    scale_shape: tuple[int, ...] | None = None
    global_scale_kind: str | None = None
    block_shape: tuple[int, int] | None = None
    excluded: bool = False
    files: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    nbytes: int = 0
    problem: Problem | None = None

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `COLUMNS`."""
        scale = f"{self.scale_dtype}{list(self.scale_shape or ())}"
        block = "x".join(map(str, self.block_shape or ()))
        return (
            self.name,
            self.format,
            str(list(self.shape)),
            self.stored,
            scale if self.scale_dtype else "",
            block or self.global_scale_kind or "",
            str(self.nbytes),
            " ".join(self.files),
            self.problem.kind if self.problem else "",
        )


COLUMNS = (
    "name",
    "format",
    "shape",
    "stored",
    "scales",
    "block / global",
    "bytes",
    "file",
    "problem",
)


@dataclasses.dataclass(frozen=True)
class Report:
    """A checkpoint's contents.

    Attributes:
        path: Where the checkpoint lies.
        method: The config's `quant_method`.
        rows: Weights and tensors by name.
        notes: What is unusual but not wrong.
        values_checked: Whether weights were read and their values checked.
        problems: Everything that is wrong, in the order of the rows.
    """

    path: str
    method: str | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    values_checked: bool

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that is wrong, in the order of the rows."""
        return tuple(row.problem for row in self.rows if row.problem)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(row.nbytes for row in self.rows)

    def raise_problems(self) -> None:
        """Raises the first problem, if there is one, and says how many follow.

        Raises:
            JaxtpError: Of the class that reading the tensor would raise.
        """
        if not self.ok:
            first = self.problems[0].error
            more = len(self.problems) - 1
            raise type(first)(f"{first} ({more} more problems.)") from None

    def __str__(self) -> str:
        table = [COLUMNS, *[row.cells() for row in self.rows]]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
        checked = "values checked" if self.values_checked else "values not read"
        verdict = "ok" if self.ok else f"{len(self.problems)} problems"
        lines.append(
            f"{len(self.rows)} entries, {self.nbytes} bytes, quant_method "
            f"{self.method}, {checked}: {verdict}"
        )
        lines += [f"note: {note}" for note in self.notes]
        lines += [str(problem) for problem in self.problems]
        return "\n".join(lines)


def make_report(checkpoint: "Checkpoint", *, values: bool) -> Report:
    """Lists a checkpoint's tensors and finds everything wrong with them.

    Args:
        checkpoint: An open checkpoint.
        values: Whether to read weights and check their values.
    """
    inventory = checkpoint.inventory
    rows = [_module_row(checkpoint, m, values) for m in inventory.modules.values()]
    rows += [_plain_row(checkpoint, entry) for entry in inventory.plain.values()]
    rows += [
        _entry_row(checkpoint, entry, "kv scale")
        for entry in inventory.kv_scales.values()
    ]
    rows.sort(key=lambda row: row.name)
    notes = [
        f"{row.name} is quantized although the config excludes it."
        for row in rows
        if row.excluded and row.format in ("e4m3", "nvfp4")
    ]
    return Report(
        str(checkpoint.path),
        checkpoint.quantization.method,
        tuple(rows),
        tuple(notes),
        values,
    )


def _module_row(checkpoint: "Checkpoint", module: Module, values: bool) -> Row:
    try:
        spec = checkpoint.spec(module.name)
        if spec.is_weight:
            checkpoint.weight(module.name)
    except JaxtpError as error:
        return _unresolved_row(checkpoint, module, error)
    row = _spec_row(checkpoint, spec)
    if values and spec.is_quantized:
        return dataclasses.replace(row, problem=_value_problem(checkpoint, spec))
    return row


def _spec_row(checkpoint: "Checkpoint", spec: WeightSpec) -> Row:
    name = f"{spec.module}.weight"
    scale = spec.scale[0] if spec.scale else None
    is_nvfp4 = spec.format == "nvfp4"
    return Row(
        name,
        spec.format,
        spec.shape,
        spec.code.tag,
        scale_dtype=scale.tag if scale else None,
        scale_shape=scale.shape if scale else None,
        global_scale_kind=spec.global_scale_kind if is_nvfp4 else None,
        block_shape=spec.block_shape,
        excluded=checkpoint.quantization.excluded(spec.module),
        **_storage(checkpoint, spec.entries),
    )


def _unresolved_row(checkpoint: "Checkpoint", module: Module, error: JaxtpError) -> Row:
    entries = (*module.mains.values(), *module.companions.values())
    first = entries[0]
    if not module.mains:
        error = LeftoverTensorError(
            f"{first.name} belongs to no weight: there is no {module.name}.weight."
        )
    name = f"{module.name}.weight" if module.mains else first.name
    return Row(
        name,
        "?",
        first.shape,
        first.tag,
        excluded=checkpoint.quantization.excluded(module.name),
        problem=Problem(name, error),
        **_storage(checkpoint, entries),
    )


def _plain_row(checkpoint: "Checkpoint", entry: Entry) -> Row:
    row = _entry_row(checkpoint, entry, entry.tag.lower())
    if entry.tag not in ("F8_E4M3", "F8_E5M2"):
        return row
    error = MissingTensorError(
        f"{entry.name} holds FP8 codes and no scale belongs to it."
    )
    return dataclasses.replace(row, format="?", problem=Problem(entry.name, error))


def _entry_row(checkpoint: "Checkpoint", entry: Entry, label: str) -> Row:
    return Row(
        entry.name, label, entry.shape, entry.tag, **_storage(checkpoint, [entry])
    )


def _storage(checkpoint: "Checkpoint", entries: Any) -> dict[str, Any]:
    files = dict.fromkeys(checkpoint.tensor(e.name).file_name for e in entries)
    return {
        "files": tuple(files),
        "tensors": tuple(e.name for e in entries),
        "nbytes": sum(e.nbytes for e in entries),
    }


def _value_problem(checkpoint: "Checkpoint", spec: WeightSpec) -> Problem | None:
    """Reads every part of a weight, a bounded number of bytes at a time."""
    for part in checkpoint.parts(spec, strict=True).values():
        lead = part.shape[0] if part.shape else 1
        rows = max(1, _CHUNK_BYTES * lead // part.nbytes)
        try:
            for start in range(0, lead, rows):
                part[start : start + rows] if part.shape else part[()]
        except NonFiniteError as error:
            return Problem(f"{spec.module}.weight", error)
    return None
