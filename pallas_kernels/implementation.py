"""Which form of a kernel runs: named by the caller, or fixed by the device."""

from typing import Any, Literal, cast

Implementation = Literal["mosaic", "portable"]
IMPLEMENTATIONS = ("mosaic", "portable")


def resolve_implementation(
    implementation: Implementation | None, device: Any
) -> Implementation:
    """The implementation that a call on `device` uses.

    None is "mosaic" on a Hopper GPU and "portable" on a CPU. Nothing falls back.

    Args:
        implementation: "mosaic", "portable" or None.
        device: The `jax.Device` that the call runs on.

    Raises:
        ValueError: If the name is unknown.
        NotImplementedError: If the named implementation cannot run on the device, or
            none was named and the device has no default.
    """
    hopper = device.platform == "gpu" and _compute_capability(device) == "9.0"
    if implementation is None:
        if hopper or device.platform == "cpu":
            return "mosaic" if hopper else "portable"
        raise NotImplementedError(
            f"{device.device_kind!r} has no default implementation; pass "
            "implementation='portable'."
        )
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"`implementation` must be one of {IMPLEMENTATIONS} or None; got "
            f"{implementation!r}."
        )
    if implementation == "mosaic" and not hopper:
        raise NotImplementedError(
            "implementation='mosaic' needs a Hopper GPU (compute capability 9.0); got "
            f"{device.device_kind!r}. implementation='portable' runs there."
        )
    if implementation == "portable" and device.platform not in ("cpu", "gpu"):
        raise NotImplementedError(
            "implementation='portable' runs on CPUs and GPUs; got "
            f"{device.device_kind!r}."
        )
    return cast(Implementation, implementation)


def _compute_capability(device: Any) -> str:
    return str(getattr(device, "compute_capability", ""))
