"""Packed shards are read many at a time: runs of neighbouring zarr chunks."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pytree_ckpt.format.tables import Packed
from pytree_ckpt.plan.loading import ChunkRead


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShard:
    """A packed shard that is wanted: where it lies, and who wants it.

    `request` and `unit` number the plan and the unit in it that `read` belongs to.
    """

    process: int
    offset: int
    nbytes: int
    digest: bytes
    request: int
    unit: int
    read: ChunkRead


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Bytes `start:stop` of the packed array of `process`, whole chunks, and what is in them."""

    process: int
    start: int
    stop: int
    shards: tuple[PackedShard, ...]


def windows(shards: Iterable[PackedShard], extents: Mapping[int, Packed]) -> Iterator[Window]:
    """Cover the wanted shards so that no chunk is in two windows and no window in two files."""
    run: list[PackedShard] = []
    for shard in sorted(shards, key=lambda s: (s.process, s.offset)):
        if run and not _joins(run, shard, extents[shard.process]):
            yield _window(run, extents[run[0].process])
            run = []
        run.append(shard)
    if run:
        yield _window(run, extents[run[0].process])


def _joins(run: list[PackedShard], shard: PackedShard, packed: Packed) -> bool:
    """Whether a shard starts in the same file, in a chunk of the run or in the one after it."""
    last = run[-1]
    if shard.process != last.process:
        return False
    if shard.offset // packed.shard_nbytes != last.offset // packed.shard_nbytes:
        return False
    chunk = packed.chunk_nbytes
    return shard.offset // chunk <= (last.offset + last.nbytes - 1) // chunk + 1


def _window(run: list[PackedShard], packed: Packed) -> Window:
    chunk = packed.chunk_nbytes
    return Window(
        process=run[0].process,
        start=run[0].offset // chunk * chunk,
        stop=-(-max(s.offset + s.nbytes for s in run) // chunk) * chunk,
        shards=tuple(run),
    )
