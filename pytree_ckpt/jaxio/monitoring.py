"""Durations and bytes as events of `jax.monitoring`, for those who listen."""

from collections.abc import Mapping

import jax.monitoring


def record(verb: str, seconds: Mapping[str, float]) -> None:
    """Record `/pytree_ckpt/<verb>/<stage>_secs` for each stage."""
    for stage, passed in seconds.items():
        jax.monitoring.record_event_duration_secs(f"/pytree_ckpt/{verb}/{stage}_secs", passed)


def record_read(verb: str, nbytes: int) -> None:
    """Record the scalar `/pytree_ckpt/<verb>/read_nbytes`: array bytes that this process read."""
    jax.monitoring.record_scalar(f"/pytree_ckpt/{verb}/read_nbytes", nbytes)
