"""What differs between two checkpoints: from their manifests, and from parts of two arrays."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pytree_ckpt.format import dtypes, values, wire
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Grid, Shape
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.paths import to_text
from pytree_ckpt.format.shardings import place_text, same_place

Array = npt.NDArray[Any]
DifferenceKind = Literal[
    "added", "removed", "structure", "kind", "shape", "dtype", "sharding", "values", "metadata"
]
REGION_NBYTES = 32 << 20
"""What is read of an array at a time, where two checkpoints cut it differently."""
_PIECE = 1 << 20
"""Elements that are compared at a time, which bounds the memory for their differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """How the elements of two arrays differ.

    Attributes:
        count: Elements whose bits differ.
        max_abs: Greatest absolute difference; NaN where a NaN meets a number, and then `at` is
            such a place. None where the elements are no numbers, as PRNG keys are not.
        at: Where it is.
    """

    count: int
    max_abs: float | None
    at: Shape

    def __str__(self) -> str:
        what = "element differs" if self.count == 1 else "elements differ"
        at = f"[{', '.join(map(str, self.at))}]"
        if self.max_abs is None:
            return f"{self.count} {what}, the first at {at}"
        return f"{self.count} {what}, by at most {self.max_abs:.6g} at {at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One way in which checkpoint `b` is not what checkpoint `a` is.

    Attributes:
        path: The leaf, or the key of the metadata.
        a, b: What each has, None for nothing.
        values: For arrays of one shape.
    """

    path: str
    kind: DifferenceKind
    a: str | None
    b: str | None
    values: ValueDifference | None = None

    def __str__(self) -> str:
        change = f"{self.a} → {self.b}" if self.values is None else str(self.values)
        if self.kind in ("added", "removed"):
            change = str(self.b if self.a is None else self.a)
        return f"{self.path or '(root)'}  {self.kind}: {change}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An array that both have in one shape, so that its elements can be compared."""

    a: Leaf
    b: Leaf

    @property
    def specs(self) -> tuple[ArraySpec, ArraySpec]:
        return self.a.array, self.b.array

    @property
    def has_same_chunks(self) -> bool:
        """Whether equal digests mean equal chunks: both are cut alike, and of one dtype."""
        one, other = self.specs
        return (one.dtype, one.chunk_shape) == (other.dtype, other.chunk_shape)


def compare_manifests(a: Manifest, b: Manifest) -> tuple[list[Difference], list[Pair]]:
    """All that two manifests tell, and the arrays whose elements are left to compare."""
    differences = _structure(a, b)
    pairs = []
    # By text: an index of a list and one of a tuple are not one key, but one place.
    for text, leaf in a.by_text.items():
        other = b.by_text.get(text)
        if other is None:
            differences.append(_difference(text, "removed", leaf.describe(), None))
            continue
        differences += _compare_leaves(leaf, other)
        one, two = leaf.spec, other.spec
        if one and two and one.shape == two.shape and (one.kind == "key") == (two.kind == "key"):
            pairs.append(Pair(a=leaf, b=other))
    differences += [
        _difference(text, "added", None, leaf.describe())
        for text, leaf in b.by_text.items()
        if text not in a.by_text
    ]
    differences += _compare_maps("metadata", a.metadata, b.metadata)
    differences += _compare_maps("metrics", dict(a.metrics), dict(b.metrics))
    return differences, pairs


def _difference(path: str, kind: DifferenceKind, a: str | None, b: str | None) -> Difference:
    return Difference(path=path, kind=kind, a=a, b=b)


def _structure(a: Manifest, b: Manifest) -> list[Difference]:
    """Containers of another kind, and empty ones that only one has; leaves tell the rest."""
    if a.tree == b.tree:
        return []
    ours, theirs = (
        {to_text(path): kind for path, kind in manifest.tree.walk() if kind != "leaf"}
        for manifest in (a, b)
    )
    empty = {to_text(path) for path in (*a.tree.empties(), *b.tree.empties())}
    return [
        _difference(text, "structure", ours.get(text), theirs.get(text))
        for text in {**ours, **theirs}
        if ours.get(text) != theirs.get(text)
        and (text in empty or (text in ours and text in theirs))
    ]


def _compare_leaves(a: Leaf, b: Leaf) -> Iterator[Difference]:
    if a.spec is None or b.spec is None:
        if a.spec is not b.spec or a.per_process != b.per_process:
            yield _difference(a.text, "kind", a.describe(), b.describe())
        elif not a.per_process and not values.same(a.value, b.value):
            yield _difference(a.text, "values", *map(values.to_text, (a.value, b.value)))
        return
    one, other = a.spec, b.spec
    if _kind(one) != _kind(other):
        yield _difference(a.text, "kind", _kind(one), _kind(other))
    if one.logical_shape != other.logical_shape:
        yield _difference(a.text, "shape", str(one.logical_shape), str(other.logical_shape))
    if one.logical_dtype != other.logical_dtype:
        yield _difference(a.text, "dtype", one.logical_dtype, other.logical_dtype)
    if not same_place(one.sharding, other.sharding):
        yield _difference(a.text, "sharding", *map(place_text, (one.sharding, other.sharding)))


def _kind(spec: ArraySpec) -> str:
    words = [spec.kind, *(["weakly typed"] if spec.weak_type else [])]
    return ", ".join([*words, *([] if spec.committed else ["uncommitted"])])


def _compare_maps(name: str, a: Any, b: Any) -> Iterator[Difference]:
    """Entry by entry where both are maps."""
    ours, theirs = {name: a}, {name: b}
    if isinstance(a, dict) and isinstance(b, dict):
        ours, theirs = ({f"{name}[{k!r}]": v for k, v in given.items()} for given in (a, b))
    for key in {**ours, **theirs}:
        have, want = (
            values.to_text(given[key]) if key in given else None for given in (ours, theirs)
        )
        if None in (have, want) or wire.encode(ours[key]) != wire.encode(theirs[key]):
            yield _difference(key, "metadata", have, want)


def regions(pair: Pair) -> Grid:
    """How the elements of a pair are cut to be compared.

    Where the two are chunked differently, so that a chunk of either is needed for few regions.
    """
    one, other = pair.specs
    cell = tuple(map(max, one.chunk_shape, other.chunk_shape))
    if math.prod(cell) * max(one.itemsize, other.itemsize) > REGION_NBYTES:
        cell = one.chunk_shape
    return Grid(one.shape, cell)


def compare_elements(
    a: Array, b: Array, *, start: Shape, are_numbers: bool
) -> ValueDifference | None:
    """How two C-order arrays of one shape differ, None if they do not.

    Of one dtype the bits are compared, of two the numbers.

    Args:
        a, b: The same part of two arrays.
        start: Where the part begins.
        are_numbers: Whether differences mean something.

    Example:
        >>> found = compare_elements(
        ...     np.array([1.0, 2.0]), np.array([1.0, 2.5]), start=(10,), are_numbers=True
        ... )
        >>> print(found)
        1 element differs, by at most 0.5 at [11]
    """
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    found = None
    for first in range(0, flat_a.size, _PIECE):
        x, y = flat_a[first : first + _PIECE], flat_b[first : first + _PIECE]
        where = np.flatnonzero(_differ(x, y))
        if not len(where):
            continue
        gaps = _gaps(x[where], y[where]) if are_numbers else np.zeros(len(where))
        worst = int(np.argmax(np.isnan(gaps) if np.isnan(gaps).any() else gaps))
        at = np.unravel_index(first + int(where[worst]), a.shape)
        piece = ValueDifference(
            count=len(where),
            max_abs=float(gaps[worst]) if are_numbers else None,
            at=tuple(int(p) + s for p, s in zip(at, start, strict=True)),
        )
        found = join(found, piece)
    return found


def join(a: ValueDifference | None, b: ValueDifference | None) -> ValueDifference | None:
    """The difference of two parts together."""
    if a is None or b is None:
        return a or b
    worse = max(a, b, key=_rank)
    return ValueDifference(count=a.count + b.count, max_abs=worse.max_abs, at=worse.at)


def _rank(difference: ValueDifference) -> float:
    gap = difference.max_abs or 0.0
    return math.inf if math.isnan(gap) else min(gap, sys.float_info.max)


def _differ(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    if a.dtype == b.dtype:
        size = a.dtype.itemsize
        bits_a, bits_b = (x.view(np.uint8).reshape(-1, size) for x in (a, b))
        return np.asarray((bits_a != bits_b).any(axis=1))
    gaps = _gaps(a, b)
    return np.isnan(gaps) | (gaps > 0)


def _gaps(a: Array, b: Array) -> npt.NDArray[np.float64]:
    """Absolute differences; 0 between equal numbers only, and between two NaNs."""
    (u, rest_u), (v, rest_v) = _as_floats(a), _as_floats(b)
    with np.errstate(all="ignore"):
        same = ((u == v) & (rest_u == rest_v)) | (np.isnan(u) & np.isnan(v))
        return np.where(same, 0.0, np.abs((u - v) + (rest_u - rest_v)))


def _as_floats(array: Array) -> tuple[Array, Array]:
    """Two wide floats for each element, whose exact sum it is: no float holds all 64 bits.

    The first of an integer is nearer to zero, and is zero for a small one; so the difference of
    two numbers that are almost equal is not rounded.
    """
    kind = dtypes.kind_of(dtypes.name_of(array.dtype) or "float64")
    if kind == "int":
        whole = array.astype(np.uint64 if array.dtype == np.uint64 else np.int64)
        rest = np.fmod(whole, whole.dtype.type(_REST))
        return (whole - rest).astype(np.float64), rest.astype(np.float64)
    wide = array.astype(np.complex128 if kind == "complex" else np.float64)
    return wide, np.zeros(wide.shape)


_REST = 1 << 11
"""A multiple of it, below 2**64, has at most the 53 bits that a float holds."""
