"""The plan of a striped load: which process reads which chunk, and what goes to whom when.

A pure function of the checkpoint and of what all processes want, so that each computes for itself
what all will do.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytree_ckpt.format.boxes import Box, Shape, whole
from pytree_ckpt.plan.loading import ChunkRead, Copy, ReadPlan

ALIGNMENT = 16
"""Pieces start at multiples of the largest item size, so that they are views of any dtype."""
_MIN_SLOT_NBYTES = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """A request of all processes: `wanters[n]` are those that want box `n` of `plan`."""

    plan: ReadPlan
    wanters: tuple[tuple[int, ...], ...]

    @property
    def most_nbytes(self) -> int:
        """Bytes of the boxes that the process with the most of them wants."""
        wanted: Counter[int] = Counter()
        for box, who in zip(self.plan.boxes, self.wanters, strict=True):
            wanted.update(dict.fromkeys(who, box.size))
        return max(wanted.values(), default=0) * self.plan.spec.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Chunks that one process reads together, each with the number of its request."""

    reads: tuple[tuple[int, ChunkRead], ...]
    is_packed: bool

    @property
    def nbytes(self) -> int:
        return sum(read.nbytes for _, read in self.reads)


Round = tuple[tuple[Job, ...], ...]
"""What each process reads before all spread what they have read."""


def step_nbytes(max_inflight_bytes: int) -> int:
    """Bytes that a process reads in a round; and of its send, and of its receive buffer.

    A process holds what it has read, what it reads next, and both buffers: half of the bound. The
    boxes that they fill have the other half.
    """
    return max(max_inflight_bytes // 8, 1)


def plan_rounds(
    jobs: Sequence[Job], wants: Sequence[Wants], *, processes: int, max_inflight_bytes: int
) -> list[Round]:
    """Share jobs out among those that want something of them, and cut them in rounds.

    A round reads of one group of leaves: boxes that are not full yet are those of a group. Packed
    jobs come first and are a group, since a leaf may be packed by all processes that saved it.
    """
    step = step_nbytes(max_inflight_bytes)
    rounds: list[Round] = []
    total = [0] * processes
    for group in _groups(jobs, wants, max_inflight_bytes // 2):
        queues = [deque(queue) for queue in _shared_out(group, wants, total)]
        while any(queues):
            rounds.append(tuple(tuple(_next(queue, step)) for queue in queues))
    return rounds


def _groups(jobs: Sequence[Job], wants: Sequence[Wants], bound: int) -> Iterator[list[Job]]:
    group: list[Job] = []
    last, nbytes = None, 0
    for job in jobs:
        request = -1 if job.is_packed else job.reads[0][0]
        if request != last:
            more = 0 if job.is_packed else wants[request].most_nbytes
            if group and (last == -1 or nbytes + more > bound):
                yield group
                group, nbytes = [], 0
            last, nbytes = request, nbytes + more
        group.append(job)
    if group:
        yield group


def _shared_out(group: Sequence[Job], wants: Sequence[Wants], total: list[int]) -> list[list[Job]]:
    """The jobs of a group by process; `total` is what each reads in all, and is added to.

    Each goes to the least laden of those that want it: what only one wants goes over no network.
    """
    laden = [0] * len(total)
    reader: dict[int, int] = {}
    who = [_wanters(job, wants) for job in group]
    # Those with the fewest to choose from first: what is left evens the load out.
    for at in sorted(range(len(group)), key=lambda at: len(who[at])):
        reader[at] = min(who[at], key=lambda process: (laden[process], total[process], process))
        laden[reader[at]] += group[at].nbytes
        total[reader[at]] += group[at].nbytes
    shared: list[list[Job]] = [[] for _ in total]
    for at, job in enumerate(group):
        shared[reader[at]].append(job)
    return shared


def _wanters(job: Job, wants: Sequence[Wants]) -> set[int]:
    return {
        process
        for request, read in job.reads
        for use in uses(read)
        for process in wants[request].wanters[use.box]
    }


def _next(queue: deque[Job], step: int) -> Iterator[Job]:
    nbytes = 0
    while queue and (not nbytes or nbytes + queue[0].nbytes <= step):
        nbytes += queue[0].nbytes
        yield queue.popleft()


def uses(read: ChunkRead) -> list[Copy]:
    """All that a chunk is wanted for."""
    if read.into is None:
        return list(read.copies)
    return [Copy(box=read.into, place=read.place, source=whole(read.shape).slices()), *read.copies]


def slot_nbytes(rounds: Sequence[Round], *, processes: int, max_inflight_bytes: int) -> int:
    """Bytes that each process sends to each other one in one hop: a power of two.

    So few sizes mean that XLA compiles few programs.
    """
    most = max((sum(job.nbytes for job in jobs) for one in rounds for jobs in one), default=1)
    fits = max(step_nbytes(max_inflight_bytes) // processes, _MIN_SLOT_NBYTES)
    wanted = max(most, _MIN_SLOT_NBYTES)
    return min(1 << fits.bit_length() - 1, 1 << (wanted - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a chunk that goes to another process for a box of it.

    Attributes:
        hop, offset: Where it is in what the one process sends to the other.
        read: Number of the chunk among those that the sender has read in this round.
        request, box: Where it belongs.
        shape, nbytes: Of the piece.
        place, source: Where it is in the box and in the chunk.
    """

    hop: int
    offset: int
    read: int
    request: int
    box: int
    shape: Shape
    nbytes: int
    place: tuple[slice, ...]
    source: tuple[slice, ...]


def pieces(
    jobs: Iterable[Job], wants: Sequence[Wants], *, to: int, slot_nbytes: int
) -> Iterator[Piece]:
    """What a process that does `jobs` sends to the process `to`, hop by hop."""
    hop, offset = 0, 0
    reads = (entry for job in jobs for entry in job.reads)
    for number, (request, read) in enumerate(reads):
        want = wants[request]
        itemsize = want.plan.spec.itemsize
        for use in uses(read):
            if to not in want.wanters[use.box]:
                continue
            shape = tuple(s.stop - s.start for s in use.source)
            for run in _runs(shape, slot_nbytes // itemsize):
                left: Box | None = run
                while left is not None:
                    taken, left = _split(left, (slot_nbytes - offset) // itemsize)
                    if taken is None:
                        hop, offset = hop + 1, 0
                        continue
                    nbytes = taken.size * itemsize
                    yield Piece(
                        hop=hop,
                        offset=offset,
                        read=number,
                        request=request,
                        box=use.box,
                        shape=taken.shape,
                        nbytes=nbytes,
                        place=_within(use.place, taken),
                        source=_within(use.source, taken),
                    )
                    offset += -(-nbytes // ALIGNMENT) * ALIGNMENT


def _runs(shape: Shape, room: int) -> Iterator[Box]:
    """Cut an array so that each part can be cut in one dimension into parts of `room` elements."""
    dim = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= room), 0)
    for lead in itertools.product(*map(range, shape[:dim])):
        start = (*lead, *(0 for _ in shape[dim:]))
        yield Box(start, (*(at + 1 for at in lead), *shape[dim:]))


def _split(box: Box, room: int) -> tuple[Box | None, Box | None]:
    """As many rows of a run as fit in the room, None if none does, and the rest, None if none."""
    shape = box.shape
    if box.size <= room:
        return box, None
    if not room:
        return None, box
    dim = next(d for d, extent in enumerate(shape) if extent > 1)
    rows = room // math.prod(shape[dim + 1 :])
    if not rows:
        return None, box
    cut = box.start[dim] + rows
    before, after = (*box.start[:dim], cut, *box.start[dim + 1 :]), box.stop[dim + 1 :]
    return Box(box.start, (*box.stop[:dim], cut, *after)), Box(before, box.stop)


def _within(slices: tuple[slice, ...], part: Box) -> tuple[slice, ...]:
    """The part of a region, which may have a dimension more in front: the index in a stack."""
    lead = len(slices) - len(part.start)
    inner = zip(slices[lead:], part.start, part.stop, strict=True)
    return (*slices[:lead], *(slice(s.start + a, s.start + b) for s, a, b in inner))
