"""Where the numbered checkpoints of a run are: which there are, which to load, which must go."""

from dataclasses import dataclass
from typing import Literal

from pytree_ckpt.errors import CheckpointError, ExistsError, NotFoundError
from pytree_ckpt.format.steps import StepNames, checked_step
from pytree_ckpt.store import health
from pytree_ckpt.store.health import StepState
from pytree_ckpt.store.locations import Location


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

    def is_marked(self, step: int) -> bool:
        """Whether a step is marked as damaged."""
        return health.is_marked(self.place(step))

    def replaces(self, step: int, *, overwrite: bool) -> bool:
        """Whether saving a step replaces one that is there.

        Raises:
            ExistsError: It may not, or there is a later one.
        """
        steps = self.steps()
        in_the_way = [s for s in steps if s >= step and not self.is_marked(s)]
        if step in in_the_way and not overwrite:
            raise ExistsError(f"step {step} exists in {self}; overwrite=True replaces it")
        if in_the_way and step not in in_the_way:
            raise ExistsError(
                f"step {step} is below the latest step {in_the_way[-1]} of {self}; go on in "
                f"another root, or delete the later steps with rollback({step})"
            )
        return step in steps

    def candidates(self, step: int | Literal["latest"]) -> list[int]:
        """Steps to try, in order; those marked as damaged only if asked for, or all are."""
        steps = self.steps()[::-1]
        whole = [s for s in steps if not self.is_marked(s)]
        if step != "latest":
            if checked_step(step) not in steps:
                raise NotFoundError(f"there is no step {step} in {self}; it has {steps}")
            return [step, *(s for s in whole if s < step)]
        if not steps:
            raise NotFoundError(f"there is no checkpoint in {self}")
        return whole or steps

    def roll_back(self, step: int) -> list[int]:
        """Delete every step above `step`, newest first.

        Raises:
            NotFoundError: `step` is not there.
            CheckpointError: A later step is being read or is a link; it and those below it stay.
        """
        steps = self.steps()
        if checked_step(step) not in steps:
            raise NotFoundError(f"there is no step {step} in {self}; it has {steps}")
        later = [s for s in reversed(steps) if s > step]
        self.root.settle(self.names, [s for s in steps if s <= step])
        for number in later:
            path = self.place(number)
            if not path.delete():
                raise CheckpointError(f"step {number} is in use or a link, delete it first: {path}")
        return later
