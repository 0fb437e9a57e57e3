"""Host views of the shards that this process holds: no gather, and on CPU no copy."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from pytree_ckpt.format.boxes import Box, Shape
from pytree_ckpt.format.shardings import cell_of
from pytree_ckpt.jaxio.describe import Described
from pytree_ckpt.jaxio.shardings import box_of
from pytree_ckpt.plan.saving import ArrayForm

_COPY_NBYTES = 1 << 20
"""Arrays up to this size are copied by `freeze`."""


class _Shards:
    """Host memory of the shards of an array that is no longer needed itself."""

    __slots__ = ("_views",)

    def __init__(self, views: Mapping[int, npt.NDArray[Any]]) -> None:
        self._views = views

    def addressable_data(self, number: int) -> npt.NDArray[Any]:
        return self._views[number]


class HostViews:
    """`views(leaf, box)`: the elements of a box that lies in one device shard of this process."""

    def __init__(self, described: Described) -> None:
        self._arrays: dict[int, Any] = dict(described.arrays)
        self._codes = described.codes
        self._forms = described.forms
        self._cells: dict[int, tuple[Shape, dict[Shape, int]]] = {}
        for array in described.arrays.values():
            if not isinstance(array, np.ndarray):
                # JAX makes the shards of an array when they are first asked for. In JAX 0.10 two
                # threads that ask at once make each of them twice, in any order.
                array.addressable_data(0)

    def freeze(self) -> None:
        """Hold what the caller may change, donate or delete from now on.

        numpy arrays are copied, each once. On CPU a view keeps the buffer of a jax.Array alive
        and unchanged, also when it is donated; small ones are copied all the same, because
        `jax.device_put` may have made them of memory that the caller still writes to. On
        accelerators all transfers start at once and are waited for.
        """
        copies: dict[Any, npt.NDArray[Any]] = {}
        for array in self._arrays.values():
            if not isinstance(array, np.ndarray) and array.sharding.memory_kind != "pinned_host":
                array.copy_to_host_async()
        for leaf, array in self._arrays.items():
            if isinstance(array, np.ndarray):
                place = array.__array_interface__
                mark = (place["data"][0], array.shape, array.strides, array.dtype)
                if mark not in copies:
                    copies[mark] = array.copy()
                self._arrays[leaf] = copies[mark]
            else:
                self._arrays[leaf] = self._frozen_shards(leaf, array)

    def release(self) -> None:
        """Let go of all arrays: whoever still has these views must not keep a whole state alive."""
        self._arrays.clear()

    def _frozen_shards(self, leaf: int, array: jax.Array) -> "_Shards":
        _, shard_at = self._cell_of(leaf, array)
        views = {number: np.asarray(array.addressable_data(number)) for number in shard_at.values()}
        if array.nbytes <= _COPY_NBYTES:
            views = {number: view.copy() for number, view in views.items()}
        return _Shards(views)

    def _cell_of(self, leaf: int, array: Any) -> tuple[Shape, dict[Shape, int]]:
        code = self._codes[leaf]
        if code not in self._cells:
            self._cells[code] = _shard_of_cell(self._forms[code], array)
        return self._cells[code]

    def __call__(self, leaf: int, box: Box) -> npt.NDArray[Any]:
        array = self._arrays[leaf]
        if isinstance(array, np.ndarray):
            part = array[box.slices()]
            return part if part.dtype.isnative else part.astype(part.dtype.newbyteorder("="))
        cell, shard_at = self._cell_of(leaf, array)
        start = tuple(a // c * c for a, c in zip(box.start, cell, strict=True))
        shard = np.asarray(array.addressable_data(shard_at[start]))
        if shard.shape == box.shape:
            return shard
        return shard[box.slices(start)]


def _shard_of_cell(form: ArrayForm, array: jax.Array) -> tuple[Shape, dict[Shape, int]]:
    """Extent of a device shard, and the number of the first local shard at each start."""
    if array.is_fully_replicated:
        return cell_of(form.sharding, form.shape), {(0,) * array.ndim: 0}
    found: dict[Shape, int] = {}
    for number, shard in enumerate(array.addressable_shards):
        found.setdefault(box_of(shard.index, array.shape).start, number)
    return cell_of(form.sharding, form.shape), found
