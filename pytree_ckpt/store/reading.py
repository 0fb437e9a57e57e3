"""Execute plans of a load: read each chunk once, verify it, scatter it to who wants it."""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import tensorstore as ts

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import CheckpointError, Damage, FormatError, IntegrityError
from pytree_ckpt.format import dtypes, zarr
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.tables import ShardIndex, Table
from pytree_ckpt.options import LoadOptions
from pytree_ckpt.plan.loading import ChunkRead, ReadUnit
from pytree_ckpt.plan.windows import Window
from pytree_ckpt.store import arrays, claims, contents
from pytree_ckpt.store.checks import ChunkCheck, ReadStats
from pytree_ckpt.store.failures import UnreadableError
from pytree_ckpt.store.locations import Location
from pytree_ckpt.store.packed import PackedReader
from pytree_ckpt.store.raw import open_raw
from pytree_ckpt.store.requests import (
    Array,
    Begun,
    Filled,
    Group,
    Request,
    new_buffers,
    place_chunk,
    small_buffers,
)
from pytree_ckpt.store.workers import Batch, Workers, thread_count
from pytree_ckpt.sweeps import no_sweeps


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
        self._threads = thread_count(options.threads, in_store=location.path is None)
        self._bound = options.max_inflight_bytes
        self._check = ChunkCheck(manifest.digest, verify=verify, clock=self._clock)
        self._ctx = arrays.context(threads=self._threads)
        self._stores: dict[int, ts.TensorStore] = {}
        self._folders: dict[str, Location] = {}
        contents.refuse_link(self._data, None)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables of all processes, each checked against the manifest."""
        return contents.read_tables(self._data, self.manifest)

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
        # Counted first: what a manifest says of processes is not to be listed.
        count = self.manifest.process_count
        if len(found) != count or sorted(found) != list(range(count)):
            raise FormatError(f"the tables lack values of leaf {leaf}, which each process has")
        return [found[process] for process in range(count)]

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
        with Workers(self._threads + 1, "pytree_ckpt-load", all_or_nothing=False) as pool:
            ahead: deque[tuple[Group, Batch[None]]] = deque()
            for group in _each(self._groups(requests)):
                ahead.append((group, pool.submit(group.jobs)))
                del group
                if len(ahead) > 1:
                    yield from _collect(*ahead.popleft(), damage)
            while ahead:
                yield from _collect(*ahead.popleft(), damage)
        if damage:
            intact = self.stats.chunks - sum(d.kind == "digest" for d in damage)
            note = f"The other {intact} chunks that were read are intact."
            raise IntegrityError(damage, note=note if self._check.verify else "")

    def _groups(self, requests: Sequence[Request]) -> Iterator[Group]:
        for name in ("arrays", "packed"):
            contents.refuse_link(self._data / name, None)
        refused = self._refused(requests)
        begun: Begun = {}
        if self._packed is not None:
            yield from self._packed.groups(requests, refused, begun, bound=self._bound)
        group = Group()
        for damage in refused.values():
            group.add_damage(damage)
        for number, request in enumerate(requests):
            own = request.arrays
            if not own:
                continue
            odd = [found for leaf in own for found in self._odd_in_array(leaf)]
            if group.add_damage(odd):
                continue
            small = small_buffers(request.plan)
            for at, unit in enumerate(request.plan.units):
                if (number, at) in refused:
                    continue
                buffers = begun.pop((number, at), None)
                if buffers is None:
                    buffers = (
                        {box: small[box] for box in unit.boxes}
                        if small
                        else new_buffers(request.plan, unit.boxes)
                    )
                    group.nbytes += sum(buffer.nbytes for buffer in buffers.values())
                self._add_unit(group, number, request, unit, buffers)
                if 2 * group.nbytes >= self._bound:
                    yield group
                    group = Group()
        if group.jobs or group.filled:
            yield group

    @cached_property
    def _packed(self) -> PackedReader | None:
        """The reader of what is packed, None if nothing is."""
        codec = self.manifest.packed_codec
        if codec is None:
            return None
        return PackedReader(
            self._data,
            codec=codec,
            tables=self.tables,
            index=self.index,
            check=self._check,
            stats=self.stats,
            clock=self._clock,
            ctx=self._ctx,
        )

    def packed_windows(self, requests: Sequence[Request]) -> list[Window]:
        """The parts of packed arrays that requests need, no two of which share a chunk of them."""
        return [] if self._packed is None else list(self._packed.windows(requests))

    def check_claims(self, requests: Sequence[Request]) -> None:
        """Check that the files can hold what is asked for.

        Raises:
            IntegrityError: They cannot.
        """
        refused = self._refused(requests).values()
        if refused:
            raise IntegrityError([damage for found in refused for damage in found])

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
                    claims.check_unit(self._data, self.tables, unit, request.parts)
                except IntegrityError as error:
                    refused[number, at] = error.damage
        return refused

    def _add_unit(
        self,
        group: Group,
        number: int,
        request: Request,
        unit: ReadUnit,
        buffers: dict[int, Array],
    ) -> None:
        """The boxes of a unit, and a job for each chunk of it that is not packed."""
        group.add(number, buffers)
        for read in unit.reads:
            leaf = request.parts[read.part]
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
        folder = self._folders.get(leaf.name)
        if folder is None:
            folder = self._folders[leaf.name] = contents.array_folder(self._data, leaf.name)
        name = zarr.shard_file(spec.shards.position(read.shard))
        found = self._read_raw(f"{folder}/{name}", spec, read, place)
        if found is None:
            claims.check_shard(folder / name, spec, leaf.text)
            store = self._store(leaf.index, leaf.name, spec)
            self._check.fetch(
                store, place.view(dtypes.storage_dtype(spec.dtype)), read.box, leaf, read
            )
            with self._clock.stage("verify"):
                found = self._check.hash(place)
        self.stats.add(place.nbytes)
        self._check.check(found, self.index.entry(leaf.index, read.shard, spec).digests, leaf, read)
        place_chunk(place, read, buffers)

    def _read_raw(self, file: str, spec: ArraySpec, read: ChunkRead, place: Array) -> bytes | None:
        """Read a chunk without TensorStore, where that is possible; its digest."""
        if self._data.path is None or spec.codec != "raw" or read.shape != spec.chunk_shape:
            return None
        start, chunks = read.chunk * read.nbytes, spec.chunks.size
        with (
            suppress(UnreadableError),
            open_raw(file, chunk_nbytes=read.nbytes, chunks=chunks, present=chunks) as shard,
        ):
            if shard is not None and self._check.verify:
                return shard.fill_and_hash(place, start, self._check.new_digest, self._clock)
            if shard is not None:
                with self._clock.stage("read"):
                    shard.fill(place, start)
                return b""
        return None

    def _store(self, leaf: int, name: str, spec: ArraySpec) -> ts.TensorStore:
        store = self._stores.get(leaf)
        if store is None:
            store = arrays.open_leaf(self._data, name, spec, self._ctx, write=False)
            self._stores[leaf] = store
        return store

    def _odd_in_array(self, leaf: Leaf) -> list[Damage]:
        if leaf.name is None:
            return []
        folder = contents.array_folder(self._data, leaf.name)
        return contents.check_folder(folder, leaf.array.shards.counts, leaf.text)


def _each(groups: Iterator[Group]) -> Iterator[Group]:
    """The same, each made without a collection."""
    while True:
        with no_sweeps():
            group = next(groups, None)
        if group is None:
            return
        yield group


def _collect(group: Group, jobs: Batch[None], damage: list[Damage]) -> Iterator[list[Filled]]:
    """What a group filled; after the first damage nothing, only what else is damaged."""
    for failure in jobs.failures():
        if not isinstance(failure, IntegrityError):
            raise failure
        damage += failure.damage
    if not damage and group.filled:
        yield group.filled
