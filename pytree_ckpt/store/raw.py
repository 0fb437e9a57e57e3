"""Shards without a codec in local files: the bytes themselves, without a copy and without a wait.

TensorStore reads into memory of its own and copies, and takes several changes of threads for each
file. Without a codec a shard file is its chunks in order and then the index, so that it can be
written as it is, byte for byte as TensorStore does it, and a chunk is one range of it to read.
Everything else, and everything that is wrong, is left to TensorStore to read or to name.
"""

import functools
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pytree_ckpt.clock import StageClock
from pytree_ckpt.format import zarr
from pytree_ckpt.store import disk
from pytree_ckpt.store.digests import NewDigest
from pytree_ckpt.store.failures import UnreadableError

BLOCK_NBYTES = 1 << 20
"""Read or written, and hashed, at a time, so that it is in the cache when it is hashed."""


_MAX_CHUNKS = 4096
_ENTRY = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<I")
_MISSING = 2**64 - 1


@contextmanager
def new_raw(
    file: str, *, chunk_nbytes: int, chunks: int, present: int
) -> Iterator[Callable[..., None]]:
    """A new shard file with the first `present` of its chunks; yields what appends their bytes.

    It is durable, but for its folder, at the end of the block.

    Raises:
        OSError: The storage refused or failed.
    """
    try:
        fd = disk.create(file)
        try:
            yield functools.partial(disk.write_all, fd)
            disk.write_all(fd, _index(chunk_nbytes, chunks, present))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _named(error, f"writing {file}") from None


def blocks_of(flat: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
    """Bytes in parts that stay in the cache until they are hashed."""
    for at in range(0, len(flat), BLOCK_NBYTES):
        yield flat[at : at + BLOCK_NBYTES].data


def _named(error: OSError, what: str) -> OSError:
    """The error, with the file that it is about."""
    if error.filename is not None:
        return error
    return OSError(error.errno, f"{what}: {error.strerror}")


class RawShard:
    """An open shard file, whose first chunks are raw and in order."""

    def __init__(self, file: str, fd: int) -> None:
        self._file = file
        self._fd = fd

    def fill(self, place: npt.NDArray[Any], start: int) -> None:
        """Fill contiguous memory from byte `start` of the shard.

        Raises:
            OSError: The storage failed.
            UnreadableError: The file was cut short after it was opened.
        """
        self._fill(place.reshape(-1).view(np.uint8).data, start)

    def fill_and_hash(
        self, place: npt.NDArray[Any], start: int, new_digest: NewDigest, clock: StageClock
    ) -> bytes:
        """As `fill`; the digest of what was read."""
        running = new_digest()
        read = verified = 0.0
        for block in blocks_of(place.reshape(-1).view(np.uint8)):
            started = time.perf_counter()
            self._fill(block, start)
            middle = time.perf_counter()
            running.update(block)
            read += middle - started
            verified += time.perf_counter() - middle
            start += len(block)
        clock.add("read", read)
        clock.add("verify", verified)
        return bytes(running.digest())

    def _fill(self, rest: memoryview, start: int) -> None:
        while rest:
            try:
                count = os.preadv(self._fd, [rest], start)
            except OSError as error:
                raise _named(error, f"reading {self._file}") from None
            if not count:
                raise UnreadableError(f"{self._file} was cut short while it was read")
            rest, start = rest[count:], start + count


@contextmanager
def open_raw(
    file: str, *, chunk_nbytes: int, chunks: int, present: int
) -> Iterator[RawShard | None]:
    """The shard in a file that has the first `present` of its chunks, in order.

    None if the file is not there, or is laid out in another way.
    """
    try:
        fd = disk.open_file(file)
    except OSError:
        yield None
        return
    try:
        yield RawShard(file, fd) if _is_usual(fd, chunk_nbytes, chunks, present) else None
    finally:
        os.close(fd)


def _is_usual(fd: int, chunk_nbytes: int, chunks: int, present: int) -> bool:
    nbytes = present * chunk_nbytes
    index_nbytes = zarr.index_nbytes(chunks)
    if chunks > _MAX_CHUNKS or os.fstat(fd).st_size != nbytes + index_nbytes:
        return False
    return os.pread(fd, index_nbytes, nbytes) == _index(chunk_nbytes, chunks, present)


@functools.lru_cache(maxsize=64)
def _index(chunk_nbytes: int, chunks: int, present: int) -> bytes:
    """The index at the end of a shard file: offset and size of each chunk, and a crc32c.

    The layout is that of the codec `sharding_indexed` in the Zarr v3 specification.
    """
    entries = b"".join(_ENTRY.pack(at * chunk_nbytes, chunk_nbytes) for at in range(present))
    entries += _ENTRY.pack(_MISSING, _MISSING) * (chunks - present)
    return entries + _CHECKSUM.pack(_crc32c(entries))


def _crc32c(data: bytes) -> int:
    """The checksum of RFC 3720, section 12.1.

    Example:
        >>> hex(_crc32c(b"123456789"))
        '0xe3069283'
    """
    rest = 0xFFFFFFFF
    for byte in data:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return rest ^ 0xFFFFFFFF
