"""Results as a bar chart: a row of panels for each workload, saves on the left, loads right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from results import VERBS, Results, Verb
from systems import SYSTEMS

OURS, PEER, LIMIT = "#d1495b", "#b8bec8", "#22577a"
BAR_INCHES = 0.26


def draw(results: Results, place: str, path: Path) -> None:
    """Draw all workloads that were measured at a place."""
    panels = {key: _bars(results, place, key) for key in results.states}
    panels = {key: names for key, names in panels.items() if names}
    if not panels:
        return
    heights = [len(names) + 3.2 for names in panels.values()]
    figure, axes = plt.subplots(
        len(panels),
        len(VERBS),
        figsize=(12, sum(heights) * BAR_INCHES + 1.0),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for row, (key, names) in zip(axes, panels.items(), strict=True):
        for axis, verb in zip(row, VERBS, strict=True):
            _panel(axis, results, place, key, verb, names)
    machine = results.machine
    rounds = 1 + max(m["round"] for m in results.measurements if m["place"] == place)
    figure.suptitle(
        f"Seconds on {place}, less is better (medians of {rounds}, {machine['threads']} threads)"
        + ("" if results.scale == 1 else f", states at scale {results.scale:g}"),
        fontsize=13,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(results: Results, place: str, workload: str) -> list[str]:
    measured = {
        m["system"]
        for m in results.measurements
        if (m["place"], m["workload"]) == (place, workload) and m["verb"] in VERBS
    }
    return [name for name, system in SYSTEMS.items() if name in measured and not system.is_limit]


def _panel(
    axis: Any, results: Results, place: str, workload: str, verb: Verb, names: list[str]
) -> None:
    seconds = [results.median(place, workload, name, verb) or 0.0 for name in names]
    colors = [OURS if SYSTEMS[name].is_ours else PEER for name in names]
    bars = axis.barh(range(len(names)), seconds, color=colors, height=0.72)
    axis.bar_label(bars, [f"{s:.2f}" if s else "failed" for s in seconds], padding=3, fontsize=8)
    axis.set_yticks(range(len(names)), [SYSTEMS[name].label for name in names], fontsize=8)
    for label, name in zip(axis.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if SYSTEMS[name].is_ours else "normal")
    axis.invert_yaxis()
    axis.set_xlim(0, max(seconds, default=1.0) * 1.12 or 1.0)
    for name, style in (("limit-sha256", "-"), ("limit-xxh3", ":")):
        limit = results.median(place, workload, name, verb)
        if limit:
            label = f"{SYSTEMS[name].label}: {limit:.2f}"
            axis.axvline(limit, color=LIMIT, linestyle=style, linewidth=1.4, label=label)
    if axis.get_legend_handles_labels()[0]:
        corner = {"loc": "lower left", "bbox_to_anchor": (-0.01, 0.98)}
        axis.legend(**corner, ncols=2, fontsize=7, frameon=False)
    title = results.states[workload]["title"]
    axis.set_title(f"({workload}) {title}: {verb}", fontsize=9, loc="left", pad=18)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
