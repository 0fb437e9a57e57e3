"""Go on where a conversion was interrupted: keep what reads back as its journal says."""

import contextlib
from collections.abc import Callable, Iterator

from pytree_ckpt.errors import FormatError
from pytree_ckpt.format import tables, wire, zarr
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Grid
from pytree_ckpt.format.tables import DIGEST_NBYTES, Table
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.plan.saving import SavePlan
from pytree_ckpt.store import arrays, contents, disk
from pytree_ckpt.store.digests import digest_of, new_digest
from pytree_ckpt.store.failures import UnreadableError, storage_errors
from pytree_ckpt.store.journal import PACKED, Journal, Key
from pytree_ckpt.store.locations import Location


def is_finished(
    data: Location, plan: SavePlan, journal: Journal, *, process: int, options: SaveOptions
) -> bool:
    """Keep in the journal what is intact of what `process` writes; whether that is all.

    All is made durable then, and left as it is: process 0 may have committed it meanwhile.
    When the journals are gone, just before a commit, the table says what is finished.
    """
    table = _table(data, process)
    if table is not None:
        for key, digests in _in_table(table, plan, DIGEST_NBYTES[options.digest]):
            journal.add(key, digests)
    journal.keep(_Check(data, plan, process, options).is_intact)
    if table is None or rows_left(plan, journal):
        return False
    disk.fsync_file(str(contents.table_file(data, process)))
    for name in ("arrays", "packed", "tables"):
        (data / name).sync()
    return True


def clear_the_way(data: Location, plan: SavePlan, journal: Journal, *, process: int) -> None:
    """Remove what `process` wrote but for what the journal has."""
    for key, folder, name in _files(data, plan, process):
        if journal.digests(key) is None:
            (folder / name).remove_file()
        (folder / f"{name}.__lock").remove_file()
    folders = [contents.array_folder(data, name) for name in plan.names.values()]
    if process == 0:
        for folder in folders:
            (folder / "zarr.json").remove_file()
    (contents.packed_folder(data, process) / "zarr.json").remove_file()
    contents.table_file(data, process).remove_file()


def _table(data: Location, process: int) -> Table | None:
    """The table of an attempt, if it got so far."""
    file = contents.table_file(data, process)
    try:
        return tables.from_bytes(file.read_file(max_nbytes=wire.MAX_FILE_BYTES), what=str(file))[0]
    except (OSError, FormatError):
        return None


def _in_table(table: Table, plan: SavePlan, digest_nbytes: int) -> Iterator[tuple[Key, bytes]]:
    """The digests of each file that a table has."""
    at = 0
    for leaf, shard in zip(plan.array_leaf.tolist(), plan.array_shard.tolist(), strict=True):
        spec = plan.spec(leaf)
        count = Grid(spec.shards.box(shard).shape, spec.chunk_shape).size
        yield (leaf, shard), table.arrays.digests[at : at + count * digest_nbytes]
        at += count * digest_nbytes
    at = 0
    if plan.packed is not None:
        for piece in range(plan.packed.num_files):
            nbytes = digest_nbytes * sum(1 for _ in plan.packed_rows(plan.packed, piece))
            yield (PACKED, piece), table.packed_rows.digests[at : at + nbytes]
            at += nbytes


def rows_left(plan: SavePlan, journal: Journal) -> set[Key]:
    """The shards, each a leaf and a number, whose files are not finished."""
    rows = zip(plan.array_leaf.tolist(), plan.array_shard.tolist(), strict=True)
    left = {row for row in rows if journal.digests(row) is None}
    if plan.packed is not None:
        for piece in range(plan.packed.num_files):
            if journal.digests((PACKED, piece)) is None:
                left |= {(leaf, shard) for leaf, shard, _ in plan.packed_rows(plan.packed, piece)}
    return left


def _files(data: Location, plan: SavePlan, process: int) -> list[tuple[Key, Location, str]]:
    """Every file of array data that a process writes."""
    found: list[tuple[Key, Location, str]] = []
    rows = zip(plan.array_leaf.tolist(), plan.array_shard.tolist(), strict=True)
    for leaf, shard in rows:
        folder = contents.array_folder(data, plan.names[leaf])
        name = zarr.shard_file(plan.spec(leaf).shards.position(shard))
        found.append(((leaf, shard), folder, name))
    if plan.packed is not None:
        folder = contents.packed_folder(data, process)
        pieces = range(plan.packed.num_files)
        found += [((PACKED, piece), folder, zarr.shard_file((piece,))) for piece in pieces]
    return found


class _Check:
    """Reads back what a journal says is finished."""

    def __init__(self, data: Location, plan: SavePlan, process: int, options: SaveOptions) -> None:
        self._data = data
        self._plan = plan
        self._process = process
        self._codec = options.codec
        self._new_digest = new_digest(options.digest)
        self._ctx = arrays.context(threads=1)
        self._planned = {key for key, _, _ in _files(data, plan, process)}

    def is_intact(self, key: Key, digests: bytes) -> bool:
        """Whether a file is planned, and its chunks have these digests."""
        if key not in self._planned:
            return False
        read: Callable[[], bytes] = (
            (lambda: self._piece(key[1])) if key[0] == PACKED else (lambda: self._shard(*key))
        )
        with contextlib.suppress(OSError, UnreadableError), storage_errors("reading back"):
            return read() == digests
        return False  # Whatever is wrong with it, it is written again.

    def _shard(self, leaf: int, shard: int) -> bytes:
        spec: ArraySpec = self._plan.spec(leaf)
        name = self._plan.names[leaf]
        store = arrays.open_leaf(self._data, name, spec, self._ctx, write=False)
        outer = spec.shards.box(shard)
        found = []
        for part in Grid(outer.shape, spec.chunk_shape).boxes():
            place = store[part.shifted(outer.start).slices()]
            found.append(digest_of(self._new_digest, place.read().result()))
        return b"".join(found)

    def _piece(self, piece: int) -> bytes:
        plan, packed = self._plan, self._plan.packed
        if packed is None:
            return b""
        folder = contents.packed_folder(self._data, self._process)
        metadata = zarr.packed_metadata(packed, self._codec)
        store = arrays.open_array(folder, metadata, self._ctx, write=False)
        base = piece * packed.shard_nbytes
        buffer = store[base : min(base + packed.shard_nbytes, packed.nbytes)].read().result()
        found = []
        for leaf, shard, at in plan.packed_rows(packed, piece):
            spec = plan.spec(leaf)
            nbytes = spec.shards.box(shard).size * spec.itemsize
            found.append(digest_of(self._new_digest, buffer[at : at + nbytes]))
        return b"".join(found)
