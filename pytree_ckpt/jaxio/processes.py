"""This process among the others."""

import jax


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
