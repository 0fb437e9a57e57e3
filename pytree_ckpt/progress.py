"""How far a transfer is, for a person at a terminal; nothing, and at no cost, for anyone else."""

import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytree_ckpt.options import Progress, ProgressChoice

_PATIENCE_S = 1.0
"""What is done by then is not worth a bar."""
_INTERVAL_S = 0.1


@contextmanager
def showing(what: str, choice: ProgressChoice) -> Iterator[Progress | None]:
    """Show how far the block is: yields whom to tell, None where nobody would see it.

    Example:
        >>> with showing("loading", False) as progress:
        ...     print(progress)
        None
    """
    if callable(choice):
        yield choice
        return
    if not choice or not _is_watched():
        yield None
        return
    bar = _Bar(what, patience_s=_PATIENCE_S if choice == "auto" else 0.0)
    try:
        yield bar.update
    finally:
        bar.close()


def _is_watched() -> bool:
    """Whether stderr is a terminal; it may also be None, closed, or what catches prints."""
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError, OSError):
        return False


class _Bar:
    """A bar on stderr that comes when something is told after `patience_s`, and then goes."""

    def __init__(self, what: str, *, patience_s: float) -> None:
        self._what = what
        self._next = time.monotonic() + patience_s
        self._lock = threading.Lock()
        self._bar: Any = None

    def update(self, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + _INTERVAL_S
            try:
                if self._bar is None:
                    self._bar = _started(self._what)
                self._bar.update(self._bar.task_ids[0], completed=done, total=total)
            except (OSError, ValueError):
                # A terminal that is gone, or closed, must not cost the checkpoint.
                self._next = math.inf

    def close(self) -> None:
        if self._bar is not None:
            try:
                self._bar.stop()
            except (OSError, ValueError):
                self._bar = None  # as above


def _started(what: str) -> Any:
    # Imported here: it takes 0.1 s, which is nothing once a transfer takes seconds.
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    # A console of its own, so that a live display of the caller stays possible.
    console = Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
    bar = bars.Progress(*columns, console=console, transient=True)
    what = "".join(c if c.isprintable() else "?" for c in what)
    # A long path would push the bar off the line; its end says more than its beginning.
    bar.add_task(what if len(what) <= 40 else f"{what[:9]}…{what[-30:]}", total=None)
    bar.start()
    return bar
