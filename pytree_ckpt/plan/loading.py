"""The plan of a load: each chunk that is needed is read once and scattered to all who need it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Box, Grid, Shape, is_contiguous, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Part of a chunk, and where it belongs: `source` in the chunk, `place` in box `box`."""

    box: int
    place: tuple[slice, ...]
    source: tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """One chunk to read and verify.

    Attributes:
        shard: Number of the zarr shard in the array.
        chunk: Number of the chunk in the shard.
        box, shape, nbytes: Its elements in the array, how many in each dimension, their bytes.
        into: Number of a wanted box in which the chunk is one byte range, so that it can be read
            into place; None where it must be read aside.
        copies: What goes where else.
        part: Number of the stored array it is of, where several make up the wanted one.
    """

    shard: int
    chunk: int
    box: Box
    shape: Shape
    nbytes: int
    into: int | None
    place: tuple[slice, ...]
    copies: tuple[Copy, ...]
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadUnit:
    """Wanted boxes that share chunks, and these chunks: the smallest part that can be finished."""

    boxes: tuple[int, ...]
    reads: tuple[ChunkRead, ...]
    is_direct: bool
    """Whether the unit is one box that is one chunk, so that a chunk in memory is the box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """How the distinct boxes that a process wants of one array are filled.

    `spec` is that of the wanted array; a chunk's own `box` is in the stored array it is of.
    """

    spec: ArraySpec
    boxes: tuple[Box, ...]
    units: tuple[ReadUnit, ...]

    @property
    def nbytes_needed(self) -> int:
        """Bytes of the boxes."""
        return sum(box.size for box in self.boxes) * self.spec.itemsize

    @property
    def nbytes_read(self) -> int:
        """Bytes of the chunks."""
        return sum(read.nbytes for unit in self.units for read in unit.reads)


def plan_reads(spec: ArraySpec, boxes: Sequence[Box]) -> ReadPlan:
    """Plan the reads that fill `boxes` of an array, each chunk once.

    Example:
        >>> from pytree_ckpt.format.boxes import whole
        >>> spec = ArraySpec(
        ...     kind="numpy",
        ...     dtype="int8",
        ...     shape=(4, 4),
        ...     sharding=None,
        ...     storage="array",
        ...     shard_shape=(2, 4),
        ...     chunk_shape=(1, 4),
        ... )
        >>> plan = plan_reads(spec, [Box((0, 0), (4, 2)), Box((0, 2), (4, 4))])
        >>> len(plan.units), plan.nbytes_read, plan.nbytes_needed
        (1, 16, 16)
    """
    wanted = tuple(boxes)
    reads = _chunk_reads(spec, wanted) if spec.storage != "empty" else []
    return ReadPlan(spec=spec, boxes=wanted, units=_units(wanted, reads))


def plan_chunks(spec: ArraySpec, reads: Sequence[ChunkRead]) -> ReadPlan:
    """Plan to read chunks of a stored array as they are: each is a box of its own."""
    units = tuple(
        ReadUnit(
            boxes=(at,),
            reads=(
                dataclasses.replace(
                    read, into=at, place=whole(read.shape).slices(), copies=(), part=0
                ),
            ),
            is_direct=True,
        )
        for at, read in enumerate(reads)
    )
    return ReadPlan(spec=spec, boxes=tuple(read.box for read in reads), units=units)


def plan_stacked_reads(
    stacked: ArraySpec, parts: Sequence[ArraySpec], boxes: Sequence[Box]
) -> ReadPlan:
    """Plan the reads that fill `boxes` of an array whose index `i` is the stored array `parts[i]`.

    Example:
        >>> from pytree_ckpt.format.boxes import whole
        >>> def spec(shape, **storage):
        ...     return ArraySpec(kind="numpy", dtype="int8", shape=shape, sharding=None, **storage)
        >>> part = spec((4,), storage="packed", shard_shape=(4,), chunk_shape=(4,))
        >>> stacked = spec((2, 4), storage="packed", shard_shape=(1, 4), chunk_shape=(1, 4))
        >>> plan = plan_stacked_reads(stacked, [part, part], [whole((2, 4))])
        >>> [(read.part, read.into, read.place[0]) for read in plan.units[0].reads]
        [(0, 0, slice(0, 1, None)), (1, 0, slice(1, 2, None))]
    """
    wanted = tuple(boxes)
    reads: list[ChunkRead] = []
    for part, spec in enumerate(parts):
        if spec.storage == "empty":
            continue
        users = [n for n, box in enumerate(wanted) if box.start[0] <= part < box.stop[0]]
        within = tuple(Box(wanted[n].start[1:], wanted[n].stop[1:]) for n in users)
        reads += [_lifted(read, part, users, wanted) for read in _chunk_reads(spec, within)]
    return ReadPlan(spec=stacked, boxes=wanted, units=_units(wanted, reads))


def _lifted(read: ChunkRead, part: int, users: Sequence[int], boxes: Sequence[Box]) -> ChunkRead:
    """A read of one part, its places in boxes of the stack."""

    def place_in(box: int, place: tuple[slice, ...]) -> tuple[slice, ...]:
        at = part - boxes[box].start[0]
        return (slice(at, at + 1), *place)

    into = None if read.into is None else users[read.into]
    copies = [
        Copy(box=users[copy.box], place=place_in(users[copy.box], copy.place), source=copy.source)
        for copy in read.copies
    ]
    return dataclasses.replace(
        read,
        part=part,
        into=into,
        place=() if into is None else place_in(into, read.place),
        copies=tuple(copies),
    )


def _chunk_reads(spec: ArraySpec, boxes: tuple[Box, ...]) -> list[ChunkRead]:
    """Every chunk that shares an element with a box, in order of shard and chunk."""
    shards = spec.shards
    users: dict[int, list[int]] = {}
    for number, box in enumerate(boxes):
        for shard in shards.overlapping(box):
            users.setdefault(shard, []).append(number)
    reads = []
    for shard, numbers in sorted(users.items()):
        outer = shards.box(shard)
        inner = Grid(outer.shape, spec.chunk_shape)
        for chunk in range(inner.size):
            box = inner.box(chunk).shifted(outer.start)
            into, place, copies = _uses(box, numbers, boxes)
            if into is None and not copies:
                continue
            reads.append(
                ChunkRead(
                    shard=shard,
                    chunk=chunk,
                    box=box,
                    shape=box.shape,
                    nbytes=box.size * spec.itemsize,
                    into=into,
                    place=place,
                    copies=tuple(copies),
                )
            )
    return reads


def _uses(
    box: Box, numbers: Sequence[int], boxes: Sequence[Box]
) -> tuple[int | None, tuple[slice, ...], list[Copy]]:
    """Who wants a chunk: the box it can be read into, where there, and what is copied."""
    into: int | None = None
    place: tuple[slice, ...] = ()
    copies = []
    for number in numbers:
        target = boxes[number]
        common = box.intersect(target) if box.shape else box
        if common is None:
            continue
        if into is None and common == box and is_contiguous(box.shape, target.shape):
            into, place = number, box.slices(target.start)
            continue
        copies.append(
            Copy(box=number, place=common.slices(target.start), source=common.slices(box.start))
        )
    return into, place, copies


def _units(boxes: Sequence[Box], reads: Sequence[ChunkRead]) -> tuple[ReadUnit, ...]:
    """Group boxes that share chunks (a union-find over the boxes)."""
    leader = list(range(len(boxes)))

    def find(at: int) -> int:
        while leader[at] != at:
            leader[at] = leader[leader[at]]
            at = leader[at]
        return at

    touched = []
    for read in reads:
        users = [copy.box for copy in read.copies]
        if read.into is not None:
            users.append(read.into)
        for other in users[1:]:
            leader[find(other)] = find(users[0])
        touched.append(users[0])
    members: dict[int, list[int]] = {}
    for number in range(len(boxes)):
        members.setdefault(find(number), []).append(number)
    of_unit: dict[int, list[ChunkRead]] = {at: [] for at in members}
    for read, user in zip(reads, touched, strict=True):
        of_unit[find(user)].append(read)
    return tuple(
        ReadUnit(
            boxes=tuple(numbers),
            reads=tuple(of_unit[at]),
            is_direct=len(numbers) == 1 == len(of_unit[at])
            and of_unit[at][0].box == boxes[numbers[0]],
        )
        for at, numbers in members.items()
    )
