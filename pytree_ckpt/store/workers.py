"""A few threads that run jobs, in batches."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, Self, TypeVar

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


class Batch(Generic[T]):
    """Jobs that are done when all of them are: a future for each would cost more than the job."""

    def __init__(self, jobs: Iterable[Callable[[], T]]) -> None:
        self._jobs: list[Callable[[], T] | None] = list(jobs)
        self._results: list[Any] = [None] * len(self._jobs)
        self._failures: dict[int, BaseException] = {}
        self._left = len(self._jobs)
        self._lock = threading.Lock()
        self._done = threading.Event()
        if not self._jobs:
            self._done.set()

    def __len__(self) -> int:
        return len(self._jobs)

    def run(self, number: int, failure: BaseException | None) -> BaseException | None:
        """Run one job, unless it has `failure` already; what it raised."""
        job, self._jobs[number] = self._jobs[number], None
        try:
            if failure is None and job is not None:
                self._results[number] = job()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the results
            failure = error
        del job
        if failure is not None:
            self._failures[number] = failure
        with self._lock:
            self._left -= 1
            if not self._left:
                self._done.set()
        return failure

    def failures(self) -> list[BaseException]:
        """Wait for all jobs; what was raised, in the order of the jobs."""
        self._done.wait()
        return [self._failures[number] for number in sorted(self._failures)]

    def results(self) -> list[T]:
        """Wait for all jobs; their results.

        Raises:
            BaseException: The first failure, in the order of the jobs.
        """
        for failure in self.failures():
            raise failure
        return self._results


class Workers:
    """Runs jobs on `count` threads until the block ends; jobs not begun by then are dropped.

    With `all_or_nothing` no job begins once one has failed: it fails in the same way.

    Not a `ThreadPoolExecutor`, because that takes no more jobs once the interpreter begins to
    exit, and a save that is under way then must still be finished. Where no thread can be started
    (then, by Python 3.12.0 and 3.12.1; or at a limit of the system) `submit` runs the jobs itself.
    """

    def __init__(self, count: int, name: str, *, all_or_nothing: bool) -> None:
        self._jobs: queue.SimpleQueue[tuple[Batch[Any], int] | None] = queue.SimpleQueue()
        self._all_or_nothing = all_or_nothing
        self._failure: BaseException | None = None
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=False)
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            return self
        except BaseException:
            # Nobody leaves the block of one who is interrupted here.
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # One call ends all threads, so that an interruption leaves none behind that waits for ever.
        self._is_over = True
        self._jobs.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)  # for one that was about to start when its start was interrupted

    def submit(self, jobs: Iterable[Callable[[], T]]) -> Batch[T]:
        """Queue jobs."""
        batch = Batch(jobs)
        for number in range(len(batch)):
            if self._threads[0].ident is not None:
                self._jobs.put((batch, number))
            else:
                self._run(batch, number)
        return batch

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_over:
            self._run(*job)
            del job  # it must not keep a batch alive while this thread waits
        self._jobs.put(None)  # for the next thread

    def _run(self, batch: Batch[Any], number: int) -> None:
        failure = batch.run(number, self._failure)
        if self._all_or_nothing and failure is not None:
            self._failure = failure
