"""Save a pytree: describe, plan, write, commit."""

import time
from collections.abc import Callable
from typing import Any

from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.jaxio import processes
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.store.locations import PathLike
from pytree_ckpt.verbs.pending import PendingSave
from pytree_ckpt.verbs.save_job import SaveJob


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
    is touched before the new checkpoint is: if anything fails, what was there is still there, or,
    where it failed after the commit, the new checkpoint is.

    With several processes every one calls this, in the same order as its other saves, with the
    same path and tree; a replicated part is written by one of them. A failure on any process
    fails the save on all.

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
        OSError: The storage refused or failed.
        TypeError, ValueError: Metadata that is not JSON-like.
        PeerError: It failed on another process, or the processes do not save the same.
        PeerTimeoutError: Other processes did not come to the same point in time.

    Example:
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = save(folder + "/ckpt", {"w": np.ones((2, 3)), "step": 7})
        >>> [str(leaf) for leaf in manifest.leaves]
        ['step  int', 'w  float64[2, 3] host array']
    """
    job = SaveJob(path, tree, overwrite=overwrite, base=base, metadata=metadata, options=options)
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
    started = time.perf_counter()
    job = SaveJob(path, tree, overwrite=overwrite, base=base, metadata=metadata, options=options)
    return in_background(job, started=started)


def in_background(
    job: SaveJob,
    *,
    started: float,
    before: Callable[[], None] = lambda: None,
    after: Callable[[Manifest], None] = lambda manifest: None,
) -> PendingSave:
    """Run a job while the caller goes on; `before` and `after` run around it, in process 0.

    The caller counts as blocked since `started`, by `time.perf_counter()`.
    """
    job.freeze()
    job.clock.add("blocked", time.perf_counter() - started)

    def work() -> Manifest:
        try:
            manifest = job.run(before)
        finally:
            job.release()
        if processes.process_index() == 0:
            after(manifest)
        return manifest

    return PendingSave(work, str(job.location))
