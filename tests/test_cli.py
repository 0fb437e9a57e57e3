"""Each command on good, damaged, unfinished, foreign and missing input: exit code, text, JSON."""

import contextlib
import getpass
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner, Result
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pytree_ckpt as pc
from pytree_ckpt.cli.main import main
from pytree_ckpt.store.disk import FolderLock
from tests.conftest import make_mesh
from tests.entry_point import installed

# Until click 8.2 a runner mixed the two streams unless it was told not to.
APART = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}


def run(*args: object) -> Result:
    """A command in this process."""
    return CliRunner(**APART).invoke(main, [str(arg) for arg in args])


def run_json(*args: object) -> tuple[int, Any]:
    done = run(*args, "--json")
    return done.exit_code, json.loads(done.stdout)


def state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "params": {"dense": {"kernel": rng.standard_normal((512, 512)), "bias": np.zeros(512)}},
        "step": 7,
    }


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good one"
    pc.save(path, state())
    return path


def flip(checkpoint: Path, pattern: str = "data-*/arrays/*/c.*") -> None:
    file = sorted(checkpoint.glob(pattern))[0]
    data = bytearray(file.read_bytes())
    data[9] ^= 1
    file.write_bytes(data)


@pytest.fixture
def damaged(good: Path) -> Path:
    flip(good)
    return good


# --- verify -----------------------------------------------------------------------------------


def test_verify_of_a_whole_checkpoint(good: Path) -> None:
    assert run("verify", good).exit_code == 0
    code, found = run_json("verify", good)
    (report,) = found["checkpoints"]
    assert (code, report["ok"], report["damage"], found["errors"]) == (0, True, [], [])
    assert report["nbytes"] == pc.read_manifest(good).nbytes


def test_verify_names_leaf_and_box_of_a_damage(damaged: Path) -> None:
    done = run("verify", damaged)
    assert done.exit_code == 1
    assert "params/dense/kernel" in done.stdout
    assert "[0:512, 0:512]" in done.stdout
    code, found = run_json("verify", damaged)
    (damage,) = found["checkpoints"][0]["damage"]
    assert code == 1
    assert (damage["path"], damage["kind"]) == ("params/dense/kernel", "digest")
    assert damage["box"] == [[0, 512], [0, 512]]


def test_quick_verify_says_what_it_did_not_check(damaged: Path) -> None:
    done = run("verify", "--quick", damaged)
    assert done.exit_code == 0
    assert "not checked: the digests of 2 chunks" in done.stdout


def test_verify_goes_on_after_a_path_that_is_no_checkpoint(good: Path, tmp_path: Path) -> None:
    code, found = run_json("verify", tmp_path / "nothing", good)
    assert code == 3
    assert [error["kind"] for error in found["errors"]] == ["NotFoundError"]
    assert [report["ok"] for report in found["checkpoints"]] == [True]


def test_a_package_that_is_missing_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pc.save(tmp_path / "fast", state(), options=pc.SaveOptions(digest="xxh3_128"))
    monkeypatch.setitem(sys.modules, "xxhash", None)
    done = run("verify", tmp_path / "fast")
    assert done.exit_code == 10
    assert done.stderr == "the digest xxh3_128 needs the package xxhash: pip install xxhash\n"
    code, found = run_json("verify", tmp_path / "fast")
    assert (code, found["error"]["kind"]) == (10, "ModuleNotFoundError")


# --- diff -------------------------------------------------------------------------------------


def test_diff_of_equal_and_of_different_checkpoints(good: Path, tmp_path: Path) -> None:
    other = state()
    other["params"]["dense"]["bias"][3] = -0.5
    pc.save(tmp_path / "other", other)
    pc.save(tmp_path / "twin", state())
    assert run("diff", good, tmp_path / "twin").exit_code == 0
    done = run("diff", good, tmp_path / "other")
    assert done.exit_code == 1
    assert "1 element differs, by at most 0.5 at [3]" in done.stdout
    code, found = run_json("diff", good, tmp_path / "other")
    (difference,) = found["differences"]
    assert (code, found["same"], found["equal_chunks"]) == (1, False, 1)
    assert (difference["path"], difference["kind"]) == ("params/dense/bias", "values")
    assert difference["values"] == {"count": 1, "max_abs": 0.5, "at": [3]}


def test_a_damaged_chunk_that_diff_must_read_is_an_error(damaged: Path, tmp_path: Path) -> None:
    other = state()
    other["params"]["dense"]["kernel"] += 1
    pc.save(tmp_path / "other", other)
    code, found = run_json("diff", tmp_path / "other", damaged)
    assert (code, found["error"]["kind"]) == (5, "IntegrityError")


# --- ls, prune --------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two good steps, and one of each other kind."""
    root = tmp_path / "a root"
    for step in (1, 2, 3, 4, 5):
        pc.save(pc.step_path(root, step), state())
    flip_size(pc.step_path(root, 3))
    for step in (4, 5):
        (pc.step_path(root, step) / "manifest.msgpack").unlink()
    pc.step_path(root, 6).symlink_to(pc.step_path(root, 1))
    (root / "logs").mkdir()
    (root / "step_9").mkdir()
    return root


def flip_size(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("data-*/arrays/*/c.*")
    file.write_bytes(file.read_bytes()[:-1])


def test_ls_tells_the_state_of_every_step(root: Path) -> None:
    (data,) = pc.step_path(root, 5).glob("data-*")
    with FolderLock(data, shared=False) as lock:
        assert lock.state == "held"
        code, found = run_json("ls", root)
    assert code == 0
    assert {item["step"]: item["status"] for item in found["steps"]} == {
        1: "committed",
        2: "committed",
        3: "damaged",
        4: "unfinished",
        5: "being written",
        6: "committed",
    }
    assert found["steps"][1]["manifest"]["nbytes"] == 512 * 513 * 8
    assert [item["step"] for item in found["steps"] if item["note"] == "a link"] == [6]
    lines = run("ls", root).stdout.splitlines()
    assert lines[0].split()[:4] == ["step", "state", "age", "bytes"]
    assert lines[2].split()[:2] == ["2", "committed"]


def test_ls_of_an_empty_and_of_a_missing_root(tmp_path: Path, good: Path) -> None:
    assert run("ls", good).stdout == "no steps that are named as step_00000001\n"
    assert run_json("ls", good) == (0, {"steps": []})
    assert run("ls", tmp_path / "nothing").exit_code == 3
    assert run("prune", tmp_path / "nothing", "--last", 1).exit_code == 3


def test_ls_sees_the_steps_of_the_names_that_are_asked_for(tmp_path: Path) -> None:
    pc.save(pc.step_path(tmp_path, 7, prefix="ppo-", width=3), state())
    assert run("ls", tmp_path).stdout == "no steps that are named as step_00000001\n"
    assert "7" in run("ls", tmp_path, "--prefix", "ppo-", "--width", 3).stdout
    assert run("ls", tmp_path, "--prefix", "../x").exit_code == 2


def test_prune_says_what_would_go_and_touches_nothing(root: Path) -> None:
    before = sorted(root.rglob("*"))
    code, found = run_json("prune", root, "--last", 1)
    assert code == 0
    assert [item["step"] for item in found["dropped"]] == [2]
    assert [item["step"] for item in found["left"]] == [3]
    assert {item["step"]: item["why"] for item in found["kept"]} == {
        1: "step 6 is a link to it",
        6: "reached through a link",
    }
    assert (found["deleted"], found["in_use"]) == ([], [])
    assert "nothing was deleted" in run("prune", root, "--last", 1).stdout
    assert sorted(root.rglob("*")) == before


def test_pin_keeps_a_step_that_ls_shows_and_unpin_lets_it_go(root: Path) -> None:
    path = str(pc.step_path(root, 1))
    assert run_json("pin", path) == (0, {"pinned": [path]})
    assert run("pin", path).stdout == f"pinned {path}\n"
    assert [step["step"] for step in run_json("ls", root)[1]["steps"] if step["pinned"]] == [1, 6]
    assert run("ls", root).stdout.splitlines()[1].endswith("pinned")
    assert [item["step"] for item in run_json("prune", root, "--last", 1)[1]["dropped"]] == [2]
    assert run_json("unpin", path) == (0, {"unpinned": [path]})
    assert run("pin", path, root / "nothing").exit_code == 3
    assert not any(step["pinned"] for step in run_json("ls", root)[1]["steps"])


def test_ls_and_show_tell_who_wrote_a_step(root: Path) -> None:
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    assert run_json("ls", root)[1]["steps"][0]["manifest"]["written_by"] == who
    assert who in run("ls", root).stdout
    assert who in run("show", pc.step_path(root, 1)).stdout


def test_prune_deletes_only_with_yes_and_what_is_read_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        pc.save(pc.step_path(tmp_path, step), state())
    with pc.open(pc.step_path(tmp_path, 1)):
        code, found = run_json("prune", tmp_path, "--last", 1, "--pin", 2, "--yes")
    assert (code, found["deleted"], found["in_use"]) == (0, [3], [1])
    assert pc.steps(tmp_path) == [1, 2, 4]
    assert all(pc.verify(pc.step_path(tmp_path, step)).ok for step in (1, 2, 4))


def test_prune_takes_every_rule(tmp_path: Path) -> None:
    manager = pc.CheckpointManager(tmp_path, keep=None, background=False)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.8)):
        manager.save(step, {"w": step}, metrics={"loss": loss})
    kept = run_json("prune", tmp_path, "--best", "loss", "min", 1, "--every", 3)[1]["kept"]
    assert {item["step"]: item["why"] for item in kept} == {
        2: "best 1 by loss",
        3: "every 3",
        4: "the last one is never deleted",
    }
    assert not run_json("prune", tmp_path, "--newer-than", 3600)[1]["dropped"]


@pytest.mark.parametrize("rules", [(), ("--last", 0), ("--best", "loss", "most", 1)], ids=str)
def test_prune_without_a_rule_that_makes_sense_is_refused(root: Path, rules: tuple[Any]) -> None:
    assert run("prune", root, *rules, "--yes").exit_code == 2
    assert len(pc.steps(root)) == 4


# --- tree, show, report -----------------------------------------------------------------------


def test_tree_shows_shapes_and_bytes(good: Path) -> None:
    done = run("tree", good)
    assert done.exit_code == 0
    assert "kernel float64[512, 512] host array, 2.00 MiB" in done.stdout
    code, found = run_json("tree", good)
    assert (code, found["leaves"]) == (0, 3)
    assert found["nbytes"] == pc.read_manifest(good).nbytes
    kernel = next(n for n in found["nodes"] if n["path"] == "params/dense/kernel")
    assert (kernel["dtype"], kernel["shape"], kernel["depth"]) == ("float64", [512, 512], 3)


def test_tree_goes_as_deep_and_shows_as_much_as_is_asked(good: Path) -> None:
    paths = [node["path"] for node in run_json("tree", good, "--depth", 1)[1]["nodes"]]
    assert paths == ["", "params", "step"]
    paths = [node["path"] for node in run_json("tree", good, "--match", "**/bias")[1]["nodes"]]
    assert paths == ["", "params", "params/dense", "params/dense/bias"]
    assert run("tree", good, "--match", "a**").exit_code == 2


def test_show_tells_what_a_checkpoint_is(good: Path) -> None:
    done = run("show", good)
    assert done.exit_code == 0
    assert "3 leaves, 2.00 MiB" in done.stdout
    code, found = run_json("show", good)
    manifest = pc.read_manifest(good)
    assert (code, found["id"], found["chunks"]) == (0, manifest.id.hex(), manifest.num_chunks)


def test_show_of_a_leaf_has_its_chunks_and_on_request_its_numbers(good: Path) -> None:
    kernel = state()["params"]["dense"]["kernel"]
    code, found = run_json("show", good, "params/dense/kernel", "--stats")
    assert code == 0
    (chunk,) = found["chunks"]
    assert chunk["digest"] == hashlib.sha256(kernel.tobytes()).hexdigest()
    assert chunk["box"] == [[0, 512], [0, 512]]
    numbers = found["statistics"]
    assert (numbers["least"], numbers["greatest"]) == (kernel.min(), kernel.max())
    assert numbers["mean"] == pytest.approx(kernel.mean())
    assert run_json("show", good, "params/dense/kernel")[1]["statistics"] is None
    assert run_json("show", good, "step")[1]["value"] == 7


def test_show_draws_which_device_holds_which_slice(tmp_path: Path) -> None:
    mesh = make_mesh((4, 2), ("data", "model"))
    array = jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, P(None, "model")))
    pc.save(tmp_path / "a", {"w": array})
    text = run("show", tmp_path / "a", "w").stdout
    assert "each device holds 8 × 4 of 8 × 8; dimension 1 is cut in 2 by model" in text
    assert "│ 0 2 4 6 │ 1 3 5 7 │" in text


def test_every_number_has_a_place_in_json(tmp_path: Path) -> None:
    large = -(7**9000)
    pc.save(tmp_path, {"n": large, "x": float("inf"), "w": np.full(3, np.nan), "b": b"\x0f"})
    nodes = {node["path"]: node.get("value") for node in run_json("tree", tmp_path)[1]["nodes"]}
    assert int(nodes["n"], 16) == large
    assert (nodes["x"], nodes["b"]) == ("inf", "0f")
    assert int(run_json("show", tmp_path, "n")[1]["value"], 16) == large
    numbers = run_json("show", tmp_path, "w", "--stats")[1]["statistics"]
    assert numbers == {"count": 3, "nan_count": 3, "least": None, "greatest": None, "mean": None}


@pytest.mark.parametrize("leaf", ["nope", "params"])
def test_show_of_no_leaf_is_not_found(good: Path, leaf: str) -> None:
    code, found = run_json("show", good, leaf)
    assert (code, found["error"]["kind"]) == (3, "NotFoundError")
    assert run("show", good, "--stats").exit_code == 2


def test_report_writes_one_file(good: Path, tmp_path: Path) -> None:
    code, found = run_json("report", good, "-o", tmp_path / "a b.html")
    assert (code, found) == (0, {"file": str(tmp_path / "a b.html")})
    assert (tmp_path / "a b.html").read_text().startswith("<!doctype html>")
    assert not list(tmp_path.glob("*.tmp"))
    assert run("report", good, "-o", tmp_path / "none" / "a.html").exit_code == 8
    assert run("report", good, "-o", tmp_path).exit_code == 8
    assert run("report", good, "-o", f"file://{tmp_path}/b%20c.html").exit_code == 0
    assert (tmp_path / "b c.html").is_file()


def test_a_report_goes_into_a_pipe_that_stays_one(good: Path, tmp_path: Path) -> None:
    """As into /dev/stdout and /dev/null, which a file must not replace."""
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as reader:
        page = reader.submit((tmp_path / "pipe").read_text)
        assert run("report", good, "-o", tmp_path / "pipe").exit_code == 0
        assert page.result().startswith("<!doctype html>")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("inside", "path"),
    [("good one", "."), ("", "good one/"), ("good one/below", ".."), ("", "file://{}/good%20one")],
)
def test_a_report_is_named_after_its_checkpoint(
    good: Path, monkeypatch: pytest.MonkeyPatch, inside: str, path: str
) -> None:
    (good / "below").mkdir()
    monkeypatch.chdir(good.parent / inside)
    assert run("report", path.format(good.parent)).exit_code == 0
    assert Path("good one.html").is_file()


# --- all commands -----------------------------------------------------------------------------


def test_no_name_reaches_the_terminal_as_a_command_or_as_markup(tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;title\x07[bold red]:smile:[/]\u202e"
    for name, value in (("a", 0), ("b", 1)):
        state = {evil: np.full(5, value), "v": evil + name}
        pc.save(tmp_path / name, state, metadata={evil: evil + name})
    flip(tmp_path / "b", "data-*/packed/00000/c.0")
    text = pc.read_manifest(tmp_path / "a").leaves[0].text
    commands = [
        ("tree", tmp_path / "a"),
        ("show", tmp_path / "a"),
        ("show", tmp_path / "a", text),
        ("show", tmp_path / "a", evil),
        ("show", tmp_path / evil),
        ("verify", tmp_path / "b", tmp_path / evil),
        ("diff", tmp_path / "a", tmp_path / "b"),
    ]
    for command in commands:
        for options in ((), ("--json",)):
            done = run(*command, *options)
            output = done.stdout + done.stderr
            assert output
            assert not any(c in output for c in "\x1b\x07\u202e"), command
    assert "[bold red]:smile:[/]" in run("tree", tmp_path / "a").stdout


def test_a_terminal_gets_colours_and_no_other_escapes(good: Path) -> None:
    """Through a terminal of its own, 60 columns wide: nothing is cut off."""
    main_end, other_end = os.openpty()
    termios.tcsetwinsize(other_end, (30, 60))
    command = [sys.executable, "-m", "pytree_ckpt", "verify", str(good)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    done = subprocess.Popen(command, stdout=other_end, stderr=other_end, env=environment)
    os.close(other_end)
    text = b""
    with contextlib.suppress(OSError):  # so Linux tells that the other end is closed
        while part := os.read(main_end, 1 << 16):
            text += part
    os.close(main_end)
    assert done.wait() == 0
    assert b"\x1b[32mwhole" in text
    plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", text)
    assert b"\x1b" not in plain
    assert str(good).encode() in re.sub(rb"\s", b"", plain).replace(b"goodone", b"good one")


def test_a_name_that_the_output_cannot_show_is_escaped(tmp_path: Path) -> None:
    pc.save(tmp_path / "a", {"é": 1})
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = installed(tmp_path, "tree", tmp_path / "a", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\xe9" in done.stdout


# --- the command line -------------------------------------------------------------------------


def test_help_and_version_need_neither_jax_nor_tensorstore_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from pytree_ckpt.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print([m for m in ('jax', 'tensorstore', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert pc.__version__ in run("--version").stdout


INTERRUPTED = """
import importlib, os, signal, sys, threading
from pytree_ckpt.cli.main import main

# Whoever starts the tests in the background may have them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
owner, name = importlib.import_module(sys.argv.pop(1)), sys.argv.pop(1)
if "." in name:
    outer, _, name = name.partition(".")
    owner = getattr(owner, outer)
original, sent = getattr(owner, name), threading.Event()

def interrupting(*args, **options):
    if not sent.is_set():
        sent.set()
        os.kill(os.getpid(), signal.SIGINT)
    return original(*args, **options)

setattr(owner, name, interrupting)
main()
"""
READING = ("pytree_ckpt.store.checks", "ChunkCheck.check")


def interrupted(within: tuple[str, str], *args: object) -> None:
    """Run a command that gets Ctrl-C within a function."""
    command = [sys.executable, "-c", INTERRUPTED, *within, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("command", ["verify", "show"])
def test_ctrl_c_ends_a_command_with_its_exit_code(good: Path, command: str) -> None:
    more = ["params/dense/kernel", "--stats"] if command == "show" else []
    interrupted(READING, command, good, *more)


@pytest.mark.parametrize("name", ["w.safetensors", "folder", "w.npz"])
def test_ctrl_c_leaves_nothing_of_an_export_or_an_import(
    good: Path, tmp_path: Path, name: str
) -> None:
    before = sorted(tmp_path.iterdir())
    interrupted(READING, "export", good, tmp_path / name)
    left = [file for file in tmp_path.rglob("*") if not file.is_relative_to(good)]
    assert [file for file in left if file.is_file()] == []
    assert run("export", good, tmp_path / name).exit_code == 0
    before = sorted(tmp_path.iterdir())
    module = "npz" if name == "w.npz" else "safetensors"
    interrupted(
        (f"pytree_ckpt.interop.{module}", "read_box"), "import", tmp_path / name, tmp_path / "b"
    )
    assert sorted(tmp_path.iterdir()) == before


def test_ctrl_c_leaves_no_half_of_a_conversion_and_the_next_run_goes_on(
    good: Path, tmp_path: Path
) -> None:
    interrupted(READING, "convert", good, tmp_path / "dst", "--codec", "zstd")
    assert run("verify", tmp_path / "dst").exit_code == 3
    assert run("convert", good, tmp_path / "dst", "--codec", "zstd").exit_code == 0
    assert run("diff", good, tmp_path / "dst").exit_code == 0


def test_ctrl_c_leaves_no_half_of_a_step_that_is_pruned(root: Path) -> None:
    interrupted(("pytree_ckpt.store.disk", "remove_tree"), "prune", root, "--last", 1, "--yes")
    steps = pc.steps(root)
    assert 3 in steps
    assert all(pc.verify(pc.step_path(root, step)).ok for step in steps if step != 3)
    assert run("prune", root, "--last", 1, "--yes").exit_code == 0
    assert pc.steps(root) == [1, 3, 6]


def test_ctrl_c_leaves_no_half_of_a_report(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.html").write_text("the old one")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    assert run("report", good, "-o", tmp_path / "a.html").exit_code == 130
    assert (tmp_path / "a.html").read_text() == "the old one"
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("command", ["verify {}", "tree {} --json", "--help", "verify --help"])
def test_a_closed_pipe_is_quiet(good: Path, command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    parts = (part.format(good) for part in command.split())
    whole = [sys.executable, "-m", "pytree_ckpt", *parts]
    done = subprocess.run(whole, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("command", "streams", "code"),
    [
        ("verify {}", ">&-", 0),
        ("verify {}", ">&- 2>&-", 0),
        ("verify {}/missing", "2>&-", 3),
        ("verify {}/missing", "2>/dev/full", 3),
        ("show {}/missing --json", ">/dev/full", 3),
        ("tree {} --json", ">/dev/full", 8),
        ("tree {}", ">/dev/full", 8),
        ("verify --nothing", "2>/dev/full", 8),
    ],
)
def test_no_stream_makes_damage_of_what_is_whole(
    good: Path, command: str, streams: str, code: int
) -> None:
    """It is closed, or full: Python's own exit code would be 1."""
    words = [sys.executable, "-m", "pytree_ckpt", *(p.format(good) for p in command.split())]
    done = subprocess.run(
        ["bash", "-c", f'"$0" "$@" {streams}', *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_what_nobody_foresaw_is_no_damage(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytree_ckpt.verbs.verify.verify", lambda *_, **__: {}["a fault"])
    done = run("verify", good)
    assert (done.exit_code, done.stdout) == (70, "")
    assert "KeyError: 'a fault'" in done.stderr


# --- to other layouts and formats -----------------------------------------------------------------


def test_convert_prints_the_plan_and_converts(good: Path, tmp_path: Path) -> None:
    asked = ["--mesh", "data=2,model=4", "--spec", "params/**/kernel=model,None"]
    asked += ["--dtype", "params/**=float32", "--select", "params/**", "--codec", "zstd"]
    code, plan = run_json("convert", good, tmp_path / "dst", *asked, "--dry-run")
    assert code == 0
    assert plan["id"] is None
    assert not (tmp_path / "dst").exists()
    code, found = run_json("convert", good, tmp_path / "dst", *asked)
    assert code == 0
    leaf = pc.read_manifest(tmp_path / "dst").by_text["params/dense/kernel"]
    assert str(leaf).startswith(
        "params/dense/kernel  float32[512, 512] P('model', None) on mesh(data=2, model=4)"
    )
    assert found["leaves"] == plan["leaves"]
    done = run("convert", good, tmp_path / "told")
    assert done.stdout.splitlines()[-1] == repr(pc.read_manifest(tmp_path / "told"))
    assert run("convert", good, tmp_path / "dst").exit_code == 7
    assert run("convert", good, tmp_path / "like", "--like", good).exit_code == 0


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (("--mesh", "data"), "'data' is not like data=16,model=2"),
        (("--mesh", "data=x"), "'data=x' is not like data=16,model=2"),
        (("--spec", "kernel"), "'kernel' is not PATTERN=VALUE"),
        (("--dtype", "**=float7"), "not 'float7'"),
        (("--process", "3/2"), "'3/2' is not like 0/4"),
        (("--like", "x", "--mesh", "data=2"), "--like is instead of --mesh"),
        (("--mesh", "data=2,data=4"), "'data=2,data=4' is not like data=16,model=2"),
        (("--mesh", "data=99999999999999"), "a mesh of 99999999999999 devices"),
        (("--spec", "**=data", "--spec", "**=None"), "'**' is both 'data' and 'None'"),
        (("--dtype", "**=bfloat16", "--dtype", "**=float16"), "is both 'bfloat16' and 'float16'"),
        (("--process", "0/99999999999"), "0 <= i < n <= 99999"),
        (("--select", "a**"), "'**' must be a whole key"),
    ],
)
def test_convert_refuses_what_makes_no_sense(
    good: Path, tmp_path: Path, asked: tuple[str, ...], text: str
) -> None:
    done = run("convert", good, tmp_path / "dst", *asked)
    assert done.exit_code == 2
    assert text in done.stderr


def test_convert_of_what_does_not_fit_or_is_damaged(damaged: Path, tmp_path: Path) -> None:
    for command, options in (("convert", ()), ("export", ()), ("export", ("--select", "step"))):
        done = run(command, damaged, tmp_path / "dst", "--select", "nope", *options)
        assert done.exit_code == 6
    assert run("tree", damaged, "--match", "nope").exit_code == 6
    asked = ("--mesh", "data=2, model=2", "--dry-run")
    assert run("convert", damaged, tmp_path / "dst", *asked).exit_code == 0
    assert run("convert", damaged, tmp_path / "dst").exit_code == 5


@pytest.mark.parametrize(
    "asked",
    [
        ("export", "--select", "a**"),
        ("export", "--max-file-bytes", "0"),
        ("import", "--from", "npz", "--item", "state"),
        ("import", "--from", "orbax", "--separator", "."),
    ],
    ids=" ".join,
)
def test_an_export_and_an_import_refuse_what_makes_no_sense(
    good: Path, tmp_path: Path, asked: tuple[str, ...]
) -> None:
    command, *options = asked
    assert run(command, good, tmp_path / "dst", *options).exit_code == 2
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("name", ["w.safetensors", "folder", "w.npz"])
def test_what_is_exported_is_imported(good: Path, tmp_path: Path, name: str) -> None:
    code, out = run_json("export", good, tmp_path / name)
    assert code == 0
    assert out["nbytes"] == 513 * 512 * 8
    code, found = run_json("import", tmp_path / name, tmp_path / "back")
    assert code == 0
    assert found["left_out"] == []
    with pc.open(good) as old, pc.open(tmp_path / "back") as new:
        assert (new["params/dense/kernel"][:] == old["params/dense/kernel"][:]).all()
    assert run("export", good, tmp_path / name).exit_code == 7
    assert run("import", tmp_path / name, tmp_path / "back").exit_code == 7
