"""Folders and small files on a local file system, and what makes them durable.

A file is durable after fsync of the file and of every folder above it that is new.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, NoReturn, Self

NO_FILE = (errno.ELOOP, errno.EINVAL, errno.EISDIR)
"""How `read_file` refuses what is there, but no regular file."""
_FILE_MODE = 0o666
_MOST_PARTS = 1024
"""That `writev` takes on Linux and macOS."""
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def fsync_dir(path: Path) -> None:
    """Make the entries of a folder durable, where the file system has a call for it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    with _closed(fd, path):
        try:
            os.fsync(fd)
        except OSError as error:
            # Such as a share of SMB, or a folder that a virtual machine has from its host.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise


def fsync_file(path: Path | str) -> None:
    """Make a file durable that was written before, but for its folder; links are not followed."""
    fd = open_file(path)
    with _closed(fd, path):
        os.fsync(fd)


@contextlib.contextmanager
def _closed(fd: int, path: Path | str) -> Iterator[None]:
    """Close a descriptor after the block; what fails in between says of which file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)


def fsync_above(path: Path, *, made: Collection[Path]) -> None:
    """Make the entries that lead to a folder durable, as far up as this user can have made them.

    Also those that are not in `made`: a save that died may have made them, and synced nothing.
    """
    must = {new.parent for new in made}
    device = path.stat().st_dev
    for folder in path.parents:
        if folder in must or (
            folder.stat().st_dev == device and os.access(folder, os.R_OK | os.W_OK)
        ):
            fsync_dir(folder)
        else:
            return


def check_writable(path: Path) -> None:
    """Raise what making files in a folder would raise, as far as a glance tells.

    A folder that is missing is made, so what counts is the one above it.

    Raises:
        OSError: A read-only file system, no permission, or a file in the way.
    """
    at = path
    while not at.exists():
        at = at.parent
    code = 0
    if not at.is_dir():
        code = errno.ENOTDIR
    elif not os.access(at, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        code = errno.EROFS if os.statvfs(at).f_flag & os.ST_RDONLY else errno.EACCES
    if code:
        raise OSError(code, os.strerror(code), str(at))


def make_dirs(path: Path) -> list[Path]:
    """Make a folder and what is missing above it.

    Returns:
        The folders that are new, deepest first: fsync the parent of each to make them last.
    """
    missing = []
    at = path
    while not at.exists():
        missing.append(at)
        at = at.parent
    for folder in reversed(missing):
        try:
            folder.mkdir()
        except FileExistsError:
            if not folder.is_dir():
                raise
    return missing


def make_dir(path: Path) -> None:
    """Make a folder, unless another process has; a link in its place is refused.

    Raises:
        FileExistsError: There is something else.
    """
    try:
        path.mkdir()
    except FileExistsError:
        if path.is_symlink() or not path.is_dir():
            raise


def write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet, durably but for its folder; links are not followed."""
    fd = create(path)
    with _closed(fd, path):
        write_all(fd, data)
        os.fsync(fd)


def create(path: Path | str) -> int:
    """A descriptor to write a file with that must not exist yet; links are not followed."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, _FILE_MODE)


def write_all(fd: int, *parts: bytes | memoryview) -> None:
    """Write bytes one after the other; the system may take fewer at a time."""
    rest = [memoryview(part) for part in parts]
    at = 0
    while at < len(rest):
        done = os.writev(fd, rest[at : at + _MOST_PARTS])
        while at < len(rest) and done >= len(rest[at]):
            done -= len(rest[at])
            at += 1
        if done:
            rest[at] = rest[at][done:]


def read_file(path: Path, *, max_nbytes: int) -> bytes:
    """The bytes of a regular file, at most `max_nbytes` + 1 of them; links are not followed.

    Raises:
        FileNotFoundError: No such file.
        OSError: A link (ELOOP), a folder, or unreadable.
    """
    with os.fdopen(open_file(path), "rb") as file:
        return file.read(max_nbytes + 1)


def open_file(path: Path | str) -> int:
    """A descriptor to read a regular file with; links are not followed.

    Raises:
        FileNotFoundError: No such file.
        OSError: A link (ELOOP), not a regular file (EINVAL), or unreadable.
    """
    fd = os.open(path, os.O_RDONLY | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0))
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def remove_tree(path: Path) -> None:
    """Remove a file, a link or a folder with all in it; links are removed, never followed."""
    try:
        entries = os.scandir(path) if not path.is_symlink() and path.is_dir() else None
    except FileNotFoundError:
        return
    if entries is None:
        path.unlink(missing_ok=True)
        return
    with entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path))
            else:
                Path(entry.path).unlink(missing_ok=True)
    try:
        path.rmdir()
    except FileNotFoundError:
        return


def nbytes_below(path: Path) -> int:
    """Bytes of all files in a folder, and in the folders in it; links are not followed."""
    found = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += os.lstat(os.path.join(folder, name)).st_size
    return found


def free_nbytes(path: Path) -> int | None:
    """Bytes that this user may still write on the file system of `path`, None if unknown."""
    try:
        found = os.statvfs(path)
    except FileNotFoundError:
        return None  # another process has taken it for a leftover
    return found.f_bavail * found.f_frsize if found.f_blocks else None


LockState = Literal["held", "busy", "gone", "unsupported"]


class FolderLock:
    """A lock on a folder that ends with the process, whatever happens to it.

    A writer and a reclaimer hold it exclusively, readers share it. No file is made for it, and
    read permission is enough. `state` says how it went: "busy" if another process has it, "gone"
    if the folder is no longer there, "unsupported" where the file system has no such locks.

    Raises:
        OSError: This process, or the system, can open no more files.
    """

    _fd: int | None = None

    def __init__(self, path: Path, *, shared: bool) -> None:
        self._pid = os.getpid()
        self.state: LockState = "gone"
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_FOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise  # says nothing of the folder, which another process may have locked
            self.state = "unsupported"
            return
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            busy = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            self.state = "busy" if busy else "unsupported"
        else:
            self.state = "held" if self._is_still(path, self._fd) else "gone"

    @staticmethod
    def _is_still(path: Path, fd: int) -> bool:
        """Whether `path` still names the folder that is open as `fd`."""
        try:
            return os.path.samestat(os.lstat(path), os.fstat(fd))
        except FileNotFoundError:
            return False

    def share(self) -> None:
        """Let readers in; another writer still stays out."""
        if self._fd is not None and self.state == "held":
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        """Give the lock back; again is harmless."""
        fd = self._fd
        if fd is not None:
            # A child that was forked meanwhile has the lock open too: closing here would leave it
            # locked as long as the child lives, and unlocking there would take it from its owner.
            if os.getpid() == self._pid:
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
            self._fd = None  # not before: who is interrupted in between still has it to give back
            os.close(fd)

    def __reduce__(self) -> NoReturn:
        # A copy would close what is open here, or by then in another place of the program.
        raise TypeError("what holds a checkpoint open can be neither copied nor pickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        # When the interpreter ends its modules go first; the kernel gives the lock back.
        if os is not None:
            self.release()
