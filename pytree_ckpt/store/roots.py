"""Folders of numbered checkpoints on a disk: what is in them, and how one is deleted."""

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.format.manifest import MANIFEST_FILE, PIN_FILE, QUARANTINE_FILE
from pytree_ckpt.format.steps import StepNames
from pytree_ckpt.store import commit, disk


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
        step for step, entry in found if step is not None and commit.is_committed(root / entry)
    )


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
        if data and not commit.is_committed(path):
            locks = [disk.FolderLock(folder, shared=True) for folder in data]
            found.append((step, any(lock.state == "busy" for lock in locks)))
            for lock in locks:
                lock.release()
    return found


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
        commit.reclaim(path)
        if not commit.is_committed(path):
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
    try:
        named = commit.read_manifest(path).data_dir
    except CheckpointError:
        named = None
    try:
        if named is None:
            return _remove(path, None)
        with disk.FolderLock(path / named, shared=False) as lock:
            return lock.state != "busy" and _remove(path, named)
    except FileNotFoundError:
        return True  # Somebody else has deleted it meanwhile, with its folder.


def _remove(path: Path, named: str | None) -> bool:
    """Delete, unless the manifest names other data by now; None if it could not be read."""
    with commit.one_at_a_time(path):
        # Where there is none, because somebody else deleted it, a save may make one at any moment.
        if commit.is_committed(path):
            if _data_dir(path) not in (named, None):
                return False
            (path / MANIFEST_FILE).unlink()
    disk.fsync_dir(path)
    if named is not None:
        disk.remove_tree(path / named)
    commit.reclaim(path)
    for mark in (QUARANTINE_FILE, PIN_FILE):
        (path / mark).unlink(missing_ok=True)
    _remove_if_empty(path)
    disk.fsync_dir(path.parent)
    return True


def _data_dir(path: Path) -> str | None:
    """The data folder that the manifest names, None if it is damaged."""
    try:
        return commit.read_manifest(path).data_dir
    except CheckpointError:
        return None


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
