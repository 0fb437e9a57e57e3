"""Minimum, maximum, mean and NaNs of an array that is seen part by part."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytree_ckpt.format import dtypes

_PIECE = 1 << 20
"""Elements that are widened at a time, which bounds the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of the elements of an array; `least`, `greatest` and `mean` are of those that are no NaN.

    They are None where there is no such element, and `least` and `greatest` of complex numbers
    too, which have no order.
    """

    count: int
    nan_count: int
    least: float | int | None
    greatest: float | int | None
    mean: float | complex | None


def statistics_of(parts: Iterable[npt.NDArray[Any]]) -> Statistics:
    """Statistics of all elements of C-order arrays of one dtype.

    Example:
        >>> found = statistics_of([np.array([1.0, np.nan]), np.array([4.0])])
        >>> found.nan_count, found.least, found.greatest, found.mean
        (1, 1.0, 4.0, 2.5)
    """
    count = nan_count = 0
    total: complex = 0
    extremes: list[float | int] = []
    for piece in (piece for part in parts for piece in _pieces(part)):
        numbers = piece[~np.isnan(piece)]
        count += piece.size
        nan_count += piece.size - numbers.size
        if not numbers.size:
            continue
        with np.errstate(all="ignore"):
            total += numbers.sum(dtype=np.result_type(numbers.dtype, np.float64)).item()
        if numbers.dtype.kind != "c":
            extremes += [numbers.min().item(), numbers.max().item()]
            extremes = [min(extremes), max(extremes)]
    good = count - nan_count
    mean = total / good if good else None
    return Statistics(
        count=count,
        nan_count=nan_count,
        least=extremes[0] if extremes else None,
        greatest=extremes[1] if extremes else None,
        mean=mean,
    )


def _pieces(part: npt.NDArray[Any]) -> Iterable[npt.NDArray[Any]]:
    """Pieces of an array in a dtype that numpy can count with."""
    name = dtypes.name_of(part.dtype) or "float64"
    wide: Any = np.int64 if dtypes.kind_of(name) in ("int", "bool") else np.float64
    if name == "uint64" or dtypes.kind_of(name) == "complex":
        wide = np.uint64 if name == "uint64" else np.complex128
    flat = part.reshape(-1)
    return (flat[at : at + _PIECE].astype(wide) for at in range(0, flat.size, _PIECE))
