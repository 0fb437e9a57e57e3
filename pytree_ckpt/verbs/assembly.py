"""Put the leaves of a load together: what to read for each, and where what was read goes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from pytree_ckpt.errors import Mismatch, MismatchError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Box, whole
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.per_process import PerProcess
from pytree_ckpt.jaxio import placing, processes
from pytree_ckpt.jaxio.targets import Target
from pytree_ckpt.plan import casting, compare
from pytree_ckpt.plan.loading import ReadPlan, plan_reads, plan_stacked_reads
from pytree_ckpt.plan.restructure import Source
from pytree_ckpt.store.reading import CheckpointReader
from pytree_ckpt.store.requests import Array, Filled, Request
from pytree_ckpt.sweeps import no_sweeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A saved leaf, what is wanted of it, and where it goes: `at` in the list of results.

    `sharding` is JAX's; None puts the array on the default device, uncommitted.
    """

    at: int
    source: Source
    target: Target
    sharding: Any

    @property
    def leaf(self) -> Leaf:
        return self.source.leaf

    @property
    def on_device(self) -> bool:
        return self.target.want.kind in ("jax", "key")


@dataclass(slots=True, kw_only=True)
class _Pending:
    """An array that is being put together: verified boxes, or shards already on their devices."""

    item: Item
    spec: ArraySpec
    layout: placing.Layout | None
    boxes: list[Any]
    shards: list[Any]
    by_shard: bool
    """Whether shards go to their devices one by one, as the array is large, or has none here."""
    left: int

    @property
    def wanted(self) -> Sequence[Box]:
        """The distinct boxes of the array that this process holds."""
        return [whole(self.spec.shape)] if self.layout is None else self.layout.boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The boxes of an array that are to be read.

    Attributes:
        numbers: Of each box among those that this process holds, -1 if it does not.
        wanters: The processes that want each box, where it is for all processes.
    """

    boxes: Sequence[Box]
    numbers: Sequence[int]
    wanters: tuple[tuple[int, ...], ...]


_PLACE_WHOLE_NBYTES = 64 << 20
"""Arrays up to this size wait on the host until all of their boxes are there."""


class Assembly:
    """Places what was read and puts leaves together.

    Args:
        count: How many leaves there are.
        for_all: Whether requests are for the boxes that any process wants, not this one alone.
    """

    def __init__(self, count: int, *, for_all: bool = False) -> None:
        self._for_all = for_all
        self._results: list[Any] = [None] * count
        self._pending: list[_Pending] = []
        self._layout_of: dict[Any, placing.Layout] = {}
        self._plan_of: dict[tuple[int, ...], ReadPlan] = {}
        self._goes_to: list[list[tuple[_Pending, int]]] = []
        self._wanted_of: dict[Any, _Wanted] = {}
        self.wanters: list[tuple[tuple[int, ...], ...]] = []
        """By request the processes that want each box of it."""

    @no_sweeps()
    def requests(self, items: Sequence[Item]) -> list[Request]:
        """What to read for these leaves."""
        found = []
        cut: dict[int, list[Item]] = {}
        for item in items:
            if item.leaf.spec is None:
                continue
            if item.source.index is None:
                found.append(self._request(item))
            else:
                cut.setdefault(item.source.parts[0].index, []).append(item)
        return found + [self._request_indices(indices) for indices in cut.values()]

    def _request(self, item: Item) -> Request:
        """What to read for one leaf."""
        pending, source = self._begin(item), item.source
        wanted = self._wanted(pending)
        key = (source.is_stack, *(id(part.spec) for part in source.parts), id(pending.layout))
        plan = self._plan_of.get(key)
        if plan is None:
            parts = [part.array for part in source.parts]
            if source.is_stack:
                plan = plan_stacked_reads(pending.spec, parts, wanted.boxes)
            else:
                plan = plan_reads(parts[0], wanted.boxes)
            self._plan_of[key] = plan
        self._goes_to.append([(pending, at) for at in wanted.numbers])
        self.wanters.append(wanted.wanters)
        return Request(parts=source.parts, plan=plan)

    def _request_indices(self, items: Sequence[Item]) -> Request:
        """What to read for leaves that are indices of one stored leaf: each chunk once for all."""
        stored = items[0].source.parts[0]
        boxes: list[Box] = []
        goes_to: list[tuple[_Pending, int]] = []
        wanters: list[tuple[int, ...]] = []
        for item in items:
            pending, index = self._begin(item), item.source.index or 0
            wanted = self._wanted(pending)
            boxes += [Box((index, *b.start), (index + 1, *b.stop)) for b in wanted.boxes]
            goes_to += [(pending, at) for at in wanted.numbers]
            wanters += wanted.wanters
        self._goes_to.append(goes_to)
        self.wanters.append(tuple(wanters))
        return Request(parts=(stored,), plan=plan_reads(stored.array, boxes))

    def _wanted(self, pending: _Pending) -> _Wanted:
        """The boxes of an array that are to be read."""
        own, item = pending.wanted, pending.item
        if not self._for_all:
            return _Wanted(boxes=own, numbers=range(len(own)), wanters=())
        mark = (item.sharding if item.on_device else None, pending.spec.shape)
        if mark not in self._wanted_of:
            number_of = {box: at for at, box in enumerate(own)}
            found = placing.wanters(*mark)
            self._wanted_of[mark] = _Wanted(
                boxes=list(found),
                numbers=[number_of.get(box, -1) for box in found],
                wanters=tuple(found.values()),
            )
        return self._wanted_of[mark]

    def _begin(self, item: Item) -> _Pending:
        spec, layout = item.leaf.array, None
        if item.on_device and item.sharding is not None:
            mark = (item.sharding, spec.shape)
            layout = self._layout_of.get(mark)
            if layout is None:
                layout = self._layout_of[mark] = placing.Layout(*mark)
        count = 1 if layout is None else len(layout.boxes)
        pending = _Pending(
            item=item,
            spec=spec,
            layout=layout,
            boxes=[None] * count,
            shards=[None] * (len(layout.places) if layout else 0),
            by_shard=layout is not None
            and (spec.nbytes > _PLACE_WHOLE_NBYTES or not layout.places),
            left=count,
        )
        self._pending.append(pending)
        return pending

    @no_sweeps()
    def place(self, group: Sequence[Filled]) -> None:
        """Put verified boxes on their devices; when this returns the group may be let go."""
        loose: list[tuple[_Pending, int, Any, Array]] = []
        placed: list[jax.Array] = []
        for filled in group:
            pending, box = self._goes_to[filled.request][filled.box]
            buffer = _as_wanted(pending, filled.buffer)
            pending.left -= 1
            if pending.by_shard and pending.layout is not None:
                for at, place in pending.layout.holders(box):
                    loose.append((pending, at, place, buffer))
                continue
            pending.boxes[box] = buffer
            if pending.left:
                continue
            if not pending.item.on_device:
                self._results[pending.item.at] = _on_host(pending.item, buffer)
            elif pending.layout is None:
                loose.append((pending, 0, None, buffer))
            else:
                array = placing.from_boxes(
                    pending.spec.shape, pending.item.sharding, pending.layout, pending.boxes
                )
                placed.append(self._finish(pending, array))
            pending.boxes = []
        arrays = placing.put([entry[3] for entry in loose], [entry[2] for entry in loose])
        for (pending, at, place, _), array in zip(loose, arrays, strict=True):
            if place is None:
                self._finish(pending, array)
            else:
                pending.shards[at] = array
        placing.wait_for(placed)

    def _finish(self, pending: _Pending, array: jax.Array) -> jax.Array:
        spec, target = pending.spec, pending.item.target
        weak = spec.weak_type if target.weak_type is None else target.weak_type
        done = placing.finish(array, key_impl=spec.key_impl, weak_type=weak)
        self._results[pending.item.at] = done
        return done

    def put_values(self, items: Sequence[Item], reader: CheckpointReader) -> None:
        """The leaves that are no arrays."""
        for item in items:
            if item.leaf.spec is None:
                self._put_value(item, reader)

    def _put_value(self, item: Item, reader: CheckpointReader) -> None:
        """A Python value, as the target wants it."""
        want = item.target.want
        if item.leaf.per_process:
            own = reader.per_process(item.leaf.index)[processes.process_index()]
            self._results[item.at] = PerProcess(own)
        elif want.dtype is None:
            value: Any = item.leaf.value
            same = type(value).__name__ == want.kind
            with _named(item):
                self._results[item.at] = value if same else casting.as_python(value, want.kind)
        else:
            with _named(item):
                buffer = casting.cast_value(item.leaf.value, want.dtype)
            if item.on_device:
                array = placing.replicate(buffer, item.sharding)
                weak = bool(item.target.weak_type)
                self._results[item.at] = placing.finish(array, key_impl=None, weak_type=weak)
            else:
                self._results[item.at] = buffer if want.kind == "numpy" else buffer[()]

    def finish(self) -> list[Any]:
        """All leaves."""
        for pending in self._pending:
            if pending.by_shard:
                name = pending.item.target.want.dtype or pending.spec.dtype
                array = placing.assemble(
                    pending.spec.shape,
                    pending.item.sharding,
                    pending.shards,
                    dtype=dtypes.dtype_of(name),
                )
                self._finish(pending, array)
        return self._results


def _as_wanted(pending: _Pending, buffer: Array) -> Array:
    """The elements in the wanted dtype; a numpy leaf gets memory of its own."""
    item, spec = pending.item, pending.spec
    want = item.target.want
    if item.source.index is not None:
        buffer = buffer.reshape(buffer.shape[1:])
    if not compare.is_same_bytes(spec, want):
        with _named(item):
            return casting.cast(buffer, want.dtype or spec.dtype)
    if not item.on_device and spec.storage == "packed":
        return buffer.copy()
    return buffer


def _on_host(item: Item, buffer: Array) -> Any:
    want = item.target.want
    if want.kind == "numpy":
        return buffer
    if want.kind == "scalar":
        return buffer[()]
    with _named(item):
        return casting.as_python(buffer.item(), want.kind)


@contextmanager
def _named(item: Item) -> Iterator[None]:
    """Say which leaf it is that cannot be cast."""
    try:
        yield
    except ValueError as error:
        text = f"dtype: cannot be cast, {error}"
        wrong = Mismatch(path=item.leaf.text, kind="dtype", text=text)
        title = (
            "a leaf does not fit the target; others that are to be cast may not have been read yet"
        )
        remedy = "Ask for the dtype it has."
        raise MismatchError([wrong], leaves=1, remedy=remedy, title=title) from None
