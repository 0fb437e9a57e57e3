"""Where the numbered checkpoints of a run are: which there are, which to load, which must go."""

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from pytree_ckpt.errors import CheckpointError, ExistsError, NotFoundError
from pytree_ckpt.format.steps import StepNames, checked_step
from pytree_ckpt.store import contents, health
from pytree_ckpt.store.health import StepState
from pytree_ckpt.store.locations import Location

_LOG = logging.getLogger("pytree_ckpt")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A root of numbered checkpoints."""

    root: Location
    names: StepNames

    def __str__(self) -> str:
        return str(self.root)

    def place(self, step: int) -> Location:
        """Where a step is, or will be."""
        return self.root / self.names.name(step)

    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        return self.root.committed_steps(self.names)

    def look(self) -> list[StepState]:
        """Every committed step, as a glance shows it."""
        return health.look(self.root, self.names)

    def newest_whole(self, *, below: int) -> str | None:
        """Where the newest step is whose manifest and tables are sound, for `base` of a save."""
        for step in reversed(self.steps()):
            place = self.place(step)
            if step >= below or health.is_marked(place):
                continue
            try:
                manifest = place.read_manifest()
                contents.read_tables(place / manifest.data_dir, manifest)
            except (CheckpointError, OSError):
                continue
            return str(place)
        return None

    def is_marked(self, step: int) -> bool:
        """Whether a step is marked as damaged."""
        return health.is_marked(self.place(step))

    def summary(self) -> str:
        """How many good steps there are, and which."""
        states = self.look()
        good = [str(state.step) for state in states if state.is_good]
        listed = good if len(good) <= 6 else [*good[:2], "…", *good[-3:]]
        text = f"{len(good)} step{'' if len(good) == 1 else 's'} [{', '.join(listed)}]"
        return text + (f", {len(states) - len(good)} not good" if len(good) < len(states) else "")

    def delete_after(self, step: int) -> list[int]:
        """Delete every later step, newest first, and return them.

        Raises:
            CheckpointError: One is being read or is a link; it and those below it stay.
        """
        steps = self.steps()
        later = [s for s in reversed(steps) if s > step]
        if later:
            self.root.settle(self.names, [s for s in steps if s <= step])
        for number in later:
            path = self.place(number)
            if not path.delete():
                raise CheckpointError(f"step {number} is in use or a link, delete it first: {path}")
        return later


def _real(root: Location) -> Location | str:
    """One value for each root, whatever links lead to it."""
    return root if root.path is None else os.path.realpath(root.path)


Copy = tuple[int, bool]
"""A step, and whether it is the one of the far root."""


class Tiers:
    """The near root that a run saves to, and the far one that has copies, if there is one.

    What the far one cannot tell is missing only where the near one has no answer.

    Raises:
        ValueError: They are one.
    """

    def __init__(self, near: Tier, far: Tier | None) -> None:
        if far is not None and _real(far.root) == _real(near.root):
            raise ValueError(f"{far} is the root itself: a mirror is another place")
        self.near = near
        self.far = far
        self._far_at_start: list[int] | None = None

    def __str__(self) -> str:
        return str(self.near) if self.far is None else f"{self.near} or {self.far}"

    def place(self, copy: Copy) -> Location:
        """Where a step, near or far, is."""
        return self._tier(copy).place(copy[0])

    def _tier(self, copy: Copy) -> Tier:
        return self.far if copy[1] and self.far is not None else self.near

    def look(self) -> list[StepState]:
        """Every step once, ascending: as it is in the near root, or if only that is good the far.

        Raises:
            OSError: The near root cannot be read; or the far one, and no step of the near is good.
        """
        found = {state.step: state for state in self.near.look()}
        has_good = any(state.is_good for state in found.values())
        for state in self._of_far(Tier.look, must=not has_good)[0]:
            near = found.get(state.step)
            if near is None or (state.is_good and not near.is_good):
                found[state.step] = state
        return [found[step] for step in sorted(found)]

    def candidates(self, step: int | Literal["latest"]) -> tuple[list[Copy], str | None]:
        """What to try, in order, and why there may be more that cannot be told.

        The newest first, and of a step the near one. Those marked as damaged only if asked for, or
        if all are.

        Raises:
            NotFoundError: There is no such step, or none at all.
            OSError: A root cannot be read; if that is the far one, the near one has none to try.
        """
        far, unread = self._of_far(Tier.steps)
        there = [(s, False) for s in self.near.steps()] + [(s, True) for s in far]
        there.sort(key=lambda copy: (-copy[0], copy[1]))
        whole = [copy for copy in there if not self._tier(copy).is_marked(copy[0])]
        if step == "latest":
            chosen = whole or ([] if unread else there)
            what = "no checkpoint"
        else:
            asked = [copy for copy in there if copy[0] == checked_step(step)]
            asked.sort(key=lambda copy: copy not in whole)
            chosen = asked and [*asked, *(copy for copy in whole if copy[0] < step)]
            what = f"no step {step}"
        if chosen:
            return chosen, unread
        if unread:
            raise OSError(errno.EIO, f"there is {what} to load in {self.near}, and {unread}")
        steps = sorted({s for s, _ in there})
        # Steps of another prefix or width are none, and look much like those that are sought.
        has = f"it has {steps}" if steps else f"steps are named as {self.near.names.name(1)}"
        raise NotFoundError(f"there is {what} in {self}; {has}")

    def _of_far(
        self, ask: Callable[[Tier], list[T]], *, must: bool = False
    ) -> tuple[list[T], str | None]:
        """What the far root answers; or, unless it must, nothing and why."""
        if self.far is None:
            return [], None
        try:
            return ask(self.far), None
        except OSError as error:
            unread = f"{self.far} cannot be read: {error}"
            if must:
                text = f"there is no good step in {self.near}, and {unread}"
                raise OSError(error.errno or errno.EIO, text) from error
            _LOG.warning("only the steps of %s count, %s", self.near, unread)
            return [], unread

    def replaces(self, step: int, *, overwrite: bool) -> bool:
        """Whether saving a step replaces one that is in the near root.

        The far root is asked once: later it has nothing newer than the near one.

        Raises:
            ExistsError: It may not, or there is a later one.
        """
        if self._far_at_start is None:
            self._far_at_start, _ = self._of_far(Tier.steps)
        near = self.near.steps()
        there = [(s, False) for s in near] + [(s, True) for s in self._far_at_start if s >= step]
        in_the_way = sorted(c for c in there if c[0] >= step and not self._tier(c).is_marked(c[0]))
        same = [copy for copy in in_the_way if copy[0] == step]
        if same and not overwrite:
            where = self._tier(same[0])
            raise ExistsError(f"step {step} exists in {where}; overwrite=True replaces it")
        if in_the_way and not same:
            latest = in_the_way[-1]
            raise ExistsError(
                f"step {step} is below the latest step {latest[0]} of {self._tier(latest)}; go on "
                f"in another root, or delete the later steps with rollback({step})"
            )
        return step in near

    def roll_back(self, step: int) -> list[int]:
        """Delete every step above `step`, newest first, far ones before near ones.

        Raises:
            NotFoundError: `step` is not there.
            CheckpointError: A later step is being read or is a link; it and those below it stay.
            OSError: A root cannot be read, or a step not be deleted.
        """
        tiers = [self.near] if self.far is None else [self.far, self.near]
        steps = {s for tier in tiers for s in tier.steps()}
        if checked_step(step) not in steps:
            raise NotFoundError(f"there is no step {step} in {self}; it has {sorted(steps)}")
        self._far_at_start = None
        return sorted({s for tier in tiers for s in tier.delete_after(step)}, reverse=True)
