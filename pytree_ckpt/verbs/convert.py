"""Convert a checkpoint to another layout, dtype or selection: offline, in bounded memory."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import CheckpointError, PeerTimeoutError
from pytree_ckpt.format import manifest_file, tables, wire
from pytree_ckpt.format.manifest import Manifest, TableRef, data_dir
from pytree_ckpt.format.shardings import Named
from pytree_ckpt.format.tables import ShardIndex, Table
from pytree_ckpt.options import (
    MAX_PROCESSES,
    LoadOptions,
    SaveOptions,
    check_count,
    check_flags,
    check_seconds,
    given_or_default,
)
from pytree_ckpt.plan.converting import BATCH_NBYTES, ConvertPlan, plan_convert
from pytree_ckpt.plan.layouts import Layout
from pytree_ckpt.progress import showing
from pytree_ckpt.store import commit, contents, disk
from pytree_ckpt.store.commit import Attempt
from pytree_ckpt.store.journal import JOURNALS, Journal, Key, done_file
from pytree_ckpt.store.locations import Location, PathLike, locate
from pytree_ckpt.verbs.convert_workers import started
from pytree_ckpt.verbs.origin import completed, versions

_LOG = logging.getLogger("pytree_ckpt")
_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What `convert` did, or would do.

    Attributes:
        plan: What each leaf becomes.
        manifest: Of the new checkpoint; None after a dry run.
        kept_nbytes: Bytes of array data that this process found finished by an earlier run.
        seconds: Seconds of each stage, in this process.
    """

    plan: ConvertPlan
    manifest: Manifest | None
    kept_nbytes: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        kept = f"\n{self.kept_nbytes} bytes were finished before" if self.kept_nbytes else ""
        made = "" if self.manifest is None else f"\n{self.manifest}"
        return f"{self.plan}{kept}{made}"


def convert(
    src: PathLike,
    dst: PathLike,
    *,
    layout: Layout | PathLike | None = None,
    dtype: Mapping[str, str] | None = None,
    select: str | Sequence[str] = (),
    max_chunk_nbytes: int | None = None,
    overwrite: bool = False,
    workers: int = 1,
    process: tuple[int, int] | None = None,
    timeout_s: float = 600.0,
    dry_run: bool = False,
    options: SaveOptions | None = None,
) -> ConvertReport:
    """Write a checkpoint again in another layout, verified as it is read; no devices are needed.

    Memory is bounded, whatever the size of the state. What an interrupted conversion has finished
    is kept: the same call goes on from there, any other save to `dst` removes it.

    Args:
        src: The checkpoint that is read.
        dst: The folder of the new one, committed as a save does.
        layout: What to lay arrays out for, or a checkpoint whose layout to take. Without it the
            layout stays.
        dtype: Dtypes by pattern of leaf paths. With wildcards only leaves of the kind of the dtype
            change, floats to a float; a whole path changes what it names.
        select: Patterns of the leaves to take; all by default.
        max_chunk_nbytes: About how large chunks are.
        overwrite: Replace a checkpoint at `dst`.
        workers: Processes to do it with, started here.
        process: `(i, n)` if this is process `i` of `n` that were started with the same call;
            process 0 commits, the others return when it has.
        timeout_s: How long no other process may make progress.
        dry_run: Only plan.
        options: Digest, compression, threads and progress.

    Raises:
        MismatchError: What is asked for does not fit, with every reason; nothing was written.
        ValueError: A pattern, a dtype or a number that is none.
        IntegrityError: A chunk of `src` is damaged.
        NotFoundError, FormatError: There is no checkpoint that can be read.
        ExistsError: There is a checkpoint at `dst` and `overwrite` is False.
        PeerTimeoutError: Another process makes no progress.
        OSError: The storage refused or failed.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pc.save(folder + "/a", {"params": {"w": np.ones((4, 6), np.float32)}})
        ...     layout = pc.Layout(mesh={"data": 2}, specs={"params/**": "data,None"})
        ...     _ = convert(folder + "/a", folder + "/b", layout=layout, dtype={"**": "bfloat16"})
        ...     print(pc.read_manifest(folder + "/b").leaves[0])
        params/w  bfloat16[4, 6] P('data', None) on mesh(data=2)
    """
    number, count = _place(process, workers)
    check_seconds("timeout_s", timeout_s)
    check_flags(overwrite=overwrite, dry_run=dry_run)
    if not isinstance(layout, Layout | str | os.PathLike | None):
        raise TypeError(f"layout must be Layout(...) or the path of a checkpoint, not {layout!r}")
    options = given_or_default(options, SaveOptions)
    source = locate(src)
    manifest, held = source.open_to_read()
    with held:
        own = layout if isinstance(layout, Layout) else None
        like = None if layout is None or isinstance(layout, Layout) else locate(layout)
        plan = plan_convert(
            manifest,
            layout=own,
            like=None if like is None else like.read_manifest(),
            dtype=dtype,
            select=select,
            codec=options.codec,
            max_chunk_nbytes=max_chunk_nbytes,
            processes=count,
        )
        if dry_run:
            return ConvertReport(plan=plan, manifest=None)
        job = _Job(
            src=source,
            dst=locate(dst),
            manifest=manifest,
            plan=plan,
            process=number,
            overwrite=overwrite,
            timeout_s=timeout_s,
            options=options,
        )
        settings = {
            "src": str(source),
            "dst": str(job.dst),
            "layout": (own and dataclasses.asdict(own)) if like is None else str(like),
            "dtype": dict(dtype or {}),
            "select": select,
            "max_chunk_nbytes": max_chunk_nbytes,
            "overwrite": overwrite,
            "timeout_s": timeout_s,
            "options": {
                "digest": options.digest,
                "compress": options.compress,
                "threads": options.threads,
            },
        }
        with started(settings, workers) as check:
            report = job.run(check)
    commit.reclaim(job.folder)  # what was read, if it was replaced: it was held until now
    return report


def _place(process: tuple[int, int] | None, workers: int) -> tuple[int, int]:
    """Which process this is, of how many."""
    check_count("workers", workers, most=MAX_PROCESSES)
    match process:
        case None:
            return 0, workers
        case (int(number), int(count)) if 0 <= number < count <= MAX_PROCESSES and workers == 1:
            return number, count
    raise ValueError(
        f"process must be (i, n) with 0 <= i < n <= {MAX_PROCESSES}, and workers 1, "
        f"not {process!r} and {workers}"
    )


@dataclasses.dataclass(kw_only=True)
class _Job:
    """What one process of a conversion does."""

    src: Location
    dst: Location
    manifest: Manifest
    plan: ConvertPlan
    process: int
    overwrite: bool
    timeout_s: float
    options: SaveOptions

    def __post_init__(self) -> None:
        if self.dst.path is None:
            raise CheckpointError(f"convert writes to a disk, and {self.dst} is in an object store")
        self.folder = self.dst.path
        self._draft = _draft(self.src, self.manifest, self.plan, self.options)

    def run(self, check: Callable[[], None]) -> ConvertReport:
        """Write this process's part; process 0 commits, the others wait for it."""
        nonce = self._nonce()
        if (done := self._committed(nonce)) is not None:
            self._remove_journals(nonce)
            commit.settle(self.folder)
            return ConvertReport(plan=self.plan, manifest=done)
        clock = StageClock()
        part = self.plan.parts[self.process]
        with commit.resumable_attempt(
            self.folder, nonce, overwrite=self.overwrite, needed_nbytes=part.plan.nbytes
        ) as attempt:
            nbytes = part.plan.nbytes
            with showing(f"converting {self.src}", self.options.progress) as progress:
                kept = self._write(
                    attempt, clock, progress and (lambda done: progress(done, nbytes))
                )
            if self.process == 0:
                done = self._commit(attempt, clock, check)
            else:
                done = self._wait_for_commit(attempt)
        _LOG.info("converted %s to %s; %s", self.src, self.dst, clock)
        return ConvertReport(
            plan=self.plan, manifest=done, kept_nbytes=kept, seconds=dict(clock.seconds)
        )

    def _nonce(self) -> str:
        """Named by what is converted to what, so that the next run finds what this one did."""
        replaced = b""
        if self.overwrite and commit.is_committed(self.folder):
            replaced = commit.read_manifest(self.folder).id
        what = b"".join([self.manifest.id, manifest_file.to_bytes(self._draft)[1], replaced])
        return hashlib.sha256(what).hexdigest()[:32]

    def _committed(self, nonce: str) -> Manifest | None:
        """The new checkpoint, if it is there."""
        if not commit.is_committed(self.folder):
            return None
        found = commit.read_manifest(self.folder)
        return found if found.nonce == nonce else None

    def _write(
        self, attempt: Attempt, clock: StageClock, on_write: Callable[[int], None] | None
    ) -> int:
        """Write all that is left to do; the bytes that were finished before."""
        from pytree_ckpt.store import resuming

        part, data = self.plan.parts[self.process], self.dst / data_dir(attempt.nonce)
        journal = Journal(attempt.folder, self.process)
        try:
            with clock.stage("resume"):
                finished = resuming.is_finished(
                    data, part.plan, journal, process=self.process, options=self.options
                )
            left = resuming.rows_left(part.plan, journal)
            if not finished:
                resuming.clear_the_way(data, part.plan, journal, process=self.process)
                self._write_left(data, left, journal, clock, on_write)
            journal.tell_done()
        finally:
            journal.close()
        own = {row for batch in part.batches for row in batch}
        sizes = (self.plan.spec(leaf) for leaf, _ in own - left)
        return sum(spec.nbytes // spec.num_shards for spec in sizes)

    def _write_left(
        self,
        data: Location,
        left: set[Key],
        journal: Journal,
        clock: StageClock,
        on_write: Callable[[int], None] | None,
    ) -> None:
        """Read, convert and write these rows of this process, and the table of all of its rows."""
        from pytree_ckpt.store.converting import ConvertedViews, per_process_values
        from pytree_ckpt.store.reading import CheckpointReader
        from pytree_ckpt.store.writing import Writer

        part = self.plan.parts[self.process]
        reader = CheckpointReader(
            self.src,
            self.manifest,
            verify=True,
            options=LoadOptions(max_inflight_bytes=BATCH_NBYTES, threads=self.options.threads),
            clock=clock,
        )
        batches = [[row for row in batch if row in left] for batch in part.batches]
        own = [row for batch in part.batches for row in batch]
        writer = Writer(
            data,
            part.plan,
            ConvertedViews(reader, self.plan, batches),
            process=self.process,
            options=dataclasses.replace(self.options, max_inflight_bytes=BATCH_NBYTES),
            clock=clock,
            order=[row for row in own if self.plan.spec(row[0]).storage == "array"],
            journal=journal,
            on_write=on_write,
        )
        writer.write(per_process_values(reader, self.plan) if self.process == 0 else {})

    def _commit(self, attempt: Attempt, clock: StageClock, check: Any) -> Manifest:
        found, refs = self._tables(attempt, check)
        ShardIndex(self._draft.leaf_specs, found, digest=self._draft.digest)
        manifest, data = completed(self._draft, nonce=attempt.nonce, tables=refs, clock=clock)
        disk.remove_tree(attempt.folder / JOURNALS)
        attempt.temporary.unlink(missing_ok=True)  # of a run that was killed within its commit
        attempt.commit(data)
        return manifest

    def _tables(self, attempt: Attempt, check: Any) -> tuple[list[Table], list[TableRef]]:
        """The tables of all processes, once all that these write is durable."""
        count = len(self.plan.parts)
        data_folder = self.dst / data_dir(attempt.nonce)

        def missing() -> list[int]:
            check()
            return [p for p in range(count) if not done_file(attempt.folder, p).exists()]

        self._wait(attempt, missing)
        found, refs = [], []
        for process in range(count):
            file = contents.table_file(data_folder, process)
            data = file.read_file(max_nbytes=wire.MAX_FILE_BYTES)
            table, digest = tables.from_bytes(data, what=str(file))
            found.append(table)
            refs.append(TableRef(nbytes=len(data), id=digest))
        return found, refs

    def _wait_for_commit(self, attempt: Attempt) -> Manifest:
        self._wait(attempt, lambda: [] if self._committed(attempt.nonce) else [0])
        done = self._committed(attempt.nonce)
        if done is None:
            raise CheckpointError(f"{self.dst} was replaced as soon as it was converted")
        self._remove_journals(attempt.nonce)
        return done

    def _remove_journals(self, nonce: str) -> None:
        """Remove what a process made that came when the others had finished without it."""
        with contextlib.suppress(OSError):
            disk.remove_tree(self.folder / data_dir(nonce) / JOURNALS)

    def _wait(self, attempt: Attempt, missing: Any) -> None:
        """Wait until nobody is missing, as long as anybody writes something.

        Raises:
            PeerTimeoutError: Nobody has for so long.
        """
        seen, since = -1, time.monotonic()
        while waiting := missing():
            size = _progress(attempt.folder)
            if size != seen:
                seen, since = size, time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                raise PeerTimeoutError(
                    f"processes {waiting} of the conversion made no progress for "
                    f"{self.timeout_s} s; what is finished is kept for the same call",
                    missing=waiting,
                )
            time.sleep(_POLL_S)


def _progress(data: Path) -> int:
    """A number that grows while anybody finishes anything."""
    try:
        return sum(file.stat().st_size for file in (data / JOURNALS).iterdir())
    except FileNotFoundError:
        return 0  # the journals go just before the commit


def _draft(src: Location, manifest: Manifest, plan: ConvertPlan, options: SaveOptions) -> Manifest:
    """The new manifest but for what is known only at the end."""
    values = tuple(
        leaf.value for leaf in plan.leaves if leaf.value is not None and not leaf.per_process
    )
    meshes = {
        len(spec.sharding.mesh.device_ids)
        for spec in plan.specs
        if isinstance(spec.sharding, Named)
    }
    whole = len(plan.leaves) == len(manifest.leaves)
    placeholder = TableRef(nbytes=wire.MAX_FILE_BYTES, id=bytes(32))
    return Manifest(
        nonce="0" * 32,
        digest=options.digest,
        tree=plan.tree,
        specs=plan.specs,
        leaf_codes=plan.codes,
        values=values,
        names=tuple(plan.parts[0].plan.names.values()),
        process_count=plan.process_count,
        device_count=max(meshes, default=manifest.device_count),
        platform=manifest.platform,
        tables=(placeholder,) * len(plan.parts),
        metadata=manifest.metadata,
        metrics=manifest.metrics,
        versions=versions(),
        created=0.0,
        seconds={},
        source={"kind": "checkpoint", "path": str(src), "holds": "all" if whole else "part"},
    )
