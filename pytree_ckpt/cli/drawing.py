"""What commands print for people, as rich's tables, trees and blocks."""

import time
from collections.abc import Iterator, Sequence

from rich.box import SQUARE
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from pytree_ckpt.errors import Damage
from pytree_ckpt.format import values
from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.format.steps import StepNames
from pytree_ckpt.format.values import count_text
from pytree_ckpt.pictures.facts import branch_words, leaf_words, manifest_facts, writer_words
from pytree_ckpt.pictures.layouts import Panel, devices_text, layout_of
from pytree_ckpt.pictures.outline import Branch
from pytree_ckpt.pictures.style import COLOURS
from pytree_ckpt.pictures.text import duration_text, plain, size_text
from pytree_ckpt.verbs.diff import DiffReport
from pytree_ckpt.verbs.inspect import LeafReport
from pytree_ckpt.verbs.survey import PruneReport, StepSummary
from pytree_ckpt.verbs.verify import VerifyReport


def of_verify(report: VerifyReport) -> RenderableType:
    """A line for the checkpoint, and one for each damage."""
    state, style = ("whole", "green") if report.ok else ("damaged", "bold red")
    head = Text.assemble(
        (state, style),
        f"  {plain(report.path)}: {count_text(report.chunks, 'chunk')}, "
        f"{size_text(report.nbytes)} checked",
    )
    left = [Text(f"not checked: {plain(what)}", style="yellow") for what in report.unchecked]
    return Group(head, *([_damage(report.damage)] if report.damage else []), *left)


def _damage(damage: tuple[Damage, ...]) -> Table:
    found = table("leaf", "box", "devices", "damage")
    for item in damage:
        box = "" if item.box is None else "[" + ", ".join(f"{a}:{b}" for a, b in item.box) + "]"
        row = (item.path or "", box, " ".join(map(str, item.devices)), item.text)
        found.add_row(*map(plain, row))
    return found


def table(*columns: str) -> Table:
    """A table without borders, whose cells are never cut off."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        found.add_column(column, overflow="fold")
    return found


_STYLES = {"added": "green", "removed": "red"}


def of_diff(report: DiffReport) -> Iterator[RenderableType]:
    """The differences, then what was compared."""
    if report.differences:
        found = table("leaf", "difference", "a", "b")
        for item in report.differences:
            sides = (item.a or "", item.b or "")
            if item.values is not None:
                sides = (str(item.values), "")
            row = (item.path or "(root)", item.kind, *sides)
            found.add_row(*map(plain, row), style=_STYLES.get(item.kind))
        yield found
    state, style = ("the same", "green") if report.same else ("different", "bold red")
    yield Text.assemble(
        (state, style),
        f"  {plain(report.a)} and {plain(report.b)}: "
        f"{count_text(report.leaves, 'array')} compared, "
        f"{count_text(report.equal_chunks, 'chunk')} equal by digest, "
        f"{size_text(report.nbytes_read)} read",
    )


# --- a checkpoint ---------------------------------------------------------------------------------


def of_tree(root: Branch, depth: int | None) -> Tree:
    """The tree down to `depth` keys below the root."""
    picture = Tree(_branch(root, root.nbytes))
    above = [picture]
    for at, branch in root.walk():
        if at and (depth is None or at <= depth):
            del above[at:]
            above.append(above[-1].add(_branch(branch, root.nbytes)))
    return picture


def _branch(branch: Branch, total: int) -> Text:
    words = leaf_words(branch) if not branch.children else branch_words(branch, total)
    return Text.assemble((plain(branch.label or "(root)"), "bold"), " ", (plain(words), "dim"))


def of_manifest(manifest: Manifest) -> Iterator[RenderableType]:
    """What to know of a checkpoint."""
    found = table("", "")
    found.show_header = False
    rows = [*manifest_facts(manifest), *_entries("metrics", dict(manifest.metrics))]
    rows += [(stage, duration_text(seconds)) for stage, seconds in manifest.seconds.items()]
    for name, value in [*rows, *_entries("metadata", manifest.metadata)]:
        found.add_row(Text(plain(name), style="bold"), plain(value))
    yield found


def _entries(name: str, content: object) -> Iterator[tuple[str, str]]:
    if isinstance(content, dict):
        yield from ((f"{name} {key}", values.to_text(value)) for key, value in content.items())
    elif content is not None:
        yield name, values.to_text(content)


def of_leaf(report: LeafReport) -> Iterator[RenderableType]:
    """A leaf: where it was, its chunks, its numbers."""
    leaf = report.leaf
    yield Text(plain(leaf), style="bold")
    if leaf.spec is None:
        for value in report.values or (leaf.value,):
            yield Text(plain(values.to_text(value)))
        return
    layout = layout_of(leaf.spec)
    yield Text(layout.words)
    for what, panels in layout.drawn:
        yield from _planes(what, panels)
    if layout.note:
        yield Text(layout.note, style="yellow")
    numbers = report.statistics
    if numbers is not None:
        yield Text(
            f"least {numbers.least}, greatest {numbers.greatest}, mean {numbers.mean}, "
            f"{numbers.nan_count} of {numbers.count} are NaN"
        )
    found = table("chunk", "bytes", "devices", "digest")
    for chunk in report.chunks:
        devices = devices_text(chunk.devices)
        found.add_row(str(chunk.box), size_text(chunk.nbytes), devices, chunk.digest.hex())
    yield found


def _planes(what: str, panels: Sequence[Panel]) -> Iterator[RenderableType]:
    """Blocks of colour, side by side where there is room."""
    if panels:
        yield Text(what, style="dim")
        yield Columns([_plane(panel) for panel in panels], padding=(0, 2))


def _plane(panel: Panel) -> Group:
    found = Table(box=SQUARE, show_header=False, show_lines=True, padding=0)
    for row in panel.rows:
        found.add_row(
            *(
                Text(
                    f" {block.label or '–'} ",
                    style=f"black on {COLOURS[block.colour % len(COLOURS)]}",
                )
                for block in row
            )
        )
    return Group(*([Text(plain(panel.title))] if panel.title else []), found)


# --- a root ---------------------------------------------------------------------------------------

_STATUS_STYLES = {"committed": "green", "damaged": "bold red", "unreadable": "red"}


def of_survey(steps: Sequence[StepSummary], names: StepNames) -> Iterator[RenderableType]:
    """A line for each step."""
    if not steps:
        yield Text(plain(f"no steps that are named as {names.name(1)}"))
        return
    found = table("step", "state", "age", "bytes", "leaves", "mesh", "written by", "")
    for item in steps:
        status = Text(item.status, style=_STATUS_STYLES.get(item.status, "yellow"))
        note = ", ".join(["pinned"] * item.pinned + [item.note] * bool(item.note))
        found.add_row(str(item.step), status, *_about(item.manifest), plain(note))
    yield found


def _about(manifest: Manifest | None) -> tuple[str, ...]:
    if manifest is None:
        return ("",) * 5
    facts = (
        duration_text(max(time.time() - manifest.created, 0.0)),
        size_text(manifest.nbytes),
        f"{len(manifest.leaf_codes):,}",
        ", ".join(map(str, manifest.meshes)) or "none",
        writer_words(manifest),
    )
    return tuple(map(plain, facts))


def of_prune(report: PruneReport) -> Iterator[RenderableType]:
    """What stays and what goes, and why."""
    decision = report.decision
    found = table("step", "", "why")
    reasons = sorted({**decision.kept, **decision.dropped, **decision.left}.items())
    for step, why in reasons:
        word, style = "stays", "green"
        if step in decision.dropped:
            word, style = ("deleted", "red") if step in report.deleted else ("to go", "yellow")
        if step in report.in_use:
            word, why = "stays", "it is being read"
        found.add_row(str(step), Text(word, style=style), plain(why))
    yield found
    if decision.dropped and not report.deleted and not report.in_use:
        yield Text("nothing was deleted; --yes deletes what is to go", style="yellow")
