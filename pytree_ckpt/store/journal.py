"""What a long conversion has written already, kept beside the data, so that it can go on later."""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgpack

from pytree_ckpt.errors import CheckpointError, FormatError
from pytree_ckpt.store import disk

JOURNALS = "unfinished"
"""Folder of the journals in a data folder; it is gone before the commit."""
PACKED = -1
"""Stands for the leaf in the key of a file of the packed array."""
Key = tuple[int, int]
"""A leaf and a shard of it, or `PACKED` and a file of the packed array."""
_CHECK_NBYTES = 8


def done_file(data: Path, process: int) -> Path:
    """There once all that a process writes is durable, which its table alone does not say."""
    return data / JOURNALS / f"{process:05d}.done"


class Journal:
    """The digests of finished files, by what they hold; a record follows the bytes of its file.

    A record that was cut off, or says what is not so (a power cut may take a name whose folder
    was not synced yet), costs that its file is written again: `keep` takes only what reads back
    with these digests. Each process has one, and nobody else meanwhile.

    Who opens it is not done, whatever an earlier run was, so that process 0 waits.

    Raises:
        CheckpointError: Another process has it.
    """

    def __init__(self, data: Path, process: int) -> None:
        file = data / JOURNALS / f"{process:05d}"
        file.parent.mkdir(exist_ok=True)
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._found = dict(_records(file.read_bytes()))
            self._done = done_file(data, process)
            if self._done.exists():
                self._done.unlink(missing_ok=True)
                disk.fsync_dir(file.parent)
        except BlockingIOError:
            os.close(self._fd)
            raise CheckpointError(
                f"the same conversion is under way in another process, which holds {file}"
            ) from None
        except BaseException:
            self.close()
            raise

    def digests(self, key: Key) -> bytes | None:
        """The digests of what is finished, None if it is not."""
        return self._found.get(key)

    def keep(self, is_intact: Callable[[Key, bytes], bool]) -> None:
        """Forget, for good, everything that is not intact."""
        self._found = {k: v for k, v in self._found.items() if is_intact(k, v)}
        os.ftruncate(self._fd, 0)
        for key, found in self._found.items():
            os.write(self._fd, _record(key, found))

    def add(self, key: Key, digests: bytes) -> None:
        """Note what is durable; records are written whole, by one call."""
        self._found[key] = digests
        os.write(self._fd, _record(key, digests))

    def tell_done(self) -> None:
        """Let process 0 commit, as far as it depends on this process: all is durable."""
        with contextlib.suppress(FileNotFoundError):  # it commits what an earlier run had done
            disk.write_new(self._done, b"")

    def close(self) -> None:
        """Let another process have it, also while a child lives that was forked meanwhile."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


def _record(key: Key, digests: bytes) -> bytes:
    body: bytes = msgpack.packb([*key, digests])
    check = hashlib.sha256(body).digest()[:_CHECK_NBYTES]
    return len(body).to_bytes(4, "little") + check + body


def _records(data: bytes) -> "list[tuple[Key, bytes]]":
    """The records up to the first that is not whole."""
    found = []
    at = 0
    while at + 4 + _CHECK_NBYTES <= len(data):
        stop = at + 4 + _CHECK_NBYTES + int.from_bytes(data[at : at + 4], "little")
        body = data[at + 4 + _CHECK_NBYTES : stop]
        if hashlib.sha256(body).digest()[:_CHECK_NBYTES] != data[at + 4 : at + 4 + _CHECK_NBYTES]:
            break
        match msgpack.unpackb(body):
            case [int() as leaf, int() as shard, bytes() as digests]:
                found.append(((leaf, shard), digests))
            case _:
                raise FormatError("a record of a journal has the wrong form")
        at = stop
    return found
