"""Writing checkpoints in the layouts that are read, from matrices or ready weights."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtp.checkpoint.encoding import (
    LAYOUTS,
    Layout,
    LayoutName,
    quantization_configs,
    quantize,
    stored_tensors,
)
from jaxtp.checkpoint.files import INDEX_NAME, SINGLE_NAME
from jaxtp.checkpoint.patterns import NamePatterns
from jaxtp.checkpoint.safetensors import TAGS
from jaxtp.errors import CheckpointError, DtypeError
from jaxtp.weights import Bf16Weight, Weight


def save(
    path: str | Path,
    tensors: Mapping[str, Any],
    *,
    layout: LayoutName,
    config: Mapping[str, Any] | None = None,
    block_shape: tuple[int, int] = (128, 128),
    input_scale: float | None = None,
    exclude: Sequence[str] = (),
    shards: int = 1,
) -> None:
    """Writes a checkpoint folder that `open` reads back.

    Float32 matrices and banks named `<module>.weight` are quantized, or rounded to
    bf16 by the layout `"bf16"`; weights are stored as they are; everything else is
    stored in its own dtype. A bank `<stem>.experts.<projection>.weight` becomes one
    tensor for each expert, except in the layouts of Step, which stack them.

    Args:
        path: The folder to write; created if need be.
        tensors: Arrays and weights by name.
        layout: A key of `LAYOUTS`.
        config: Further keys of config.json.
        block_shape: Rows and columns of an FP8 block.
        input_scale: Activation scale stored beside every NVFP4 weight; None makes a
            weight-only checkpoint.
        exclude: Patterns of modules whose float32 matrices stay float32.
        shards: Number of files.

    Raises:
        CheckpointError: If the layout is unknown, the folder holds a checkpoint
            already, or there are fewer tensors than shards.
        FormatError: If the layout cannot hold a weight exactly.
        DtypeError: If an array has a dtype that safetensors does not know.
        NonFiniteError: If a matrix to be quantized is not finite.

    Bits:
        BYTES: equal arguments give equal files.
    """
    path = Path(path)
    if layout not in LAYOUTS:
        raise CheckpointError(f"unknown layout {layout!r}; known: {sorted(LAYOUTS)}.")
    if any(path.glob("*.safetensors")):
        raise CheckpointError(f"{path} holds safetensors files; give an empty folder.")
    job = _Encoder(LAYOUTS[layout], block_shape, input_scale, NamePatterns(exclude))
    for name, value in tensors.items():
        job.add(name, value)
    for name, array in job.stored.items():
        _tag(name, array)
    section, hf_quant = quantization_configs(
        job.layout, block_shape, job.unquantized, input_scale is None
    )
    files = _split(job.stored, shards)
    full_config = dict(config or {})
    if section:
        full_config["quantization_config"] = section
    jsons = {"config.json": full_config, "hf_quant_config.json": hf_quant}
    _write_folder(path, files, jsons)


def _write_folder(
    path: Path,
    files: Mapping[str, Mapping[str, np.ndarray]],
    jsons: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes the tensors, their index if there are several files, and the configs."""
    path.mkdir(parents=True, exist_ok=True)
    for file_name, part in files.items():
        write_file(path / file_name, part)
    if len(files) > 1:
        _write_json(path / INDEX_NAME, _index(files))
    for name, table in jsons.items():
        if table or name == "config.json":
            _write_json(path / name, table)


def write_file(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one safetensors file, the widest dtypes first so that all are aligned.

    Args:
        path: The file.
        tensors: Arrays by name.
        metadata: Free-form text.

    Raises:
        DtypeError: If an array has a dtype that safetensors does not know.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "np"})}
    order = sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n))
    position = 0
    for name in order:
        array = tensors[name]
        header[name] = {
            "dtype": _tag(name, array),
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).tobytes())


def _tag(name: str, array: np.ndarray) -> str:
    if array.dtype not in TAGS:
        raise DtypeError(
            f"{name}: safetensors has no dtype for {array.dtype}; it has "
            f"{', '.join(map(str, TAGS))}."
        )
    return TAGS[array.dtype]


@dataclasses.dataclass
class _Encoder:
    """Collects the tensors of a layout.

    Attributes:
        stored: Arrays to write, by name, in the order in which they were added.
        unquantized: Modules whose matrices were left alone.
    """

    layout: Layout
    block_shape: tuple[int, int]
    input_scale: float | None
    exclude: NamePatterns
    stored: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    unquantized: list[str] = dataclasses.field(default_factory=list)

    def add(self, name: str, value: Any) -> None:
        """Adds one array or weight."""
        module = name.removesuffix(".weight")
        if not isinstance(value, Weight):
            array = np.asarray(value)
            is_matrix = name.endswith(".weight") and array.ndim in (2, 3)
            named = is_matrix and self.exclude.matches(module)
            if not is_matrix or named or array.dtype != np.dtype(np.float32):
                self.stored[name] = array
                self.unquantized += [module] if is_matrix else []
                return
            value = quantize(self.layout, array, self.block_shape)
        for one_module, weight in self._split_bank(module, _on_host(value)):
            tensors = stored_tensors(self.layout, one_module, weight, self.input_scale)
            self.stored.update(tensors)
            if isinstance(weight, Bf16Weight):
                self.unquantized.append(one_module)

    def _split_bank(self, module: str, weight: Weight) -> list[tuple[str, Weight]]:
        stem, _, projection = module.rpartition(".")
        per_expert = stem.rpartition(".")[2] == "experts" and not self.layout.stacked
        if not weight.is_bank or not per_expert:
            return [(module, weight)]
        return [
            (f"{stem}.{e}.{projection}", weight.expert(e))
            for e in range(weight.shape[0])
        ]


def _on_host(weight: Weight) -> Weight:
    return jax.tree.map(np.asarray, weight)


def _split(
    tensors: dict[str, np.ndarray], shards: int
) -> dict[str, dict[str, np.ndarray]]:
    """Cuts the tensors, in order, into files of about equal size."""
    if not 1 <= shards <= max(1, len(tensors)):
        raise CheckpointError(
            f"`shards` must lie in [1, {len(tensors)}], the number of tensors; got "
            f"{shards}."
        )
    if shards == 1:
        return {SINGLE_NAME: tensors}
    total = sum(array.nbytes for array in tensors.values())
    parts: list[dict[str, np.ndarray]] = [{}]
    written, left = 0, len(tensors)
    for name, array in tensors.items():
        full = written * shards >= total * len(parts) or left <= shards - len(parts)
        if parts[-1] and full and len(parts) < shards:
            parts.append({})
        parts[-1][name] = array
        written += array.nbytes
        left -= 1
    return {
        f"model-{i + 1:05d}-of-{shards:05d}.safetensors": part
        for i, part in enumerate(parts)
    }


def _index(files: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Any]:
    size = sum(array.nbytes for part in files.values() for array in part.values())
    weight_map = {name: file for file, part in files.items() for name in part}
    return {"metadata": {"total_size": size}, "weight_map": weight_map}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
