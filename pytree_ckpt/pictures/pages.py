"""Manifests and reports as HTML: for notebooks, and as a page of its own."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pytree_ckpt.errors import Damage
from pytree_ckpt.format import values
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.shardings import Sharding
from pytree_ckpt.format.values import count_text
from pytree_ckpt.pictures.facts import branch_words, leaf_words, manifest_facts
from pytree_ckpt.pictures.html import Content, Html, document, join, tag
from pytree_ckpt.pictures.layouts import Panel, layout_of
from pytree_ckpt.pictures.outline import Branch, by_size, outline
from pytree_ckpt.pictures.style import COLOURS, LABEL_STEP, MAP_ASPECT, MAX_LABEL, PAGE_STYLE, STYLE
from pytree_ckpt.pictures.text import duration_text, percent_text, size_text
from pytree_ckpt.pictures.treemap import Tile, treemap
from pytree_ckpt.plan.diffing import Difference

MAX_LEAVES = 2000
MAX_LAYOUTS = 40
MAX_ROWS = 500
"""How much of a list is shown; a line says how much is not."""
MAP_CHARACTERS = 130
"""In the width of a treemap on a wide page."""
OPEN_LEAVES = 40
"""A branch of the tree with no more is shown open."""


def manifest_page(manifest: Manifest, *, path: str) -> str:
    """A page of its own about a checkpoint."""
    content = tag("main", tag("h1", path), *_sections(manifest), class_="pc")
    return document(content, title=path, style=PAGE_STYLE)


def manifest_html(manifest: Manifest, *, title: str = "") -> str:
    """A part of a page, such as a notebook, about a checkpoint."""
    return fragment(*([tag("h1", title)] if title else []), *_sections(manifest))


def fragment(*content: Content) -> str:
    """A part of a page, with the style that it needs."""
    return tag("div", Html(f"<style>{STYLE}</style>"), *content, class_="pc")


def _sections(manifest: Manifest) -> Iterator[Html]:
    root = outline(manifest)
    facts = (
        tag("div", tag("dt", what), tag("dd", text)) for what, text in manifest_facts(manifest)
    )
    yield tag("dl", *facts, class_="pc-facts")
    if root.nbytes:
        yield tag("h2", "Where the bytes are")
        yield _map(root)
    if manifest.specs:
        yield tag("h2", "Which device holds what")
        yield from _layouts(manifest)
    yield tag("h2", "Leaves")
    yield tag("div", *_tree(root, root.nbytes), class_="pc-tree")
    if manifest.seconds:
        yield tag("h2", "Seconds of the save")
        yield _timeline(manifest)
    for name, content in (("Metadata", manifest.metadata), ("Metrics", dict(manifest.metrics))):
        if content:
            yield tag("h2", name)
            yield _entries(content)


# --- bytes ----------------------------------------------------------------------------------------


def _map(root: Branch) -> Html:
    tiles = treemap(root, aspect=MAP_ASPECT)
    legend = []
    for group, branch in enumerate(by_size(root)[: len(COLOURS)]):
        square = tag("i", style=_background(group))
        legend.append(tag("li", square, tag("b", branch.label), f" {_share(branch, root)}"))
    return join(
        tag("div", *(_tile(tile, root) for tile in tiles), class_="pc-map"),
        tag("ul", *legend, class_="pc-legend"),
    )


def _share(branch: Branch, root: Branch) -> str:
    return f"{size_text(branch.nbytes)}, {percent_text(branch.nbytes / root.nbytes)}"


def _background(number: int) -> str:
    return f"background:{COLOURS[number % len(COLOURS)]}"


def _tile(tile: Tile, root: Branch) -> Html:
    branch, place = tile.branch, tile.place
    style = (
        f"left:{place.left:.4%};top:{place.top:.4%};width:{place.width:.4%};"
        f"height:{place.height:.4%};{_background(tile.group)}"
    )
    about = f"{branch.path or '(root)'}: {_share(branch, root)}"
    labels = dict.fromkeys((_label(branch, int(place.width * MAP_CHARACTERS)), _label(branch, 0)))
    spans = (
        tag("span", label, class_=f"pc-n{math.ceil(len(label) / LABEL_STEP) * LABEL_STEP}")
        for label in labels
    )
    return tag("div", *spans, style=style, title=about)


def _label(branch: Branch, most: int) -> str:
    """The last key of a path, and as many before it as fit in so many characters."""
    keys = branch.path.split("/") if branch.path else ["(root)"]
    label = keys.pop()[:MAX_LABEL]
    while keys and len(keys[-1]) + 1 + len(label) <= min(most, MAX_LABEL):
        label = f"{keys.pop()}/{label}"
    return label


# --- layouts --------------------------------------------------------------------------------------


def _layouts(manifest: Manifest) -> Iterator[Html]:
    groups: dict[Sharding | None, list[Leaf]] = {}
    for leaf in manifest.leaves:
        if leaf.spec is not None:
            groups.setdefault(leaf.spec.sharding, []).append(leaf)
    order = sorted(groups.items(), key=lambda item: -_nbytes(item[1]))
    for number, (sharding, members) in enumerate(order[:MAX_LAYOUTS]):
        nbytes = _nbytes(members)
        about = f" {count_text(len(members), 'leaf', 'leaves')}, {size_text(nbytes)}"
        head = tag("code", str(sharding or "host arrays")), tag("span", about, class_="pc-dim")
        yield _details(head, *_layout(members), is_open=number == 0)
    yield from _left_out(len(order) - MAX_LAYOUTS, "layout")


def _nbytes(leaves: Iterable[Leaf]) -> int:
    return sum(leaf.array.nbytes for leaf in leaves)


def _details(head: Iterable[Content], *content: Content, is_open: bool) -> Html:
    opened = {"open": ""} if is_open else {}
    return tag("details", tag("summary", *head), *content, **opened)


def _layout(members: Sequence[Leaf]) -> Iterator[Html]:
    """The picture of the largest leaf; that of the others differs in numbers only."""
    leaf = max(members, key=lambda member: member.array.nbytes)
    layout = layout_of(leaf.array)
    yield tag("p", tag("code", leaf.text or "(root)"), f": {layout.words}")
    if layout.slices:
        yield tag(
            "div",
            *(figure for what, panels in layout.drawn for figure in _figures(what, panels)),
            class_="pc-planes",
        )
    if layout.note:
        yield tag("p", layout.note, class_="pc-dim")
    others = [other.text for other in members if other is not leaf]
    if others:
        shown = ", ".join(others[:MAX_ROWS]) + (", …" if len(others) > MAX_ROWS else "")
        head = tag("summary", f"and {count_text(len(others), 'other leaf', 'other leaves')}")
        yield tag("details", head, tag("code", shown), class_="pc-dim")


def _figures(what: str, panels: Sequence[Panel]) -> Iterator[Html]:
    for panel in panels:
        caption = f"{what}; {panel.title}" if panel.title else what
        yield tag("figure", tag("figcaption", caption), _plane(panel))


def _plane(panel: Panel) -> Html:
    columns = len(panel.rows[0])
    blocks = (
        tag(
            "div",
            block.label or "–",
            title=f"{block.detail} on {block.label}",
            style=_background(block.colour),
        )
        for row in panel.rows
        for block in row
    )
    style = f"grid-template-columns:repeat({columns},minmax(0,auto))"
    return tag("div", *blocks, class_="pc-plane" + (" pc-wide" if columns > 8 else ""), style=style)


# --- leaves ---------------------------------------------------------------------------------------


def _tree(root: Branch, total: int) -> Iterator[Html]:
    left = [MAX_LEAVES]
    yield _branch(root, total, left)
    yield from _left_out(root.leaves - MAX_LEAVES, "leaf", "leaves")


def _branch(branch: Branch, total: int, left: list[int]) -> Html:
    """A branch and what is below it, as long as leaves are `left` to show."""
    name = tag("b", branch.label or "(root)")
    if not branch.children:
        left[0] -= 1
        words = tag("span", f" {leaf_words(branch)}", class_="pc-dim")
        return tag("div", name, words, class_="pc-leaf")
    items = []
    for child in branch.children:
        if left[0] <= 0:
            break
        items.append(tag("li", _branch(child, total, left)))
    words = tag("span", f" {branch_words(branch, total)}", class_="pc-dim")
    is_open = not branch.path or branch.leaves <= OPEN_LEAVES
    return _details((name, words), tag("ul", *items), is_open=is_open)


# --- the save -------------------------------------------------------------------------------------


def _timeline(manifest: Manifest) -> Html:
    longest = max(manifest.seconds.values()) or 1.0
    rows: list[Html] = []
    for number, (stage, seconds) in enumerate(manifest.seconds.items()):
        share = min(max(seconds / longest, 0.0), 1.0)
        style = f"width:{share:.2%};{_background(number)}"
        rows += [
            tag("span", stage.replace("_", " ")),
            tag("div", style=style, class_="pc-bar"),
            tag("span", duration_text(seconds)),
        ]
    note = "Stages that several threads run at once count for each of them."
    return join(tag("div", *rows, class_="pc-bars"), tag("p", note, class_="pc-dim"))


def _entries(content: Any) -> Html:
    if not isinstance(content, dict):
        return tag("pre", values.to_text(content))
    items = (
        (tag("b", str(key)), " ", tag("code", values.to_text(value)))
        for key, value in content.items()
    )
    return _rows(items, len(content), "entry", "entries")


def _rows(items: Iterable[Iterable[Content]], count: int, *words: str) -> Html:
    """The first of `count` items, below each other."""
    shown = (tag("li", *item) for item in itertools.islice(items, MAX_ROWS))
    return tag("ul", *shown, *_left_out(count - MAX_ROWS, *words), class_="pc-rows")


# --- reports --------------------------------------------------------------------------------------


def damage_html(
    path: str, damage: Sequence[Damage], *, checked: str, unchecked: Sequence[str]
) -> str:
    """What a verification found."""
    bad = f"damaged in {count_text(len(damage), 'place')}" if damage else ""
    items = ((tag("code", item.path or "the checkpoint"), " ", item.text) for item in damage)
    return fragment(
        tag("p", _verdict(bad, "whole"), " ", tag("code", path), f" {checked}"),
        _rows(items, len(damage), "damage"),
        *(tag("p", f"not checked: {what}", class_="pc-dim") for what in unchecked),
    )


def differences_html(a: str, b: str, differences: Sequence[Difference], *, compared: str) -> str:
    """What a comparison found."""
    bad = count_text(len(differences), "difference") if differences else ""
    state = _verdict(bad, "the same")
    items = ([tag("code", str(item))] for item in differences)
    return fragment(
        tag("p", state, " ", tag("code", a), " → ", tag("code", b), f" {compared}"),
        _rows(items, len(differences), "difference"),
    )


def _verdict(bad: str, good: str) -> Html:
    return tag("b", bad or good, class_="pc-bad" if bad else "pc-good")


def _left_out(count: int, one: str, many: str | None = None) -> Iterator[Html]:
    if count > 0:
        yield tag("p", f"… and {count_text(count, one, many)} more", class_="pc-dim")
