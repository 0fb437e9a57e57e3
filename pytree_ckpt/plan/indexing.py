"""Numpy's basic indexing as a box to read and an index within it."""

import operator
from types import EllipsisType
from typing import Any

from pytree_ckpt.format.boxes import Box, Shape

Index = int | slice | EllipsisType


def to_box(
    index: Index | tuple[Index, ...], shape: Shape
) -> tuple[Box, tuple[int | slice | EllipsisType, ...]]:
    """The box that covers an index of ints, slices and an ellipsis, and the index within it.

    Raises:
        IndexError: Out of bounds, or too many indices.
        TypeError: Something else in the index.

    Example:
        >>> to_box((-1, slice(6, 1, -2)), (4, 8))
        (Box(start=(3, 2), stop=(4, 7)), (0, slice(4, None, -2)))
    """
    given = [_checked(item) for item in (index if isinstance(index, tuple) else (index,))]
    dots = [at for at, item in enumerate(given) if isinstance(item, EllipsisType)]
    if len(dots) > 1:
        raise IndexError("an index can have one ellipsis")
    if len(given) - len(dots) > len(shape):
        raise IndexError(f"{len(given) - len(dots)} indices for an array of shape {shape}")
    at = dots[0] if dots else len(given)
    fill = [slice(None)] * (len(shape) - len(given) + len(dots))
    items = [*given[:at], *fill, *given[at + len(dots) :]]
    parts = [
        _part(item, extent, dimension)
        for dimension, (item, extent) in enumerate(zip(items, shape, strict=True))
    ]
    box = Box(tuple(start for start, _, _ in parts), tuple(stop for _, stop, _ in parts))
    # As in numpy, with an ellipsis the result is an array even where no dimension is left.
    return box, (*(rest for _, _, rest in parts), *([...] if dots else []))


def _checked(item: Any) -> Index:
    if isinstance(item, (slice, EllipsisType)):
        return item
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise TypeError(
            f"stored arrays are indexed by ints, slices and '...', not {type(item).__name__}"
        )
    return operator.index(item)


def _part(item: Any, extent: int, dimension: int) -> tuple[int, int, int | slice]:
    """Start and stop of the box in one dimension, and the index within."""
    if isinstance(item, slice):
        taken = range(*item.indices(extent))
        if not taken:
            return 0, 0, slice(0, 0)
        low, high = min(taken), max(taken) + 1
        stop = taken[-1] - low + (1 if taken.step > 0 else -1)
        return low, high, slice(taken[0] - low, None if stop < 0 else stop, taken.step)
    if not -extent <= item < extent:
        raise IndexError(
            f"index {item} is out of bounds for dimension {dimension} of size {extent}"
        )
    return item % extent, item % extent + 1, 0
