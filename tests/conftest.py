"""Eight CPU devices, strict promotion, and the skip rules of the `gpu` marker."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and device.compute_capability == "9.0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _hopper():
        skip = pytest.mark.skip(reason="needs a Hopper GPU (sm_90); none is here")
        for item in gpu_items:
            item.add_marker(skip)
