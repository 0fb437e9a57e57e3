"""Look at one leaf: its chunks with digests and devices, and its numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pytree_ckpt.format.boxes import Box, Grid
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.options import LoadOptions, Progress
from pytree_ckpt.plan.statistics import Statistics, statistics_of
from pytree_ckpt.progress import showing
from pytree_ckpt.store.locations import PathLike
from pytree_ckpt.verbs.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReport:
    """A chunk: its elements, their bytes and digest, and the ids of the devices that held them."""

    box: Box
    nbytes: int
    digest: bytes
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafReport:
    """A leaf from near.

    Attributes:
        leaf: As the manifest has it.
        values: Of each process, where each has its own.
        chunks: In C order; none for a Python value.
        statistics: Of the elements, if they were asked for and are numbers.
    """

    leaf: Leaf
    values: tuple[Any, ...]
    chunks: tuple[ChunkReport, ...]
    statistics: Statistics | None


def inspect_leaf(path: PathLike, leaf: str, *, statistics: bool = False) -> LeafReport:
    """Report on the leaf whose path has the text `leaf`.

    Args:
        path: The checkpoint.
        leaf: The leaf.
        statistics: Read, and verify, the array for its statistics, in bounded memory.

    Raises:
        KeyError: No such leaf.
        NotFoundError, FormatError: No checkpoint.
        IntegrityError: A table, or a chunk that is read, is damaged.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pc.save(folder, {"w": np.arange(6.0)})
        ...     report = inspect_leaf(folder, "w", statistics=True)
        >>> report.statistics.mean, [str(chunk.box) for chunk in report.chunks]
        (2.5, ['[0:6]'])
    """
    settings = LoadOptions()
    with Checkpoint(path, verify=True, options=settings) as checkpoint:
        found = checkpoint.leaf(leaf)
        spec = found.spec
        numbers = None
        if statistics and spec is not None and spec.kind != "key":
            with showing(f"reading {found.text}", settings.progress) as progress:
                numbers = statistics_of(_parts(checkpoint, found, progress))
        return LeafReport(
            leaf=found,
            values=tuple(checkpoint[leaf]) if found.per_process else (),
            chunks=() if spec is None else tuple(_chunks(checkpoint, found)),
            statistics=numbers,
        )


def _chunks(checkpoint: Checkpoint, leaf: Leaf) -> Iterator[ChunkReport]:
    spec = leaf.array
    for box in Grid(spec.shape, spec.chunk_shape).boxes():
        yield ChunkReport(
            box=box,
            nbytes=box.size * spec.itemsize,
            digest=checkpoint.index.chunk_digest(leaf.index, spec, box.start),
            devices=spec.devices_of(box),
        )


def _parts(
    checkpoint: Checkpoint, leaf: Leaf, progress: Progress | None
) -> Iterator[npt.NDArray[Any]]:
    """The array, shard by shard."""
    done, spec = 0, leaf.array
    for box in spec.shards.boxes():
        yield checkpoint.read_box(leaf, box)
        done += box.size * spec.itemsize
        if progress is not None:
            progress(done, spec.nbytes)
