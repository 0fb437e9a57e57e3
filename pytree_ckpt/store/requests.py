"""What a load asks for, where it goes, and the memory that it is read into."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from pytree_ckpt.errors import Damage, IntegrityError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.plan.loading import ChunkRead, ReadPlan
from pytree_ckpt.store import arrays

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A wanted box whose every chunk is verified: `buffer` is box number `box` of `request`."""

    request: int
    box: int
    buffer: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How the wanted boxes of a leaf are filled; `parts` is that leaf, or what a stack is made of.

    A chunk of the plan is read from the stored leaf that its `part` numbers.
    """

    parts: tuple[Leaf, ...]
    plan: ReadPlan

    @property
    def arrays(self) -> list[Leaf]:
        """Its leaves that are not packed."""
        return [p for p in self.parts if p.spec is not None and p.spec.storage != "packed"]


Begun = dict[tuple[int, int], dict[int, Array]]
"""Buffers of a unit that have its packed shards, by the numbers of request and unit."""


@dataclass(slots=True)
class Group:
    """Jobs that run together, and what is filled when all of them are done."""

    jobs: list[Callable[[], None]] = field(default_factory=list)
    filled: list[Filled] = field(default_factory=list)
    nbytes: int = 0

    def add_damage(self, damage: Sequence[Damage]) -> bool:
        """Have damage reported that was found before anything is read; whether nothing may be."""
        if damage:
            self.jobs.append(functools.partial(_report, damage))
        return any(found.kind == "link" for found in damage)

    def add(self, request: int, buffers: Mapping[int, Array]) -> None:
        for box, buffer in buffers.items():
            self.filled.append(Filled(request=request, box=box, buffer=buffer))


def _report(damage: Sequence[Damage]) -> None:
    raise IntegrityError(damage)


def new_buffers(plan: ReadPlan, boxes: Iterable[int]) -> dict[int, Array]:
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


def small_buffers(plan: ReadPlan) -> dict[int, Array] | None:
    """Memory for all boxes of an array, None if it is so large that they are let go one by one."""
    if plan.nbytes_needed > _SMALL_NBYTES or not plan.boxes:
        return None
    return new_buffers(plan, range(len(plan.boxes)))


_SMALL_NBYTES = 64 << 20


def place_chunk(chunk: Array, read: ChunkRead, buffers: Mapping[int, Array]) -> None:
    """Copy a verified chunk to every box that wants a part of it."""
    if read.into is not None and not np.may_share_memory(chunk, buffers[read.into]):
        buffers[read.into][read.place] = chunk
    for copy in read.copies:
        buffers[copy.box][copy.place] = chunk[copy.source]
