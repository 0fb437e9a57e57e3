"""Results on the terminal: plain text where it is piped."""

from __future__ import annotations

import sys
from typing import Any

from results import VERBS, Results, Verb
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from systems import SYSTEMS
from targets import LIMIT_OF, judge

PIPED_WIDTH = 150
PEERS = ("orbax-v0", "orbax-v0-raw", "orbax-v1", "orbax-v1-raw")
MIB = 1 << 20


def console() -> Console:
    """As wide as the terminal; wide enough for every table where there is none."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def show_all(out: Console, results: Results) -> None:
    """Everything, of an earlier run."""
    show_setting(out, results)
    for place in results.places:
        for workload in results.states:
            show_workload(out, results, place, workload)
    show_verdict(out, results)


def show_verdict(out: Console, results: Results) -> None:
    """The targets, and what was not measured."""
    for place in results.places:
        show_targets(out, results, place)
    for line in (*results.skipped, *results.errors()):
        out.print(line, markup=False, style="yellow")


def show_setting(out: Console, results: Results) -> None:
    """The machine, the versions, and how each system is set up."""
    machine = results.machine
    out.print(
        f"{machine['cpu']}, {machine['threads']} threads, {machine['memory_gib']:.0f} GiB, "
        f"{machine['system']}; {results.started}",
        markup=False,
    )
    out.print(", ".join(f"{k} {v}" for k, v in results.versions.items()), markup=False)
    table = _table("", "system", "package", "settings")
    for name, settings in results.settings.items():
        package = SYSTEMS[name].package
        table.add_row(name, f"{package} {results.versions.get(package, '')}", settings)
    out.print(table)


def show_workload(out: Console, results: Results, place: str, workload: str) -> None:
    """A table of saves and one of loads."""
    measured = results.systems(place, workload)
    if not measured:
        return
    state = results.states[workload]
    names = [name for name in SYSTEMS if name in measured]
    title = f"({workload}) {state['title']} on {place}"
    if results.scale != 1:
        title += f", at scale {results.scale:g}"
    if any(results.figures(place, workload, name, "background") for name in names):
        out.print(_background_table(results, place, workload, names, title))
        return
    for verb in VERBS:
        out.print(_verb_table(results, place, workload, verb, names, f"{verb} {title}"))
    if results.states[workload].get("processes", 1) > 1:
        out.print(_coordination_table(results, place, workload, names))
    _show_stages(out, results, place, workload)


def _coordination_table(results: Results, place: str, workload: str, names: list[str]) -> Table:
    """How often one process waits for others, and how, and all calls of the key-value store."""
    figures = ("barriers", "collectives", "blocking_gets", "key_values")
    columns = ("barriers", "collectives", "blocking gets", "key-value calls of all")
    table = _table("what the processes ask of each other", "system", "what", *columns)
    for name in names:
        for verb in VERBS:
            counts = [results.median(place, workload, name, verb, figure) for figure in figures]
            shown = ["–" if count is None else f"{count:g}" for count in counts]
            table.add_row(SYSTEMS[name].label, verb, *shown, style=_style(name))
    return table


def _verb_table(
    results: Results, place: str, workload: str, verb: Verb, names: list[str], title: str
) -> Table:
    last = ("disk MiB", "files", "sync after s") if verb == "save" else ("read MiB",)
    ratios = [peer for peer in PEERS if peer in names]
    table = _table(
        title,
        "system",
        "s",
        "min–max",
        "GB/s",
        "of limit",
        *(f"× {peer.removeprefix('orbax-')}" for peer in ratios),
        "CPU s",
        "peak MiB",
        *last,
    )
    nbytes = results.states[workload]["nbytes"]
    for name in names:
        taken = results.figures(place, workload, name, verb)
        if not taken:
            table.add_row(SYSTEMS[name].label, "failed")
            continue
        seconds = results.median(place, workload, name, verb)
        assert seconds is not None
        limit = LIMIT_OF.get(name, "limit-sha256")
        speeds = [
            results.speed(place, workload, name, verb, beside=peer) for peer in (limit, *ratios)
        ]
        table.add_row(
            SYSTEMS[name].label,
            f"{seconds:.3f}",
            f"{min(taken):.2f}–{max(taken):.2f}",
            f"{nbytes / seconds / 1e9:.2f}",
            *(_number(speed) for speed in speeds),
            _number(results.median(place, workload, name, verb, "cpu_s")),
            _mib(results.median(place, workload, name, verb, "peak_nbytes")),
            *_last(results, place, workload, verb, name),
            style=_style(name),
        )
    return table


def _background_table(
    results: Results, place: str, workload: str, names: list[str], title: str
) -> Table:
    table = _table(
        title, "system", "blocked ms", "min–max", "step ms", "beside a save", "slower", "saved in s"
    )
    for name in names:
        blocked = results.figures(place, workload, name, "background", "blocked_s")
        seconds, step, beside, middle = (
            results.median(place, workload, name, "background", figure)
            for figure in ("seconds", "step_s", "beside_s", "blocked_s")
        )
        if not (blocked and seconds and step and beside and middle):
            table.add_row(SYSTEMS[name].label, "failed")
            continue
        table.add_row(
            SYSTEMS[name].label,
            f"{middle * 1e3:.1f}",
            f"{min(blocked) * 1e3:.1f}–{max(blocked) * 1e3:.1f}",
            f"{step * 1e3:.0f}",
            f"{beside * 1e3:.0f}",
            f"{beside / step:.2f}×",
            f"{seconds:.2f}",
            style=_style(name),
        )
    return table


def _last(results: Results, place: str, workload: str, verb: Verb, name: str) -> list[str]:
    def median(figure: str) -> float | None:
        return results.median(place, workload, name, verb, figure)

    if verb == "save":
        files = median("disk_files")
        count = "–" if files is None else f"{files:.0f}"
        return [_mib(median("disk_nbytes")), count, _number(median("sync_s"))]
    # A mapped file is not read by a system call, but it is read from the device.
    called, device = median("read_nbytes") or 0, median("device_read_nbytes") or 0
    return [_mib(max(called, device))]


def _show_stages(out: Console, results: Results, place: str, workload: str) -> None:
    """Seconds by stage as the library logs them: of the last round, of all threads together."""
    for verb in VERBS:
        for name in SYSTEMS:
            stages = [
                m["stages"]
                for m in results.measurements
                if (m["place"], m["workload"], m["system"], m["verb"])
                == (place, workload, name, verb)
                and m.get("stages")
            ]
            if stages:
                text = ", ".join(f"{stage} {s:.3f} s" for stage, s in stages[-1].items())
                out.print(f"  stages of {verb}, {SYSTEMS[name].label}: {text}", markup=False)


def show_targets(out: Console, results: Results, place: str) -> None:
    """Every target with the true figure."""
    if results.scale != 1:
        out.print(f"no target is judged at scale {results.scale:g}")
    title = f"targets on {place} ({results.places[place]})"
    table = _table(title, "row", "what", "target", "measured", "", "beside")
    for row in judge(results, place):
        if row.figure is None and results.scale != 1:
            continue
        figure = "–" if row.figure is None else f"{row.figure:.3g}{row.unit}"
        verdict = row.verdict if results.scale == 1 else ""
        style = {"PASS": "green", "short": "bold red"}.get(verdict)
        bound = f"{row.sign} {row.bound:g}{row.unit}"
        table.add_row(row.row, row.what, bound, figure, verdict, row.beside, style=style)
    out.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in columns:
        is_text = column in ("system", "package", "settings", "row", "what", "beside", "")
        table.add_column(
            column,
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=column not in ("settings", "what", "beside"),
        )
    return table


def _style(name: str) -> str | None:
    system: Any = SYSTEMS[name]
    if system.is_ours:
        return "bold cyan"
    return "dim" if system.is_limit else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _mib(value: float | None) -> str:
    return "–" if value is None else f"{value / MIB:,.1f}"
