"""Half-open hyperrectangles, and regular grids of them."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements with `start[d] <= index[d] < stop[d]` in every dimension.

    Example:
        >>> Box((0, 2), (4, 6)).intersect(Box((2, 0), (8, 3)))
        Box(start=(2, 2), stop=(4, 3))
    """

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """The common part, or None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(a >= b for a, b in zip(start, stop, strict=True)) else Box(start, stop)

    def shifted(self, by: Shape) -> "Box":
        """The same box in an array in which what was at the origin is at `by`."""
        return Box(
            tuple(a + d for a, d in zip(self.start, by, strict=True)),
            tuple(b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def slices(self, origin: Shape | None = None) -> tuple[slice, ...]:
        """Index of this box in an array whose first element is at `origin`."""
        if origin is None:
            return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))
        return tuple(
            slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, origin, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def whole(shape: Shape) -> Box:
    """The box of a whole array."""
    return Box((0,) * len(shape), shape)


def is_contiguous(inner: Shape, outer: Shape) -> bool:
    """Whether a box of shape `inner` inside a C-order array of shape `outer` is one byte range.

    True when, after the leading dimensions of extent 1, at most one dimension is cut.

    Example:
        >>> is_contiguous((1, 2, 8), (4, 4, 8)), is_contiguous((2, 4), (4, 8))
        (True, False)
    """
    for d, extent in enumerate(inner):
        if extent != 1:
            return inner[d + 1 :] == outer[d + 1 :]
    return True


@dataclass(frozen=True, slots=True)
class Grid:
    """A regular grid of cells over an array; the last cell of a dimension may be truncated.

    Cells are numbered in C order.

    Example:
        >>> grid = Grid((5, 4), (2, 4))
        >>> grid.counts, grid.box(2)
        ((3, 1), Box(start=(4, 0), stop=(5, 4)))
    """

    shape: Shape
    cell: Shape
    counts: Shape = field(init=False, repr=False, compare=False)
    """Cells in each dimension."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.cell):
            raise ValueError(f"a grid of {self.cell} does not fit an array of {self.shape}")
        if any(c < 1 for c in self.cell) or any(s < 0 for s in self.shape):
            raise ValueError(f"bad grid: array {self.shape}, cell {self.cell}")
        counts = tuple(-(-s // c) for s, c in zip(self.shape, self.cell, strict=True))
        object.__setattr__(self, "counts", counts)

    @property
    def size(self) -> int:
        """Number of cells."""
        return math.prod(self.counts)

    @property
    def is_even(self) -> bool:
        """Whether no cell is truncated."""
        return not any(s % c for s, c in zip(self.shape, self.cell, strict=True))

    def position(self, index: int) -> Shape:
        """Position of cell number `index` in the grid."""
        out = []
        for count in reversed(self.counts):
            index, at = divmod(index, count)
            out.append(at)
        return tuple(reversed(out))

    def number(self, position: Shape) -> int:
        """Number of the cell at `position`."""
        index = 0
        for at, count in zip(position, self.counts, strict=True):
            index = index * count + at
        return index

    def box(self, index: int) -> Box:
        """Elements of cell number `index`."""
        return self.box_at(self.position(index))

    def box_at(self, position: Shape) -> Box:
        """Elements of the cell at `position`."""
        start = tuple(p * c for p, c in zip(position, self.cell, strict=True))
        stop = tuple(min(a + c, s) for a, c, s in zip(start, self.cell, self.shape, strict=True))
        return Box(start, stop)

    def boxes(self) -> Iterator[Box]:
        """All cells, in order."""
        return (self.box_at(p) for p in itertools.product(*map(range, self.counts)))

    def overlapping(self, box: Box) -> Iterator[int]:
        """Numbers of the cells that share an element with `box`, ascending."""
        if box.size == 0:
            return
        ranges = [
            range(a // c, -(-b // c))
            for a, b, c in zip(box.start, box.stop, self.cell, strict=True)
        ]
        yield from map(self.number, itertools.product(*ranges))
