"""Whether files can hold what the metadata claims: asked before memory is taken for it.

A manifest may claim a chunk of any size, and the index in a file of any size that a chunk is all
of it. Neither is believed further than the sizes of the files bear it out. A store tells no sizes,
and is believed.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence

from pytree_ckpt.format import zarr
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.tables import Packed, Table
from pytree_ckpt.plan.loading import ReadUnit
from pytree_ckpt.plan.windows import Window
from pytree_ckpt.store import contents
from pytree_ckpt.store.locations import Location

TRUSTED_NBYTES = 64 << 20
"""Claims up to this size are not looked into: whoever reads finds out what is missing."""
_MOST_PER_STORED = {"raw": 2, "zstd": 1 << 15}
"""Bytes that a stored byte may claim. raw: half of the files may be lost, then their chunks are
named one by one; zstd: a block of at least 4 bytes decodes to at most 128 KiB."""
_SLACK_NBYTES = 1 << 16
_SLACK_CHUNK_NBYTES = 64
"""For its entry in the index of a shard, and what a codec adds to a few bytes."""


def check_unit(
    data: Location, tables: Iterable[Table], unit: ReadUnit, parts: Sequence[Leaf]
) -> None:
    """Check the memory that a unit needs, whose chunks are of these leaves.

    Raises:
        IntegrityError: The files are too small for it.
    """
    nbytes = sum(read.nbytes for read in unit.reads)
    if nbytes <= TRUSTED_NBYTES or data.path is None:
        return
    stored: dict[str, int] = {}
    most_per_stored, packed = 1, False
    for part, shards in _shards_by_part(unit).items():
        leaf, spec = parts[part], parts[part].array
        most_per_stored = max(most_per_stored, _MOST_PER_STORED[spec.codec])
        packed |= spec.storage == "packed"
        if leaf.name is not None:
            folder, grid = contents.array_folder(data, leaf.name), spec.shards
            stored |= _sizes(folder / zarr.shard_file(grid.position(shard)) for shard in shards)
    if packed:
        folders = [contents.packed_folder(data, table.process) for table in tables]
        stored |= _sizes(
            f / name for f in folders if f.path and f.path.is_dir() for name in os.listdir(f.path)
        )
    _check_sum(stored, nbytes, most_per_stored, parts[0].text)


def _shards_by_part(unit: ReadUnit) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for read in unit.reads:
        found.setdefault(read.part, set()).add(read.shard)
    return found


def check_shard(file: Location, spec: ArraySpec, leaf: str | None) -> None:
    """Check that the file of a shard is not larger than any can be.

    Raises:
        IntegrityError: It is; its index could name all of it as one chunk.
    """
    if file.path is None:
        return
    shard_nbytes = math.prod(spec.shard_shape) * spec.itemsize
    _check_files(_sizes([file]), shard_nbytes, spec.chunks.size, leaf)


def check_window(data: Location, window: Window, packed: Packed, codec: str) -> None:
    """As `check_unit`, of a part of a packed array, which lies in one file."""
    if data.path is None:
        return
    name = zarr.shard_file((window.start // packed.shard_nbytes,))
    stored = _sizes([contents.packed_folder(data, window.process) / name])
    _check_files(stored, packed.shard_nbytes, packed.chunks_per_file, None)
    _check_sum(stored, window.stop - window.start, _MOST_PER_STORED[codec], None)


def _sizes(files: Iterable[Location]) -> dict[str, int]:
    """Size of each file; one that is not there, which shows when it is read, has none."""
    found = {}
    for file in files:
        try:
            found[str(file)] = os.lstat(str(file)).st_size
        except (FileNotFoundError, NotADirectoryError):
            continue
    return found


def _check_files(
    stored: Mapping[str, int], shard_nbytes: int, chunks: int, leaf: str | None
) -> None:
    # Codecs may add a little to what they cannot compress, but never double it.
    most = 2 * shard_nbytes + _SLACK_CHUNK_NBYTES * chunks + _SLACK_NBYTES
    for file, nbytes in stored.items():
        if nbytes > most:
            text = f"{file} has {nbytes} bytes, a shard of {shard_nbytes} has at most {most}"
            raise contents.damaged("size", text, leaf=leaf, file=file)


def _check_sum(
    stored: Mapping[str, int], nbytes: int, most_per_stored: int, leaf: str | None
) -> None:
    total = sum(stored.values())
    if nbytes > max(TRUSTED_NBYTES, most_per_stored * total):
        where = "a packed array" if leaf is None else leaf or "(root)"
        text = f"{where} has {nbytes} bytes by its manifest, and its files have {total}"
        raise contents.damaged("size", text, leaf=leaf)
