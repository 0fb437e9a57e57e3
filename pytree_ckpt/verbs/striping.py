"""A striped load: each chunk is read by one process, and sent to all that want it.

Bytes move, not arrays: what a chunk is wanted for does not matter on the way, so every dtype,
shape and sharding is alike, and leaves of the host are striped too.
"""

import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import CheckpointError, Damage, IntegrityError, Mismatch, MismatchError
from pytree_ckpt.format import dtypes
from pytree_ckpt.jaxio import processes
from pytree_ckpt.jaxio.coordination import Session
from pytree_ckpt.jaxio.spreading import Spreader
from pytree_ckpt.options import LoadOptions
from pytree_ckpt.plan import striping
from pytree_ckpt.plan.loading import plan_chunks
from pytree_ckpt.plan.striping import Job, Piece, Round, Wants
from pytree_ckpt.store.arrays import aligned_empty
from pytree_ckpt.store.reading import CheckpointReader
from pytree_ckpt.store.requests import Array, Filled, Request, new_buffers
from pytree_ckpt.store.workers import Workers

Outgoing = dict[int, list[Piece]]
_MOST_TOLD = 100
"""Damaged chunks that a process tells the others of, in each round."""


class StripedReader:
    """Fills the boxes that this process wants of requests that are those of all processes.

    Construction reads the tables and plans; it is the same on all processes.

    Args:
        wanters: By request the processes that want each box.

    Raises:
        IntegrityError: A table is damaged, or files are too small for what is claimed.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        requests: Sequence[Request],
        wanters: Sequence[tuple[tuple[int, ...], ...]],
        *,
        options: LoadOptions,
        clock: StageClock,
    ) -> None:
        self._reader, self._requests, self._clock = reader, requests, clock
        self._process, self._count = processes.process_index(), processes.process_count()
        self._max_inflight_bytes = options.max_inflight_bytes
        self._wants = [
            Wants(plan=request.plan, wanters=who)
            for request, who in zip(requests, wanters, strict=True)
        ]
        reader.check_claims(requests)
        self._rounds = striping.plan_rounds(
            list(self._jobs()),
            self._wants,
            processes=self._count,
            max_inflight_bytes=options.max_inflight_bytes,
        )
        self._slot_nbytes = striping.slot_nbytes(
            self._rounds, processes=self._count, max_inflight_bytes=options.max_inflight_bytes
        )
        self._send = aligned_empty((self._count, self._slot_nbytes), np.dtype(np.uint8))
        self._send[...] = 0  # what is in memory by chance goes to nobody
        self._spreader = Spreader(self._slot_nbytes)
        self._buffers: dict[tuple[int, int], Array] = {}
        self._left: dict[tuple[int, int], int] = {}

    def _jobs(self) -> Iterator[Job]:
        for window in self._reader.packed_windows(self._requests):
            reads = tuple((shard.request, shard.read) for shard in window.shards)
            yield Job(reads=reads, is_packed=True)
        for number, request in enumerate(self._requests):
            for unit in request.plan.units:
                for read in unit.reads:
                    if request.parts[read.part].array.storage == "array":
                        yield Job(reads=((number, read),), is_packed=False)

    @property
    def nbytes(self) -> int:
        """Bytes that this process reads."""
        return sum(job.nbytes for one in self._rounds for job in one[self._process])

    def read(self, session: Session) -> Iterator[list[Filled]]:
        """Fill the boxes; yields them as they are full.

        All processes meet once in each round, before what was read in it is sent. Once something
        is damaged nothing more is sent, and the rest is read for what else is damaged.

        Raises:
            MismatchError: The processes do not ask for the same, or not of the same checkpoint.
            IntegrityError: Chunks that are damaged, whichever process read them.
            PeerError, PeerTimeoutError: Another process failed, or did not answer in time.
        """
        self._check_same(session)
        yield self._empty()
        damage: list[Damage] = []
        with Workers(1, "pytree_ckpt-ahead", all_or_nothing=False) as ahead:
            reading = deque(ahead.submit([partial(self._read, one)]) for one in self._rounds[:1])
            for one, after in zip_longest(self._rounds, self._rounds[1:]):
                ((chunks, found),) = reading.popleft().results()
                if after is not None:
                    reading.append(ahead.submit([partial(self._read, after)]))
                outgoing, hops = self._outgoing(one)
                with self._clock.stage("wait"):
                    said = session.exchange(
                        [hops, [dataclasses.asdict(d) for d in found[:_MOST_TOLD]]]
                    )
                for process, (_, told) in sorted(said.items()):
                    damage += found if process == self._process else map(_from_wire, told)
                if not damage:
                    hops = max(count for count, _ in said.values())
                    yield self._spread(one, chunks, outgoing, hops)
        if damage:
            session.close()
            # A file that has no business in a folder is met in each round that reads from it.
            raise IntegrityError(list(dict.fromkeys(damage)))

    def _check_same(self, session: Session) -> None:
        texts = [request.parts[0].text for request in self._requests]
        asked = [
            hashlib.sha256(repr((request.parts[0].index, want.plan.boxes, want.wanters)).encode())
            for request, want in zip(self._requests, self._wants, strict=True)
        ]
        mine = [(text, found.digest()) for text, found in zip(texts, asked, strict=True)]
        same = {
            "checkpoint": self._reader.manifest.id.hex(),
            "max_inflight_bytes": self._max_inflight_bytes,
        }
        said = session.exchange(hashlib.sha256(repr((mine, same)).encode()).digest())
        if len(set(said.values())) == 1:
            return
        all_said = session.exchange([mine, same]).values()
        session.close()
        for name in same:
            if len(set(found := [theirs[name] for _, theirs in all_said])) > 1:
                raise CheckpointError(
                    f"a striped load needs one {name} for all processes, not {found}; each must "
                    "make the same call, with one path on storage that they share"
                )
        sets: list[set[Any]] = [set(map(tuple, theirs)) for theirs, _ in all_said]
        differing = {text for text, _ in set.union(*sets) - set.intersection(*sets)} or set(texts)
        text = "sharding: not the same for all processes that load it striped"
        raise MismatchError(
            [Mismatch(path=path, kind="sharding", text=text) for path in sorted(differing)],
            leaves=len(texts),
            remedy="Load with one target in all processes, or without striped=True.",
        )

    # --- one round ------------------------------------------------------------------------------

    def _read(self, one: Round) -> tuple[list[Array], list[Damage]]:
        """The chunks that this process reads, in order, or what of them is damaged."""
        reads = [entry for job in one[self._process] for entry in job.reads]
        chunks: list[Any] = [None] * len(reads)
        by_leaf: dict[int, list[int]] = {}
        for at, (number, read) in enumerate(reads):
            by_leaf.setdefault(self._requests[number].parts[read.part].index, []).append(at)
        numbers = list(by_leaf.values())
        asked = []
        for of_leaf in numbers:
            number, read = reads[of_leaf[0]]
            leaf = self._requests[number].parts[read.part]
            plan = plan_chunks(leaf.array, [reads[at][1] for at in of_leaf])
            asked.append(Request(parts=(leaf,), plan=plan))
        try:
            for group in self._reader.read(asked):
                for filled in group:
                    chunks[numbers[filled.request][filled.box]] = filled.buffer
        except IntegrityError as error:
            return [], list(error.damage)
        return chunks, []

    def _outgoing(self, one: Round) -> tuple[Outgoing, int]:
        """What this process sends to each other one, and in how many hops."""
        outgoing = {
            process: self._pieces(one[self._process], process)
            for process in range(self._count)
            if process != self._process
        }
        return outgoing, max((p[-1].hop + 1 for p in outgoing.values() if p), default=0)

    def _pieces(self, jobs: Sequence[Job], to: int) -> list[Piece]:
        return list(striping.pieces(jobs, self._wants, to=to, slot_nbytes=self._slot_nbytes))

    def _spread(
        self, one: Round, chunks: Sequence[Array], outgoing: Outgoing, hops: int
    ) -> list[Filled]:
        """Send what others want, take what this process wants; the boxes that are full by it."""
        with self._clock.stage("spread"):
            filled = self._keep(one[self._process], chunks)
            incoming = {
                process: self._pieces(jobs, self._process)
                for process, jobs in enumerate(one)
                if process != self._process
            }
            going, coming = _by_hop(outgoing, hops), _by_hop(incoming, hops)
            for hop in range(hops):
                for process, piece in going[hop]:
                    view = self._view(self._send[process], piece)
                    view[...] = _part(chunks[piece.read], piece.source)
                received = self._spreader.spread(self._send)
                for process, piece in coming[hop]:
                    part = self._view(received[process], piece)
                    filled += self._put(piece.request, piece.box, piece.place, part)
        return filled

    def _keep(self, jobs: Sequence[Job], chunks: Sequence[Array]) -> list[Filled]:
        """Take what this process wants of its own chunks."""
        filled: list[Filled] = []
        reads = ((job.is_packed, *entry) for job in jobs for entry in job.reads)
        for (is_packed, number, read), chunk in zip(reads, chunks, strict=True):
            wants = self._wants[number]
            for use in striping.uses(read):
                if self._process not in wants.wanters[use.box]:
                    continue
                box, part = wants.plan.boxes[use.box], _part(chunk, use.source)
                if part.size == chunk.size == box.size and not is_packed:
                    filled.append(_filled(number, use.box, chunk.reshape(box.shape)))
                else:
                    # A packed shard would keep all that was read with it in memory.
                    filled += self._put(number, use.box, use.place, part)
        return filled

    def _put(
        self, request: int, box: int, place: tuple[slice, ...], part: Array
    ) -> Iterator[Filled]:
        """Put a part of a box in its place; the box, once it has all of them."""
        key, plan = (request, box), self._wants[request].plan
        if key not in self._buffers:
            self._buffers[key] = new_buffers(plan, [box])[box]
            self._left[key] = plan.boxes[box].size
        _part(self._buffers[key], place)[...] = part
        self._left[key] -= part.size
        if not self._left[key]:
            del self._left[key]
            yield _filled(request, box, self._buffers.pop(key))

    def _view(self, slot: Array, piece: Piece) -> Array:
        """A piece in the bytes that go from one process to another."""
        dtype = dtypes.dtype_of(self._wants[piece.request].plan.spec.dtype)
        flat = slot[piece.offset : piece.offset + piece.nbytes].view(dtype)
        return flat.reshape(piece.shape)

    def _empty(self) -> list[Filled]:
        """The boxes without elements, which nothing is read for."""
        return [
            _filled(number, box, new_buffers(wants.plan, [box])[box])
            for number, wants in enumerate(self._wants)
            for box, who in enumerate(wants.wanters)
            if not wants.plan.boxes[box].size and self._process in who
        ]


def _by_hop(pieces: Mapping[int, Sequence[Piece]], hops: int) -> list[list[tuple[int, Piece]]]:
    """Pieces with the process that they go to, or come from, by hop."""
    found: list[list[tuple[int, Piece]]] = [[] for _ in range(hops)]
    for process, of_process in pieces.items():
        for piece in of_process:
            found[piece.hop].append((process, piece))
    return found


def _part(array: Array, place: tuple[slice, ...]) -> Array:
    """A view, also of an array without dimensions."""
    index: tuple[Any, ...] = (*place, ...)
    part: Array = array[index]
    return part


def _filled(request: int, box: int, buffer: Array) -> Filled:
    return Filled(request=request, box=box, buffer=buffer)


def _from_wire(told: dict[str, Any]) -> Damage:
    chunk, box = told["chunk"], told["box"]
    return Damage(
        **{
            **told,
            "chunk": None if chunk is None else tuple(chunk),
            "box": None if box is None else tuple((start, stop) for start, stop in box),
            "devices": tuple(told["devices"]),
        }
    )
