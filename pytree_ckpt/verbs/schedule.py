"""When a loop is to save."""

import time

from pytree_ckpt.options import check_count, check_seconds


class Schedule:
    """Steps that are due: by their number, or by the time since the last save.

    Args:
        every: Steps that are a multiple of this.
        every_seconds: The first step after so many seconds.

    Raises:
        ValueError: The first is no int of at least 1, or the second no number above 0.
    """

    def __init__(self, *, every: int | None, every_seconds: float | None) -> None:
        if every is not None:
            check_count("save_every", every)
        if every_seconds is not None:
            check_seconds("save_every_seconds", every_seconds)
        self.every = every
        self.every_seconds = every_seconds
        self._last = time.monotonic()

    def has(self, step: int) -> bool:
        """Whether a step is due by its number, as every one is where there is no rule."""
        if self.every is None:
            return self.every_seconds is None
        return step % self.every == 0

    def is_time(self) -> bool:
        """Whether a step is due by time."""
        seconds = self.every_seconds
        return seconds is not None and time.monotonic() - self._last >= seconds

    def rules(self) -> list[str]:
        """What it was made with, as it was written."""
        given = {"save_every": self.every, "save_every_seconds": self.every_seconds}
        return [f"{name}={value}" for name, value in given.items() if value is not None]

    def note_save(self) -> None:
        """Count the seconds from here."""
        self._last = time.monotonic()
