"""A training loop's save, restore and rotation, on top of the functions."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Self

import jax

from pytree_ckpt.errors import (
    CheckpointError,
    Damage,
    ExistsError,
    FormatError,
    IntegrityError,
    NotFoundError,
)
from pytree_ckpt.format.steps import StepNames, checked_step
from pytree_ckpt.options import LoadOptions, SaveOptions
from pytree_ckpt.plan import retention
from pytree_ckpt.plan.retention import Decision, Keep, StepInfo
from pytree_ckpt.store import roots
from pytree_ckpt.store.locations import PathLike, locate
from pytree_ckpt.store.roots import StepState
from pytree_ckpt.verbs.load import load
from pytree_ckpt.verbs.pending import PendingSave
from pytree_ckpt.verbs.preemption import Preempted, Sigterm
from pytree_ckpt.verbs.save import start_save

_LOG = logging.getLogger("pytree_ckpt")


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
        on_sigterm: Take SIGTERM as a preemption: the next `save` saves whatever the step, waits,
            and raises `Preempted`. Only in the main thread.
        save_options, load_options: As `save` and `load` take them.

    With neither `save_every` nor `save_every_seconds` every call of `save` saves.

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
        on_sigterm: bool = False,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        for name, value in (("save_every", save_every), ("save_every_seconds", save_every_seconds)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, not {value!r}")
        self._root = locate(root).path
        self._keep = keep
        self._save_every = save_every
        self._save_every_seconds = save_every_seconds
        self._names = StepNames(prefix=prefix, width=width)
        self._background = background
        self._save_options = save_options
        self._load_options = load_options
        self._pending: PendingSave | None = None
        self._last_saved = time.monotonic()
        self._sigterm = Sigterm() if on_sigterm else None

    # --- saving ---------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether `save(step, ...)` would save now."""
        checked_step(step)
        if self._save_every is None and self._save_every_seconds is None:
            return True
        if self._is_preempted():
            return True
        if self._save_every is not None and step % self._save_every == 0:
            return True
        due = self._save_every_seconds
        return due is not None and time.monotonic() - self._last_saved >= due

    def _is_preempted(self) -> bool:
        return self._sigterm is not None and self._sigterm.received

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
        preempted = self._is_preempted()
        if preempted and self._pending is not None:
            self._pending.wait()
        elif skip_if_busy and self._pending is not None and not self._pending.done():
            return None
        else:
            self.wait()
        replaces = self._check_order(number, overwrite=overwrite)
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        self._pending = pending = start_save(
            self._root / self._names.name(number),
            tree,
            overwrite=replaces,
            metadata=metadata,
            metrics=numbers,
            options=self._save_options,
            before=lambda: self._make_room(number),
            after=lambda: self._rotate(number, numbers),
            started=started,
        )
        self._last_saved = time.monotonic()
        preempted = preempted or self._is_preempted()
        if preempted or not self._background:
            self.wait()
        if preempted:
            _LOG.warning("SIGTERM came: step %d of %s is the last", number, self._root)
            raise Preempted(number)
        return pending

    def _check_order(self, step: int, *, overwrite: bool) -> bool:
        """Whether the step replaces one that is there.

        Raises:
            ExistsError: It may not, or there is a later one.
        """
        steps = roots.committed_steps(self._root, self._names)
        in_the_way = [s for s in steps if s >= step and not self._is_marked(s)]
        if step in in_the_way and not overwrite:
            raise ExistsError(f"step {step} exists in {self._root}; overwrite=True replaces it")
        if in_the_way and step not in in_the_way:
            raise ExistsError(
                f"step {step} is below the latest step {in_the_way[-1]} of {self._root}; go on in "
                f"another root, or delete the later steps with rollback({step})"
            )
        return step in steps

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
        return [state.step for state in self._look() if state.is_good]

    def latest_step(self) -> int | None:
        """The newest of `steps()`, None if there is none."""
        found = self.steps()
        return found[-1] if found else None

    def best_step(self, metric: str, mode: retention.BestMode = "min") -> int | None:
        """The step with the best value of a metric, None if no step has it."""
        best = retention.best_of(_infos(self._look()), (metric, mode, 1))
        return best[0].step if best else None

    def decision(self, *, now: float | None = None) -> Decision:
        """What `keep` would keep and delete now, and why; nothing is deleted."""
        return self._decide(self._look(), now)

    def _look(self) -> list[StepState]:
        return roots.look(self._root, self._names)

    def _decide(self, states: list[StepState], now: float | None = None) -> Decision:
        infos = _infos(states)
        if self._keep is None:
            return Decision(kept={info.step: "all are kept" for info in infos}, dropped={})
        linked = {state.step: "reached through a link" for state in states if state.is_link}
        moment = time.time() if now is None else now
        return retention.decide(infos, self._keep, now=moment, protected=linked)

    # --- restoring ------------------------------------------------------------------------------

    def restore(
        self,
        target: Any = None,
        *,
        step: int | Literal["latest"] = "latest",
        on_damage: Literal["raise", "previous"] = "raise",
        mesh: jax.sharding.Mesh | None = None,
        reshard: bool = False,
        cast: bool = False,
        partial: bool = False,
    ) -> Any:
        """Load a step, by default the newest.

        Args:
            target: As `load` takes it.
            step: Which one.
            on_damage: `"previous"` marks a damaged step, leaves it in place, and loads the one
                before it.
            mesh, reshard, cast, partial: As `load` takes them.

        Raises:
            NotFoundError: There is no such step, or no step at all.
            IntegrityError: The step, or with `on_damage="previous"` every step up to it, is
                damaged.
            OSError: The root cannot be read.
            MismatchError: The target does not fit.
        """
        if on_damage not in ("raise", "previous"):
            raise ValueError(f"on_damage must be 'raise' or 'previous', not {on_damage!r}")
        self.wait()
        wanted = self._candidates(step)
        trouble: list[Damage] = []
        for number in wanted:
            path = self._root / self._names.name(number)
            try:
                return load(
                    path,
                    target,
                    mesh=mesh,
                    reshard=reshard,
                    cast=cast,
                    partial=partial,
                    options=self._load_options,
                )
            except (IntegrityError, FormatError) as error:
                if on_damage == "raise":
                    error.add_note(
                        f"step {number} is damaged; on_damage='previous' loads the one before it"
                    )
                    raise
                _LOG.error("step %d of %s is damaged and skipped: %s", number, self._root, error)
                roots.quarantine(path, str(error))
                text = f"step {number}: {error}"
                trouble.append(Damage(path=None, kind="unreadable", text=text, file=str(path)))
        until = "" if step == "latest" else f" up to {step}"
        raise IntegrityError(trouble, note=f"No step of {self._root}{until} is whole.")

    def _candidates(self, step: int | Literal["latest"]) -> list[int]:
        """Steps to try, in order; those marked as damaged only if asked for, or all are."""
        steps = roots.committed_steps(self._root, self._names)[::-1]
        whole = [s for s in steps if not self._is_marked(s)]
        if step != "latest":
            if checked_step(step) not in steps:
                raise NotFoundError(f"there is no step {step} in {self._root}; it has {steps}")
            return [step, *(s for s in whole if s < step)]
        if not steps:
            raise NotFoundError(f"there is no checkpoint in {self._root}")
        return whole or steps

    def _is_marked(self, step: int) -> bool:
        return roots.is_marked(self._root / self._names.name(step))

    # --- deleting -------------------------------------------------------------------------------

    def _make_room(self, step: int) -> None:
        """Ahead of writing `step`, delete what `keep` will not keep once it is there.

        One good checkpoint always stays, and so do the best: `step` may yet fail.
        """
        with self._not_at_the_cost_of(step):
            roots.reclaim(self._root, self._names)
            self._apply(step, {}, protect_last=True)

    def _rotate(self, step: int, metrics: Mapping[str, float]) -> None:
        """After the commit of `step`, delete what `keep` does not keep."""
        with self._not_at_the_cost_of(step):
            roots.unmark(self._root / self._names.name(step))
            self._apply(step, metrics, protect_last=False)

    def _apply(self, step: int, metrics: Mapping[str, float], *, protect_last: bool) -> None:
        if self._keep is None:
            return
        states = self._look()
        infos = [info for info in _infos(states) if info.step != step]
        protected = {state.step: "reached through a link" for state in states if state.is_link}
        protected[step] = "just saved"
        if protect_last and infos:
            protected[infos[-1].step] = "the last one is never deleted"
        infos.append(StepInfo(step=step, created=time.time(), metrics=metrics))
        decision = retention.decide(infos, self._keep, now=time.time(), protected=protected)
        if decision.dropped:
            roots.settle(self._root, self._names, [n for n in decision.kept if n != step])
        for number in decision.dropped:
            with self._not_at_the_cost_of(step):
                if not roots.delete(self._root / self._names.name(number)):
                    _LOG.warning("step %d of %s is in use and stays", number, self._root)

    @contextmanager
    def _not_at_the_cost_of(self, step: int) -> Iterator[None]:
        """Log what cannot be deleted: it must not cost the run the step that it saves."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            _LOG.warning("saving step %d, old steps could not be deleted: %s", step, error)

    def rollback(self, step: int) -> list[int]:
        """Delete every step above `step`, newest first; they are gone for good.

        Raises:
            NotFoundError: `step` is not in the root.
            CheckpointError: A later step is being read or is a link; it and those below it stay.
        """
        self.wait()
        steps = roots.committed_steps(self._root, self._names)
        if checked_step(step) not in steps:
            raise NotFoundError(f"there is no step {step} in {self._root}; it has {steps}")
        later = [s for s in reversed(steps) if s > step]
        roots.settle(self._root, self._names, [s for s in steps if s <= step])
        for number in later:
            path = self._root / self._names.name(number)
            if not roots.delete(path):
                raise CheckpointError(f"step {number} is in use or a link, delete it first: {path}")
        return later

    # --- ending ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save under way and let go of SIGTERM."""
        if self._sigterm is not None:
            self._sigterm.release()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            steps = str(self.steps())
        except OSError as error:
            steps = f"unreadable: {error}"
        return f"CheckpointManager({str(self._root)!r}, steps={steps}, keep={self._keep})"


def _infos(states: list[StepState]) -> list[StepInfo]:
    return [
        StepInfo(step=s.step, created=s.manifest.created, metrics=s.manifest.metrics)
        for s in states
        if s.is_good and s.manifest is not None
    ]
