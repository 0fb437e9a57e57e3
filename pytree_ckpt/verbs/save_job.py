"""A save that is planned, alone or with other processes: it writes, and process 0 commits."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import CheckpointError, FormatError
from pytree_ckpt.format import manifest_file, tables, values, wire
from pytree_ckpt.format.boxes import whole
from pytree_ckpt.format.manifest import Manifest, TableRef, data_dir
from pytree_ckpt.format.paths import to_text
from pytree_ckpt.jaxio import monitoring, processes
from pytree_ckpt.jaxio.buffers import HostViews
from pytree_ckpt.jaxio.coordination import Session
from pytree_ckpt.jaxio.describe import Described, describe
from pytree_ckpt.options import LoadOptions, SaveOptions, check_flags, given_or_default
from pytree_ckpt.plan import agreement
from pytree_ckpt.plan.retention import checked_metrics
from pytree_ckpt.plan.saving import SavePlan, plan_save
from pytree_ckpt.progress import showing
from pytree_ckpt.store.digests import digest_of, new_digest
from pytree_ckpt.store.linking import Base
from pytree_ckpt.store.locations import Location, PathLike, locate
from pytree_ckpt.store.reading import CheckpointReader
from pytree_ckpt.store.writing import Writer
from pytree_ckpt.sweeps import no_sweeps
from pytree_ckpt.verbs.origin import completed, versions

_LOG = logging.getLogger("pytree_ckpt")


class SaveJob:
    """A save that is planned: nothing is written yet, and nothing in the tree is wrong.

    With several processes, process 0 makes the data folder, all write into it, and process 0
    commits. They meet three times: when process 0 has told where, when all have told that they
    see that place and save the same, and when all have written. So what one of them could not do
    is known to all before anything is committed, and that it is committed before anyone returns.
    """

    def __init__(
        self,
        path: PathLike,
        tree: Any,
        *,
        overwrite: bool,
        base: PathLike | None,
        metadata: Any,
        options: SaveOptions | None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self.clock = StageClock()
        check_flags(overwrite=overwrite)
        self._overwrite = overwrite
        self._options = given_or_default(options, SaveOptions)
        self._session = Session("the save to", path, timeout_s=self._options.timeout_s)
        self._process = self._session.process
        with self._session.ends_by_failure():
            self.location = locate(path)
            with self.clock.stage("plan"), no_sweeps():
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
                    described,
                    self._plan,
                    values.check_metadata(metadata),
                    checked_metrics(metrics),
                    self._options,
                )
            if self._process == 0:
                self.location.check_free(overwrite=overwrite)
            self._base = None
            if base is not None:
                texts = list(map(to_text, described.paths))
                digest = self._options.digest
                self._base = Base(locate(base), self.location, texts=texts, digest=digest)
            self._views = HostViews(described)
        self._per_process = {
            (leaf, self._process): value for leaf, value in described.per_process.items()
        }
        self._copied = described.copied

    def freeze(self) -> None:
        """Let the caller have the tree back; what is left to do is in the background."""
        if self._options.progress == "auto":
            # A bar would draw over what the training loop prints.
            self._options = dataclasses.replace(self._options, progress=False)
        with self._session.ends_by_failure():
            self._views.freeze()

    def release(self) -> None:
        """Let go of the tree and the base: the traceback of a failure may be kept for long."""
        self._views.release()
        if self._base is not None:
            self._base.release()

    def run(self, before: Callable[[], None] = lambda: None) -> Manifest:
        """Write and commit; process 0 does `before` first."""
        with self._session:
            if self._process:
                manifest = self._follow()
            else:
                before()
                manifest = self._lead()
        _LOG.log(
            logging.DEBUG if self._process else logging.INFO,
            "saved %s: %d leaves, %d bytes by this process, %d linked by all; %s",
            self.location,
            len(manifest.leaf_codes),
            self._plan.nbytes,
            manifest.linked_nbytes,
            self.clock,
        )
        monitoring.record("save", self.clock.seconds)
        return manifest

    def _lead(self) -> Manifest:
        """As process 0: make the place, write, commit."""
        with (
            self.location.attempt(
                overwrite=self._overwrite,
                needed_nbytes=self._needed_nbytes(),
                writers=processes.process_count(),
            ) as attempt,
            self._session.ends_by_failure(),  # before the data folder goes
        ):
            self._agree(attempt.nonce)
            written = [self._write(attempt.nonce)]
            with self.clock.stage("wait"):
                written += self._session.gather().values()
            manifest, data = completed(
                self._draft,
                nonce=attempt.nonce,
                tables=[TableRef(nbytes=nbytes, id=table) for nbytes, table, _ in written],
                clock=self.clock,
                linked_nbytes=sum(linked for _, _, linked in written),
            )
            _LOG.info("committing %s", self.location)
            with self.clock.stage("commit"):
                if len(written) > 1:
                    _check_coverage(self.location, manifest)
                attempt.commit(data)
            # The others need not wait until what is replaced has gone.
            self._session.tell(manifest.id)
        return manifest

    def _agree(self, nonce: str) -> None:
        """Go on once all processes see the data folder and save the same.

        Raises:
            PeerError: Some do not.
        """
        if self._session.is_alone:
            return
        own = self._intent()
        with self.clock.stage("wait"):
            self._session.tell([nonce, str(self.location), agreement.fingerprint(own)])
            answers = self._session.gather()
        wrong = {}
        for process, (trouble, other) in answers.items():
            if trouble:
                wrong[process] = trouble
            elif other:
                pair = agreement.Intent.from_bytes(own), agreement.Intent.from_bytes(other)
                wrong[process] = "; ".join(agreement.differences(*pair))
        if wrong:
            raise self._session.failed(wrong)
        self._session.tell(None)

    def _follow(self) -> Manifest:
        """As another process: write where process 0 says, learn whether it has committed."""
        with self.clock.stage("wait"):
            nonce, place, wanted = self._session.hear()
        own = self._intent()
        trouble = None
        if not self.location.sees(nonce):
            trouble = (
                f"{self.location} is not the folder {place} of process 0, which has data-{nonce} "
                "in it; all processes must save to one path on storage that they share"
            )
        self._session.report([trouble, None if agreement.fingerprint(own) == wanted else own])
        with self.clock.stage("wait"):
            self._session.hear()
        self._session.report(self._write(nonce))
        with self.clock.stage("wait"):
            digest = self._session.hear()
        manifest = self.location.read_manifest()
        if manifest.id != digest:
            raise CheckpointError(f"{self.location} was replaced as soon as it was saved")
        return manifest

    def _write(self, nonce: str) -> tuple[int, bytes, int]:
        """Write what falls to this process: size and id of its table, bytes that are linked."""
        choice = False if self._process else self._options.progress
        nbytes = self._plan.nbytes
        if not self._process:
            _LOG.info("writing %s: %d bytes by this process", self.location, nbytes)
        with showing(f"saving {self.location}", choice) as progress:
            writer = Writer(
                self.location / data_dir(nonce),
                self._plan,
                self._views,
                process=self._process,
                options=self._options,
                clock=self.clock,
                base=self._base,
                on_write=progress and (lambda done: progress(done, nbytes)),
            )
            table = writer.write(self._per_process)
        if self._base is not None:
            self._base.release()  # it may be what this save replaces
        return table.nbytes, table.id, writer.linked_nbytes

    def _needed_nbytes(self) -> int:
        """Bytes that must be free: without those of arrays that the base may have."""
        if self._base is None:
            return self._draft.nbytes
        linkable = [
            self._plan.spec(leaf).nbytes
            for leaf in self._plan.names
            if self._base.twin(leaf, self._plan.spec(leaf))
        ]
        return max(self._draft.nbytes - sum(linkable), 0)

    def _intent(self) -> bytes:
        """What this process is about to save, to be compared."""
        start = new_digest(self._options.digest)
        specs = self._draft.leaf_specs
        with self.clock.stage("compare"):
            contents = {
                leaf: digest_of(start, self._views(leaf, whole(spec.shape)))
                for leaf in self._copied
                if (spec := specs[leaf]) is not None
            }
        intent = agreement.Intent(draft=self._draft, overwrite=self._overwrite, contents=contents)
        return intent.to_bytes()


def _check_coverage(location: Location, manifest: Manifest) -> None:
    """Read the tables of all processes: they have each shard of each leaf exactly once.

    Raises:
        FormatError, IntegrityError: They have not.
    """
    reader = CheckpointReader(location, manifest, verify=True, options=LoadOptions())
    _ = reader.index
    for leaf in manifest.leaves:
        if leaf.per_process:
            reader.per_process(leaf.index)


def _draft(
    described: Described,
    plan: SavePlan,
    metadata: Any,
    metrics: Mapping[str, float],
    options: SaveOptions,
) -> Manifest:
    """The manifest but for what is known only at the end; too large a one is refused here."""
    rows = len(plan.array_leaf) + len(plan.packed_leaf)
    if rows * tables.ROW_NBYTES > wire.MAX_FILE_BYTES:
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
        metrics=metrics,
        versions=versions(),
        created=0.0,
        seconds={},
    )
    manifest_file.to_bytes(draft)
    return draft
