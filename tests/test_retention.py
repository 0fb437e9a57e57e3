"""Which checkpoints are kept: a union of rules, with a reason for each, and never nothing."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytree_ckpt.plan.retention import Keep, StepInfo, best_of, decide

NOW = 1000.0
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 2.0, math.nan, math.inf, -math.inf]), st.floats(-3, 3)
)
METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy"]), VALUES)
COUNTS = st.none() | st.integers(1, 4)


@st.composite
def roots(draw: st.DrawFn) -> list[StepInfo]:
    """Checkpoints in any order, some from the future."""
    steps = draw(st.lists(st.integers(0, 24), unique=True, max_size=12))
    return [
        StepInfo(step=s, created=draw(st.floats(0, 1010)), metrics=draw(METRICS)) for s in steps
    ]


@st.composite
def policies(draw: st.DrawFn) -> Keep:
    best = st.tuples(
        st.sampled_from(["loss", "accuracy"]), st.sampled_from(["min", "max"]), st.integers(1, 3)
    )
    rules: dict[str, Any] = {
        "last": draw(COUNTS),
        "every": draw(COUNTS),
        "best": draw(st.none() | best),
        "pinned": draw(st.sets(st.integers(0, 24), max_size=3)),
        "newer_than": draw(st.none() | st.floats(0.5, 1200)),
    }
    if not any(rules.values()):
        rules["last"] = 1
    return Keep(**rules)


def should_stay(info: StepInfo, infos: list[StepInfo], keep: Keep) -> bool:
    """The rules once more, each as a question about one checkpoint."""
    newer = sum(other.step > info.step for other in infos)
    if newer == 0 or info.step in keep.pinned:
        return True
    if keep.last is not None and newer < keep.last:
        return True
    if keep.every is not None and info.step % keep.every == 0:
        return True
    if keep.newer_than is not None and NOW - info.created < keep.newer_than:
        return True
    return keep.best is not None and is_among_the_best(info, infos, keep.best)


def is_among_the_best(info: StepInfo, infos: list[StepInfo], best: tuple[str, str, int]) -> bool:
    name, mode, count = best
    mine = info.metrics.get(name, math.nan)
    if math.isnan(mine):
        return False
    better = 0
    for other in infos:
        theirs = other.metrics.get(name, math.nan)
        wins = theirs < mine if mode == "min" else theirs > mine
        better += wins or (theirs == mine and other.step > info.step)
    return better < count


@given(roots(), policies())
@settings(max_examples=400)
def test_a_checkpoint_stays_if_and_only_if_a_rule_says_so(
    infos: list[StepInfo], keep: Keep
) -> None:
    decision = decide(infos, keep, now=NOW)
    assert set(decision.kept) == {i.step for i in infos if should_stay(i, infos, keep)}
    assert set(decision.dropped) == {i.step for i in infos if not should_stay(i, infos, keep)}


@given(roots(), policies(), st.dictionaries(st.integers(0, 24), st.text(min_size=1), max_size=3))
def test_every_checkpoint_has_one_fate_and_one_reason(
    infos: list[StepInfo], keep: Keep, protected: dict[int, str]
) -> None:
    decision = decide(infos, keep, now=NOW, protected=protected)
    assert not set(decision.kept) & set(decision.dropped)
    assert sorted([*decision.kept, *decision.dropped]) == sorted(i.step for i in infos)
    assert all([*decision.kept.values(), *decision.dropped.values()])
    for info in infos:
        if info.step in protected:
            assert decision.kept[info.step] == protected[info.step]
    said = str(decision)
    for step, why in decision.kept.items():
        assert f"keep {step}: {why}" in said
    for step in decision.dropped:
        assert f"drop {step}: " in said


@given(roots(), policies())
def test_something_always_stays(infos: list[StepInfo], keep: Keep) -> None:
    decision = decide(infos, keep, now=NOW)
    if infos:
        assert max(i.step for i in infos) in decision.kept
    else:
        assert (decision.kept, decision.dropped) == ({}, {})


@given(roots(), policies(), st.randoms(use_true_random=False))
def test_the_order_of_the_checkpoints_does_not_matter(
    infos: list[StepInfo], keep: Keep, random: Any
) -> None:
    shuffled = random.sample(infos, len(infos))
    first, second = decide(infos, keep, now=NOW), decide(shuffled, keep, now=NOW)
    assert list(first.kept.items()) == list(second.kept.items())
    assert list(first.dropped.items()) == list(second.dropped.items())


@given(roots(), policies())
def test_what_stayed_once_stays_when_it_is_decided_again(infos: list[StepInfo], keep: Keep) -> None:
    kept = decide(infos, keep, now=NOW).kept
    assert not decide([i for i in infos if i.step in kept], keep, now=NOW).dropped


@given(roots(), policies(), policies())
def test_one_more_rule_never_drops_more(infos: list[StepInfo], keep: Keep, more: Keep) -> None:
    both = Keep(
        last=max(keep.last or 0, more.last or 0) or None,
        every=keep.every,
        best=keep.best or more.best,
        pinned=keep.pinned | more.pinned,
        newer_than=max(keep.newer_than or 0, more.newer_than or 0) or None,
    )
    assert set(decide(infos, keep, now=NOW).kept) <= set(decide(infos, both, now=NOW).kept)


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_a_run_never_holds_more_than_the_newest_so_many(last: int, gaps: list[int]) -> None:
    held: list[int] = []
    for step in itertools.accumulate(gaps):
        held = [*held, step]
        infos = [StepInfo(step=s, created=0.0, metrics={}) for s in held]
        held = [s for s in held if s in decide(infos, Keep(last=last), now=NOW).kept]
        assert len(held) <= last
        assert held[-1] == step


def infos_of(losses: dict[int, float]) -> list[StepInfo]:
    return [StepInfo(step=s, created=0.0, metrics={"loss": v}) for s, v in losses.items()]


def test_the_best_are_ranked_with_the_newer_of_equals_first_and_never_nan() -> None:
    infos = infos_of({1: 2.0, 2: math.nan, 3: 1.0, 4: 1.0, 5: math.inf, 6: -0.0, 7: 0.0})
    assert [i.step for i in best_of(infos, ("loss", "min", 9))] == [7, 6, 4, 3, 1, 5]
    assert [i.step for i in best_of(infos, ("loss", "max", 2))] == [5, 1]
    assert best_of(infos, ("accuracy", "min", 1)) == []


def test_the_rules_are_a_union_and_the_reason_names_one() -> None:
    infos = [
        StepInfo(step=step, created=float(step), metrics={"loss": abs(step - 30)})
        for step in range(10, 101, 10)
    ]
    keep = Keep(last=2, every=50, best=("loss", "min", 1), pinned={20}, newer_than=21)
    decision = decide(infos, keep, now=100.0, protected={60: "is being read"})
    assert decision.kept == {
        20: "pinned",
        30: "best 1 by loss",
        50: "every 50",
        60: "is being read",
        80: "newer than 21 s",
        90: "newest 2",
        100: "newest 2",
    }
    assert list(decision.dropped) == [10, 40, 70]


@pytest.mark.parametrize(
    "rules",
    [
        {"last": 0},
        {"last": -1},
        {"last": 2.5},
        {"last": True},
        {"last": math.inf},
        {"every": 0},
        {"every": -1000},
        {"every": 2.5},
        {"newer_than": 0},
        {"newer_than": -1.0},
        {"newer_than": math.nan},
        {"best": ("loss", "min", 0)},
        {"best": ("loss", "min", -1)},
        {"best": ("loss", "min", 1.5)},
        {"best": ("loss", "least", 1)},
        {"best": ("", "min", 1)},
        {"best": ("loss", 1)},
        {"best": "loss"},
        {"best": 1},
        {"pinned": {-1}},
        {"pinned": {"10"}},
        {"pinned": {1.5}},
        {"last": None},
        {"last": None, "pinned": ()},
    ],
    ids=str,
)
def test_a_policy_that_is_negative_empty_or_no_number_is_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Keep|step|newer_than"):
        Keep(**rules)


def test_a_policy_takes_the_integers_of_numpy_and_does_not_change_with_its_arguments() -> None:
    pinned = {np.int64(3)}
    keep = Keep(last=np.int32(1), every=np.int64(100), pinned=pinned)  # type: ignore[arg-type]
    pinned.add(np.int64(4))
    decision = decide(infos_of({3: 0.0, 4: 0.0, 100: 0.0, 101: 0.0}), keep, now=NOW)
    assert list(decision.kept) == [3, 100, 101]
    assert hash(keep) == hash(Keep(last=1, every=100, pinned=[3]))


def test_a_policy_says_its_rules_and_no_others() -> None:
    assert repr(Keep()) == "Keep(last=3)"
    assert repr(Keep(last=None, every=100)) == "Keep(last=None, every=100)"
    keep = Keep(best=("loss", "min", 2), pinned={7, 3}, newer_than=60.0)
    assert repr(keep) == ("Keep(last=3, best=('loss', 'min', 2), pinned=[3, 7], newer_than=60.0)")
    assert eval(repr(keep)) == keep
