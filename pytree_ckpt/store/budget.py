"""A bound on bytes in flight."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ByteBudget:
    """Lets requests pass while their sum stays within `limit`; a larger one passes alone.

    `on_passed` is told how many bytes have passed so far.
    """

    def __init__(self, limit: int, on_passed: Callable[[int], None] | None = None) -> None:
        self._limit = limit
        self._on_passed = on_passed
        self._passed = 0
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` fit, and hold them for the duration of the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self._limit)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._passed += nbytes
                self._changed.notify_all()
                if self._on_passed is not None:
                    self._on_passed(self._passed)
