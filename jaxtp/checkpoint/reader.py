"""An open checkpoint: weights by name, read lazily and checked when read."""

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jaxtp.checkpoint.banks import expert_numbers, stack_weights
from jaxtp.checkpoint.config import Quantization, parse
from jaxtp.checkpoint.files import MappedFile, open_files, read_json
from jaxtp.checkpoint.inventory import Inventory, Module, take_inventory
from jaxtp.checkpoint.layouts import WeightSpec, resolve
from jaxtp.checkpoint.lazy import LazyTensor, ReadCounter
from jaxtp.checkpoint.report import Report, make_report
from jaxtp.checkpoint.roles import (
    E4M3_CODE,
    FP8_SCALE,
    GLOBAL_SCALE,
    NVFP4_SCALE,
    PLAIN,
    Role,
)
from jaxtp.checkpoint.safetensors import Entry
from jaxtp.errors import DtypeError, MissingTensorError
from jaxtp.weights import Bf16Weight, Fp8Weight, Nvfp4Weight, Weight, validate


def open(path: str | Path, *, strict: bool = True) -> "Checkpoint":
    """Opens a checkpoint; reads headers and configs, and no tensor data.

    Args:
        path: A folder with safetensors files and their `config.json`, or one
            safetensors file.
        strict: Whether values are checked when they are read: NaN codes, and scales
            that are not finite or have a sign. Structure is always checked.

    Raises:
        CheckpointError: If there is no checkpoint, or its config is malformed.
        CorruptFileError: If a file contradicts itself or the index.
        MissingTensorError: If the index names what is not there.
        UnsupportedError: If a tensor has a dtype that exists but cannot be read.
    """
    path = Path(path)
    files = open_files(path)
    folder = path.parent if path.is_file() else path
    try:
        config = _read_optional(folder / "config.json")
        hf_quant = _read_optional(folder / "hf_quant_config.json")
        quantization = parse(config, hf_quant)
    except BaseException:
        _close_all(files)
        raise
    return Checkpoint(path, files, config, quantization, strict=strict)


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _close_all(files: dict[str, MappedFile]) -> None:
    for file in {id(file): file for file in files.values()}.values():
        file.close()


class Checkpoint:
    """The tensors of one checkpoint. Make it with `open`; usable in a `with` block.

    Attributes:
        path: Where it lies.
        config: `config.json` as it stands; empty if there is none.
        quantization: What the configs say of quantization.
        strict: Whether values are checked when they are read.
    """

    def __init__(
        self,
        path: Path,
        files: dict[str, MappedFile],
        config: dict[str, Any],
        quantization: Quantization,
        *,
        strict: bool,
    ) -> None:
        self.path = path
        self.config = config
        self.quantization = quantization
        self.strict = strict
        self._files = files
        self._counter = ReadCounter()
        entries = [file.header.entries[name] for name, file in files.items()]
        self._inventory = take_inventory(entries, quantization.method is not None)
        self._experts: dict[tuple[str, str], list[int]] | None = None

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self._files)} tensors)"

    def close(self) -> None:
        """Unmaps the files. What was read stays valid; lazy parts raise from now on."""
        _close_all(self._files)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that were asked for since the checkpoint was opened."""
        return self._counter.total

    @property
    def inventory(self) -> Inventory:
        """All tensors, grouped by module."""
        return self._inventory

    def tensor_names(self) -> tuple[str, ...]:
        """Every stored tensor, companions included, sorted."""
        return tuple(sorted(self._files))

    def names(self) -> tuple[str, ...]:
        """Weights and unquantized tensors, sorted: what is left without companions.

        A weight is `<module>.weight`, also where its codes are stored under another
        name.
        """
        weights = [f"{m.name}.weight" for m in self._modules_with_weights()]
        return tuple(sorted([*weights, *self._inventory.plain]))

    def _modules_with_weights(self) -> list[Module]:
        return [m for m in self._inventory.modules.values() if m.mains]

    def weight(self, name: str) -> Weight:
        """A weight with lazy parts.

        Args:
            name: Module name, with or without `.weight`.

        Raises:
            MissingTensorError: If it, or a companion that it needs, is absent.
            DtypeError: If it is an unquantized tensor that is not bf16: use `array`.
            JaxtpError: Whatever else `layouts.resolve` finds wrong with it.
        """
        spec = self.spec(name)
        if not spec.is_weight:
            raise DtypeError(
                f"{spec.code.name} is {spec.code.tag}{list(spec.shape)}, which is no "
                "weight: a weight is quantized, or bf16 with two or three axes. Use "
                "array()."
            )
        parts = self.parts(spec, self.strict)
        if not spec.is_quantized:
            weight: Weight = Bf16Weight(**parts)
        elif spec.block_shape is not None:
            weight = Fp8Weight(**parts, block_shape=spec.block_shape)
        else:
            weight = Nvfp4Weight(**parts, global_scale_kind=spec.global_scale_kind)
        validate(weight)
        return weight

    def spec(self, name: str) -> WeightSpec:
        """What `weight` would return, described instead of built."""
        module = name.removesuffix(".weight").removesuffix(".weight_packed")
        found = self._inventory.modules.get(module)
        if found is None:
            raise MissingTensorError(
                f"there is no weight {name!r} in {self.path.name}.{self._hint(module)}"
            )
        return resolve(found, self.quantization)

    def _hint(self, module: str) -> str:
        stem = module.rpartition(".")[0]
        prefix = f"{stem}." if stem else ""
        near = sorted(m for m in self._inventory.modules if m.startswith(prefix))[:3]
        return f" Names nearby: {', '.join(near)}." if near else ""

    def parts(self, spec: WeightSpec, strict: bool) -> dict[str, LazyTensor]:
        """The lazy tensors of a weight, by the name of their field.

        Args:
            spec: What `spec` returned.
            strict: Whether their values are checked when they are read.
        """
        if not spec.is_quantized:
            return {"value": self._lazy(spec.code, PLAIN, strict)}
        is_fp8 = spec.format == "e4m3"
        code_role, scale_role = (
            (E4M3_CODE, FP8_SCALE) if is_fp8 else (PLAIN, NVFP4_SCALE)
        )
        parts = {"code": self._lazy(spec.code, code_role, strict)}
        if spec.scale is not None:
            entry, shape = spec.scale
            parts["scale"] = self._lazy(entry, scale_role, strict).reshape(shape)
        if spec.global_scale is not None:
            entry, shape = spec.global_scale
            lazy = self._lazy(entry, GLOBAL_SCALE, strict)
            parts["global_scale"] = lazy.reshape(shape)
        return parts

    def _lazy(self, entry: Entry, role: Role, strict: bool) -> LazyTensor:
        file = self._files[entry.name]
        return LazyTensor(file, entry, self._counter, role, strict=strict)

    def bank(self, prefix: str, projection: str) -> Weight:
        """A bank `[E, N, K]`: one stacked tensor, or one weight for each expert.

        Args:
            prefix: What stands before the expert's number,
                `"model.layers.1.mlp.experts"`.
            projection: What stands after it, `"gate_proj"`.

        Raises:
            MissingTensorError: If there is none, or an expert is missing.
            CheckpointError: If experts differ in format, block shape or scale kind.
            ShapeError: If experts differ in shape.
        """
        if f"{prefix}.{projection}" in self._inventory.modules:
            return self.weight(f"{prefix}.{projection}")
        if self._experts is None:
            self._experts = expert_numbers(self._inventory.modules)
        experts = self._experts.get((prefix, projection), [])
        if experts != list(range(len(experts))) or not experts:
            raise MissingTensorError(
                f"{prefix}.<expert>.{projection}: expected experts 0, 1, 2, ...; found "
                f"{experts or 'none'}."
            )
        weights = [self.weight(f"{prefix}.{e}.{projection}") for e in experts]
        return stack_weights(weights, f"{prefix}.<expert>.{projection}")

    def tensor(self, name: str) -> LazyTensor:
        """A stored tensor as it is: raw codes or values, unchecked and unread.

        Raises:
            MissingTensorError: If there is no such tensor.
        """
        file = self._files.get(name)
        if file is None:
            raise MissingTensorError(
                f"there is no tensor {name!r} in {self.path.name}."
            )
        return self._lazy(file.header.entries[name], PLAIN, self.strict)

    def array(self, name: str) -> np.ndarray:
        """The values of an unquantized tensor, in the dtype they are stored in.

        Raises:
            MissingTensorError: If there is no such tensor, or it holds FP8 codes whose
                scale is not known.
            DtypeError: If it holds the codes of a quantized weight.
        """
        stored = self.tensor(name)
        stem, _, last = name.rpartition(".")
        module = self._inventory.modules.get(stem)
        mains = module.mains if module else {}
        if module and module.companions and last in mains:
            raise DtypeError(
                f"{name} holds the codes of a quantized weight. Use weight({stem!r}); "
                f"tensor({name!r}) gives the codes themselves."
            )
        is_code = self._files[name].header.entries[name].tag in ("F8_E4M3", "F8_E5M2")
        if is_code and (last in mains or name in self._inventory.plain):
            raise MissingTensorError(
                f"{name} holds FP8 codes and no scale belongs to it. "
                f"tensor({name!r}) gives the codes, unscaled."
            )
        return np.asarray(stored)

    def report(self, *, values: bool = False) -> Report:
        """Lists every tensor and everything wrong with it, without raising.

        Args:
            values: Whether to read all weights and check their values as well. Without
                it no tensor data is read.
        """
        return make_report(self, values=values)
