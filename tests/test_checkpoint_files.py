"""Which files make a checkpoint, and what an index may say."""

import json
import os

import numpy as np
import pytest
from checkpoint_cases import folder, sharded_folder

from jaxtp import checkpoint
from jaxtp.errors import CheckpointError, CorruptFileError, MissingTensorError

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def two_shards(path, **changes):
    """A sharded checkpoint whose index is then changed."""
    tensors = {A: {"a": np.ones(3, np.float32)}, B: {"b": np.zeros(2, np.float32)}}
    sharded_folder(path, tensors, {})
    index = path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"].update(changes)
    index.write_text(json.dumps(table))
    return path


def test_one_file_of_any_name_is_a_checkpoint(tmp_path) -> None:
    folder(tmp_path, {"a": np.arange(3, dtype=np.float32)})
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    for path in (tmp_path, str(tmp_path), tmp_path / "weights.safetensors"):
        with checkpoint.open(path) as ckpt:
            assert ckpt.array("a").tolist() == [0, 1, 2]


def test_model_safetensors_wins_over_other_files_without_an_index(tmp_path) -> None:
    folder(tmp_path, {"a": np.ones(1, np.float32)})
    folder(tmp_path / "x", {"b": np.ones(1, np.float32)})
    (tmp_path / "x/model.safetensors").rename(tmp_path / "consolidated.safetensors")
    assert checkpoint.open(tmp_path).tensor_names() == ("a",)


def test_a_folder_without_a_checkpoint_says_what_was_expected(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors\.index"):
        checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        checkpoint.open(tmp_path / "nowhere")


def test_several_files_without_an_index_are_ambiguous(tmp_path) -> None:
    two_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="00001-of-00002"):
        checkpoint.open(tmp_path)


def test_an_index_beside_a_stale_single_file_is_refused(tmp_path) -> None:
    two_shards(tmp_path)
    folder(tmp_path / "x", {"a": np.ones(1, np.float32)})
    (tmp_path / "x/model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="both are there"):
        checkpoint.open(tmp_path)


def test_an_index_joins_its_files(tmp_path) -> None:
    with checkpoint.open(two_shards(tmp_path)) as ckpt:
        assert ckpt.tensor_names() == ("a", "b")
        assert ckpt.tensor("b").file_name == B
        assert ckpt.array("a").tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "name",
    [
        "/etc/model.safetensors",
        "../model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "..",
        ".hidden.safetensors",
        "model.bin",
        "model.safetensors\0",
        "",
        3,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_may_name_only_files_beside_it(tmp_path, name) -> None:
    with pytest.raises(CorruptFileError, match="without separators"):
        checkpoint.open(two_shards(tmp_path, c=name))


def test_a_file_that_the_index_names_and_is_missing_is_named_with_its_tensor(
    tmp_path,
) -> None:
    two_shards(tmp_path)
    (tmp_path / B).unlink()
    with pytest.raises(MissingTensorError, match=rf"{B} for 'b'"):
        checkpoint.open(tmp_path)


def test_a_tensor_in_the_index_but_not_in_its_file_is_named(tmp_path) -> None:
    with pytest.raises(MissingTensorError, match=rf"'ghost' in {A}"):
        checkpoint.open(two_shards(tmp_path, ghost=A))


def test_a_tensor_placed_in_the_wrong_file_is_named(tmp_path) -> None:
    with pytest.raises(MissingTensorError, match=rf"'b' in {A}"):
        checkpoint.open(two_shards(tmp_path, b=A, a=A))


def test_a_tensor_in_a_file_but_not_in_the_index_is_named(tmp_path) -> None:
    two_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    shards = {A: {"a": np.ones(3, np.float32), "extra": np.ones(3, np.float32)}}
    text = index.read_text()
    sharded_folder(tmp_path, shards)
    index.write_text(text)
    with pytest.raises(CorruptFileError, match="'extra'"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"weight_map": []}',
        "not json",
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map":' + "[" * 100_000,
    ],
)
def test_a_malformed_index_is_a_typed_error(tmp_path, text: str) -> None:
    two_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"index\.json"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', '{"a": NaN}'])
def test_a_malformed_config_is_a_typed_error(tmp_path, name: str, text: str) -> None:
    folder(tmp_path, {"a": np.ones(1, np.float32)})
    (tmp_path / name).write_text(text)
    with pytest.raises(CorruptFileError, match=name):
        checkpoint.open(tmp_path)


def test_a_symbolic_link_to_a_file_is_followed(tmp_path) -> None:
    folder(tmp_path / "blobs", {"a": np.ones(1, np.float32)})
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot/model.safetensors"
    link.symlink_to(tmp_path / "blobs/model.safetensors")
    assert checkpoint.open(tmp_path / "snapshot").array("a").tolist() == [1]


def test_closing_closes_every_file(tmp_path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with checkpoint.open(two_shards(tmp_path)) as ckpt:
        lazy = ckpt.tensor("a")
        read = ckpt.array("b")
    with pytest.raises(CheckpointError, match="closed"):
        lazy[0]
    assert read.tolist() == [0, 0]
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_failed_opening_leaves_no_file_open(tmp_path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("counts open files in /proc/self/fd, which is not here")
    two_shards(tmp_path, ghost=B)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MissingTensorError):
        checkpoint.open(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
