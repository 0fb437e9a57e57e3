"""Save a pytree: describe, plan, write, commit."""

import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata as distributions
from typing import Any

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import CheckpointError, FormatError
from pytree_ckpt.format import manifest_file, values, wire
from pytree_ckpt.format.manifest import Manifest, TableRef
from pytree_ckpt.format.paths import to_text
from pytree_ckpt.jaxio import monitoring, processes
from pytree_ckpt.jaxio.buffers import HostViews
from pytree_ckpt.jaxio.describe import Described, describe
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.plan.saving import SavePlan, plan_save
from pytree_ckpt.store import commit
from pytree_ckpt.store.linking import Base
from pytree_ckpt.store.locations import PathLike, locate
from pytree_ckpt.store.writing import Writer
from pytree_ckpt.verbs.pending import PendingSave

_LOG = logging.getLogger("pytree_ckpt")
_ROW_NBYTES = 64
"""Bytes of a table for one shard, about."""
_VERSIONS_OF = ("pytree-ckpt", "jax", "jaxlib", "numpy", "tensorstore")


def save(
    path: PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    base: PathLike | None = None,
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
        base: A checkpoint on the same file system, such as the previous one. Files of large
            shards that would be equal to its files are linked instead of written; each of the two
            checkpoints stays whole when the other is deleted.
        metadata: JSON-like data to keep in the manifest.
        options: Digest, compression, memory bound and threads.

    Returns:
        The manifest as it was committed.

    Raises:
        UnsupportedLeafError: Leaves that cannot be saved; nothing was written.
        ExistsError: There is a checkpoint at `path` and `overwrite` is False.
        NotFoundError, FormatError, IntegrityError: There is no checkpoint at `base`, or its
            manifest or tables are damaged. A damaged shard of it is written anew.
        OSError: The storage refused or failed; nothing was committed.

    Example:
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = save(folder + "/ckpt", {"w": np.ones((2, 3)), "step": 7})
        >>> [str(leaf) for leaf in manifest.leaves]
        ['step  int', 'w  float64[2, 3] host array']
    """
    job = _Job(
        path,
        tree,
        overwrite=overwrite,
        base=base,
        metadata=metadata,
        metrics=None,
        options=options,
    )
    try:
        return job.run()
    finally:
        job.release()


def save_async(
    path: PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    base: PathLike | None = None,
    metadata: Any = None,
    options: SaveOptions | None = None,
) -> PendingSave:
    """Save a pytree in the background; returns once `tree` may be donated, changed or deleted.

    What is wrong with the tree or the path is raised here; what goes wrong later by
    `pending.result()`, and at the latest reported when the interpreter exits. Leaving the
    interpreter waits for the save.

    On CPU no jax.Array above 1 MiB is copied: do not write to a numpy array that such a one was
    made of without a copy. On accelerators the state is copied to the host in the background.

    Args and errors as `save`.

    Example:
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights = np.zeros(3)
        ...     pending = save_async(folder + "/ckpt", {"w": weights})
        ...     weights[:] = 1  # too late to change what is saved
        ...     pending.result().leaves[0].text
        'w'
    """
    return start_save(
        path, tree, overwrite=overwrite, base=base, metadata=metadata, metrics=None, options=options
    )


def start_save(
    path: PathLike,
    tree: Any,
    *,
    overwrite: bool,
    base: PathLike | None,
    metadata: Any,
    metrics: Mapping[str, float] | None,
    options: SaveOptions | None,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
    started: float | None = None,
) -> PendingSave:
    """As `save_async`; `before` and `after` run in the background around the save.

    The caller counts as blocked since `started`, by `time.perf_counter()`.
    """
    started = time.perf_counter() if started is None else started
    job = _Job(
        path,
        tree,
        overwrite=overwrite,
        base=base,
        metadata=metadata,
        metrics=metrics,
        options=options,
    )
    job.freeze()
    job.clock.add("blocked", time.perf_counter() - started)

    def work() -> Manifest:
        try:
            before()
            manifest = job.run()
        finally:
            job.release()
        after()
        return manifest

    return PendingSave(work, str(job.location))


class _Job:
    """A save that is planned: nothing is written yet, and nothing in the tree is wrong."""

    def __init__(
        self,
        path: PathLike,
        tree: Any,
        *,
        overwrite: bool,
        base: PathLike | None,
        metadata: Any,
        metrics: Mapping[str, float] | None,
        options: SaveOptions | None,
    ) -> None:
        self.location = locate(path)
        self.clock = StageClock()
        self._overwrite = overwrite
        self._options = options or SaveOptions()
        self._process = processes.process_index()
        if processes.process_count() > 1:
            raise CheckpointError("this release saves from one process only")
        with self.clock.stage("plan"):
            described = describe(tree)
            self._plan = plan_save(
                described.paths,
                described.forms,
                described.codes,
                process=self._process,
                process_of=processes.process_of_device(),
                codec=self._options.codec,
            )
            self._draft = _draft(
                described, self._plan, values.check_metadata(metadata), metrics, self._options
            )
        commit.check_free(self.location, overwrite=overwrite)
        self._base = None if base is None else Base(locate(base), self.location)
        self._texts = [] if base is None else list(map(to_text, described.paths))
        self._views = HostViews(described)
        self._per_process = described.per_process

    def freeze(self) -> None:
        """Let the caller have the tree back."""
        self._views.freeze()

    def release(self) -> None:
        """Let go of the tree and the base: the traceback of a failure may be kept for long."""
        self._views.release()
        if self._base is not None:
            self._base.release()

    def run(self) -> Manifest:
        """Write and commit."""
        with commit.attempt(
            self.location, overwrite=self._overwrite, needed_nbytes=self._needed_nbytes()
        ) as attempt:
            writer = Writer(
                attempt.folder,
                self._plan,
                self._views,
                process=self._process,
                options=self._options,
                clock=self.clock,
                base=self._base,
                texts=self._texts,
            )
            table = writer.write(self._per_process)
            if self._base is not None:
                self._base.release()  # it may be what this save replaces
            complete = dataclasses.replace(
                self._draft,
                nonce=attempt.nonce,
                tables=(table,),
                seconds=dict(self.clock.seconds),
                created=time.time(),
                linked_nbytes=writer.linked_nbytes,
            )
            data, digest = manifest_file.to_bytes(complete)
            with self.clock.stage("commit"):
                attempt.commit(data)
        _LOG.info(
            "saved %s: %d leaves, %d bytes, of which %d are linked; %s",
            self.location,
            len(complete.leaf_codes),
            self._plan.nbytes,
            complete.linked_nbytes,
            self.clock,
        )
        monitoring.record("save", self.clock.seconds)
        return manifest_file.with_id(complete, digest)

    def _needed_nbytes(self) -> int:
        """Bytes that must be free: without those of arrays that the base may have."""
        if self._base is None:
            return self._plan.nbytes
        linkable = [
            self._plan.spec(leaf).nbytes
            for leaf in self._plan.names
            if self._base.twin(self._texts[leaf], self._plan.spec(leaf), self._options.digest)
        ]
        return max(self._plan.nbytes - sum(linkable), 0)


def _draft(
    described: Described,
    plan: SavePlan,
    metadata: Any,
    metrics: Mapping[str, float] | None,
    options: SaveOptions,
) -> Manifest:
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
        tables=(TableRef(nbytes=wire.MAX_FILE_BYTES, id=bytes(32)),) * processes.process_count(),
        metadata=metadata,
        metrics={name: float(value) for name, value in (metrics or {}).items()},
        versions=_versions(),
        created=0.0,
        seconds={},
    )
    manifest_file.to_bytes(draft)
    return draft


@functools.cache
def _versions() -> dict[str, str]:
    # Looking them up takes milliseconds, and they stay what they are.
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _VERSIONS_OF:
        try:
            found[name] = distributions.version(name)
        except distributions.PackageNotFoundError:
            found[name] = "unknown"
    return found
