"""Where a checkpoint is: what the user gave, made absolute once."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pytree_ckpt.errors import CheckpointError

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Location:
    """An absolute folder of the local file system (mounted network storage included)."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


def locate(path: PathLike) -> Location:
    """The location that a user's path means at this moment; a later chdir does not move it.

    Takes relative paths, `~`, spaces, any unicode, and `file://` URLs.

    Raises:
        CheckpointError: Another kind of URL, or an empty path.
        TypeError: Neither a `str` nor a path.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path must be str or pathlib.Path, not {type(path).__name__}")
    if not text or "\0" in text:
        raise CheckpointError("the path of a checkpoint is empty or has a NUL character")
    if text.startswith("file://"):
        url = urlsplit(text)
        if url.netloc not in ("", "localhost"):
            raise CheckpointError(f"{text!r} names the host {url.netloc!r}; use file:///path")
        text = unquote(url.path)
    elif "://" in text.split("/", 1)[0] + "//" and text.split("://", 1)[0].isalnum():
        scheme = text.split("://", 1)[0]
        raise CheckpointError(f"{scheme}:// is not supported, only paths and file:// URLs")
    return Location(Path(os.path.abspath(os.path.expanduser(text))))
