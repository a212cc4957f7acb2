"""Which form of a kernel runs: named by the caller, or fixed by the device."""

from typing import Any, Literal, cast

Implementation = Literal["mosaic", "portable"]
IMPLEMENTATIONS = ("mosaic", "portable")


def resolve_implementation(
    implementation: Implementation | None, device: Any
) -> Implementation:
    """The implementation that a call on `device` uses.

    "mosaic" runs on Hopper GPUs and "portable" on CPUs; None takes the one that runs.
    Nothing falls back.

    Args:
        implementation: "mosaic", "portable" or None.
        device: The `jax.Device` that the call runs on.

    Raises:
        ValueError: If the name is unknown.
        NotImplementedError: If the named implementation cannot run on the device, or
            none can.
    """
    hopper = device.platform == "gpu" and _compute_capability(device) == "9.0"
    runs = "mosaic" if hopper else "portable" if device.platform == "cpu" else None
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"`implementation` must be one of {IMPLEMENTATIONS} or None; got "
            f"{implementation!r}."
        )
    if runs is None:
        raise NotImplementedError(
            "kernels run on Hopper GPUs ('mosaic', compute capability 9.0) and on CPUs "
            f"('portable'); got {device.device_kind!r}."
        )
    if implementation not in (None, runs):
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run on {device.device_kind!r}; "
            f"implementation={runs!r} runs there."
        )
    implementation = runs
    return cast(Implementation, implementation)


def _compute_capability(device: Any) -> str:
    return str(getattr(device, "compute_capability", ""))
