"""Load the first of some steps that is whole; with several processes the same one on all."""

import errno
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pytree_ckpt.errors import Damage, FormatError, IntegrityError, NewerFormatError
from pytree_ckpt.jaxio.coordination import Session
from pytree_ckpt.store import health
from pytree_ckpt.store.locations import Location

_LOG = logging.getLogger("pytree_ckpt")
OnDamage = Literal["raise", "previous"]


def load_first_whole(
    steps: Sequence[tuple[int, Location]],
    load_step: Callable[[Location], Any],
    *,
    where: str,
    unread: str | None,
    on_damage: OnDamage,
    timeout_s: float,
) -> Any:
    """What `load_step` makes of the first step that no process finds damaged.

    With `"previous"` a damaged one is marked, and the next one tried. A step that is whole for one
    process and damaged for another, which reads other parts of it, is damaged for all.

    Args:
        steps: Each with its place; a step may have several.
        load_step: Loads what is at a place.
        where: The roots, for messages.
        unread: Why there may be more steps than these.
        on_damage: `"raise"` or `"previous"`.
        timeout_s: How long to wait for the other processes.

    Raises:
        IntegrityError, FormatError: The first step, or with `"previous"` every step, is damaged.
        OSError: They all are, and there may be more.
        PeerError: It is damaged, or cannot be loaded, for another process.
    """
    trouble: list[Damage] = []
    for number, path in steps:
        with Session(f"the restore of step {number},", path, timeout_s=timeout_s) as session:
            named = health.named_by(path) if on_damage == "previous" else None
            state, damage = _tried(load_step, number, path)
            found = session.exchange(None if damage is None else str(damage))
        damaged = {process: text for process, text in found.items() if text is not None}
        if not damaged:
            return state
        if on_damage == "raise":
            error = damage or session.failed(damaged)
            error.add_note(
                f"step {number} is damaged; on_damage='previous' loads the next best one"
            )
            raise error
        reason = "; ".join(damaged.values())
        _LOG.error("step %d, %s, is damaged and skipped: %s", number, path, reason)
        if session.process == 0:
            health.quarantine(path, named, reason)
        text = f"step {number}: {reason}"
        trouble.append(Damage(path=None, kind="unreadable", text=text, file=str(path)))
    error = IntegrityError(trouble, note=f"No step of {where} is whole.")
    if unread is not None:
        raise OSError(errno.EIO, f"no step of {where} is whole, and {unread}") from error
    raise error


def _tried(
    load_step: Callable[[Location], Any], number: int, path: Location
) -> tuple[Any, IntegrityError | FormatError | None]:
    try:
        return load_step(path), None
    except NewerFormatError as error:
        error.add_note(f"step {number} is not damaged, and not skipped; step= loads another one")
        raise
    except (IntegrityError, FormatError) as error:
        return None, error
