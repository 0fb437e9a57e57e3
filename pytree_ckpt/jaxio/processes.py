"""This process among the others."""

import jax
from jax.experimental import multihost_utils


def process_index() -> int:
    """Index of this process."""
    return int(jax.process_index())


def process_count() -> int:
    """Number of processes."""
    return int(jax.process_count())


def process_of_device() -> dict[int, int]:
    """The process of each device id."""
    return {device.id: device.process_index for device in jax.devices()}


def device_count() -> int:
    """Number of devices of all processes."""
    return int(jax.device_count())


def platform() -> str:
    """Such as "cpu", "gpu", "tpu"."""
    return str(jax.default_backend())


def has_preemption_service() -> bool:
    """Whether JAX listens for SIGTERM, and tells all processes when to stop."""
    enabled = getattr(jax.config, "jax_enable_preemption_service", True)
    return bool(enabled and jax.distributed.is_initialized())


def reached_sync_point(number: int) -> bool:
    """Whether all processes are to stop at their call with this number, one above the last."""
    return bool(multihost_utils.reached_preemption_sync_point(number))


def place_in_process_0() -> dict[int, int]:
    """For the id of each device of this process that of its counterpart in process 0.

    A device that has none is left out.
    """
    first = [device.id for device in jax.devices() if device.process_index == 0]
    return dict(zip((device.id for device in jax.local_devices()), first, strict=False))
