"""However a process ends, no checkpoint that it had is lost, and none is half there."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pytree_ckpt as pc
from tests import runs
from tests.runs import Line, Run, Runs

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")

SAVES = int(os.environ.get("PYTREE_CKPT_TEST_SAVES", "60"))
"""How many saves must leave no trace in memory."""

REPORT = "pytree_ckpt: the save to "
"""How the report of a failure at exit begins; the log has a line of its own."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Runs]:
    with Runs() as processes:
        yield processes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Line]:
    """The run tells the test that it has come to the point in question."""
    line = Line(tmp_path / "here")
    yield line
    line.close()


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Line]:
    """The test tells the run to go on."""
    line = Line(tmp_path / "go")
    yield line
    line.close()


def newest(root: Path) -> int | None:
    """The newest step, loaded and looked at."""
    with pc.CheckpointManager(root, background=False) as manager:
        step = manager.latest_step()
        for number in manager.steps():
            found = manager.restore(step=number)
            assert found["step"] == number
            np.testing.assert_array_equal(found["w"], np.full(300_000, number))
            np.testing.assert_array_equal(found["b"], np.full(5, number))
    return step


def assert_nothing_is_left_over(root: Path) -> None:
    """Every file in the root belongs to a step that is whole."""
    for step in pc.steps(root):
        folder = pc.step_path(root, step)
        names = {"manifest.msgpack", pc.read_manifest(folder).data_dir}
        assert set(os.listdir(folder)) == names
    assert len(os.listdir(root)) == len(pc.steps(root))


# --- leaving the interpreter ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code"),
    [("return", 0), ("sys.exit", 0), ("exception", 1), ("manager, exception", 1)],
)
def test_leaving_the_interpreter_waits_for_a_save(
    processes: Runs, root: Path, tmp_path: Path, how: str, code: int
) -> None:
    run = processes.start(runs.leave, tmp_path, root, how)
    assert run.end() == code, run.stderr
    assert ("RuntimeError: the loop failed" in run.stderr) == bool(code)
    assert "failed" not in run.stderr.replace("the loop failed", "")
    assert newest(root) == 7
    assert_nothing_is_left_over(root)


@pytest.mark.parametrize("asks", ["nobody", "nobody, and it fails at exit"])
def test_a_failure_that_nobody_asked_for_is_reported_at_exit(
    processes: Runs, root: Path, tmp_path: Path, asks: str
) -> None:
    run = processes.start(runs.fail, tmp_path, root, asks)
    assert run.end() == 0, run.stderr
    place = pc.step_path(root, 7)
    (report,) = [line for line in run.stderr.splitlines() if line.startswith(REPORT)]
    assert report == f"{REPORT}{place} failed: OSError: [Errno 28] No space left on device"
    assert not root.exists()


@pytest.mark.parametrize(
    "asks", ["result", "exception", "manager.wait", "manager.close", "manager.save"]
)
def test_a_failure_that_somebody_asked_for_is_not_reported_again(
    processes: Runs, root: Path, tmp_path: Path, asks: str
) -> None:
    run = processes.start(runs.fail, tmp_path, root, asks)
    assert run.end() == 0, run.stderr
    assert REPORT not in run.stderr


def test_a_file_that_the_system_refuses_costs_no_step(
    processes: Runs, root: Path, tmp_path: Path
) -> None:
    """With one step to keep: the failed save deletes nothing, and the next one works."""
    run = processes.start(runs.outgrow, tmp_path, root)
    assert run.end() == 0, run.stderr
    assert run.stdout.split() == ["27"]  # EFBIG
    assert newest(root) == 3
    assert pc.steps(root) == [3]
    assert_nothing_is_left_over(root)


# --- SIGTERM --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "last", "steps"),
    [
        ("before the first save", 6, [6]),
        ("between saves", 36, [30, 36]),
        ("before it writes", 31, [30, 31]),
        ("before its commit", 31, [30, 31]),
        ("after its commit", 31, [30, 31]),
        ("before a deletion", 31, [30, 31]),
        ("within a deletion", 31, [30, 31]),
    ],
)
def test_sigterm_saves_one_more_step_and_stops(
    processes: Runs,
    root: Path,
    tmp_path: Path,
    here: Line,
    go: Line,
    when: str,
    last: int,
    steps: list[int],
) -> None:
    run = processes.start(runs.be_preempted, tmp_path, root, when, here.path, go.path)
    for _ in range(2 if when in runs.POINTS else 1):  # the loop, and the save behind it
        here.wait()
    run.kill(signal.SIGTERM)
    go.tell()
    go.tell()
    assert run.end() == 143, run.stderr
    assert f"step {last} of {root} is the last" in run.stderr
    assert newest(root) == last
    assert pc.steps(root) == steps
    assert_nothing_is_left_over(root)


def test_sigterm_while_the_loop_waits_for_a_save_makes_the_next_one_the_last(
    processes: Runs, root: Path, tmp_path: Path, here: Line, go: Line
) -> None:
    when = "while the loop waits for a save"
    run = processes.start(runs.be_preempted, tmp_path, root, when, here.path, go.path)
    here.wait()
    here.wait()
    run.kill(signal.SIGTERM)
    go.tell()
    go.tell()
    assert run.end() == 143, run.stderr
    assert newest(root) == 40
    assert pc.steps(root) == [30, 40]


@pytest.mark.parametrize("when", ["after the last save", "while it closes"])
def test_sigterm_after_the_last_save_leaves_it_whole_and_stops_at_the_end(
    processes: Runs, root: Path, tmp_path: Path, here: Line, go: Line, when: str
) -> None:
    run = processes.start(runs.be_preempted_at_the_end, tmp_path, root, when, here.path, go.path)
    here.wait()
    run.kill(signal.SIGTERM)
    go.tell()
    assert run.end() == 143, run.stderr
    assert "AssertionError" not in run.stderr
    assert newest(root) == 1
    assert_nothing_is_left_over(root)


@pytest.mark.parametrize("initialized", ["before the manager", "after the manager"])
def test_where_jax_listens_for_sigterm_its_sync_point_is_the_last_step(
    processes: Runs, root: Path, tmp_path: Path, here: Line, initialized: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = processes.start(runs.follow_the_sync_point, tmp_path, root, port, here.path, initialized)
    here.wait()
    run.kill(signal.SIGTERM)
    assert run.end() == 143, run.stderr
    (step,) = pc.steps(root)
    assert step > 5
    assert f"step {step} of {root} is the last" in run.stderr
    assert newest(root) == step


def test_a_second_sigterm_ends_the_process_and_leaves_the_step_before(
    processes: Runs, root: Path, tmp_path: Path, here: Line, go: Line
) -> None:
    run = processes.start(runs.be_told_twice, tmp_path, root, here.path, go.path)
    here.wait()
    run.kill(signal.SIGTERM)
    go.tell()
    here.wait()  # the last save is under way, and will not end
    run.kill(signal.SIGTERM)
    assert run.end() == -signal.SIGTERM, run.stderr
    assert newest(root) == 1


def test_all_managers_of_a_process_hear_sigterm(
    processes: Runs, root: Path, tmp_path: Path
) -> None:
    run = processes.start(runs.tell_all_managers, tmp_path, root)
    assert run.end() == -signal.SIGTERM, run.stderr
    assert (newest(root / "first"), newest(root / "second")) == (1, 2)


def test_sigterm_ends_a_fork_as_if_nobody_listened(
    processes: Runs, root: Path, tmp_path: Path, here: Line
) -> None:
    run = processes.start(runs.fork_a_worker, tmp_path, root, here.path)
    assert run.end() == 0, run.stderr
    assert newest(root) == 1


def test_a_fork_does_not_wait_for_a_save_of_its_parent(
    processes: Runs, root: Path, tmp_path: Path
) -> None:
    run = processes.start(runs.ask_in_a_fork, tmp_path, root)
    assert run.end() == 0, run.stderr
    assert newest(root) == 1


def test_after_a_failed_save_sigterm_still_saves_the_last_step(
    processes: Runs, root: Path, tmp_path: Path
) -> None:
    run = processes.start(runs.fail_and_be_preempted, tmp_path, root)
    assert run.end() == 143, run.stderr
    assert newest(root) == 2
    assert f"{REPORT}{pc.step_path(root, 1)} failed" in run.stderr


def test_a_closed_manager_leaves_sigterm_as_it_was(
    processes: Runs, root: Path, tmp_path: Path
) -> None:
    run = processes.start(runs.mind_other_handlers, tmp_path, root)
    assert run.end() == -signal.SIGTERM, run.stderr
    assert newest(root) == 1


def test_sigterm_is_taken_in_the_main_thread_only(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[str] = []

    def make() -> None:
        try:
            pc.CheckpointManager(tmp_path, on_sigterm=True)
        except ValueError as error:
            seen.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert seen == ["on_sigterm works in the main thread only"]
    assert signal.getsignal(signal.SIGTERM) == before


# --- SIGKILL --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "point", "left"),
    [
        (2, "before a deletion", 2),
        (2, "within a deletion", 2),
        (2, "before it writes", 2),
        (2, "between two files", 2),
        (2, "before its commit", 2),
        (2, "within its commit", 2),
        (1, "before it writes", 2),
        (1, "within its commit", 2),
        (1, "after its commit", 3),
        (1, "before a deletion", 3),
        (1, "within a deletion", 3),
    ],
)
def test_a_run_that_is_killed_loses_no_step_and_leaves_nothing_for_good(
    processes: Runs, root: Path, tmp_path: Path, here: Line, last: int, point: str, left: int
) -> None:
    run: Run = processes.start(runs.be_killed, tmp_path, root, point, last, here.path)
    here.wait()
    run.kill(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert newest(root) == left
    assert len(list(root.glob("*/data-*"))) <= max(last, 2)

    # The next run saves other steps: nothing of the dead save has the name of one of its own.
    with pc.CheckpointManager(root, keep=pc.Keep(last=last)) as manager:
        for step in (7, 8):
            manager.save(step, runs.state(step))
    assert pc.steps(root) == [7, 8][-last:]
    assert newest(root) == 8
    assert_nothing_is_left_over(root)


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", runs.COPY_POINTS)
def test_a_copy_that_is_killed_is_not_there_and_the_next_one_is(
    processes: Runs, root: Path, tmp_path: Path, here: Line, point: str
) -> None:
    far = tmp_path / "far"
    run = processes.start(runs.copy_and_be_killed, tmp_path, root, far, point, here.path)
    here.wait()
    run.kill(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert newest(root) == 3
    left = {"within a deletion": 2, "after its commit": 3}.get(point, 2)
    assert newest(far) == left
    with pc.CheckpointManager(root, mirror=far, keep=None, mirror_keep=pc.Keep(last=2)) as manager:
        assert manager.latest_step() == 3
        manager.save(4, runs.state(4))
    assert pc.steps(far) == [left, 4]
    assert newest(far) == 4
    assert_nothing_is_left_over(far)


@pytest.mark.parametrize(
    ("when", "last"), [("before the last save", 36), ("after the last save", 37)]
)
def test_sigterm_copies_the_last_step_due_or_not(
    processes: Runs, root: Path, tmp_path: Path, when: str, last: int
) -> None:
    far = tmp_path / "far"
    run = processes.start(runs.be_preempted_with_a_mirror, tmp_path, root, far, when)
    assert run.end() == 143, run.stderr
    assert newest(root) == newest(far) == last
    assert pc.steps(far)[0] == 20
    assert_nothing_is_left_over(far)


def test_sigterm_is_obeyed_also_without_the_mirror(
    processes: Runs, root: Path, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    far.write_text("")
    when = "before the last save"
    run = processes.start(runs.be_preempted_with_a_mirror, tmp_path, root, far, when)
    assert run.end() == 143, run.stderr
    assert newest(root) == 36
    (report,) = [line for line in run.stderr.splitlines() if line.startswith("pytree_ckpt: ")]
    assert report.startswith(f"pytree_ckpt: a copy from {root} to {far} failed: NotADirectoryError")


@pytest.mark.parametrize("asks", ["nobody", "wait"])
def test_a_failed_copy_that_nobody_asked_for_is_reported_at_exit(
    processes: Runs, root: Path, tmp_path: Path, asks: str
) -> None:
    far = tmp_path / "far"
    far.write_text("")
    run = processes.start(runs.fail_to_copy, tmp_path, root, far, asks)
    assert run.end() == 0, run.stderr
    reported = f"pytree_ckpt: a copy from {root} to {far} failed: " in run.stderr
    assert reported == (asks == "nobody")
    assert newest(root) == 7


# --- for long -------------------------------------------------------------------------------------


@needs_proc
@pytest.mark.parametrize("save", [runs.save_many, runs.fail_many])
def test_many_background_saves_leave_memory_files_and_threads_as_they_were(
    processes: Runs, root: Path, tmp_path: Path, save: runs.Scenario
) -> None:
    run = processes.start(save, tmp_path, root, SAVES)
    assert run.end() == 0, run.stderr
    early, late = map(json.loads, run.stdout.splitlines())
    assert late["files"] == early["files"]
    assert late["threads"] == early["threads"] == 1
    assert late["tasks"] < early["tasks"] + SAVES // 4  # TensorStore and XLA have threads of theirs
    assert late["rss_nbytes"] - early["rss_nbytes"] < 24 << 20
