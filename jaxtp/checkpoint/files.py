"""The files of a checkpoint folder: which there are, and reading bytes out of them."""

import math
import mmap
import os
import re
import weakref
from pathlib import Path

import numpy as np

from jaxtp.checkpoint.safetensors import (
    MAX_HEADER_BYTES,
    Header,
    header_length,
    load_json,
    parse_header,
)
from jaxtp.errors import CheckpointError, CorruptFileError, MissingTensorError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# A name in an index is a file beside the index: no separators, drives or dots alone.
_SHARD_NAME = re.compile(r"\w[\w.+-]*\.safetensors", re.ASCII)


class MappedFile:
    """One safetensors file, mapped read-only; tensors are read from it by byte range.

    Attributes:
        name: The file's name without its folder.
        header: The checked header.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(f"{path.name}: cannot be opened ({error}).") from None
        # Weights may outlive the checkpoint they came from: their file closes with the
        # last of them.
        self._closing = weakref.finalize(self, os.close, self._handle)
        try:
            self.header = self._read_header()
            self._map: mmap.mmap | None = mmap.mmap(
                self._handle, 0, access=mmap.ACCESS_READ
            )
        except BaseException:
            self._closing()
            raise

    def _size(self) -> int:
        return os.fstat(self._handle).st_size

    def _read_header(self) -> Header:
        size = self._size()
        with open(self._handle, "rb", closefd=False) as file:
            first = file.read(8)
            length = header_length(first, size, self.name)
            return parse_header(first + file.read(length), size, self.name)

    def array(self, start: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A view of the mapping, perhaps unaligned: copy it before it is kept.

        Raises:
            CheckpointError: If the file was closed.
            CorruptFileError: If the file has become shorter since it was opened.
        """
        if self._map is None:
            raise CheckpointError(f"{self.name}: the checkpoint has been closed.")
        count = math.prod(shape)
        # Touching a page beyond the end of a mapped file kills the process.
        if start + count * dtype.itemsize > self._size():
            raise CorruptFileError(f"{self.name}: the file was cut after opening.")
        if not count:
            return np.empty(shape, dtype)
        return np.frombuffer(self._map, dtype, count, start).reshape(shape)

    def close(self) -> None:
        """Closes the file; arrays read before stay valid, later reads raise."""
        self._closing()
        # Not unmapped by hand: the frames of a caught error may still hold a view.
        self._map = None


def open_files(path: Path) -> dict[str, MappedFile]:
    """Opens what `path` holds: the file of each tensor, by tensor name.

    Args:
        path: A folder with `model.safetensors.index.json`, with `model.safetensors`, or
            with one `*.safetensors`; or such a file itself.

    Raises:
        CheckpointError: If there is no checkpoint, or more than one.
        CorruptFileError: If a file, or the index, contradicts itself or the other.
        MissingTensorError: If the index names a file that is not there.
        UnsupportedError: If a tensor has a dtype that exists but cannot be read.
    """
    if path.is_file():
        return _open_single(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such file or folder.")
    index = path / INDEX_NAME
    if index.is_file():
        return _open_sharded(index)
    found = sorted(path.glob("*.safetensors"))
    if path / SINGLE_NAME in found:
        return _open_single(path / SINGLE_NAME)
    if len(found) != 1:
        raise CheckpointError(
            f"{path}: expected {INDEX_NAME}, {SINGLE_NAME} or one *.safetensors; found "
            f"{[p.name for p in found[:5]] or 'none'}."
        )
    return _open_single(found[0])


def _open_single(path: Path) -> dict[str, MappedFile]:
    file = MappedFile(path)
    return dict.fromkeys(file.header.entries, file)


def _open_sharded(index: Path) -> dict[str, MappedFile]:
    weight_map = read_index(index)
    names: dict[str, list[str]] = {}
    for tensor, file_name in weight_map.items():
        names.setdefault(file_name, []).append(tensor)
    if SINGLE_NAME not in names and (index.parent / SINGLE_NAME).exists():
        raise CheckpointError(
            f"{index.parent}: {INDEX_NAME} does not name {SINGLE_NAME}, yet both are "
            "there. Remove the one that does not belong to the checkpoint."
        )
    files: list[MappedFile] = []
    try:
        for file_name, tensors in names.items():
            files.append(_open_shard(index.parent / file_name, tensors))
    except BaseException:
        for file in files:
            file.close()
        raise
    by_name = {file.name: file for file in files}
    return {tensor: by_name[file_name] for tensor, file_name in weight_map.items()}


def _open_shard(path: Path, tensors: list[str]) -> MappedFile:
    if not path.is_file():
        raise MissingTensorError(
            f"{INDEX_NAME} names {path.name} for {tensors[0]!r} and {len(tensors) - 1} "
            "more tensors, but there is no such file."
        )
    file = MappedFile(path)
    listed, stored = set(tensors), set(file.header.entries)
    if listed == stored:
        return file
    file.close()
    if absent := sorted(listed - stored):
        raise MissingTensorError(
            f"{INDEX_NAME} places {absent[0]!r} in {path.name}, which does not hold it "
            f"({len(absent)} such tensors)."
        )
    extra = sorted(stored - listed)
    raise CorruptFileError(
        f"{path.name} holds {extra[0]!r}, which {INDEX_NAME} does not place there "
        f"({len(extra)} such tensors)."
    )


def read_index(path: Path) -> dict[str, str]:
    """The file name of each tensor, from an index file.

    Raises:
        CorruptFileError: If it is no index, or a file name is not a plain name.
    """
    table = read_json(path)
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptFileError(f"{path.name}: expected an object `weight_map`.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise CorruptFileError(
                f"{path.name}: {tensor!r} must name a *.safetensors file beside the "
                f"index, without separators; got {name!r}."
            )
    return weight_map


def read_json(path: Path) -> dict:
    """A JSON object from a file of at most 100 MB.

    Raises:
        CheckpointError: If the file cannot be read.
        CorruptFileError: If it is too long or holds no object.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_HEADER_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error}).") from None
    if len(text) > MAX_HEADER_BYTES:
        raise CorruptFileError(f"{path.name}: longer than {MAX_HEADER_BYTES} bytes.")
    table = load_json(text, path.name)
    if not isinstance(table, dict):
        raise CorruptFileError(f"{path.name}: expected a JSON object.")
    return table
