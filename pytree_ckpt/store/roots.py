"""Folders of numbered checkpoints: what is in them, and how one is deleted."""

import contextlib
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pytree_ckpt.errors import CheckpointError, NewerFormatError, NotFoundError
from pytree_ckpt.format.manifest import MANIFEST_FILE, Manifest
from pytree_ckpt.format.steps import StepNames
from pytree_ckpt.store import commit, contents, disk
from pytree_ckpt.store.locations import Location

QUARANTINE_FILE = "damaged.txt"
"""Marks a checkpoint that a load found damaged: its data folder in the first line, then why."""
_NO_MANIFEST = "the manifest"
_MAX_MARK_NBYTES = 1 << 20


def committed_steps(root: Path, names: StepNames) -> list[int]:
    """Steps that have a manifest, ascending. A root that does not exist has none.

    Raises:
        OSError: The root, or the folder of a step, cannot be read.
    """
    try:
        entries = os.listdir(root)
    except FileNotFoundError:
        return []
    found = ((names.step(entry), entry) for entry in entries)
    return sorted(
        step
        for step, entry in found
        if step is not None and commit.is_committed(Location(root / entry))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """A committed step as a glance shows it: its manifest, or what is wrong with it.

    Attributes:
        is_damaged: The trouble is damage. Otherwise the step may be whole, but cannot be read now,
            or not by this release.
    """

    step: int
    is_link: bool
    manifest: Manifest | None = None
    trouble: str | None = None
    is_damaged: bool = False

    @property
    def is_good(self) -> bool:
        return self.trouble is None


def look(root: Path, names: StepNames) -> list[StepState]:
    """Every committed step: manifests are read, files counted and measured, no data is read.

    Raises:
        OSError: The root cannot be read.
    """
    found = (_look_at(root / names.name(step), step) for step in committed_steps(root, names))
    return [state for state in found if state is not None]


def _look_at(path: Path, step: int) -> StepState | None:
    """A step, None if it has just been deleted."""
    state = partial(StepState, step=step, is_link=path.is_symlink())
    if is_marked(path):
        return state(trouble=f"marked as damaged, see {path / QUARANTINE_FILE}", is_damaged=True)
    try:
        manifest = commit.read_manifest(Location(path))
        damage = contents.missing_files(path / manifest.data_dir, manifest)
    except NotFoundError:
        return None
    except (NewerFormatError, OSError) as error:
        return state(trouble=str(error))
    except CheckpointError as error:
        return state(trouble=str(error), is_damaged=True)
    if damage:
        return state(manifest=manifest, trouble=str(damage[0]), is_damaged=True)
    return state(manifest=manifest)


def unfinished(root: Path, names: StepNames) -> list[tuple[int, bool]]:
    """Steps that have data but no manifest, each with whether somebody is writing it.

    Raises:
        OSError: The root cannot be read.
    """
    found = []
    for entry in os.listdir(root):
        step, path = names.step(entry), root / entry
        if step is None or path.is_symlink() or not path.is_dir():
            continue
        data = commit.data_folders(path)
        if data and not commit.is_committed(Location(path)):
            locks = [disk.FolderLock(folder, shared=True) for folder in data]
            found.append((step, any(lock.state == "busy" for lock in locks)))
            for lock in locks:
                lock.release()
    return found


def latest_whole(root: Path, names: StepNames, *, below: int) -> Path | None:
    """The newest step below `below` that is not marked, and whose manifest and tables are sound."""
    for step in reversed(committed_steps(root, names)):
        path = root / names.name(step)
        if step >= below or is_marked(path):
            continue
        try:
            manifest = commit.read_manifest(Location(path))
            for process in range(len(manifest.tables)):
                contents.read_table(path / manifest.data_dir, manifest, process)
        except (CheckpointError, OSError):
            continue
        return path
    return None


def quarantine(path: Path, reason: str) -> None:
    """Mark a checkpoint as damaged and leave it in place; where that is refused, nothing."""
    text = f"{_data_dir(path) or _NO_MANIFEST}\n{reason}\n"
    try:
        unmark(path)
        disk.write_new(path / QUARANTINE_FILE, text.encode("utf-8", "replace")[:_MAX_MARK_NBYTES])
        disk.fsync_dir(path)
    except OSError:
        return


def is_marked(path: Path) -> bool:
    """Whether a checkpoint is marked; the mark of one that was replaced since says nothing."""
    try:
        mark = disk.read_file(path / QUARANTINE_FILE, max_nbytes=_MAX_MARK_NBYTES)
    except OSError:
        return False
    found = _data_dir(path)
    return found is None or mark.split(b"\n", 1)[0] == found.encode()


def _data_dir(path: Path) -> str | None:
    """The data folder that the manifest names, None where it cannot be read."""
    try:
        return commit.read_manifest(Location(path)).data_dir
    except (CheckpointError, OSError):
        return None


def unmark(path: Path) -> None:
    """Remove the mark, if there is one."""
    (path / QUARANTINE_FILE).unlink(missing_ok=True)


def reclaim(root: Path, names: StepNames) -> None:
    """Remove what dead saves, and deletions that were cut short, left in the steps of a root.

    Links are not followed, and what a living writer holds stays.

    Raises:
        OSError: The root cannot be read.
    """
    try:
        entries = os.listdir(root)
    except FileNotFoundError:
        return
    for entry in entries:
        path = root / entry
        if names.step(entry) is None or path.is_symlink() or not path.is_dir():
            continue
        commit.reclaim(Location(path))
        if not commit.is_committed(Location(path)):
            with contextlib.suppress(OSError):
                path.rmdir()


def settle(root: Path, names: StepNames, steps: Iterable[int]) -> None:
    """Make steps durable whose save may have died right after its commit.

    To be done before others are deleted in their favour.

    Raises:
        OSError: The storage refused.
    """
    for step in steps:
        disk.fsync_dir(root / names.name(step))
    disk.fsync_dir(root)


def delete(path: Path) -> bool:
    """Delete the checkpoint in a folder: the manifest first, then the data, then the folder.

    Files that are no part of a checkpoint stay, and with them the folder.

    Returns:
        False, and nothing is touched, if it is being read, was just replaced, or is reached
        through a link.

    Raises:
        OSError: The storage refused.
        CheckpointError: Another process keeps the folder from being changed.
    """
    if path.is_symlink():
        return False
    location = Location(path)
    try:
        named = commit.read_manifest(location).data_dir
    except CheckpointError:
        return _remove(location, None)
    with disk.FolderLock(path / named, shared=False) as lock:
        return lock.state != "busy" and _remove(location, named)


def _remove(location: Location, named: str | None) -> bool:
    """Delete, unless the manifest names other data by now; None if it could not be read."""
    path = location.path
    with commit.one_at_a_time(location):
        if _data_dir(path) not in (named, None):
            return False
        (path / MANIFEST_FILE).unlink(missing_ok=True)
    disk.fsync_dir(path)
    if named is not None:
        disk.remove_tree(path / named)
    commit.reclaim(location)
    unmark(path)
    _remove_if_empty(path)
    disk.fsync_dir(path.parent)
    return True


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
