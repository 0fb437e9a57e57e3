"""The elements of converted shards: read from the source in batches, verified, cast."""

import threading
from collections.abc import Sequence
from typing import Any

from pytree_ckpt.errors import Mismatch, MismatchError
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.plan import casting
from pytree_ckpt.plan.converting import ConvertPlan, Row
from pytree_ckpt.plan.loading import plan_reads
from pytree_ckpt.store.reading import CheckpointReader
from pytree_ckpt.store.requests import Array, Request


class ConvertedViews:
    """Elements of shards of the new checkpoint, as `Writer` asks for them.

    The first shard of a batch that is asked for reads the batch; the last one lets it go. Writers
    ask in the order of the batches, so that hardly more than two of them are in memory.
    """

    def __init__(
        self, reader: CheckpointReader, plan: ConvertPlan, batches: Sequence[Sequence[Row]]
    ) -> None:
        self._reader = reader
        self._plan = plan
        self._batches = batches
        self._locks = [threading.Lock() for _ in batches]
        self._read: dict[int, dict[tuple[int, Box], Array]] = {}
        self._of = {
            (leaf, plan.spec(leaf).shards.box(shard)): number
            for number, batch in enumerate(batches)
            for leaf, shard in batch
        }

    def __call__(self, leaf: int, box: Box) -> Array:
        number = self._of[leaf, box]
        with self._locks[number]:
            if number not in self._read:
                self._read[number] = self._fill(self._batches[number])
            found = self._read[number].pop((leaf, box))
            if not self._read[number]:
                del self._read[number]
        return self._cast(leaf, found)

    def _fill(self, rows: Sequence[Row]) -> dict[tuple[int, Box], Array]:
        """Read and verify the shards of a batch, each chunk once."""
        boxes: dict[int, list[Box]] = {}
        for leaf, shard in rows:
            boxes.setdefault(leaf, []).append(self._plan.spec(leaf).shards.box(shard))
        leaves, requests = list(boxes), []
        for leaf, wanted in boxes.items():
            source = self._plan.leaves[leaf]
            requests.append(Request(parts=(source,), plan=plan_reads(source.array, wanted)))
        found = {}
        for group in self._reader.read(requests):
            for part in group:
                leaf = leaves[part.request]
                found[leaf, boxes[leaf][part.box]] = part.buffer
        return found

    def _cast(self, leaf: int, buffer: Array) -> Array:
        name = self._plan.spec(leaf).dtype
        source = self._plan.leaves[leaf]
        if source.array.dtype == name:
            return buffer
        try:
            return casting.cast(buffer, name)
        except ValueError as error:
            wrong = Mismatch(path=source.text, kind="dtype", text=f"dtype: {error}")
            raise MismatchError([wrong], leaves=1, remedy="Leave it in the dtype it has.") from None


def per_process_values(reader: CheckpointReader, plan: ConvertPlan) -> dict[tuple[int, int], Any]:
    """The values that each process had its own of, by new leaf and process."""
    return {
        (at, process): value
        for at, leaf in enumerate(plan.leaves)
        if leaf.per_process
        for process, value in enumerate(reader.per_process(leaf.index))
    }
