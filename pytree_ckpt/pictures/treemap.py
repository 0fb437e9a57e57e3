"""A treemap: rectangles whose areas are the bytes of parts of a tree."""

from collections.abc import Sequence
from dataclasses import dataclass

from pytree_ckpt.pictures.outline import Branch, by_size

MAX_TILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A part of the unit square."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A part of a tree and its place; `group` numbers the child of the root that it is in."""

    branch: Branch
    place: Rectangle
    group: int


def treemap(root: Branch, *, aspect: float) -> list[Tile]:
    """Tiles that fill a rectangle, the largest parts of the tree resolved the furthest.

    Args:
        root: The whole.
        aspect: Width of the picture by its height; tiles are as square as can be in it.
    """
    whole = Rectangle(left=0.0, top=0.0, width=1.0, height=1.0)
    tiles = [Tile(branch=root, place=whole, group=0)] if root.nbytes else []
    final: list[Tile] = []
    while tiles:
        tile = max(tiles, key=lambda t: t.branch.nbytes)
        tiles.remove(tile)
        children = by_size(tile.branch)
        if not children or len(tiles) + len(final) + len(children) > MAX_TILES:
            final.append(tile)
            continue
        places = squarify([child.nbytes for child in children], tile.place, aspect=aspect)
        for number, (child, place) in enumerate(zip(children, places, strict=True)):
            group = number if tile.branch is root else tile.group
            tiles.append(Tile(branch=child, place=place, group=group))
    return final


def squarify(weights: Sequence[float], place: Rectangle, *, aspect: float) -> list[Rectangle]:
    """Cut a rectangle into parts with areas in proportion to `weights`, which descend.

    Parts are laid in rows along the shorter side; a row takes the next part as long as that
    makes its worst part squarer.

    Example:
        >>> place = Rectangle(left=0.0, top=0.0, width=1.0, height=1.0)
        >>> [(r.left, r.width) for r in squarify([2, 1, 1], place, aspect=2.0)]
        [(0.0, 0.5), (0.5, 0.5), (0.5, 0.5)]
    """
    found: list[Rectangle] = []
    rest = list(weights)
    while rest:
        across, down = place.width * aspect, place.height
        scale = across * down / sum(rest)
        row = [rest.pop(0)]
        side = min(across, down)
        while rest and _worst([*row, rest[0]], scale, side) <= _worst(row, scale, side):
            row.append(rest.pop(0))
        is_tall = across < down
        parts, left = _lay(row, sum(rest), _turned(place) if is_tall else place)
        found += map(_turned, parts) if is_tall else parts
        place = _turned(left) if is_tall else left
    return found


def _worst(row: Sequence[float], scale: float, side: float) -> float:
    """The ratio of the sides of the least square part of a row."""
    thickness = sum(row) * scale / side
    lengths = [weight * scale / thickness for weight in row]
    return max(max(length / thickness, thickness / length) for length in lengths)


def _turned(place: Rectangle) -> Rectangle:
    """Rows for columns."""
    return Rectangle(left=place.top, top=place.left, width=place.height, height=place.width)


def _lay(row: Sequence[float], rest: float, place: Rectangle) -> tuple[list[Rectangle], Rectangle]:
    """Rectangles of a row, one below the other, and what is left of `place` for the `rest`."""
    width, top = place.width * sum(row) / (sum(row) + rest), place.top
    parts = []
    for weight in row:
        height = place.height * weight / sum(row)
        parts.append(Rectangle(left=place.left, top=top, width=width, height=height))
        top += height
    left, remaining = place.left + width, place.width - width
    return parts, Rectangle(left=left, top=place.top, width=remaining, height=place.height)
