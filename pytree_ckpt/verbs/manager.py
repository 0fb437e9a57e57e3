"""A training loop's save, restore and rotation, on top of the functions."""

import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import jax

from pytree_ckpt.format.steps import StepNames, checked_step
from pytree_ckpt.jaxio.coordination import decided
from pytree_ckpt.options import LoadOptions, SaveOptions
from pytree_ckpt.plan import retention
from pytree_ckpt.plan.restructure import Rules
from pytree_ckpt.plan.retention import Decision, Keep
from pytree_ckpt.store import health
from pytree_ckpt.store.locations import PathLike, locate
from pytree_ckpt.verbs.load import load
from pytree_ckpt.verbs.pending import PendingSave
from pytree_ckpt.verbs.preemption import Preempted, listen
from pytree_ckpt.verbs.restoring import OnDamage, load_first_whole
from pytree_ckpt.verbs.rotation import Rotation, infos_of
from pytree_ckpt.verbs.save import start_save
from pytree_ckpt.verbs.tiers import Tier

_LOG = logging.getLogger("pytree_ckpt")
T = TypeVar("T")


class CheckpointManager:
    """Numbered checkpoints of one run in one root.

    `save` decides by itself whether it is time; it returns as soon as the state may be donated,
    and the checkpoint is written in the background. Old checkpoints are deleted by `keep`; with
    more than one to keep that is before a new one is written, so that the disk holds no more than
    that. The last good one is never deleted.

    Args:
        root: Folder of the run, made when the first step is saved.
        keep: Which checkpoints stay. None keeps all.
        save_every: Save steps that are a multiple of this.
        save_every_seconds: Save when so many seconds have passed since the last save.
        prefix, width: How steps are named; `step_00001000` by default.
        background: Write in the background. False makes `save` return when it is durable.
        link_unchanged: Link what a step would only repeat of the one before: `base` of `save`.
        on_sigterm: Take SIGTERM as a preemption: the next `save` saves whatever the step, waits,
            and raises `Preempted`; if there is none, `close` does once the last save is durable.
            Only in the main thread. Where `jax.distributed` is initialized before, JAX's
            preemption sync point decides: all processes stop at the same call.
        save_options, load_options: As `save` and `load` take them.

    With neither `save_every` nor `save_every_seconds` every call of `save` saves.

    With several processes each has a manager and makes the same calls. Process 0 decides what
    depends on time or on what is in the root, and it alone deletes.

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
        prefix: str = "step_",
        width: int = 8,
        background: bool = True,
        link_unchanged: bool = False,
        on_sigterm: bool = False,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        for name, value in (("save_every", save_every), ("save_every_seconds", save_every_seconds)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, not {value!r}")
        self._root = locate(root)
        self._keep = keep
        self._near = Tier(root=self._root, names=StepNames(prefix=prefix, width=width))
        self._rotation = Rotation(self._root, self._near.names, keep)
        self._save_every = save_every
        self._save_every_seconds = save_every_seconds
        self._background = background
        self._link_unchanged = link_unchanged
        self._save_options = save_options
        self._load_options = load_options
        self._pending: PendingSave | None = None
        self._last_saved = time.monotonic()
        self._last_step: int | None = None
        self._notice = listen() if on_sigterm else None

    # --- saving ---------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether `save(step, ...)` would save now."""
        checked_step(step)
        if self._save_every is None and self._save_every_seconds is None:
            return True
        if self._must_stop():
            return True
        if self._save_every is not None and step % self._save_every == 0:
            return True
        due = self._save_every_seconds
        return due is not None and self._decided(
            "whether it is time", lambda: time.monotonic() - self._last_saved >= due
        )

    def _decided(self, what: str, decide: Callable[[], T]) -> T:
        """What process 0 decides, which all must do alike."""
        timeout_s = (self._save_options or SaveOptions()).timeout_s
        return decided(f"the decision {what} in {self._root}", decide, timeout_s=timeout_s)

    def _must_stop(self) -> bool:
        return self._notice is not None and self._notice.came()

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
        SIGTERM it is reported at exit instead, and this step still saved.

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
        number = checked_step(step)
        if not force and not self.should_save(number):
            return None
        preempted = self._must_stop()
        if preempted and self._pending is not None:
            self._pending.wait()
        elif skip_if_busy and self._decided("whether to skip a step", self._is_busy):
            return None
        else:
            self.wait()
        replaces = self._decided(
            "whether to replace a step", lambda: self._near.replaces(number, overwrite=overwrite)
        )
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        self._pending = pending = start_save(
            str(self._near.place(number)),
            tree,
            overwrite=replaces,
            base=self._base(number),
            metadata=metadata,
            metrics=numbers,
            options=self._save_options,
            before=lambda: self._rotation.make_room(number),
            after=lambda: self._rotation.rotate(number, numbers),
            started=started,
        )
        self._last_saved, self._last_step = time.monotonic(), number
        preempted = preempted or self._must_stop()
        if preempted or not self._background:
            self.wait()
        if preempted:
            raise self._preempted()
        return pending

    def _is_busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def _base(self, step: int) -> str | None:
        if not self._link_unchanged:
            return None
        found = health.latest_whole(self._root, self._near.names, below=step)
        return None if found is None else str(found)

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            Exception: What it failed with.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    # --- looking --------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Committed steps that are not known to be damaged, ascending."""
        return [state.step for state in self._near.look() if not state.is_damaged]

    def latest_step(self) -> int | None:
        """The newest of `steps()`, None if there is none."""
        found = self.steps()
        return found[-1] if found else None

    def best_step(self, metric: str, mode: retention.BestMode = "min") -> int | None:
        """The step with the best value of a metric, None if no step has it."""
        best = retention.best_of(infos_of(self._near.look()), (metric, mode, 1))
        return best[0].step if best else None

    def decision(self, *, now: float | None = None) -> Decision:
        """What `keep` would keep and delete now, and why; nothing is deleted."""
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
            on_damage: `"previous"` marks a damaged step, leaves it in place, and loads the one
                before it.
            mesh, reshard, cast, partial, rename, stack, unstack: As `load` takes them.

        Raises:
            NotFoundError: There is no such step, or no step at all.
            NewerFormatError: A newer release wrote the step: it is not damaged, and not skipped.
            IntegrityError: The step, or with `on_damage="previous"` every step up to it, is
                damaged.
            OSError: The root cannot be read.
            MismatchError: The target does not fit.
        """
        if on_damage not in ("raise", "previous"):
            raise ValueError(f"on_damage must be 'raise' or 'previous', not {on_damage!r}")
        self.wait()
        timeout_s = (self._load_options or LoadOptions()).timeout_s
        what = f"the choice of a step in {self._root}"
        wanted = decided(what, lambda: self._near.candidates(step), timeout_s=timeout_s)
        return load_first_whole(
            [(number, self._near.place(number)) for number in wanted],
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
            where=f"{self._root}{'' if step == 'latest' else f' up to {step}'}",
            on_damage=on_damage,
            timeout_s=timeout_s,
        )

    # --- deleting -------------------------------------------------------------------------------

    def rollback(self, step: int) -> list[int]:
        """Delete every step above `step`, newest first, pinned or not; they are gone for good.

        Raises:
            NotFoundError: `step` is not in the root.
            CheckpointError: A later step is being read or is a link; it and those below it stay.
        """
        self.wait()
        return self._decided("what to delete", lambda: self._near.roll_back(step))

    # --- ending ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save under way and let go of SIGTERM.

        Raises:
            Preempted: SIGTERM came since the last call of `save`; what it saved is durable.
            Exception: What the save under way failed with.
        """
        self._end()
        if self._notice is not None and self._notice.is_open:
            raise self._preempted()

    def _end(self) -> None:
        try:
            self.wait()
        finally:
            if self._notice is not None:
                self._notice.release()

    def _preempted(self) -> Preempted:
        if self._notice is not None:
            self._notice.is_open = False
        _LOG.warning("SIGTERM came: step %s of %s is the last", self._last_step, self._root)
        return Preempted(self._last_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        # An error that ends the loop tells more than that it was to end anyway.
        if kind is None:
            self.close()
        else:
            self._end()

    def __repr__(self) -> str:
        try:
            states = self._near.look()
        except OSError as error:
            return f"CheckpointManager({str(self._root)!r}, unreadable: {error})"
        good = [str(state.step) for state in states if state.is_good]
        listed = good if len(good) <= 6 else [*good[:2], "…", *good[-3:]]
        parts = [f"{len(good)} step{'' if len(good) == 1 else 's'} [{', '.join(listed)}]"]
        if len(good) < len(states):
            parts.append(f"{len(states) - len(good)} not good")
        if self._pending is not None:
            parts.append(repr(self._pending))
        parts.append(f"keep={self._keep}")
        for name in ("save_every", "save_every_seconds"):
            value = getattr(self, f"_{name}")
            parts += [] if value is None else [f"{name}={value}"]
        return f"CheckpointManager({str(self._root)!r}, {', '.join(parts)})"
