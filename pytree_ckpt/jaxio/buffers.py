"""Host views of the shards that this process holds: no gather, and on CPU no copy."""

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from pytree_ckpt.format.boxes import Box, Shape
from pytree_ckpt.format.shardings import cell_of
from pytree_ckpt.jaxio.describe import Described
from pytree_ckpt.jaxio.shardings import box_of
from pytree_ckpt.plan.saving import ArrayForm

_COPY_NBYTES = 1 << 20
"""Arrays up to this size are copied by `freeze`."""
_RECENT_SHARDS = 8
"""Shards of accelerators whose copy on the host is kept for the next of their parts."""
_PINNED = "pinned_host"

HostArray = npt.NDArray[Any]


class _Shards:
    """The shards of an array that is no longer needed itself: host arrays, or on their way.

    They have numbers, as those of a jax.Array have.
    """

    __slots__ = ("_shards",)

    def __init__(self, shards: Mapping[int, Any]) -> None:
        self._shards = shards

    def addressable_data(self, number: int) -> Any:
        return self._shards[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the shards of an array are: extent of each, local number by start, and whose memory."""

    cell: Shape
    number_at: Mapping[Shape, int]
    is_on_host: bool
    is_small: bool


class HostViews:
    """`views(leaf, box)`: the elements of a box that lies in one device shard of this process."""

    def __init__(self, described: Described) -> None:
        self._arrays: dict[int, Any] = dict(described.arrays)
        self._codes = described.codes
        self._forms = described.forms
        self._places: dict[int, _Place] = {}
        self._fetched = functools.lru_cache(maxsize=_RECENT_SHARDS)(self._fetch)
        self._touched: set[int] = set()
        self._touching = threading.Lock()

    def freeze(self) -> None:
        """Hold what the caller may change, donate or delete from now on.

        numpy arrays are copied, each once. On CPU a view keeps the buffer of a jax.Array alive
        and unchanged, also when it is donated; small ones are copied all the same, because
        `jax.device_put` may have made them of memory that the caller still writes to. From
        accelerators all copies start at once, into pinned memory, and nobody waits for them.
        """
        copies: dict[Any, HostArray] = {}
        for leaf, array in self._arrays.items():
            if isinstance(array, np.ndarray):
                at = array.__array_interface__["data"][0]
                mark = (at, array.shape, array.strides, array.dtype)
                if mark not in copies:
                    copies[mark] = array.copy()
                self._arrays[leaf] = copies[mark]
            else:
                self._arrays[leaf] = self._frozen(leaf, array)

    def _frozen(self, leaf: int, array: jax.Array) -> _Shards:
        if not array.sharding.addressable_devices:
            return _Shards({})
        place = self._place(leaf, array)
        shards = {n: array.addressable_data(n) for n in place.number_at.values()}
        if not place.is_on_host:
            return _Shards(_started(shards))
        if place.is_small:
            return _Shards({n: np.asarray(shard).copy() for n, shard in shards.items()})
        return _Shards({n: np.asarray(shard) for n, shard in shards.items()})

    def release(self) -> None:
        """Let go of all arrays: whoever still has these views must not keep a whole state alive."""
        self._arrays.clear()
        self._fetched.cache_clear()

    def _place(self, leaf: int, array: Any) -> _Place:
        code = self._codes[leaf]
        if code not in self._places:
            self._places[code] = _place_of(self._forms[code], array)
        return self._places[code]

    def _fetch(self, leaf: int, number: int) -> HostArray:
        shard = self._arrays[leaf].addressable_data(number)
        if isinstance(shard, np.ndarray):
            return shard
        with jax.transfer_guard("allow"):
            return np.asarray(_same_buffer(shard))

    def _touch(self, leaf: int, array: Any) -> None:
        """Have the shards of an array made, by one thread.

        JAX makes them when they are first asked for, and needs a while for it. In JAX 0.10 two
        threads that ask at once make each of them twice, in any order.
        """
        if leaf not in self._touched:
            with self._touching:
                if isinstance(array, jax.Array):
                    array.addressable_data(0)
                self._touched.add(leaf)

    def __call__(self, leaf: int, box: Box) -> HostArray:
        array = self._arrays[leaf]
        if isinstance(array, np.ndarray):
            # Without dimensions an index gives a scalar, which loses bits, as of bools.
            part = array[box.slices()] if box.shape else array
            return part if part.dtype.isnative else part.astype(part.dtype.newbyteorder("="))
        self._touch(leaf, array)
        place = self._place(leaf, array)
        number = place.number_at.get(box.start)
        start = box.start
        if number is None:
            start = tuple(a // c * c for a, c in zip(box.start, place.cell, strict=True))
            number = place.number_at[start]
        if place.is_on_host:
            shard = np.asarray(array.addressable_data(number))
        else:
            shard = self._fetched(leaf, number)
        if shard.shape == box.shape:
            return shard
        return shard[box.slices(start)]


def _started(shards: Mapping[int, jax.Array]) -> dict[int, Any]:
    """Copies of shards of an accelerator, on their way to the host or there."""
    (device,) = shards[min(shards)].devices()
    with jax.transfer_guard("allow"), jax.ensure_compile_time_eval():
        if any(memory.kind == _PINNED for memory in device.addressable_memories()):
            # Arrays of their own: JAX sees to it that a later donation of the shards comes later.
            places = [
                SingleDeviceSharding(*x.devices(), memory_kind=_PINNED) for x in shards.values()
            ]
            return dict(zip(shards, jax.device_put(list(shards.values()), places), strict=True))
        own = {number: _same_buffer(shard) for number, shard in shards.items()}
        for shard in own.values():
            shard.copy_to_host_async()
        return {number: np.asarray(shard) for number, shard in own.items()}


def _same_buffer(shard: jax.Array) -> jax.Array:
    """Another array of the same buffer: what JAX keeps of it on the host goes with this one."""
    return jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])


def _place_of(form: ArrayForm, array: jax.Array) -> _Place:
    found: dict[Shape, int] = {(0,) * array.ndim: 0} if array.is_fully_replicated else {}
    if not found:
        for number, shard in enumerate(array.addressable_shards):
            found.setdefault(box_of(shard.index, array.shape).start, number)
    return _Place(
        cell=cell_of(form.sharding, form.shape),
        number_at=found,
        is_on_host=_is_on_host(array),
        is_small=array.nbytes <= _COPY_NBYTES,
    )


def _is_on_host(array: jax.Array) -> bool:
    devices: set[Any] = array.sharding.device_set
    return all(device.platform == "cpu" for device in devices)
