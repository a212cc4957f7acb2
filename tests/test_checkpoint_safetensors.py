"""The header reader: exact entries, or a typed error, for any bytes."""

import json
import time
import tracemalloc

import numpy as np
import pytest
from checkpoint_cases import entry, file_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtp.checkpoint.files import MappedFile
from jaxtp.checkpoint.safetensors import (
    DTYPES,
    MAX_HEADER_BYTES,
    Header,
    parse_header,
)
from jaxtp.checkpoint.writer import write_file
from jaxtp.errors import CheckpointError, CorruptFileError, JaxtpError, UnsupportedError


def parse(data: bytes) -> Header:
    return parse_header(data, len(data), "x.safetensors")


def test_a_valid_header_gives_the_place_of_every_tensor() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("F32", [2], 6, 14),
        "a": entry("BF16", [3, 1], 0, 6),
        "empty": entry("U8", [0, 4], 6, 6),
        "scalar": entry("F8_E8M0", [], 14, 15),
    }
    data = file_bytes(header, bytes(15))
    found = parse(data)
    start = len(data) - 15
    assert found.metadata == {"format": "pt"}
    assert found.entries["a"].start == start
    assert found.entries["a"].shape == (3, 1)
    assert found.entries["b"].start == start + 6
    assert found.entries["b"].dtype == np.float32
    assert found.entries["scalar"].shape == ()
    assert found.entries["empty"].nbytes == 0


@pytest.mark.parametrize("tag", DTYPES)
def test_every_dtype_comes_back_byte_for_byte(tag: str, tmp_path) -> None:
    dtype = DTYPES[tag]
    raw = np.random.default_rng(1).integers(0, 256, 6 * dtype.itemsize)
    raw = (raw % 2 if tag == "BOOL" else raw).astype(np.uint8)
    array = raw.view(dtype).reshape(2, 3)
    write_file(tmp_path / "x.safetensors", {"t": array})
    file = MappedFile(tmp_path / "x.safetensors")
    found = file.header.entries["t"]
    assert found.tag == tag
    read = file.array(found.start, found.shape, found.dtype).copy()
    assert read.dtype == dtype
    assert read.tobytes() == array.tobytes()
    file.close()


HOSTILE = {
    "empty file": b"",
    "seven bytes": b"\x02\0\0\0\0\0\0",
    "length beyond the file": file_bytes({}, length=100),
    "length of 100 MB and one": file_bytes({}, length=MAX_HEADER_BYTES + 1),
    "length of 2^64 - 1": file_bytes({}, length=2**64 - 1),
    "length zero": file_bytes(b""),
    "no JSON": file_bytes(b"{nothing}"),
    "no object": file_bytes(b"[1, 2]"),
    "leading space": file_bytes(b" {}"),
    "not UTF-8": file_bytes(b'{"\xff": 1}'),
    "NaN in JSON": file_bytes(b'{"__metadata__": NaN}'),
    "deep nesting": file_bytes(b'{"a":' + b"[" * 100_000),
    "a number of 5000 digits": file_bytes(b'{"a": ' + b"9" * 5000 + b"}"),
    "metadata not text": file_bytes({"__metadata__": {"n": 1}}),
    "metadata no object": file_bytes({"__metadata__": "x"}),
    "tensor no object": file_bytes({"a": 3}),
    "missing key": file_bytes({"a": {"dtype": "U8", "shape": []}}),
    "extra key": file_bytes({"a": {**entry("U8", [], 0, 1), "z": 1}}, b"\0"),
    "unknown dtype": file_bytes({"a": entry("Q9", [1], 0, 1)}, b"\0"),
    "dtype no text": file_bytes({"a": entry(["U8"], [1], 0, 1)}, b"\0"),
    "negative dim": file_bytes({"a": entry("U8", [-1], 0, 1)}, b"\0"),
    "two negative dims": file_bytes({"a": entry("U8", [-1, -1], 0, 1)}, b"\0"),
    "boolean dim": file_bytes({"a": entry("U8", [True], 0, 1)}, b"\0"),
    "float dim": file_bytes({"a": entry("U8", [1.0], 0, 1)}, b"\0"),
    "huge dim": file_bytes({"a": entry("U8", [2**70], 0, 1)}, b"\0"),
    "product wraps to one": file_bytes(
        {"a": entry("U8", [2**32 + 1, 2**32 + 1], 0, 1)}, b"\0"
    ),
    "product wraps to zero": file_bytes({"a": entry("U8", [2**32, 2**32], 0, 0)}),
    "65 axes": file_bytes({"a": entry("U8", [1] * 65, 0, 1)}, b"\0"),
    "10 GB claimed": file_bytes({"a": entry("F32", [2500000000], 0, 10**10)}, b"\0"),
    "size not shape times dtype": file_bytes({"a": entry("F32", [2], 0, 4)}, bytes(4)),
    "stop before start": file_bytes({"a": entry("U8", [0], 1, 0)}, b"\0"),
    "three offsets": file_bytes(
        {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"\0"
    ),
    "boolean offset": file_bytes({"a": entry("U8", [1], False, True)}, b"\0"),
    "negative offset": file_bytes({"a": entry("U8", [1], -1, 0)}, b"\0"),
    "overlap": file_bytes(
        {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, bytes(3)
    ),
    "the same bytes twice": file_bytes(
        {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, bytes(2)
    ),
    "a hole": file_bytes(
        {"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, bytes(3)
    ),
    "a hole at the start": file_bytes({"a": entry("U8", [1], 1, 2)}, bytes(2)),
    "bytes left over": file_bytes({"a": entry("U8", [1], 0, 1)}, bytes(2)),
    "data cut off": file_bytes({"a": entry("U8", [9], 0, 9)}, bytes(8)),
    "duplicate tensor": file_bytes(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"\0",
    ),
    "duplicate key within a tensor": file_bytes(
        b'{"a":{"dtype":"U8","shape":[1],"shape":[2],"data_offsets":[0,1]}}', b"\0"
    ),
    "a lone surrogate as a name": file_bytes(
        b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\0"
    ),
    "an empty name": file_bytes({"": entry("U8", [1], 0, 1)}, b"\0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_at_once_and_without_memory(
    name: str, tmp_path
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(CorruptFileError, match=r"x\.safetensors"):
        MappedFile(path)
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 2.0
    assert peak < 20_000_000


def test_a_file_made_of_a_true_header_alone_is_accepted() -> None:
    assert parse(file_bytes({})).entries == {}
    assert parse(file_bytes(b"{}      ")).entries == {}


@pytest.mark.parametrize("tag", ["F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "C64"])
def test_a_dtype_that_exists_but_is_not_read_is_named(tag: str) -> None:
    data = file_bytes({"model.w": entry(tag, [2], 0, 1)}, b"\0")
    with pytest.raises(UnsupportedError, match=rf"'model\.w'.*{tag}.*Readable: BOOL"):
        parse(data)


def test_a_message_does_not_repeat_a_long_name() -> None:
    data = file_bytes({"x" * 100_000: entry("U8", [-1], 0, 1)}, b"\0")
    with pytest.raises(CorruptFileError) as caught:
        parse(data)
    assert len(str(caught.value)) < 500


def test_a_file_that_shrinks_after_opening_is_an_error_not_a_crash(tmp_path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"t": np.ones((100, 100), np.float32)})
    file = MappedFile(path)
    found = file.header.entries["t"]
    with path.open("r+b") as handle:
        handle.truncate(found.start + 10)
    with pytest.raises(CorruptFileError, match="cut after opening"):
        file.array(found.start, found.shape, found.dtype)
    file.close()


def test_reading_after_closing_is_an_error(tmp_path) -> None:
    write_file(tmp_path / "x.safetensors", {"t": np.ones(3, np.float32)})
    file = MappedFile(tmp_path / "x.safetensors")
    file.close()
    file.close()
    with pytest.raises(CheckpointError, match="closed"):
        file.array(8, (1,), np.dtype(np.uint8))


def parse_or_refuse(data: bytes) -> None:
    """The property: a header that fits its file, or an error of ours."""
    try:
        header = parse(data)
    except JaxtpError:
        return
    covered = sum(e.nbytes for e in header.entries.values())
    assert covered <= len(data)
    for e in header.entries.values():
        assert 8 <= e.start <= e.start + e.nbytes <= len(data)
        assert np.prod(e.shape, dtype=object) * e.dtype.itemsize == e.nbytes


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_typed_error(data: bytes) -> None:
    parse_or_refuse(data)


@settings(deadline=None)
@given(st.binary(max_size=100), st.integers(0, 120))
def test_any_text_behind_a_plausible_length_is_too(text: bytes, length: int) -> None:
    parse_or_refuse(file_bytes(b"{" + text, length=length))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
NUMBER = st.integers(-2, 12) | st.sampled_from([2**31, 2**63, 2**64, True, 1.5, None])
ROW = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", "", 3]),
        "shape": st.lists(NUMBER, max_size=3) | JSON,
        "data_offsets": st.lists(NUMBER, max_size=3) | JSON,
    }
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=4), ROW | JSON, max_size=3), st.integers(0, 20))
def test_any_json_header_is_a_header_or_a_typed_error(header, size: int) -> None:
    parse_or_refuse(file_bytes(header, bytes(size)))


@settings(deadline=None)
@given(st.data())
def test_one_changed_byte_of_a_good_file_is_a_header_or_a_typed_error(data) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": entry("F8_E4M3", [2, 3], 0, 6),
        "a.scale": entry("F32", [1, 1], 6, 10),
    }
    good = bytearray(file_bytes(header, bytes(10)))
    assert len(parse(bytes(good)).entries) == 2
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] = data.draw(st.integers(0, 255))
    parse_or_refuse(bytes(good[: data.draw(st.integers(0, len(good)))]))
    parse_or_refuse(bytes(good))


def test_files_are_written_aligned_and_with_a_padded_header(tmp_path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = {"u": np.ones(3, np.uint8), "f": np.ones(2, np.float64)}
    write_file(path, arrays, {"note": "n"})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header["f"]["data_offsets"] == [0, 16]
    assert header["u"]["data_offsets"] == [16, 19]
    assert parse(data).metadata == {"note": "n"}
