"""Preemption: the notice that the process must stop, which is acted on at the next save."""

import os
import signal
import threading
from types import FrameType
from typing import Protocol

from pytree_ckpt.jaxio import processes

EXIT_CODE_PREEMPTED = 128 + signal.SIGTERM


class Preempted(SystemExit):
    """The process was told to stop, and the state is saved. Uncaught it exits with code 143.

    Attributes:
        step: The last step that was saved, None if there is none.
    """

    def __init__(self, step: int | None) -> None:
        self.step = step
        super().__init__(EXIT_CODE_PREEMPTED)


class Notice(Protocol):
    """Word that the process must stop. `is_open` while it came and was not acted on."""

    is_open: bool

    def came(self) -> bool:
        """Whether to stop at this call, or at one before."""

    def release(self) -> None:
        """Listen no more."""


def listen(*, on_sigterm: bool) -> Notice:
    """Listen for SIGTERM, or to JAX where that does; or to nothing.

    Raises:
        ValueError: Not in the main thread.
    """
    if not on_sigterm:
        return Silence()
    if processes.has_preemption_service():
        return SyncPoint()
    return Sigterm()


class Silence:
    """No word comes."""

    is_open = False

    def came(self) -> bool:
        return False

    def release(self) -> None:
        """Nobody listens."""


class SyncPoint:
    """JAX's word, on which all processes stop at the same call: they must call equally often."""

    def __init__(self) -> None:
        self.is_open = False
        self._came = False
        self._calls = 0

    def came(self) -> bool:
        if not self._came:
            # JAX names one call, by its number, so no number is left out.
            self._calls += 1
            self._came = self.is_open = processes.reached_sync_point(self._calls)
        return self._came

    def release(self) -> None:
        """JAX goes on listening."""


class Sigterm:
    """Notes that SIGTERM came, as all of its kind do. A second one does what it did before.

    Where `jax.distributed` is initialized later, the signal is JAX's, and so is the word.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("on_sigterm works in the main thread only")
        self.is_open = False
        self._came = False
        self._sync_point = SyncPoint()
        self._listener: int | None = os.getpid()
        self._before = signal.signal(signal.SIGTERM, self._note)

    def came(self) -> bool:
        if not self._came and processes.has_preemption_service():
            self._came = self.is_open = self._sync_point.came()
        return self._came

    def _note(self, number: int, frame: FrameType | None) -> None:
        # It does not log: it may have interrupted a write to the very stream of the log.
        if not self._is_heard():
            signal.raise_signal(signal.SIGTERM)

    def _is_heard(self) -> bool:
        """Note it, and have those note it that listened before; whether any still listens.

        None does in a fork, such as a worker that loads data.
        """
        self._came = self.is_open = True
        self._put_back()
        before = getattr(self._before, "__self__", None)
        is_heard_before = isinstance(before, Sigterm) and before._is_heard()
        return is_heard_before or self._listener == os.getpid()

    def release(self) -> None:
        """Listen no more, and put back the handler that was there, unless there is another."""
        self._listener = None
        in_main = threading.current_thread() is threading.main_thread()
        is_own = signal.getsignal(signal.SIGTERM) == self._note
        if in_main and is_own and not processes.has_preemption_service():
            self._put_back()

    def _put_back(self) -> None:
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
