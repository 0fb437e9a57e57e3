"""Execute a plan of a save: hash and write shards, pack the small ones, keep the table."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from pytree_ckpt.clock import StageClock
from pytree_ckpt.format import dtypes, tables, zarr
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Box, Grid
from pytree_ckpt.format.manifest import TableRef
from pytree_ckpt.format.tables import Packed, Rows, Table
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.plan.saving import SavePlan
from pytree_ckpt.store import arrays, contents
from pytree_ckpt.store.budget import ByteBudget
from pytree_ckpt.store.digests import digest_of, new_digest
from pytree_ckpt.store.failures import storage_errors
from pytree_ckpt.store.journal import PACKED, Journal
from pytree_ckpt.store.linking import Base
from pytree_ckpt.store.locations import Location
from pytree_ckpt.store.raw import BLOCK_NBYTES, blocks_of, new_raw
from pytree_ckpt.store.workers import Workers, thread_count
from pytree_ckpt.sweeps import no_sweeps

HostView = Callable[[int, Box], npt.NDArray[Any]]
"""`view(leaf, box)`: the elements of a box that this process holds, on the host."""
_MOST_PARTS = 512
"""Of memory that are written in one call."""
_WAITING = 12
"""Threads more, where files take time to become durable: a disk makes many so at once."""
_SLOW_SYNC_S = 1e-4


class Writer:
    """Writes what one process owns below a data folder.

    With a `base` the files of unchanged shards are linked. `on_write` is told the bytes that are
    written or linked. `order` has the rows of arrays as they are to be written. What the `journal`
    has is not written again.
    """

    def __init__(
        self,
        data: Location,
        plan: SavePlan,
        view: HostView,
        *,
        process: int,
        options: SaveOptions,
        clock: StageClock,
        base: Base | None = None,
        on_write: Callable[[int], None] | None = None,
        order: Sequence[tuple[int, int]] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._order = order
        self._journal = journal
        self.linked_nbytes = 0
        self._base = base
        self._clock = clock
        self._data = data
        self._plan = plan
        self._view = view
        self._process = process
        self._threads = thread_count(options.threads, in_store=data.path is None)
        self._codec = options.codec
        self._boxes: dict[tuple[int, int], Box] = {}
        self._new_digest = new_digest(options.digest)
        self._lock = threading.Lock()
        self._budget = ByteBudget(options.max_inflight_bytes, on_write)
        self._ctx = arrays.context(threads=self._threads)
        leaves = plan.names if process == 0 else np.unique(plan.array_leaf).tolist()
        # Of the arrays that this process writes to.
        self._folders = {leaf: contents.array_folder(data, plan.names[leaf]) for leaf in leaves}

    def write(self, per_process: Mapping[tuple[int, int], Any]) -> TableRef:
        """Write everything, durably up to `data`.

        `per_process` are the values that the table is to have, by leaf and process.
        """
        for name in ("arrays", "packed", "tables"):
            (self._data / name).make_folder()
        rows, packed_rows = self._write_shards()
        table = Table(
            process=self._process,
            arrays=rows,
            packed_rows=packed_rows,
            packed=self._plan.packed,
            per_process=per_process,
        )
        data, digest = tables.to_bytes(table)
        contents.table_file(self._data, self._process).write_new(data)
        for name in ("arrays", "packed", "tables"):
            (self._data / name).sync()
        return TableRef(nbytes=len(data), id=digest)

    def _write_shards(self) -> tuple[Rows, Rows]:
        plan = self._plan
        rows = list(zip(plan.array_leaf.tolist(), plan.array_shard.tolist(), strict=True))
        folders = list(self._folders.values())
        if plan.packed is not None:
            folders.append(contents.packed_folder(self._data, self._process))
        for folder in folders:
            # First of all, because TensorStore would follow a link in its place.
            folder.make_folder()
        digests: dict[tuple[int, int], bytes] = {}
        with Workers(self._count(files=len(rows)), "pytree_ckpt-save", all_or_nothing=True) as pool:
            described = pool.submit(partial(f.write_new, text) for f, text in self._metadata())
            pending = []
            for leaf, of_leaf in itertools.groupby(self._order or rows, key=lambda row: row[0]):
                # Opened one after the other, while the threads write what is before.
                store = None if self._is_raw(leaf) else self._open_leaf(leaf)
                own = list(of_leaf)
                written = pool.submit(
                    partial(self._once, row, partial(self._write_shard, store, *row)) for row in own
                )
                pending.append((own, written))
            pieces = pool.submit(
                partial(self._once, (PACKED, number), partial(self._write_piece, *piece))
                for number, piece in enumerate(self._pieces())
            )
            for own, written in pending:
                digests.update(zip(own, written.results(), strict=True))
            packed = pieces.results()
            described.results()
            # Once for all files of a folder: their entries become durable together.
            pool.submit(folder.sync for folder in folders).results()
        return (
            Rows(
                leaf=plan.array_leaf,
                shard=plan.array_shard,
                digests=b"".join(digests[row] for row in rows),
            ),
            Rows(
                leaf=plan.packed_leaf,
                shard=plan.packed_shard,
                offset=plan.packed_offset,
                digests=b"".join(packed),
            ),
        )

    def _count(self, *, files: int) -> int:
        """Threads to start: one more than processors, because each waits until its file is durable.

        Many more where that takes time. None more where an order was asked for: its shards are made
        in batches, and a batch for each thread is in memory.
        """
        if self._order is not None:
            return self._threads
        if files > self._threads:
            started = time.perf_counter()
            (self._data / "arrays").sync()
            if time.perf_counter() - started > _SLOW_SYNC_S:
                return self._threads + _WAITING
        return self._threads + 1

    def _once(self, key: tuple[int, int], write: Callable[[], bytes]) -> bytes:
        """The digests of what `write` writes, unless the journal has them."""
        found = None if self._journal is None else self._journal.digests(key)
        if found is None:
            found = write()
            if self._journal is not None:
                self._journal.add(key, found)
        return found

    def _metadata(self) -> Iterable[tuple[Location, bytes]]:
        """Place and content of every `zarr.json` that this process writes."""
        plan = self._plan
        if self._process == 0:
            texts: dict[int, bytes] = {}
            for leaf, folder in self._folders.items():
                code = plan.codes[leaf]
                if code not in texts:
                    texts[code] = zarr.to_json(zarr.array_metadata(plan.spec(leaf)))
                yield folder / "zarr.json", texts[code]
        if plan.packed is not None:
            folder = contents.packed_folder(self._data, self._process)
            text = zarr.to_json(zarr.packed_metadata(plan.packed, self._codec))
            yield folder / "zarr.json", text

    def _is_raw(self, leaf: int) -> bool:
        """Whether the files of a leaf are written without TensorStore: whole shards, no codec."""
        spec = self._plan.spec(leaf)
        return spec.codec == "raw" and spec.shards.is_even and self._data.path is not None

    def _open_leaf(self, leaf: int) -> ts.TensorStore:
        plan = self._plan
        return arrays.open_leaf(
            self._data, plan.names[leaf], plan.spec(leaf), self._ctx, write=True
        )

    def _write_shard(self, store: ts.TensorStore | None, leaf: int, shard: int) -> bytes:
        """Write one zarr shard; the digests of its chunks."""
        spec, box = self._plan.spec(leaf), self._box(leaf, shard)
        with self._budget.hold(box.size * spec.itemsize):
            with self._clock.stage("device_to_host"):
                source = np.ascontiguousarray(self._view(leaf, box))
            if self._base is not None and (found := self._link(self._base, leaf, shard, source)):
                return found
            if store is None:
                return self._write_raw(leaf, shard, source)
            return self._write_encoded(store[box.slices()], leaf, source)

    def _write_raw(self, leaf: int, shard: int, source: npt.NDArray[Any]) -> bytes:
        """Write the chunks of a shard one after the other, hashing each block as it is written."""
        spec = self._plan.spec(leaf)
        chunks = spec.chunks
        name = zarr.shard_file(spec.shards.position(shard))
        written = hashed = 0.0
        found = []
        with new_raw(
            f"{self._folders[leaf]}/{name}",
            chunk_nbytes=source.nbytes // chunks.size,
            chunks=chunks.size,
            present=chunks.size,
        ) as append:
            for box in chunks.boxes():
                running = self._new_digest()
                chunk = np.ascontiguousarray(source[box.slices()]).reshape(-1).view(np.uint8)
                for block in blocks_of(chunk):
                    started = time.perf_counter()
                    append(block)
                    middle = time.perf_counter()
                    running.update(block)
                    written += middle - started
                    hashed += time.perf_counter() - middle
                found.append(running.digest())
        self._clock.add("write", written)
        self._clock.add("hash", hashed)
        return b"".join(found)

    def _write_encoded(self, place: ts.TensorStore, leaf: int, source: npt.NDArray[Any]) -> bytes:
        """Write a shard with TensorStore, hashing it meanwhile."""
        spec = self._plan.spec(leaf)
        values = source.view(dtypes.storage_dtype(spec.dtype))
        with storage_errors(f"writing {self._folders[leaf].in_errors}"):
            pending = place.write(values, can_reference_source_data_indefinitely=True)
            try:
                return self._digests(spec, source)
            finally:
                # The memory of `values` is TensorStore's until the write is done.
                with self._clock.stage("write"):
                    pending.result()

    def _digests(self, spec: ArraySpec, source: npt.NDArray[Any]) -> bytes:
        """The digests of the chunks of a shard."""
        with self._clock.stage("hash"):
            grid = Grid(source.shape, spec.chunk_shape)
            found = [digest_of(self._new_digest, source[b.slices()]) for b in grid.boxes()]
        return b"".join(found)

    def _link(self, base: Base, leaf: int, shard: int, source: npt.NDArray[Any]) -> bytes | None:
        """Link the file of a shard that the base has; its digests, None if it must be written."""
        spec = self._plan.spec(leaf)
        twin = base.twin(leaf, spec)
        if twin is None:
            return None
        found = self._digests(spec, source)
        with self._clock.stage("link"):
            if not base.link(twin, shard, source, found, self._folders[leaf]):
                return None
        with self._lock:
            self.linked_nbytes += source.nbytes
        return found

    def _box(self, leaf: int, shard: int) -> Box:
        """The elements of a shard; leaves of one spec share the work."""
        key = (self._plan.codes[leaf], shard)
        box = self._boxes.get(key)
        if box is None:
            box = self._boxes[key] = self._plan.spec(leaf).shards.box(shard)
        return box

    def _pieces(self) -> Iterable[tuple[ts.TensorStore | None, Packed, int]]:
        """The files of the packed array."""
        packed = self._plan.packed
        if packed is None:
            return
        folder = contents.packed_folder(self._data, self._process)
        store = None
        if self._codec != "raw" or self._data.path is None:
            metadata = zarr.packed_metadata(packed, self._codec)
            store = arrays.open_array(folder, metadata, self._ctx, write=True)
        for file in range(packed.num_files):
            yield store, packed, file

    def _write_piece(self, store: ts.TensorStore | None, packed: Packed, file: int) -> bytes:
        """Write a file of the packed array; digests of its shards."""
        base = file * packed.shard_nbytes
        nbytes = min(packed.shard_nbytes, packed.nbytes - base)
        found: list[bytes] = []
        runs = self._runs(self._plan.packed_rows(packed, file), nbytes, found)
        folder = contents.packed_folder(self._data, self._process)
        with self._budget.hold(nbytes):
            if store is None:
                # Collections are off until the file must be durable, which may take long.
                with (
                    new_raw(
                        f"{folder}/{zarr.shard_file((file,))}",
                        chunk_nbytes=packed.chunk_nbytes,
                        chunks=packed.chunks_per_file,
                        present=nbytes // packed.chunk_nbytes,
                    ) as append,
                    no_sweeps(),
                ):
                    for run in runs:
                        with self._clock.stage("write"):
                            append(*run)
            else:
                with no_sweeps():
                    whole = np.frombuffer(b"".join(itertools.chain.from_iterable(runs)), np.uint8)
                with self._clock.stage("write"), storage_errors(f"writing {folder.in_errors}"):
                    place = store[base : base + nbytes]
                    place.write(whole, can_reference_source_data_indefinitely=True).result()
        return b"".join(found)

    def _runs(
        self, rows: Iterable[tuple[int, int, int]], nbytes: int, found: list[bytes]
    ) -> Iterator[list[memoryview]]:
        """The bytes of a file of the packed array, about a block at a time; digests go to `found`.

        So what was hashed is in the cache when it is written. What lies between shards is zero, so
        that equal states are equal bytes.
        """
        run: list[memoryview] = []
        end = run_end = 0
        viewed = hashed = 0.0
        for leaf, shard, at in rows:
            started = time.perf_counter()
            source = np.ascontiguousarray(self._view(leaf, self._box(leaf, shard)))
            flat = source.reshape(-1).view(np.uint8).data
            if at > end:
                run.append(memoryview(bytes(at - end)))
            middle = time.perf_counter()
            found.append(self._new_digest(flat).digest())
            hashed += time.perf_counter() - middle
            viewed += middle - started
            run.append(flat)
            end = at + len(flat)
            if end - run_end >= BLOCK_NBYTES or len(run) >= _MOST_PARTS:
                yield run
                run, run_end = [], end
        if end < nbytes:
            run.append(memoryview(bytes(nbytes - end)))
        self._clock.add("device_to_host", viewed)
        self._clock.add("hash", hashed)
        yield run
