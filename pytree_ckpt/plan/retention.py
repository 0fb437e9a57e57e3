"""Which checkpoints of a root are kept, and why: a pure decision."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pytree_ckpt.format import values
from pytree_ckpt.format.steps import checked_step
from pytree_ckpt.options import check_seconds

BestMode = Literal["min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A policy. A checkpoint is kept if any part of it says so.

    Attributes:
        last: The newest so many.
        every: Each step that is a multiple of this.
        best: `(metric, "min" or "max", count)`: the best so many by a metric of `save`.
        pinned: These steps. They are marked on the disk, and stay under any policy until
            `pytree-ckpt unpin`.
        newer_than: Those that are younger than so many seconds.

    Raises:
        ValueError: A part that is not positive, or not of its kind, or no part at all.

    Example:
        >>> Keep(last=2, every=1000).every
        1000
    """

    last: int | None = 3
    every: int | None = None
    best: tuple[str, BestMode, int] | None = None
    pinned: Collection[int] = field(default_factory=frozenset)
    newer_than: float | None = None

    def __post_init__(self) -> None:
        for rule in ("last", "every"):
            value = getattr(self, rule)
            if value is not None and not _is_count(value):
                raise ValueError(f"Keep({rule}={value!r}): must be positive, or None for no rule")
        if self.newer_than is not None:
            check_seconds("newer_than", self.newer_than)
        if self.best is not None:
            match self.best:
                case (str(name), "min" | "max", count) if name and _is_count(count):
                    pass
                case _:
                    raise ValueError(
                        f"Keep(best={self.best!r}): must be like ('loss', 'min', 3), "
                        "a metric, 'min' or 'max', and a count"
                    )
        if not isinstance(self.pinned, Collection):
            raise ValueError(f"Keep(pinned={self.pinned!r}): must be a list of steps")
        object.__setattr__(self, "pinned", frozenset(map(checked_step, self.pinned)))
        if not any((self.last, self.every, self.best, self.pinned, self.newer_than)):
            raise ValueError(
                "Keep without any rule would delete everything: give last, every, best, pinned or "
                "newer_than"
            )

    def __repr__(self) -> str:
        rules = {
            "last": self.last,
            "every": self.every,
            "best": self.best,
            "pinned": sorted(self.pinned),
            "newer_than": self.newer_than,
        }
        given = [f"{name}={rule!r}" for name, rule in rules.items() if rule or name == "last"]
        return f"Keep({', '.join(given)})"


def _is_count(value: Any) -> bool:
    try:
        return checked_step(value) > 0
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What the decision needs to know of a checkpoint; `created` in seconds since 1970."""

    step: int
    created: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """For each step why it is kept, or why it goes.

    What is damaged, or cannot be read, is `left`: no rule counts it, and nothing deletes it.
    """

    kept: Mapping[int, str]
    dropped: Mapping[int, str]
    left: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        groups = (("keep", self.kept), ("drop", self.dropped), ("leave", self.left))
        return "\n".join(
            f"{verb} {step}: {why}" for verb, steps in groups for step, why in steps.items()
        )


def decide(
    infos: Sequence[StepInfo],
    keep: Keep,
    *,
    now: float,
    protected: Mapping[int, str] | None = None,
) -> Decision:
    """Decide over the good checkpoints of a root. The newest is always kept.

    Args:
        infos: Every checkpoint that is whole.
        keep: The policy.
        now: Seconds since 1970.
        protected: Steps that stay whatever the policy says, each with the reason.

    Example:
        >>> infos = [StepInfo(step=s, created=0.0, metrics={}) for s in (1, 2, 3)]
        >>> print(decide(infos, Keep(last=1), now=0.0, protected={1: "being read"}))
        keep 1: being read
        keep 3: newest 1
        drop 2: no rule keeps it
    """
    ordered = sorted(infos, key=lambda info: info.step)
    reasons = {**dict.fromkeys(keep.pinned, "pinned"), **(protected or {})}
    if keep.last is not None:
        for info in ordered[-keep.last :]:
            reasons.setdefault(info.step, f"newest {keep.last}")
    for info in ordered[-1:]:
        reasons.setdefault(info.step, "the last one is never deleted")
    for info in ordered:
        if keep.every is not None and info.step % keep.every == 0:
            reasons.setdefault(info.step, f"every {keep.every}")
        if keep.newer_than is not None and now - info.created < keep.newer_than:
            reasons.setdefault(info.step, f"newer than {keep.newer_than:g} s")
    if keep.best is not None:
        for info in best_of(ordered, keep.best):
            reasons.setdefault(info.step, f"best {keep.best[2]} by {keep.best[0]}")
    return Decision(
        kept={info.step: reasons[info.step] for info in ordered if info.step in reasons},
        dropped={info.step: "no rule keeps it" for info in ordered if info.step not in reasons},
    )


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics of a save as floats.

    Raises:
        TypeError, ValueError: A name that is no text, or what is no number.
    """
    if not isinstance(metrics, Mapping | None):
        raise TypeError(f"metrics must be a dict of numbers, not {metrics!r}")
    numbers = {}
    for name, value in (metrics or {}).items():
        try:
            numbers[name] = float(value)
        except Exception as error:  # noqa: BLE001 - what a tracer or a deleted array raises too
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"metrics[{name!r}] is no number: {error}") from None
    values.check_metadata(numbers, "metrics")
    return numbers


def best_of(infos: Sequence[StepInfo], best: tuple[str, BestMode, int]) -> list[StepInfo]:
    """The best checkpoints by a metric, best first; those without it, or with NaN, never count.

    Of equals the newer is better.
    """
    name, mode, count = best
    sign = 1 if mode == "min" else -1
    ranked = [i for i in infos if name in i.metrics and not math.isnan(i.metrics[name])]
    ranked.sort(key=lambda info: (sign * info.metrics[name], -info.step))
    return ranked[:count]
