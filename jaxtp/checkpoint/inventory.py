"""The tensors of a checkpoint, sorted by the modules that they belong to."""

import dataclasses
import re
from collections.abc import Iterable

from jaxtp.checkpoint.safetensors import Entry

_MAINS = ("weight", "weight_packed")
_KV_SCALES = ("k_scale", "v_scale", "kv_scale")
_COMPANION = re.compile(
    r"scale|scale_inv|weight_scale\w*|\w*_global_scale|input_scale\w*"
    r"|weight_zero_point|input_zero_point|weight_g_idx|weight_shape"
)


@dataclasses.dataclass
class Module:
    """The tensors of one module that may belong together.

    Attributes:
        name: The module's name, `model.layers.0.mlp.down_proj`.
        mains: Its `weight` and `weight_packed`, whichever exist, by suffix.
        companions: Everything that looks like a scale of it, by suffix.
    """

    name: str
    mains: dict[str, Entry] = dataclasses.field(default_factory=dict)
    companions: dict[str, Entry] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Inventory:
    """All tensors of a checkpoint, sorted by what they can be.

    Attributes:
        modules: Modules with a main tensor, a companion, or both.
        plain: Tensors that are neither, by name.
        kv_scales: Scales of a KV cache, by name; they belong to no weight.
    """

    modules: dict[str, Module]
    plain: dict[str, Entry]
    kv_scales: dict[str, Entry]


def take_inventory(entries: Iterable[Entry], quantized: bool) -> Inventory:
    """Groups tensors by module.

    Args:
        entries: Every tensor of the checkpoint.
        quantized: Whether the config speaks of quantization. Without it, a tensor
            named `scale` alone is a parameter like any other.
    """
    modules: dict[str, Module] = {}
    plain: dict[str, Entry] = {}
    kv_scales: dict[str, Entry] = {}
    for entry in entries:
        stem, _, last = entry.name.rpartition(".")
        if last in _MAINS:
            modules.setdefault(stem, Module(stem)).mains[last] = entry
        elif last in _KV_SCALES:
            kv_scales[entry.name] = entry
        elif _COMPANION.fullmatch(last):
            modules.setdefault(stem, Module(stem)).companions[last] = entry
        else:
            plain[entry.name] = entry
    for module in list(modules.values()):
        alone = module.companions.get("scale")
        if module.mains or quantized or alone is None or alone.tag == "F8_E8M0":
            continue
        plain[alone.name] = module.companions.pop("scale")
        if not module.companions:
            del modules[module.name]
    return Inventory(modules, plain, kv_scales)
