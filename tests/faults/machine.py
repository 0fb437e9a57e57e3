"""A state machine: random sequences of all that happens to a root, against a model of it."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import hypothesis
import jax
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import pytree_ckpt as pc
from tests.faults import children
from tests.faults.judge import Judge, Tally, version_at_rest, version_of
from tests.faults.scenarios import content, is_content, manager, path_of, state
from tests.faults.shim import Fault

KEEP = 3
HIDDEN, SHOWS = "hidden", "shows"
WHICH = st.integers(0, 59)
"""A number that any smaller count of things divides about evenly."""
PLACE = st.integers(0, 1 << 16)
T = TypeVar("T", int, Path)


class Machine(RuleBasedStateMachine):
    """The model: for each step that must be there its version, and what was done to it.

    An overwrite that dies leaves its data, until the next save if the manifest is whole, else until
    the step is overwritten: a damaged manifest may name any.

    What hypothesis draws does not depend on what happened: where in a save a thread is killed is
    not the same in every run. So a step is drawn as a number that is taken modulo how many there
    are, and a rule that finds none does nothing.
    """

    judge: ClassVar[Judge]
    tally: ClassVar[Tally]

    def __init__(self) -> None:
        super().__init__()
        self.folder = children.scratch()
        self.root = self.folder / "root"
        self.root.mkdir()
        self.version: dict[int, int] = {}
        self.damage: dict[int, str] = {}
        self.left: dict[int, int] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize()
    def begin(self) -> None:
        self.save()

    # --- what happens ---------------------------------------------------------------------------

    def _next(self) -> int:
        return max(self.version, default=0) + 1

    def _seen_good(self) -> list[int]:
        """Steps that a glance finds whole; a flipped bit shows only when it is read."""
        return sorted(s for s in self.version if self.damage.get(s) != SHOWS)

    def _rotated(self, saved: int) -> None:
        """The newest stay, and what was just saved, until the next save."""
        self.left = {step: number for step, number in self.left.items() if step in self.damage}
        for step in self._seen_good()[:-KEEP]:
            if step != saved:
                del self.version[step]
                self.damage.pop(step, None)

    @rule()
    def save(self) -> None:
        step = self._next()
        self.judge.call(_save, self.root, step, 0, False)
        self.version[step] = 0
        self._rotated(step)

    @rule(which=WHICH, version=st.integers(1, 9))
    def overwrite(self, which: int, version: int) -> None:
        step = _chosen(self.version, which)
        self.judge.call(_save, self.root, step, version, True)
        self.version[step] = version
        self.damage.pop(step, None)
        self._rotated(step)

    @rule(at=st.integers(1, 110))
    def crash_in_a_save(self, at: int) -> None:
        step = self._next()
        before = self._seen_good()
        done = self._crash(step, 0, at, overwrite=False)
        listed = set(pc.steps(self.root))
        # Only the oldest may have gone, to make room.
        must = set(before[-(KEEP - 1) :]) | ({step} if done else set())
        assert must <= listed, f"{sorted(must - listed)} went in a save that died"
        self._observe(listed, step, {0})

    @rule(which=WHICH, version=st.integers(1, 9), at=st.integers(1, 110))
    def crash_in_an_overwrite(self, which: int, version: int, at: int) -> None:
        step = _chosen(self.version, which)
        self._crash(step, version, at, overwrite=True)
        listed = set(pc.steps(self.root))
        assert step in listed, f"step {step} went in an overwrite that died"
        found = self.judge.call(version_of, path_of(self.root, step), step)
        if found == version:
            self.version[step] = version
            self.damage.pop(step, None)
        self.left[step] = self.left.get(step, 0) + 1
        gone = set(self.version) - listed
        may_go = sorted({*self._seen_good(), step})[:-KEEP]
        assert gone <= set(may_go), f"{gone} went in an overwrite that died"
        self._observe(listed, step, {version})

    def _crash(self, step: int, version: int, at: int, *, overwrite: bool) -> bool:
        def act(root: Path, acknowledge: children.Acknowledge) -> None:
            _save(root, step, version, overwrite)
            acknowledge("done")

        ended = children.run(act, self.root, fault=Fault(action="torn", at=at))
        assert not ended.error, ended
        assert not ended.hung, ended
        return bool(ended.acks)

    def _observe(self, listed: set[int], step: int, versions: set[int]) -> None:
        """Take over what an interrupted save may have done."""
        for gone in set(self.version) - listed:
            del self.version[gone]
            self.damage.pop(gone, None)
        if step in listed and step not in self.version:
            (self.version[step],) = versions

    @rule(which=WHICH, at=PLACE, bit=st.integers(0, 7))
    def flip_a_bit_of_the_manifest(self, which: int, at: int, bit: int) -> None:
        if self._whole():
            step = _chosen(self._whole(), which)
            file = path_of(self.root, step) / "manifest.msgpack"
            _flip(file, at % file.stat().st_size, bit)
            self.damage[step] = SHOWS

    @rule(which=WHICH, file=WHICH, at=st.integers(0, 1000), bit=st.integers(0, 7))
    def flip_a_bit_of_the_data(self, which: int, file: int, at: int, bit: int) -> None:
        if self._whole():
            step = _chosen(self._whole(), which)
            # The first bytes of a file are elements, the last ones its index.
            _flip(_chosen(self._files(step), file), at, bit)
            self.damage[step] = HIDDEN

    @rule(which=WHICH, file=WHICH, at=PLACE)
    def cut_a_file(self, which: int, file: int, at: int) -> None:
        if self._whole():
            step = _chosen(self._whole(), which)
            victim = _chosen(self._files(step), file)
            os.truncate(victim, at % victim.stat().st_size)
            self.damage[step] = SHOWS

    def _files(self, step: int) -> list[Path]:
        """Of arrays; what a dead overwrite left beside them is no part of the step."""
        path = path_of(self.root, step)
        return sorted((path / pc.read_manifest(path).data_dir).glob("arrays/*/c.*"))

    def _whole(self) -> set[int]:
        return set(self.version) - set(self.damage)

    @rule(which=WHICH)
    def roll_back(self, which: int) -> None:
        step = _chosen(self.version, which)
        self.judge.call(_roll_back, self.root, step)
        for later in [s for s in self.version if s > step]:
            del self.version[later]
            self.damage.pop(later, None)

    # --- what must hold -------------------------------------------------------------------------

    @rule(which=WHICH, devices=st.integers(1, 2))
    def load_on_other_devices(self, which: int, devices: int) -> None:
        if self._whole():
            step = _chosen(self._whole(), which)
            assert self.judge.call(_reshard, self.root, step, self.version[step], devices)

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        type(self).tally.points += 1
        listed = pc.steps(self.root)
        assert sorted(self.version) == listed, f"{sorted(self.version)} must be there, not {listed}"
        for step, version in self.version.items():
            found = self.judge.call(version_at_rest, path_of(self.root, step), step)
            if step not in self.damage:
                assert found == version, f"step {step}: {found}, not version {version}"
            else:
                assert isinstance(found, str), f"step {step} is damaged, and loads as {found}"
        left = sum(self.left.values())
        found = [f"{path.parent.name}/{path.name}" for path in self.root.glob("step_*/data-*")]
        assert len(found) <= KEEP + len(self.damage) + left + 1, found


def _chosen(among: Iterable[T], which: int) -> T:
    ordered = sorted(among)
    return ordered[which % len(ordered)]


def _flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1 << bit]))


def _save(root: Path, step: int, version: int, overwrite: bool) -> None:
    with manager(root, KEEP) as made:
        made.save(step, state(step, version), overwrite=overwrite)


def _roll_back(root: Path, step: int) -> None:
    with manager(root, KEEP) as made:
        made.rollback(step)


def _reshard(root: Path, step: int, version: int, devices: int) -> bool:
    """Load with `large` on other devices than it was saved on; whether it is exact."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("other",))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "other"))
    target: dict[str, Any] = dict(state(step, version))
    target["large"] = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=columns)
    found = pc.load(path_of(root, step), target, reshard=True)
    as_numpy = {k: np.asarray(v) if isinstance(v, jax.Array) else v for k, v in found.items()}
    return is_content({key: as_numpy[key] for key in content(step)}, step, version)


def campaign(judge: Judge, *, examples: int, steps: int) -> Tally:
    """Run the machine; a failure is counted once, with the sequence that leads to it."""
    tally = Tally()
    Machine.judge, Machine.tally = judge, tally
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        run_state_machine_as_test(Machine, settings=settings)
    except Exception as error:  # noqa: BLE001 - a finding
        notes = "\n".join(getattr(error, "__notes__", []))
        tally.wrong("failed", f"{type(error).__name__}: {error}\n{notes}")
    return tally
