"""Where a checkpoint is: what the user gave, made absolute once."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pytree_ckpt.errors import CheckpointError

PathLike = str | os.PathLike[str]
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_URL_FROM_PATHLIB = re.compile(r"(abfss?|az|file|gcs|gs|hdfs|https?|memory|s3):/(?!/)")


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
    found = _URL.match(text)
    if found and found[1].lower() == "file":
        text = _path_of_file_url(text)
    elif found:
        raise CheckpointError(f"{found[1]}:// is not supported, only paths and file:// URLs")
    elif _URL_FROM_PATHLIB.match(text):
        raise CheckpointError(f"{text!r} is what pathlib makes of a URL; give the URL as a str")
    if not text or "\0" in text:
        raise CheckpointError("the path of a checkpoint is empty or has a NUL character")
    absolute = os.path.abspath(os.path.expanduser(text))
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{absolute!r} is not UTF-8, and TensorStore takes no other"
        ) from None
    return Location(Path(absolute))


def _path_of_file_url(text: str) -> str:
    url = urlsplit(text)
    if url.netloc not in ("", "localhost"):
        raise CheckpointError(f"{text!r} names the host {url.netloc!r}; use file:///path")
    if url.query or url.fragment:
        raise CheckpointError(f"{text!r} has a ? or a # that is not percent-encoded")
    return unquote(url.path, errors="surrogateescape")
