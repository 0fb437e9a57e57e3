"""What the measurements must show, row by row; a row that falls short is kept and says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from results import Results, Verb

SHA, XXH = "ours-sha256", "ours-xxh3"
LIMIT_OF = {SHA: "limit-sha256", XXH: "limit-xxh3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure and its bound; `figure` is None where it was not measured."""

    row: str
    what: str
    sign: Literal["≥", "≤"]
    bound: float
    figure: float | None
    unit: str = ""
    beside: str = ""
    """More figures, for comparison."""

    @property
    def verdict(self) -> str:
        if self.figure is None:
            return "not measured"
        good = self.figure >= self.bound if self.sign == "≥" else self.figure <= self.bound
        return "PASS" if good else "short"


def judge(results: Results, place: str) -> list[Target]:
    """Every row, for one place."""
    return [
        *_equal_leaves(results, place),
        *_gpt2(results, place),
        *_small_leaves(results, place),
        *_peak(results, place),
        *_reads(results, place),
        *_background(results, place),
        *_planning(results),
        *_manifest_only(results),
    ]


def _ratio(
    results: Results, place: str, workload: str, system: str, verb: Verb, peer: str, bound: float
) -> Target:
    is_limit = peer in LIMIT_OF.values()
    digest = system.removeprefix("ours-")
    return Target(
        row=f"({workload[0]}) {verb}",
        what=f"{digest}: share of {peer}" if is_limit else f"{digest}: times faster than {peer}",
        sign="≥",
        bound=bound,
        figure=results.speed(place, workload, system, verb, beside=peer),
        unit="" if is_limit else "×",
        beside=_fairer(results, place, workload, system, verb, peer),
    )


def _fairer(results: Results, place: str, workload: str, system: str, verb: Verb, peer: str) -> str:
    """The same ratio beside the peer's fairer setting."""
    raw = results.speed(place, workload, system, verb, beside=f"{peer}-raw")
    return "" if raw is None else f"{raw:.2f}× without its compression"


def _equal_leaves(results: Results, place: str) -> Iterator[Target]:
    rows: tuple[tuple[Verb, str, float, float], ...] = (
        ("save", SHA, 0.9, 2.2),
        ("save", XXH, 0.85, 3.8),
        ("load", SHA, 0.95, 1.6),
        ("load", XXH, 0.0, 3.3),
    )
    for verb, system, share, times in rows:
        if share:
            yield _ratio(results, place, "a", system, verb, LIMIT_OF[system], share)
        yield _ratio(results, place, "a", system, verb, "orbax-v0", times)


def _gpt2(results: Results, place: str) -> Iterator[Target]:
    rows: tuple[tuple[Verb, str, str, float], ...] = (
        ("save", SHA, "orbax-v0", 5.0),
        ("save", SHA, "orbax-v1", 6.0),
        ("save", SHA, "limit-sha256", 0.85),
        ("load", SHA, "orbax-v0", 3.5),
        ("load", SHA, "orbax-v1", 4.0),
        ("load", SHA, "limit-sha256", 0.85),
        ("save", SHA, "jax", 2.2),
        ("load", SHA, "jax", 2.5),
        ("save", SHA, "safetensors", 1.0),
        ("load", SHA, "safetensors", 1.0),
        ("save", XXH, "safetensors", 1.8),
        ("load", XXH, "safetensors", 1.8),
    )
    for verb, system, peer, bound in rows:
        yield _ratio(results, place, "b", system, verb, peer, bound)


def _small_leaves(results: Results, place: str) -> Iterator[Target]:
    yield Target(
        row="(c) save",
        what="sha256: 1,000 leaves",
        sign="≤",
        bound=0.3,
        figure=results.median(place, "c1k", SHA, "save"),
        unit=" s",
    )
    verbs: tuple[Verb, ...] = ("save", "load")
    for verb in verbs:
        for peer in ("orbax-v0", "orbax-v1"):
            yield _ratio(results, place, "c1k", SHA, verb, peer, 20.0)
    for verb in verbs:
        many = results.median(place, "c10k", SHA, verb)
        few = results.median(place, "c1k", SHA, verb)
        yield Target(
            row=f"(c) {verb}",
            what="sha256: time of 10,000 leaves over time of 1,000",
            sign="≤",
            bound=12.0,
            figure=many / few if many and few else None,
            unit="×",
            beside="" if many is None else f"10,000 in {many:.2f} s",
        )


def _peak(results: Results, place: str) -> Iterator[Target]:
    rows: tuple[tuple[Verb, float, str], ...] = (
        ("save", 0.15, "peak extra memory over the state"),
        ("load", 1.15, "peak extra memory over the state, which is 1 of it"),
    )
    for verb, bound, what in rows:
        yield Target(
            row=f"(b) {verb}",
            what=what,
            sign="≤",
            bound=bound,
            figure=_peak_share(results, place, SHA, verb),
            beside=", ".join(
                f"{peer} {share:.2f}"
                for peer in ("orbax-v0", "orbax-v0-raw", "orbax-v1", "jax", "safetensors")
                if (share := _peak_share(results, place, peer, verb)) is not None
            ),
        )


def _peak_share(results: Results, place: str, system: str, verb: Verb) -> float | None:
    peak = results.median(place, "b", system, verb, "peak_nbytes")
    return None if peak is None else peak / results.states["b"]["nbytes"]


def _reads(results: Results, place: str) -> Iterator[Target]:
    """Without compression, bytes over bytes needed is 1 if and only if each chunk is read once."""
    for workload in ("d-2x4", "d-8to6", "d-cols"):
        read = results.median(place, workload, SHA, "load", "own_read_nbytes")
        by_device = results.median(place, workload, SHA, "load", "amplification")
        yield Target(
            row=f"({workload}) load",
            what="bytes read over bytes needed",
            sign="≤",
            bound=1.1,
            figure=read / results.states[workload]["nbytes"] if read else None,
            unit="×",
            beside="" if by_device is None else f"{by_device:.2f}× with a process for each device",
        )


def _background(results: Results, place: str) -> Iterator[Target]:
    def median(system: str, figure: str) -> float | None:
        return results.median(place, "async", system, "background", figure)

    blocked = median(SHA, "blocked_s")
    peers = {peer: median(peer, "blocked_s") for peer in ("orbax-v0", "orbax-v1")}
    known = {peer: seconds for peer, seconds in peers.items() if seconds}
    slower = [
        f"{name} {beside / step:.2f}×"
        for name in (SHA, *peers)
        if (beside := median(name, "beside_s")) and (step := median(name, "step_s"))
    ]
    yield Target(
        row="(async)",
        what="sha256: a save in the background blocks the loop",
        sign="≤",
        bound=0.02,
        figure=blocked,
        unit=" s",
        beside=", ".join(f"{peer} {seconds:.3f} s" for peer, seconds in known.items()),
    )
    yield Target(
        row="(async)",
        what="sha256: blocked, over orbax's least",
        sign="≤",
        bound=1.0,
        figure=blocked / min(known.values()) if blocked and known else None,
        unit="×",
        beside="steps beside a save: " + ", ".join(slower),
    )


def _planning(results: Results) -> Iterator[Target]:
    seconds = {int(leaves): taken for leaves, taken in results.planning.items()}
    most = max(seconds, default=None)
    if most is None:
        yield Target(row="planning", what="seconds", sign="≤", bound=3.0, figure=None)
        return
    least = min(seconds)
    yield Target(
        row="planning",
        what=f"{most:,} leaves × 8 devices, a save and a load",
        sign="≤",
        bound=3.0,
        figure=seconds[most],
        unit=" s",
    )
    yield Target(
        row="planning",
        what=f"linear: time per leaf at {most:,} over {least:,} leaves",
        sign="≤",
        bound=1.25,
        figure=seconds[most] / most / (seconds[least] / least),
        unit="×",
    )


def _manifest_only(results: Results) -> Iterator[Target]:
    found = results.manifest_only
    imported = found.get("imported", [])
    yield Target(
        row="manifest",
        what="import and read_manifest, the whole process",
        sign="≤",
        bound=0.25,
        figure=found.get("seconds"),
        unit=" s",
        beside=f"an empty process {found['empty_s']:.3f} s" if found else "",
    )
    yield Target(
        row="manifest",
        what="JAX and TensorStore modules that it imports",
        sign="≤",
        bound=0,
        figure=len(imported) if found else None,
        beside=", ".join(imported),
    )
