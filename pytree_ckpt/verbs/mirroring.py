"""Copies of the committed checkpoints of a run at a second place, made in the background."""

import dataclasses
import logging
import threading

from pytree_ckpt.errors import ExistsError, FormatError, IntegrityError, NotFoundError
from pytree_ckpt.format import manifest_file, wire
from pytree_ckpt.format.manifest import MANIFEST_FILE, Manifest
from pytree_ckpt.options import LoadOptions, check_count
from pytree_ckpt.plan.retention import Keep
from pytree_ckpt.store import health
from pytree_ckpt.store.copying import copy_data
from pytree_ckpt.store.locations import Location
from pytree_ckpt.verbs.pending import Background
from pytree_ckpt.verbs.rotation import Rotation
from pytree_ckpt.verbs.tiers import Tier, Tiers
from pytree_ckpt.verbs.verify import verify_data

_LOG = logging.getLogger("pytree_ckpt")


class Mirror:
    """Copies steps from the near root to the far one, one at a time.

    Steps that come while another one is copied do not queue up: the newest of them is next.
    Without a far root there is nothing to do, and nothing to wait for.

    Args:
        tiers: The roots.
        every: The steps that are due are multiples of it; None takes all.
        keep: Which steps stay in the far root; None keeps all.
        options: Threads and memory of a copy.
        patience_s: How long one call waits.

    Raises:
        TypeError, ValueError: `keep` is no policy, `every` no count, or there is no far root.
    """

    def __init__(
        self,
        tiers: Tiers,
        *,
        every: int | None,
        keep: Keep | None,
        options: LoadOptions,
        patience_s: float,
    ) -> None:
        if tiers.far is not None and not isinstance(keep, Keep | None):
            raise TypeError(f"mirror_keep must be Keep(...), 'same' or None, not {keep!r}")
        if every is not None:
            check_count("mirror_every", every)
            if tiers.far is None:
                raise ValueError(f"mirror_every={every!r} without a mirror")
        self._near = tiers.near
        self._far = tiers.far
        self._every = every or 1
        self._keep = keep
        self._options = dataclasses.replace(options, progress=False)
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._next: tuple[int, bool] | None = None
        self._step: int | None = None
        self._copy: Background[None] | None = None

    def offer(self, step: int, overwrite: bool, *, even_if_not_due: bool = False) -> None:
        """Copy a step that is committed, as soon as no other one is being copied.

        Args:
            step: The newest one of the near root.
            overwrite: Replace another checkpoint that has this step in the far root.
            even_if_not_due: Whatever `every` says.
        """
        far = self._far
        if far is None or not (even_if_not_due or step % self._every == 0):
            return
        with self._changed:
            if self._next is not None and self._next[0] != step:
                _LOG.info("step %d is not copied to %s, but step %d", self._next[0], far, step)
            self._next = (step, overwrite)
            if self._step is not None:
                return
            self._step = step
        try:
            if self._copy is not None:
                self._copy.wait()
                self._copy.exception()  # It was logged; this is the next try.
            self._copy = Background(lambda: self._run(far), f"a copy from {self._near} to {far}")
        except BaseException:
            self._next = None
            self._take()
            raise

    def wait(self) -> bool:
        """Wait a while until nothing is being copied, or is to be; whether it is so."""
        if self._copy is None or self._copy.wait(self._patience_s):
            return True
        # Storage that hangs and one that is slow look alike: who waits is told for what.
        _LOG.warning("waiting for the copy of step %s to %s", self._step, self._far)
        return False

    def check(self) -> None:
        """Raise what the last copy failed with, once."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.result()

    def let_go(self, step: int) -> None:
        """Wait a while until a step is not being copied."""
        with self._changed:
            self._changed.wait_for(lambda: self._step != step, self._patience_s)

    def _run(self, far: Tier) -> None:
        """Copy what is next until nothing is; raise what the last copy failed with."""
        failure: BaseException | None = None
        while (due := self._take()) is not None:
            if failure is not None:
                _LOG.error("a copy from %s to %s failed: %s", self._near, far, failure)
            failure = self._tried(*due, far)
        if failure is not None:
            raise failure

    def _take(self) -> tuple[int, bool] | None:
        with self._changed:
            due, self._next = self._next, None
            self._step = None if due is None else due[0]
            self._changed.notify_all()
        return due

    def _tried(self, step: int, overwrite: bool, far: Tier) -> BaseException | None:
        """Copy a step, unless it was deleted before its turn; what that failed with."""
        near = self._near.place(step)
        try:
            try:
                manifest, held = near.open_to_read()
            except NotFoundError:
                _LOG.info("step %d is not copied to %s: it was deleted", step, far)
                return None
            with held:
                self._copy_step(near, far, step, manifest, overwrite=overwrite)
        except BaseException as error:  # noqa: BLE001 - raised by check(), or reported at exit
            error.add_note(f"step {step} of {self._near} is not in {far}")
            return error
        return None

    def _copy_step(
        self, near: Location, far: Tier, step: int, manifest: Manifest, *, overwrite: bool
    ) -> None:
        later = [s for s in far.steps() if s > step and not far.is_marked(s)]
        if later:
            raise ExistsError(
                f"{far} has steps {later} after step {step}, which are not of this run; delete "
                "them, or mirror to another place"
            )
        place = far.place(step)
        replaces = _replaces(place, manifest, overwrite=overwrite)
        if replaces is None:
            return
        rotation = Rotation(far, self._keep)
        rotation.make_room(step)
        _copy(near, place, manifest, overwrite=replaces, options=self._options)
        _LOG.info("copied %s to %s", near, place)
        rotation.rotate(step, manifest.metrics)


def _replaces(place: Location, manifest: Manifest, *, overwrite: bool) -> bool | None:
    """Whether a copy replaces what is there; None if that is the copy.

    Raises:
        ExistsError: There is another checkpoint, which is not known to be damaged.
    """
    try:
        found = place.read_manifest()
    except NotFoundError:
        return False
    except FormatError:
        what = "one whose manifest cannot be read"
    else:
        if found.id == manifest.id:
            return None
        what = f"{found.id.hex()[:16]}…"
    if overwrite or health.is_marked(place):
        return True
    raise ExistsError(
        f"{place} is another checkpoint, {what}, than {manifest.id.hex()[:16]}…, which was to be "
        "copied there; delete it, or save the step with overwrite=True"
    )


def _copy(
    near: Location, far: Location, manifest: Manifest, *, overwrite: bool, options: LoadOptions
) -> None:
    """Copy a checkpoint that is held in place: all its files, then its manifest.

    What was written is read back, every digest of it, before the manifest makes it a checkpoint.

    Raises:
        IntegrityError: It is damaged, where it is or on the way; nothing was committed.
        ExistsError: Another process has committed there first.
        OSError: A storage refused or failed.
    """
    data = (near / MANIFEST_FILE).read_file(max_nbytes=wire.MAX_FILE_BYTES)
    if manifest_file.from_bytes(data, what=str(near)).id != manifest.id:
        raise ExistsError(f"{near} was replaced as soon as its copy began")
    with far.attempt(
        overwrite=overwrite, needed_nbytes=manifest.nbytes, nonce=manifest.nonce
    ) as attempt:
        copy_data(near / manifest.data_dir, far / manifest.data_dir, manifest, options=options)
        copied = verify_data(far, manifest, options)
        if not copied.ok:
            here = verify_data(near, manifest, options)
            raise IntegrityError(
                here.damage or copied.damage,
                note=f"{near} is damaged, and was not copied to {far}."
                if here.damage
                else f"{near} is whole; its copy to {far} was damaged on the way, and is removed.",
            )
        attempt.commit(data)
