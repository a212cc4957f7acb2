"""SwiGLU, grouping and the ordered combine in plain IEEE NumPy."""

import math
from typing import Any

import numpy as np

from jaxtp.errors import ConfigError, DtypeError, ExpertError, ShapeError

_F = np.float32
_FORMS = ("plain", "step", "deepseek_v4", "gpt_oss")


def exponential(x: Any) -> np.ndarray:
    """`e^x = 2^n * (1 + (r + r^2 * q(r)))` in the roundings of the device function.

    Args:
        x: f32. Below -86 the result is +0.

    Bits:
        ORDERED.
    """
    x = np.asarray(x, _F)
    with np.errstate(all="ignore"):
        clipped = np.minimum(np.maximum(x, _F(-86)), _F(89))
        n = np.rint(clipped * _F(1 / math.log(2)))
        r = (clipped - n * _F(0.693359375)) - n * _F(math.log(2) - 0.693359375)
        q = np.full_like(r, 1 / math.factorial(8))
        for order in range(7, 1, -1):
            q = _F(1 / math.factorial(order)) + q * r
        mantissa = _F(1) + (r + (r * r) * q)
        power = np.where(np.isnan(n), _F(0), n).astype(np.int32)
        result = np.ldexp(mantissa, power)
    result = np.where(x < _F(-86), _F(0), result)
    return np.where(np.isnan(x), x, result).astype(_F)


def swiglu(
    gate: Any, up: Any, limit: float | None = None, form: str = "plain"
) -> np.ndarray:
    """What `jaxtp.swiglu` must return, word for word.

    Args:
        gate: f32.
        up: f32 of the shape of `gate`.
        limit: Finite positive clamp, or None.
        form: "plain", "step", "deepseek_v4" or "gpt_oss".

    Raises:
        JaxtpError: As `jaxtp.swiglu`.

    Bits:
        ORDERED.
    """
    g, u = _f32("gate", gate), _f32("up", up)
    if g.shape != u.shape:
        raise ShapeError(f"`gate` and `up` differ: {g.shape} and {u.shape}.")
    if form not in _FORMS:
        raise ConfigError(f"`form` must be one of {_FORMS}; got {form!r}.")
    if limit is not None:
        number = type(limit) in (int, float) or isinstance(limit, np.floating)
        if form == "plain" or not number or not 0 < _F(limit) < _F(np.inf):
            raise ConfigError(
                "`limit` must be finite and positive, with a clamped form; got "
                f"{limit!r} with form={form!r}."
            )
    bound = _F(np.inf if limit is None else limit)
    if form != "step":
        g = np.minimum(g, bound)
    u = np.minimum(np.maximum(u, -bound), bound)
    with np.errstate(all="ignore"):
        slope = g * _F(1.702) if form == "gpt_oss" else g
        silu = g / (_F(1) + exponential(-slope))
        if form == "step":
            silu = np.minimum(silu, bound)
        return silu * (u + _F(1) if form == "gpt_oss" else u)


def combine_routes(values: Any, weights: Any) -> np.ndarray:
    """What `jaxtp.combine_routes` must return: slots ascending from +0.

    Args:
        values: f32 `[T, k, H]`.
        weights: f32 `[T, k]`.

    Bits:
        ORDERED.
    """
    v, w = _f32("values", values), _f32("weights", weights)
    if v.ndim != 3 or v.shape[:2] != w.shape or v.shape[1] < 1:
        raise ShapeError(f"`values` {v.shape} do not fit `weights` {w.shape}.")
    out = np.zeros((v.shape[0], v.shape[2]), _F)
    with np.errstate(all="ignore"):
        for slot in range(v.shape[1]):
            product = w[:, slot, None] * v[:, slot]
            out = out + product
    return out


def moe_residual(residual: Any, routed: Any, shared: Any) -> np.ndarray:
    """What `jaxtp.moe_residual` must return: `residual + (routed + shared)`.

    Args:
        residual: f32.
        routed: f32.
        shared: f32.

    Bits:
        ORDERED.
    """
    x, r, s = _f32("residual", residual), _f32("routed", routed), _f32("shared", shared)
    if not x.shape == r.shape == s.shape:
        raise ShapeError(
            f"MoE residual operands must have one shape; got residual {x.shape}, "
            f"routed {r.shape}, shared {s.shape}."
        )
    with np.errstate(all="ignore"):
        return x + (r + s)


def group_routes(ids: Any, num_experts: int) -> tuple[np.ndarray, ...]:
    """`(pairs, offsets, places)` of `jaxtp.experts.group_routes`, by counting.

    Args:
        ids: int32 `[T, k]`.
        num_experts: E.

    Raises:
        ExpertError: If an id is outside `[0, E)`.

    Bits:
        BYTES.
    """
    flat = _ids(ids, num_experts)
    offsets = np.zeros(num_experts + 1, np.int32)
    for expert in flat:
        offsets[expert + 1] += 1
    offsets = np.cumsum(offsets, dtype=np.int32)
    pairs, places, next_place = np.empty_like(flat), np.empty_like(flat), offsets.copy()
    for pair, expert in enumerate(flat):
        places[pair] = next_place[expert]
        pairs[places[pair]] = pair
        next_place[expert] += 1
    return pairs, offsets, places


def expert_csr(
    ids: Any, num_experts: int, pair_rows: Any = None
) -> tuple[np.ndarray, ...]:
    """`(ex_ids, ex_off, ex_pairs, pair_tok)` of `jaxtp.experts.expert_csr`.

    Args:
        ids: int32 `[T, k]`, or `[P]` where `pair_rows` is given.
        num_experts: E.
        pair_rows: int32 `[P]`, or None for `p // k`.

    Bits:
        BYTES.
    """
    flat = _ids(ids, num_experts)
    groups = {e: [p for p, id_ in enumerate(flat) if id_ == e] for e in set(flat)}
    ex_ids = sorted(groups)
    sizes = [0, *(len(groups[e]) for e in ex_ids)]
    pairs = [p for e in ex_ids for p in groups[e]]
    if pair_rows is None:
        k = np.shape(ids)[1]
        pair_rows = [p // k for p in range(len(flat))]
    lists = (ex_ids, np.cumsum(sizes), pairs, pair_rows)
    return tuple(np.asarray(part, np.int32) for part in lists)


def partition_by_owner(
    ids: Any, num_experts: int, owners: int
) -> tuple[tuple[np.ndarray, ...], ...]:
    """`(experts, tokens, pairs)` per owner, as `jaxtp.experts.partition_by_owner`.

    Args:
        ids: int32 `[T, k]`.
        num_experts: E.
        owners: A divisor of E.

    Bits:
        BYTES.
    """
    flat, k = _ids(ids, num_experts), np.shape(ids)[1]
    if owners < 1 or num_experts % owners:
        raise ConfigError(f"{num_experts} experts do not divide by {owners} owners.")
    share = num_experts // owners
    lists: list[list[tuple[int, int, int]]] = [[] for _ in range(owners)]
    for pair, expert in enumerate(flat.tolist()):
        lists[expert // share].append((expert % share, pair // k, pair))
    columns = [np.asarray(rows, np.int32).reshape(-1, 3).T for rows in lists]
    return tuple((c[0], c[1], c[2]) for c in columns)


def _ids(ids: Any, num_experts: int) -> np.ndarray:
    flat = np.asarray(ids)
    if flat.dtype != np.int32:
        raise DtypeError(f"`ids` must be int32; got {flat.dtype}.")
    if ((flat < 0) | (flat >= num_experts)).any():
        raise ExpertError(f"`ids` must lie in [0, {num_experts}); got {flat.tolist()}.")
    return flat.reshape(-1)


def _f32(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype != _F:
        raise DtypeError(f"`{name}` must be float32; got {array.dtype}.")
    return array
