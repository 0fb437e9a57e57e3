"""Work that goes on in the background, such as a save."""

import atexit
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.format.manifest import Manifest

_LOG = logging.getLogger("pytree_ckpt")
T = TypeVar("T")


class Background(Generic[T]):
    """Work under way. Its failure is never lost: `result` raises it, or the exit reports it.

    Args:
        work: What is done in a thread of its own.
        what: What it is, in messages: "the save to /a/b".
    """

    def __init__(self, work: Callable[[], T], what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._finished = threading.Event()
        # Not a daemon: the interpreter waits for it before it exits.
        self._thread = threading.Thread(target=self._run, args=(work,), name="pytree_ckpt-async")
        self._go_on = threading.Event()
        self._is_wanted = True
        try:
            self._thread.start()
            self._go_on.set()
        except RuntimeError:
            # At a limit of the system, or (Python 3.12.0, 3.12.1) when the interpreter exits.
            self._go_on.set()
            self._run(work)
        except BaseException:
            # Interrupted: nobody would ever ask how it ends, so it does not begin.
            self._is_wanted = False
            self._go_on.set()
            raise
        if not threading.main_thread().is_alive():
            # In a function of `atexit`: the interpreter waits for no thread any more.
            self._thread.join()

    def _run(self, work: Callable[[], T]) -> None:
        # A thread that has started keeps the interpreter for a while (5 ms). It is the caller's
        # turn: without this wait every save would block the loop for that long.
        self._go_on.wait()
        if not self._is_wanted:
            return
        try:
            self._found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised by result(), or reported at exit
            self._error = error
            # Its frames hold parts of the snapshot, and it may be kept for long.
            traceback.clear_frames(error.__traceback__)
            _LOG.error("%s failed: %s", self._what, error)
            atexit.register(self._report)
        finally:
            self._finished.set()

    def _report(self) -> None:
        kind = type(self._error).__name__
        sys.stderr.write(f"pytree_ckpt: {self._what} failed: {kind}: {self._error}\n")

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; whether it has come.

        Raises:
            CheckpointError: It goes on in the process that this one was forked from.
        """
        if os.getpid() != self._pid and not self._finished.is_set():
            # The thread that does it was not forked.
            raise CheckpointError(f"{self._what} goes on in process {self._pid}, not in this fork")
        return self._finished.wait(timeout)

    def exception(self) -> BaseException | None:
        """What it failed with, None if it did not or is under way; it counts as seen."""
        if not self._finished.is_set():
            return None
        if self._error is not None:
            atexit.unregister(self._report)
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """What the work returned, once it is done; of a save the manifest, once it is durable.

        Raises:
            TimeoutError: It has not ended after `timeout` seconds; it goes on.
            CheckpointError: It goes on in the process that this one was forked from.
            Exception: What it failed with.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{self._what} has not ended after {timeout} s")
        if self._thread.ident is not None:
            self._thread.join()
        error = self.exception()
        if error is not None:
            raise error
        return self._found[0]


class PendingSave(Background[Manifest]):
    """A save under way. Its failure is never lost: `result` raises it, or the exit reports it."""

    def __init__(self, work: Callable[[], Manifest], path: str) -> None:
        super().__init__(work, f"the save to {path}")
        self._path = path

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._error else "done"
        return f"PendingSave({self._path!r}, {state})"
