"""What a checkpoint's config says of its quantization.

The config gives what tensors cannot: the block shape of FP8 scales, and which modules
were left alone. It never decides what a tensor is; the tensor's own dtype and its
companions do, and a config that contradicts them is an error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtp.checkpoint.patterns import NamePatterns
from jaxtp.errors import CheckpointError

NVFP4_GROUP = 16

_ALGORITHMS: dict[str, tuple[str, tuple[int, int] | None]] = {
    "NVFP4": ("nvfp4", None),
    "W4A16_NVFP4": ("nvfp4", None),
    "FP8_PB_WO": ("e4m3", (128, 128)),
    "FP8_BLOCK_SCALES": ("e4m3", (128, 128)),
}
"""ModelOpt's `quant_algo`: the format, and the block shape that its name stands for."""

_EXCLUSION_KEYS = (
    "ignore",
    "exclude_modules",
    "modules_to_not_convert",
    "ignored_layers",
)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How some of the modules are quantized.

    Attributes:
        label: Where the config says so.
        format: `"e4m3"` or `"nvfp4"`; anything else is a scheme that is not read.
        block_shape: Rows and columns of an FP8 scale block; None where not applicable.
        targets: Names of the modules; None means every module.
    """

    label: str
    format: str
    block_shape: tuple[int, int] | None = None
    targets: NamePatterns | None = None

    def covers(self, module: str) -> bool:
        """Whether the scheme is meant for this module."""
        return self.targets is None or self.targets.matches(module)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The parsed quantization config.

    Attributes:
        method: `quant_method`; None without a config.
        schemes: The schemes, in the config's order.
        exclude: Modules that the config leaves unquantized.
        kv_cache: What the config says of KV quantization, if anything.
        sources: The files it was read from.
    """

    method: str | None = None
    schemes: tuple[Scheme, ...] = ()
    exclude: NamePatterns = dataclasses.field(default_factory=lambda: NamePatterns(()))
    kv_cache: Any = None
    sources: tuple[str, ...] = ()

    def excluded(self, module: str) -> bool:
        """Whether the config's exclusion list names this module."""
        return self.exclude.matches(module)

    def scheme(self, module: str, weight_format: str) -> Scheme | None:
        """The scheme of a module whose tensors are in `weight_format`.

        Where schemes overlap, those that agree with the tensor count, and among them
        one that names the module outweighs one for a whole class.

        Args:
            module: Module name, without `.weight`.
            weight_format: `"e4m3"` or `"nvfp4"`, as the tensors say.

        Returns:
            None if there is no config at all.

        Raises:
            CheckpointError: If the config contradicts the tensor, or itself.
        """
        if self.method is None:
            return None
        covering = [s for s in self.schemes if s.covers(module)]
        agreeing = [s for s in covering if s.format == weight_format]
        if not agreeing:
            says = ", ".join(f"{s.format} ({s.label})" for s in covering) or "nothing"
            raise CheckpointError(
                f"{module}: its tensors are {weight_format}, but the config says "
                f"{says} of this module ({', '.join(self.sources)})."
            )
        named = [s for s in agreeing if s.targets is not None] or agreeing
        if len({s.block_shape for s in named}) > 1:
            raise CheckpointError(
                f"{module}: the config gives it several block shapes: "
                f"{ {s.label: s.block_shape for s in named} }."
            )
        return named[0]


def parse(config: Mapping[str, Any], hf_quant: Mapping[str, Any]) -> Quantization:
    """Reads both places where a quantization config may stand.

    Args:
        config: `config.json`, or an empty mapping.
        hf_quant: `hf_quant_config.json`, or an empty mapping.

    Raises:
        CheckpointError: If a value is malformed, or the two disagree.
    """
    first = _parse_section(_config_section(config), "config.json")
    second = _parse_section(_hf_quant_section(hf_quant), "hf_quant_config.json")
    if first.method is None or second.method is None:
        return second if first.method is None else first
    said = [{(s.format, s.block_shape) for s in q.schemes} for q in (first, second)]
    if said[0] and said[1] and said[0] != said[1]:
        raise CheckpointError(
            f"config.json says {sorted(map(str, said[0]))}; hf_quant_config.json says "
            f"{sorted(map(str, said[1]))}."
        )
    patterns = (*first.exclude.patterns, *second.exclude.patterns)
    return dataclasses.replace(
        first,
        schemes=first.schemes or second.schemes,
        exclude=NamePatterns(dict.fromkeys(patterns), "exclusion list"),
        kv_cache=first.kv_cache if first.kv_cache is not None else second.kv_cache,
        sources=(*first.sources, *second.sources),
    )


def _config_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`quantization_config`, at the top level or in `text_config`."""
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    outer = config.get("quantization_config")
    if outer and inner and outer != inner:
        raise CheckpointError(
            "config.json: quantization_config stands at the top level and in "
            "text_config, and the two differ."
        )
    return _mapping(outer or inner or {}, "config.json: quantization_config")


def _hf_quant_section(hf_quant: Mapping[str, Any]) -> Mapping[str, Any]:
    section = hf_quant.get("quantization") or {}
    section = _mapping(section, "hf_quant_config.json: quantization")
    return {"quant_method": "modelopt", **section} if section else {}


def _parse_section(section: Mapping[str, Any], source: str) -> Quantization:
    if not section:
        return Quantization()
    method = section.get("quant_method")
    if not isinstance(method, str):
        raise CheckpointError(f"{source}: quant_method must be text; got {method!r}.")
    patterns: list[str] = []
    for key in _EXCLUSION_KEYS:
        patterns += _strings(section.get(key), f"{source}: {key}")
    return Quantization(
        method=method,
        schemes=tuple(_schemes(section, method.lower(), source)),
        exclude=NamePatterns(dict.fromkeys(patterns), f"{source}: exclusion list"),
        kv_cache=section.get("kv_cache_scheme") or section.get("kv_cache_quant_algo"),
        sources=(source,),
    )


def _schemes(section: Mapping[str, Any], method: str, source: str) -> list[Scheme]:
    if method == "modelopt" and section.get("quant_algo"):
        return _modelopt_schemes(section, source)
    if section.get("config_groups"):
        groups = _mapping(section["config_groups"], f"{source}: config_groups")
        return [
            scheme
            for label, group in groups.items()
            for scheme in _group_scheme(label, group, source)
        ]
    if method == "fp8":
        return [_fp8_scheme(section, source)]
    return [Scheme(f"{source}: quant_method {method}", method)]


def _fp8_scheme(section: Mapping[str, Any], source: str) -> Scheme:
    block = section.get("weight_block_size")
    if block is None:
        return Scheme(
            f"{source}: quant_method fp8 without weight_block_size", "FP8 per tensor"
        )
    label = f"{source}: weight_block_size"
    return Scheme(label, "e4m3", _block_shape(block, label))


def _modelopt_schemes(section: Mapping[str, Any], source: str) -> list[Scheme]:
    algorithm = str(section["quant_algo"]).upper()
    if algorithm != "MIXED_PRECISION":
        return [_algorithm_scheme(algorithm, section, f"{source}: quant_algo")]
    layers = _mapping(
        section.get("quantized_layers") or {}, f"{source}: quantized_layers"
    )
    by_algorithm: dict[str, list[str]] = {}
    sections: dict[str, Mapping[str, Any]] = {}
    for module, row in layers.items():
        row = _mapping(row, f"{source}: quantized_layers[{module!r}]")
        name = str(row.get("quant_algo")).upper()
        key = f"{name} group_size {row.get('group_size')}"
        by_algorithm.setdefault(key, []).append(module)
        sections[key] = {"quant_algo": name, **row}
    return [
        dataclasses.replace(
            _algorithm_scheme(key.split()[0], sections[key], f"{source}: {key}"),
            targets=NamePatterns(modules, f"{source}: quantized_layers"),
        )
        for key, modules in by_algorithm.items()
    ]


def _algorithm_scheme(name: str, section: Mapping[str, Any], label: str) -> Scheme:
    weight_format, block = _ALGORITHMS.get(name, (name, None))
    group = section.get("group_size")
    if weight_format == "nvfp4" and group not in (None, NVFP4_GROUP):
        raise CheckpointError(
            f"{label}: {name} has group_size {NVFP4_GROUP}; got {group!r}."
        )
    return Scheme(f"{label} {name}", weight_format, block)


def _group_scheme(label: str, group: Any, source: str) -> list[Scheme]:
    """The scheme of one entry of `config_groups`; none if it leaves weights alone."""
    where = f"{source}: config_groups.{label}"
    weights = _mapping(group, where).get("weights")
    if not weights:
        return []
    weights = _mapping(weights, f"{where}.weights")
    targets = _strings(group.get("targets"), f"{where}.targets")
    # `Linear` and other class names: the files do not tell a tensor's class.
    whole_class = not targets or any(t[:1].isupper() and "." not in t for t in targets)
    weight_format, block = _group_format(weights, where)
    names = None if whole_class else NamePatterns(targets, f"{where}.targets")
    return [Scheme(where, weight_format, block, names)]


def _group_format(
    weights: Mapping[str, Any], where: str
) -> tuple[str, tuple[int, int] | None]:
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    group, strategy = weights.get("group_size"), weights.get("strategy")
    block = weights.get("block_structure")
    if (bits, kind) == (8, "float") and (strategy == "block" or block):
        return "e4m3", _block_shape(block, f"{where}.weights.block_structure")
    if (bits, kind, group) == (4, "float", NVFP4_GROUP):
        return "nvfp4", None
    return f"{bits}-bit {kind}, strategy {strategy}, group_size {group}", None


def _block_shape(value: Any, where: str) -> tuple[int, int]:
    """Two positive integers, as a list or as text such as `128x128`."""
    if isinstance(value, str):
        parts = value.split("x")
        value = [int(p) for p in parts] if all(p.isdecimal() for p in parts) else value
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(type(v) is int and v > 0 for v in value)
    ):
        raise CheckpointError(f"{where}: expected [rows, columns]; got {value!r}.")
    return value[0], value[1]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: expected an object; got {value!r}.")
    return value


def _strings(value: Any, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(
        isinstance(v, str) for v in value
    ):
        raise CheckpointError(f"{where}: expected a list of text; got {value!r}.")
    return list(value)
