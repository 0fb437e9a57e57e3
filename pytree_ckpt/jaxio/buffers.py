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


class HostViews:
    """`views(leaf, box)`: the elements of a box that lies in one device shard of this process."""

    def __init__(self, described: Described) -> None:
        self._arrays: Mapping[int, Any] = described.arrays
        self._codes = described.codes
        self._forms = described.forms
        self._cells: dict[int, tuple[Shape, dict[Shape, int]]] = {}

    def __call__(self, leaf: int, box: Box) -> npt.NDArray[Any]:
        array = self._arrays[leaf]
        if isinstance(array, np.ndarray):
            part = array[box.slices()]
            return part if part.dtype.isnative else part.astype(part.dtype.newbyteorder("="))
        code = self._codes[leaf]
        if code not in self._cells:
            self._cells[code] = _shard_of_cell(self._forms[code], array)
        cell, shard_at = self._cells[code]
        start = tuple(a // c * c for a, c in zip(box.start, cell, strict=True))
        shard = np.asarray(array.addressable_data(shard_at[start]))
        if shard.shape == box.shape:
            return shard
        return shard[box.slices(start)]


def _shard_of_cell(form: ArrayForm, array: jax.Array) -> tuple[Shape, dict[Shape, int]]:
    """Extent of a device shard, and the number of the first local shard at each start."""
    found: dict[Shape, int] = {}
    for number, shard in enumerate(array.addressable_shards):
        found.setdefault(box_of(shard.index, array.shape).start, number)
    return cell_of(form.sharding, form.shape), found
