"""Seconds of each stage of a save or a load."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Adds up the seconds that threads spend in named stages.

    Stages that several threads run at once count for each thread, so their sum can be more than
    the time that passed.

    Example:
        >>> clock = StageClock()
        >>> with clock.stage("plan"):
        ...     pass
        >>> list(clock.seconds)
        ['plan']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the duration of the block, also if it fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, passed: float) -> None:
        """Count seconds that were measured elsewhere."""
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + passed

    def __str__(self) -> str:
        return ", ".join(f"{name} {passed:.3f} s" for name, passed in self.seconds.items())
