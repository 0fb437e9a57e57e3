"""Durations and bytes as events of `jax.monitoring`, for those who listen."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax.monitoring

_LOG = logging.getLogger("pytree_ckpt")


def record(verb: str, seconds: Mapping[str, float]) -> None:
    """Record `/pytree_ckpt/<verb>/<stage>_secs` for each stage."""
    for stage, passed in seconds.items():
        event = f"/pytree_ckpt/{verb}/{stage}_secs"
        _tell(jax.monitoring.record_event_duration_secs, event, passed)


def record_read(verb: str, nbytes: int) -> None:
    """Record the scalar `/pytree_ckpt/<verb>/read_nbytes`: array bytes that this process read."""
    _tell(jax.monitoring.record_scalar, f"/pytree_ckpt/{verb}/read_nbytes", nbytes)


def _tell(tell: Callable[..., Any], event: str, value: float) -> None:
    """Tell the listeners; one that fails must not cost what is saved or loaded already."""
    try:
        tell(event, value)
    except Exception:  # noqa: BLE001 - whatever a listener raises
        _LOG.exception("a listener of jax.monitoring failed at %s", event)
