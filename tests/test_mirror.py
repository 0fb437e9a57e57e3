"""What is committed near is copied far, and a restore takes the newest good one of either."""

import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pytree_ckpt as pc
from pytree_ckpt.store import copying
from pytree_ckpt.store.locations import locate
from pytree_ckpt.store.prefixes import Prefix
from pytree_ckpt.verbs import mirroring
from pytree_ckpt.verbs.mirroring import Mirror
from tests.bitwise import assert_same
from tests.gates import PATIENCE_S, Gate
from tests.stores import Wire, make_bucket, moto, pointed_to
from tests.test_manager import MARK, cut_the_manifest, data_folder, flip_a_bit, snapshot

_NAMES = map(str, itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with moto() as port:
        make_bucket(port, "bucket")
        yield port


@pytest.fixture
def wire(server: int) -> Iterator[Wire]:
    """The way to a server, named by the environment."""
    found = Wire(server)
    with pointed_to(found.port):
        yield found
    found.cut()


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture(params=["disk", "memory", "s3"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A far root of each kind, that is empty."""
    if request.param == "disk":
        return str(tmp_path / "far")
    if request.param == "memory":
        return f"memory://mirrors/{next(_NAMES)}"
    request.getfixturevalue("wire")
    return f"s3://bucket/far/größe/{next(_NAMES)}"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A far root on a disk."""
    return tmp_path / "far"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every copy stops before its first file."""
    gate = Gate()
    before_copying(monkeypatch, gate.pass_through)
    yield gate
    gate.open()


def before_copying(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    copy = mirroring.copy_data

    def acting(*args: Any, **kwargs: Any) -> None:
        action()
        copy(*args, **kwargs)

    monkeypatch.setattr(mirroring, "copy_data", acting)


def state(step: int) -> dict[str, Any]:
    """A leaf that is a file of its own, a small one, and values."""
    large = np.random.default_rng(step).integers(0, 255, (1 << 20) + (1 << 19), np.uint8)
    small = jnp.full(5, step)
    return {"large": large, "small": small, "step": step, "own": pc.PerProcess(f"of {step}")}


def manager_of(near: Path, far: str | Path, **options: Any) -> pc.CheckpointManager:
    return pc.CheckpointManager(near, mirror=far, **{"keep": None, **options})


def save_steps(near: Path, far: str | Path, *steps: int, **options: Any) -> pc.CheckpointManager:
    """A manager that has saved and copied some steps."""
    manager = manager_of(near, far, **options)
    for step in steps:
        manager.save(step, state(step))
        manager.wait()
    return manager


def restored(manager: pc.CheckpointManager, **options: Any) -> int:
    found = manager.restore(**options)
    assert_same(found, state(found["step"]))
    return int(found["step"])


def ids(root: str | Path) -> dict[int, bytes]:
    return {step: pc.read_manifest(pc.step_path(root, step)).id for step in pc.steps(root)}


def assert_nothing_is_left_over(root: str | Path) -> None:
    """Every name below a root belongs to a step that is listed and whole."""
    place = locate(root)
    if isinstance(place, Prefix):
        names = place.objects.names(f"{place.key}/")
    else:
        names = [name for name, found in snapshot(Path(root)).items() if found != ""]
        assert len(os.listdir(root)) == len(pc.steps(root))
    for step in pc.steps(root):
        path = pc.step_path(root, step)
        assert pc.verify(path).ok
        folder = os.path.basename(path)
        data = pc.read_manifest(path).data_dir
        own = {n for n in names if n.startswith((f"{folder}/{data}/", f"{folder}/manifest"))}
        names = [name for name in names if name not in own]
    assert names == []


# --- copies ---------------------------------------------------------------------------------------


def test_what_is_committed_is_copied_with_its_id_and_loads_to_the_bit(near: Path, far: str) -> None:
    kept = {"keep": pc.Keep(last=2), "mirror_keep": pc.Keep(last=3)}
    with save_steps(near, far, 1, 2, 3, 4, 5, **kept) as manager:
        assert pc.steps(near) == [4, 5]
        assert pc.steps(far) == manager.steps() == [3, 4, 5]
        assert {step: ids(far)[step] for step in (4, 5)} == ids(near)
        assert_same(pc.load(pc.step_path(far, 3)), state(3))
        assert restored(manager, step=3) == 3
    assert_nothing_is_left_over(far)


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_a_copy_is_byte_for_byte_and_has_links_to_nothing(
    near: Path, disk: Path, compress: Any
) -> None:
    options = pc.SaveOptions(compress=compress)
    manager = save_steps(near, disk, 1, 2, link_unchanged=True, save_options=options)
    assert pc.read_manifest(pc.step_path(near, 2)).linked_nbytes == 0  # another state
    manager.save(3, state(2))
    manager.wait()
    assert pc.read_manifest(pc.step_path(near, 3)).linked_nbytes > 0
    assert snapshot(disk) == snapshot(near)
    shutil.rmtree(near)
    shutil.rmtree(pc.step_path(disk, 2))
    assert pc.verify(pc.step_path(disk, 3)).ok


def test_a_root_in_a_store_is_copied_to_a_disk(disk: Path) -> None:
    root = f"memory://near/{next(_NAMES)}"
    with pc.CheckpointManager(root, mirror=disk, keep=pc.Keep(last=1)) as manager:
        manager.save(1, state(1))
        manager.wait()
        manager.save(2, state(2))
    assert ids(disk) == ids(root)
    assert pc.steps(disk) == [2]
    assert_nothing_is_left_over(disk)


def test_the_policy_of_the_root_is_that_of_the_mirror_unless_it_has_one(
    near: Path, disk: Path, tmp_path: Path
) -> None:
    save_steps(near, disk, 1, 2, 3, keep=pc.Keep(last=2))
    assert pc.steps(disk) == [2, 3]
    save_steps(tmp_path / "b", tmp_path / "c", 1, 2, 3, keep=pc.Keep(last=1), mirror_keep=None)
    assert pc.steps(tmp_path / "c") == [1, 2, 3]


def test_a_save_is_done_before_its_copy_and_wait_after_it(
    near: Path, disk: Path, gate: Gate
) -> None:
    manager = manager_of(near, disk)
    pending = manager.save(1, state(1))
    assert pending is not None
    gate.wait_until_reached()
    pending.result()
    assert (pc.steps(near), pc.steps(disk)) == ([1], [])
    waiting = threading.Thread(target=manager.wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    gate.open()
    waiting.join()
    assert pc.steps(disk) == [1]


def test_steps_that_come_while_one_is_copied_do_not_queue_up(
    near: Path, disk: Path, gate: Gate
) -> None:
    with manager_of(near, disk) as manager:
        manager.save(1, state(1))
        gate.wait_until_reached()
        for step in (2, 3, 4):
            manager.save(step, state(step))
        pending = manager.save(5, state(5))
        assert pending is not None
        pending.result()
        gate.open()
    assert pc.steps(near) == [1, 2, 3, 4, 5]
    assert pc.steps(disk) == [1, 5]


def test_a_step_that_is_deleted_before_its_turn_is_not_copied(
    near: Path, disk: Path, gate: Gate
) -> None:
    with manager_of(near, disk, mirror_every=10, keep=pc.Keep(last=2, pinned={10})) as manager:
        manager.save(10, state(10))
        gate.wait_until_reached()
        for step in (20, 21, 22):
            pending = manager.save(step, state(step))
        assert pending is not None
        pending.result()
        assert pc.steps(near) == [10, 21, 22]
        gate.open()
    assert pc.steps(disk) == [10]


def test_mirror_every_copies_multiples(near: Path, disk: Path) -> None:
    save_steps(near, disk, 10, 15, 20, 25, save_every=5, mirror_every=10)
    assert pc.steps(near) == [10, 15, 20, 25]
    assert pc.steps(disk) == [10, 20]


def test_a_mirror_is_another_place(near: Path) -> None:
    link = near.parent / "link"
    link.symlink_to(near)
    for far in (near, link):
        with pytest.raises(ValueError, match="the root itself"):
            manager_of(near, far)


def test_a_manager_names_its_mirror(near: Path, disk: Path) -> None:
    assert repr(manager_of(near, disk)).endswith(f"keep=None, mirror={str(disk)!r})")


def test_a_copy_needs_no_thread(near: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter exits, with Python 3.12.0."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with manager_of(near, disk) as manager, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        manager.save(1, state(1))
    assert ids(disk) == ids(near) != {}


# --- rotation of the root, under a copy -----------------------------------------------------------


def test_a_step_stays_while_it_is_copied_and_the_disk_within_its_bound(
    near: Path, disk: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, let_go = threading.Event(), Mirror.let_go

    def noticed(self: Mirror, step: int) -> None:
        if step == 1:
            waits.set()
        let_go(self, step)

    monkeypatch.setattr(Mirror, "let_go", noticed)
    with manager_of(near, disk, keep=pc.Keep(last=2), mirror_keep=None) as manager:
        manager.save(1, state(1))
        gate.wait_until_reached()
        manager.save(2, state(2))
        third = manager.save(3, state(3))
        assert waits.wait(PATIENCE_S)
        assert third is not None
        assert not third.done()
        assert len(list(near.glob("*/data-*"))) == 2
        assert manager.save(4, state(4), skip_if_busy=True) is None
        gate.open()
        third.result()
        assert pc.steps(near) == [2, 3]
    assert pc.steps(disk) == [1, 2, 3]
    assert_same(pc.load(pc.step_path(disk, 1)), state(1))


def test_a_copy_that_does_not_end_costs_a_step_more_on_disk_and_no_save(
    near: Path, disk: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    options = pc.SaveOptions(timeout_s=0.05)
    with manager_of(near, disk, keep=pc.Keep(last=2), save_options=options) as manager:
        for step in (1, 2, 3, 4):
            pending = manager.save(step, state(step))
            gate.wait_until_reached()
        assert pending is not None
        pending.result()
        assert pc.steps(near) == [1, 3, 4]
        assert "step 1 of" in caplog.text
        assert "in use" in caplog.text
        gate.open()
        manager.wait()
        manager.save(5, state(5))
    assert pc.steps(near) == [4, 5]


def test_who_waits_long_for_a_copy_is_told_for_which(near: Path, disk: Path, gate: Gate) -> None:
    told: list[str] = []

    class Opening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            gate.open()

    opening = Opening(logging.WARNING)
    logging.getLogger("pytree_ckpt").addHandler(opening)
    try:
        with manager_of(near, disk, save_options=pc.SaveOptions(timeout_s=0.05)) as manager:
            manager.save(1, state(1))
    finally:
        logging.getLogger("pytree_ckpt").removeHandler(opening)
    assert told[0] == f"waiting for the copy of step 1 to {disk}"
    assert pc.steps(disk) == [1]


# --- damage ---------------------------------------------------------------------------------------


def lose_the_table(root: Path, step: int) -> None:
    (data_folder(root, step) / "tables/00000.msgpack").unlink()


def flip_the_table(root: Path, step: int) -> None:
    file = data_folder(root, step) / "tables/00000.msgpack"
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)


def flip_the_large(root: Path, step: int) -> None:
    file = data_folder(root, step) / "arrays/large/c.0"
    data = bytearray(file.read_bytes())
    data[7000] ^= 1
    file.write_bytes(data)


def lose_the_large(root: Path, step: int) -> None:
    (data_folder(root, step) / "arrays/large/c.0").unlink()


def link_the_large(root: Path, step: int) -> None:
    file = data_folder(root, step) / "arrays/large/c.0"
    file.rename(root / "elsewhere")
    file.symlink_to(root / "elsewhere")


def lengthen_the_large(root: Path, step: int) -> None:
    with (data_folder(root, step) / "arrays/large/c.0").open("ab") as file:
        file.write(bytes(1 << 20))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (flip_the_large, "of large is damaged"),
        (lose_the_large, "arrays/large/c.0 is missing"),
        (link_the_large, "arrays/large/c.0 is not a regular file"),
        (lengthen_the_large, "large"),
        (flip_a_bit, "of small is damaged"),
        (lose_the_table, "tables/00000.msgpack is missing"),
        (flip_the_table, "tables/00000.msgpack"),
    ],
)
def test_damage_is_not_copied_but_named(
    near: Path, far: str, gate: Gate, damage: Callable[[Path, int], None], text: str
) -> None:
    manager = manager_of(near, far)
    manager.save(1, state(1))
    gate.wait_until_reached()
    damage(near, 1)
    gate.open()
    with pytest.raises(pc.IntegrityError, match=text) as error:
        manager.wait()
    told = "\n".join([str(error.value), *error.value.__notes__])
    assert str(pc.step_path(near, 1)) in told
    assert f"step 1 of {near} is not in {far}" in told
    assert pc.steps(far) == []
    manager.save(2, state(2))
    manager.wait()
    assert pc.steps(far) == [2]
    assert_nothing_is_left_over(far)


def test_what_is_damaged_on_the_way_is_not_committed(
    near: Path, far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = copying._bytes_of

    def flip(*args: Any) -> bytes:
        data = bytearray(read(*args))
        data[len(data) // 3] ^= len(data) > 1 << 20
        return bytes(data)

    manager = manager_of(near, far)
    with monkeypatch.context() as patch:
        patch.setattr(copying, "_bytes_of", flip)
        manager.save(1, state(1))
        with pytest.raises(pc.IntegrityError, match="damaged on the way"):
            manager.wait()
    assert pc.steps(far) == []
    manager.save(2, state(2))
    manager.close()
    assert pc.steps(far) == [2]
    assert_nothing_is_left_over(far)


# --- what is there already ------------------------------------------------------------------------


def test_a_copy_that_is_there_is_left_as_it_is(
    near: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = save_steps(near, disk, 1)
    calls: list[int] = []
    before_copying(monkeypatch, lambda: calls.append(1))
    manager._mirror.offer(1, overwrite=True)
    manager.wait()
    assert calls == []


def test_another_checkpoint_in_the_place_of_a_copy_is_named_and_left(near: Path, far: str) -> None:
    manager = save_steps(near, far, 1)
    other = pc.save(pc.step_path(far, 2), state(7))
    manager.save(2, state(2))
    with pytest.raises(pc.ExistsError) as error:
        manager.wait()
    for what in (str(pc.step_path(far, 2)), other.id.hex()[:16], ids(near)[2].hex()[:16]):
        assert what in str(error.value)
    assert ids(far)[2] == other.id
    manager.save(2, state(2), overwrite=True)
    manager.wait()
    assert ids(far) == ids(near)
    assert_nothing_is_left_over(far)


def test_a_step_below_those_of_the_mirror_is_refused(near: Path, disk: Path) -> None:
    save_steps(near, disk, 1, 3, 5)
    shutil.rmtree(near)
    manager = manager_of(near, disk)
    for step, message in ((2, f"latest step 5 of {disk}"), (3, f"step 3 exists in {disk}")):
        with pytest.raises(pc.ExistsError, match=message):
            manager.save(step, state(step))
    assert manager.rollback(1) == [5, 3]
    manager.save(2, state(2))
    pc.save(pc.step_path(disk, 9), state(9))
    manager.save(3, state(3))
    with pytest.raises(pc.ExistsError, match=r"has steps \[9\] after step 3"):
        manager.close()


def test_rollback_deletes_near_and_far(near: Path, far: str) -> None:
    manager = save_steps(near, far, 1, 2, 3, 4, keep=pc.Keep(last=2), mirror_keep=None)
    assert manager.rollback(2) == [4, 3]
    assert (pc.steps(near), pc.steps(far), manager.steps()) == ([], [1, 2], [1, 2])
    assert restored(manager) == 2
    with pytest.raises(pc.NotFoundError, match=f"no step 3 in {near} or {far}"):
        manager.rollback(3)
    manager.save(3, state(3))
    manager.wait()
    assert ids(far)[3] == ids(near)[3]


def test_a_damaged_copy_that_is_marked_is_replaced(near: Path, disk: Path) -> None:
    manager = save_steps(near, disk, 1, 2)
    flip_a_bit(near, 2)
    flip_a_bit(disk, 2)
    assert restored(manager, on_damage="previous") == 1
    manager.save(2, state(2))
    manager.wait()
    assert ids(disk)[2] == ids(near)[2]
    assert manager.steps() == [1, 2]
    assert_nothing_is_left_over(disk)


# --- a far place that does not answer -------------------------------------------------------------


class Outage:
    """Takes a far root away, and brings it back."""

    def __init__(self, far: str | Path, wire: Wire | None = None) -> None:
        self.far = far
        self._wire = wire

    def begin(self) -> None:
        if self._wire is not None:
            self._wire.cut()
            return
        if os.path.exists(self.far):
            os.rename(self.far, f"{self.far}.away")
        Path(self.far).write_text("a file in its place")

    def end(self) -> None:
        if self._wire is not None:
            self._wire.mend()
            return
        os.unlink(self.far)
        if os.path.exists(f"{self.far}.away"):
            os.rename(f"{self.far}.away", self.far)


@pytest.fixture(params=["disk", "s3"])
def outage(request: pytest.FixtureRequest, disk: Path) -> Outage:
    if request.param == "disk":
        return Outage(disk)
    return Outage(f"s3://bucket/outages/{next(_NAMES)}", request.getfixturevalue("wire"))


def test_training_goes_on_without_the_mirror_and_the_next_step_is_copied(
    near: Path, outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    manager = save_steps(near, outage.far, 1)
    outage.begin()
    for step in (2, 3):
        pending = manager.save(step, state(step))
        assert pending is not None
        pending.result()
        assert manager._mirror.wait()
    assert pc.steps(near) == [1, 2, 3]
    failures = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert [f"a copy from {near} to {outage.far} failed" in r.getMessage() for r in failures] == [
        True,
        True,
    ]
    with pytest.raises(OSError, match=r"far|outages") as error:
        manager.wait()
    assert error.value.__notes__ == [f"step 3 of {near} is not in {outage.far}"]
    manager.wait()  # once is enough
    outage.end()
    manager.save(4, state(4))
    manager.wait()
    assert pc.steps(outage.far) == [1, 4]


def test_a_failure_that_the_next_copy_made_good_is_not_raised(near: Path, disk: Path) -> None:
    outage = Outage(disk)
    manager = manager_of(near, disk)
    outage.begin()
    manager.save(1, state(1))
    manager._wait_for_save()
    assert manager._mirror.wait()
    outage.end()
    manager.save(2, state(2))
    manager.close()
    assert pc.steps(disk) == [2]


@pytest.mark.parametrize("ending", ["wait", "close", "with"])
def test_a_failed_copy_is_raised_by_what_waits_for_it(near: Path, disk: Path, ending: str) -> None:
    disk.write_text("")
    with pytest.raises(OSError, match="far"), manager_of(near, disk) as manager:  # noqa: PT012
        manager.save(1, state(1))
        if ending != "with":
            getattr(manager, ending)()
    assert pc.steps(near) == [1]


def test_what_ends_the_loop_is_not_hidden_by_a_failed_copy(near: Path, disk: Path) -> None:
    disk.write_text("")
    with pytest.raises(KeyError, match="of the loop"), manager_of(near, disk) as manager:  # noqa: PT012
        manager.save(1, state(1))
        manager._wait_for_save()
        assert manager._mirror.wait()
        raise KeyError("of the loop")
    with pytest.raises(OSError, match="far"):
        manager.wait()


def test_what_can_be_read_is_restored_and_the_mirror_named(
    near: Path, outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(near, outage.far, 1, 2)
    shutil.rmtree(pc.step_path(near, 2))
    outage.begin()
    manager = manager_of(near, outage.far)
    for ask in (manager.latest_step, lambda: restored(manager), manager.steps):
        caplog.clear()
        assert ask() in (1, [1])
        assert f"only the steps of {near} count, {outage.far} cannot be read" in caplog.text
    outage.end()
    assert manager.latest_step() == restored(manager) == 2


def test_a_run_does_not_begin_anew_because_the_mirror_does_not_answer(
    near: Path, outage: Outage
) -> None:
    save_steps(near, outage.far, 1)
    outage.begin()
    flip_a_bit(near, 1)
    manager = manager_of(near, outage.far)
    with pytest.raises(OSError, match=f"no step of .* is whole, and {outage.far} cannot be read"):
        manager.restore(on_damage="previous")
    for _ in range(2):  # the near one is marked as damaged, then there is none
        for ask in (manager.latest_step, manager.restore):
            with pytest.raises(OSError, match=f"{outage.far} cannot be read") as error:
                ask()
            assert not isinstance(error.value, pc.CheckpointError)
        shutil.rmtree(near, ignore_errors=True)
    with pytest.raises(OSError, match=f"no step 1 to load in {near}, and {outage.far} cannot"):
        manager.restore(step=1, on_damage="previous")
    outage.end()
    assert restored(manager_of(near, outage.far)) == 1


def test_a_store_that_goes_away_within_a_copy_has_no_step_and_nothing_left_over_later(
    near: Path, wire: Wire
) -> None:
    far = f"s3://bucket/cut/{next(_NAMES)}"
    manager = manager_of(near, far)
    wire.cut_at(rb"PUT [^ ]*manifest\.msgpack")
    manager.save(1, state(1))
    with pytest.raises(OSError, match="step_00000001/manifest"):
        manager.wait()
    wire.mend()
    assert pc.steps(far) == []
    place = locate(far)
    assert isinstance(place, Prefix)
    assert [name for name in place.objects.names(f"{place.key}/") if "writer." in name]
    manager._mirror.offer(1, overwrite=False)  # of the same name as what is left over
    manager.wait()
    assert ids(far) == ids(near)
    assert_nothing_is_left_over(far)


def test_of_two_who_copy_one_checkpoint_to_a_disk_the_second_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"overwrite": False, "needed_nbytes": 1, "nonce": "0" * 32}
    place = locate(tmp_path / "a")
    with (
        pytest.raises(FileExistsError, match="data-000"),
        place.attempt(**options),
        place.attempt(**options),
    ):
        pytest.fail("two have one folder")
    assert os.listdir(tmp_path) == []


def test_of_two_who_copy_one_checkpoint_to_a_store_the_first_leaves_the_files_of_the_second() -> (
    None
):
    place = locate(f"memory://twice/{next(_NAMES)}")
    attempts = [place.attempt(overwrite=False, needed_nbytes=1, nonce="0" * 32) for _ in range(2)]
    first, _ = (attempt.__enter__() for attempt in attempts)
    file = place / f"data-{'0' * 32}" / "file"
    file.write_new(b"of the second")
    with pytest.raises(pc.CheckpointError, match="taken for dead"):
        first.commit(b"")
    end = KeyError("the end")
    assert not attempts[0].__exit__(KeyError, end, None)
    assert file.read_file(max_nbytes=100) == b"of the second"
    assert not attempts[1].__exit__(KeyError, end, None)
    with pytest.raises(FileNotFoundError):
        file.read_file(max_nbytes=100)


# --- restoring ------------------------------------------------------------------------------------


def test_the_near_one_is_preferred(near: Path, disk: Path) -> None:
    manager = save_steps(near, disk, 1, 2)
    flip_a_bit(disk, 2)
    assert restored(manager) == 2
    assert manager.steps() == [1, 2]
    assert snapshot(disk).keys() == snapshot(near).keys()  # no mark


def test_the_newest_of_either_is_restored(near: Path, far: str) -> None:
    manager = save_steps(near, far, 1, 2, mirror_every=1)
    shutil.rmtree(pc.step_path(near, 2))
    assert manager.latest_step() == restored(manager) == 2
    pc.save(pc.step_path(near, 3), state(3))
    assert manager.latest_step() == restored(manager) == 3
    assert manager.steps() == [1, 2, 3]
    assert restored(manager, step=2) == 2


def test_a_machine_with_nothing_on_it_restores_from_the_mirror(near: Path, far: str) -> None:
    with manager_of(near, far) as manager:
        for step in (1, 2):
            manager.save(step, state(step), metrics={"loss": 1 / step})
            manager.wait()
    shutil.rmtree(near)
    with manager_of(near, far) as manager:
        assert manager.latest_step() == restored(manager) == 2
        assert manager.best_step("loss") == 2
        assert restored(manager, target=state(0)) == 2
        manager.save(3, state(3))
    assert pc.steps(near) == [3]
    assert pc.steps(far) == [1, 2, 3]


def test_of_a_damaged_step_the_copy_is_loaded_then_the_step_before(
    near: Path, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = save_steps(near, disk, 1, 2, 3)
    flip_a_bit(near, 3)
    with pytest.raises(pc.IntegrityError, match="of small") as error:
        manager.restore()
    assert "on_damage='previous'" in error.value.__notes__[0]
    assert restored(manager, on_damage="previous") == 3
    assert f"step 3, {pc.step_path(near, 3)}, is damaged" in caplog.text
    assert (pc.step_path(near, 3) / MARK).exists()
    assert manager.latest_step() == restored(manager) == restored(manager, step=3) == 3
    cut_the_manifest(disk, 3)
    assert restored(manager, on_damage="previous") == 2
    assert manager.steps() == [1, 2]
    with pytest.raises((pc.IntegrityError, pc.FormatError)):
        manager.restore(step=3)


def test_nothing_there_and_all_damaged_are_two_answers_for_two_places(
    near: Path, disk: Path
) -> None:
    manager = manager_of(near, disk)
    assert manager.latest_step() is None
    with pytest.raises(pc.NotFoundError, match=f"no checkpoint in {near} or {disk}"):
        manager.restore(on_damage="previous")
    save_steps(near, disk, 1, 2)
    for root in (near, disk):
        for step in (1, 2):
            flip_a_bit(root, step)
    for _ in range(2):  # also when all are marked
        with pytest.raises(pc.IntegrityError, match=f"No step of {near} or {disk}") as error:
            manager.restore(on_damage="previous")
        places = [damage.file for damage in error.value.damage]
        assert places == [str(pc.step_path(r, s)) for s in (2, 1) for r in (near, disk)]
    with pytest.raises(pc.NotFoundError, match=r"no step 7 in .*; it has \[1, 2\]"):
        manager.restore(step=7)
