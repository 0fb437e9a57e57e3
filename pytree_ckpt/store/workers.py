"""A few threads that run jobs."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


_FOR_A_STORE = 16
"""A thread that waits for a store uses no processor, and a store answers many at once."""


def thread_count(asked: int | None, *, in_store: bool) -> int:
    """Threads to use: one for each processor that this process may run on, for a store more."""
    if asked is not None:
        return asked
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(count, _FOR_A_STORE) if in_store else count


class Workers:
    """Runs jobs on `count` threads until the block ends; jobs not begun by then are cancelled.

    Not a `ThreadPoolExecutor`, because that takes no more jobs once the interpreter begins to
    exit, and a save that is under way then must still be finished. Where no thread can be started
    (then, by Python 3.12.0 and 3.12.1; or at a limit of the system) `submit` runs the job itself.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=False)
            for number in range(count)
        ]
        self._started: list[threading.Thread] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            try:
                thread.start()
            except RuntimeError:
                break
            self._started.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _thread in self._started:
            self._jobs.put(None)
        for thread in self._started:
            thread.join()

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queue a job; its result, or what it raised, is in the future."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
                future.set_exception(error)

        if self._started:
            self._jobs.put(run)
        else:
            run()
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
