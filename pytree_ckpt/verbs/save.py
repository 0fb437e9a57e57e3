"""Save a pytree: describe, plan, write, commit."""

import dataclasses
import logging
import sys
import time
from importlib import metadata as distributions
from typing import Any

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import CheckpointError, FormatError
from pytree_ckpt.format import manifest_file, values, wire
from pytree_ckpt.format.manifest import Manifest, TableRef
from pytree_ckpt.jaxio import monitoring, processes
from pytree_ckpt.jaxio.buffers import HostViews
from pytree_ckpt.jaxio.describe import Described, describe
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.plan.saving import SavePlan, plan_save
from pytree_ckpt.store import commit
from pytree_ckpt.store.locations import PathLike, locate
from pytree_ckpt.store.writing import Writer

_LOG = logging.getLogger("pytree_ckpt")
_ROW_NBYTES = 64
"""Bytes of a table for one shard, about."""
_VERSIONS_OF = ("pytree-ckpt", "jax", "jaxlib", "numpy", "tensorstore")


def save(
    path: PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    metadata: Any = None,
    options: SaveOptions | None = None,
) -> Manifest:
    """Save a pytree as a checkpoint at `path`; it is durable when this returns.

    Every device shard is written from where it is, without gathering. Nothing that is committed
    is touched before the new checkpoint is; if anything fails, what was there is still there.

    Args:
        path: The folder of the checkpoint, made if it is missing.
        tree: Any pytree of arrays, typed keys, numbers, `str`, `bytes` and `PerProcess`.
        overwrite: Replace a checkpoint at `path`, in one atomic step.
        metadata: JSON-like data to keep in the manifest.
        options: Digest, compression, memory bound and threads.

    Returns:
        The manifest as it was committed.

    Raises:
        UnsupportedLeafError: Leaves that cannot be saved; nothing was written.
        ExistsError: There is a checkpoint at `path` and `overwrite` is False.
        OSError: The storage refused or failed; nothing was committed.

    Example:
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = save(folder + "/ckpt", {"w": np.ones((2, 3)), "step": 7})
        >>> [str(leaf) for leaf in manifest.leaves]
        ['step  int', 'w  float64[2, 3] host array']
    """
    options = options or SaveOptions()
    location = locate(path)
    if processes.process_count() > 1:
        raise CheckpointError("this release saves from one process only")
    clock = StageClock()
    with clock.stage("plan"):
        described = describe(tree)
        plan = plan_save(
            described.paths,
            described.forms,
            described.codes,
            process=processes.process_index(),
            process_of=processes.process_of_device(),
            codec=options.codec,
        )
        draft = _draft(described, plan, values.check_metadata(metadata), options)
    with commit.attempt(location, overwrite=overwrite, needed_nbytes=plan.nbytes) as attempt:
        writer = Writer(
            attempt.folder,
            plan,
            HostViews(described),
            process=processes.process_index(),
            options=options,
            clock=clock,
        )
        table = writer.write(described.per_process)
        complete = dataclasses.replace(
            draft,
            nonce=attempt.nonce,
            tables=(table,),
            seconds=dict(clock.seconds),
            created=time.time(),
        )
        data, digest = manifest_file.to_bytes(complete)
        with clock.stage("commit"):
            attempt.commit(data)
    _LOG.info(
        "saved %s: %d leaves, %d bytes; %s", location, len(described.codes), plan.nbytes, clock
    )
    monitoring.record("save", clock.seconds)
    return manifest_file.with_id(complete, digest)


def _draft(described: Described, plan: SavePlan, metadata: Any, options: SaveOptions) -> Manifest:
    """The manifest but for what is known only at the end; too large a one is refused here."""
    rows = len(plan.array_leaf) + len(plan.packed_leaf)
    if rows * _ROW_NBYTES > wire.MAX_FILE_BYTES:
        raise FormatError(
            f"the tree has {rows} shards, more than one table can list; use fewer, larger arrays"
        )
    draft = Manifest(
        nonce="0" * 32,
        digest=options.digest,
        tree=described.tree,
        specs=plan.specs,
        leaf_codes=plan.codes,
        values=tuple(described.values),
        names=tuple(plan.names.values()),
        process_count=processes.process_count(),
        device_count=processes.device_count(),
        platform=processes.platform(),
        tables=(TableRef(nbytes=1, id=b""),),
        metadata=metadata,
        metrics={},
        versions=_versions(),
        created=0.0,
        seconds={},
    )
    manifest_file.to_bytes(draft)
    return draft


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _VERSIONS_OF:
        try:
            found[name] = distributions.version(name)
        except distributions.PackageNotFoundError:
            found[name] = "unknown"
    return found
