"""Runs a function on the ranks of a mesh axis, operands and results stacked by rank."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PERMUTATION = (5, 2, 7, 0, 3, 6, 1, 4)
"""An order of eight devices in which no device stands at its own index."""


def permuted_devices(tp: int) -> list[Any]:
    """The first `tp` devices in an order that is not that of their ids."""
    return [jax.devices()[i] for i in PERMUTATION if i < tp]


def make_axis(
    tp: int, devices: Sequence[Any] | None = None, axis_type: Any = AxisType.Auto
) -> Mesh:
    """A mesh of one axis "tp"; the devices default to a permuted order."""
    chosen = permuted_devices(tp) if devices is None else devices
    return Mesh(np.array(chosen), ("tp",), axis_types=(axis_type,))


def mapped(f: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`f` of per-rank operands as a jitted function of operands stacked by rank."""

    def per_rank(*blocks: Any) -> Any:
        result = f(*(block[0] for block in blocks))
        return jax.tree.map(lambda leaf: leaf[None], result)

    spec = P("tp")
    return jax.jit(
        jax.shard_map(
            per_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )


def placed(mesh: Mesh, *stacked: Any) -> tuple[Any, ...]:
    """Operands on the mesh, first axis over the ranks."""
    sharding = NamedSharding(mesh, P("tp"))
    return tuple(jax.device_put(operand, sharding) for operand in stacked)


def on_ranks(f: Callable[..., Any], *stacked: Any, mesh: Mesh | None = None) -> Any:
    """NumPy results of `f` on every rank, stacked by rank."""
    mesh = make_axis(len(stacked[0])) if mesh is None else mesh
    return jax.tree.map(np.asarray, mapped(f, mesh)(*placed(mesh, *stacked)))
