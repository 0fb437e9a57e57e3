"""Load a checkpoint: describe the target, compare, plan, read and verify, place, assemble."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import CheckpointError, IntegrityError, Mismatch, MismatchError
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import whole
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.per_process import PerProcess
from pytree_ckpt.jaxio import monitoring, placing, processes, targets
from pytree_ckpt.jaxio.targets import Target, TargetTree
from pytree_ckpt.options import LoadOptions
from pytree_ckpt.plan import casting, compare
from pytree_ckpt.plan.loading import ReadPlan, plan_reads
from pytree_ckpt.store import commit
from pytree_ckpt.store.locations import Location, PathLike, locate
from pytree_ckpt.store.reading import Array, CheckpointReader, Filled, Request

_LOG = logging.getLogger("pytree_ckpt")


def load(
    path: PathLike,
    target: Any = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    reshard: bool = False,
    cast: bool = False,
    partial: bool = False,
    verify: bool = True,
    options: LoadOptions | None = None,
) -> Any:
    """Load a checkpoint, each chunk verified before it reaches a device.

    Args:
        path: The folder of the checkpoint.
        target: A tree of `jax.ShapeDtypeStruct`s (with shardings), arrays or Python scalars.
            Each leaf comes back as its target's kind, the tree as the target's classes. Without
            one: builtin containers, arrays on the saved mesh rebuilt from the devices at hand.
        mesh: Mesh for what the target leaves open: saved specs, and abstract meshes.
        reshard: Allow another mesh, partition spec, memory kind or process count. Without a
            target and a mesh everything goes to the default device.
        cast: Allow another dtype, by numpy's rules; an imaginary part is never dropped.
        partial: Allow a target that asks for fewer leaves than there are.
        verify: Check every digest. Without it a flipped bit is loaded as it is.
        options: Memory bound and threads.

    Raises:
        MismatchError: The target does not fit, with every reason; no array data was read.
        IntegrityError: The bytes are not those that were saved, with every damaged chunk.
        NotFoundError: No committed checkpoint is there.
        FormatError: The manifest is damaged, or (`NewerFormatError`) of a newer release.
        UnsupportedLeafError: The target has leaves that ask for nothing storable.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pc.save(folder + "/ckpt", {"scale": np.float32([1, 2]), "step": 7})
        ...     pc.load(folder + "/ckpt", {"scale": np.zeros(2, np.float32), "step": 0})
        {'scale': array([1., 2.], dtype=float32), 'step': 7}
    """
    location = locate(path)
    clock = StageClock()
    manifest, lock = commit.open_to_read(location)
    with lock:
        with clock.stage("plan"):
            wanted = _wanted(manifest, target, mesh)
            items, skipped = _resolve(
                manifest, wanted, target is None, mesh, reshard=reshard, cast=cast, partial=partial
            )
        reader = CheckpointReader(
            location.path, manifest, verify=verify, options=options or LoadOptions(), clock=clock
        )
        try:
            leaves = _read(reader, items, len(wanted.leaves), clock)
        except IntegrityError:
            _check_still_there(location, manifest)
            raise
    _LOG.info(
        "loaded %s: %d leaves, %d bytes in %d chunks%s; %s",
        location,
        len(leaves),
        reader.stats.nbytes,
        reader.stats.chunks,
        f", {len(skipped)} leaves not asked for" if skipped else "",
        clock,
    )
    monitoring.record("load", clock.seconds)
    if target is None:
        return manifest.tree.build(leaves)
    return jax.tree_util.tree_unflatten(wanted.treedef, leaves)


def _wanted(manifest: Manifest, target: Any, mesh: jax.sharding.Mesh | None) -> TargetTree:
    if target is not None:
        return targets.describe_target(target, mesh=mesh)
    leaves = [targets.as_saved(leaf) for leaf in manifest.leaves]
    return TargetTree(tree=manifest.tree, treedef=None, leaves=leaves, mismatches=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A saved leaf, what is wanted of it, and where it goes: `at` in the list of results.

    `sharding` is JAX's; None puts the array on the default device, uncommitted.
    """

    at: int
    leaf: Leaf
    target: Target
    sharding: Any

    @property
    def on_device(self) -> bool:
        return self.target.want.kind in ("jax", "key")


def _resolve(
    manifest: Manifest,
    wanted: TargetTree,
    everything: bool,
    mesh: jax.sharding.Mesh | None,
    *,
    reshard: bool,
    cast: bool,
    partial: bool,
) -> tuple[list[_Item], Sequence[Leaf]]:
    """Pair what is wanted with what is saved.

    Raises:
        MismatchError: They do not fit.
    """
    match = compare.match_leaves(manifest, wanted.tree, partial=partial)
    found = [*wanted.mismatches, *match.mismatches]
    if not reshard:
        found += compare.compare_processes(manifest, processes.process_count())
    unresolved = {m.path for m in wanted.mismatches}
    items = []
    for at, leaf in match.pairs:
        if leaf.text in unresolved:
            continue
        target = wanted.leaves[at]
        wrong = compare.compare_leaf(leaf, target.want, cast=cast)
        wrong += compare.compare_owners(leaf, manifest, processes.process_count())
        wrong += targets.check_width(leaf, target.want)
        wrong += targets.check_impl(leaf, target.want)
        sharding = None
        if target.want.kind in ("jax", "key") and not wrong:
            to_default = everything and reshard and mesh is None
            sharding, layout_wrong = _layout(leaf, target, mesh, to_default, reshard=reshard)
            wrong += layout_wrong
        found += wrong
        items.append(_Item(at=at, leaf=leaf, target=target, sharding=sharding))
    if found:
        raise MismatchError(found, leaves=len(manifest.leaves), remedy=compare.remedy(found))
    return items, match.skipped


def _layout(
    leaf: Leaf,
    target: Target,
    mesh: jax.sharding.Mesh | None,
    to_default: bool,
    *,
    reshard: bool,
) -> tuple[Any, list[Mismatch]]:
    """The sharding a leaf is loaded with, and why it may not be."""
    sharding, plain = target.sharding, target.want.sharding
    if sharding is None:
        if to_default:
            return None, []
        sharding, plain, wrong = targets.open_sharding(leaf, mesh=mesh, reshard=reshard)
        if wrong or plain is None:
            return sharding, wrong
    if plain is None:
        return sharding, []
    shape = leaf.spec.shape if leaf.spec is not None else ()
    wrong = compare.check_divisible(leaf, shape, plain)
    if not reshard:
        wrong += compare.compare_layout(leaf, plain)
    if target.committed is False:
        sharding = None
    return sharding, wrong


def _read(
    reader: CheckpointReader, items: Sequence[_Item], count: int, clock: StageClock
) -> list[Any]:
    """The leaves of the result, in the order of the target."""
    assembly = _Assembly(count)
    requests = []
    for item in items:
        if item.leaf.spec is None:
            assembly.put_value(item, reader)
        else:
            requests.append(assembly.request(item, item.leaf.spec))
    for group in reader.read(requests):
        with clock.stage("place"):
            assembly.place(group)
    return assembly.finish()


@dataclass(slots=True, kw_only=True)
class _Pending:
    """An array that is being put together: verified boxes, or shards already on their devices."""

    item: _Item
    spec: ArraySpec
    layout: placing.Layout | None
    boxes: list[Any]
    shards: list[Any]
    left: int

    @property
    def by_shard(self) -> bool:
        """Whether shards go to their devices one by one, because the array is large."""
        return self.layout is not None and self.spec.nbytes > _PLACE_WHOLE_NBYTES


_PLACE_WHOLE_NBYTES = 64 << 20
"""Arrays up to this size wait on the host until all of their boxes are there."""


class _Assembly:
    """Places what was read and puts leaves together."""

    def __init__(self, count: int) -> None:
        self._results: list[Any] = [None] * count
        self._pending: list[_Pending] = []
        self._layout_of: dict[Any, placing.Layout] = {}
        self._plan_of: dict[tuple[int, int], ReadPlan] = {}

    def request(self, item: _Item, spec: ArraySpec) -> Request:
        """What to read for one leaf."""
        layout = None
        if item.on_device and item.sharding is not None:
            mark = (item.sharding, spec.shape)
            layout = self._layout_of.get(mark)
            if layout is None:
                layout = self._layout_of[mark] = placing.Layout(*mark)
        key = (id(spec), id(layout))
        if key not in self._plan_of:
            boxes = [whole(spec.shape)] if layout is None else layout.boxes
            self._plan_of[key] = plan_reads(spec, boxes)
        plan = self._plan_of[key]
        boxes_left: list[Any] = [None] * len(plan.boxes)
        shards: list[Any] = [None] * (len(layout.places) if layout else 0)
        self._pending.append(
            _Pending(
                item=item,
                spec=spec,
                layout=layout,
                boxes=boxes_left,
                shards=shards,
                left=len(plan.boxes),
            )
        )
        return Request(leaf=item.leaf, plan=plan)

    def place(self, group: Sequence[Filled]) -> None:
        """Put verified boxes on their devices; when this returns the group may be let go."""
        loose: list[tuple[_Pending, int, Any, Array]] = []
        placed: list[jax.Array] = []
        for filled in group:
            pending = self._pending[filled.request]
            with _named(pending.item):
                buffer = _as_wanted(pending.item, filled.buffer)
            pending.left -= 1
            if pending.by_shard and pending.layout is not None:
                for at, place in pending.layout.holders(filled.box):
                    loose.append((pending, at, place, buffer))
                continue
            pending.boxes[filled.box] = buffer
            if pending.left:
                continue
            if not pending.item.on_device:
                with _named(pending.item):
                    self._results[pending.item.at] = _on_host(pending.item, buffer)
            elif pending.layout is None:
                loose.append((pending, 0, None, buffer))
            else:
                placed.append(self._finish(pending, _from_boxes(pending, pending.layout)))
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

    def put_value(self, item: _Item, reader: CheckpointReader) -> None:
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
                shape, sharding = pending.spec.shape, pending.item.sharding
                self._finish(pending, placing.assemble(shape, sharding, pending.shards))
        return self._results


def _from_boxes(pending: _Pending, layout: placing.Layout) -> jax.Array:
    return placing.from_boxes(pending.spec.shape, pending.item.sharding, layout, pending.boxes)


def _as_wanted(item: _Item, buffer: Array) -> Array:
    """The elements in the wanted dtype; a numpy leaf gets memory of its own."""
    want, spec = item.target.want, item.leaf.spec
    if spec is not None and not compare.is_same_bytes(spec, want):
        return casting.cast(buffer, want.dtype or spec.dtype)
    if not item.on_device and spec is not None and spec.storage == "packed":
        return buffer.copy()
    return buffer


def _on_host(item: _Item, buffer: Array) -> Any:
    want = item.target.want
    if want.kind == "numpy":
        return buffer
    if want.kind == "scalar":
        return buffer[()]
    return casting.as_python(buffer[()], want.kind)


@contextmanager
def _named(item: _Item) -> Iterator[None]:
    """Say which leaf it is that cannot be cast."""
    try:
        yield
    except ValueError as error:
        text = f"dtype: cannot be cast, {error}"
        wrong = Mismatch(path=item.leaf.text, kind="dtype", text=text)
        raise MismatchError([wrong], leaves=1, remedy="Ask for the dtype it has.") from None


def _check_still_there(location: Location, manifest: Manifest) -> None:
    """Where folders cannot be locked, data may go while it is read."""
    if commit.read_manifest(location).nonce != manifest.nonce:
        raise CheckpointError(f"{location} was replaced while it was read; load again") from None
