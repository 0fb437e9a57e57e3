"""The plan of a save: which process writes which shard, and where it goes."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.arrays import ArrayKind, ArraySpec
from pytree_ckpt.format.boxes import Grid, Shape
from pytree_ckpt.format.paths import Path, to_file_names
from pytree_ckpt.format.shardings import Sharding, cell_of, holders
from pytree_ckpt.format.tables import Ints, Packed
from pytree_ckpt.format.zarr import PACKED_ALIGNMENT
from pytree_ckpt.plan import chunking

MAX_SHARDS = 1 << 20
"""Most shards of one array: a plan lists them, and an array may be what a manifest claims."""
PACKED_CHUNK_NBYTES = 1 << 20
PACKED_SHARD_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayForm:
    """An array as it is in memory, before it is decided how to store it.

    `max_shard_nbytes` and `max_chunk_nbytes` are bounds to take instead of the usual ones.
    """

    kind: ArrayKind
    dtype: str
    shape: Shape
    sharding: Sharding | None
    weak_type: bool = False
    committed: bool = True
    key_impl: str | None = None
    key_ndim: int = 0
    max_shard_nbytes: int | None = None
    max_chunk_nbytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What one process writes.

    Attributes:
        specs: The distinct array specs of the checkpoint.
        codes: For each leaf an index into `specs`, or the code it was given.
        names: Folder of each leaf that is a Zarr array of its own.
        array_leaf, array_shard: Shards that this process writes to arrays, in order.
        packed_leaf, packed_shard, packed_offset: Shards that it packs, in order.
        packed: Extent of its packed array, None if it packs nothing.
        nbytes: Bytes of array data that this process writes.
    """

    specs: tuple[ArraySpec, ...]
    codes: tuple[int, ...]
    names: Mapping[int, str]
    array_leaf: Ints
    array_shard: Ints
    packed_leaf: Ints
    packed_shard: Ints
    packed_offset: Ints
    packed: Packed | None
    nbytes: int

    def spec(self, leaf: int) -> ArraySpec:
        return self.specs[self.codes[leaf]]

    def packed_rows(self, packed: Packed, file: int) -> Iterator[tuple[int, int, int]]:
        """The shards in a file of the packed array: leaf, number, and first byte in the file."""
        start = file * packed.shard_nbytes
        first, stop = np.searchsorted(self.packed_offset, [start, start + packed.shard_nbytes])
        return zip(
            self.packed_leaf[first:stop].tolist(),
            self.packed_shard[first:stop].tolist(),
            (self.packed_offset[first:stop] - start).tolist(),
            strict=True,
        )


def plan_save(
    paths: Sequence[Path],
    forms: Sequence[ArrayForm],
    codes: Sequence[int],
    *,
    process: int,
    process_of: Mapping[int, int],
    codec: str,
) -> SavePlan:
    """Decide what `process` writes; every process comes to the same decision for all.

    Args:
        paths: Path of each leaf.
        forms: The distinct forms of the arrays.
        codes: For each leaf an index into `forms`, or a negative code if it is not an array.
        process: Index of the process that this plan is for.
        process_of: The process of each device id.
        codec: Codec of every chunk.
    """
    stored = [store(form, process_of, codec) for form in forms]
    specs = tuple(spec for spec, _ in stored)
    load: dict[int, int] = {}
    alone: dict[int, Ints] = {}
    shards: list[Ints] = []
    for code in codes:
        if code < 0:
            shards.append(_NONE)
        elif all(len(who) == 1 for _, who in stored[code][1]):
            if code not in alone:
                alone[code] = _held(stored[code][1], process)
            shards.append(alone[code])
        else:
            shards.append(_shared_out(*stored[code], load, process))
    return assemble(paths, specs, tuple(codes), shards)


_NONE: Ints = np.zeros(0, np.int64)


def store(
    form: ArrayForm, process_of: Mapping[int, int], codec: str
) -> tuple[ArraySpec, list[tuple[Ints, list[int]]]]:
    """How a form is stored, and for each device shard its zarr shards and who holds them.

    Raises:
        CheckpointError: In more shards than `MAX_SHARDS`.
    """
    itemsize = int(dtypes.dtype_of(form.dtype).itemsize)
    cell = cell_of(form.sharding, form.shape)
    who = {
        at: sorted({process_of[device] for device in ids}) or [0]
        for at, ids in holders(form.sharding, form.shape).items()
    }
    most = max(map(len, who.values()))
    empty = 0 in form.shape
    shard = (
        cell
        if empty
        else chunking.shard_shape(cell, itemsize, holders=most, max_nbytes=form.max_shard_nbytes)
    )
    nbytes = itemsize * int(np.prod(shard, dtype=object))
    packed = nbytes < chunking.PACK_BELOW_NBYTES
    spec = ArraySpec(
        kind=form.kind,
        dtype=form.dtype,
        shape=form.shape,
        sharding=form.sharding,
        storage="empty" if empty else "packed" if packed else "array",
        shard_shape=shard,
        chunk_shape=shard
        if packed or empty
        else chunking.chunk_shape(shard, itemsize, max_nbytes=form.max_chunk_nbytes),
        codec=codec,
        weak_type=form.weak_type,
        committed=form.committed,
        key_impl=form.key_impl,
        key_ndim=form.key_ndim,
    )
    if spec.num_shards > MAX_SHARDS:
        raise CheckpointError(
            f"{spec.describe()} would be cut into {spec.num_shards} shards, more than {MAX_SHARDS}"
        )
    if empty:
        return spec, []
    cells, grid = Grid(form.shape, cell), spec.shards
    return spec, [
        (np.fromiter(grid.overlapping(cells.box(at)), np.int64), processes)
        for at, processes in who.items()
    ]


def _held(cells: list[tuple[Ints, list[int]]], process: int) -> Ints:
    """The shards of a leaf whose every device shard is in one process alone."""
    own = [shards for shards, who in cells if who[0] == process]
    return np.sort(np.concatenate(own)) if own else _NONE


def _shared_out(
    spec: ArraySpec, cells: list[tuple[Ints, list[int]]], load: dict[int, int], process: int
) -> Ints:
    """The shards that fall to `process` when each goes to the holder with least to write."""
    grid, mine = spec.shards, []
    for shards, who in cells:
        least = [(load.get(p, 0), p) for p in who]
        heapq.heapify(least)
        for shard in shards.tolist():
            nbytes, writer = least[0]
            load[writer] = nbytes + grid.box(shard).size * spec.itemsize
            heapq.heapreplace(least, (load[writer], writer))
            if writer == process:
                mine.append(shard)
    return np.asarray(sorted(mine), np.int64)


def assemble(
    paths: Sequence[Path],
    specs: tuple[ArraySpec, ...],
    codes: tuple[int, ...],
    shards: Sequence[Ints],
) -> SavePlan:
    """The plan of a process that writes, of each leaf, these shards."""
    column = np.asarray(codes, np.int64)
    stored = np.asarray([s.storage == "packed" for s in specs] + [False, False], bool)
    is_packed = stored[column] & (column >= 0)
    counts = np.asarray([len(s) for s in shards], np.int64)
    leaf = np.repeat(np.arange(len(codes)), counts)
    shard = np.concatenate([_NONE, *shards])
    in_pack = is_packed[leaf] if len(leaf) else np.zeros(0, bool)
    sizes = _shard_sizes(specs, column, leaf, shard)
    offsets, packed = pack(sizes[in_pack])
    own = [i for i, code in enumerate(codes) if code >= 0 and specs[code].storage == "array"]
    names = to_file_names([paths[i] for i in own])
    return SavePlan(
        specs=specs,
        codes=codes,
        names=dict(zip(own, names, strict=True)),
        array_leaf=leaf[~in_pack],
        array_shard=shard[~in_pack],
        packed_leaf=leaf[in_pack],
        packed_shard=shard[in_pack],
        packed_offset=offsets,
        packed=packed,
        nbytes=int(sizes.sum()),
    )


def _shard_sizes(specs: Sequence[ArraySpec], codes: Ints, leaf: Ints, shard: Ints) -> Ints:
    """Bytes of each shard."""
    full = np.asarray(
        [int(np.prod(s.shard_shape, dtype=object)) * s.itemsize for s in specs], np.int64
    )
    sizes = full[codes[leaf]] if len(leaf) else _NONE.copy()
    ragged = [not spec.shards.is_even for spec in specs]
    if any(ragged):
        for row in np.flatnonzero(np.asarray(ragged)[codes[leaf]]):
            spec = specs[int(codes[leaf[row]])]
            sizes[row] = spec.shards.box(int(shard[row])).size * spec.itemsize
    return sizes


def pack(sizes: Ints) -> tuple[Ints, Packed | None]:
    """Offsets of shards in a packed array: aligned, in order, none across two files.

    Example:
        >>> offsets, packed = pack(np.asarray([4, 100, 8]))
        >>> offsets.tolist(), packed.nbytes
        ([0, 64, 192], 256)
    """
    if not len(sizes):
        return _NONE, None
    aligned = -(-sizes // PACKED_ALIGNMENT) * PACKED_ALIGNMENT
    ends = np.cumsum(aligned)
    starts = ends - aligned
    offsets = np.empty_like(starts)
    first, file = 0, 0
    while first < len(sizes):
        stop = int(np.searchsorted(ends, starts[first] + PACKED_SHARD_NBYTES, side="right"))
        offsets[first:stop] = starts[first:stop] - starts[first] + file * PACKED_SHARD_NBYTES
        first, file = stop, file + 1
    used = int(offsets[-1] + aligned[-1])
    if used <= PACKED_CHUNK_NBYTES:
        return offsets, Packed(nbytes=used, shard_nbytes=used, chunk_nbytes=used)
    nbytes = -(-used // PACKED_CHUNK_NBYTES) * PACKED_CHUNK_NBYTES
    shard_nbytes = min(nbytes, PACKED_SHARD_NBYTES)
    return offsets, Packed(
        nbytes=nbytes, shard_nbytes=shard_nbytes, chunk_nbytes=PACKED_CHUNK_NBYTES
    )
