"""Tables: what one process wrote, shard by shard, with the digest of every chunk."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytree_ckpt.errors import FormatError
from pytree_ckpt.format import wire
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Grid, Shape
from pytree_ckpt.format.parse import Reader

Ints = npt.NDArray[np.int64]
DIGEST_NBYTES: Mapping[str, int] = {"sha256": 32, "xxh3_128": 16}
ROW_NBYTES = 64
"""Of a table for one shard, about."""
MAX_PACKED_NBYTES = 1 << 60
MAX_PACKED_SHARD_NBYTES = 1 << 30
"""Of one file of a packed array."""
MAX_PACKED_CHUNK_NBYTES = 64 << 20
"""A reader holds a whole chunk of a packed array, whatever it wants of it."""


def _no_rows() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Shards in ascending order of (leaf, shard), and the digests of their chunks in C order.

    `offset` is the first byte of a packed shard in the packed array; for arrays it is empty.
    """

    leaf: Ints = field(default_factory=_no_rows)
    shard: Ints = field(default_factory=_no_rows)
    offset: Ints = field(default_factory=_no_rows)
    digests: bytes = b""

    def __post_init__(self) -> None:
        if len(self.leaf) != len(self.shard) or len(self.offset) not in (0, len(self.leaf)):
            raise ValueError("the columns of a table differ in length")
        if len(self.leaf) and min(self.leaf.min(), self.shard.min()) < 0:
            raise ValueError("a table has a negative index")
        same = self.leaf[1:] == self.leaf[:-1]
        rising = np.where(same, self.shard[1:] > self.shard[:-1], self.leaf[1:] > self.leaf[:-1])
        if not rising.all():
            raise ValueError("the rows of a table are not in order")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Extent of a packed array in bytes, and of its zarr shards and chunks."""

    nbytes: int
    shard_nbytes: int
    chunk_nbytes: int

    def __post_init__(self) -> None:
        if not 0 < self.chunk_nbytes <= self.shard_nbytes or self.nbytes < 1:
            raise ValueError(f"bad extent of a packed array: {self}")
        if (
            self.chunk_nbytes > MAX_PACKED_CHUNK_NBYTES
            or self.shard_nbytes > MAX_PACKED_SHARD_NBYTES
            or self.nbytes > MAX_PACKED_NBYTES
        ):
            raise ValueError(f"a packed array beyond any limit: {self}")
        if self.shard_nbytes % self.chunk_nbytes or self.nbytes % self.chunk_nbytes:
            raise ValueError(f"chunks do not divide a packed array: {self}")

    @property
    def num_files(self) -> int:
        """Files, each one zarr shard, of which the last may be cut off."""
        return -(-self.nbytes // self.shard_nbytes)

    @property
    def chunks_per_file(self) -> int:
        return self.shard_nbytes // self.chunk_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All that one process wrote. `per_process` has values by (leaf, process)."""

    process: int
    arrays: Rows
    packed_rows: Rows
    packed: Packed | None
    per_process: Mapping[tuple[int, int], Any]

    def __post_init__(self) -> None:
        if self.process < 0:
            raise ValueError("a table has a negative process index")
        if (self.packed is None) != (len(self.packed_rows.leaf) == 0):
            raise ValueError("a table has packed shards without a packed array, or the reverse")
        if self.packed and len(self.packed_rows.offset) != len(self.packed_rows.leaf):
            raise ValueError("a table has packed shards without offsets")
        if len(self.arrays.offset):
            raise ValueError("a table has offsets for shards that are not packed")


def to_bytes(table: Table) -> tuple[bytes, bytes]:
    """The file of a table, and its id."""
    packed = table.packed
    return wire.seal(
        "table",
        {
            "process": table.process,
            "arrays": _rows_to_wire(table.arrays),
            "packed_rows": _rows_to_wire(table.packed_rows),
            "packed": [packed.nbytes, packed.shard_nbytes, packed.chunk_nbytes] if packed else None,
            "per_process": [[*key, table.per_process[key]] for key in sorted(table.per_process)],
        },
    )


def _rows_to_wire(rows: Rows) -> dict[str, Any]:
    return {
        "leaf": rows.leaf.astype("<u4").tobytes(),
        "shard": rows.shard.astype("<u8").tobytes(),
        "offset": rows.offset.astype("<u8").tobytes(),
        "digests": rows.digests,
    }


def from_bytes(data: bytes, *, what: str) -> tuple[Table, bytes]:
    """A table and its id.

    Raises:
        FormatError: The file is not a table, or its content breaks a rule of the format.
    """
    content, digest = wire.unseal("table", data, what=what)
    with Reader.errors(what):
        reader = Reader(content, what)
        packed = reader.optional_ints("packed", 3)
        table = Table(
            process=reader.integer("process"),
            arrays=_rows_from_wire(Reader(reader.mapping("arrays"), what)),
            packed_rows=_rows_from_wire(Reader(reader.mapping("packed_rows"), what)),
            packed=Packed(nbytes=packed[0], shard_nbytes=packed[1], chunk_nbytes=packed[2])
            if packed
            else None,
            per_process=_per_process(reader.list("per_process"), what),
        )
    return table, digest


def _rows_from_wire(reader: Reader) -> Rows:
    return Rows(
        leaf=reader.column("leaf", "<u4"),
        shard=reader.column("shard", "<u8"),
        offset=reader.column("offset", "<u8"),
        digests=reader.binary("digests"),
    )


def _per_process(items: Sequence[Any], what: str) -> dict[tuple[int, int], Any]:
    out: dict[tuple[int, int], Any] = {}
    for item in items:
        match item:
            case [int() as leaf, int() as process, value] if (leaf, process) not in out:
                out[leaf, process] = value
            case _:
                raise FormatError(f"{what} has a bad list of values")
    return out


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """Where a shard is and what its chunks hash to."""

    process: int
    offset: int | None
    digests: bytes


class ShardIndex:
    """Every shard of a checkpoint, found by (leaf, shard); built from all tables at once.

    Construction is the coverage check: each shard of each array leaf is in exactly one table.

    Raises:
        FormatError: A shard is missing, written twice, or not of this checkpoint; a table has
            too many or too few digests.
    """

    __slots__ = ("_base", "_digest_nbytes", "_first", "_offset", "_process", "_tables")

    def __init__(
        self, specs: Sequence[ArraySpec | None], tables: Sequence[Table], *, digest: str
    ) -> None:
        self._tables = tables
        self._digest_nbytes = DIGEST_NBYTES[digest]
        counts = [0 if spec is None else spec.num_shards for spec in specs]
        total = sum(counts)
        rows = sum(len(t.arrays.leaf) + len(t.packed_rows.leaf) for t in tables)
        if rows != total:
            raise FormatError(f"the tables have {rows} shards, the manifest has {total}")
        base = np.concatenate([_no_rows(), [0], np.cumsum(np.asarray(counts, np.int64))])
        columns = _Columns(specs, base, self._digest_nbytes)
        for at, table in enumerate(tables):
            columns.enter(at, table.arrays, packed=None)
            columns.enter(at, table.packed_rows, packed=table.packed)
        # Lists, because they are read one element at a time.
        self._base: list[int] = base.tolist()
        self._process: list[int] = columns.process.tolist()
        self._first: list[int] = columns.first.tolist()
        self._offset: list[int] = columns.offset.tolist()

    def entry(self, leaf: int, shard: int, spec: ArraySpec) -> ShardEntry:
        """Place and digests of one shard."""
        where = self._base[leaf] + shard
        table = self._tables[self._process[where]]
        size = self._digest_nbytes
        first = self._first[where] * size
        if spec.storage == "packed":
            digest = table.packed_rows.digests[first : first + size]
            return ShardEntry(table.process, self._offset[where], digest)
        count = Grid(spec.shards.box(shard).shape, spec.chunk_shape).size
        return ShardEntry(table.process, None, table.arrays.digests[first : first + count * size])

    def chunk_digest(self, leaf: int, spec: ArraySpec, start: Shape) -> bytes:
        """Digest of the chunk whose first element is at `start`."""
        at = tuple(s // c for s, c in zip(start, spec.shard_shape, strict=True))
        outer = spec.shards.box_at(at)
        inner = tuple(
            (s - o) // c for s, o, c in zip(start, outer.start, spec.chunk_shape, strict=True)
        )
        number = Grid(outer.shape, spec.chunk_shape).number(inner)
        size = self._digest_nbytes
        digests = self.entry(leaf, spec.shards.number(at), spec).digests
        return digests[number * size : (number + 1) * size]


class _Columns:
    """For each shard of a checkpoint its table, its first digest there, its packed offset."""

    def __init__(self, specs: Sequence[ArraySpec | None], base: Ints, digest_nbytes: int) -> None:
        self._specs = specs
        self._base = base
        self._digest_nbytes = digest_nbytes
        total = int(base[-1])
        self.process = np.full(total, -1, np.int64)
        self.first = np.zeros(total, np.int64)
        self.offset = np.zeros(total, np.int64)

    def enter(self, at: int, rows: Rows, *, packed: Packed | None) -> None:
        """Take the rows of one table, each checked.

        As many rows as shards, and none twice: so each shard is there once.
        """
        if not len(rows.leaf):
            if rows.digests:
                raise FormatError("a table has digests of no shard")
            return
        leaf, shard = rows.leaf, rows.shard
        if leaf.max() >= len(self._base) - 1:
            raise FormatError("a table names a leaf that the manifest does not have")
        if (shard >= self._base[leaf + 1] - self._base[leaf]).any():
            raise FormatError("a table names a shard that its leaf does not have")
        where = self._base[leaf] + shard
        if (self.process[where] >= 0).any():
            raise FormatError("a shard is in two tables")
        chunks, nbytes = _extents(self._specs, rows, "array" if packed is None else "packed")
        if int(chunks.sum()) * self._digest_nbytes != len(rows.digests):
            raise FormatError("a table does not have one digest for each chunk")
        if packed is not None:
            if (rows.offset > packed.nbytes - nbytes).any():
                raise FormatError("a packed shard lies outside its packed array")
            self.offset[where] = rows.offset
        self.process[where] = at
        self.first[where] = np.cumsum(chunks) - chunks


def _extents(specs: Sequence[ArraySpec | None], rows: Rows, storage: str) -> tuple[Ints, Ints]:
    """Number of chunks, and of bytes, of the shard in each row."""
    chunks, nbytes = np.empty_like(rows.leaf), np.empty_like(rows.leaf)
    starts = np.flatnonzero(np.r_[True, rows.leaf[1:] != rows.leaf[:-1]]).tolist()
    extent_of: dict[int, tuple[int, int] | None] = {}
    for start, stop in zip(starts, [*starts[1:], len(rows.leaf)], strict=True):
        spec = specs[int(rows.leaf[start])]
        if spec is None or spec.storage != storage:
            raise FormatError(f"a table lists leaf {int(rows.leaf[start])} as {storage}")
        if id(spec) not in extent_of:
            extent_of[id(spec)] = _common_extent(spec)
        extent = extent_of[id(spec)]
        if extent is not None:
            chunks[start:stop], nbytes[start:stop] = extent
            continue
        for row in range(start, stop):
            box = spec.shards.box(int(rows.shard[row]))
            chunks[row] = Grid(box.shape, spec.chunk_shape).size
            nbytes[row] = box.size * spec.itemsize
    return chunks, nbytes


def _common_extent(spec: ArraySpec) -> tuple[int, int] | None:
    """Chunks and bytes that every shard has, None if the last ones are cut off."""
    if not spec.shards.is_even:
        return None
    return spec.chunks.size, math.prod(spec.shard_shape) * spec.itemsize
