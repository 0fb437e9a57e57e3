"""What commands print for people, as rich's tables, trees and blocks."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pytree_ckpt.errors import Damage
from pytree_ckpt.pictures.text import count_text, plain, size_text
from pytree_ckpt.verbs.diff import DiffReport
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
