"""A training loop's save, restore and rotation, on top of the functions."""

import functools
import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import jax

from pytree_ckpt.format.steps import StepNames, checked_step
from pytree_ckpt.jaxio.coordination import decided
from pytree_ckpt.options import LoadOptions, SaveOptions, check_flags, given_or_default
from pytree_ckpt.plan import retention
from pytree_ckpt.plan.restructure import Rules
from pytree_ckpt.plan.retention import Decision, Keep
from pytree_ckpt.store.locations import PathLike, locate
from pytree_ckpt.verbs.load import load
from pytree_ckpt.verbs.mirroring import Mirror
from pytree_ckpt.verbs.pending import PendingSave
from pytree_ckpt.verbs.preemption import Preempted, listen
from pytree_ckpt.verbs.restoring import OnDamage, load_first_whole
from pytree_ckpt.verbs.rotation import Rotation, infos_of
from pytree_ckpt.verbs.save import in_background
from pytree_ckpt.verbs.save_job import SaveJob
from pytree_ckpt.verbs.schedule import Schedule
from pytree_ckpt.verbs.tiers import Tier, Tiers

_LOG = logging.getLogger("pytree_ckpt")
T = TypeVar("T")


class CheckpointManager:
    """Numbered checkpoints of one run in one root.

    `save` decides by itself whether it is time; it returns as soon as the state may be donated,
    and the checkpoint is written in the background. Old checkpoints are deleted by `keep`; with
    more than one to keep that is before a new one is written, so that the disk holds no more than
    that. The last good one is never deleted.

    With a mirror each is then copied to a far place, such as an object store behind a fast disk:
    in the background, verified, one at a time. What comes while one is copied does not queue up:
    the newest of it is next. The training goes on without the far place; what failed is logged,
    tried again with the next step, and raised by `wait` and `close`. All that looks or restores
    takes both places as one, and of a step the near copy if that is good.

    Args:
        root: Folder of the run, made when the first step is saved.
        keep: Which checkpoints stay. None keeps all.
        save_every: Save steps that are a multiple of this.
        save_every_seconds: Save when so many seconds have passed since the last save.
        mirror: The far root, where copies go.
        mirror_every: Copy saved steps that are a multiple of this, and the last one if SIGTERM
            came. None copies all, but for those that come too fast.
        mirror_keep: Which copies stay. "same" is as by `keep`, None keeps all.
        prefix, width: How steps are named; `step_00001000` by default.
        background: Write in the background. False makes `save` return when it is durable.
        link_unchanged: Link what a step would only repeat of the one before: `base` of `save`.
        on_sigterm: Take SIGTERM as a preemption: the next `save` saves whatever the step, waits,
            and raises `Preempted`; if there is none, `close` does once the last save is durable.
            Only in the main thread, and not for its forks. Where `jax.distributed` is
            initialized, JAX's preemption sync point decides: all processes stop at the same call.
        save_options, load_options: As `save` and `load` take them.

    With neither `save_every` nor `save_every_seconds` every call of `save` saves.

    With several processes each has a manager and makes the same calls. Process 0 decides what
    depends on time or on what is in the root, and it alone deletes and copies.

    Example:
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as root:
        ...     with CheckpointManager(root, keep=Keep(last=2), save_every=10) as manager:
        ...         for step in range(1, 41):
        ...             _ = manager.save(step, {"w": np.full(3, step)})
        ...     manager.steps(), int(manager.restore({"w": np.zeros(3, int)})["w"][0])
        ([30, 40], 40)
    """

    def __init__(
        self,
        root: PathLike,
        *,
        keep: Keep | None = Keep(last=3),  # noqa: B008 - frozen
        save_every: int | None = None,
        save_every_seconds: float | None = None,
        mirror: PathLike | None = None,
        mirror_every: int | None = None,
        mirror_keep: Keep | Literal["same"] | None = "same",
        prefix: str = "step_",
        width: int = 8,
        background: bool = True,
        link_unchanged: bool = False,
        on_sigterm: bool = False,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        check_flags(background=background, link_unchanged=link_unchanged, on_sigterm=on_sigterm)
        self._save_options = given_or_default(save_options, SaveOptions)
        self._load_options = given_or_default(load_options, LoadOptions)
        self._schedule = Schedule(every=save_every, every_seconds=save_every_seconds)
        self._root = locate(root)
        self._keep = keep
        names = StepNames(prefix=prefix, width=width)
        self._tiers = Tiers(
            Tier(root=self._root, names=names),
            None if mirror is None else Tier(root=locate(mirror), names=names),
        )
        self._mirror = Mirror(
            self._tiers,
            every=mirror_every,
            keep=keep if mirror_keep == "same" else mirror_keep,
            options=self._load_options,
            patience_s=self._save_options.timeout_s,
        )
        self._rotation = Rotation(self._tiers.near, keep, let_go=self._mirror.let_go)
        self._background = background
        self._link_unchanged = link_unchanged
        self._pending: PendingSave | None = None
        self._last: tuple[int, bool] | None = None
        self._notice = listen(on_sigterm=on_sigterm)

    # --- saving ---------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether `save(step, ...)` would save now."""
        checked_step(step)
        schedule = self._schedule
        if schedule.has(step) or self._notice.came():
            return True
        return schedule.every_seconds is not None and self._decided(
            f"whether it is time to save step {step}", schedule.is_time
        )

    def _decided(self, what: str, decide: Callable[[], T]) -> T:
        """What process 0 decides, which all must do alike."""
        matter, timeout_s = f"the decision {what} in", self._save_options.timeout_s
        return decided(matter, self._root, decide, timeout_s=timeout_s)

    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
        skip_if_busy: bool = False,
    ) -> PendingSave | None:
        """Save `tree` as `step`, if it is time.

        A save that is still under way is waited for first, and its failure raised here; after
        SIGTERM it is reported at exit instead, and this step still saved. A copy that is under way
        is not waited for, unless SIGTERM came.

        Args:
            step: Above every step of the root, unless `overwrite` replaces it. Steps that are
                marked as damaged do not count, and are replaced.
            tree: The state.
            metrics: Numbers for `Keep(best=...)`.
            metadata: JSON-like data for the manifest.
            force: Save whether or not it is time.
            overwrite: Replace this step.
            skip_if_busy: Do not save if another save is under way, unless SIGTERM came.

        Returns:
            The save under way, None if it was not time.

        Raises:
            Preempted: SIGTERM came; this step is saved.
            ExistsError: The step exists, or is below the latest one.
            Exception: What this save, or the one before it, failed with.
        """
        started = time.perf_counter()
        check_flags(force=force, overwrite=overwrite, skip_if_busy=skip_if_busy)
        number = checked_step(step)
        if not force and not self.should_save(number):
            return None
        preempted = self._notice.came()
        if preempted and self._pending is not None:
            self._pending.wait()
        elif skip_if_busy and self._decided(f"whether to skip step {number}", self._is_busy):
            return None
        else:
            self._wait_for_save()
        replaces = self._decided(
            f"whether to replace step {number}",
            lambda: self._tiers.replaces(number, overwrite=overwrite),
        )
        job = SaveJob(
            str(self._tiers.near.place(number)),
            tree,
            overwrite=replaces,
            base=self._tiers.near.newest_whole(below=number) if self._link_unchanged else None,
            metadata=metadata,
            metrics=metrics,
            options=self._save_options,
        )
        self._pending = pending = in_background(
            job,
            started=started,
            before=lambda: self._rotation.make_room(number),
            after=lambda manifest: self._after(number, manifest.metrics, overwrite=overwrite),
        )
        self._schedule.note_save()
        self._last = number, overwrite
        preempted = preempted or self._notice.came()
        if preempted or not self._background:
            self._wait_for_save()
        if preempted:
            self._copy_last()
            raise self._preempted()
        return pending

    def _after(self, step: int, metrics: Mapping[str, float], *, overwrite: bool) -> None:
        """In the background, in process 0: what follows the commit of a step."""
        self._mirror.offer(step, overwrite=overwrite)
        self._rotation.rotate(step, metrics)

    def _is_busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait for the save under way, and until its copy, if it is due, is at the mirror.

        Raises:
            Exception: What the save failed with, or the last copy.
        """
        self._wait_for_save()
        self._wait_for_copy(raises=True)

    def _wait_for_copy(self, *, raises: bool = False) -> None:
        """Wait until nothing is being copied; with `raises` also raise what the last one did."""
        if self._tiers.far is None:
            return
        while not self._decided("whether the copy has ended", self._mirror.wait):
            continue
        if raises:
            self._decided("whether the copy is whole", self._mirror.check)

    def _copy_last(self) -> None:
        """Copy the last step, due or not; a failure is logged, and reported at exit."""
        if self._last is not None and self._tiers.far is not None:
            offer = functools.partial(self._mirror.offer, *self._last, even_if_not_due=True)
            self._decided("what to copy", offer)
            self._wait_for_copy()

    def _wait_for_save(self) -> None:
        pending = self._pending
        if pending is not None:
            try:
                pending.result()
            finally:
                if pending.done():  # else the wait was interrupted, and whoever comes next waits
                    self._pending = None

    # --- looking --------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Committed steps, near or far, that are not known to be damaged, ascending.

        Raises:
            OSError: The root cannot be read; or the mirror, and the root has no good step.
        """
        return [state.step for state in self._tiers.look() if not state.is_damaged]

    def latest_step(self) -> int | None:
        """The newest of `steps()`, None if there is none."""
        found = self.steps()
        return found[-1] if found else None

    def best_step(self, metric: str, mode: retention.BestMode = "min") -> int | None:
        """The step with the best value of a metric, None if no step has it."""
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {mode!r}")
        best = retention.best_of(infos_of(self._tiers.look()), (metric, mode, 1))
        return best[0].step if best else None

    def decision(self, *, now: float | None = None) -> Decision:
        """What `keep` would keep and delete now in the root, and why; nothing is deleted."""
        return self._rotation.decision(now=now)

    # --- restoring ------------------------------------------------------------------------------

    def restore(
        self,
        target: Any = None,
        *,
        step: int | Literal["latest"] = "latest",
        on_damage: OnDamage = "raise",
        mesh: jax.sharding.Mesh | None = None,
        reshard: bool = False,
        cast: bool = False,
        partial: bool = False,
        rename: Rules | None = None,
        stack: Rules | None = None,
        unstack: Rules | None = None,
    ) -> Any:
        """Load a step, by default the newest.

        Args:
            target: As `load` takes it.
            step: Which one.
            on_damage: `"previous"` marks a damaged step, leaves it in place, and loads its far
                copy, or the step before it.
            mesh, reshard, cast, partial, rename, stack, unstack: As `load` takes them.

        Raises:
            NotFoundError: There is no such step, or no step at all.
            NewerFormatError: A newer release wrote the step: it is not damaged, and not skipped.
            IntegrityError: The step, or with `on_damage="previous"` every step up to it, is
                damaged.
            OSError: The root cannot be read; or the mirror, and the root has no step to load. If
                it has one, that is loaded, and the mirror named in the log.
            MismatchError: The target does not fit.
        """
        if on_damage not in ("raise", "previous"):
            raise ValueError(f"on_damage must be 'raise' or 'previous', not {on_damage!r}")
        self._wait_for_save()
        timeout_s = self._load_options.timeout_s
        matter = f"the choice of a step ({step}, on_damage={on_damage!r}) in"
        wanted, unread = decided(
            matter, self._root, lambda: self._tiers.candidates(step), timeout_s=timeout_s
        )
        return load_first_whole(
            [(number, self._tiers.place((number, is_far))) for number, is_far in wanted],
            lambda location: load(
                str(location),
                target,
                mesh=mesh,
                reshard=reshard,
                cast=cast,
                partial=partial,
                rename=rename,
                stack=stack,
                unstack=unstack,
                options=self._load_options,
            ),
            where=f"{self._tiers}{'' if step == 'latest' else f' up to {step}'}",
            unread=unread,
            on_damage=on_damage,
            timeout_s=timeout_s,
        )

    # --- deleting -------------------------------------------------------------------------------

    def rollback(self, step: int) -> list[int]:
        """Delete every step above `step`, newest first, near and far, pinned or not, for good.

        Raises:
            NotFoundError: `step` is neither in the root nor in the mirror.
            CheckpointError: A later step is being read or is a link; it and those below it stay.
        """
        self._wait_for_save()
        self._wait_for_copy()
        return self._decided(
            f"what to delete after step {step}", lambda: self._tiers.roll_back(step)
        )

    # --- ending ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save and the copy under way, and let go of SIGTERM.

        Raises:
            Preempted: SIGTERM came since the last call of `save`; what it saved is durable, and
                copied, or what failed is reported at exit.
            Exception: What the save under way failed with, or the last copy.
        """
        try:
            self._wait_for_save()
            if not self._notice.is_open:
                self.wait()
            if self._notice.is_open:
                self._copy_last()
        finally:
            self._notice.release()
        if self._notice.is_open:
            raise self._preempted()

    def _preempted(self) -> Preempted:
        self._notice.is_open = False
        step = None if self._last is None else self._last[0]
        _LOG.warning("SIGTERM came: step %s of %s is the last", step, self._root)
        return Preempted(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        # An error that ends the loop tells more than that it was to end anyway, or than that a
        # copy failed. A copy under way is ended before the interpreter is.
        if kind is None:
            self.close()
            return
        try:
            self._wait_for_save()
        finally:
            self._notice.release()

    def __repr__(self) -> str:
        try:
            parts = [self._tiers.near.summary()]
        except OSError as error:
            return f"CheckpointManager({str(self._root)!r}, unreadable: {error})"
        if self._pending is not None:
            parts.append(repr(self._pending))
        parts.append(f"keep={self._keep}")
        parts += self._schedule.rules()
        parts += [] if self._tiers.far is None else [f"mirror={str(self._tiers.far)!r}"]
        return f"CheckpointManager({str(self._root)!r}, {', '.join(parts)})"
