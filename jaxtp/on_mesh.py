"""Running a rank's part of a call on a weight's mesh, wherever its operands lie."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxtp.errors import MeshError
from jaxtp.placement import PlacedWeight
from jaxtp.program import check_activation_dtype


def on_mesh(
    local: Callable[..., Array],
    x: Array,
    p: PlacedWeight,
    spec: P,
    out: P,
) -> Array:
    """Runs a rank's part of a call on the weight's mesh.

    check_vma is off: the carries of an interpreted kernel do not state their axes.
    """
    run = jax.shard_map(
        local, mesh=p.mesh, in_specs=(spec, p.specs()), out_specs=out, check_vma=False
    )
    return run(_constrain(x, p.mesh, spec), p)


def refuse_explicit_axes(x: Array) -> None:
    """Refuses Explicit axes where no mesh of a placed weight can take them.

    Raises:
        MeshError: Naming the axes and the call that works.
    """
    for mesh in (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()):
        if AxisType.Explicit in mesh.axis_types:
            raise MeshError(
                f"`x`, or the mesh that is set, has Explicit axes {mesh.axis_names}, "
                "and the weight is not placed; call place(weight, mesh, "
                "parallel='replicated') first."
            )


def spread_on(x: Any, weight: PlacedWeight) -> Array:
    """Puts an array that is not on the weight's mesh onto all its devices, replicated.

    Raises:
        DtypeError: If `x` is no bf16 or f32 array.
        MeshError: If the weight's arrays are not on the weight's mesh.
    """
    check_activation_dtype(x)
    mesh = weight.mesh
    value = weight.value
    if _is_concrete(value) and value.sharding.device_set != set(mesh.devices.flat):
        raise MeshError(
            "the weight's arrays were moved off its mesh; place the weight again on "
            "the new mesh, or state it with dataclasses.replace(weight, mesh=...)."
        )
    if isinstance(x, Tracer) or _is_on(x, mesh):
        return x
    return jax.device_put(x, NamedSharding(mesh, P()))


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _is_on(x: Any, mesh: Mesh) -> bool:
    """Whether a concrete array lies on the mesh's devices in the mesh's order."""
    if not _is_concrete(x) or not isinstance(x.sharding, NamedSharding):
        return False
    other = x.sharding.mesh
    return isinstance(other, Mesh) and list(other.devices.flat) == list(
        mesh.devices.flat
    )


def _constrain(x: Array, mesh: Mesh, spec: P) -> Array:
    """States the sharding of a traced array, for Auto and Explicit mesh axes alike."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = AxisType.Explicit in types.values()
    auto = [name for name in spec if name and types[name] != AxisType.Explicit]
    if explicit:
        x = jax.sharding.reshard(x, NamedSharding(mesh, P() if auto else spec))
    if auto or not explicit:
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return x
