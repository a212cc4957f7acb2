"""The safetensors container: an eight-byte length, a JSON header, then raw bytes.

The header is checked in full before anything is mapped: whatever the bytes are,
reading them gives entries that fit the file exactly, or a typed error.
"""

import dataclasses
import json
import math
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from jaxtp.errors import CorruptFileError, UnsupportedError

MAX_HEADER_BYTES = 100_000_000
"""The longest header that the format allows."""

MAX_RANK = 32
_MAX_ELEMENTS = 2**63 - 1

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""The dtype tags that can be read, and what NumPy calls them."""

TAGS = {dtype: tag for tag, dtype in DTYPES.items()}

_KNOWN_UNREADABLE = {
    "F4": "four-bit elements without a scale of their own",
    "F6_E2M3": "six-bit elements",
    "F6_E3M2": "six-bit elements",
    "F8_E4M3FNUZ": "the same bytes as F8_E4M3 with other values",
    "F8_E5M2FNUZ": "the same bytes as F8_E5M2 with other values",
    "C64": "complex numbers",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies in its file.

    Attributes:
        name: The tensor's name.
        tag: The dtype as the header spells it, a key of `DTYPES`.
        shape: The stored shape.
        start: First byte, counted from the start of the file.
        nbytes: Number of bytes.
    """

    name: str
    tag: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype."""
        return DTYPES[self.tag]


@dataclasses.dataclass(frozen=True)
class Header:
    """A parsed header: the entries in file order, and the free-form metadata."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def parse_header(prefix: bytes, file_size: int, what: str) -> Header:
    """Parses and checks the header of a file of `file_size` bytes.

    Args:
        prefix: The first bytes of the file, the whole header included.
        file_size: Size of the whole file.
        what: Name of the file, for messages.

    Raises:
        CorruptFileError: If the header is no header, or contradicts the file.
        UnsupportedError: If a tensor has a dtype that exists but cannot be read.
    """
    length = header_length(prefix[:8], file_size, what)
    if len(prefix) < 8 + length:
        raise CorruptFileError(f"{what}: the header is cut off after {len(prefix)} B.")
    table = _parse_json(prefix[8 : 8 + length], what)
    metadata = _metadata(table.pop("__metadata__", {}), what)
    data_start = 8 + length
    entries = [_entry(name, row, data_start, what) for name, row in table.items()]
    entries.sort(key=lambda e: (e.start, e.nbytes))
    _check_tiling(entries, data_start, file_size, what)
    return Header({entry.name: entry for entry in entries}, metadata)


def header_length(first: bytes, file_size: int, what: str) -> int:
    """The header's length from the first eight bytes of a file.

    Raises:
        CorruptFileError: If the file is too short for it, or it exceeds the format's
            limit.
    """
    if len(first) < 8:
        raise CorruptFileError(
            f"{what}: a safetensors file has at least 8 bytes; got {len(first)}."
        )
    length = int.from_bytes(first, "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CorruptFileError(
            f"{what}: the header must be 2 to {MAX_HEADER_BYTES} bytes long; the file "
            f"says {length}."
        )
    if 8 + length > file_size:
        raise CorruptFileError(
            f"{what}: the header claims {length} bytes; the file has {file_size}."
        )
    return length


def _parse_json(text: bytes, what: str) -> dict[str, Any]:
    if text[:1] != b"{":
        raise CorruptFileError(f"{what}: the header must start with '{{'.")
    table = load_json(text, what)
    if not isinstance(table, dict):
        raise CorruptFileError(f"{what}: the header must be a JSON object.")
    return table


def load_json(text: bytes, what: str) -> Any:
    """Parses strict JSON: UTF-8, no key twice, no NaN or Infinity.

    Raises:
        CorruptFileError: If `text` is anything else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) == len(pairs):
            return table
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise CorruptFileError(f"{what}: the key {_quote(twice)} stands twice.")

    def constant(word: str) -> NoReturn:
        raise CorruptFileError(f"{what}: {word} is no JSON.")

    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant
        )
    except CorruptFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{what}: not readable as JSON ({error}).") from None


def _metadata(value: Any, what: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(
        isinstance(text, str) for text in value.values()
    ):
        raise CorruptFileError(f"{what}: __metadata__ must map strings to strings.")
    return value


def _entry(name: str, row: Any, data_start: int, what: str) -> Entry:
    where = f"{what}: tensor {_quote(name)}"
    if not name or not _encodable(name):
        raise CorruptFileError(f"{where}: a name must be non-empty UTF-8 text.")
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise CorruptFileError(
            f"{where}: expected the keys dtype, shape and data_offsets."
        )
    tag = _tag(row["dtype"], where)
    shape = _integers(row["shape"], where, "shape")
    offsets = _integers(row["data_offsets"], where, "data_offsets")
    if len(shape) > MAX_RANK:
        raise CorruptFileError(f"{where}: {len(shape)} axes; at most {MAX_RANK}.")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptFileError(
            f"{where}: data_offsets must be [start, stop]; got {list(offsets)}."
        )
    size = math.prod(shape) * DTYPES[tag].itemsize
    nbytes = offsets[1] - offsets[0]
    if size != nbytes or size > _MAX_ELEMENTS:
        raise CorruptFileError(
            f"{where}: {tag}{list(shape)} takes {size} bytes; data_offsets "
            f"{list(offsets)} hold {nbytes}."
        )
    return Entry(name, tag, shape, data_start + offsets[0], nbytes)


def _quote(value: Any) -> str:
    """A hostile header's own words, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _encodable(name: str) -> bool:
    """Whether the text is free of lone surrogates, which no file name or log takes."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _tag(value: Any, where: str) -> str:
    if isinstance(value, str) and value in DTYPES:
        return value
    readable = ", ".join(DTYPES)
    if isinstance(value, str) and value in _KNOWN_UNREADABLE:
        raise UnsupportedError(
            f"{where}: dtype {value} ({_KNOWN_UNREADABLE[value]}) cannot be read. "
            f"Readable: {readable}."
        )
    raise CorruptFileError(
        f"{where}: unknown dtype {_quote(value)}. Readable: {readable}."
    )


def _integers(values: Any, where: str, field: str) -> tuple[int, ...]:
    """A JSON list of integers in [0, 2^63); `true` and 1.0 are none."""
    if not isinstance(values, list) or not all(
        type(v) is int and 0 <= v <= _MAX_ELEMENTS for v in values
    ):
        raise CorruptFileError(
            f"{where}: {field} must be a list of integers in [0, 2^63)."
        )
    return tuple(values)


def _check_tiling(
    entries: list[Entry], data_start: int, file_size: int, what: str
) -> None:
    """The tensors must cover the data exactly: no overlap, no hole, no rest."""
    position = data_start
    for entry in entries:
        if entry.start != position:
            kind = "overlaps its neighbour" if entry.start < position else "has a hole"
            raise CorruptFileError(
                f"{what}: tensor {_quote(entry.name)} {kind}: it starts at byte "
                f"{entry.start - data_start} of the data; expected "
                f"{position - data_start}."
            )
        position += entry.nbytes
    if position != file_size:
        raise CorruptFileError(
            f"{what}: the header describes {position} bytes; the file has {file_size}."
        )
