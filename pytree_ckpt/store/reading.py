"""Execute plans of a load: read each chunk once, verify it, scatter it to who wants it."""

import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import CheckpointError, Damage, DamageKind, FormatError, IntegrityError
from pytree_ckpt.format import dtypes, tables, zarr
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.tables import Packed, ShardIndex, Table
from pytree_ckpt.options import LoadOptions
from pytree_ckpt.plan.loading import ChunkRead, ReadPlan, ReadUnit
from pytree_ckpt.plan.windows import PackedShard, Window, windows
from pytree_ckpt.store import arrays, claims, contents
from pytree_ckpt.store.digests import digest_function, digest_of, new_digest
from pytree_ckpt.store.failures import UnreadableError, storage_errors
from pytree_ckpt.store.locations import Location
from pytree_ckpt.store.raw import BLOCK_NBYTES, open_raw
from pytree_ckpt.store.workers import Workers, thread_count

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A wanted box whose every chunk is verified: `buffer` is box number `box` of `request`."""

    request: int
    box: int
    buffer: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A leaf, and how the wanted boxes of it are filled; a stack is made of `rest` too."""

    leaf: Leaf
    plan: ReadPlan
    rest: tuple[Leaf, ...] = ()

    def part(self, number: int) -> Leaf:
        """The stored leaf that chunks of this part are read from."""
        return self.rest[number - 1] if number else self.leaf

    @property
    def arrays(self) -> list[Leaf]:
        """Its leaves that are not packed."""
        parts = (self.leaf, *self.rest)
        return [p for p in parts if p.spec is not None and p.spec.storage != "packed"]


class ReadStats:
    """What a reader has read so far; `on_read` is told the bytes."""

    def __init__(self, on_read: Callable[[int], None] | None) -> None:
        self.nbytes = 0
        self.chunks = 0
        self._on_read = on_read
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self.chunks += 1
            if self._on_read is not None:
                self._on_read(self.nbytes)


class CheckpointReader:
    """Reads verified array data of one checkpoint.

    Raises:
        IntegrityError: A table is missing or is not the one that the manifest names.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        *,
        verify: bool,
        options: LoadOptions,
        clock: StageClock | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self._clock = clock or StageClock()
        self.manifest = manifest
        self.stats = ReadStats(on_read)
        self._data = location / manifest.data_dir
        self._verify = verify
        self._threads = thread_count(options.threads, in_store=location.path is None)
        self._bound = options.max_inflight_bytes
        self._new_digest = new_digest(manifest.digest)
        self._digest = digest_function(manifest.digest)
        self._ctx = arrays.context(threads=self._threads)
        self._stores: dict[int, ts.TensorStore] = {}
        contents.refuse_link(self._data, None)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables of all processes, each checked against the manifest."""
        contents.refuse_link(self._data / "tables", None)
        return tuple(
            contents.read_table(self._data, self.manifest, process)
            for process in range(len(self.manifest.tables))
        )

    def per_process(self, leaf: int) -> list[Any]:
        """The values of a leaf that every process has its own of, by process.

        Raises:
            FormatError: The tables do not have one for each process.
        """
        found = {
            process: value
            for table in self.tables
            for (at, process), value in table.per_process.items()
            if at == leaf
        }
        if sorted(found) != list(range(self.manifest.process_count)):
            raise FormatError(f"the tables lack values of leaf {leaf}, which each process has")
        return [found[process] for process in range(self.manifest.process_count)]

    @cached_property
    def index(self) -> ShardIndex:
        """Every shard with its place and digests."""
        return ShardIndex(self.manifest.leaf_specs, self.tables, digest=self.manifest.digest)

    def read(self, requests: Sequence[Request]) -> Iterator[list[Filled]]:
        """Fill the wanted boxes; yields them in groups as they are verified.

        Two groups, together of about `max_inflight_bytes`, are in flight: while the caller
        places one, the next is read.

        Raises:
            IntegrityError: Chunks that are damaged: all of those that these requests need.
        """
        damage: list[Damage] = []
        # Built before the threads share it.
        _ = self.index
        # One more than processors, because each waits for TensorStore before it hashes.
        with Workers(self._threads + 1, "pytree_ckpt-load") as pool:
            ahead: deque[tuple[_Group, list[Future[None]]]] = deque()
            try:
                for group in self._groups(requests):
                    ahead.append((group, [pool.submit(job) for job in group.jobs]))
                    del group
                    if len(ahead) > 1:
                        yield from _collect(*ahead.popleft(), damage)
                while ahead:
                    yield from _collect(*ahead.popleft(), damage)
            finally:
                for _, jobs in ahead:
                    for job in jobs:
                        job.cancel()
        if damage:
            intact = self.stats.chunks - sum(d.kind == "digest" for d in damage)
            note = f"The other {intact} chunks that were read are intact."
            raise IntegrityError(damage, note=note if self._verify else "")

    def _groups(self, requests: Sequence[Request]) -> Iterator["_Group"]:
        for name in ("arrays", "packed"):
            contents.refuse_link(self._data / name, None)
        refused = self._refused(requests)
        begun: _Begun = {}
        yield from self._packed_groups(requests, refused, begun)
        group = _Group(jobs=[functools.partial(_report, odd) for odd in refused.values()])
        for number, request in enumerate(requests):
            own = request.arrays
            if not own:
                continue
            odd = [damage for leaf in own for damage in self._odd_in_array(leaf)]
            if odd:
                group.jobs.append(functools.partial(_report, odd))
            if any(damage.kind == "link" for damage in odd):
                continue
            small = _small_buffers(request.plan)
            for at, unit in enumerate(request.plan.units):
                if (number, at) in refused:
                    continue
                buffers = begun.pop((number, at), None)
                if buffers is None:
                    buffers = (
                        {box: small[box] for box in unit.boxes}
                        if small
                        else _buffers(request.plan, unit.boxes)
                    )
                    group.nbytes += sum(buffer.nbytes for buffer in buffers.values())
                self._add_unit(group, number, request, unit, buffers)
                if 2 * group.nbytes >= self._bound:
                    yield group
                    group = _Group()
        if group.jobs or group.filled:
            yield group

    def _refused(self, requests: Sequence[Request]) -> dict[tuple[int, int], Sequence[Damage]]:
        """Units, by number of request and unit, that their files cannot hold, and why."""
        refused: dict[tuple[int, int], Sequence[Damage]] = {}
        plans = {id(request.plan): request.plan for request in requests}
        large = {key for key, plan in plans.items() if plan.nbytes_read > claims.TRUSTED_NBYTES}
        for number, request in enumerate(requests):
            if id(request.plan) not in large:
                continue
            for at, unit in enumerate(request.plan.units):
                try:
                    claims.check_unit(self._data, self.tables, unit, request.part)
                except IntegrityError as error:
                    refused[number, at] = error.damage
        return refused

    def _add_unit(
        self,
        group: "_Group",
        number: int,
        request: Request,
        unit: ReadUnit,
        buffers: dict[int, Array],
    ) -> None:
        """The boxes of a unit, and a job for each chunk of it that is not packed."""
        group.add(number, buffers)
        for read in unit.reads:
            leaf = request.part(read.part)
            if leaf.spec is not None and leaf.spec.storage == "array":
                group.jobs.append(functools.partial(self._read_chunk, leaf, read, buffers))

    def _read_chunk(self, leaf: Leaf, read: ChunkRead, buffers: Mapping[int, Array]) -> None:
        spec = leaf.spec
        if spec is None or leaf.name is None:
            raise CheckpointError(f"{leaf.text} has no array of its own")
        if read.into is None:
            place = arrays.aligned_empty(read.shape, dtypes.dtype_of(spec.dtype))
        else:
            place = buffers[read.into][read.place].reshape(read.shape)
        folder = contents.array_folder(self._data, leaf.name)
        file = folder / zarr.shard_file(spec.shards.position(read.shard))
        found = self._read_raw(file.path, spec, read, place)
        if found is None:
            claims.check_shard(file, spec, leaf.text)
            store = self._store(leaf.index, leaf.name, spec)
            self._fetch(store, place.view(dtypes.storage_dtype(spec.dtype)), read.box, leaf, read)
            with self._clock.stage("verify"):
                found = self._hash(place)
        self.stats.add(place.nbytes)
        self._check(found, self.index.entry(leaf.index, read.shard, spec).digests, leaf, read)
        _place(place, read, buffers)

    def _read_raw(
        self, file: Path | None, spec: ArraySpec, read: ChunkRead, place: Array
    ) -> bytes | None:
        """Read a chunk without TensorStore, where that is possible; its digest."""
        if spec.codec != "raw" or read.shape != spec.chunk_shape:
            return None
        start, chunks = read.chunk * read.nbytes, spec.chunks_per_shard
        with (
            suppress(UnreadableError),
            open_raw(file, chunk_nbytes=read.nbytes, chunks=chunks, present=chunks) as shard,
        ):
            if shard is not None and self._verify:
                return shard.fill_and_hash(place, start, self._new_digest, self._clock)
            if shard is not None:
                with self._clock.stage("read"):
                    shard.fill(place, start)
                return b""
        return None

    def _hash(self, place: Array) -> bytes:
        return digest_of(self._digest, place) if self._verify else b""

    def _fetch(
        self, store: ts.TensorStore, place: Array, box: Box, leaf: Leaf, read: ChunkRead
    ) -> None:
        """Read `box` of a Zarr array, which is chunk `read` of a leaf, into memory of ours."""
        where = f"chunk {_position(read, leaf)} of {leaf.text or '(root)'}"
        try:
            with self._clock.stage("read"), storage_errors(f"reading {where}"):
                ts.array(place).write(store[box.slices()]).result()
        except FileNotFoundError:
            raise self._chunk_damage("missing", f"{where} is missing", leaf, read) from None
        except UnreadableError as error:
            text = f"{where} is damaged: {error}"
            raise self._chunk_damage("unreadable", text, leaf, read) from None

    def _check(self, found: bytes, digests: bytes, leaf: Leaf, read: ChunkRead) -> None:
        if not self._verify:
            return
        size = tables.DIGEST_NBYTES[self.manifest.digest]
        wanted = digests[read.chunk * size : (read.chunk + 1) * size]
        if found != wanted:
            text = (
                f"chunk {_position(read, leaf)} of {leaf.text or '(root)'} is damaged: "
                f"digest {found.hex()[:8]}…, the checkpoint has {wanted.hex()[:8]}…"
            )
            raise self._chunk_damage("digest", text, leaf, read)

    def _chunk_damage(
        self, kind: DamageKind, text: str, leaf: Leaf, read: ChunkRead
    ) -> IntegrityError:
        damage = Damage(
            path=leaf.text,
            kind=kind,
            text=text,
            chunk=_position(read, leaf),
            box=tuple(zip(read.box.start, read.box.stop, strict=True)),
            devices=() if leaf.spec is None else leaf.spec.devices_of(read.box),
        )
        return IntegrityError([damage])

    def _store(self, leaf: int, name: str, spec: ArraySpec) -> ts.TensorStore:
        store = self._stores.get(leaf)
        if store is None:
            store = arrays.open_leaf(self._data, name, spec, self._ctx, write=False)
            self._stores[leaf] = store
        return store

    def _odd_in_array(self, leaf: Leaf) -> list[Damage]:
        if leaf.spec is None or leaf.name is None:
            return []
        folder = contents.array_folder(self._data, leaf.name)
        return contents.check_folder(folder, leaf.spec.shards.counts, leaf.text)

    def _packed_groups(
        self, requests: Sequence[Request], refused: Collection[tuple[int, int]], begun: "_Begun"
    ) -> Iterator["_Group"]:
        """Packed shards: few large reads, each of many shards.

        A stack with parts that are not packed is left in `begun`.
        """
        shards = [
            shard
            for shard in self._packed_shards(requests)
            if (shard.request, shard.unit) not in refused
        ]
        buffers: dict[tuple[int, int], dict[int, Array]] = {}
        group = _Group()
        for process in sorted({shard.process for shard in shards}):
            odd = self._odd_in_packed(process)
            if odd:
                group.jobs.append(functools.partial(_report, odd))
            if any(damage.kind == "link" for damage in odd):
                shards = [shard for shard in shards if shard.process != process]
        left = Counter((shard.request, shard.unit) for shard in shards)
        extents = {shard.process: self._extent(shard.process) for shard in shards}
        for window in windows(shards, extents):
            try:
                claims.check_window(self._data, window, extents[window.process], self._packed_codec)
            except IntegrityError as error:
                group.jobs.append(functools.partial(_report, error.damage))
                continue
            memory = arrays.aligned_empty((window.stop - window.start,), np.dtype(np.uint8))
            group.nbytes += memory.nbytes
            placed = []
            for shard in window.shards:
                request = requests[shard.request]
                view = _view(memory, shard, window, request)
                unit, key = request.plan.units[shard.unit], (shard.request, shard.unit)
                leaf = request.part(shard.read.part)
                if unit.is_direct:
                    group.add(shard.request, {unit.boxes[0]: view})
                    placed.append(_Placed(shard, leaf, view, None))
                    continue
                if key not in buffers:
                    buffers[key] = _buffers(request.plan, unit.boxes)
                    group.nbytes += sum(b.nbytes for b in buffers[key].values())
                placed.append(_Placed(shard, leaf, view, buffers[key]))
                left[key] -= 1
                if not left[key] and request.arrays:
                    begun[key] = buffers.pop(key)
                elif not left[key]:
                    group.add(shard.request, buffers.pop(key))
            group.jobs.append(functools.partial(self._read_window, memory, window, placed))
            if 2 * group.nbytes >= self._bound:
                yield group
                group = _Group()
        if group.jobs:
            yield group

    def _packed_shards(self, requests: Sequence[Request]) -> Iterator[PackedShard]:
        for number, request in enumerate(requests):
            for at, unit in enumerate(request.plan.units):
                for read in unit.reads:
                    leaf = request.part(read.part)
                    spec = leaf.spec
                    if spec is None or spec.storage != "packed":
                        continue
                    shard = self.index.entry(leaf.index, read.shard, spec)
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
        packed = self.tables[process].packed
        if packed is None:
            raise FormatError(f"table {process} has packed shards without a packed array")
        return packed

    @cached_property
    def _packed_codec(self) -> str:
        return next(s.codec for s in self.manifest.specs if s.storage == "packed")

    def _packed_store(self, process: int) -> ts.TensorStore:
        metadata = arrays.packed_zarr(self._extent(process), self._packed_codec)
        folder = contents.packed_folder(self._data, process)
        return arrays.open_array(folder, metadata, self._ctx, write=False)

    def _odd_in_packed(self, process: int) -> list[Damage]:
        packed = self._extent(process)
        files = -(-packed.nbytes // packed.shard_nbytes)
        return contents.check_folder(contents.packed_folder(self._data, process), (files,), None)

    def _read_window(self, memory: Array, window: Window, placed: Sequence["_Placed"]) -> None:
        lost = self._fill_window(memory, window, placed) if self._packed_codec == "raw" else None
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
                (folder / zarr.shard_file((piece,))).path,
                chunk_nbytes=packed.chunk_nbytes,
                chunks=packed.shard_nbytes // packed.chunk_nbytes,
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
                    lost += _damage_of(self._finish_packed, block)
            return lost
        return None

    def _fetch_window(
        self, memory: Array, window: Window, placed: Sequence["_Placed"]
    ) -> list[Damage]:
        """Read a window with TensorStore; what is damaged."""
        store = self._packed_store(window.process)
        lost: list[Damage] = []
        try:
            what = f"reading packed array {window.process}"
            with self._clock.stage("read"), storage_errors(what):
                ts.array(memory).write(store[window.start : window.stop]).result()
        except (FileNotFoundError, UnreadableError):
            # One by one, to tell the leaves that are lost from those that are not.
            lost = _damage_of(lambda item: self._read_packed(store, item), placed)
        lost_at = {(damage.path, damage.chunk) for damage in lost}
        rest = [item for item in placed if (item.leaf.text, item.position) not in lost_at]
        with self._clock.stage("verify"):
            return lost + _damage_of(self._finish_packed, rest)

    def _read_packed(self, store: ts.TensorStore, item: "_Placed") -> None:
        shard = item.shard
        flat = item.view.reshape(-1).view(np.uint8)
        box = Box((shard.offset,), (shard.offset + shard.nbytes,))
        self._fetch(store, flat, box, item.leaf, shard.read)

    def _finish_packed(self, item: "_Placed") -> None:
        self.stats.add(item.view.nbytes)
        self._check(self._hash(item.view), item.shard.digest, item.leaf, item.shard.read)
        if item.buffers is not None:
            _place(item.view, item.shard.read, item.buffers)


_Begun = dict[tuple[int, int], dict[int, Array]]
"""Buffers of a unit that have its packed shards, by the numbers of request and unit."""


@dataclass(slots=True)
class _Group:
    """Jobs that run together, and what is filled when all of them are done."""

    jobs: list[Callable[[], None]] = field(default_factory=list)
    filled: list[Filled] = field(default_factory=list)
    nbytes: int = 0

    def add(self, request: int, buffers: Mapping[int, Array]) -> None:
        for box, buffer in buffers.items():
            self.filled.append(Filled(request=request, box=box, buffer=buffer))


@dataclass(frozen=True, slots=True)
class _Placed:
    """A packed shard in the memory of its window; `buffers` is None if it stays there."""

    shard: PackedShard
    leaf: Leaf
    view: Array
    buffers: Mapping[int, Array] | None

    @property
    def position(self) -> tuple[int, ...]:
        return _position(self.shard.read, self.leaf)

    @property
    def end(self) -> int:
        """Where it ends in the packed array."""
        return self.shard.offset + self.shard.nbytes


def _blocks(placed: Sequence[_Placed], window: Window) -> Iterator[list[_Placed]]:
    """Packed shards in runs, each of which ends in one block of the window."""
    for _, block in groupby(placed, lambda item: (item.end - window.start) // BLOCK_NBYTES):
        yield list(block)


def _report(damage: Sequence[Damage]) -> None:
    raise IntegrityError(damage)


def _damage_of(step: Callable[["_Placed"], None], items: Sequence["_Placed"]) -> list[Damage]:
    damage: list[Damage] = []
    for item in items:
        try:
            step(item)
        except IntegrityError as error:
            damage += error.damage
    return damage


def _collect(
    group: _Group, jobs: Sequence[Future[None]], damage: list[Damage]
) -> Iterator[list[Filled]]:
    """What a group filled; after the first damage nothing, only what else is damaged."""
    for job in jobs:
        try:
            job.result()
        except IntegrityError as error:
            damage += error.damage
    if not damage and group.filled:
        yield group.filled


def _buffers(plan: ReadPlan, boxes: Iterable[int]) -> dict[int, Array]:
    """New memory for boxes of an array, in one piece: large pieces cost fewer page faults."""
    dtype = dtypes.dtype_of(plan.spec.dtype)
    sizes = {at: plan.boxes[at].size * dtype.itemsize for at in boxes}
    ends = list(
        accumulate(-(-nbytes // arrays.ALIGNMENT) * arrays.ALIGNMENT for nbytes in sizes.values())
    )
    memory = arrays.aligned_empty((ends[-1],), np.dtype(np.uint8))
    return {
        at: memory[start : start + nbytes].view(dtype).reshape(plan.boxes[at].shape)
        for (at, nbytes), start in zip(sizes.items(), [0, *ends], strict=False)
    }


def _small_buffers(plan: ReadPlan) -> dict[int, Array] | None:
    """Memory for all boxes of an array, None if it is so large that they are let go one by one."""
    if plan.nbytes_needed > _SMALL_NBYTES or not plan.boxes:
        return None
    return _buffers(plan, range(len(plan.boxes)))


_SMALL_NBYTES = 64 << 20


def _view(memory: Array, shard: PackedShard, window: Window, request: Request) -> Array:
    """A packed shard as an array, in the memory of its window."""
    start = shard.offset - window.start
    dtype = dtypes.dtype_of(request.plan.spec.dtype)
    flat = memory[start : start + shard.nbytes].view(dtype)
    return flat.reshape(shard.read.shape)


def _place(chunk: Array, read: ChunkRead, buffers: Mapping[int, Array]) -> None:
    """Copy a verified chunk to every box that wants a part of it."""
    if read.into is not None and not np.may_share_memory(chunk, buffers[read.into]):
        buffers[read.into][read.place] = chunk
    for copy in read.copies:
        buffers[copy.box][copy.place] = chunk[copy.source]


def _position(read: ChunkRead, leaf: Leaf) -> tuple[int, ...]:
    """Position of a chunk in the grid of all chunks of its array."""
    cell = leaf.spec.chunk_shape if leaf.spec is not None else ()
    return tuple(a // c for a, c in zip(read.box.start, cell, strict=True))
