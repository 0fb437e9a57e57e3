"""What the processes of a run tell each other, by the coordination service of `jax.distributed`.

The service is a thread of process 0 that keeps keys and values. It needs no devices, so it may be
used from any thread, also while the devices compute.
"""

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from jax.errors import JaxRuntimeError

from pytree_ckpt.errors import CheckpointError, ExistsError, PeerError, PeerTimeoutError
from pytree_ckpt.format import wire
from pytree_ckpt.jaxio import processes

T = TypeVar("T")
_ROOT = "pytree_ckpt"
_LAST_WORD_S = 2.0
"""How long a process that has failed tries to say so, and one that exits waits for its calls."""
_THREAD = "pytree_ckpt-coordination"


class Session:
    """One matter that all processes settle together.

    In turn process 0 tells the others something, and they report to it; what is told and what is
    reported are counted, so that both sides mean the same. Every process opens its sessions in
    the same order: the n-th of one is the n-th of all. If one has come to another matter, that is
    an error: what is said about one must not be taken for the other.

    As a context it tells the others of the failure that ends it. A process that is alone has
    nobody to tell.

    Args:
        matter: What it is about, the same for all: "the save to".
        place: And where, for messages; each process may have a path of its own.
        timeout_s: How long process 0 waits for the others when it has come to the same point.
            They wait twice as long for process 0, which may be waiting for one of them.
    """

    def __init__(self, matter: str, place: object, *, timeout_s: float) -> None:
        self.process = processes.process_index()
        self._count = processes.process_count()
        self._matter = matter
        self._what = f"{matter} {place}"
        self._timeout_s = timeout_s
        self._told = self._reported = 0
        self._is_over = False
        if self._count > 1:
            self._client = _client()
            mine = f"{_ROOT}/opened/{self.process}"
            number = self._call(timeout_s, lambda: self._client.key_value_increment(mine, 1))
            self._prefix = f"{_ROOT}/{number}"

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process."""
        return self._count == 1

    # --- process 0 ------------------------------------------------------------------------------

    def tell(self, message: Any) -> None:
        """Tell all others, from process 0."""
        self._tell({"message": message}, self._timeout_s)

    def gather(self) -> dict[int, Any]:
        """What each of the others reports next, by process.

        Raises:
            PeerTimeoutError: Some have not reported in time.
            PeerError: Some have reported a failure.
        """
        deadline = time.monotonic() + self._timeout_s
        heard = {
            process: self._get(f"reported/{self._reported}/{process}", deadline)
            for process in range(1, self._count)
        }
        self._reported += 1
        heard.update(self._given_up())
        missing = [process for process, message in heard.items() if message is None]
        failures = {p: m["failed"] for p, m in heard.items() if m is not None and "failed" in m}
        if missing:
            raise self._timed_out(missing, failures, self._timeout_s)
        if failures:
            raise self.failed(failures)
        self._check_matter(heard)
        return {process: message["message"] for process, message in heard.items()}

    def _given_up(self) -> dict[int, Any]:
        """Who has reported once more, although nothing was told: a failure, or no patience."""
        if self.is_alone:
            return {}
        folder = f"{self._prefix}/reported/{self._reported}/"
        found = self._call(self._timeout_s, lambda: self._client.key_value_dir_get_bytes(folder))
        return {int(key.rsplit("/", 1)[1]): self._decoded(data) for key, data in found}

    # --- the others -----------------------------------------------------------------------------

    def report(self, message: Any) -> None:
        """Report to process 0, from another."""
        self._report({"message": message}, self._timeout_s)

    def hear(self) -> Any:
        """What process 0 tells next.

        Raises:
            PeerTimeoutError: It has told nothing in time, or says that others have not reported.
            PeerError, ExistsError: It says that it, or another one, has failed.
        """
        heard = self._get(f"told/{self._told}", time.monotonic() + 2 * self._timeout_s)
        self._told += 1
        if heard is None:
            raise self._timed_out([0], {}, 2 * self._timeout_s)
        if "message" not in heard:
            raise _as_error(heard)
        self._check_matter({0: heard})
        return heard["message"]

    def _check_matter(self, heard: dict[int, Any]) -> None:
        """Raise a `PeerError` if others have come to another matter than this process."""
        matters = {process: message["matter"] for process, message in heard.items()}
        apart = {p: f"is at {matter} …" for p, matter in matters.items() if matter != self._matter}
        if apart:
            listed = "; ".join(f"process {process} {text}" for process, text in apart.items())
            text = f"{self._what} failed: all must make the same calls in one order, but {listed}"
            raise PeerError(text, failures=apart)

    # --- all ------------------------------------------------------------------------------------

    def exchange(self, message: Any) -> dict[int, Any]:
        """What every process has to say, to every process.

        Raises:
            PeerTimeoutError, PeerError: As `gather` and `hear`.
        """
        if self.process:
            self.report(message)
            return dict(self.hear())
        said = {0: message, **self.gather()}
        self.tell(list(said.items()))
        return said

    def agreed(self, step: Callable[[], T]) -> T:
        """What a step returns here, once it has failed nowhere; where it has, that is the end.

        Raises:
            Exception: What the step raises here.
            PeerError: It has failed on others alone.
            PeerTimeoutError: As `gather` and `hear`.
        """
        found: list[T] = []
        error = None
        try:
            found.append(step())
        except Exception as failure:  # noqa: BLE001 - raised once the others know
            error = failure
        said = self.exchange(None if error is None else f"{type(error).__name__}: {error}")
        failures = {process: text for process, text in said.items() if text is not None}
        if failures:
            self.close()
            raise error or self.failed(failures)
        return found[0]

    # --- ending ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End it where all know why, so that nobody is told of what is raised here."""
        self._end(None)

    @contextmanager
    def ends_by_failure(self) -> Iterator[None]:
        """A part of it: if it fails that is the end, otherwise more is to come."""
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Say why it ends, if it fails here, in place of what the others wait for next.

        Raises:
            PeerError, PeerTimeoutError: Process 0 had failed before: that is why it fails here.
        """
        if self.is_alone or self._is_over:
            return
        self._is_over = True
        try:
            if error is not None:
                self._fail(error)
        finally:
            _start(self._forget)

    def _fail(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        try:
            if self.process == 0:
                return self._tell(self._as_told(error, text), _LAST_WORD_S)
            told = None
            if not isinstance(error, PeerTimeoutError):
                told = self._look(f"told/{self._told}")
            self._report({"failed": text}, _LAST_WORD_S)
        except CheckpointError as second:
            return error.add_note(f"The other processes could not be told: {second}")
        if told is not None and "message" not in told:
            raise _as_error(told) from error

    def _as_told(self, error: BaseException, text: str) -> dict[str, Any]:
        failures = {0: text}
        missing: tuple[int, ...] = ()
        if isinstance(error, PeerTimeoutError):
            missing, text = error.missing, str(error)
        elif isinstance(error, PeerError):
            failures, text = dict(error.failures), str(error)
        elif isinstance(error, ExistsError):
            text = str(error)
        else:
            text = str(self.failed(failures))
        return {
            "text": text,
            "missing": missing,
            "failures": list(failures.items()),
            "exists": isinstance(error, ExistsError),
        }

    def _forget(self) -> None:
        """Delete what was said, when all have ended."""
        ended = f"{self._prefix}/ended"
        if self._client.key_value_increment(ended, 1) == self._count:
            self._client.key_value_delete(f"{self._prefix}/")

    # --- keys and values ------------------------------------------------------------------------

    def _tell(self, message: dict[str, Any], timeout_s: float) -> None:
        self._set(f"told/{self._told}", message, timeout_s)
        self._told += 1

    def _report(self, message: dict[str, Any], timeout_s: float) -> None:
        self._set(f"reported/{self._reported}/{self.process}", message, timeout_s)
        self._reported += 1

    def _set(self, key: str, message: dict[str, Any], timeout_s: float) -> None:
        if self._count > 1:
            data, full = wire.encode({**message, "matter": self._matter}), f"{self._prefix}/{key}"
            self._call(timeout_s, lambda: self._client.key_value_set_bytes(full, data))

    def _get(self, key: str, deadline: float) -> Any:
        """The message under a key as soon as there is one; None if that is not in time."""
        left_ms = max(int(1000 * (deadline - time.monotonic())), 1)
        full = f"{self._prefix}/{key}"
        return self._read(
            left_ms / 1000 + 1, lambda: self._client.blocking_key_value_get_bytes(full, left_ms)
        )

    def _look(self, key: str) -> Any:
        """The message under a key; None if there is none yet."""
        full = f"{self._prefix}/{key}"
        return self._read(_LAST_WORD_S, lambda: self._client.key_value_try_get_bytes(full))

    def _read(self, timeout_s: float, call: Callable[[], bytes]) -> Any:
        try:
            data = self._call(timeout_s, call)
        except _AbsentError:
            return None
        return self._decoded(data)

    def _decoded(self, data: bytes) -> Any:
        return wire.decode(data, what=f"a message about {self._what}")

    def _call(self, timeout_s: float, call: Callable[[], T]) -> T:
        """Ask the service, by a thread: where process 0 is stopped, no call ever returns."""
        try:
            return _start(call).result(timeout_s)
        except TimeoutError:
            raise self._timed_out([0], {}, timeout_s) from None
        except JaxRuntimeError as error:
            if str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                raise _AbsentError from None
            text = f"{self._what} failed: the coordination service in process 0 reports {error}"
            if self.process:
                raise PeerTimeoutError(text, missing=[0]) from None
            raise CheckpointError(text) from None

    def _timed_out(
        self, missing: list[int], failures: dict[int, str], waited_s: float
    ) -> PeerTimeoutError:
        text = f"{self._what} failed: no answer from {_names(missing)} in {waited_s:g} s"
        text += "".join(f"; process {p} failed: {why}" for p, why in failures.items())
        return PeerTimeoutError(text, missing=missing)

    def failed(self, failures: dict[int, str]) -> PeerError:
        """The error for what is wrong on other processes."""
        lines = [f"{self._what} failed on {_names(list(failures))}"]
        lines += [f"  process {process}: {text}" for process, text in failures.items()]
        return PeerError("\n".join(lines), failures=failures)


def decided(matter: str, place: object, decide: Callable[[], T], *, timeout_s: float) -> T:
    """What process 0 decides, on all processes; the others wait for it.

    Raises:
        Exception: What `decide` raises in process 0; the others learn of it as of any failure.
        PeerError: Process 0 has come to another matter.
    """
    with Session(matter, place, timeout_s=timeout_s) as session:
        if session.process:
            heard: T = session.hear()
            return heard
        decision = decide()
        session.tell(decision)
        return decision


class _AbsentError(Exception):
    """There is no such key, or there was none for as long as the service waited for it."""


def _as_error(told: dict[str, Any]) -> CheckpointError:
    """The failure that process 0 has told."""
    if told["missing"]:
        return PeerTimeoutError(told["text"], missing=told["missing"])
    if told["exists"]:
        return ExistsError(told["text"])
    return PeerError(told["text"], failures=dict(told["failures"]))


def _names(numbers: list[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _client() -> Any:
    """The client of the coordination service; JAX has no public name for it."""
    try:
        from jax._src.distributed import global_state

        client = global_state.client
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"this JAX keeps its coordination client elsewhere ({error}), so its processes "
            "cannot save together; use a JAX that this release was tested with"
        ) from None
    if client is None:
        raise CheckpointError(
            "several processes save together only after jax.distributed.initialize()"
        )
    return client


def _start(call: Callable[[], T]) -> "Future[T]":
    """Run a call in a thread that nobody has to wait for, also not the end of the interpreter."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=_THREAD, daemon=True).start()
    except RuntimeError:  # The interpreter is about to exit, or the system has no more threads.
        run()
    return future


@atexit.register
def _let_calls_end() -> None:
    """An interpreter that exits while a thread is in native code may abort instead."""
    until = time.monotonic() + _LAST_WORD_S
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(max(until - time.monotonic(), 0))
