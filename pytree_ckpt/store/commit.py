"""The commit protocol on a file system: what makes a checkpoint appear, change and go, at once.

A save writes only below a fresh `data-<nonce>/`. The checkpoint appears when its manifest does.
"""

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from pytree_ckpt.errors import CheckpointError, ExistsError, FormatError, NotFoundError
from pytree_ckpt.format import manifest_file, wire
from pytree_ckpt.format.manifest import DATA_ENTRIES, MANIFEST_FILE, Manifest, data_dir, is_data_dir
from pytree_ckpt.store import absence, disk

_TEMPORARY = re.compile(r"manifest\.[0-9a-f]{32}\.tmp", re.ASCII)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises:
        NotFoundError: Nothing there, not a checkpoint, or a save that never committed.
        NewerFormatError: A newer release wrote it.
        FormatError: The manifest is damaged, or a link.
    """
    file = path / MANIFEST_FILE
    try:
        data = disk.read_file(file, max_nbytes=wire.MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(absence.why_not_found(path)) from None
    except OSError as error:
        if error.errno in disk.NO_FILE and path.is_dir():
            raise FormatError(f"{file} is not a regular file") from None
        raise
    return manifest_file.from_bytes(data, what=str(file))


def data_folders(path: Path) -> list[Path]:
    """The folders in which saves to this place have put their data."""
    return [path / name for name in os.listdir(path) if is_data_dir(name)]


def is_committed(path: Path) -> bool:
    """Whether a checkpoint, good or damaged, is at this place.

    Raises:
        OSError: It may not be looked for.
    """
    try:
        os.lstat(path / MANIFEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
    return True


def open_to_read(path: Path) -> tuple[Manifest, disk.FolderLock]:
    """The manifest, and a lock that keeps its data in place while it is read.

    Raises:
        NotFoundError, FormatError: As `read_manifest`; the data folder is gone.
    """
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(path)
        lock = disk.FolderLock(path / manifest.data_dir, shared=True)
        if lock.state in ("held", "unsupported"):
            return manifest, lock
        lock.release()
        if lock.state == "busy":
            # The writer has just committed it, or whoever deletes it has it.
            time.sleep(_BUSY_S)
        elif read_manifest(path).nonce == manifest.nonce:
            # No save has replaced it: the folder itself is lost, and the reader will say so.
            return manifest, lock
    raise CheckpointError(f"{path} was held or replaced again and again while it was opened")


_ATTEMPTS = 100
_BUSY_S = 0.05


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a checkpoint folder while its manifest is replaced or removed, which takes a moment.

    Else a deletion could take a new manifest for the one that it has looked at. Where folders
    cannot be locked, nobody waits.

    Raises:
        CheckpointError: Another process held it all the time.
    """
    folder = Path(os.path.realpath(path))  # a link to it is one more name of what is locked
    for _ in range(_ATTEMPTS):
        with disk.FolderLock(folder, shared=False) as lock:
            if lock.state != "busy":
                yield
                return
        time.sleep(_BUSY_S)
    raise CheckpointError(f"another process holds {path}: it replaces or deletes its manifest")


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise at once what a save to this place would run into, as far as a glance tells.

    Raises:
        ExistsError: There is a file, or a checkpoint that must not be replaced.
        OSError: The place cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise ExistsError(f"{path} is a file; a checkpoint needs a folder")
    if is_committed(path) and not overwrite:
        raise ExistsError(f"{path} already holds a checkpoint; pass overwrite=True to replace it")
    disk.check_writable(path)


@contextlib.contextmanager
def attempt(
    path: Path, *, overwrite: bool, needed_nbytes: int, nonce: str | None = None
) -> Iterator["Attempt"]:
    """One save: a data folder of its own, which is removed unless the block commits.

    With a nonce the folder is named by it; one that a dead attempt left is removed first.

    Raises:
        ExistsError: There is a checkpoint and `overwrite` is False.
        OSError: The place cannot be written, or has too little free space.
    """
    check_free(path, overwrite=overwrite)
    made = disk.make_dirs(path)
    try:
        reclaim(path)
        _check_space(path, needed_nbytes)
        nonce, lock = _fresh_data_dir(path, made, nonce)
    except BaseException:
        _remove_empty(made)
        raise
    with lock:
        current = Attempt(path, nonce, made, lock, overwrite=overwrite)
        try:
            yield current
        except BaseException:
            if not current.committed:
                current.abandon()
            raise
        reclaim(path)


def sees(path: Path, nonce: str) -> bool:
    """Whether this process finds the data folder that another process has made for a save."""
    folder = path / data_dir(nonce)
    until = time.monotonic() + _VISIBLE_S
    while not folder.is_dir():
        if time.monotonic() > until:
            return False
        time.sleep(_BUSY_S)
    return True


_VISIBLE_S = 1.0
"""Shared file systems may take a moment to show one machine what another has made."""


@contextlib.contextmanager
def resumable_attempt(
    path: Path, nonce: str, *, overwrite: bool, needed_nbytes: int
) -> Iterator["Attempt"]:
    """One save, perhaps by several processes, in a data folder of a known name.

    What is in the folder stays whatever happens, for the next attempt of this name; any other
    save to this place reclaims it. The lock is shared: it keeps reclaimers out, not the peers.

    Raises:
        ExistsError: There is a checkpoint and `overwrite` is False.
        OSError: The place cannot be written, or has too little free space.
    """
    check_free(path, overwrite=overwrite)
    made, folder = disk.make_dirs(path), path / data_dir(nonce)
    for _ in range(_ATTEMPTS):
        made += [new for new in disk.make_dirs(folder) if new.parent != path]
        with disk.FolderLock(folder, shared=True) as lock:
            if lock.state in ("held", "unsupported"):
                reclaim(path, keep=folder.name)
                _check_space(path, needed_nbytes - disk.nbytes_below(folder))
                yield Attempt(path, nonce, made, lock, overwrite=overwrite)
                reclaim(path, keep=folder.name)
                return
        time.sleep(_BUSY_S)  # Somebody is taking it for a leftover.
    raise CheckpointError(f"another process holds {path}, again and again")


def _check_space(path: Path, needed_nbytes: int) -> None:
    free = disk.free_nbytes(path)
    if free is not None and free < needed_nbytes:
        raise OSError(
            errno.ENOSPC,
            f"the checkpoint needs about {needed_nbytes} bytes, {free} are free",
            str(path),
        )


def _fresh_data_dir(
    path: Path, made: list[Path], wanted: str | None
) -> tuple[str, disk.FolderLock]:
    """A new data folder, locked before a reclaimer could take it for a leftover.

    A reclaimer may also have taken `path` while it was empty; it is then made again.
    """
    while True:
        nonce = wanted or secrets.token_hex(16)
        folder = path / data_dir(nonce)
        try:
            folder.mkdir()
        except FileNotFoundError:
            made[:] = [*(new for new in disk.make_dirs(path) if new not in made), *made]
            continue
        try:
            lock = disk.FolderLock(folder, shared=False)
        except OSError:
            folder.rmdir()
            raise
        if lock.state in ("held", "unsupported"):
            return nonce, lock
        lock.release()
        with contextlib.suppress(OSError):
            folder.rmdir()  # else the same name could not be made again


def _remove_empty(made: list[Path]) -> None:
    for folder in made:
        try:
            folder.rmdir()
        except OSError:
            return


class Attempt:
    """A save that is under way, below `folder`."""

    def __init__(
        self,
        path: Path,
        nonce: str,
        made: list[Path],
        lock: disk.FolderLock,
        *,
        overwrite: bool,
    ) -> None:
        self.path = path
        self.nonce = nonce
        self.folder = path / data_dir(nonce)
        self.temporary = path / f"manifest.{nonce}.tmp"
        self.committed = False
        self._made = made
        self._lock = lock
        self._overwrite = overwrite

    def commit(self, data: bytes) -> None:
        """Make the checkpoint appear, durably, all at once; what it replaces goes with the end.

        The data below `folder` must be durable up to `folder` itself.

        Raises:
            ExistsError: Another save committed first and `overwrite` is False.
        """
        path = self.path
        disk.fsync_dir(self.folder)
        disk.fsync_dir(path)
        disk.fsync_above(path, made=self._made)
        disk.write_new(self.temporary, data)
        if self._overwrite:
            with one_at_a_time(self.path):
                os.replace(self.temporary, path / MANIFEST_FILE)
        else:
            self._create()
        self.committed = True
        # Readers need not wait for what is left to do.
        self._lock.share()
        disk.fsync_dir(path)

    def abandon(self) -> None:
        """Take back what this save made. What cannot be removed now is reclaimed later.

        If it was interrupted when its manifest had a name already, it stays, whole.
        """
        try:
            if _named(self.path) in (self.folder.name, _UNKNOWN):
                return
            self.temporary.unlink(missing_ok=True)
            disk.remove_tree(self.folder)
        except OSError:
            return
        _remove_empty(self._made)

    def _create(self) -> None:
        """Name the manifest, unless there is one: a link is exclusive where a rename is not."""
        target = self.path / MANIFEST_FILE
        try:
            os.link(self.temporary, target, follow_symlinks=False)
        except FileExistsError:
            raise ExistsError(
                f"another save committed to {self.path} while this one was written"
            ) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            self._create_without_links(target)
        else:
            self.temporary.unlink(missing_ok=True)

    def _create_without_links(self, target: Path) -> None:
        with one_at_a_time(self.path):
            if os.path.lexists(target):
                raise ExistsError(f"another save committed to {self.path} first")
            os.rename(self.temporary, target)


def settle(path: Path) -> None:
    """Make a manifest durable that has its name, and remove what it replaces.

    Whoever named it may have died before both.
    """
    disk.fsync_dir(path)
    reclaim(path)


def reclaim(path: Path, *, keep: str | None = None) -> None:
    """Remove what dead saves left in a checkpoint folder, and data that was replaced.

    A data folder goes only if it is not `keep`, no manifest names it, no living writer holds it,
    and nothing is in it that no save puts there. What cannot be removed now is left for the next
    save.
    """
    try:
        _reclaim(path, keep)
    except OSError:
        return


def _reclaim(path: Path, keep: str | None) -> None:
    names = os.listdir(path)
    data = [n for n in names if is_data_dir(n) and n != keep]
    temporary = [n for n in names if _TEMPORARY.fullmatch(n)]
    if not temporary and len(data) <= is_committed(path):
        return
    named = _named(path)
    data = [n for n in data if n != named]
    if data and named != _UNKNOWN:
        # Whoever replaced or unlinked the manifest may have died before that was durable. Without
        # this a power cut could bring the old manifest back, but not its data.
        disk.fsync_dir(path)
        for name in data:
            _reclaim_data(path, path / name)
    for name in temporary:
        folder = data_dir(name.split(".")[1])
        if folder == named or not os.path.lexists(path / folder):
            (path / name).unlink(missing_ok=True)


def _reclaim_data(path: Path, folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    if not DATA_ENTRIES.issuperset(os.listdir(folder)):
        return
    with disk.FolderLock(folder, shared=False) as lock:
        # Only with the lock held is it certain that nobody is about to commit this folder.
        if lock.state == "held" and _named(path) not in (folder.name, _UNKNOWN):
            (path / f"manifest.{folder.name[5:]}.tmp").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                disk.remove_tree(folder)


_UNKNOWN = "?"


def _named(path: Path) -> str | None:
    """The data folder that the manifest names; a damaged manifest may name any."""
    try:
        return read_manifest(path).data_dir
    except NotFoundError:
        return None
    except (CheckpointError, OSError):
        return _UNKNOWN
