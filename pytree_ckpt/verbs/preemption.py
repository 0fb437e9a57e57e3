"""SIGTERM as a preemption: it is noted, and acted on at the next save."""

import signal
import threading
from types import FrameType

EXIT_CODE_PREEMPTED = 128 + signal.SIGTERM


class Preempted(SystemExit):
    """The process was told to stop, and the state is saved. Uncaught it exits with code 143."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(EXIT_CODE_PREEMPTED)


class Sigterm:
    """Notes that SIGTERM came. A second one does what it did before."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("on_sigterm works in the main thread only")
        self.received = False
        self._released = False
        self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # It does not log: it may have interrupted a write to the very stream of the log.
        self.received = True
        self._put_back()
        if self._released:
            signal.raise_signal(signal.SIGTERM)

    def release(self) -> None:
        """Listen no more, and put back the handler that was there, unless there is another."""
        self._released = True
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == self._note:
            self._put_back()

    def _put_back(self) -> None:
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
