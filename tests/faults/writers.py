"""Several processes on one root: who wins, and what a reader sees meanwhile."""

import contextlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytree_ckpt as pc
from pytree_ckpt.store.locations import locate
from tests import stores
from tests.faults import children
from tests.faults.judge import Judge, Tally, stray_files, version_of
from tests.faults.scenarios import content, manager, path_of

_CONTEXT = multiprocessing.get_context("fork")


def _together(jobs: Sequence[Callable[[], Any]], tally: Tally) -> list[Any]:
    """Run each job in a process of its own; their results, None of one that failed."""
    results: list[Any] = []
    pipes = []
    for job in jobs:
        mine, theirs = _CONTEXT.Pipe(duplex=False)

        def run(job: Callable[[], Any] = job, pipe: Any = theirs) -> None:
            try:
                pipe.send((job(), None))
            except BaseException as error:  # noqa: BLE001 - told to the parent
                pipe.send((None, f"{type(error).__name__}: {error}"))

        process = _CONTEXT.Process(target=run)
        process.start()
        theirs.close()
        pipes.append((mine, process))
    for pipe, process in pipes:
        try:
            result, error = pipe.recv()
        except EOFError:
            result, error = None, "it died"
        process.join()
        if error:
            tally.wrong("failed", f"a process: {error}")
        results.append(result)
    return results


def race(judge: Judge, *, processes: int, steps: int) -> Tally:
    """All processes save each step at once: exactly one of them must win it."""
    tally = Tally(points=processes * steps)
    folder = children.scratch()
    root = folder / "root"
    gate = _CONTEXT.Barrier(processes)

    def compete(number: int) -> list[int]:
        won = []
        for step in range(1, steps + 1):
            gate.wait(children.TIMEOUT_S)
            try:
                pc.save(path_of(root, step), content(step, number))
            except pc.ExistsError:
                continue
            won.append(step)
        return won

    try:
        jobs = [lambda number=number: compete(number) for number in range(processes)]
        results = _together(jobs, tally)
        _check_winners(judge, root, steps, results, tally)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def managers(judge: Judge, *, steps: int) -> Tally:
    """Two managers rotate one root: each may delete what the other saved, but not the newest."""
    tally = Tally(points=2 * steps)
    folder = children.scratch()
    root = folder / "root"

    def rotate(times: int = steps) -> int:
        newest = 0
        with manager(root, 2) as made:
            for _ in range(times):
                step = (made.latest_step() or 0) + 1
                if step <= newest:
                    raise RuntimeError(f"step {newest} was acknowledged, {step - 1} is the latest")
                with contextlib.suppress(pc.ExistsError):
                    made.save(step, content(step))
                    newest = step
        return newest

    try:
        newest = max(done or 0 for done in _together([rotate, rotate], tally))
        _together([lambda: rotate(1)], tally)
        for step in (newest, newest + 1):
            if judge.call(version_of, path_of(root, step), step) != 0:
                tally.wrong("lost", f"step {step} does not load")
        if (listed := pc.steps(root)) != [newest, newest + 1]:
            tally.wrong("failed", f"{listed} are listed")
        if stray := list(stray_files(root)):
            tally.wrong("leftovers", ", ".join(stray[:4]), by=len(stray))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def _check_winners(judge: Judge, root: Path, steps: int, results: list[Any], tally: Tally) -> None:
    for step in range(1, steps + 1):
        winners = [number for number, won in enumerate(results) if won and step in won]
        if len(winners) != 1:
            tally.wrong("failed", f"step {step} was won by {winners}")
            continue
        found = judge.call(version_of, path_of(root, step), step)
        if isinstance(found, str):
            tally.wrong("broken", f"step {step}: {found}")
        elif found is None:
            tally.wrong("silent", f"step {step} has values that were never saved")
        elif found != winners[0]:
            tally.wrong("lost", f"step {step} was won by {winners}, it has version {found}")
    stray = list(stray_files(root))
    if stray:
        tally.wrong("leftovers", ", ".join(stray[:4]), by=len(stray))


def race_in_a_store(*, processes: int, steps: int) -> Tally:
    """As `race`, in an object store: of all who save a step at once exactly one wins."""
    tally = Tally(points=processes * steps)
    gate = _CONTEXT.Barrier(processes)

    def place(step: int) -> str:
        return f"s3://races/step_{step:08d}"

    def compete(number: int) -> list[int]:
        won = []
        for step in range(steps):
            gate.wait(children.TIMEOUT_S)
            with contextlib.suppress(pc.ExistsError):
                pc.save(place(step), {"number": number})
                won.append(step)
        return won

    def look() -> list[tuple[int, list[str]]]:
        found = []
        for step in range(steps):
            location: Any = locate(place(step))
            names = location.objects.names(f"{location.key}/")
            found.append((pc.load(place(step))["number"], names))
        return found

    with stores.moto() as port, stores.pointed_to(port):
        stores.make_bucket(port, "races")
        jobs = [lambda number=number: compete(number) for number in range(processes)]
        results = _together(jobs, tally)
        seen = _together([look], tally)[0] or []
    for step, (number, names) in enumerate(seen):
        winners = [at for at, won in enumerate(results) if won and step in won]
        if winners != [number]:
            tally.wrong("failed", f"step {step} was won by {winners}, it is that of {number}")
        left = {name.partition("/")[0] for name in names}
        if len(left) != 2:
            tally.wrong("leftovers", f"step {step}: {sorted(left)}")
    return tally


def readers(*, seconds: float) -> Tally:
    """Loads while one process overwrites a step and another rotates and prunes."""
    tally = Tally()
    folder = children.scratch()
    root, one = folder / "root", folder / "one"
    pc.read_manifest  # noqa: B018 - imported before the fork
    until = time.monotonic() + seconds

    def overwrite() -> int:
        done = 0
        while time.monotonic() < until:
            pc.save(path_of(one, 1), content(1, done % 10), overwrite=True)
            done += 1
        return done

    def rotate() -> int:
        step = 0
        with manager(root, 2) as made:
            while time.monotonic() < until:
                step += 1
                made.save(step, content(step))
                if step % 10 == 0:
                    # A step that is being read stays, and is an error that says so.
                    with contextlib.suppress(pc.CheckpointError):
                        made.rollback(step - 1)
        return step

    def read() -> dict[str, int]:
        seen: dict[str, int] = {}
        while time.monotonic() < until:
            step = pc.latest_step(root) or 1
            for path, number in ((path_of(one, 1), 1), (path_of(root, step), step)):
                kind = _kind(version_of(path, number))
                seen[kind] = seen.get(kind, 0) + 1
        return seen

    try:
        results = _together([overwrite, rotate, read, read], tally)
        for seen in results[2:]:
            for kind, times in (seen or {}).items():
                tally.points += times
                if kind == "silent":
                    tally.wrong("silent", "a load gave values that were never saved", by=times)
                elif kind not in ("whole", "NotFoundError", "CheckpointError"):
                    tally.wrong("broken", f"{times} loads: {kind}", by=times)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def _kind(found: int | str | None) -> str:
    if found is None:
        return "silent"
    return "whole" if isinstance(found, int) else found.partition(":")[0]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
