"""Each command on good, damaged, unfinished, foreign and missing input: exit code, text, JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import pytree_ckpt as pc
from pytree_ckpt.cli.main import main


def run(*args: object) -> Result:
    """A command in this process."""
    return CliRunner().invoke(main, [str(arg) for arg in args])


def run_json(*args: object) -> tuple[int, Any]:
    done = run(*args, "--json")
    return done.exit_code, json.loads(done.stdout)


def installed(*args: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    """A command in a process of its own."""
    command = [sys.executable, "-m", "pytree_ckpt", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


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
    data[100] ^= 1
    file.write_bytes(data)


@pytest.fixture
def damaged(good: Path) -> Path:
    flip(good)
    return good


@pytest.fixture(params=["missing", "unfinished", "foreign", "file", "manifest"])
def unusable(request: pytest.FixtureRequest, good: Path, tmp_path: Path) -> tuple[Path, int]:
    """A path that is no checkpoint, and the exit code that says so."""
    match request.param:
        case "missing":
            return tmp_path / "nothing", 3
        case "unfinished":
            (good / "manifest.msgpack").unlink()
            return good, 3
        case "foreign":
            (tmp_path / "foreign").mkdir()
            (tmp_path / "foreign" / "model.bin").write_text("of somebody else")
            return tmp_path / "foreign", 3
        case "file":
            (tmp_path / "file").write_text("no folder")
            return tmp_path / "file", 3
        case _:
            (good / "manifest.msgpack").write_bytes(b"\x80")
            return good, 4


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
    assert pc.__version__ in installed("--version").stdout


def test_a_closed_pipe_is_quiet(good: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pytree_ckpt", "verify", str(good)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
