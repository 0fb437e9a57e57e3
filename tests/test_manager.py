"""A manager saves when it is time, keeps the disk within bounds, and finds the last good step."""

import errno
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

import pytree_ckpt as pc
from pytree_ckpt.format.steps import StepNames
from pytree_ckpt.store import disk, health, roots
from pytree_ckpt.store.commit import Attempt
from pytree_ckpt.store.locations import Location, locate
from pytree_ckpt.verbs.survey import pin, prune, survey
from tests.gates import PATIENCE_S, FullDisk, Gate, after_writing, before_writing
from tests.test_steps import make_foreign

MARK = "damaged.txt"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every save stops before it writes."""
    gate = Gate()
    before_writing(monkeypatch, gate.pass_through)
    yield gate
    gate.open()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    """Saves fail when all their data is written, until there is room again."""
    full_disk = FullDisk()
    full_disk.is_full = False
    after_writing(monkeypatch, full_disk)
    return full_disk


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(4, step % 997), "step": step}


def value_of(found: Any) -> int:
    assert (found["w"] == found["step"] % 997).all()
    return found["step"]


def manager_of(root: Path, **options: Any) -> pc.CheckpointManager:
    return pc.CheckpointManager(root, **{"keep": None, "background": False, **options})


def save_steps(root: Path, *steps: int, **options: Any) -> pc.CheckpointManager:
    manager = manager_of(root, **options)
    for step in steps:
        manager.save(step, state(step))
    return manager


def restored(manager: pc.CheckpointManager, **options: Any) -> int:
    return value_of(manager.restore(**options))


def loads(root: Path, step: int, **names: Any) -> bool:
    return restored(manager_of(root, **names), step=step) == step


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Everything in a folder, links as they are."""
    found: dict[str, bytes | str] = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            key = path.relative_to(folder).as_posix()
            if path.is_symlink():
                found[key] = f"-> {path.readlink()}"
            else:
                found[key] = path.read_bytes() if path.is_file() else ""
    return found


def data_folder(root: Path, step: int) -> Path:
    (found,) = pc.step_path(root, step).glob("data-*")
    return found


def lose_a_file(root: Path, step: int) -> None:
    (data_folder(root, step) / "packed/00000/c.0").unlink()


def flip_a_bit(root: Path, step: int) -> None:
    file = data_folder(root, step) / "packed/00000/c.0"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


def cut_the_manifest(root: Path, step: int) -> None:
    os.truncate(pc.step_path(root, step) / "manifest.msgpack", 40)


def as_a_newer_release(root: Path, step: int) -> None:
    file = pc.step_path(root, step) / "manifest.msgpack"
    file.write_bytes(msgpack.packb({**msgpack.unpackb(file.read_bytes()), "version": 2}))


Damage = Callable[[Path, int], None]
every_damage = pytest.mark.parametrize("damage", [lose_a_file, flip_a_bit, cut_the_manifest])


# --- when it saves --------------------------------------------------------------------------------


def test_without_a_rule_every_call_saves(tmp_path: Path) -> None:
    manager = manager_of(tmp_path / "root")
    assert manager.should_save(3)
    assert manager.latest_step() is None
    assert not (tmp_path / "root").exists()
    for step in (3, 4, 11):
        assert manager.save(step, state(step)) is not None
    assert manager.steps() == [3, 4, 11]
    assert manager.latest_step() == 11
    assert restored(manager) == 11


def test_save_every_saves_multiples_and_force_saves_the_rest(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, save_every=10)
    saved = [step for step in range(35) if manager.save(step, state(step)) is not None]
    assert saved == manager.steps() == [0, 10, 20, 30]
    assert not manager.should_save(35)
    assert manager.save(35, state(35), force=True) is not None
    assert manager.latest_step() == 35


def test_save_every_seconds_counts_from_the_last_save(tmp_path: Path, clock: list[float]) -> None:
    manager = manager_of(tmp_path, save_every_seconds=60)
    passed = {1: 0, 2: 59, 3: 2, 4: 30, 5: 29, 6: 1, 7: 300, 8: 1}
    saved = []
    for step, seconds in passed.items():
        clock[0] += seconds
        if manager.save(step, state(step)) is not None:
            saved.append(step)
    assert saved == manager.steps() == [3, 6, 7]


def test_either_rule_is_enough(tmp_path: Path, clock: list[float]) -> None:
    manager = manager_of(tmp_path, save_every=4, save_every_seconds=60)
    saved = []
    for step in range(1, 10):
        clock[0] += 25
        if manager.save(step, state(step)) is not None:
            saved.append(step)
    assert saved == [3, 4, 7, 8]


@pytest.mark.parametrize("rule", ["save_every", "save_every_seconds"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), "10"])
def test_an_interval_that_is_not_positive_is_refused(tmp_path: Path, rule: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rule):
        manager_of(tmp_path, **{rule: value})


@pytest.mark.parametrize("step", [-1, True, 1.0, "5", np.int32(-1627389952)])
def test_what_is_no_step_is_refused_by_every_method(tmp_path: Path, step: Any) -> None:
    manager = save_steps(tmp_path, 1)
    before = snapshot(tmp_path)
    for method in (
        lambda: manager.save(step, state(1)),
        lambda: manager.should_save(step),
        lambda: manager.restore(step=step),
        lambda: manager.rollback(step),
    ):
        with pytest.raises(ValueError, match="a step is"):
            method()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("step", [np.int64(3), jnp.int32(3)])
def test_integers_of_numpy_and_jax_are_steps(tmp_path: Path, step: Any) -> None:
    manager = manager_of(tmp_path)
    manager.save(step, state(3))
    assert manager.steps() == [3]
    assert restored(manager, step=step) == 3


# --- in the background ----------------------------------------------------------------------------


def test_save_returns_before_the_checkpoint_is_written(tmp_path: Path, gate: Gate) -> None:
    with manager_of(tmp_path, background=True) as manager:
        tree = state(1)
        pending = manager.save(1, tree)
        assert pending is not None
        gate.wait_until_reached()
        assert not pending.done()
        assert manager.steps() == []
        tree["w"][:] = -1
        gate.open()
        manager.wait()
        assert pending.done()
        assert restored(manager) == 1


def test_a_second_save_waits_for_the_first_and_says_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(Attempt, "commit", _then(gate.pass_through, Attempt.commit))
    manager = manager_of(tmp_path, background=True)
    first = manager.save(1, state(1))
    gate.wait_until_reached()
    assert first is not None
    waits = threading.Event()
    monkeypatch.setattr(first, "result", _then(waits.set, first.result))
    seen: list[Any] = []

    def second_save() -> None:
        seen.append(manager.save(2, state(2)))
        seen.append(first.done())

    started = time.perf_counter()
    thread = threading.Thread(target=second_save)
    thread.start()
    assert waits.wait(PATIENCE_S)
    thread.join(0.1)
    assert thread.is_alive()
    assert seen == []
    gate.open()
    thread.join()
    passed = time.perf_counter() - started
    assert seen[1] is True
    manager.wait()
    assert 0.1 <= pc.read_manifest(pc.step_path(tmp_path, 2)).seconds["blocked"] <= passed
    assert manager.steps() == [1, 2]


def _then(action: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    def acting(*args: Any, **kwargs: Any) -> Any:
        action()
        return method(*args, **kwargs)

    return acting


def test_skip_if_busy_skips_only_while_a_save_is_under_way(tmp_path: Path, gate: Gate) -> None:
    manager = manager_of(tmp_path, background=True)
    first = manager.save(1, state(1), skip_if_busy=True)
    assert first is not None
    gate.wait_until_reached()
    assert manager.save(2, state(2), skip_if_busy=True) is None
    assert manager.save(3, state(3), skip_if_busy=True, force=True) is None
    gate.open()
    first.wait()
    assert manager.save(4, state(4), skip_if_busy=True) is not None
    manager.wait()
    assert manager.steps() == [1, 4]


def test_a_save_that_was_skipped_is_due_at_the_next_step(
    tmp_path: Path, gate: Gate, clock: list[float]
) -> None:
    manager = manager_of(tmp_path, background=True, save_every_seconds=10)
    clock[0] += 10
    first = manager.save(1, state(1))
    assert first is not None
    clock[0] += 10
    assert manager.save(2, state(2), skip_if_busy=True) is None
    gate.open()
    first.wait()
    assert manager.save(3, state(3), skip_if_busy=True) is not None
    manager.close()


def test_a_failure_is_raised_by_the_next_save_which_saves_nothing(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    manager = save_steps(tmp_path, 1, background=True)
    manager.wait()
    full_disk.is_full = True
    pending = manager.save(2, state(2))
    assert pending is not None
    pending.wait()
    full_disk.is_full = False
    with pytest.raises(OSError, match="No space") as error:
        manager.save(3, state(3))
    assert error.value.errno == errno.ENOSPC
    assert manager.steps() == [1]
    manager.save(4, state(4))
    manager.wait()
    assert manager.steps() == [1, 4]


@pytest.mark.parametrize("ending", ["wait", "close", "restore", "rollback", "with"])
def test_a_failure_is_raised_by_whatever_waits_next(
    tmp_path: Path, full_disk: FullDisk, ending: str
) -> None:
    save_steps(tmp_path, 1)
    full_disk.is_full = True
    manager = manager_of(tmp_path, background=True)
    with pytest.raises(OSError, match="No space"), manager:  # noqa: PT012
        manager.save(2, state(2))
        if ending == "rollback":
            manager.rollback(1)
        elif ending != "with":
            getattr(manager, ending)()
    manager.wait()  # once is enough
    assert manager.steps() == [1]


def test_a_failure_in_the_foreground_is_raised_at_once(tmp_path: Path, full_disk: FullDisk) -> None:
    manager = save_steps(tmp_path, 1)
    full_disk.is_full = True
    with pytest.raises(OSError, match="No space"):
        manager.save(2, state(2))
    full_disk.is_full = False
    manager.save(2, state(2))
    assert manager.steps() == [1, 2]


def test_a_call_that_cannot_save_is_refused_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 1, background=True, keep=pc.Keep(last=1))
    manager.wait()
    before = snapshot(tmp_path)
    with pytest.raises(pc.UnsupportedLeafError):
        manager.save(2, {"f": print})
    with pytest.raises(pc.ExistsError):
        manager.save(1, state(1))
    with pytest.raises(TypeError):
        manager.save(2, state(2), metadata=object())
    with pytest.raises((TypeError, ValueError)):
        manager.save(2, state(2), metrics={"loss": "low"})  # type: ignore[dict-item]
    manager.wait()
    assert snapshot(tmp_path) == before


class Unusable:
    """As arrays that are deleted, and tracers, raise what JAX likes."""

    def __float__(self) -> float:
        raise RuntimeError("deleted")

    def __repr__(self) -> str:
        return "Unusable()"


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({1: 0.5}, "metrics has the key 1"),
        ({"\ud800": 0.5}, "a key of metrics"),
        ({"loss": None}, r"metrics\['loss'\]"),
        ({"loss": np.ones(2)}, r"metrics\['loss'\]"),
        ({"loss": 10**400}, r"metrics\['loss'\]"),
        ({"loss": Unusable()}, r"metrics\['loss'\] is no number: deleted"),
    ],
    ids=str,
)
def test_metrics_that_could_not_be_read_back_are_refused_by_name(
    tmp_path: Path, metrics: Any, text: str
) -> None:
    manager = save_steps(tmp_path, 1)
    before = snapshot(tmp_path)
    with pytest.raises((TypeError, ValueError), match=text):
        manager.save(2, state(2), metrics=metrics)
    assert snapshot(tmp_path) == before


def test_metrics_and_metadata_are_those_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = pc.Keep(last=1, best=("loss", "min", 1))
    manager = manager_of(tmp_path, background=True, keep=keep)
    manager.save(1, state(1), metrics={"loss": 1.0})
    manager.wait()
    gate = Gate()
    before_writing(monkeypatch, gate.pass_through)
    metrics, metadata = {"loss": jnp.float32(0.5)}, {"epoch": [1]}
    manager.save(2, state(2), metrics=metrics, metadata=metadata)
    metrics["loss"].delete()
    metrics["loss"] = jnp.float32(9)
    metadata["epoch"].append(2)
    gate.open()
    manager.wait()
    manifest = pc.read_manifest(pc.step_path(tmp_path, 2))
    assert manifest.metrics == {"loss": 0.5}
    assert manifest.metadata == {"epoch": [1]}
    assert manager.steps() == [2]


# --- the order of steps ---------------------------------------------------------------------------


def test_a_step_that_exists_is_refused_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 1, 2, 3)
    with pytest.raises(pc.ExistsError, match="step 2 exists"):
        manager.save(2, state(9))
    assert restored(manager, step=2) == 2
    manager.save(2, state(9), overwrite=True)
    assert manager.steps() == [1, 2, 3]
    assert restored(manager, step=2) == 9
    assert restored(manager) == 3
    assert len(list(pc.step_path(tmp_path, 2).glob("data-*"))) == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_new_step_below_the_latest_is_refused(tmp_path: Path, overwrite: bool) -> None:
    manager = save_steps(tmp_path, 500, 600, 700, keep=pc.Keep(last=3))
    with pytest.raises(pc.ExistsError, match=r"below the latest step 700 .* rollback\(100\)"):
        manager.save(100, state(100), overwrite=overwrite)
    assert manager.steps() == [500, 600, 700]


def test_an_overwrite_that_fails_leaves_the_step_it_was_to_replace(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    manager = save_steps(tmp_path, 1, 2, keep=pc.Keep(last=1))
    full_disk.is_full = True
    with pytest.raises(OSError, match="No space"):
        manager.save(2, state(9), overwrite=True)
    assert restored(manager) == 2
    full_disk.is_full = False
    manager.save(2, state(9), overwrite=True)
    assert restored(manager) == 9


def test_rollback_deletes_the_later_steps_and_nothing_else(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 10, 20, 30, 40)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(pc.NotFoundError, match=r"no step 25 .*\[10, 20, 30, 40\]"):
        manager.rollback(25)
    assert manager.rollback(20) == [40, 30]
    assert manager.rollback(20) == []
    assert sorted(os.listdir(tmp_path)) == ["notes", "step_00000010", "step_00000020"]
    manager.save(25, state(25))
    assert manager.steps() == [10, 20, 25]


def test_rollback_does_not_claim_to_have_deleted_what_is_in_use(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 10, 20, 30)
    in_use = pytest.raises(pc.CheckpointError, match="step 20 is in use")
    with pc.open(pc.step_path(tmp_path, 20)), in_use:
        manager.rollback(10)
    assert manager.steps() == [10, 20]
    assert manager.rollback(10) == [20]


# --- what is kept ---------------------------------------------------------------------------------


def test_the_newest_so_many_stay(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, *range(1, 6), keep=pc.Keep(last=3))
    assert manager.steps() == [3, 4, 5]
    assert sorted(os.listdir(tmp_path)) == [f"step_0000000{n}" for n in (3, 4, 5)]
    assert all(loads(tmp_path, step) for step in (3, 4, 5))


def test_every_pinned_and_best_steps_stay_beside_the_newest(tmp_path: Path) -> None:
    keep = pc.Keep(last=1, every=4, best=("loss", "min", 1), pinned={3})
    losses = {1: 5.0, 2: float("nan"), 3: 4.0, 4: 3.0, 5: 0.5, 6: 0.5, 7: None, 8: 1.0, 9: 2.0}
    manager = manager_of(tmp_path, keep=keep)
    for step, loss in losses.items():
        metrics = {"accuracy": 1.0} if loss is None else {"loss": loss}
        manager.save(step, state(step), metrics=metrics)
    assert manager.steps() == [3, 4, 6, 8, 9]
    assert manager.best_step("loss") == 6
    assert manager.best_step("loss", "max") == 3
    assert manager.best_step("accuracy") is None
    with pytest.raises(ValueError, match="mode must be 'min' or 'max', not 'minimize'"):
        manager.best_step("loss", "minimize")  # type: ignore[arg-type]
    decision = manager.decision()
    assert decision.dropped == {}
    assert decision.kept[6] == "best 1 by loss"
    assert decision.kept[3] == "pinned"


def test_a_pinned_step_stays_under_another_policy_until_it_is_unpinned(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, keep=pc.Keep(last=1, pinned={1}))
    pin(pc.step_path(tmp_path, 3))
    manager = save_steps(tmp_path, 4, 5, keep=pc.Keep(last=1))
    assert manager.steps() == [1, 3, 5]
    assert [step.step for step in survey(tmp_path) if step.pinned] == [1, 3]
    assert prune(tmp_path, pc.Keep(last=1), delete=True).decision.kept[1] == "pinned"
    pin(pc.step_path(tmp_path, 1), pinned=False)
    assert prune(tmp_path, pc.Keep(last=1), delete=True).deleted == (1,)
    manager.rollback(3)
    assert not pc.step_path(tmp_path, 5).exists()
    pin(pc.step_path(tmp_path, 3))  # twice is once
    assert loads(tmp_path, 3)


def test_a_step_that_is_pinned_while_others_are_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is large takes long to delete, and the decision was made before."""
    save_steps(tmp_path, 1, 2, 3)
    delete = roots.delete

    def slow(path: Path) -> bool:
        pin(pc.step_path(tmp_path, 2))
        return delete(path)

    monkeypatch.setattr(roots, "delete", slow)
    report = prune(tmp_path, pc.Keep(last=1), delete=True)
    assert (report.deleted, report.in_use) == ((1,), (2,))
    assert loads(tmp_path, 2)


def test_a_step_that_cannot_be_pinned_costs_neither_the_save_nor_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(health, "pin", refused)
    manager = save_steps(tmp_path, 1, 2, 3, keep=pc.Keep(last=1, pinned={1}))
    assert manager.steps() == [1, 2, 3]
    assert "old steps could not be deleted: no" in caplog.text


def test_the_best_stays_until_the_better_one_is_committed(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    manager = manager_of(tmp_path, keep=pc.Keep(last=2, best=("loss", "min", 1)))
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        manager.save(step, state(step), metrics={"loss": loss})
    full_disk.is_full = True
    with pytest.raises(OSError, match="No space"):
        manager.save(4, state(4), metrics={"loss": 0.5})
    assert manager.best_step("loss") == 1
    full_disk.is_full = False
    manager.save(4, state(4), metrics={"loss": 0.5})
    assert manager.steps() == [3, 4]


def test_a_decision_can_be_looked_at_without_deleting(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    before = snapshot(tmp_path)
    decision = manager_of(tmp_path, keep=pc.Keep(last=1)).decision()
    assert (list(decision.kept), list(decision.dropped)) == ([3], [1, 2])
    by_age = manager_of(tmp_path, keep=pc.Keep(last=None, newer_than=3600))
    assert list(by_age.decision().kept) == [1, 2, 3]
    assert list(by_age.decision(now=time.time() + 3601).kept) == [3]
    assert list(manager_of(tmp_path, keep=None).decision().kept) == [1, 2, 3]
    assert snapshot(tmp_path) == before


def test_a_decision_says_which_steps_are_damaged_and_left(tmp_path: Path) -> None:
    save_steps(tmp_path, 4, 5, 6, 7, keep=None)
    flip_a_bit(tmp_path, 7)
    manager = manager_of(tmp_path, keep=pc.Keep(last=1))
    assert restored(manager, on_damage="previous") == 6
    lose_a_file(tmp_path, 6)
    decision = manager.decision()
    assert (list(decision.kept), list(decision.dropped), list(decision.left)) == ([5], [4], [6, 7])
    lines = str(decision).splitlines()
    assert lines[:2] == ["keep 5: newest 1", "drop 4: no rule keeps it"]
    assert lines[2].startswith("leave 6: ")
    assert "is missing" in lines[2]
    assert lines[3].startswith("leave 7: marked as damaged")
    assert list(manager_of(tmp_path, keep=None).decision().left) == [6, 7]


class DiskWatch:
    """The checkpoints that the disk holds, whole or being written, at each turn of a save."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self.most = 0
        self.fewest_good: int | None = None
        before_writing(monkeypatch, self.look)
        after_writing(monkeypatch, self.look)
        for owner, name in ((Attempt, "commit"), (roots, "delete")):
            watched = _then(self.look, getattr(owner, name))
            monkeypatch.setattr(owner, name, self._look_after(watched))

    def _look_after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            self.look()
            return found

        return acting

    def look(self) -> None:
        self.most = max(self.most, len(list(self._root.glob("*/data-*"))))
        if good := len(pc.steps(self._root)):
            self.fewest_good = min(good, self.fewest_good or good)
        elif self.fewest_good is not None:
            self.fewest_good = 0


@pytest.mark.parametrize(
    ("last", "most", "fewest_good"), [(1, 2, 1), (2, 2, 1), (3, 3, 2)], ids=["1", "2", "3"]
)
def test_the_disk_never_holds_more_than_its_bound_nor_less_than_one_good_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, most: int, fewest_good: int
) -> None:
    save_steps(tmp_path, *range(1, last + 1))
    watch = DiskWatch(tmp_path, monkeypatch)
    save_steps(tmp_path, *range(10, 16), keep=pc.Keep(last=last), background=True).wait()
    assert watch.most == most
    assert watch.fewest_good == fewest_good
    assert pc.steps(tmp_path) == list(range(16 - last, 16))


def test_with_the_best_kept_the_disk_holds_no_more_than_both_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = DiskWatch(tmp_path, monkeypatch)
    manager = manager_of(tmp_path, keep=pc.Keep(last=2, best=("loss", "min", 2)))
    for step, loss in enumerate([5.0, 1.0, 4.0, 2.0, 3.0, 0.5, 6.0, 0.1, 7.0, 8.0]):
        manager.save(step, state(step), metrics={"loss": loss})
    assert manager.steps() == [5, 7, 8, 9]
    assert watch.most == 4


@pytest.mark.parametrize("last", [1, 2])
def test_a_save_that_fails_leaves_a_good_step(
    tmp_path: Path, full_disk: FullDisk, last: int
) -> None:
    manager = save_steps(tmp_path, 1, 2, 3, keep=pc.Keep(last=last))
    for step in (4, 5, 6):
        full_disk.is_full = True
        with pytest.raises(OSError, match="No space"):
            manager.save(step, state(step))
        assert manager.latest_step() == 3
        assert restored(manager) == 3
    assert len(list(tmp_path.iterdir())) == len(manager.steps())
    full_disk.is_full = False
    manager.save(7, state(7))
    assert manager.latest_step() == 7


@every_damage
@pytest.mark.parametrize("last", [1, 2])
def test_a_damaged_step_is_not_counted_among_those_that_stay(
    tmp_path: Path, damage: Damage, last: int
) -> None:
    manager = save_steps(tmp_path, 1, 2, 3, keep=None)
    damage(tmp_path, 3)
    if damage is flip_a_bit:  # which no glance shows, only a load
        assert restored(manager, on_damage="previous") == 2
    seen: list[list[int]] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        before_writing(monkeypatch, lambda: seen.append(manager.steps()))
        save_steps(tmp_path, 4, keep=pc.Keep(last=last))
    assert seen == [[2]] if last == 2 else [[1, 2]]
    assert manager.steps() == [2, 4][-last:]
    assert pc.step_path(tmp_path, 3).exists()
    assert all(loads(tmp_path, step) for step in manager.steps())


def test_a_step_that_is_being_read_stays_until_the_next_rotation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = save_steps(tmp_path, 1, 2, keep=pc.Keep(last=2))
    with pc.open(pc.step_path(tmp_path, 1)) as checkpoint:
        manager.save(3, state(3))
        assert manager.steps() == [1, 2, 3]
        assert value_of(checkpoint.to_numpy()) == 1
    assert "step 1 " in caplog.text
    assert "in use" in caplog.text
    manager.save(4, state(4))
    assert manager.steps() == [3, 4]


def test_a_step_that_cannot_be_deleted_does_not_cost_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = save_steps(tmp_path, 1, 2, keep=pc.Keep(last=1))

    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(roots, "delete", refuse)
        manager.save(3, state(3))
    assert manager.steps() == [2, 3]
    assert any("could not be deleted" in record.getMessage() for record in caplog.records)
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    manager.save(4, state(4))
    assert manager.steps() == [4]


def test_a_root_that_cannot_be_looked_at_does_not_cost_the_new_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = save_steps(tmp_path, 1, keep=pc.Keep(last=1))

    def refuse(*_: object) -> list[Any]:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(health, "look", refuse)
        manager.save(2, state(2))
    assert "Input/output error" in caplog.text
    assert manager.steps() == [1, 2]


def test_leftovers_of_dead_saves_and_deletions_are_reclaimed_by_the_next_save(
    tmp_path: Path, gate: Gate
) -> None:
    gate.open()
    save_steps(tmp_path, 1, 2, 3, 4)
    (pc.step_path(tmp_path, 1) / "manifest.msgpack").unlink()  # a deletion that was cut short
    (pc.step_path(tmp_path, 2) / "manifest.msgpack").unlink()
    (pc.step_path(tmp_path, 2) / "notes.txt").write_text("mine")
    leftover = pc.step_path(tmp_path, 4) / f"data-{'0' * 32}"
    leftover.mkdir()  # an overwrite that was cut short
    save_steps(tmp_path, 7, keep=pc.Keep(last=3))
    assert not pc.step_path(tmp_path, 1).exists()
    assert os.listdir(pc.step_path(tmp_path, 2)) == ["notes.txt"]
    assert not leftover.exists()
    assert pc.steps(tmp_path) == [3, 4, 7]


def test_leftovers_of_any_name_stop_no_save_of_that_step(tmp_path: Path) -> None:
    """Of this library and of others, with read-only files, in the step's place and beside it."""
    place = pc.step_path(tmp_path, 30000)
    beside = [f"{place.name}{end}" for end in (".orbax-checkpoint-tmp-0", ".tmp", "-tmp", "~")]
    dead = f"data-{'0' * 32}"
    for folder in (*(tmp_path / name for name in beside), place / dead / "arrays", place / "tmp"):
        folder.mkdir(parents=True)
        (folder / "junk").write_text("junk")
        (folder / "junk").chmod(0o444)
    (place / f"manifest.{'0' * 32}.tmp").write_text("half a manifest")
    manager = save_steps(tmp_path, 30000)
    assert manager.steps() == [30000]
    assert restored(manager) == 30000
    assert sorted(os.listdir(tmp_path)) == sorted([place.name, *beside])
    assert set(os.listdir(place)) == {
        "manifest.msgpack",
        data_folder(tmp_path, 30000).name,
        "tmp",  # somebody else's
    }
    assert not list(data_folder(tmp_path, 30000).rglob("junk"))


def test_a_save_of_another_process_is_no_leftover(tmp_path: Path, gate: Gate) -> None:
    """Here of another manager: what counts is the lock on the data folder."""
    slow = pc.save_async(pc.step_path(tmp_path, 5), state(5))
    gate.wait_until_reached()
    roots.reclaim(tmp_path, StepNames())
    assert len(list(pc.step_path(tmp_path, 5).glob("data-*"))) == 1
    gate.open()
    slow.result()
    assert loads(tmp_path, 5)


# --- what else is in the root ---------------------------------------------------------------------


def test_foreign_files_are_neither_read_nor_deleted(tmp_path: Path) -> None:
    save_steps(tmp_path, 100)
    make_foreign(tmp_path)
    foreign = {k: v for k, v in snapshot(tmp_path).items() if not k.startswith("step_00000100/")}
    foreign.pop("step_00000100")
    manager = save_steps(tmp_path, 200, 300, keep=pc.Keep(last=1))
    assert manager.steps() == [300]
    assert manager.latest_step() == 300
    assert restored(manager) == 300
    manager.save(999, state(999))
    left = {k: v for k, v in snapshot(tmp_path).items() if not k.startswith("step_00000999")}
    assert left == foreign


def test_a_step_that_is_a_link_can_be_loaded_and_is_never_deleted(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    save_steps(root, 100)
    pc.save(elsewhere, state(200))
    pc.step_path(root, 200).symlink_to(elsewhere)
    (tmp_path / "unfinished" / f"data-{'0' * 32}").mkdir(parents=True)
    pc.step_path(root, 250).symlink_to(tmp_path / "unfinished")
    before = snapshot(elsewhere) | snapshot(tmp_path / "unfinished")
    manager = manager_of(root, keep=pc.Keep(last=1))
    assert manager.steps() == [100, 200]
    assert restored(manager) == 200
    manager.save(300, state(300))
    manager.save(400, state(400))
    assert manager.steps() == [200, 400]
    assert "link" in manager.decision().kept[200]
    pc.save(pc.step_path(root, 50), state(50))
    with pytest.raises(pc.CheckpointError, match="step 200 is in use or a link"):
        manager.rollback(50)
    assert snapshot(elsewhere) | snapshot(tmp_path / "unfinished") == before
    assert pc.step_path(root, 200).is_symlink()


def test_a_root_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to("disk")
    manager = save_steps(tmp_path / "root", 1, 2, 3, keep=pc.Keep(last=2))
    assert manager.steps() == [2, 3]
    assert pc.steps(tmp_path / "disk") == [2, 3]
    assert restored(manager) == 3


def test_nothing_is_deleted_before_the_first_save_in_a_copied_root(tmp_path: Path) -> None:
    save_steps(tmp_path / "a", 1, 2)
    copy = tmp_path / "b"
    shutil.copytree(tmp_path / "a", copy)
    pc.step_path(copy, 2).rename(pc.step_path(copy, 7))
    leftover = pc.step_path(copy, 9) / f"data-{'0' * 32}"
    leftover.mkdir(parents=True)  # a copy that is not done yet looks like this
    before = snapshot(copy)
    with manager_of(copy, keep=pc.Keep(last=1)) as manager:
        assert manager.steps() == [1, 7]
        assert restored(manager, step=7) == 2
        assert restored(manager, step=1) == 1
        assert manager.latest_step() == 7
        assert str(copy) in repr(manager)
    assert snapshot(copy) == before
    manager.save(8, state(8))
    assert manager.steps() == [8]


@pytest.mark.parametrize(
    "prefix", ["ppo_networks_", "run-1", "a.b", "2024", "ckpt 1 ", "é空", "", "%s{0}"]
)
@pytest.mark.parametrize("width", [1, 8])
def test_any_prefix_and_width_name_steps(tmp_path: Path, prefix: str, width: int) -> None:
    manager = save_steps(tmp_path, 0, 12, 345, prefix=prefix, width=width, keep=pc.Keep(last=2))
    assert manager.steps() == [12, 345]
    assert os.path.isdir(tmp_path / f"{prefix}{12:0{width}d}")
    assert loads(tmp_path, 12, prefix=prefix, width=width)


@pytest.mark.parametrize("prefixes", [("a", "a_b"), ("a_", "a_b_"), ("", "x")], ids=str)
def test_of_two_prefixes_in_one_root_neither_touches_the_other(
    tmp_path: Path, prefixes: tuple[str, str]
) -> None:
    managers = [manager_of(tmp_path, prefix=p, width=3, keep=pc.Keep(last=1)) for p in prefixes]
    for step in (1, 2, 3):
        for number, manager in enumerate(managers):
            manager.save(step, state(10 * number + step))
    assert [manager.steps() for manager in managers] == [[3], [3]]
    assert [restored(manager) for manager in managers] == [3, 13]


def test_a_root_without_steps_of_these_names_says_how_they_are_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    with pytest.raises(pc.NotFoundError, match="steps are named as ckpt_0001"):
        pc.CheckpointManager(tmp_path, prefix="ckpt_", width=4).restore()


def test_huge_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    steps = [99_999_999, 2_000_683_008, 2**31, 10**10, 2**53 + 1, 10**40]
    manager = save_steps(tmp_path, *sorted(steps), keep=pc.Keep(last=5))
    assert manager.steps() == sorted(steps)[1:]
    assert manager.latest_step() == 10**40
    assert restored(manager, step=2**53 + 1) == 2**53 + 1


def test_step_zero_is_a_step_like_any_other(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 0, keep=pc.Keep(last=1))
    assert manager.latest_step() == 0
    assert restored(manager) == 0
    assert restored(manager, step=0) == 0
    assert manager.rollback(0) == []
    with pytest.raises(pc.ExistsError, match="step 0 exists"):
        manager.save(0, state(0))


# --- restoring ------------------------------------------------------------------------------------


def test_restore_takes_the_newest_or_the_one_that_is_asked_for(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 1, 20, 3000)
    os.utime(pc.step_path(tmp_path, 1))
    assert restored(manager) == 3000
    assert restored(manager, step=20) == 20
    assert restored(manager, target=state(0)) == 3000
    assert manager.restore({"step": 0}, partial=True) == {"step": 3000}
    with pytest.raises(pc.NotFoundError, match="no step 2 "):
        manager.restore(step=2)
    with pytest.raises(pc.NotFoundError):
        manager.restore(step=2, on_damage="previous")


def test_nothing_there_unreadable_and_all_damaged_are_three_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for on_damage in ("raise", "previous"):
        with pytest.raises(pc.NotFoundError, match="no checkpoint in"):
            manager_of(tmp_path / "none").restore(on_damage=on_damage)

    (tmp_path / "file").write_text("")
    for on_damage in ("raise", "previous"):
        with pytest.raises(OSError, match="file") as error:
            manager_of(tmp_path / "file").restore(on_damage=on_damage)
        assert not isinstance(error.value, pc.CheckpointError)
        assert "unreadable" in repr(manager_of(tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        manager_of(tmp_path / "file").latest_step()

    root = tmp_path / "root"
    manager = save_steps(root, 10, 20)
    cut_the_manifest(root, 10)
    flip_a_bit(root, 20)
    for _ in range(2):  # also when both are marked
        with pytest.raises(pc.IntegrityError) as damaged:
            manager.restore(on_damage="previous")
        assert [str(d).split(":")[0] for d in damaged.value.damage] == ["step 20", "step 10"]
        assert "No step of" in str(damaged.value)
    assert manager.latest_step() is None

    def refuse(path: object) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        with pytest.raises(PermissionError):
            manager.restore(on_damage="previous")


@every_damage
def test_a_damaged_newest_step_is_an_error_that_names_the_way_on(
    tmp_path: Path, damage: Damage
) -> None:
    manager = save_steps(tmp_path, 10, 20)
    damage(tmp_path, 20)
    before = snapshot(tmp_path)
    with pytest.raises((pc.IntegrityError, pc.FormatError)) as error:
        manager.restore()
    (note,) = error.value.__notes__
    assert "step 20 is damaged" in note
    assert "on_damage='previous'" in note
    assert snapshot(tmp_path) == before


@every_damage
def test_the_step_before_a_damaged_one_is_loaded_when_asked(
    tmp_path: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    manager = save_steps(tmp_path, 10, 20, 30)
    damage(tmp_path, 30)
    before = snapshot(tmp_path)
    assert restored(manager, on_damage="previous") == 20
    assert "step 30" in caplog.text

    mark = f"step_00000030/{MARK}"
    after = snapshot(tmp_path)
    why = after.pop(mark)
    assert isinstance(why, bytes)
    assert len(why.splitlines()) >= 2
    assert after == before
    assert manager.steps() == [10, 20]
    assert manager.latest_step() == 20
    assert restored(manager) == 20  # the mark is enough: nobody asks again
    with pytest.raises((pc.IntegrityError, pc.FormatError)):
        manager.restore(step=30)


def test_what_replaced_a_damaged_step_while_it_was_read_is_not_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, quarantine = save_steps(tmp_path, 10, 20), health.quarantine
    flip_a_bit(tmp_path, 20)

    def late(location: Location, *args: Any) -> None:
        pc.save(pc.step_path(tmp_path, 20), state(20), overwrite=True)
        quarantine(location, *args)

    monkeypatch.setattr(health, "quarantine", late)
    assert restored(manager, on_damage="previous") == 10
    assert restored(manager) == 20


@every_damage
def test_a_run_goes_on_over_a_step_that_is_marked(tmp_path: Path, damage: Damage) -> None:
    manager = save_steps(tmp_path, 10, 20, 30, keep=pc.Keep(last=3))
    damage(tmp_path, 30)
    assert restored(manager, on_damage="previous") == 20
    manager.save(25, state(25))
    assert manager.steps() == [10, 20, 25]
    manager.save(30, state(30))
    assert manager.steps() == [20, 25, 30]
    assert restored(manager) == 30
    assert not (pc.step_path(tmp_path, 30) / MARK).exists()
    assert len(list(pc.step_path(tmp_path, 30).glob("data-*"))) == 1
    with pytest.raises(pc.ExistsError):
        manager.save(30, state(30))


@every_damage
def test_the_mark_of_a_step_that_was_replaced_says_nothing(tmp_path: Path, damage: Damage) -> None:
    """As when the process dies between the commit and the removal of the mark."""
    manager = save_steps(tmp_path, 10, 20)
    damage(tmp_path, 20)
    assert restored(manager, on_damage="previous") == 10
    pc.save(pc.step_path(tmp_path, 20), state(20), overwrite=True)
    assert (pc.step_path(tmp_path, 20) / MARK).exists()
    assert manager.steps() == [10, 20]
    assert restored(manager) == 20


def test_a_damaged_step_without_a_mark_stands_in_the_way(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 10, 20)
    lose_a_file(tmp_path, 20)
    with pytest.raises(pc.ExistsError, match="latest step 20"):
        manager.save(15, state(15))
    with pytest.raises(pc.ExistsError, match="step 20 exists"):
        manager.save(20, state(20))
    assert manager.rollback(10) == [20]
    manager.save(15, state(15))
    assert manager.steps() == [10, 15]


def test_of_several_damaged_steps_each_is_marked(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 10, 20, 30, 40)
    for step in (20, 30, 40):
        flip_a_bit(tmp_path, step)
    assert restored(manager, on_damage="previous") == 10
    assert manager.steps() == [10]
    assert sorted(path.parent.name[-2:] for path in tmp_path.glob(f"*/{MARK}")) == [
        "20",
        "30",
        "40",
    ]


def test_an_explicit_step_falls_back_only_to_those_before_it(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 10, 20, 30)
    flip_a_bit(tmp_path, 20)
    with pytest.raises(pc.IntegrityError):
        manager.restore(step=20)
    assert restored(manager, step=20, on_damage="previous") == 10
    flip_a_bit(tmp_path, 10)
    with pytest.raises(pc.IntegrityError, match=r"No step of .* up to 20 is whole"):
        manager.restore(step=20, on_damage="previous")
    assert restored(manager) == 30


def test_what_a_newer_release_wrote_is_not_damaged_and_not_skipped(tmp_path: Path) -> None:
    """To go on from an older step in silence would lose what was trained since."""
    manager = save_steps(tmp_path, 10, 20, keep=pc.Keep(last=1, pinned={10}))
    as_a_newer_release(tmp_path, 20)
    before = snapshot(tmp_path)
    for on_damage in ("raise", "previous"):
        with pytest.raises(pc.NewerFormatError, match="format version 2") as error:
            manager.restore(on_damage=on_damage)
        assert "step 20 is not damaged" in error.value.__notes__[0]
    with pytest.raises(pc.NewerFormatError):
        pc.verify(pc.step_path(tmp_path, 20))
    assert snapshot(tmp_path) == before
    assert manager.latest_step() == 20
    assert restored(manager, step=10) == 10
    assert "format version 2" in manager.decision().left[20]
    with pytest.raises(pc.ExistsError, match="latest step 20"):
        manager.save(15, state(15))
    manager.save(30, state(30))
    manager.save(40, state(40))
    assert manager.steps() == [10, 20, 40]


def test_a_step_that_cannot_be_read_is_not_damaged_and_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = save_steps(tmp_path, 10, 20, keep=pc.Keep(last=1))
    read = disk.read_file

    def refuse(path: Path, **limits: int) -> bytes:
        if path == pc.step_path(tmp_path, 20) / "manifest.msgpack":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, **limits)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_file", refuse)
        with pytest.raises(PermissionError):
            manager.restore(on_damage="previous")
        assert manager.latest_step() == 20
        assert list(manager.decision().left) == [20]
        manager.save(30, state(30))
    assert manager.steps() == [20, 30]
    assert loads(tmp_path, 20)


def test_a_target_that_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 10, 20)
    before = snapshot(tmp_path)
    with pytest.raises(pc.MismatchError):
        manager.restore({"w": np.zeros(5), "step": 0}, on_damage="previous")
    assert snapshot(tmp_path) == before
    assert manager.steps() == [10, 20]


def test_a_root_that_cannot_be_written_is_still_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = save_steps(tmp_path, 10, 20)
    flip_a_bit(tmp_path, 20)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pytree_ckpt.store.disk.write_new", refuse)
    before = snapshot(tmp_path)
    assert restored(manager, on_damage="previous") == 10
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_mount_is_read_and_refuses_a_save(tmp_path: Path) -> None:
    root = tmp_path / "root"
    save_steps(root, 10, 20)
    flip_a_bit(root, 20)
    mount = ["mount", "--bind", str(root), str(root)]
    if (tried := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(f"this system lets nobody mount: {tried.stderr}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
        before = snapshot(root)
        with pc.CheckpointManager(root) as manager:
            assert restored(manager, on_damage="previous") == 10
            with pytest.raises(OSError, match="Read-only") as error:
                manager.save(30, state(30))
            assert error.value.errno == errno.EROFS
        assert pc.verify(root / "step_00000010").ok
        assert snapshot(root) == before
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_another_word_for_what_to_do_about_damage_is_refused(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 10)
    with pytest.raises(ValueError, match="on_damage"):
        manager.restore(on_damage="ignore")  # type: ignore[arg-type]


def test_restore_waits_for_the_save_under_way(tmp_path: Path, gate: Gate) -> None:
    manager = manager_of(tmp_path, background=True)
    manager.save(1, state(1))
    gate.wait_until_reached()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(restored(manager)))
    thread.start()
    thread.join(0.1)
    assert found == []
    gate.open()
    thread.join()
    assert found == [1]


def test_a_step_may_be_loaded_replaced_and_deleted_in_turn(tmp_path: Path) -> None:
    """A run that loads from where it saves: no load sees an older step's bytes."""
    manager = save_steps(tmp_path, 1, keep=pc.Keep(last=1))
    for step in (2, 3):
        assert restored(manager) == step - 1
        manager.save(step, state(step))
        assert restored(manager) == step
        manager.save(step, state(step + 50), overwrite=True)
        assert restored(manager) == step + 50
        manager.save(step, state(step), overwrite=True)
    assert manager.steps() == [3]


def test_a_manager_says_what_it_holds(tmp_path: Path) -> None:
    manager = save_steps(tmp_path, 1, 2, keep=pc.Keep(last=2))
    where = f"CheckpointManager({str(tmp_path)!r}, "
    assert repr(manager) == f"{where}2 steps [1, 2], keep=Keep(last=2))"
    second = locate(tmp_path / "step_00000002")
    health.quarantine(second, health.named_by(second), "for a test")
    assert repr(manager) == f"{where}1 step [1], 1 not good, keep=Keep(last=2))"


def test_a_manager_of_many_steps_names_the_first_and_the_last(tmp_path: Path) -> None:
    with pc.CheckpointManager(tmp_path, keep=None, save_every=10) as manager:
        for step in range(0, 80, 10):
            pending = manager.save(step, {"n": step})
        assert pending is not None
        pending.wait()
        assert repr(manager) == (
            f"CheckpointManager({str(tmp_path)!r}, 8 steps [0, 10, …, 50, 60, 70], "
            f"PendingSave({str(tmp_path / 'step_00000070')!r}, done), keep=None, save_every=10)"
        )


def test_a_manager_restores_by_rules(tmp_path: Path) -> None:
    with pc.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"l0": np.zeros(2), "l1": np.ones(2), "step": 1})
        loaded = manager.restore(rename={"step": "at"}, stack={"l{}": "l"})
        assert loaded["at"] == 1
        assert loaded["l"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
        manager.save(2, {"l": loaded["l"]})
        apart = manager.restore(unstack={"l": "l{}"})
        assert {name: row.tolist() for name, row in apart.items()} == {"l0": [0, 0], "l1": [1, 1]}


@pytest.mark.parametrize("waits", ["wait", "save", "restore", "close"])
def test_who_is_interrupted_while_waiting_for_a_save_may_wait_again(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """A save that was forgotten would be looked past: `restore` would find an older step."""
    manager = manager_of(tmp_path, background=True)
    pending = manager.save(1, state(1))
    assert pending is not None
    finished = pending._finished

    class Interrupted:
        is_set = finished.is_set

        def wait(self, timeout: float | None = None) -> bool:
            monkeypatch.setattr(pending, "_finished", finished)
            raise KeyboardInterrupt

    monkeypatch.setattr(pending, "_finished", Interrupted())
    calls: dict[str, Callable[[], Any]] = {
        "wait": manager.wait,
        "save": lambda: manager.save(2, state(2)),
        "restore": manager.restore,
        "close": manager.close,
    }
    with pytest.raises(KeyboardInterrupt):
        calls[waits]()
    assert "under way" in repr(manager)
    gate.open()
    assert restored(manager) == 1


def test_a_listener_of_jax_that_fails_costs_no_step_no_deletion_and_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: str, value: float) -> None:
        raise RuntimeError("the listener fails")

    monkeypatch.setattr("jax.monitoring.record_event_duration_secs", fail)
    monkeypatch.setattr("jax.monitoring.record_scalar", fail)
    manager = save_steps(tmp_path, 1, 2, keep=pc.Keep(last=1))
    assert manager.steps() == [2]
    assert restored(manager) == 2
    assert "a listener of jax.monitoring failed at /pytree_ckpt/save/commit_secs" in caplog.text
    assert "/pytree_ckpt/load/read_nbytes" in caplog.text
