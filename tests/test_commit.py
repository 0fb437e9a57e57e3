"""A checkpoint appears whole, is replaced whole, and what failed leaves nothing behind."""

import contextlib
import copy
import errno
import fcntl
import gc
import json
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.jaxio.coordination import Session
from pytree_ckpt.plan import chunking
from pytree_ckpt.store import commit, disk, roots
from pytree_ckpt.store.locations import Location
from pytree_ckpt.store.writing import Writer
from tests.bitwise import assert_same
from tests.conftest import make_mesh
from tests.gates import Gate

LIBRARY = Path(pc.__file__).parents[1]
PATIENCE_S = 120
"""Longer than anything here takes; a test that waits so long has failed."""


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a few hundred bytes are stored as large ones are."""
    monkeypatch.setattr(chunking, "PACK_BELOW_NBYTES", 128)


def state_of(number: int) -> dict[str, Any]:
    """A state whose every element is `number`, in an array of its own, packed, and as a value."""
    rows = NamedSharding(make_mesh((4,), ("data",)), PartitionSpec("data"))
    return {
        "large": jax.device_put(np.full((16, 8), number, np.float32), rows),
        "small": jax.device_put(np.full(8, number, np.int32), rows),
        "host": np.full(3, number),
        "step": number,
    }


def number_of(state: Any) -> int:
    """The number that all of a state is made of; a mixture of two fails the test."""
    found = {int(x) for leaf in jax.tree.leaves(state) for x in np.asarray(leaf).flat}
    assert len(found) == 1, f"parts of {sorted(found)}"
    assert sorted(state) == ["host", "large", "small", "step"]
    return found.pop()


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a folder: kind, size and time of the last change."""
    found = {}
    for entry in sorted(folder.rglob("*")):
        at = entry.lstat()
        found[str(entry.relative_to(folder))] = (at.st_mode, at.st_size, at.st_mtime_ns)
    return found


def entries(folder: Path) -> list[str]:
    """Names in a checkpoint folder, without the nonces."""
    return sorted(re.sub(r"[0-9a-f]{32}", "*", entry.name) for entry in folder.iterdir())


WHOLE = ["data-*", "manifest.msgpack"]


def read_all(path: Path) -> list[Callable[[], Any]]:
    return [
        lambda: pc.load(path),
        lambda: pc.read_manifest(path),
        lambda: pc.open(path),
    ]


# --- what is no checkpoint ----------------------------------------------------------------------


def make_missing(path: Path) -> None:
    pass


def make_empty(path: Path) -> None:
    path.mkdir()


def make_wrong_step(path: Path) -> None:
    make_root(path.parent)
    (path.parent / "not a checkpoint").mkdir()


def make_root_of_orbax(path: Path) -> None:
    (path / "5").mkdir(parents=True)
    (path / "5" / "_CHECKPOINT_METADATA").touch()


def make_safetensors(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").touch()


def make_foreign(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("?")
    (path / "data-1").mkdir()


def make_file(path: Path) -> None:
    path.write_text("?")


def make_below_file(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(path.parent / "file" / "below")
    (path.parent / "file").write_text("?")


def make_root(path: Path) -> None:
    for step in (9, 10):
        pc.save(path / f"step_{step:08d}", {"w": np.ones(2)})


def make_uncommitted(path: Path) -> None:
    pc.save(path, {"w": np.ones(2)})
    (path / "manifest.msgpack").unlink()


def make_interrupted(path: Path) -> None:
    pc.save(path, {"w": np.ones(2)})
    (data,) = path.glob("data-*")
    (path / "manifest.msgpack").rename(path / f"manifest.{data.name[5:]}.tmp")


def make_dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (make_missing, "there is nothing at {path}"),
        (make_wrong_step, "nothing at {path}; beside it are step_00000009, step_00000010"),
        (make_dangling, "there is nothing at {path}"),
        (make_empty, "{path} is not a checkpoint: it has no manifest.msgpack"),
        (make_foreign, "{path} is not a checkpoint: it has no manifest.msgpack"),
        (make_file, "{path} is a file, a checkpoint is a folder"),
        (make_root, "{path} is no checkpoint, but has checkpoints in it: step_00000009, step_0000"),
        (make_root_of_orbax, "{path} is no checkpoint, but has checkpoints of orbax in it: 5"),
        (make_safetensors, "it has no manifest.msgpack; import_safetensors converts it"),
        (make_uncommitted, "{path} holds a save that has not committed: it is under"),
        (make_interrupted, "{path} holds a save that has not committed: it is under"),
    ],
)
def test_what_is_no_checkpoint_is_said_by_every_reader(
    tmp_path: Path, make: Callable[[Path], None], text: str
) -> None:
    path = tmp_path / "ckpt"
    make(path)
    for read in read_all(path):
        with pytest.raises(pc.NotFoundError) as caught:
            read()
        assert isinstance(caught.value, FileNotFoundError)
        assert text.format(path=path) in str(caught.value)


def test_a_path_below_a_file_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("?")
    for read in read_all(tmp_path / "file" / "ckpt"):
        with pytest.raises(pc.NotFoundError):
            read()
    with pytest.raises(OSError, match="Not a directory"):
        pc.save(tmp_path / "file" / "ckpt", {})


def test_many_checkpoints_in_a_folder_are_not_all_listed(tmp_path: Path) -> None:
    for step in range(8):
        pc.save(tmp_path / f"step_{step:08d}", {})
    with pytest.raises(pc.NotFoundError, match=r"step_00000004, …$"):
        pc.load(tmp_path)


# --- a checkpoint that is there ------------------------------------------------------------------


def test_a_checkpoint_is_not_replaced_by_default_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    before = listing(tmp_path)
    with pytest.raises(pc.ExistsError, match=r"already holds a checkpoint; pass overwrite=True"):
        pc.save(path, state_of(2))
    assert listing(tmp_path) == before
    assert number_of(pc.load(path)) == 1


def test_a_damaged_checkpoint_is_not_replaced_by_default_either(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    (path / "manifest.msgpack").write_bytes(b"?")
    before = listing(tmp_path)
    with pytest.raises(pc.ExistsError):
        pc.save(path, state_of(2))
    assert listing(tmp_path) == before
    pc.save(path, state_of(3), overwrite=True)
    assert number_of(pc.load(path)) == 3
    assert entries(path) == WHOLE


def test_a_file_is_not_replaced_even_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    path.write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(pc.ExistsError, match="is a file"):
            pc.save(path, state_of(1), overwrite=overwrite)
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["ckpt"]


def test_the_error_of_a_checkpoint_that_exists_is_also_a_builtin_one(tmp_path: Path) -> None:
    pc.save(tmp_path, {})
    with pytest.raises(FileExistsError):
        pc.save(tmp_path, {})


def test_an_overwrite_leaves_the_new_data_alone_and_no_chunk_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    rows = NamedSharding(make_mesh((8,), ("data",)), PartitionSpec("data"))
    large = {"w": jax.device_put(np.ones((64, 16), np.float32), rows), "b": np.ones((8, 8))}
    pc.save(path, large)
    (old,) = path.glob("data-*")
    assert len(list(old.glob("arrays/w/c.*"))) == 8
    rows = NamedSharding(make_mesh((2,), ("data",)), PartitionSpec("data"))
    small = {"w": jax.device_put(np.zeros((32, 16), np.float32), rows)}
    pc.save(path, small, overwrite=True)
    assert entries(path) == WHOLE
    (new,) = path.glob("data-*")
    assert new != old
    assert [file.name for file in sorted(new.glob("arrays/**/*.*"))] == [
        "c.0.0",
        "c.1.0",
        "zarr.json",
    ]
    assert_same(pc.load(path), small)


def test_what_is_replaced_goes_when_the_other_processes_know_of_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for so long only, and what is large takes long to remove."""
    path = tmp_path / "ckpt"
    old = path / pc.save(path, state_of(1)).data_dir
    there: list[bool] = []
    monkeypatch.setattr(Session, "tell", lambda *_: there.append(old.exists()))
    pc.save(path, state_of(2), overwrite=True)
    assert there == [True]
    assert not old.exists()


def test_an_overwrite_of_nothing_is_a_save(tmp_path: Path) -> None:
    pc.save(tmp_path / "a" / "ckpt", state_of(1), overwrite=True)
    assert number_of(pc.load(tmp_path / "a" / "ckpt")) == 1
    assert entries(tmp_path / "a" / "ckpt") == WHOLE


FOREIGN = [
    "notes.txt",
    "data-",
    "data-1234",
    "data-" + "A" * 32,
    "data-" + "0" * 31,
    "data-" + "0" * 33,
    "xdata-" + "0" * 32,
    "data-" + "0" * 32 + ".bak",
    "data-" + "\N{ARABIC-INDIC DIGIT ZERO}" * 32,
    "manifest.tmp",
    "manifest.msgpack.bak",
    "manifest." + "0" * 31 + ".tmp",
    "manifest." + "0" * 32 + ".tmp~",
    "tables",
]


def test_foreign_files_and_folders_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    path.mkdir()
    for number, name in enumerate(FOREIGN):
        if number % 2:
            (path / name).write_text("mine")
        else:
            (path / name / "inner").mkdir(parents=True)
            (path / name / "inner" / "file").write_text("mine")
    (path / ("data-" + "1" * 32)).write_text("a file, not a folder")
    before = listing(path)
    pc.save(path, state_of(1))
    pc.save(path, state_of(2), overwrite=True)
    after = listing(path)
    assert {name: after[name] for name in before} == before
    assert number_of(pc.load(path)) == 2


def test_a_folder_that_has_the_name_of_a_temporary_manifest_stops_no_save(tmp_path: Path) -> None:
    folder = tmp_path / ("manifest." + "0" * 32 + ".tmp")
    folder.mkdir()
    (folder / "file").write_text("mine")
    pc.save(tmp_path, state_of(1))
    pc.save(tmp_path, state_of(2), overwrite=True)
    assert number_of(pc.load(tmp_path)) == 2
    assert (folder / "file").read_text() == "mine"


def test_a_manifest_that_is_a_link_is_replaced_and_its_target_is_not(tmp_path: Path) -> None:
    path, target = tmp_path / "ckpt", tmp_path / "target"
    pc.save(path, state_of(1))
    (path / "manifest.msgpack").rename(target)
    before = target.read_bytes()
    (path / "manifest.msgpack").symlink_to(target)
    for read in read_all(path):
        with pytest.raises(pc.FormatError, match="not a regular file"):
            read()
    with pytest.raises(pc.ExistsError):
        pc.save(path, state_of(2))
    pc.save(path, state_of(2), overwrite=True)
    assert number_of(pc.load(path)) == 2
    assert target.read_bytes() == before


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_manifest_that_is_no_file_is_refused_without_waiting(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "ckpt"
    path.mkdir()
    make(path / "manifest.msgpack")
    for read in read_all(path):
        with pytest.raises(pc.FormatError, match="not a regular file"):
            read()
    with pytest.raises(pc.ExistsError):
        pc.save(path, state_of(1))


# --- failures -----------------------------------------------------------------------------------

SYSTEM_CALLS = ["mkdir", "open", "writev", "fsync", "link", "replace", "unlink", "rmdir", "scandir"]
SYSTEM_CALLS += ["listdir", "statvfs"]


class Fault:
    """Makes one call to the system raise, of those that the saving thread makes, in order."""

    def __init__(self, at: int, error: Callable[[], BaseException], *, after: bool) -> None:
        self._at = at
        self._error = error
        self._after = after
        self._thread = threading.get_ident()
        self.count = 0
        self.hit: str | None = None

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **kwargs)
            hit = self.count == self._at
            self.count += 1
            if not hit:
                return call(*args, **kwargs)
            self.hit = name
            if self._after:
                result = call(*args, **kwargs)
                if name == "open":
                    os.close(result)
                if name == "scandir":
                    result.close()
            raise self._error()

        return wrapped


@contextlib.contextmanager
def one_fault(
    monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], BaseException], *, after: bool
) -> Iterator[Fault]:
    fault = Fault(at, error, after=after)
    with monkeypatch.context() as patch:
        for name in SYSTEM_CALLS:
            # Nobody looks at whether the disk has it, so it need not be waited for.
            call = (lambda _: None) if name == "fsync" else getattr(os, name)
            patch.setattr(os, name, fault.wrap(name, call))
        yield fault


def eio() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def enospc() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [eio, KeyboardInterrupt])
def test_a_failure_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException], after: bool
) -> None:
    """`after`: the call did what it should, and failed, or was interrupted, all the same."""
    outcomes: dict[tuple[str, str], int] = {}
    pc.save(tmp_path / "template", state_of(1))
    at = 0
    while True:
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "template", path)
        raised: BaseException | None = None
        with one_fault(monkeypatch, at, error, after=after) as fault:
            try:
                pc.save(path, state_of(2), overwrite=True)
            except (OSError, KeyboardInterrupt) as caught:
                raised = caught
        if fault.hit is None:
            assert not raised
            break
        assert raised is None or (type(raised), raised.args) == (type(error()), error().args)
        found = number_of(pc.load(path))
        assert found == 2 or raised, f"{fault.hit} at {at}: nothing raised, and the old is there"
        key = (fault.hit, f"{'error' if raised else 'no error'}, {'old' if found == 1 else 'new'}")
        outcomes[key] = outcomes.get(key, 0) + 1
        if entries(path) != WHOLE:
            # What could not be removed at once goes with the next save.
            pc.save(path, state_of(3), overwrite=True)
            assert number_of(pc.load(path)) == 3
            assert entries(path) == WHOLE, f"{fault.hit} at {at}"
        at += 1
    print(at, "calls:", outcomes)
    assert at > 20
    assert {name for name, _ in outcomes} >= {"mkdir", "writev", "fsync", "replace"}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [eio, KeyboardInterrupt])
def test_a_failure_at_any_call_of_a_first_save_leaves_nothing_or_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException], after: bool
) -> None:
    at = 0
    while True:
        root = tmp_path / str(at)
        root.mkdir()
        path = root / "runs" / "1" / "ckpt"
        raised = False
        with one_fault(monkeypatch, at, error, after=after) as fault:
            try:
                pc.save(path, state_of(1))
            except (OSError, KeyboardInterrupt):
                raised = True
        if fault.hit is None:
            break
        if (path / "manifest.msgpack").exists():
            assert number_of(pc.load(path)) == 1
        else:
            assert raised, f"{fault.hit} at {at}"
            with pytest.raises(pc.NotFoundError):
                pc.load(path)
        if path.exists() and entries(path) != WHOLE:
            pc.save(path, state_of(2), overwrite=True)
            assert number_of(pc.load(path)) == 2
            assert entries(path) == WHOLE, f"{fault.hit} at {at}"
        at += 1
    assert at > 20


def fail_in_writer(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def write(writer: Writer, *_: Any) -> Any:
        (writer._data / "arrays").make_folder()
        (writer._data / "arrays" / "half").write_new(b"half")
        raise error

    monkeypatch.setattr(Writer, "write", write)


def fail_in_replace(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def replace(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "link", replace)


def fail_in_a_thread(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def write_shard(*_: Any) -> bytes:
        raise error

    monkeypatch.setattr(Writer, "_write_shard", write_shard)


@pytest.mark.parametrize("fail", [fail_in_writer, fail_in_replace, fail_in_a_thread])
@pytest.mark.parametrize("error", [RuntimeError("?"), eio(), enospc(), KeyboardInterrupt()])
def test_a_save_that_fails_half_way_takes_back_what_it_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[pytest.MonkeyPatch, BaseException], None],
    error: BaseException,
) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    before = listing(path)
    fail(monkeypatch, error)
    with pytest.raises(type(error)) as caught:
        pc.save(path, state_of(2), overwrite=True)
    assert caught.value is error
    assert listing(path) == before
    assert number_of(pc.load(path)) == 1
    # The folders that the save made are gone again, those that were there are not.
    (tmp_path / "there").mkdir()
    with pytest.raises(type(error)):
        pc.save(tmp_path / "there" / "a" / "b" / "ckpt", state_of(2))
    assert os.listdir(tmp_path / "there") == []


def test_a_failure_keeps_a_new_folder_in_which_something_else_appeared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a" / "ckpt"

    def write(*_: Any) -> Any:
        (path / "theirs").write_text("?")
        raise eio()

    monkeypatch.setattr(Writer, "write", write)
    with pytest.raises(OSError, match="Input/output"):
        pc.save(path, state_of(1))
    assert os.listdir(path) == ["theirs"]


def test_a_disk_without_enough_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    before = listing(tmp_path)
    state = {"w": np.zeros(1 << 20, np.uint8)}
    monkeypatch.setattr(disk, "free_nbytes", lambda _: 1_000_000)
    for place in (path, tmp_path / "new" / "ckpt"):
        with pytest.raises(OSError, match=r"needs about 1048576 bytes, 1000000 are free") as caught:
            pc.save(place, state, overwrite=True)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(place)
    assert listing(tmp_path) == before
    monkeypatch.setattr(disk, "free_nbytes", lambda _: None)
    pc.save(path, state, overwrite=True)


@pytest.mark.skipif(not hasattr(os, "statvfs"), reason="no statvfs")
def test_free_space_is_what_this_user_may_write(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    free = disk.free_nbytes(tmp_path)
    assert free is not None
    assert abs(free - found.f_bavail * found.f_frsize) < 1 << 30


# --- in processes of their own ------------------------------------------------------------------

PRELUDE = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
import pytree_ckpt as pc
from pytree_ckpt.plan import chunking
from pytree_ckpt.store import commit
from pytree_ckpt.store.writing import Writer

chunking.PACK_BELOW_NBYTES = 128

def state_of(number):
    return {
        "large": np.full((16, 8), number, np.float32),
        "small": np.full(8, number, np.int32),
        "host": np.full(3, number),
        "step": number,
    }

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def say(text):
    print(text, flush=True)

def wait():
    assert sys.stdin.readline(), "nobody said how to go on"
"""


class Child:
    """A process that runs code after `PRELUDE`; it says lines and waits for lines."""

    def __init__(self, code: str, *arguments: str | Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(LIBRARY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def expect(self, line: str) -> None:
        assert self._process.stdout is not None
        found = self._process.stdout.readline().strip()
        if found != line:
            self._process.kill()
            _, errors = self._process.communicate()
            raise AssertionError(f"the child said {found!r}, not {line!r}: {errors[-2000:]}")

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go on\n")
        self._process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Exit status, the lines that are left, what it wrote to stderr."""
        try:
            out, errors = self._process.communicate(timeout=PATIENCE_S)
        finally:
            self._process.kill()
        return self._process.returncode, out, errors

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


KILLED_AT = {
    "the commit": "commit.Attempt.commit = die",
    "the naming of the manifest": "os.link = os.replace = die",
    "what comes after": """
reclaim, calls = commit.reclaim, []
def second(*arguments):
    calls.append(arguments)
    die() if len(calls) == 2 else reclaim(*arguments)
commit.reclaim = second
""",
}


@pytest.mark.parametrize(
    ("where", "overwrite"),
    [
        ("the commit", False),
        ("the naming of the manifest", False),
        ("the naming of the manifest", True),
        ("what comes after", True),
    ],
)
def test_what_a_killed_save_leaves_is_no_checkpoint_and_goes_with_the_next_save(
    tmp_path: Path, where: str, overwrite: bool
) -> None:
    path = tmp_path / "ckpt"
    if overwrite:
        pc.save(path, state_of(1))
    code = f"{KILLED_AT[where]}\npc.save(sys.argv[1], state_of(2), overwrite={overwrite})"
    with Child(code, path) as child:
        status, _, errors = child.end()
    assert status == -signal.SIGKILL, errors
    if overwrite:
        assert number_of(pc.load(path)) == (2 if where == "what comes after" else 1)
        assert len(entries(path)) > len(WHOLE)
    else:
        with pytest.raises(pc.NotFoundError, match="has not committed"):
            pc.load(path)
    pc.save(path, state_of(3), overwrite=overwrite)
    assert number_of(pc.load(path)) == 3
    assert entries(path) == WHOLE


WAITING_WRITER = """
write = Writer.write
def wait_and_write(writer, *args, **kwargs):
    say("has its folder")
    wait()
    return write(writer, *args, **kwargs)
Writer.write = wait_and_write
try:
    pc.save(sys.argv[1], state_of(int(sys.argv[2])), overwrite="overwrite" in sys.argv)
    say("saved")
except pc.ExistsError:
    say("there is one")
"""


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_folder_of_a_living_writer_is_not_reclaimed(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "ckpt"
    with Child(WAITING_WRITER, path, "7", "overwrite" if overwrite else "") as child:
        child.expect("has its folder")
        assert entries(path) == ["data-*"]
        pc.save(path, state_of(1))
        pc.save(path, state_of(2), overwrite=True)
        assert entries(path) == ["data-*", *WHOLE]
        child.go_on()
        child.expect("saved" if overwrite else "there is one")
        assert child.end()[0] == 0
    assert number_of(pc.load(path)) == (7 if overwrite else 2)
    assert entries(path) == WHOLE


def test_the_folder_of_a_living_writer_in_this_process_is_not_reclaimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt"
    write = Writer.write
    inner: list[Any] = []

    def save_another_first(writer: Writer, *args: Any, **kwargs: Any) -> Any:
        if not inner:
            inner.append(None)
            inner[0] = pc.save(path, state_of(1))
        return write(writer, *args, **kwargs)

    monkeypatch.setattr(Writer, "write", save_another_first)
    pc.save(path, state_of(2), overwrite=True)
    assert number_of(pc.load(path)) == 2
    assert entries(path) == WHOLE


def test_of_threads_that_save_at_once_one_wins_and_the_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, count = tmp_path / "a" / "ckpt", 6
    all_written = threading.Barrier(count)
    write = Writer.write

    def write_together(writer: Writer, *args: Any, **kwargs: Any) -> Any:
        table = write(writer, *args, **kwargs)
        all_written.wait(PATIENCE_S)
        return table

    monkeypatch.setattr(Writer, "write", write_together)
    won: list[int] = []
    lost: list[BaseException] = []

    def save(number: int) -> None:
        try:
            pc.save(path, state_of(number))
            won.append(number)
        except BaseException as error:  # noqa: BLE001 - judged below
            lost.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in lost] == [pc.ExistsError] * (count - 1)
    assert [number_of(pc.load(path))] == won
    assert entries(path) == WHOLE


def test_of_processes_that_save_at_once_one_wins_and_the_others_are_told(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    code = """
commit_it = commit.Attempt.commit
def wait_and_commit(*args, **kwargs):
    say("all written")
    wait()
    commit_it(*args, **kwargs)
commit.Attempt.commit = wait_and_commit
try:
    pc.save(sys.argv[1], state_of(int(sys.argv[2])))
    say("won")
except pc.ExistsError:
    say("there is one")
"""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(code, path, str(number))) for number in range(4)]
        for child in children:
            child.expect("all written")
        for child in children:
            child.go_on()
        outcomes = [child.end() for child in children]
    assert [status for status, _, _ in outcomes] == [0] * 4, outcomes
    said = [out.strip() for _, out, _ in outcomes]
    assert sorted(said) == ["there is one"] * 3 + ["won"]
    assert number_of(pc.load(path)) == said.index("won")
    assert entries(path) == WHOLE


# --- leftovers ----------------------------------------------------------------------------------


def test_a_save_whose_empty_folder_another_process_reclaims_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step_00000001"
    monkeypatch.setattr(commit, "reclaim", _reclaim_if_empty)
    pc.save(path, state_of(1))
    assert number_of(pc.load(path)) == 1


def test_a_data_folder_that_somebody_looks_at_as_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its own name, which for a copy is given."""
    looked_at: list[disk.FolderLock] = []
    mkdir = Path.mkdir

    def mkdir_and_look(path: Path, *args: Any, **settings: Any) -> None:
        mkdir(path, *args, **settings)
        if path.name.startswith("data-") and not looked_at:
            looked_at.append(disk.FolderLock(path, shared=True))

    monkeypatch.setattr(Path, "mkdir", mkdir_and_look)
    with commit.attempt(
        tmp_path / "ckpt", overwrite=False, needed_nbytes=1, nonce="a" * 32
    ) as attempt:
        assert [lock.state for lock in looked_at] == ["held"]
        assert [entry.name for entry in attempt.path.iterdir()] == [f"data-{'a' * 32}"]
        assert disk.FolderLock(attempt.folder, shared=True).state == "busy"


def _reclaim_if_empty(path: Path) -> None:
    if not any(path.iterdir()):
        path.rmdir()


def test_links_among_the_leftovers_are_removed_and_not_followed(tmp_path: Path) -> None:
    path, precious = tmp_path / "ckpt", tmp_path / "precious"
    (precious / "inner").mkdir(parents=True)
    (precious / "inner" / "file").write_text("mine")
    leftover = path / ("data-" + "0" * 32)
    (leftover / "arrays").mkdir(parents=True)
    (leftover / "arrays" / "w").symlink_to(precious, target_is_directory=True)
    (leftover / "arrays" / "file").symlink_to(precious / "inner" / "file")
    (path / ("data-" + "1" * 32)).symlink_to(precious, target_is_directory=True)
    (path / ("data-" + "2" * 32)).symlink_to(tmp_path / "nowhere")
    (path / ("manifest." + "3" * 32 + ".tmp")).symlink_to(precious / "inner" / "file")
    before = listing(precious)
    pc.save(path, state_of(1))
    assert entries(path) == WHOLE
    assert listing(precious) == before


def test_leftovers_of_dead_saves_go_and_do_not_join_the_new_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    for number, digit in enumerate("0123456789abcdef"):
        folder = path / ("data-" + digit * 32)
        (folder / "arrays" / "large").mkdir(parents=True)
        (folder / "arrays" / "large" / "c.9.9").write_bytes(b"junk")
        (folder / "arrays").chmod(0o755 if number % 2 else 0o700)
        (path / f"manifest.{digit * 32}.tmp").write_bytes(b"junk")
    (path / ("manifest." + "12" * 16 + ".tmp")).write_bytes(b"its data is gone already")
    pc.save(path, state_of(1))
    assert entries(path) == WHOLE
    assert_same(pc.load(path), state_of(1))


def test_a_folder_of_somebody_else_with_the_name_of_a_leftover_stays(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    theirs = path / ("data-" + "a" * 32)
    (theirs / "arrays").mkdir(parents=True)
    (theirs / "thesis.tex").write_text("mine")
    pc.save(path, state_of(1))
    pc.save(path, state_of(2), overwrite=True)
    assert (theirs / "thesis.tex").read_text() == "mine"
    assert number_of(pc.load(path)) == 2
    (theirs / "thesis.tex").unlink()
    pc.save(path, state_of(3), overwrite=True)
    assert entries(path) == WHOLE


def test_leftovers_are_invisible_to_readers(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    (path / ("data-" + "0" * 32)).mkdir()
    (path / ("manifest." + "0" * 32 + ".tmp")).write_bytes(b"junk")
    before = listing(path)
    assert number_of(pc.load(path)) == 1
    with pc.open(path) as checkpoint:
        assert number_of(checkpoint.to_numpy()) == 1
    assert listing(path) == before


# --- readers beside writers ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["load", "open"])
def test_a_load_beside_overwrites_sees_one_whole_checkpoint(tmp_path: Path, how: str) -> None:
    path, count = tmp_path / "ckpt", 25
    pc.save(path, state_of(0))
    failed: list[BaseException] = []
    done = threading.Event()

    def overwrite() -> None:
        try:
            for number in range(1, count + 1):
                pc.save(path, state_of(number), overwrite=True)
        except BaseException as error:  # noqa: BLE001 - reported below
            failed.append(error)
        finally:
            done.set()

    writer = threading.Thread(target=overwrite)
    writer.start()
    seen = []
    try:
        while not done.is_set():
            if how == "load":
                seen.append(number_of(pc.load(path)))
            else:
                with pc.open(path) as checkpoint:
                    seen.append(number_of(checkpoint.to_numpy()))
    finally:
        writer.join()
    assert not failed, failed
    print(len(seen), "loads saw", len(set(seen)), "checkpoints")
    assert seen == sorted(seen)
    assert len(set(seen)) > 2
    assert number_of(pc.load(path)) == count
    pc.save(path, state_of(0), overwrite=True)
    assert entries(path) == WHOLE


def test_an_open_checkpoint_stays_readable_when_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    with pc.open(path) as checkpoint:
        pc.save(path, state_of(2), overwrite=True)
        pc.save(path, state_of(3), overwrite=True)
        assert entries(path) == ["data-*", *WHOLE]
        assert number_of(checkpoint.to_numpy()) == 1
        np.testing.assert_array_equal(checkpoint["large"][3:5], np.ones((2, 8), np.float32))
        assert number_of(pc.load(path)) == 3
    pc.save(path, state_of(4), overwrite=True)
    assert entries(path) == WHOLE
    assert number_of(pc.load(path)) == 4


def test_a_load_that_begins_while_a_committed_save_still_cleans_up_waits_or_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is there before the writer lets go of its folder."""
    from pytree_ckpt.store import commit

    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    found: list[Any] = []
    opened: list[pc.Checkpoint] = []
    reclaim = commit.reclaim
    threads: list[threading.Thread] = []

    def read() -> None:
        found.append(pc.load(path))
        opened.append(pc.open(path))
        found.append(opened[0].to_numpy())

    def reclaim_beside_a_reader(*args: Any) -> None:
        if pc.read_manifest(path).values == (2,) and not threads:
            threads.append(threading.Thread(target=read))
            threads[0].start()
        reclaim(*args)

    monkeypatch.setattr(commit, "reclaim", reclaim_beside_a_reader)
    pc.save(path, state_of(2), overwrite=True)
    threads[0].join(PATIENCE_S)
    assert [number_of(state) for state in found] == [2, 2]
    # The lock of the reader holds: its data survives the next save.
    pc.save(path, state_of(3), overwrite=True)
    assert number_of(opened[0].to_numpy()) == 2
    opened[0].close()


def test_a_reader_that_comes_right_after_the_commit_gets_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest has its name, and the writer still has the folder for itself."""
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    opened: list[pc.Checkpoint] = []
    refused = threading.Event()
    flock, replace = fcntl.flock, os.replace
    reader = threading.Thread(target=lambda: opened.append(pc.open(path)))

    def flock_and_tell(fd: int, operation: int) -> None:
        try:
            flock(fd, operation)
        except BlockingIOError:
            refused.set()
            raise

    def replace_and_let_one_read(source: Any, target: Any) -> None:
        replace(source, target)
        if not opened and not reader.is_alive():
            reader.start()
            assert refused.wait(PATIENCE_S)

    monkeypatch.setattr(fcntl, "flock", flock_and_tell)
    monkeypatch.setattr(os, "replace", replace_and_let_one_read)
    pc.save(path, state_of(2), overwrite=True)
    reader.join(PATIENCE_S)
    pc.save(path, state_of(3), overwrite=True)
    (checkpoint,) = opened
    assert number_of(checkpoint.to_numpy()) == 2
    checkpoint.close()


def test_a_closed_checkpoint_says_so(tmp_path: Path) -> None:
    pc.save(tmp_path, state_of(1))
    checkpoint = pc.open(tmp_path)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(pc.CheckpointError, match="closed"):
        checkpoint.to_numpy()


# --- folders that may not be written ------------------------------------------------------------


READ_ONLY = """
import shutil
root = Path(sys.argv[1])
# All that is imported late is imported before the rights to read it are given up.
pc.save(root / "warm", state_of(0))
pc.load(root / "warm"), pc.open(root / "warm").to_numpy(), pc.steps(root)
shutil.rmtree(root / "warm")
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
found = {}
def try_it(name, action):
    try:
        found[name] = action()
    except Exception as error:
        found[name] = [type(error).__name__, str(error)]
ckpt = root / "readable" / "step_00000001"
try_it("load", lambda: pc.load(ckpt)["step"])
try_it("open", lambda: int(pc.open(ckpt)["large"][3, 4]))
try_it("steps", lambda: pc.steps(root / "readable"))
try_it("save beside", lambda: pc.save(root / "readable" / "new", state_of(2)))
try_it("save into", lambda: pc.save(ckpt, state_of(2), overwrite=True))
try_it("save in the background", lambda: str(pc.save_async(root / "readable" / "new", state_of(2))))
own = pc.CheckpointManager(root / "readable")
try_it("save by a manager", lambda: str(own.save(2, state_of(2))))
own.close()
try_it("save below", lambda: pc.save(root / "readable" / "a" / "b", state_of(2)))
try_it("writable below read-only", lambda: pc.save(root / "readable" / "own", state_of(2)).values)
try_it("load own", lambda: pc.load(root / "readable" / "own")["step"])
try_it("unreadable", lambda: pc.load(root / "closed" / "ckpt"))
try_it("unreadable root", lambda: pc.steps(root / "closed"))
try_it("nothing", lambda: pc.load(root / "nothing"))
try_it("unreadable chunk", lambda: pc.load(root / "chunk"))
print(json.dumps(found))
"""


def test_a_read_only_checkpoint_is_read_and_a_read_only_folder_is_not_written(
    tmp_path: Path,
) -> None:
    # Another user must reach it: the folders of pytest are closed to others.
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o777)
        pc.save(root / "readable" / "step_00000001", state_of(1))
        pc.save(root / "closed" / "ckpt", state_of(1))
        pc.save(root / "chunk", state_of(1))
        (root / "readable" / "own").mkdir()
        for file in (root / "readable").rglob("*"):
            file.chmod(0o555 if file.is_dir() else 0o444)
        (root / "readable" / "own").chmod(0o777)
        (root / "readable").chmod(0o555)
        (root / "closed").chmod(0)
        (chunk,) = root.glob("chunk/data-*/arrays/large/c.0.0")
        chunk.chmod(0)
        for folder in (root / "chunk").rglob("*"):
            if folder.is_dir():
                folder.chmod(0o755)
        before = listing(root / "readable")
        with Child(READ_ONLY, root) as child:
            status, out, errors = child.end()
        assert status == 0, errors
        found = json.loads(out)
        print(json.dumps(found, indent=1))
        assert found["load"] == 1
        assert found["open"] == 1
        assert found["steps"] == [1]
        for name in ("save beside", "save into", "save below", "unreadable", "unreadable root"):
            assert found[name][0] == "PermissionError", name
        for name in ("save in the background", "save by a manager"):  # by the call, not later
            assert found[name][0] == "PermissionError", name
        assert found["nothing"] == [
            "NotFoundError",
            f"there is nothing at {root}/nothing; beside it are chunk",
        ]
        assert found["unreadable chunk"][0] == "PermissionError"
        assert found["writable below read-only"] == [2]
        assert found["load own"] == 2
        after = listing(root / "readable")
        assert {k: v for k, v in after.items() if not k.startswith("own")} == {
            k: v for k, v in before.items() if not k.startswith("own")
        }
    finally:
        for folder in [root, *root.rglob("*")]:
            if folder.is_dir():
                folder.chmod(0o777)
        shutil.rmtree(root)


# --- what the system is asked to make last ------------------------------------------------------


def test_all_is_made_to_last_before_the_manifest_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, link, replace = os.fsync, os.link, os.replace

    def record_fsync(fd: int) -> None:
        fsync(fd)
        at = os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path)
        events.append(("fsync", re.sub(r"[0-9a-f]{32}", "*", at)))

    def record(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def wrapped(source: Any, target: Any, **kwargs: Any) -> None:
            call(source, target, **kwargs)
            events.append((name, Path(target).relative_to(tmp_path).as_posix()))

        return wrapped

    if not Path("/proc/self/fd").exists():
        pytest.skip("tells the paths of open files from /proc")
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "link", record("link", link))
    monkeypatch.setattr(os, "replace", record("replace", replace))
    path = tmp_path / "runs" / "1" / "ckpt"
    for number, (named, overwrite) in enumerate([("link", False), ("replace", True)]):
        events.clear()
        pc.save(path, state_of(number), overwrite=overwrite)
        commit = events.index((named, "runs/1/ckpt/manifest.msgpack"))
        before = [place for what, place in events[:commit] if what == "fsync"]
        data = "runs/1/ckpt/data-*"
        folders = [f"{data}/tables", f"{data}/arrays", f"{data}/packed", data, "runs/1/ckpt"]
        files = [f"{data}/tables/00000.msgpack", "runs/1/ckpt/manifest.*.tmp"]
        files += [f"{data}/arrays/large/zarr.json", f"{data}/packed/00000/zarr.json"]
        above = ["runs/1", "runs", "."] if not overwrite else []
        assert set(before) >= {*folders, *files, *above}, f"not made to last before the {named}"
        # Bottom up: an entry counts once what it names is durable.
        order = [f"{data}/tables/00000.msgpack", f"{data}/tables", data, "runs/1/ckpt", *above]
        at = [before.index(place) for place in order]
        assert at == sorted(at)
        assert ("fsync", "runs/1/ckpt") in events[commit + 1 :]


STRACED = """
options = pc.SaveOptions(threads=1)
pc.save(sys.argv[1], state_of(1), options=options)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_system_sees_every_file_and_folder_synced_before_the_manifest_appears(
    tmp_path: Path,
) -> None:
    """Also what TensorStore does, whose calls Python does not see."""
    path, log = tmp_path / "runs" / "1" / "ckpt", tmp_path / "log"
    run = subprocess.run(
        [
            *("strace", "-f", "-y", "-e", "trace=fsync,fdatasync,rename,link,linkat"),
            *("-o", str(log), sys.executable, "-c", PRELUDE + STRACED, str(path)),
        ],
        env={**os.environ, "PYTHONPATH": str(LIBRARY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if "ptrace" in run.stderr and run.returncode:
        pytest.skip("strace may not trace here")
    assert run.returncode == 0, run.stderr
    lines = [line for line in log.read_text().splitlines() if str(tmp_path) in line]
    (commit,) = [n for n, line in enumerate(lines) if re.search(r"link.*manifest\.msgpack", line)]
    synced = set()
    for line in lines[:commit]:
        found = re.search(r"(?:fsync|fdatasync)\(\d+<([^>]+)>", line)
        if found:
            synced.add(found[1])
    # A file is synced under the name it has while it is written.
    renamed = dict(
        pair
        for line in lines[:commit]
        for pair in re.findall(r'rename\("([^"]+)", "([^"]+)"\)', line)
    )
    synced |= {renamed[name] for name in synced if name in renamed}
    (data,) = path.glob("data-*")
    made = [data, *data.rglob("*")]
    assert len([file for file in made if file.is_file()]) == 5
    missing = [str(place) for place in made if str(place) not in synced]
    assert missing == []
    for folder in (path, path.parent, path.parents[1], path.parents[2]):
        assert str(folder) in synced
    after = [line for line in lines[commit + 1 :] if "fsync" in line]
    assert any(f"<{path}>" in line for line in after)


def test_a_limit_on_the_size_of_files_is_an_error_and_the_old_checkpoint_survives(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    code = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
large = {"w": np.ones(1 << 19)}
many = {str(i): np.ones(16000) for i in range(20)}
for number, big in enumerate([large, many]):
    for place in (sys.argv[1], sys.argv[1] + f" new {number}"):
        try:
            pc.save(place, big, overwrite=True)
            say("saved")
        except OSError as error:
            say(f"{type(error).__name__} {error.errno}")
pc.save(sys.argv[1], state_of(3), overwrite=True)
say("saved")
"""
    chunking_packs_all = code.replace(
        "import resource", "chunking.PACK_BELOW_NBYTES = 1 << 20\nimport resource"
    )
    with Child(chunking_packs_all, path) as child:
        for number in range(2):
            child.expect(f"OSError {errno.EFBIG}")
            child.expect(f"OSError {errno.EFBIG}")
            assert not (tmp_path / f"ckpt new {number}").exists()
        child.expect("saved")
        status, _, errors = child.end()
    assert status == 0, errors
    assert number_of(pc.load(path)) == 3
    assert entries(path) == WHOLE


# --- the mode of what is made -------------------------------------------------------------------


def test_files_have_the_modes_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        pc.save(tmp_path / "ckpt", state_of(1))
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(f.stat().st_mode) for f in (tmp_path / "ckpt").rglob("*") if f.is_file()}
    assert modes == {0o640}
    folders = {stat.S_IMODE(f.stat().st_mode) for f in tmp_path.rglob("*") if f.is_dir()}
    assert folders == {0o750}


# --- an overwrite and a deletion of the same checkpoint -------------------------------------------


def test_a_deletion_leaves_what_replaced_the_checkpoint_that_it_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    remove = roots._remove

    def remove_late(location: Location, named: str | None) -> bool:
        pc.save(path, state_of(2), overwrite=True)
        return remove(location, named)

    monkeypatch.setattr(roots, "_remove", remove_late)
    assert not roots.delete(path)
    assert number_of(pc.load(path)) == 2


def test_a_deletion_leaves_what_was_saved_after_another_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two looked at one checkpoint; the second finds none, and then there is another."""
    path = tmp_path / "ckpt"
    named = pc.save(path, state_of(1)).data_dir
    assert roots.delete(path)
    saved: list[int] = []

    def then_saved(look: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def looking(place: Path) -> Any:
            found = look(place)
            if not saved:
                saved.append(2)
                pc.save(path, state_of(2))
            return found

        return looking

    monkeypatch.setattr(roots, "_data_dir", then_saved(roots._data_dir))
    monkeypatch.setattr(commit, "is_committed", then_saved(commit.is_committed))
    roots._remove(path, named)
    assert number_of(pc.load(path)) == 2


def test_an_overwrite_waits_for_a_deletion_and_is_there_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    about_to_unlink, waiting = Gate(), threading.Event()
    look, sleep = roots._data_dir, time.sleep

    def look_and_wait(path: Path) -> str | None:
        found = look(path)
        about_to_unlink.pass_through()
        return found

    def sleep_and_tell(seconds: float) -> None:
        waiting.set()
        sleep(seconds)

    monkeypatch.setattr(roots, "_data_dir", look_and_wait)
    with ThreadPoolExecutor(2) as pool:
        deletion = pool.submit(roots.delete, path)
        about_to_unlink.wait_until_reached()
        monkeypatch.setattr(commit.time, "sleep", sleep_and_tell)
        overwrite = pool.submit(pc.save, path, state_of(2), overwrite=True)
        waited = waiting.wait(PATIENCE_S)
        about_to_unlink.open()
        assert waited
        assert deletion.result()
        overwrite.result()
    assert number_of(pc.load(path)) == 2


@pytest.mark.parametrize("is_link", [False, True], ids=["the folder", "a link to it"])
def test_an_overwrite_that_waits_in_vain_fails_by_name_and_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    path = place = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    if is_link:
        place = tmp_path / "link"
        place.symlink_to(path)
    monkeypatch.setattr(commit, "_BUSY_S", 0)
    with disk.FolderLock(path, shared=False) as lock:
        assert lock.state == "held"
        with pytest.raises(pc.CheckpointError, match="another process holds"):
            pc.save(place, state_of(2), overwrite=True)
        assert not list(path.glob("*.tmp"))
    assert number_of(pc.load(path)) == 1
    pc.save(path, state_of(2), overwrite=True)
    assert len(list(path.glob("data-*"))) == 1


FORKED = """
import os, sys
from pathlib import Path
from pytree_ckpt.store.disk import FolderLock

path = Path(sys.argv[1])
lock = FolderLock(path, shared=False)
reads, writes = os.pipe()
worker = os.fork()
if not worker:  # It lives on, as a worker that loads data does.
    os.close(writes)
    os.read(reads, 1)
    os._exit(0)
lock.release()
lock = FolderLock(path, shared=False)
print(lock.state)
os.close(writes)
os.waitpid(worker, 0)
child = os.fork()
if not child:
    lock.release()
    os._exit(0)
os.waitpid(child, 0)
print(FolderLock(path, shared=False).state)
"""


def test_a_forked_child_neither_keeps_a_lock_nor_takes_it_from_its_owner(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.stdout.split(), done.stderr) == (["held", "busy"], "")


def test_a_lock_whose_release_was_interrupted_is_not_held_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook does not end the process."""
    lock = disk.FolderLock(tmp_path, shared=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            lock.release()
    lock.release()
    assert disk.FolderLock(tmp_path, shared=False).state == "held"


def test_a_checkpoint_that_is_deleted_while_a_load_looks_for_it_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest goes first: a load that misses it looks at the folder, which goes next."""
    path = tmp_path / "ckpt"
    path.mkdir()
    listdir = os.listdir

    def late(folder: Any) -> list[str]:
        path.rmdir()
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", late)
    with pytest.raises(pc.NotFoundError, match="there is nothing at"):
        pc.load(path)


@pytest.fixture
def no_more_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process can open no more folders."""
    os_open = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return os_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)


def test_who_can_open_no_more_files_does_not_take_a_folder_for_unlocked(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    with pc.open(path):
        request.getfixturevalue("no_more_folders")
        for call in (lambda: roots.delete(path), lambda: pc.load(path)):
            with pytest.raises(OSError, match="Too many open files"):
                call()
        with pytest.raises(OSError, match="Too many open files"):
            pc.save(tmp_path / "new" / "ckpt", state_of(2))
        assert (path / "manifest.msgpack").exists()
    assert os.listdir(tmp_path) == ["ckpt"]


def test_what_holds_a_checkpoint_open_is_neither_copied_nor_pickled(tmp_path: Path) -> None:
    """A copy would close the descriptor, which may then be another file's."""
    pc.save(tmp_path, state_of(1))
    with pc.open(tmp_path) as checkpoint:
        for copy_it in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="can be neither copied nor pickled"):
                copy_it(checkpoint)
        gc.collect()
        assert not roots.delete(tmp_path)  # it is still held
        assert number_of(checkpoint.to_numpy()) == 1


def test_a_deletion_of_what_another_process_deletes_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt"
    pc.save(path, state_of(1))
    remove = roots._remove

    def late(place: Path, named: str | None) -> bool:
        shutil.rmtree(path)
        return remove(place, named)

    monkeypatch.setattr(roots, "_remove", late)
    assert roots.delete(path)
    assert not path.exists()


def test_where_folders_have_no_fsync_a_save_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as on a share of SMB; a failure of one that there is counts."""
    fsync, refused = os.fsync, errno.EINVAL

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(refused, os.strerror(refused))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    pc.save(tmp_path / "a", state_of(1))
    pc.save(tmp_path / "a", state_of(2), overwrite=True)
    assert number_of(pc.load(tmp_path / "a")) == 2
    assert roots.delete(tmp_path / "a")
    refused = errno.EIO
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/b/"):
        pc.save(tmp_path / "b", state_of(1))
    assert os.listdir(tmp_path) == []


def test_a_failure_of_a_descriptor_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def full(fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise enospc()
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    file = tmp_path / "manifest"
    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
        disk.write_new(file, b"data")
