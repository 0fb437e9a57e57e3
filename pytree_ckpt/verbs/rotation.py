"""The policy of a root, carried out: old steps go, the last good one never does."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.plan import retention
from pytree_ckpt.plan.retention import Decision, Keep, StepInfo
from pytree_ckpt.store import health
from pytree_ckpt.store.health import StepState
from pytree_ckpt.verbs.tiers import Tier

_LOG = logging.getLogger("pytree_ckpt")


class Rotation:
    """Which steps of a root stay; None for `keep` keeps all.

    What cannot be deleted is logged: it must not cost the run the step that it saves.
    `let_go` is told of each step before it is deleted on behalf of a save.
    """

    def __init__(
        self,
        tier: Tier,
        keep: Keep | None,
        *,
        let_go: Callable[[int], None] = lambda step: None,
    ) -> None:
        if not isinstance(keep, Keep | None):
            raise TypeError(f"keep must be Keep(...), such as Keep(last=3), not {keep!r}")
        self._let_go = let_go
        self._tier = tier
        self._keep = keep

    def decision(self, *, now: float | None = None) -> Decision:
        """What would be kept and deleted now, and why; nothing is deleted."""
        states = self._tier.look()
        moment = time.time() if now is None else now
        decision = self._decide(infos_of(states), self._protected(states), moment)
        left = {s.step: s.trouble for s in states if s.trouble is not None}
        return dataclasses.replace(decision, left=left)

    def carry_out(self, decision: Decision) -> list[int]:
        """Delete what a decision drops; those that are in use stay, and are returned.

        Raises:
            OSError: The storage refused.
        """
        self._tier.root.reclaim(self._tier.names)
        if decision.dropped:
            self._tier.root.settle(self._tier.names, decision.kept)
        return [number for number in decision.dropped if not self._delete(number)]

    def make_room(self, step: int) -> None:
        """Ahead of writing `step`, delete what will not be kept once it is there.

        One good checkpoint always stays, and so do the best: `step` may yet fail.
        """
        with self._not_at_the_cost_of(step):
            self._tier.root.reclaim(self._tier.names)
            self._apply(step, {}, protect_last=True)

    def rotate(self, step: int, metrics: Mapping[str, float]) -> None:
        """After the commit of `step`, delete what is not kept."""
        with self._not_at_the_cost_of(step):
            health.unmark(self._tier.place(step))
            self._apply(step, metrics, protect_last=False)

    def _apply(self, step: int, metrics: Mapping[str, float], *, protect_last: bool) -> None:
        if self._keep is None:
            return
        states = self._tier.look()
        self._pin(states)
        infos = [info for info in infos_of(states) if info.step != step]
        protected = self._protected(states) | {step: "just saved"}
        if protect_last and infos:
            protected[infos[-1].step] = "the last one is never deleted"
        now = time.time()
        infos.append(StepInfo(step=step, created=now, metrics=metrics))
        decision = self._decide(infos, protected, now)
        if decision.dropped:
            self._tier.root.settle(self._tier.names, [n for n in decision.kept if n != step])
        for number in decision.dropped:
            with self._not_at_the_cost_of(step):
                self._let_go(number)
                if not self._delete(number):
                    _LOG.warning("step %d of %s is in use and stays", number, self._tier)

    def _delete(self, number: int) -> bool:
        """Delete a step; False if it is being read, or was pinned since it was decided on."""
        place = self._tier.place(number)
        return not health.is_pinned(place) and place.delete()

    def _protected(self, states: list[StepState]) -> dict[int, str]:
        """Steps that no rule deletes: pinned ones, links, and what these lead to."""
        found = {state.step: "pinned" for state in states if state.is_pinned}
        for step in (state.step for state in states if state.is_link):
            found[step] = "reached through a link"
            path = self._tier.place(step).path
            if path is None:
                continue
            leads_to = path.resolve()
            target = self._tier.names.step(leads_to.name)
            if target is not None and leads_to.parent.samefile(path.parent):
                found[target] = f"step {step} is a link to it"
        return found

    def _pin(self, states: list[StepState]) -> None:
        """Mark what the policy pins, so that other policies, and people, know."""
        pinned = () if self._keep is None else self._keep.pinned
        for state in states:
            if state.step in pinned and not (state.is_pinned or state.is_link):
                health.pin(self._tier.place(state.step))

    def _decide(self, infos: list[StepInfo], protected: Mapping[int, str], now: float) -> Decision:
        if self._keep is None:
            return Decision(kept={info.step: "all are kept" for info in infos}, dropped={})
        return retention.decide(infos, self._keep, now=now, protected=protected)

    @contextmanager
    def _not_at_the_cost_of(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError) as error:
            _LOG.warning("saving step %d, old steps could not be deleted: %s", step, error)


def infos_of(states: list[StepState]) -> list[StepInfo]:
    """What the policy needs to know of the good steps."""
    return [
        StepInfo(step=s.step, created=s.manifest.created, metrics=s.manifest.metrics)
        for s in states
        if s.is_good and s.manifest is not None
    ]
