"""What a process says when it cannot talk to the others, or has none."""

import subprocess
import sys
from pathlib import Path

import pytest
from jax._src import distributed

import pytree_ckpt as pc
from pytree_ckpt.jaxio import processes
from pytree_ckpt.jaxio.coordination import Session, decided


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "process_count", lambda: 2)


def test_a_process_that_is_alone_asks_nobody() -> None:
    with Session("the save to", "a", timeout_s=1) as session:
        session.tell("where")
        assert session.gather() == {}
        assert session.exchange("mine") == {0: "mine"}
    assert decided("the choice in", "a", lambda: 7, timeout_s=1) == 7


@pytest.mark.usefixtures("one_of_two")
def test_processes_without_jax_distributed_are_told_to_initialize_it() -> None:
    with pytest.raises(pc.CheckpointError, match=r"after jax.distributed.initialize\(\)"):
        Session("the save to", "a", timeout_s=1)


@pytest.mark.usefixtures("one_of_two")
def test_a_jax_that_keeps_its_client_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed, "global_state")
    with pytest.raises(pc.CheckpointError, match="keeps its coordination client elsewhere"):
        Session("the save to", "a", timeout_s=1)


def run_and_exit(call: str) -> subprocess.CompletedProcess[str]:
    """A process that exits while a call to the coordination service is under way."""
    code = f"import time; from pytree_ckpt.jaxio import coordination; coordination._start({call})"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_exit_waits_for_calls_that_are_under_way() -> None:
    """Else the interpreter would stop a thread in native code, and that aborts the process."""
    ended = run_and_exit("lambda: (time.sleep(0.3), print('ended'))")
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


def test_an_exit_does_not_wait_for_a_service_that_never_answers() -> None:
    ended = run_and_exit("lambda: time.sleep(1000)")
    assert ended.returncode == 0, ended.stderr
