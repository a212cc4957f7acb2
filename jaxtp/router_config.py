"""Static routing rules per model family, and the record that a router returns."""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.core import Tracer

from jaxtp.errors import ConfigError, DtypeError, ExpertError, ShapeError

Score = Literal["sigmoid", "softmax", "sqrt_softplus", "softmax_topk"]

WEIGHT_FLOOR = np.float32(1e-20)
"""The smallest divisor of `route_norm`."""


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Which experts a token takes, and with which weights.

    Attributes:
        score: What a logit becomes: "sigmoid"; "softmax" over all experts;
            "sqrt_softplus", `sqrt(log(1 + e^l))`; or "softmax_topk", which selects by
            the logits and takes a softmax over the selected ones.
        top_k: Experts per token.
        selection_bias: Whether a correction bias is added to the scores for the
            selection only. It must then be passed: a missing one is never zero.
        num_groups: Groups of consecutive experts of equal size. A group's score is the
            sum of its two highest keys.
        top_groups: Groups a token may choose from.
        route_norm: Whether weights are divided by their sum.
        scale: Factor of the weights, after the division.

    Raises:
        ConfigError: If a field is out of range, or fields contradict each other.
    """

    score: Score
    top_k: int
    selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    route_norm: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in get_args(Score):
            raise ConfigError(
                f"`score` must be one of {get_args(Score)}; got {self.score!r}."
            )
        for name in ("top_k", "num_groups", "top_groups"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"`{name}` must be a positive int; got {value!r}.")
        for name in ("selection_bias", "route_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"`{name}` must be a bool; got {getattr(self, name)!r}."
                )
        if self.top_groups > self.num_groups:
            raise ConfigError(
                f"`top_groups` must be at most num_groups={self.num_groups}; got "
                f"{self.top_groups}."
            )
        number = type(self.scale) in (int, float)
        if not (number and 0 < np.float32(self.scale) < math.inf):
            raise ConfigError(
                f"`scale` must be a finite positive number; got {self.scale!r}."
            )
        if self.score == "softmax_topk" and self.route_norm:
            raise ConfigError(
                "score='softmax_topk' has weights of sum 1 already; pass "
                "route_norm=False."
            )

    @classmethod
    def of(cls, family: str) -> "RouterConfig":
        """The rule of a model family, one of `FAMILIES`.

        Raises:
            ConfigError: If the family is unknown.
        """
        if family not in FAMILIES:
            raise ConfigError(
                f"`family` must be one of {sorted(FAMILIES)}; got {family!r}. Build "
                "a RouterConfig for another one."
            )
        return FAMILIES[family]


FAMILIES = {
    "step": RouterConfig("sigmoid", 8, selection_bias=True, scale=3.0),
    "deepseek_v3": RouterConfig(
        "sigmoid", 8, selection_bias=True, num_groups=8, top_groups=4, scale=2.5
    ),
    "deepseek_v4": RouterConfig("sqrt_softplus", 6, selection_bias=True, scale=1.5),
    "deepseek_v4_pro": RouterConfig("sqrt_softplus", 6, selection_bias=True, scale=2.5),
    "kimi_k2": RouterConfig("sigmoid", 8, selection_bias=True, scale=2.827),
    "glm_45": RouterConfig("sigmoid", 8, selection_bias=True, scale=2.5),
    "qwen3_moe": RouterConfig("softmax", 8),
    "gpt_oss": RouterConfig("softmax_topk", 4, route_norm=False),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
    """What a router decided, slot by slot in selection order.

    Attributes:
        logits: f32 `[T, E]`.
        ids: int32 `[T, k]`, distinct in a row.
        weights: f32 `[T, k]`.
    """

    logits: Any
    ids: Any
    weights: Any


def check_routing(
    values: Any, config: RouterConfig, bias: Any, active: Any, name: str = "logits"
) -> None:
    """Checks the operands of a routing call; reads the values of concrete ones.

    Args:
        values: f32 `[T, E]`.
        config: The rule.
        bias: f32 `[E]` or None.
        active: bool `[E]` or None.
        name: Name of `values` for the messages.

    Raises:
        DtypeError: If an operand has another dtype. A bf16 bias is refused: it cannot
            tell the experts of a checkpoint apart.
        ShapeError: If a shape does not fit.
        ConfigError: If the experts cannot be cut as the config says.
        ExpertError: If a bias is missing, left over or non-finite, or too few experts
            are active.
    """
    _check(name, values, np.float32, 2)
    experts = values.shape[1]
    _check_experts(experts, config)
    if config.selection_bias != (bias is not None):
        raise ExpertError(
            "`bias` is missing, and the config has selection_bias=True."
            if bias is None
            else "`bias` is given, but the config has selection_bias=False. A linear "
            "bias of the gate goes to `router_logits`."
        )
    if bias is not None:
        _check("bias", bias, np.float32, 1, experts)
        if not isinstance(bias, Tracer) and not np.isfinite(np.asarray(bias)).all():
            at = int(np.argmin(np.isfinite(np.asarray(bias))))
            raise ExpertError(
                f"`bias` must be finite; got {np.asarray(bias)[at]} at expert {at}."
            )
    if active is not None:
        _check("active", active, np.bool_, 1, experts)
        if not isinstance(active, Tracer):
            _check_active(np.asarray(active), config)


def _check(name: str, values: Any, dtype: Any, rank: int, size: int = -1) -> None:
    found = np.dtype(values.dtype)
    if found != np.dtype(dtype):
        raise DtypeError(f"`{name}` must be {np.dtype(dtype).name}; got {found.name}.")
    if len(values.shape) != rank or size not in (-1, values.shape[0]):
        expected = "[tokens, experts]" if rank == 2 else f"[{size}]"
        raise ShapeError(f"`{name}` must be {expected}; got {list(values.shape)}.")


def _check_experts(experts: int, config: RouterConfig) -> None:
    group = experts // config.num_groups
    if group * config.num_groups != experts or (config.num_groups > 1 and group < 2):
        raise ConfigError(
            f"{experts} experts are not {config.num_groups} equal groups of at least "
            "two; change `num_groups`."
        )
    if config.top_k > group * config.top_groups:
        raise ConfigError(
            f"top_k={config.top_k} experts do not fit the {group * config.top_groups} "
            f"experts of {config.top_groups} of {config.num_groups} groups."
        )


def _check_active(active: np.ndarray, config: RouterConfig) -> None:
    counts = np.sort(active.reshape(config.num_groups, -1).sum(axis=1))
    fewest = int(counts[: config.top_groups].sum())
    if fewest < config.top_k:
        raise ExpertError(
            f"`active` leaves {fewest} experts to choose from (in the smallest groups, "
            f"if there are several); top_k={config.top_k} are needed."
        )
