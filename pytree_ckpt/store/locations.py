"""Where checkpoints are: what a user gave, made absolute once, and what every storage can do."""

import errno
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.format.steps import StepNames

PathLike = str | os.PathLike[str]
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_STORES = ("s3", "gs", "memory")
_URL_FROM_PATHLIB = re.compile(r"(abfss?|az|file|gcs|gs|hdfs|https?|memory|s3):/(?!/)")

SizeOf = Callable[["Location"], int | None]
"""Size of a file in bytes, None where the storage tells only that it is there.

Raises:
    FileNotFoundError: It is not there.
"""


class Attempt(Protocol):
    """A save that is under way: it writes below `data-<nonce>` and ends with `commit`."""

    nonce: str

    def commit(self, data: bytes) -> None:
        """Make the checkpoint appear, durably, all at once; what it replaces goes with the end.

        Args:
            data: The manifest. What it names must be durable.

        Raises:
            ExistsError: Another save committed first and must not be replaced.
        """


class Location(ABC):
    """A place: of a file, of a checkpoint, or of a root of numbered checkpoints.

    There are two kinds, a `Folder` on a disk and a `Prefix` in an object store, and each has a
    protocol of its own to commit, replace and delete.
    """

    @abstractmethod
    def __truediv__(self, name: str) -> "Location":
        """A place below this one."""

    @property
    @abstractmethod
    def path(self) -> Path | None:
        """Where it is on a disk; None in a store, which has no links, pipes or folders."""

    @property
    def in_errors(self) -> str:
        """What a failure of the storage says of where it was."""
        return str(self)

    # --- a file, or a folder of files -----------------------------------------------------------

    @abstractmethod
    def kvstore(self) -> Any:
        """TensorStore's view of all that is below, for arrays."""

    @abstractmethod
    def make_folder(self) -> None:
        """Make a folder in one that is there."""

    @abstractmethod
    def sync(self) -> None:
        """Make the entries of a folder durable."""

    @abstractmethod
    def read_file(self, *, max_nbytes: int) -> bytes:
        """The bytes of a file; more than `max_nbytes` if it has more.

        Raises:
            FileNotFoundError: No such file.
            OSError: Not a regular file (ELOOP, EINVAL, EISDIR), or the storage failed.
        """

    @abstractmethod
    def write_new(self, data: bytes) -> None:
        """Write a file that is not there yet, durably but for the entry in its folder."""

    @abstractmethod
    def remove_file(self) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def sizes(self) -> SizeOf:
        """What tells the sizes of the files below."""

    # --- a checkpoint ---------------------------------------------------------------------------

    @abstractmethod
    def read_manifest(self) -> Manifest:
        """The manifest of a committed checkpoint.

        Raises:
            NotFoundError: Nothing there, not a checkpoint, or a save that never committed.
            FormatError: The manifest is damaged, of a newer version, or a link.
        """

    @abstractmethod
    def open_to_read(self) -> tuple[Manifest, ExitStack]:
        """The manifest, and what keeps its data in place, where locks do, until it is closed.

        Raises:
            NotFoundError, FormatError: As `read_manifest`.
        """

    @abstractmethod
    def check_free(self, *, overwrite: bool) -> None:
        """Raise an `ExistsError` if there is a checkpoint that must not be replaced."""

    @abstractmethod
    def attempt(
        self, *, overwrite: bool, needed_nbytes: int, writers: int = 1, nonce: str | None = None
    ) -> AbstractContextManager[Attempt]:
        """One save of so many processes; what it wrote is removed unless the block commits.

        A copy has the nonce of what it is a copy of.

        Raises:
            ExistsError: There is a checkpoint and `overwrite` is False.
            OSError: The place cannot be written, or has too little free space.
            CheckpointError: The storage cannot keep several writers apart.
        """

    @abstractmethod
    def sees(self, nonce: str) -> bool:
        """Whether this process finds what another has begun to save here."""

    @abstractmethod
    def delete(self) -> bool:
        """Delete the checkpoint: the manifest first, then the data.

        Returns:
            False, and nothing is touched, if it is being read or is reached through a link.
        """

    # --- a root of numbered checkpoints ---------------------------------------------------------

    @abstractmethod
    def steps_and_sizes(self, names: StepNames) -> tuple[list[int], SizeOf]:
        """Steps that have a manifest, ascending, and what tells the sizes of their files.

        A root that does not exist has none.

        Raises:
            OSError: The root, or the folder of a step, cannot be read.
        """

    def committed_steps(self, names: StepNames) -> list[int]:
        """Steps that have a manifest, ascending; errors as `steps_and_sizes`."""
        return self.steps_and_sizes(names)[0]

    @abstractmethod
    def unfinished(self, names: StepNames) -> list[tuple[int, bool]]:
        """Steps that have data but no manifest, each with whether somebody is writing it.

        Raises:
            OSError: The root cannot be read.
        """

    @abstractmethod
    def reclaim(self, names: StepNames) -> None:
        """Remove what dead saves, and deletions that were cut short, left in the steps."""

    @abstractmethod
    def settle(self, names: StepNames, steps: Iterable[int]) -> None:
        """Make steps durable whose save may have died right after its commit.

        To be done before others are deleted in their favour.
        """


def locate(path: PathLike) -> Location:
    """The location that a user's path means at this moment; a later chdir does not move it.

    Takes relative paths, `~`, spaces, any unicode, and URLs of files and of object stores.

    Raises:
        CheckpointError: Another kind of URL, or an empty path.
        TypeError: Neither a `str` nor a path.
    """
    from pytree_ckpt.store.folders import Folder

    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        # Not what is in it: it may be a whole state, from arguments in the wrong order.
        raise TypeError(f"a path must be a str or a pathlib.Path, not {type(path).__name__}")
    found = _URL.match(text)
    if found and found[1].lower() == "file":
        text = _path_of_file_url(text)
    elif found and found[1].lower() in _STORES:
        from pytree_ckpt.store.prefixes import prefix_of

        return prefix_of(found[1].lower(), text[found.end() :])
    elif found:
        raise CheckpointError(
            f"{found[1]}:// is not supported, only paths, file://, s3://, gs:// and memory://"
        )
    elif _URL_FROM_PATHLIB.match(text):
        raise CheckpointError(f"{text!r} is what pathlib makes of a URL; give the URL as a str")
    if not text or "\0" in text:
        raise CheckpointError(f"a path cannot be empty or have a NUL character: {text!r}")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        home = expanded.split(os.sep, 1)[0]
        raise CheckpointError(f"nobody knows where {home} is; if it is a folder, it is ./{home}")
    absolute = _absolute(expanded)
    if not _is_utf_8(absolute):
        raise CheckpointError(
            f"{absolute!r} is not UTF-8 where names are {sys.getfilesystemencoding()}, and "
            "TensorStore takes no other"
        )
    return Folder(Path(absolute))


def _absolute(path: str) -> str:
    """What a path means to the system: behind a link `..` is above what the link leads to."""
    try:
        parts = os.path.join(os.getcwd(), path).split(os.sep)
    except FileNotFoundError:
        if os.path.isabs(path):
            parts = path.split(os.sep)
        else:
            text = "a relative path means nothing: the working folder is gone"
            raise FileNotFoundError(errno.ENOENT, text, path) from None
    count = len(parts) - parts[::-1].index("..") if ".." in parts else 0  # up to the last
    above = os.path.realpath(os.sep.join(parts[:count])) if count else ""
    return os.path.abspath(os.path.join(above, os.sep.join(parts[count:])))


def _is_utf_8(path: str) -> bool:
    """Whether the system and TensorStore call it by the same bytes."""
    try:
        return os.fsencode(path) == path.encode()
    except UnicodeEncodeError:
        return False


def local_path(path: PathLike) -> Path:
    """Where a file of another program is on a disk.

    Raises:
        CheckpointError: It is in a store.
    """
    location = locate(path)
    if location.path is None:
        raise CheckpointError(f"{location} is not on a disk; copy the file")
    return location.path


def _path_of_file_url(text: str) -> str:
    url = urlsplit(text)
    if url.netloc not in ("", "localhost"):
        raise CheckpointError(f"{text!r} names the host {url.netloc!r}; use file:///path")
    if url.query or url.fragment:
        raise CheckpointError(f"{text!r} has a ? or a # that is not percent-encoded")
    return unquote(url.path, errors="surrogateescape")
