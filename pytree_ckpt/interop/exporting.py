"""What the exports of all formats share."""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from pytree_ckpt.errors import ExistsError
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.values import count_text
from pytree_ckpt.interop.flat_files import full_disk_named
from pytree_ckpt.options import check_flags
from pytree_ckpt.store import disk
from pytree_ckpt.verbs.checkpoint import Checkpoint, batches

Part = tuple[Leaf, Box]
_BATCH_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The files that an export wrote, the bytes of their tensors, and what it left out."""

    files: tuple[str, ...]
    nbytes: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.nbytes} bytes in {count_text(len(self.files), 'file')}", *self.files]
        return "\n".join([*lines, *(f"not carried over: {what}" for what in self.left_out)])


def elements_of(checkpoint: Checkpoint, parts: Iterable[Part]) -> Iterator[npt.NDArray[Any]]:
    """The elements of each part, verified, in the order of the parts."""
    for batch in batches(parts, _nbytes, limit=_BATCH_NBYTES):
        yield from checkpoint.read_boxes(batch)


def _nbytes(part: Part) -> int:
    leaf, box = part
    return box.size * leaf.array.itemsize


@contextmanager
def written_whole(
    files: Sequence[Path], *, overwrite: bool, replaces: Sequence[Path] = ()
) -> Iterator[list[Path]]:
    """Names to write files of one folder under; they get their own once the block has ended well.

    Args:
        files: The files. Of several the last leads to the others: it is the first to go and the
            last to come, so that it never leads to files of two exports.
        overwrite: Replace files that are there.
        replaces: Files beside them that a reader would take for these.

    Raises:
        ExistsError: One is there and `overwrite` is False.
    """
    check_flags(overwrite=overwrite)
    there = [file for file in (*files, *replaces) if os.path.lexists(file)]
    if there and not overwrite:
        raise ExistsError(f"{there[0]} exists; pass overwrite=True to replace it")
    folder = files[0].parent
    disk.make_dirs(folder)
    made = [file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp") for file in files]
    try:
        with full_disk_named(folder):
            yield made
        if stale := [*replaces, *files[1:][-1:]]:
            for file in stale:
                file.unlink(missing_ok=True)
            disk.fsync_dir(folder)
        for temporary, file in zip(made, files, strict=True):
            temporary.replace(file)
        disk.fsync_dir(folder)
    finally:
        for temporary in made:
            temporary.unlink(missing_ok=True)
