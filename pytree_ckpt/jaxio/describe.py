"""The leaves of a tree that is saved, as plain data; what cannot be saved, with the reason."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pytree_ckpt.errors import UnsupportedLeafError
from pytree_ckpt.format import dtypes, values
from pytree_ckpt.format.arrays import MAX_NDIM, MAX_ZARR_NDIM
from pytree_ckpt.format.manifest import PER_PROCESS, VALUE
from pytree_ckpt.format.paths import Path, to_text
from pytree_ckpt.format.per_process import PerProcess
from pytree_ckpt.format.trees import Tree
from pytree_ckpt.format.values import Value
from pytree_ckpt.jaxio import keys, shardings, trees
from pytree_ckpt.plan.chunking import PACK_BELOW_NBYTES
from pytree_ckpt.plan.saving import ArrayForm

MAX_VALUE_BYTES = 1 << 20
"""Longest `str` or `bytes` leaf; longer ones belong in an array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A tree as `save` sees it.

    Attributes:
        paths: Path of each leaf.
        forms: The distinct forms of the arrays.
        codes: For each leaf an index into `forms`, or `VALUE`, or `PER_PROCESS`.
        arrays: The arrays by leaf; keys as their data.
        values: The Python values, in order.
        per_process: The values of this process, by leaf.
        copied: Leaves that every process has a copy of: host arrays, and arrays that are
            on devices of one process only. Process 0 saves its own.
    """

    tree: Tree
    paths: list[Path]
    forms: tuple[ArrayForm, ...]
    codes: list[int]
    arrays: dict[int, Any]
    values: list[Value]
    per_process: dict[int, Any]
    copied: tuple[int, ...]


def describe(tree: Any) -> Described:
    """Describe every leaf of a tree.

    Raises:
        UnsupportedLeafError: Leaves that cannot be saved, all of them, each with the reason.
    """
    flat = trees.flatten(tree)
    found = _Leaves()
    for index, leaf in enumerate(flat.leaves):
        found.enter(index, leaf, flat.paths[index])
    refused = [*flat.refused, *found.refused]
    if refused:
        raise UnsupportedLeafError(refused)
    return Described(
        tree=flat.tree,
        paths=flat.paths,
        forms=tuple(found.forms),
        codes=found.codes,
        arrays=found.arrays,
        values=found.values,
        per_process=found.per_process,
        copied=tuple(index for index, array in found.arrays.items() if _is_copied(array)),
    )


class _RefusedError(Exception):
    """Why a leaf cannot be saved."""


class _Leaves:
    """Leaves sorted into arrays and values; equal forms are made once."""

    def __init__(self) -> None:
        self.forms: list[ArrayForm] = []
        self.codes: list[int] = []
        self.arrays: dict[int, Any] = {}
        self.values: list[Value] = []
        self.per_process: dict[int, Any] = {}
        self.refused: list[tuple[str, str]] = []
        self._known: dict[Any, int] = {}

    def enter(self, index: int, leaf: Any, path: Path) -> None:
        """Take one leaf."""
        try:
            self.codes.append(self._code(index, leaf))
        except _RefusedError as reason:
            self.codes.append(VALUE)
            self.refused.append((to_text(path), str(reason)))

    def _code(self, index: int, leaf: Any) -> int:
        if isinstance(leaf, jax.core.Tracer):
            raise _RefusedError("is a tracer: save outside of jit, grad and vmap")
        if isinstance(leaf, jax.Array):
            return self._jax(index, leaf)
        if isinstance(leaf, np.generic):
            self.arrays[index] = np.asarray(leaf)
            return self._numpy("scalar", self.arrays[index])
        if type(leaf) in (np.ndarray, np.memmap):
            self.arrays[index] = leaf
            return self._numpy("numpy", leaf)
        if isinstance(leaf, PerProcess):
            self.per_process[index] = _json_like(leaf.value)
            return PER_PROCESS
        if type(leaf) in (bool, int, float, complex, str, bytes):
            self.values.append(_checked_value(leaf))
            return VALUE
        raise _RefusedError(_advice(leaf))

    def _jax(self, index: int, array: jax.Array) -> int:
        if array.is_deleted():
            raise _RefusedError("is an array that was deleted (donated to a jitted function?)")
        if keys.is_key_dtype(array.dtype):
            return self._keys(index, array)
        self.arrays[index] = array
        mark = (array.dtype, array.shape, array.sharding, _is_weak(array), _is_committed(array))
        code = self._known.get(mark)
        return self._new_form(mark, array, None) if code is None else code

    def _keys(self, index: int, array: jax.Array) -> int:
        if not keys.is_known_impl(array):
            raise _RefusedError(
                f"has keys of {array.dtype}, an implementation that JAX cannot find by its name"
            )
        data = keys.data_of(array)
        self.arrays[index] = data
        mark = (array.dtype, data.shape, data.sharding, False, _is_committed(array))
        code = self._known.get(mark)
        return self._new_form(mark, data, array) if code is None else code

    def _new_form(self, mark: Any, array: jax.Array, logical: jax.Array | None) -> int:
        _check_rank(array)
        try:
            sharding = shardings.describe(array.sharding, array.shape)
            if _is_copied(array):
                sharding = shardings.in_process_0(sharding)
        except shardings.UnsupportedShardingError as error:
            raise _RefusedError(f"has a sharding that cannot be saved: {error}") from None
        return self._add(
            mark,
            ArrayForm(
                kind="jax" if logical is None else "key",
                dtype=_dtype_name(np.dtype(array.dtype)),
                shape=tuple(array.shape),
                sharding=sharding,
                weak_type=mark[3],
                committed=mark[4],
                key_impl=None if logical is None else keys.impl_of_array(logical),
                key_ndim=0 if logical is None else array.ndim - logical.ndim,
            ),
        )

    def _numpy(self, kind: Any, array: np.ndarray[Any, Any]) -> int:
        mark = (kind, array.dtype, array.shape)
        code = self._known.get(mark)
        if code is not None:
            return code
        _check_rank(array)
        name = _dtype_name(array.dtype)
        return self._add(mark, ArrayForm(kind=kind, dtype=name, shape=array.shape, sharding=None))

    def _add(self, mark: Any, form: ArrayForm) -> int:
        self._known[mark] = len(self.forms)
        self.forms.append(form)
        return len(self.forms) - 1


def _check_rank(array: Any) -> None:
    """Refuse what Zarr cannot hold; small arrays are packed and may have a dimension more."""
    most = MAX_NDIM if array.nbytes < PACK_BELOW_NBYTES else MAX_ZARR_NDIM
    if array.ndim > most:
        raise _RefusedError(f"has {array.ndim} dimensions, more than {most}: reshape it")


def _is_copied(array: Any) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def _is_weak(array: Any) -> bool:
    return bool(getattr(array, "weak_type", False))


def _is_committed(array: Any) -> bool:
    return bool(getattr(array, "committed", True))


def _dtype_name(dtype: np.dtype[Any]) -> str:
    name = dtypes.name_of(dtype)
    if name is None:
        raise _RefusedError(
            f"has the dtype {dtype}, which is not one of JAX's or ml_dtypes'; save "
            "numbers, such as its .view(numpy.int64), or its elements as str or bytes"
        )
    return name


def _checked_value(value: Value) -> Value:
    if isinstance(value, (str, bytes)) and len(value) > MAX_VALUE_BYTES:
        raise _RefusedError(
            f"is {type(value).__name__} of length {len(value)}, more than {MAX_VALUE_BYTES}; "
            "store it as an array: numpy.frombuffer(data, numpy.uint8)"
        )
    try:
        values.to_wire(value)
        if isinstance(value, str):
            value.encode()
    except (ValueError, OverflowError) as error:
        raise _RefusedError(f"cannot be written: {error}") from None
    return value


def _json_like(value: Any) -> Any:
    try:
        return values.check_metadata(value, "its value")
    except (TypeError, ValueError) as error:
        raise _RefusedError(f"is a PerProcess that cannot be written: {error}") from None


def _advice(leaf: Any) -> str:
    kind = type(leaf)
    if callable(leaf):
        return (
            f"is a {kind.__name__}, not data; save only arrays, e.g. "
            "eqx.filter(model, eqx.is_array), and rebuild the rest from code"
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "is a ShapeDtypeStruct: a shape without values cannot be saved"
    if isinstance(leaf, np.ma.MaskedArray):
        return "is a masked array; save its .data and .mask as two leaves"
    if isinstance(leaf, np.ndarray):
        return f"is a {kind.__name__}; save numpy.asarray(it)"
    return (
        f"is a {kind.__module__}.{kind.__qualname__}; leaves are arrays, numbers, str, bytes "
        "and PerProcess values: register the class as a pytree, or convert it"
    )
