"""Load a checkpoint: describe the target, compare, plan, read and verify, place, assemble."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import CheckpointError, IntegrityError, Mismatch, MismatchError
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.trees import Tree
from pytree_ckpt.jaxio import monitoring, processes, targets
from pytree_ckpt.jaxio.coordination import Session
from pytree_ckpt.jaxio.targets import Target, TargetTree
from pytree_ckpt.options import LoadOptions, check_flags, given_or_default
from pytree_ckpt.plan import compare
from pytree_ckpt.plan.restructure import Restructured, Rules, restructure
from pytree_ckpt.progress import showing
from pytree_ckpt.store.checks import ReadStats
from pytree_ckpt.store.locations import Location, PathLike, locate
from pytree_ckpt.store.reading import CheckpointReader
from pytree_ckpt.store.requests import Filled
from pytree_ckpt.sweeps import no_sweeps
from pytree_ckpt.verbs.assembly import Assembly, Item
from pytree_ckpt.verbs.striping import StripedReader

_LOG = logging.getLogger("pytree_ckpt")


def load(
    path: PathLike,
    target: Any = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    reshard: bool = False,
    cast: bool = False,
    partial: bool = False,
    rename: Rules | None = None,
    stack: Rules | None = None,
    unstack: Rules | None = None,
    verify: bool = True,
    options: LoadOptions | None = None,
) -> Any:
    """Load a checkpoint, each chunk verified before it reaches a device.

    Args:
        path: The folder of the checkpoint.
        target: A tree of `jax.ShapeDtypeStruct`s (with shardings), arrays or Python scalars.
            Each leaf comes back as its target's kind, the tree as the target's classes, arrays in
            the default layout of memory whatever `Format` they have there. Without a target:
            builtin containers, arrays on the saved mesh rebuilt from the devices at hand.
        mesh: Mesh for what the target leaves open: saved specs, and abstract meshes.
        reshard: Allow another mesh, partition spec, memory kind or process count. Without `mesh`
            all goes to the default device if there is no target, and what a target leaves open
            if there are fewer devices than were saved on.
        cast: Allow another dtype, by numpy's rules; an imaginary part is never dropped.
        partial: Allow a target that asks for fewer leaves than there are.
        rename: Where leaves go that have another path in the target, by patterns of paths:
            `{"params/*/kernel": "params/*/w", "opt": "opt/inner"}`. `*` stands within one key,
            `**` for any number of keys; both sides have the same ones, in the same order. The
            first rule that takes a leaf, or a container that it is in, says where it goes.
            `plan_restructure` shows what rules do.
        stack: Leaves that become one, with a leading dimension by the number in their path:
            `{"params/layer_{}": "params/layers"}`.
        unstack: Leaves that become one for each index of their leading dimension:
            `{"params/layers": "params/layer_{}"}`.
        verify: Check every digest. Without it a flipped bit is loaded as it is.
        options: Memory bound and threads; whether processes read for one another.

    Raises:
        MismatchError: The target does not fit, with every reason; no array data was read.
        IntegrityError: The bytes are not those that were saved, with every damaged chunk.
        NotFoundError: No committed checkpoint is there.
        FormatError: The manifest is damaged, or (`NewerFormatError`) of a newer release.
        UnsupportedLeafError: The target has leaves that ask for nothing storable.
        ValueError: A rule of `rename`, `stack` or `unstack` that is none.
        OSError, CheckpointError: The storage failed, or the checkpoint was replaced meanwhile.
        PeerError, PeerTimeoutError: A striped load failed on another process.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pc.save(folder + "/ckpt", {"scale": np.float32([1, 2]), "step": 7})
        ...     pc.load(folder + "/ckpt", {"scale": np.zeros(2, np.float32), "step": 0})
        {'scale': array([1., 2.], dtype=float32), 'step': 7}
    """
    check_flags(reshard=reshard, cast=cast, partial=partial, verify=verify)
    options = given_or_default(options, LoadOptions)
    clock = StageClock()
    with ExitStack() as held:
        # Who calls this asks for transfers; a guard is against those that nobody asked for.
        held.enter_context(jax.transfer_guard("allow"))
        # Inside of jit arrays would be tracers, which nobody can wait for.
        held.enter_context(jax.ensure_compile_time_eval())
        session = None
        if options.striped and processes.process_count() > 1:
            session = Session("the load of", path, timeout_s=options.timeout_s)
            held.enter_context(session)

        def plan() -> _Planned:
            location = locate(path)
            manifest, lock = location.open_to_read()
            held.enter_context(lock)
            with clock.stage("plan"), no_sweeps():
                wanted = None if target is None else targets.describe_target(target, mesh=mesh)
                like = None if wanted is None else wanted.tree
                saved = restructure(
                    manifest, rename=rename, stack=stack, unstack=unstack, like=like
                )
                wanted = wanted or _everything(manifest, saved)
                allowed = {"reshard": reshard, "cast": cast, "partial": partial}
                items, skipped = _resolve(manifest, saved, wanted, mesh, **allowed)
            return _Planned(location, manifest, wanted, items, skipped)

        found = plan() if session is None else session.agreed(plan)
        try:
            leaves, stats = _read(
                found, verify=verify, options=options, clock=clock, session=session
            )
        except IntegrityError:
            _check_still_there(found.location, found.manifest)
            raise
    _LOG.log(
        logging.DEBUG if processes.process_index() else logging.INFO,
        "loaded %s: %d leaves, %d bytes in %d chunks read by this process%s; %s",
        found.location,
        len(leaves),
        stats.nbytes,
        stats.chunks,
        f", {len(found.skipped)} leaves not asked for" if found.skipped else "",
        clock,
    )
    monitoring.record("load", clock.seconds)
    monitoring.record_read("load", stats.nbytes)
    if found.wanted.treedef is None:
        return found.wanted.tree.build(leaves)
    return jax.tree_util.tree_unflatten(found.wanted.treedef, leaves)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A load that fits: what is wanted, and what it is made of; `skipped` is not asked for."""

    location: Location
    manifest: Manifest
    wanted: TargetTree
    items: Sequence[Item]
    skipped: Sequence[Leaf]


def _everything(manifest: Manifest, saved: Restructured) -> TargetTree:
    """The target that asks for all that there is, in builtin containers."""
    leaves = [targets.as_saved(source.leaf) for source in saved.sources]
    tree = saved.containers if isinstance(saved.containers, Tree) else manifest.tree
    return TargetTree(tree=tree, treedef=None, leaves=leaves, mismatches=[])


def _resolve(
    manifest: Manifest,
    saved: Restructured,
    wanted: TargetTree,
    mesh: jax.sharding.Mesh | None,
    *,
    reshard: bool,
    cast: bool,
    partial: bool,
) -> tuple[list[Item], Sequence[Leaf]]:
    """Pair what is wanted with what is saved.

    Raises:
        MismatchError: They do not fit.
    """
    match = compare.match_leaves(saved, wanted.tree, partial=partial)
    found = [*wanted.mismatches, *match.mismatches]
    if not reshard:
        found += compare.compare_processes(manifest, processes.process_count())
    unresolved = {m.path for m in wanted.mismatches}
    items = []
    for at, source in match.pairs:
        leaf, target = source.leaf, wanted.leaves[at]
        if leaf.text in unresolved:
            continue
        wrong = compare.compare_leaf(leaf, target.want, cast=cast)
        wrong += compare.compare_owners(leaf, manifest, processes.process_count())
        wrong += targets.check_dtype(leaf, target.want)
        wrong += targets.check_impl(leaf, target.want)
        sharding = None
        if target.want.kind in ("jax", "key") and not wrong:
            to_default = wanted.treedef is None and reshard and mesh is None
            sharding, layout_wrong = _layout(leaf, target, mesh, to_default, reshard=reshard)
            wrong += layout_wrong if reshard else source.relayout or layout_wrong
        found += wrong
        items.append(Item(at=at, source=source, target=target, sharding=sharding))
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
    wrong: list[Mismatch] = []
    if sharding is None and not to_default:
        sharding, plain, wrong = targets.open_sharding(leaf, mesh=mesh, reshard=reshard)
    if plain is None:
        return sharding, wrong
    shape = leaf.spec.shape if leaf.spec is not None else ()
    wrong = compare.check_divisible(leaf, shape, plain)
    if not reshard:
        wrong += compare.compare_layout(leaf, plain)
    free = target.committed is False
    if target.committed is None and target.sharding is not None:
        free = leaf.spec is not None and not leaf.spec.committed
    return None if free else sharding, wrong


def _read(
    found: _Planned,
    *,
    verify: bool,
    options: LoadOptions,
    clock: StageClock,
    session: Session | None,
) -> tuple[list[Any], ReadStats]:
    """The leaves of the result, in the order of the target, and what was read.

    With a session the load is striped.
    """
    assembly = Assembly(len(found.wanted.leaves), for_all=session is not None)
    total = 0
    follows = processes.process_index() > 0
    if not follows:
        count = sum(item.leaf.spec is not None for item in found.items)
        _LOG.info("reading %s: %d arrays", found.location, count)
    with showing(f"loading {found.location}", False if follows else options.progress) as progress:
        reader = CheckpointReader(
            found.location,
            found.manifest,
            verify=verify,
            options=options,
            clock=clock,
            on_read=progress and (lambda nbytes: progress(nbytes, total)),
        )

        def plan() -> Iterator[list[Filled]]:
            nonlocal total
            with clock.stage("plan"):
                requests = assembly.requests(found.items)
            assembly.put_values(found.items, reader)
            if session is None:
                total = sum(request.plan.nbytes_read for request in requests) if progress else 0
                return reader.read(requests)
            wanters = assembly.wanters
            striped = StripedReader(reader, requests, wanters, options=options, clock=clock)
            total = striped.nbytes
            return striped.read(session)

        # No name for what is iterated: its threads end with the loop, not with a traceback.
        for group in plan() if session is None else session.agreed(plan):
            with clock.stage("place"):
                assembly.place(group)
    return assembly.finish(), reader.stats


def _check_still_there(location: Location, manifest: Manifest) -> None:
    """Where folders cannot be locked, data may go while it is read."""
    if location.read_manifest().nonce != manifest.nonce:
        raise CheckpointError(f"{location} was replaced while it was read; load again") from None
