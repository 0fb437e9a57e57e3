"""Elements and numbers in another dtype, where the user asked for it.

Floats that do not fit become infinities, as numpy has it, or what the dtype has instead. Where an
integer cannot hold a number, or a float has no NaN, numpy gives something else without a word; here
that is an error.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pytree_ckpt.format import dtypes

_PYTHON: Mapping[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
}


def cast(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """An array in the dtype `name`.

    Raises:
        ValueError: An integer dtype that cannot hold every element, or NaNs for one without.

    Example:
        >>> cast(np.float32([1.5, 3e38]), "float16")
        array([1.5, inf], dtype=float16)
        >>> cast(np.float32([300.0]), "int8")
        Traceback (most recent call last):
        ValueError: int8 cannot hold all of the float32 elements
    """
    dtype, saved = dtypes.dtype_of(name), array.dtype
    if array.dtype == bool:
        # Memory may have others than 0 and 1 for True, which small dtypes would take for numbers.
        array = array.view(np.uint8).astype(bool).view(np.uint8)
    with np.errstate(all="ignore"):
        if dtypes.kind_of(name) == "int" and array.size and not _fits(array, name):
            raise ValueError(f"{name} cannot hold all of the {saved} elements")
        if not dtypes.has_nan(name) and np.isnan(array).any():
            raise ValueError(f"{name} has no NaN, and the {saved} elements have")
        try:
            return array.astype(dtype)
        except TypeError:
            # numpy knows no way between some of the small dtypes; float64 holds each of them.
            return array.astype(np.float64).astype(dtype)


def _fits(array: npt.NDArray[Any], name: str) -> bool:
    low, high = dtypes.int_limits(name)
    if dtypes.kind_of(str(array.dtype)) == "float":
        values = array.astype(np.float64)
        if not np.isfinite(values).all():
            return False
        return int(values.min()) >= low and int(values.max()) <= high
    return int(array.min()) >= low and int(array.max()) <= high


def cast_value(value: Any, name: str) -> npt.NDArray[Any]:
    """A Python number as an array without dimensions.

    Raises:
        ValueError: A dtype that cannot hold it.
    """
    kind = dtypes.kind_of(name)
    if kind == "int":
        number = as_python(value, "int")
        low, high = dtypes.int_limits(name)
        if not low <= number <= high:
            raise ValueError(f"{name} cannot hold {value!r}")
        return np.asarray(number, object).astype(dtypes.dtype_of(name))
    if kind == "float" and isinstance(value, int):
        value = _float_of(value)
    return cast(np.asarray(value), name)


def _float_of(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def as_python(value: Any, kind: str) -> Any:
    """A number as a Python `bool`, `int`, `float` or `complex`.

    Raises:
        ValueError: A NaN or an infinity as an `int`.
    """
    if kind == "float" and type(value) is int:
        return _float_of(value)
    try:
        return _PYTHON[kind](value)
    except OverflowError as error:
        raise ValueError(str(error)) from None
