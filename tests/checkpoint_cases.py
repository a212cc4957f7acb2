"""Makers of small checkpoint folders and of safetensors files with any header."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtp.checkpoint.writer import write_file

FP8_CONFIG = {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
}
MODELOPT_CONFIG = {
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}
}


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header: bytes as they are, or an object as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    return length.to_bytes(8, "little") + text + data


def entry(dtype: Any, shape: Any, start: Any, stop: Any) -> dict[str, Any]:
    """One row of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def folder(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any] | None = None,
    hf_quant: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a one-file checkpoint."""
    path.mkdir(parents=True, exist_ok=True)
    write_file(path / "model.safetensors", tensors)
    for name, table in (("config.json", config), ("hf_quant_config.json", hf_quant)):
        if table is not None:
            (path / name).write_text(json.dumps(table))
    return path


def sharded_folder(
    path: Path,
    shards: Mapping[str, Mapping[str, np.ndarray]],
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint of several files with its index."""
    path.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        write_file(path / name, tensors)
    weight_map = {t: name for name, tensors in shards.items() for t in tensors}
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def codes(byte: int, *shape: int) -> np.ndarray:
    """An array of one E4M3 byte."""
    return np.full(shape, byte, np.uint8).view(ml_dtypes.float8_e4m3fn)


def e4m3(values: Any) -> np.ndarray:
    """E4M3 codes from their bytes."""
    return np.asarray(values, np.uint8).view(ml_dtypes.float8_e4m3fn)


def random_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random E4M3 codes, none of them NaN."""
    byte = rng.integers(0, 254, shape).astype(np.uint8)
    return (
        np.where(byte >= 0x7F, byte + 1, byte)
        .astype(np.uint8)
        .view(ml_dtypes.float8_e4m3fn)
    )


def nvfp4(
    rng: np.random.Generator, module: str, n: int, k: int, g: float = 0.01
) -> dict[str, np.ndarray]:
    """The three tensors of a random NVFP4 matrix in the names of ModelOpt."""
    return {
        f"{module}.weight": rng.integers(0, 256, (n, k // 2)).astype(np.uint8),
        f"{module}.weight_scale": e4m3(rng.integers(1, 0x7F, (n, k // 16))),
        f"{module}.weight_scale_2": np.float32(g).reshape(()),
    }
