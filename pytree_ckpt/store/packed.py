"""Small shards, packed back to back: few large reads, each of many shards."""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import tensorstore as ts

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import Damage, FormatError, IntegrityError
from pytree_ckpt.format import dtypes, zarr
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.tables import Packed, ShardIndex, Table
from pytree_ckpt.plan.windows import PackedShard, Window, windows
from pytree_ckpt.store import arrays, claims, contents
from pytree_ckpt.store.checks import ChunkCheck, ReadStats, position_of
from pytree_ckpt.store.failures import UnreadableError, storage_errors
from pytree_ckpt.store.locations import Location
from pytree_ckpt.store.raw import BLOCK_NBYTES, open_raw
from pytree_ckpt.store.requests import Array, Begun, Group, Request, new_buffers, place_chunk


class PackedReader:
    """Plans and does the reads of the packed arrays of all processes."""

    def __init__(
        self,
        data: Location,
        *,
        codec: str,
        tables: Sequence[Table],
        index: ShardIndex,
        check: ChunkCheck,
        stats: ReadStats,
        clock: StageClock,
        ctx: ts.Context,
    ) -> None:
        self._data = data
        self._codec = codec
        self._tables = tables
        self._index = index
        self._check = check
        self._stats = stats
        self._clock = clock
        self._ctx = ctx

    def groups(
        self,
        requests: Sequence[Request],
        refused: Collection[tuple[int, int]],
        begun: Begun,
        *,
        bound: int,
    ) -> Iterator[Group]:
        """Packed shards: few large reads, each of many shards.

        A stack with parts that are not packed is left in `begun`.
        """
        shards = [
            shard for shard in self._shards(requests) if (shard.request, shard.unit) not in refused
        ]
        buffers: dict[tuple[int, int], dict[int, Array]] = {}
        group = Group()
        for process in sorted({shard.process for shard in shards}):
            folder = contents.packed_folder(self._data, process)
            counts = (self._extent(process).num_files,)
            if group.add_damage(contents.check_folder(folder, counts, None)):
                shards = [shard for shard in shards if shard.process != process]
        left = Counter((shard.request, shard.unit) for shard in shards)
        for window in self._windows(shards):
            try:
                extent = self._extent(window.process)
                claims.check_window(self._data, window, extent, self._codec)
            except IntegrityError as error:
                group.add_damage(error.damage)
                continue
            memory = arrays.aligned_empty((window.stop - window.start,), np.dtype(np.uint8))
            group.nbytes += memory.nbytes
            placed = []
            for shard in window.shards:
                request = requests[shard.request]
                view = _view(memory, shard, window, request)
                unit, key = request.plan.units[shard.unit], (shard.request, shard.unit)
                leaf = request.parts[shard.read.part]
                if unit.is_direct:
                    group.add(shard.request, {unit.boxes[0]: view})
                    placed.append(_Placed(shard, leaf, view, None))
                    continue
                if key not in buffers:
                    buffers[key] = new_buffers(request.plan, unit.boxes)
                    group.nbytes += sum(b.nbytes for b in buffers[key].values())
                placed.append(_Placed(shard, leaf, view, buffers[key]))
                left[key] -= 1
                if not left[key] and request.arrays:
                    begun[key] = buffers.pop(key)
                elif not left[key]:
                    group.add(shard.request, buffers.pop(key))
            group.jobs.append(functools.partial(self._read_window, memory, window, placed))
            if 2 * group.nbytes >= bound:
                yield group
                group = Group()
        if group.jobs:
            yield group

    def windows(self, requests: Sequence[Request]) -> Iterator[Window]:
        """What there is to read for all requests."""
        return self._windows(list(self._shards(requests)))

    def _windows(self, shards: Sequence[PackedShard]) -> Iterator[Window]:
        return windows(shards, {shard.process: self._extent(shard.process) for shard in shards})

    def _shards(self, requests: Sequence[Request]) -> Iterator[PackedShard]:
        for number, request in enumerate(requests):
            for at, unit in enumerate(request.plan.units):
                for read in unit.reads:
                    leaf = request.parts[read.part]
                    spec = leaf.spec
                    if spec is None or spec.storage != "packed":
                        continue
                    shard = self._index.entry(leaf.index, read.shard, spec)
                    yield PackedShard(
                        process=shard.process,
                        offset=shard.offset or 0,
                        nbytes=read.nbytes,
                        digest=shard.digests,
                        request=number,
                        unit=at,
                        read=read,
                    )

    def _extent(self, process: int) -> Packed:
        packed = self._tables[process].packed
        if packed is None:
            raise FormatError(f"table {process} has packed shards without a packed array")
        return packed

    def _store(self, process: int) -> ts.TensorStore:
        metadata = zarr.packed_metadata(self._extent(process), self._codec)
        folder = contents.packed_folder(self._data, process)
        return arrays.open_array(folder, metadata, self._ctx, write=False)

    def _read_window(self, memory: Array, window: Window, placed: Sequence["_Placed"]) -> None:
        lost = None
        if self._codec == "raw" and self._data.path is not None:
            lost = self._fill_window(memory, window, placed)
        if lost is None:
            lost = self._fetch_window(memory, window, placed)
        if lost:
            raise IntegrityError(lost)

    def _fill_window(
        self, memory: Array, window: Window, placed: Sequence["_Placed"]
    ) -> list[Damage] | None:
        """Read a window without TensorStore, and finish each shard while it is in the cache.

        Returns:
            What is damaged; None if the file cannot be read in this way.
        """
        packed = self._extent(window.process)
        piece, first = divmod(window.start, packed.shard_nbytes)
        folder = contents.packed_folder(self._data, window.process)
        lost: list[Damage] = []
        inside = min(packed.shard_nbytes, packed.nbytes - window.start + first)
        with (
            suppress(UnreadableError),
            open_raw(
                f"{folder}/{zarr.shard_file((piece,))}",
                chunk_nbytes=packed.chunk_nbytes,
                chunks=packed.chunks_per_file,
                present=-(-inside // packed.chunk_nbytes),
            ) as shard,
        ):
            if shard is None:
                return None
            done = 0
            for block in _blocks(placed, window):
                stop = block[-1].end - window.start
                with self._clock.stage("read"):
                    shard.fill(memory[done:stop], first + done)
                done = stop
                with self._clock.stage("verify"):
                    lost += _damage_of(self._finish, block)
            return lost
        return None

    def _fetch_window(
        self, memory: Array, window: Window, placed: Sequence["_Placed"]
    ) -> list[Damage]:
        """Read a window with TensorStore; what is damaged."""
        store = self._store(window.process)
        lost: list[Damage] = []
        try:
            what = f"reading packed array {window.process}"
            with self._clock.stage("read"), storage_errors(what):
                ts.array(memory).write(store[window.start : window.stop]).result()
        except (FileNotFoundError, UnreadableError):
            # One by one, to tell the leaves that are lost from those that are not.
            lost = _damage_of(lambda item: self._read_one(store, item), placed)
        lost_at = {(damage.path, damage.chunk) for damage in lost}
        rest = [item for item in placed if (item.leaf.text, item.position) not in lost_at]
        with self._clock.stage("verify"):
            return lost + _damage_of(self._finish, rest)

    def _read_one(self, store: ts.TensorStore, item: "_Placed") -> None:
        shard = item.shard
        flat = item.view.reshape(-1).view(np.uint8)
        box = Box((shard.offset,), (shard.offset + shard.nbytes,))
        self._check.fetch(store, flat, box, item.leaf, shard.read)

    def _finish(self, item: "_Placed") -> None:
        self._stats.add(item.view.nbytes)
        self._check.check(
            self._check.hash(item.view), item.shard.digest, item.leaf, item.shard.read
        )
        if item.buffers is not None:
            place_chunk(item.view, item.shard.read, item.buffers)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A packed shard in the memory of its window; `buffers` is None if it stays there."""

    shard: PackedShard
    leaf: Leaf
    view: Array
    buffers: Mapping[int, Array] | None

    @property
    def position(self) -> tuple[int, ...]:
        return position_of(self.shard.read, self.leaf)

    @property
    def end(self) -> int:
        """Where it ends in the packed array."""
        return self.shard.offset + self.shard.nbytes


def _blocks(placed: Sequence[_Placed], window: Window) -> Iterator[list[_Placed]]:
    """Packed shards in runs, each of which ends in one block of the window."""
    for _, block in groupby(placed, lambda item: (item.end - window.start) // BLOCK_NBYTES):
        yield list(block)


def _damage_of(step: Callable[["_Placed"], None], items: Sequence["_Placed"]) -> list[Damage]:
    damage: list[Damage] = []
    for item in items:
        try:
            step(item)
        except IntegrityError as error:
            damage += error.damage
    return damage


def _view(memory: Array, shard: PackedShard, window: Window, request: Request) -> Array:
    """A packed shard as an array, in the memory of its window."""
    start = shard.offset - window.start
    dtype = dtypes.dtype_of(request.plan.spec.dtype)
    flat = memory[start : start + shard.nbytes].view(dtype)
    return flat.reshape(shard.read.shape)
