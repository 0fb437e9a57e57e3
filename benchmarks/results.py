"""What was measured: every single measurement, and medians of them."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verb = Literal["save", "load", "background"]
VERBS: tuple[Verb, ...] = ("save", "load")
"""What has seconds to compare; a save in the background is more than that."""


@dataclass(slots=True, kw_only=True)
class Results:
    """All measurements of a run, as they are in its JSON.

    Attributes:
        machine, versions, settings: What was measured, and on what.
        scale: Below 1 the states were smaller than their titles say, and no target is judged.
        places: File system of each place that was written to.
        states: Title and bytes of each workload.
        measurements: One mapping for each process: place, workload, system, round, verb, and its
            figures, or `error`.
        skipped: What was not measured, and why.
        planning: Seconds of the pure plans by number of leaves.
        manifest_only: Seconds of a process that reads a manifest, and what it imports.
    """

    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, str]
    scale: float
    started: str
    places: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    planning: dict[str, float] = field(default_factory=dict)
    manifest_only: dict[str, Any] = field(default_factory=dict)

    def figures(
        self, place: str, workload: str, system: str, verb: Verb, name: str = "seconds"
    ) -> list[float]:
        """One figure of all rounds."""
        wanted = (place, workload, system, verb)
        return [
            m[name]
            for m in self.measurements
            if (m["place"], m["workload"], m["system"], m["verb"]) == wanted
            and m.get(name) is not None
        ]

    def median(
        self, place: str, workload: str, system: str, verb: Verb, name: str = "seconds"
    ) -> float | None:
        """Median of one figure, None if it was not measured."""
        found = self.figures(place, workload, system, verb, name)
        return statistics.median(found) if found else None

    def speed(
        self, place: str, workload: str, system: str, verb: Verb, *, beside: str
    ) -> float | None:
        """How many times faster than another system: the ratio of the medians."""
        own = self.median(place, workload, system, verb)
        other = self.median(place, workload, beside, verb)
        return other / own if own and other else None

    def systems(self, place: str, workload: str) -> set[str]:
        """All that were measured there, also those that failed."""
        return {
            m["system"]
            for m in self.measurements
            if (m["place"], m["workload"]) == (place, workload)
        }

    def errors(self) -> list[str]:
        """A line for each process that failed."""
        return [
            f"{m['place']} {m['workload']} {m['system']} {m['verb']}: {m['error']}"
            for m in self.measurements
            if "error" in m
        ]

    def forget(self, place: str, workload: str) -> None:
        """Drop what was measured of a workload, before it is measured again."""
        self.measurements = [
            m for m in self.measurements if (m["place"], m["workload"]) != (place, workload)
        ]

    def write(self, path: Path) -> None:
        """Write the JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".tmp")
        scratch.write_text(json.dumps(asdict(self), indent=1) + "\n")
        scratch.replace(path)


def read(path: Path) -> Results:
    """The results of an earlier run."""
    return Results(**json.loads(path.read_text()))
