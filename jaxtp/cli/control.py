"""The control of a sweep: the same partials, added across ranks by `lax.psum`.

Its words change with the mesh, which shows that the sweep's comparison can fail.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxtp.plan import ReductionPlan
from jaxtp.reduction import sum_slots


def psum_words(
    partials: np.ndarray, mesh: Mesh, plans: tuple[ReductionPlan, ...]
) -> tuple[np.ndarray, ...]:
    """Each rank adds its own slots in plan order; `psum` adds the ranks.

    Args:
        partials: float32 `[S, T, N]`, all slots.
        mesh: A mesh with axis "tp".
        plans: Plans of S slots.

    Returns:
        float32 `[T, N]` for each plan, without a global scale.

    Bits:
        None promised: that is the point.
    """
    return tuple(np.asarray(y) for y in _psum(mesh, plans)(partials))


@functools.lru_cache(maxsize=64)
def _psum(mesh: Mesh, plans: tuple[ReductionPlan, ...]) -> Callable[..., list[Array]]:
    def local(partials: Array) -> list[Array]:
        here = partials.shape[0]
        sums = [sum_slots(partials, ReductionPlan(here, p.order)) for p in plans]
        # The control is the one place that adds across ranks in the compiler's order.
        return [lax.psum(y, "tp") for y in sums]  # noqa: TID251

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped)
