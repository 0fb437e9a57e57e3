"""A person at a terminal sees how far a save or a load is; nobody else sees or pays anything."""

import io
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt import progress
from pytree_ckpt.progress import showing

MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    """A terminal whose other end has hung up."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


class Closed(Terminal):
    """A terminal that was closed after the save began."""

    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")


def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture, because pytest sets stderr anew between fixtures and test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def state(mesh: Mesh) -> dict[str, Any]:
    """Files of many chunks, a packed one, and values."""
    rows = NamedSharding(mesh, PartitionSpec("data"))
    large = np.arange(4 * MIB, dtype=np.float32).reshape(2048, 2048)
    return {
        "large": jax.device_put(large, rows),
        "small": [np.full(8, n) for n in range(5)],
        "step": 3,
    }


def test_a_function_is_told_of_all_bytes(tmp_path: Path, mesh_8: Mesh) -> None:
    tree = state(mesh_8)
    written: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    save = pc.SaveOptions(progress=lambda *told: written.append(told))
    manifest = pc.save(tmp_path / "c", tree, options=save)
    pc.load(tmp_path / "c", tree, options=pc.LoadOptions(progress=lambda *told: read.append(told)))
    for told in (written, read):
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert len(told) > 8
    assert read[-1] == (manifest.nbytes, manifest.nbytes)
    # What is written has gaps, by which packed shards are aligned.
    assert manifest.nbytes <= written[-1][0] == written[-1][1] < manifest.nbytes + 4096


def test_a_background_save_tells_a_function_and_shows_nothing_by_itself(
    tmp_path: Path, mesh_8: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = at_a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    pc.save_async(tmp_path / "a", state(mesh_8)).result()
    assert terminal.getvalue() == ""
    told: list[int] = []
    options = pc.SaveOptions(progress=lambda done, total: told.append(done))
    pc.save_async(tmp_path / "b", state(mesh_8), options=options).result()
    assert told


@pytest.mark.parametrize("choice", [True, "auto"])
def test_a_terminal_shows_a_bar_and_is_clean_again(
    tmp_path: Path, mesh_8: Mesh, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    terminal = at_a_terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    pc.save(tmp_path / "c", state(mesh_8), options=pc.SaveOptions(progress=choice))
    assert "saving" in terminal.getvalue()
    assert "MiB" in terminal.getvalue()
    pc.load(tmp_path / "c", options=pc.LoadOptions(progress=choice))
    assert "loading" in terminal.getvalue()
    # Transient: the last thing is to erase the line and show the cursor.
    assert terminal.getvalue().endswith("\x1b[2K")


def test_what_takes_less_than_a_second_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    with showing("loading", "auto") as advance:
        assert advance is not None
        advance(1, 2)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("choice", [False, True, "auto"])
def test_where_there_is_no_terminal_nothing_is_shown(
    capfd: pytest.CaptureFixture[str], choice: Any
) -> None:
    with showing("loading", choice) as advance:
        assert advance is None
    assert capfd.readouterr() == ("", "")


def test_false_shows_nothing_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_terminal(monkeypatch)
    with showing("loading", False) as advance:
        assert advance is None


def test_an_interpreter_without_stderr_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with showing("loading", True) as advance:
        assert advance is None


def _closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream


class Tee:
    """What catches prints has often no more than this."""

    def write(self, text: str) -> None:
        """Take a text."""


@pytest.mark.parametrize("stream", [_closed(), Tee()], ids=["closed", "tee"])
def test_a_stderr_that_cannot_say_what_it_is_does_not_cost_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        pc.save(tmp_path / "c", {"step": 3})
        assert pc.load(tmp_path / "c") == {"step": 3}


@pytest.mark.parametrize("terminal", [Gone, Closed])
def test_a_terminal_that_is_gone_does_not_cost_the_checkpoint(
    tmp_path: Path, mesh_8: Mesh, monkeypatch: pytest.MonkeyPatch, terminal: type[Terminal]
) -> None:
    tree = state(mesh_8)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal())
        patch.setenv("TERM", "xterm")
        pc.save(tmp_path / "c", tree, options=pc.SaveOptions(progress=True))
    assert pc.verify(tmp_path / "c").ok


def test_what_a_function_of_the_user_raises_ends_the_save(tmp_path: Path, mesh_8: Mesh) -> None:
    def refuse(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        pc.save(tmp_path / "c", state(mesh_8), options=pc.SaveOptions(progress=refuse))
    with pytest.raises(pc.NotFoundError):
        pc.read_manifest(tmp_path / "c")


@pytest.mark.parametrize("options", [pc.SaveOptions, pc.LoadOptions])
def test_another_choice_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="progress must be"):
        options(progress="always")


def test_each_stage_has_a_line_in_the_log(
    tmp_path: Path, mesh_8: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pytree_ckpt"):
        pc.save(tmp_path / "c", state(mesh_8))
        pc.load(tmp_path / "c")
    words = [record.getMessage().split(" ")[0] for record in caplog.records]
    assert words == ["writing", "committing", "saved", "reading", "loaded"]
    assert all(str(tmp_path / "c") in record.getMessage() for record in caplog.records)


def test_rich_is_not_imported_by_a_save_and_a_load(tmp_path: Path) -> None:
    code = """
import sys, numpy as np, pytree_ckpt as pc
pc.save(sys.argv[1], {"w": np.ones(3)}, options=pc.SaveOptions(progress=True))
pc.load(sys.argv[1], options=pc.LoadOptions(progress=True))
assert "rich" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
