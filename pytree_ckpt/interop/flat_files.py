"""Parts of a C-order array that lies flat in a file, read and written where they are."""

import errno
import itertools
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pytree_ckpt.errors import FormatError, NotFoundError
from pytree_ckpt.format.boxes import Box, Shape

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def full_disk_named(place: Path) -> Iterator[None]:
    """Say where no more could be written, which a write to a descriptor does not."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and error.filename is None:
            error.filename = str(place)
        raise


def open_regular(path: Path) -> int:
    """A descriptor to read a file with; links are followed, as caches of models are full of them.

    Raises:
        FormatError: Not a regular file.
        NotFoundError: There is none.
        OSError: It cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"there is no file at {path}") from None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise FormatError(f"{path} is not a regular file")


def _runs(shape: Shape, box: Box) -> Iterator[tuple[int, int, int]]:
    """The byte ranges of a box, in elements: start in the array, start in the box, length."""
    inner = len(shape)
    while inner > 0 and (inner == len(shape) or box.shape[inner] == shape[inner]):
        inner -= 1
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    length = math.prod(box.shape[inner:])
    base = sum(a * s for a, s in zip(box.start, strides, strict=True))
    outer = itertools.product(*map(range, box.shape[:inner]))
    for number, position in enumerate(outer):
        start = base + sum(p * s for p, s in zip(position, strides[:inner], strict=True))
        yield start, number * length, length


def read_box(
    fd: int, offset: int, shape: Shape, dtype: np.dtype[Any], box: Box, *, what: str
) -> npt.NDArray[Any]:
    """The elements of a box of an array that begins at byte `offset`.

    Raises:
        FormatError: The file ends before.
    """
    found = np.empty(box.size, dtype)
    memory = found.view(np.uint8).data
    size = dtype.itemsize
    for start, at, length in _runs(shape, box):
        part = memory[at * size : (at + length) * size]
        place = offset + start * size
        while part:
            count = os.preadv(fd, [part], place)
            if not count:
                raise FormatError(f"{what} ends before its data does")
            part, place = part[count:], place + count
    return found.reshape(box.shape)


def write_all(fd: int, data: bytes | memoryview, *, at: int) -> None:
    """Write bytes at a place in a file; one call may write fewer, as where a disk is about full."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, at)
        rest, at = rest[count:], at + count


def write_box(fd: int, offset: int, shape: Shape, box: Box, elements: npt.NDArray[Any]) -> None:
    """Write the elements of a box of an array that begins at byte `offset`."""
    memory = np.ascontiguousarray(elements).reshape(-1).view(np.uint8).data
    size = elements.dtype.itemsize
    for start, at, length in _runs(shape, box):
        write_all(fd, memory[at * size : (at + length) * size], at=offset + start * size)
