"""Hours of a run in minutes: random kills, rotation, loads; nothing may grow."""

import os
import random
import shutil
import time
from pathlib import Path

import pytree_ckpt as pc
from tests.faults import children
from tests.faults.judge import Tally, version_of
from tests.faults.scenarios import manager, path_of, state
from tests.faults.writers import open_descriptors

KEEP = 3


def campaign(*, minutes: float, seed: int = 0) -> Tally:
    """Half the time runs that are killed at random moments, half of it one long run."""
    tally = Tally()
    folder = children.scratch()
    try:
        _killed_runs(folder / "killed", time.monotonic() + 30 * minutes, seed, tally)
        _long_run(folder / "long", time.monotonic() + 30 * minutes, tally)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def _killed_runs(root: Path, until: float, seed: int, tally: Tally) -> None:
    rng = random.Random(seed)
    newest = 0

    def train(root: Path, acknowledge: children.Acknowledge) -> None:
        with manager(root, KEEP) as made:
            step = made.latest_step() or 0
            while True:
                step += 1
                made.save(step, state(step))
                acknowledge(str(step))

    while time.monotonic() < until:
        ended = children.run(train, root, kill_after_s=rng.uniform(0.1, 0.8))
        tally.points += 1
        newest = max([newest, *map(int, ended.acks)])
        if ended.error:
            tally.wrong("failed", ended.error[1])
        _look(root, newest, tally)
        if (found := len(list(root.glob("step_*/data-*")))) > KEEP:
            tally.wrong("failed", f"{found} data folders, at most {KEEP}")


def _look(root: Path, newest: int, tally: Tally) -> None:
    listed = pc.steps(root)
    if newest and (not listed or listed[-1] < newest):
        tally.wrong("lost", f"step {newest} was acknowledged; {listed} are listed")
    # Reading starts threads, after which this process must not fork: a child does it.
    ended = children.run(lambda root, tell: _load_all(root, tell), root)
    for told in ended.acks:
        tally.wrong(*told.split(" ", 1))
    if ended.error or ended.hung:
        tally.wrong("failed", f"a look: {ended}")


def _load_all(root: Path, acknowledge: children.Acknowledge) -> None:
    for step in pc.steps(root):
        found = version_of(path_of(root, step), step)
        if found != 0:
            acknowledge(f"{'silent' if found is None else 'broken'} step {step}: {found}")


def _long_run(root: Path, until: float, tally: Tally) -> None:
    def train(root: Path, acknowledge: children.Acknowledge) -> None:
        start = time.monotonic()
        at_rest: tuple[int, int, int] | None = None
        with manager(root, KEEP) as made:
            step = 0
            while time.monotonic() < until:
                step += 1
                made.save(step, state(step))
                if version_of(path_of(root, step), step) != 0:
                    raise RuntimeError(f"step {step} does not load")
                now = time.monotonic()
                if at_rest is None and step > 20 and now - start > (until - start) / 3:
                    at_rest = _measure(root)
        descriptors, memory, disk = _measure(root)
        acknowledge(str(step))
        if at_rest is None:
            raise RuntimeError(f"too little time: {step} steps")
        if descriptors > at_rest[0] or disk > at_rest[1 + 1] + 8192:
            raise RuntimeError(f"descriptors, memory, disk were {at_rest}, are {_measure(root)}")
        if memory > 1.1 * at_rest[1] + (16 << 20):
            raise RuntimeError(f"memory grew from {at_rest[1]} to {memory} bytes")

    ended = children.run(train, root, kill_after_s=until - time.monotonic() + 60)
    tally.points += int(ended.acks[0]) if ended.acks else 0
    if ended.error or ended.killed or ended.hung:
        tally.wrong("failed", f"the long run: {ended.error or ended}")


def _measure(root: Path) -> tuple[int, int, int]:
    """Open descriptors, resident bytes, bytes on disk."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files = [path.lstat().st_size for path in root.rglob("*") if path.is_file()]
    return open_descriptors(), resident, sum(files)
