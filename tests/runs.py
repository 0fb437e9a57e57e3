"""Training runs in processes of their own, that are stopped, killed, or fail where a test says.

`python tests/runs.py` imports JAX once, and then forks a process for every line on its standard
input: `[name of a function here, arguments, folder for its output]`. Whatever that function does,
also to return, is how the process ends.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

import pytree_ckpt as pc
from pytree_ckpt.store import commit, copying, disk, health, roots, writing
from pytree_ckpt.verbs import load, manager, mirroring, pending, preemption, save

PATIENCE_S = 60
"""Longer than anything here takes; a process that runs so long is ended, and the test fails."""
Scenario = Callable[..., None]
LOADED = (load, manager, mirroring, pending, preemption, save)  # before the fork, not after each


def state(step: int) -> dict[str, Any]:
    small = jax.device_put(np.full(5, step, np.int32))
    return {"w": np.full(300_000, step, np.float32), "b": small, "step": step}


# --- talking to the test --------------------------------------------------------------------------


class Line:
    """A named pipe: one process waits until the other has told it so."""

    def __init__(self, path: str | Path) -> None:
        if not os.path.exists(path):
            os.mkfifo(path)
        self.path = str(path)
        self._fd = os.open(path, os.O_RDWR)  # so that no side waits for the other to open it

    def tell(self) -> None:
        os.write(self._fd, b".")

    def wait(self) -> None:
        ready, _, _ = select.select([self._fd], [], [], PATIENCE_S)
        assert ready, f"nobody has told {self.path} anything"
        os.read(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


def act_before(owner: Any, name: str, action: Callable[[], None], *, times: int = 1) -> None:
    """Do `action` when `owner.name` is called for the first so many times."""
    call, left = getattr(owner, name), [times]

    def acting(*args: Any, **kwargs: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            action()
        return call(*args, **kwargs)

    setattr(owner, name, acting)


POINTS: dict[str, tuple[Any, str]] = {
    "before it writes": (writing.Writer, "write"),
    "between two files": (writing.Writer, "_write_piece"),
    "before its commit": (commit.Attempt, "commit"),
    "within its commit": (commit.Attempt, "_create"),
    "after its commit": (health, "unmark"),
    "before a deletion": (roots, "delete"),
    "within a deletion": (disk, "remove_tree"),
}


# --- leaving the interpreter ----------------------------------------------------------------------


def leave(root: str, how: str) -> None:
    """Leave while a save has not begun to write."""
    act_before(writing.Writer, "write", threading.main_thread().join)
    if how.startswith("manager"):
        pc.CheckpointManager(root).save(7, state(7))
    else:
        pc.save_async(pc.step_path(root, 7), state(7))
    if how.endswith("sys.exit"):
        sys.exit(0)
    if how.endswith("exception"):
        raise RuntimeError("the loop failed")


def fail(root: str, asks: str) -> None:
    """A save fails, and somebody asks or nobody."""

    def full() -> None:
        if asks == "nobody, and it fails at exit":
            threading.main_thread().join()
        raise OSError(28, "No space left on device")

    act_before(writing.Writer, "write", full)
    if asks.startswith("manager"):
        own = pc.CheckpointManager(root)
        own.save(7, state(7))
        end = {"manager.wait": own.wait, "manager.close": own.close}
        end["manager.save"] = lambda: own.save(8, state(8))
        expect(OSError, end[asks])
        return
    saved = pc.save_async(pc.step_path(root, 7), state(7))
    if asks == "nobody":
        saved.wait()
    elif asks == "result":
        expect(OSError, saved.result)
        expect(OSError, saved.result)
    elif asks == "exception":
        saved.wait()
        assert isinstance(saved.exception(), OSError)


def expect(error: type[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def outgrow(root: str) -> None:
    """The second step is larger than the system lets a file be."""
    own = pc.CheckpointManager(root, keep=pc.Keep(last=1))
    own.save(1, state(1))
    own.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
    own.save(2, {"w": np.zeros(3 << 20, np.float32)})
    try:
        own.wait()
    except OSError as error:
        print(error.errno, flush=True)
    own.save(3, state(3))
    own.wait()


# --- being told to stop ---------------------------------------------------------------------------


def be_preempted(root: str, when: str, here: str, go: str) -> None:
    """A loop that saves every tenth step; at `when` it tells the test, and waits for its word."""
    reached, told = Line(here), Line(go)

    def meet() -> None:
        reached.tell()
        told.wait()

    def meet_before(owner: Any, name: str) -> None:
        act_before(owner, name, meet)

    own = pc.CheckpointManager(root, keep=pc.Keep(last=2), save_every=10, on_sigterm=True)
    for step in range(1, 1000):
        if step == 30:
            own.wait()  # what follows is about the save of this step
        if step == 30 and when == "while the loop waits for a save":
            meet_before(writing.Writer, "write")
        if step == 40 and when == "while the loop waits for a save":
            # The save of step 30 is held already, here the loop is about to wait for it.
            act_before(pending.PendingSave, "result", meet)
        if step == 30 and when in POINTS:
            meet_before(*POINTS[when])
        own.save(step, state(step))
        if step == 30 and when in POINTS:
            meet()
        if (step, when) in ((5, "before the first save"), (35, "between saves")):
            meet()
    raise AssertionError("nobody stopped this run")


def be_preempted_at_the_end(root: str, when: str, here: str, go: str) -> None:
    """No call of `save` comes after the word to stop."""
    reached, told = Line(here), Line(go)

    def meet() -> None:
        reached.tell()
        told.wait()

    with pc.CheckpointManager(root, on_sigterm=True) as own:
        if when == "while it closes":
            act_before(*POINTS["before its commit"], meet)
        own.save(1, state(1))
        if when == "after the last save":
            own.wait()
            meet()
    raise AssertionError("nobody stopped this run")


def follow_the_sync_point(root: str, port: int, here: str, initialized: str) -> None:
    """JAX hears SIGTERM, and says some steps later when to stop."""
    if initialized == "before the manager":
        jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    own = pc.CheckpointManager(root, save_every=1_000_000, on_sigterm=True)
    if initialized == "after the manager":
        jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    for step in range(1, 1_000_000):
        if step == 5:
            Line(here).tell()
        pace.wait(0.01)
        if own.should_save(step):
            own.save(step, state(step))
    raise AssertionError("nobody stopped this run")


pace = threading.Event()
"""Never set: a step takes a moment."""


def be_told_twice(root: str, here: str, go: str) -> None:
    """The last save never ends, and the loop waits for it."""
    reached, told = Line(here), Line(go)
    own = pc.CheckpointManager(root, on_sigterm=True)
    own.save(1, state(1))
    own.wait()
    reached.tell()
    told.wait()
    act_before(writing.Writer, "write", reached.tell)
    act_before(commit.Attempt, "commit", told.wait)
    own.save(2, state(2))


def tell_all_managers(root: str) -> None:
    """Each has a loop of its own, and saves once more; one is closed by then."""
    closed = pc.CheckpointManager(f"{root}/closed", on_sigterm=True)
    first = pc.CheckpointManager(f"{root}/first", save_every=1000, on_sigterm=True)
    second = pc.CheckpointManager(f"{root}/second", save_every=1000, on_sigterm=True)
    closed.close()
    signal.raise_signal(signal.SIGTERM)
    expect(pc.Preempted, lambda: first.save(1, state(1)))
    expect(pc.Preempted, lambda: second.save(2, state(2)))
    signal.raise_signal(signal.SIGTERM)


def fork_a_worker(root: str, here: str) -> None:
    """A worker that loads data is told to end as multiprocessing does it; the run goes on."""
    own = pc.CheckpointManager(root, on_sigterm=True)
    worker = os.fork()
    if not worker:
        Line(here).tell()
        while True:
            signal.pause()
    Line(here).wait()
    os.kill(worker, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
    own.save(1, state(1))
    own.close()


def ask_in_a_fork(root: str) -> None:
    """A fork asks for a save that is under way in its parent, and hears that it is there."""
    may_write = threading.Event()
    act_before(writing.Writer, "write", may_write.wait)
    own = pc.CheckpointManager(root)
    pending = own.save(1, state(1))
    assert pending is not None
    fork = os.fork()
    if not fork:
        for ask in (own.wait, own.close, own.restore, pending.result, pending.wait):
            expect(pc.CheckpointError, ask)
        assert pending.exception() is None
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    may_write.set()
    own.close()


def fail_and_be_preempted(root: str) -> None:
    """The save before the last one fails; the last one is made all the same."""

    def full() -> None:
        raise OSError(28, "No space left on device")

    own = pc.CheckpointManager(root, on_sigterm=True)
    act_before(writing.Writer, "write", full)
    own.save(1, state(1))
    signal.raise_signal(signal.SIGTERM)
    own.save(2, state(2), skip_if_busy=True)


def mind_other_handlers(root: str) -> None:
    """After all managers are closed, in any order, SIGTERM is what it was."""
    calls: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: calls.append("first"))
    one = pc.CheckpointManager(root, on_sigterm=True)
    two = pc.CheckpointManager(root, on_sigterm=True)
    one.close()
    two.close()
    signal.raise_signal(signal.SIGTERM)
    assert calls == ["first"], calls

    three = pc.CheckpointManager(root, on_sigterm=True)
    signal.signal(signal.SIGTERM, lambda *_: calls.append("second"))
    three.close()
    signal.raise_signal(signal.SIGTERM)
    assert calls == ["first", "second"], calls

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pc.CheckpointManager(root, on_sigterm=True) as four:
        four.save(1, state(1))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.raise_signal(signal.SIGTERM)


# --- being killed ---------------------------------------------------------------------------------


def be_killed(root: str, point: str, last: int, here: str) -> None:
    """Two steps are saved; the third comes to `point` and no further."""
    reached = Line(here)

    def stop() -> None:
        reached.tell()
        threading.Event().wait()

    own = pc.CheckpointManager(root, keep=pc.Keep(last=last))
    own.save(1, state(1))
    own.save(2, state(2))
    own.wait()
    act_before(*POINTS[point], stop)
    own.save(3, state(3))


# --- copies ---------------------------------------------------------------------------------------

COPY_POINTS: dict[str, tuple[Any, str]] = {
    "before its first file": (mirroring, "copy_data"),
    "between two files": (copying, "_bytes_of"),
    "before it is read back": (mirroring, "verify_data"),
    "before its commit": (commit.Attempt, "commit"),
    "within its commit": (commit.Attempt, "_create"),
    "after its commit": (health, "unmark"),
    "within a deletion": (disk, "remove_tree"),
}


def copy_and_be_killed(root: str, far: str, point: str, here: str) -> None:
    """Two steps are copied; the copy of the third comes to `point` and no further."""
    reached = Line(here)

    def stop() -> None:
        reached.tell()
        threading.Event().wait()

    def copying_begins() -> None:
        if point != "before its first file":
            act_before(*COPY_POINTS[point], stop)
        else:
            stop()

    own = pc.CheckpointManager(root, mirror=far, keep=None, mirror_keep=pc.Keep(last=2))
    for step in (1, 2):
        own.save(step, state(step))
        own.wait()
    begin = (roots, "delete") if point == "within a deletion" else (mirroring, "copy_data")
    act_before(*begin, copying_begins)
    own.save(3, state(3))


def be_preempted_with_a_mirror(root: str, far: str, when: str) -> None:
    """The last step is due neither near nor far."""
    with pc.CheckpointManager(
        root, mirror=far, save_every=10, mirror_every=20, on_sigterm=True
    ) as own:
        for step in range(1, 37):
            if step == 36 and when == "before the last save":
                signal.raise_signal(signal.SIGTERM)
            own.save(step, state(step))
        own.save(37, state(37), force=True)
        if when == "after the last save":
            signal.raise_signal(signal.SIGTERM)
    raise AssertionError("nobody stopped this run")


def fail_to_copy(root: str, far: str, asks: str) -> None:
    """The far place cannot be written, and somebody asks or nobody."""
    own = pc.CheckpointManager(root, mirror=far)
    own.save(7, state(7))
    if asks == "wait":
        expect(OSError, own.wait)


# --- going on for long ----------------------------------------------------------------------------


def save_many(root: str, count: int) -> None:
    """Save `count` times from a state that is donated, and print what the process holds."""
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    array, host = jnp.zeros(1 << 19, jnp.float32), np.zeros(1 << 19, np.float32)
    small = jnp.arange(3)
    own = pc.CheckpointManager(root, keep=pc.Keep(last=1))
    for number in range(count):
        own.save(number, {"w": array, "host": host, "small": small})
        array = step(array)
        host += 1
        if number in (count // 4, count - 1):
            own.wait()
            print(json.dumps(held()), flush=True)


def fail_many(root: str, count: int) -> None:
    """As `save_many`, but every save fails, and its failure is kept."""

    def full() -> None:
        raise OSError(28, "No space left on device")

    act_before(writing.Writer, "write", full, times=count)
    failed = []
    for number in range(count):
        failed.append(pc.save_async(pc.step_path(root, number), {"w": np.zeros(1 << 19)}))
        expect(OSError, failed[-1].result)
        if number in (count // 4, count - 1):
            print(json.dumps(held()), flush=True)


def held() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_nbytes": pages * resource.getpagesize(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
    }


# --- the server of runs ---------------------------------------------------------------------------


def serve() -> None:
    for line in sys.stdin:
        name, arguments, folder = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.alarm(PATIENCE_S)
            for number, file in ((0, os.devnull), (1, f"{folder}/stdout"), (2, f"{folder}/stderr")):
                os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
            globals()[name](*arguments)
            return
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


class Runs:
    """Starts functions of this module in processes of their own, one at a time."""

    def __init__(self) -> None:
        paths = [str(Path(pc.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        settings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OPENBLAS_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env={**os.environ, **settings, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._run: Run | None = None

    def start(self, function: Callable[..., None], folder: Path, *arguments: Any) -> "Run":
        if self._run is not None:
            self._run.abandon()
        order = [function.__name__, [str(a) if isinstance(a, Path) else a for a in arguments]]
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([*order, str(folder)]) + "\n")
        self._server.stdin.flush()
        self._run = Run(self._read(), self._read, folder)
        return self._run

    def _read(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._run is not None:
            self._run.abandon()
        self._server.communicate()


class Run:
    """One of them, under way."""

    def __init__(self, pid: int, exit_code: Callable[[], int], folder: Path) -> None:
        self.pid = pid
        self._exit_code = exit_code
        self._folder = folder
        self._is_over = False

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        """Wait for the end; the exit code, or the negative number of the signal."""
        self._is_over = True
        return self._exit_code()

    def abandon(self) -> None:
        """End it, if the test that started it did not get so far."""
        if not self._is_over:
            self.kill(signal.SIGKILL)
            self.end()

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()


if __name__ == "__main__":
    serve()
