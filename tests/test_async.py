"""A background save has the values of the moment of the call, and its failure is never lost."""

import errno
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.format import wire
from pytree_ckpt.jaxio import buffers
from tests.bitwise import assert_same
from tests.gates import PATIENCE_S, FullDisk, Gate, after_writing, before_writing

P = PartitionSpec
MIB = 1 << 20


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every save stops before it writes, so that what comes after the call comes before it."""
    gate = Gate()
    before_writing(monkeypatch, gate.pass_through)
    yield gate
    gate.open()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    full_disk = FullDisk()
    after_writing(monkeypatch, full_disk)
    return full_disk


def load(path: Path) -> Any:
    return pc.load(path)


def training_state(mesh: Mesh) -> dict[str, Any]:
    """Arrays below and above the size up to which a snapshot copies, sharded and replicated."""
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    return {
        "large": jax.device_put(jnp.arange(8 * 65536, dtype=jnp.float32).reshape(8, -1), rows),
        "small": jax.device_put(jnp.arange(64, dtype=jnp.int32), rows),
        "whole": jax.device_put(jnp.full((3, 5), 0.5), whole),
        "count": jax.device_put(jnp.int32(0), whole),
    }


def aligned(count: int, dtype: Any = np.float32) -> np.ndarray:
    """A numpy array that `jax.device_put` takes on CPU without a copy."""
    buffer = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    found = buffer[start : start + count * np.dtype(dtype).itemsize].view(dtype)
    found[:] = np.arange(count)
    return found


# --- the values of the moment of the call -------------------------------------------------------


def test_a_state_that_is_donated_at_once_is_saved_as_it_was(tmp_path: Path, mesh_8: Mesh) -> None:
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = step(training_state(mesh_8))
    pending = []
    for number in range(20):
        pending.append(pc.save_async(tmp_path / str(number), state))
        before = state
        state = step(state)
        assert before["small"].is_deleted()
    start = jax.tree.map(np.asarray, training_state(mesh_8))
    for number, save in enumerate(pending):
        save.result()
        found = load(tmp_path / str(number))
        for name, array in start.items():
            np.testing.assert_array_equal(found[name], array + (1 + number), err_msg=name)


def test_arrays_that_are_deleted_at_once_are_saved(
    tmp_path: Path, mesh_8: Mesh, gate: Gate
) -> None:
    state = {
        **training_state(mesh_8),
        "key": jax.random.key(7),
        "keys": jax.random.split(_key(), 8),
    }
    expected = jax.tree.map(lambda x: x.copy(), state)
    pending = pc.save_async(tmp_path / "ckpt", state)
    for array in jax.tree.leaves(state):
        array.delete()
    del state
    filler = [
        jnp.full((8, 65536), -1.0) for _ in range(20)
    ]  # would take the memory if it were free
    gate.open()
    pending.result()
    assert len(filler) == 20
    assert_same(pc.load(tmp_path / "ckpt", expected), expected)


def _key() -> jax.Array:
    return jax.random.key(3, impl="rbg")


def numpy_arrays() -> dict[str, np.ndarray]:
    """Arrays of every layout, most of them views of two buffers."""
    base = np.arange(240, dtype=np.float64)
    grid = base.reshape(12, 20)
    frozen = grid[2:4]
    frozen.flags.writeable = False
    return {
        "base": base,
        "grid": grid,
        "again": grid,
        "rows": grid[3:7],
        "overlap": grid[5:9],
        "strided": grid[::3, 1::4],
        "backwards": grid[::-1, ::-1],
        "columns": grid.T,
        "square": grid[:12, :12],
        "square_turned": grid[:12, :12].T,  # at the same place, of the same shape
        "fortran": np.asfortranarray(grid[:, :7]),
        "read_only": frozen,
        "bytes": base.view(np.uint8)[8:80],
        "broadcast": np.broadcast_to(base[4:5], (3, 2)),
        "big_endian": np.arange(9, dtype=">i4"),
        "scalar": base[3:4].reshape(()),
        "large": np.arange(MIB, dtype=np.float32),
    }


def test_numpy_arrays_that_are_changed_in_place_are_saved_as_they_were(
    tmp_path: Path, gate: Gate
) -> None:
    state = numpy_arrays()
    expected = {name: np.array(array) for name, array in state.items()}
    expected["big_endian"] = expected["big_endian"].astype("<i4")
    pending = pc.save_async(tmp_path / "ckpt", state)
    for array in state.values():
        if array.flags.writeable:
            array[...] = 77
    gate.open()
    pending.result()
    found = load(tmp_path / "ckpt")
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].shape == array.shape


def test_a_memory_map_that_is_changed_is_saved_as_it_was(tmp_path: Path, gate: Gate) -> None:
    mapped = np.memmap(tmp_path / "map", dtype=np.int32, mode="w+", shape=(50,))
    mapped[:] = np.arange(50)
    pending = pc.save_async(tmp_path / "ckpt", {"mapped": mapped})
    mapped[:] = -1
    mapped.flush()
    (tmp_path / "map").write_bytes(b"")
    gate.open()
    pending.result()
    np.testing.assert_array_equal(load(tmp_path / "ckpt")["mapped"], np.arange(50))


def test_a_jax_array_that_shares_memory_with_a_numpy_array_is_saved_as_it_was(
    tmp_path: Path, gate: Gate
) -> None:
    host = aligned(1000)
    array = jax.device_put(host, jax.devices()[0])
    assert array.unsafe_buffer_pointer() == host.ctypes.data, "JAX no longer shares the memory"
    pending = pc.save_async(tmp_path / "ckpt", {"array": array, "host": host})
    host[:] = -1
    gate.open()
    pending.result()
    found = load(tmp_path / "ckpt")
    np.testing.assert_array_equal(found["array"], np.arange(1000))
    np.testing.assert_array_equal(found["host"], np.arange(1000))


def test_python_containers_and_metadata_may_be_changed_at_once(tmp_path: Path, gate: Gate) -> None:
    position = {"files": ["a", "b"], "offset": 3}
    metadata = {"losses": [1.5, 0.5], "run": {"name": "x"}}
    state = {"layers": [np.ones(2), np.zeros(3)], "data": pc.PerProcess(position), "step": 7}
    pending = pc.save_async(tmp_path / "ckpt", state, metadata=metadata)
    position["files"].append("c")
    position["offset"] = 4
    metadata["losses"].clear()
    metadata["run"]["name"] = "y"
    state["layers"].pop()
    state["step"] = 8
    gate.open()
    assert pending.result().metadata == {"losses": [1.5, 0.5], "run": {"name": "x"}}
    with pc.open(tmp_path / "ckpt") as checkpoint:
        assert checkpoint.keys() == ["data", "layers/0", "layers/1", "step"]
        assert checkpoint["data"] == [{"files": ["a", "b"], "offset": 3}]
        assert checkpoint["step"] == 7


def test_an_array_in_many_leaves_is_copied_once(tmp_path: Path, gate: Gate) -> None:
    host = np.zeros(MIB, np.uint8)
    tracemalloc.start()
    try:
        pending = pc.save_async(tmp_path / "ckpt", {str(number): host for number in range(40)})
        gate.wait_until_reached()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gate.open()
    pending.result()
    assert MIB < held < 3 * MIB


def test_the_call_returns_before_anything_is_written(tmp_path: Path, gate: Gate) -> None:
    pending = pc.save_async(tmp_path / "ckpt", {"w": np.arange(4)})
    gate.wait_until_reached()
    assert not pending.done()
    assert "under way" in repr(pending)
    with pytest.raises(pc.NotFoundError, match="it is under way"):
        load(tmp_path / "ckpt")
    gate.open()
    pending.result()
    np.testing.assert_array_equal(load(tmp_path / "ckpt")["w"], np.arange(4))


def test_the_manifest_has_the_seconds_that_the_caller_was_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's, not the save's: here the save takes a second of a clock that is not real."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def pass_a_second() -> None:
        now[0] += 1.0

    before_writing(monkeypatch, pass_a_second)
    manifest = pc.save_async(tmp_path / "ckpt", {"w": np.arange(4)}).result()
    assert manifest.seconds["blocked"] == 0.0
    assert pc.read_manifest(tmp_path / "ckpt").seconds["blocked"] == 0.0
    assert "blocked" not in pc.save(tmp_path / "other", {"w": np.arange(4)}).seconds


@pytest.mark.parametrize("given", ["ckpt", "./ckpt", "../here/ckpt", "x//../ckpt", Path("ckpt")])
def test_a_change_of_directory_after_the_call_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate, given: str | Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    pending = pc.save_async(given, {"w": np.arange(4)})
    monkeypatch.chdir(there)
    gate.open()
    pending.result()
    assert list(there.iterdir()) == []
    np.testing.assert_array_equal(load(here / "ckpt")["w"], np.arange(4))


# --- accelerators, as far as CPU devices can stand in for them ------------------------------------


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU devices are taken for accelerators: what is in their memory is not on the host."""
    monkeypatch.setattr(buffers, "_is_on_host", lambda array: False)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("pinned", ["pinned_host", "no such memory"])
def test_from_accelerators_a_state_that_is_donated_at_once_is_saved_as_it_was(
    tmp_path: Path, mesh_8: Mesh, gate: Gate, monkeypatch: pytest.MonkeyPatch, pinned: str
) -> None:
    monkeypatch.setattr(buffers, "_PINNED", pinned)
    kinds: list[str] = []
    put = jax.device_put

    def noted(x: Any, places: Any) -> Any:
        kinds.extend(place.memory_kind for place in places)
        return put(x, places)

    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = step(training_state(mesh_8))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", noted)
        pending = pc.save_async(tmp_path / "ckpt", state)
    step(state)
    for array in state.values():
        array.delete()
    gate.open()
    pending.result()
    assert kinds == (["pinned_host"] * (8 + 8 + 1 + 1) if pinned == "pinned_host" else [])
    found = load(tmp_path / "ckpt")
    for name, array in training_state(mesh_8).items():
        np.testing.assert_array_equal(found[name], array + 1, err_msg=name)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("save", [pc.save, lambda *call: pc.save_async(*call).result()])
def test_from_accelerators_no_copy_stays_on_the_host_with_the_arrays(
    tmp_path: Path, mesh_8: Mesh, monkeypatch: pytest.MonkeyPatch, save: Callable[..., Any]
) -> None:
    monkeypatch.setattr(buffers, "_PINNED", "no such memory")
    state = training_state(mesh_8)
    save(tmp_path / "ckpt", state)
    for array in state.values():
        for shard in (array, *(x.data for x in array.addressable_shards)):
            assert shard._npy_value is None  # where JAX keeps it
    found = load(tmp_path / "ckpt")
    for name, array in state.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


# --- the end of a save ----------------------------------------------------------------------------


def test_done_wait_and_result_tell_how_a_save_stands(tmp_path: Path, gate: Gate) -> None:
    pending = pc.save_async(tmp_path / "ckpt", {"w": np.arange(4)})
    assert not pending.done()
    assert not pending.wait(timeout=0.01)
    assert pending.exception() is None
    with pytest.raises(TimeoutError, match=r"ckpt has not ended after 0\.01 s"):
        pending.result(timeout=0.01)
    gate.open()
    manifest = pending.result()
    assert pending.done()
    assert pending.wait(timeout=0)
    assert pending.exception() is None
    assert pending.result(timeout=0) is manifest
    assert manifest.id == pc.read_manifest(tmp_path / "ckpt").id
    assert "done" in repr(pending)


def test_two_saves_may_be_under_way_at_once(tmp_path: Path, gate: Gate) -> None:
    first = pc.save_async(tmp_path / "a", {"w": np.arange(4)})
    second = pc.save_async(tmp_path / "b", {"w": np.arange(5)})
    gate.open()
    first.result()
    second.result()
    assert len(load(tmp_path / "a")["w"]) == 4
    assert len(load(tmp_path / "b")["w"]) == 5


def test_of_two_saves_to_one_place_one_commits_and_the_other_fails(
    tmp_path: Path, gate: Gate
) -> None:
    saves = [pc.save_async(tmp_path / "ckpt", {"w": np.full(3, number)}) for number in range(2)]
    gate.open()
    outcomes = [pending.wait() and pending.exception() for pending in saves]
    (winner,) = [number for number, error in enumerate(outcomes) if error is None]
    assert isinstance(outcomes[1 - winner], pc.ExistsError)
    np.testing.assert_array_equal(load(tmp_path / "ckpt")["w"], np.full(3, winner))
    assert len(list((tmp_path / "ckpt").glob("data-*"))) == 1


def test_an_overwrite_leaves_the_old_checkpoint_until_it_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pc.save(tmp_path / "ckpt", {"w": np.zeros(3)})
    gate = Gate()
    after_writing(monkeypatch, gate.pass_through)
    pending = pc.save_async(tmp_path / "ckpt", {"w": np.ones(3)}, overwrite=True)
    gate.wait_until_reached()
    np.testing.assert_array_equal(load(tmp_path / "ckpt")["w"], np.zeros(3))
    gate.open()
    pending.result()
    np.testing.assert_array_equal(load(tmp_path / "ckpt")["w"], np.ones(3))


# --- failures -------------------------------------------------------------------------------------


def test_a_failure_in_the_background_is_raised_by_result(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    pending = pc.save_async(tmp_path / "new" / "ckpt", {"w": np.arange(4)})
    assert pending.wait()
    for _ in range(2):
        with pytest.raises(OSError, match="No space") as error:
            pending.result()
        assert error.value.errno == errno.ENOSPC
    assert pending.exception() is error.value
    assert "failed" in repr(pending)
    assert not (tmp_path / "new").exists()
    full_disk.is_full = False
    pc.save_async(tmp_path / "new" / "ckpt", {"w": np.arange(4)}).result()


def test_a_failure_counts_as_seen_only_once_the_save_has_ended(
    tmp_path: Path, full_disk: FullDisk, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever looks just before the end silences the report without having seen anything."""
    pending = pc.save_async(tmp_path / "ckpt", {"w": np.arange(4)})
    seen: list[object] = []
    monkeypatch.setattr("atexit.register", lambda _: seen.append(pending.exception()))
    gate.open()
    pending.wait()
    assert seen == [None]
    assert isinstance(pending.exception(), OSError)


def test_an_overwrite_that_fails_leaves_the_old_checkpoint(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    full_disk.is_full = False
    pc.save(tmp_path / "ckpt", {"w": np.zeros(3)})
    full_disk.is_full = True
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="No space"):
        pc.save_async(tmp_path / "ckpt", {"w": np.ones(3)}, overwrite=True).result()
    assert sorted(tmp_path.rglob("*")) == before
    np.testing.assert_array_equal(load(tmp_path / "ckpt")["w"], np.zeros(3))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory"), SystemExit(3)])
def test_whatever_ends_a_save_is_raised_by_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    before_writing(monkeypatch, fail)
    pending = pc.save_async(tmp_path / "ckpt", {"w": np.arange(4)})
    with pytest.raises(type(error)) as raised:
        pending.result()
    assert raised.value is error
    assert not (tmp_path / "ckpt").exists()


def test_a_failed_save_does_not_keep_the_snapshot(tmp_path: Path, full_disk: FullDisk) -> None:
    """Its error is kept until somebody asks, and must not keep the arrays with it."""
    state = {"w": np.zeros(8 * MIB, np.uint8)}
    tracemalloc.start()
    try:
        pending = pc.save_async(tmp_path / "ckpt", state)
        with pytest.raises(OSError, match="No space"):
            pending.result()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < MIB


Call = Callable[[Path], object]
DELETED = "deleted"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda path: pc.save_async(path, {"f": {"g": open}}), pc.UnsupportedLeafError, "f/g"),
        (lambda path: pc.save_async(path, {"w": _deleted()}), pc.UnsupportedLeafError, DELETED),
        (lambda path: pc.save_async(path, 1, metadata={"x": object()}), TypeError, "metadata"),
        (lambda path: pc.save_async(path.parent / "taken", 1), pc.ExistsError, "overwrite=True"),
        (lambda path: pc.save_async(path.parent / "file", 1), pc.ExistsError, "is a file"),
        (lambda path: pc.save_async(path.parent / "file" / "x", 1), NotADirectoryError, "file"),
        (lambda path: pc.save_async("ftp://host/x", 1), pc.CheckpointError, "ftp://"),
    ],
    ids=["unsupported", "deleted", "metadata", "exists", "file", "below a file", "url"],
)
def test_what_is_wrong_with_the_call_is_raised_by_the_call(
    tmp_path: Path, call: Call, error: type[Exception], says: str
) -> None:
    pc.save(tmp_path / "taken", 0)
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    threads = threading.active_count()
    with pytest.raises(error, match=re.escape(says)):
        call(tmp_path / "ckpt")
    assert threading.active_count() == threads
    assert sorted(tmp_path.rglob("*")) == before


def test_a_read_only_file_system_is_named_by_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = os.statvfs_result((4096, 4096, 9, 9, 9, 9, 9, 9, os.ST_RDONLY, 255))
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(os, "supports_effective_ids", {os.access})
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    with pytest.raises(OSError, match="Read-only file system") as error:
        pc.save_async(tmp_path / "a" / "ckpt", {"w": np.arange(4)})
    assert (error.value.errno, error.value.filename) == (errno.EROFS, str(tmp_path))


def _deleted() -> jax.Array:
    array = jnp.arange(3)
    array.delete()
    return array


def test_a_save_leaves_no_thread_and_no_open_file(tmp_path: Path) -> None:
    pc.save_async(tmp_path / "warm", {"w": np.arange(4)}).result()
    threads = threading.active_count()
    files = sorted(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else []
    for number in range(3):
        pc.save_async(tmp_path / str(number), {"w": np.arange(MIB)}).result()
    assert threading.active_count() == threads
    if files:
        assert sorted(os.listdir("/proc/self/fd")) == files


def test_a_save_that_begins_while_the_interpreter_exits_is_durable(tmp_path: Path) -> None:
    """Functions of atexit run when threads are not waited for any more."""
    code = (
        "import atexit, sys, jax, numpy as np, pytree_ckpt as pc\n"
        "state = {'w': np.arange(1 << 22)}\n"
        "atexit.register(lambda: pc.save_async(sys.argv[1], state))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ckpt")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert pc.verify(tmp_path / "ckpt").ok


def test_a_tree_that_no_manifest_can_hold_is_refused_by_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_FILE_BYTES", 1000)
    with pytest.raises(pc.FormatError, match="limit is 1000"):
        pc.save_async(tmp_path / "ckpt", {"text": "x" * 1000})
    assert not list(tmp_path.iterdir())


def test_a_call_that_is_interrupted_while_its_thread_starts_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would have a handle of the save."""
    start, threads = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        threads.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pc.save_async(tmp_path / "ckpt", {"w": np.ones(3)})
    (thread,) = threads
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert os.listdir(tmp_path) == []
