"""Tensors that are read when they are indexed, and only where they are indexed.

Values are decoded and checked on the way out, so a NaN scale is an error of the slice
that holds it and costs nothing before.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtp.checkpoint.files import MappedFile
from jaxtp.checkpoint.indexing import global_index, normalize_index
from jaxtp.checkpoint.roles import PLAIN, Role, widen_scale
from jaxtp.checkpoint.safetensors import Entry
from jaxtp.errors import NonFiniteError, ShapeError


@dataclasses.dataclass
class ReadCounter:
    """How many bytes of tensor data a checkpoint has been asked for."""

    total: int = 0


class LazyTensor:
    """A tensor in a file: its shape and dtype now, its values when indexed.

    `tensor[index]` reads the elements that `index` selects and returns them as a new
    NumPy array; one integer on a tensor of three axes or more gives another lazy
    tensor, so that an expert of a bank costs nothing. `numpy.asarray` reads all.

    Attributes:
        name: The name in the file.
        shape: The logical shape.
        dtype: The dtype that reading gives; scales are float32 however they are stored.
        stored_dtype: The dtype in the file.
        file_name: The file that holds it.

    Bits:
        BYTES, except that scales are widened to float32, which is exact.
    """

    def __init__(
        self,
        file: MappedFile,
        entry: Entry,
        counter: ReadCounter,
        role: Role = PLAIN,
        *,
        strict: bool = True,
    ) -> None:
        self.name = entry.name
        self.shape = entry.shape
        self.stored_dtype = entry.dtype
        self._file = file
        self._start = entry.start
        self._counter = counter
        self._role = role
        self._strict = strict
        # Where this view lies in the stored tensor, for messages.
        self._leading: tuple[int, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        """The dtype that reading gives."""
        return np.dtype(np.float32) if self._role.widen else self.stored_dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of stored bytes."""
        return self.size * self.stored_dtype.itemsize

    @property
    def file_name(self) -> str:
        """The file that holds the tensor."""
        return self._file.name

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError(f"{self.name}: a scalar has no length.")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self.dtype.name}{list(self.shape)})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self._read(())
        return values if dtype is None else values.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> Any:
        if self.ndim >= 3 and isinstance(index, int | np.integer):
            return self.expert(int(index))
        return self._read(index if isinstance(index, tuple) else (index,))

    def expert(self, index: int) -> "LazyTensor":
        """The sub-tensor at one position of the first axis, still unread.

        Raises:
            ShapeError: If there is no such position.
        """
        if not self.shape or not -self.shape[0] <= index < self.shape[0]:
            raise ShapeError(f"{self.name}: no index {index} in shape {self.shape}.")
        view = self._copy()
        view.shape = self.shape[1:]
        view._leading = (*self._leading, index % self.shape[0])
        view._start = self._start + view._leading[-1] * view.nbytes
        return view

    def reshape(self, shape: tuple[int, ...]) -> "LazyTensor":
        """The same elements in row-major order as another shape, still unread.

        Raises:
            ShapeError: If the number of elements differs.
        """
        if math.prod(shape) != self.size:
            raise ShapeError(f"{self.name}: {self.shape} cannot be read as {shape}.")
        view = self._copy()
        view.shape = shape
        return view

    def as_role(self, role: Role) -> "LazyTensor":
        """The same tensor, decoded and checked as `role` says."""
        view = self._copy()
        view._role = role
        return view

    def _copy(self) -> "LazyTensor":
        view = object.__new__(LazyTensor)
        view.__dict__.update(self.__dict__)
        return view

    def _read(self, index: tuple[Any, ...]) -> np.ndarray:
        full = normalize_index(index, self.shape, self.name)
        mapped = self._file.array(self._start, self.shape, self.stored_dtype)
        # A copy: aligned, and valid after the file is closed.
        values = np.array(mapped[full], order="C", copy=True)
        self._counter.total += values.nbytes
        if self._role.widen:
            values = widen_scale(values)
        if self._strict and self._role.bad is not None:
            self._check(values, full)
        return values

    def _check(self, values: np.ndarray, index: tuple[int | slice, ...]) -> None:
        assert self._role.bad is not None
        bad = self._role.bad(values)
        if not bad.any():
            return
        first = np.unravel_index(int(np.argmax(bad)), bad.shape) if bad.ndim else ()
        at = [*self._leading, *global_index(first, index, self.shape)]
        raise NonFiniteError(
            f"{self.name}: {self._role.rule}; got {values[first]} at index {at} "
            f"({int(np.count_nonzero(bad))} such values in what was read)."
        )


class LazyStack:
    """Tensors of one shape and dtype as one with a new leading axis, still unread.

    Indexing follows `LazyTensor`: one integer gives a part as it is (lazy where it has
    an axis), anything else reads what it selects, part by part.

    Attributes:
        parts: The stacked tensors.
    """

    def __init__(self, parts: Sequence[LazyTensor]) -> None:
        self.parts = tuple(parts)
        first = self.parts[0]
        for part in self.parts:
            if (part.shape, part.dtype) != (first.shape, first.dtype):
                raise ShapeError(
                    f"{part.name} is {part.dtype.name}{list(part.shape)}; "
                    f"{first.name} is {first.dtype.name}{list(first.shape)}. The "
                    "matrices of a bank must be alike."
                )

    @property
    def name(self) -> str:
        """The first part's name, and how many there are."""
        return f"{self.parts[0].name} (and {len(self.parts) - 1} more)"

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, the stacked axis first."""
        return (len(self.parts), *self.parts[0].shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype that reading gives."""
        return self.parts[0].dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of stored bytes."""
        return sum(part.nbytes for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        return f"LazyStack({self.name!r}, {self.dtype.name}{list(self.shape)})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = np.stack([np.asarray(part) for part in self.parts])
        return values if dtype is None else values.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> Any:
        full = normalize_index(
            index if isinstance(index, tuple) else (index,), self.shape, self.name
        )
        head, rest = full[0], full[1:]
        if isinstance(head, int):
            part = self.parts[head]
            whole = not isinstance(index, tuple) and part.ndim > 0
            return part if whole else part[rest]
        chosen = [part[rest] for part in self.parts[head]]
        if chosen:
            return np.stack(chosen)
        return np.empty(self.shape, self.dtype)[full]
