"""Full and failing disks: each operation refused, each fsync failed, writes cut short, a tmpfs."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pytree_ckpt as pc
from pytree_ckpt.plan import chunking
from tests.faults import children, kill, scenarios
from tests.faults.children import Ended
from tests.faults.judge import Judge, Tally
from tests.faults.kill import Weaken
from tests.faults.scenarios import Scenario, manager, path_of
from tests.faults.shim import CHANGE, GROW, LOOK, SYNC, WRITE, Fault

Faults = Callable[[int], Fault]


def refused(at: int) -> Fault:
    return Fault(action="fail", at=at, argument=errno.EIO, kinds=CHANGE | SYNC | LOOK)


def full_once(at: int) -> Fault:
    return Fault(action="fail", at=at, argument=errno.ENOSPC, kinds=GROW)


def full(at: int) -> Fault:
    return Fault(action="fail", at=at, argument=errno.ENOSPC, kinds=GROW, sticky=True)


def unsynced(at: int) -> Fault:
    return Fault(action="fail", at=at, argument=errno.EIO, kinds=SYNC)


def unsynced_from(at: int) -> Fault:
    return Fault(action="fail", at=at, argument=errno.EIO, kinds=SYNC, sticky=True)


def cut_short(at: int) -> Fault:
    return Fault(action="short", at=at, kinds=WRITE)


ALL: dict[str, Faults] = {
    "EIO at each operation": refused,
    "EIO on each fsync": unsynced,
    "EIO on each fsync and all after it": unsynced_from,
    "ENOSPC at each operation": full_once,
    "ENOSPC at each operation and all after it": full,
    "each write cut short": cut_short,
}


def campaign(
    judge: Judge,
    scenario: Scenario,
    faults: Faults,
    *,
    stride: int = 1,
    weaken: Weaken | None = None,
    stop_early: bool = False,
    backwards: bool = False,
) -> Tally:
    """Fail each operation of a scenario.

    The disk stays within its bound unless a deletion is what failed.
    """
    total = Tally()
    folder = children.scratch()
    space = faults(1).kinds in (GROW, WRITE)
    try:
        for where, work, ended in kill.tries(
            scenario, folder, faults, stride=stride, weaken=weaken, backwards=backwards
        ):
            (work / "root").mkdir(exist_ok=True)
            found = judge.ask(work / "root", scenario, scenario.expect(ended.acks), bound=space)
            _check_error(ended, faults(1), found)
            total.add(found, where=where)
            if stop_early and not total.is_clean:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return total


def _check_error(ended: Ended, fault: Fault, tally: Tally) -> None:
    """What fails must have a name, and say why."""
    if ended.hung or ended.killed:
        tally.wrong("failed", f"the child {'hung' if ended.hung else 'died'}")
    if ended.error is None:
        return
    names, text = ended.error
    reason = os.strerror(fault.argument)
    if fault.action == "short":
        tally.wrong("failed", f"a short write is no error: {text}")
    elif "CheckpointError" not in names and "OSError" not in names:
        tally.wrong("failed", f"an error without a name: {text}")
    elif reason not in text:
        tally.wrong("failed", f"the error does not say {reason!r}: {text}")


# --- a real full disk ---------------------------------------------------------------------------

MIB = 1 << 20


def why_no_tmpfs() -> str | None:
    if os.geteuid() != 0:
        return "mounting a tmpfs needs root"
    if shutil.which("mount") is None:
        return "there is no `mount`"
    place = children.scratch()
    try:
        _mount(place)
    except subprocess.CalledProcessError as error:
        return f"a tmpfs cannot be mounted: {error.stderr.decode().strip()}"
    else:
        subprocess.run(["umount", str(place)], check=True)
    finally:
        place.rmdir()
    return None


def _mount(place: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(place)]
    subprocess.run(command, check=True, capture_output=True)


def _fill(tag: int, nbytes: int) -> dict[str, Any]:
    return {"x": np.full(nbytes, tag, np.uint8)}


def tmpfs() -> Tally:
    """K = 2 on 20 MB: states of 8 MB rotate, one of 19 MB is refused, and nothing is lost."""
    tally = Tally()
    place = children.scratch()
    _mount(place)
    try:
        ended = children.run(_rotate_in_little_space, place / "root")
        wanted = [f"{step}" for step in range(1, 7)]
        tally.points = len(wanted) + 3
        if ended.acks != [*wanted, "refused", "filled", "went on"] or ended.error or ended.hung:
            tally.wrong("failed", f"acknowledged {ended.acks}: {ended.error}")
    finally:
        subprocess.run(["umount", str(place)], check=True)
        place.rmdir()
    return tally


def _rotate_in_little_space(root: Path, acknowledge: children.Acknowledge) -> None:
    chunking.MAX_CHUNK_NBYTES = MIB
    with manager(root, 2) as made:
        for step in range(1, 7):
            made.save(step, _fill(step, 8 * MIB))
            _must_load(root, [step], 8 * MIB)
            acknowledge(str(step))
        _refuse(made, root, 19 * MIB, needed=True)
        _must_load(root, [6], 8 * MIB)
        acknowledge("refused")
        # Others fill the disk between the check of free space and the write.
        from pytree_ckpt.store import disk

        measured, disk.free_nbytes = disk.free_nbytes, lambda path: None
        _refuse(made, root, 19 * MIB, needed=False)
        disk.free_nbytes = measured
        _must_load(root, [6], 8 * MIB)
        if list((root / "step_00000007").glob("*")):
            raise RuntimeError("a refused save left files")
        acknowledge("filled")
        made.save(7, _fill(7, 8 * MIB))
        _must_load(root, [6, 7], 8 * MIB)
        acknowledge("went on")


def _refuse(made: pc.CheckpointManager, root: Path, nbytes: int, *, needed: bool) -> None:
    try:
        made.save(7, _fill(7, nbytes))
    except OSError as error:
        text = str(error)
        if error.errno != errno.ENOSPC or (needed and not ("needs" in text and "free" in text)):
            raise RuntimeError(f"the error does not say enough: {text}") from error
    else:
        raise RuntimeError(f"{nbytes} bytes were saved on a disk of 20 MB")


def _must_load(root: Path, steps: list[int], nbytes: int) -> None:
    for step in steps:
        with pc.open(path_of(root, step)) as checkpoint:
            if not np.array_equal(checkpoint["x"][:], _fill(step, nbytes)["x"]):
                raise RuntimeError(f"step {step} has other values")


def all_scenarios(judge: Judge, faults: Faults, stride: int) -> Tally:
    """The campaign on all scenarios."""
    total = Tally()
    for scenario in scenarios.all_scenarios():
        total.add(campaign(judge, scenario, faults, stride=stride))
    return total
