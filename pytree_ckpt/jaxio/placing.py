"""Verified host memory to arrays on devices, many at a time."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from pytree_ckpt.format.boxes import Box, Shape, whole
from pytree_ckpt.jaxio import keys, processes
from pytree_ckpt.jaxio.shardings import box_of

Array = npt.NDArray[Any]


class Layout:
    """The distinct boxes of a sharding in this process, and the devices that hold each."""

    __slots__ = ("_holders", "_number_of", "boxes", "places")

    def __init__(self, sharding: Any, shape: Shape) -> None:
        numbers: dict[Box, int] = {}
        self._number_of: dict[Any, int] = {}
        self.places: list[tuple[int, SingleDeviceSharding]] = []
        index_map = sharding.addressable_devices_indices_map(shape)
        for device, index in index_map.items():
            box = whole(shape) if index is None else box_of(index, shape)
            number = numbers.setdefault(box, len(numbers))
            if index is not None:
                self._number_of[_hashable(index)] = number
            kind = sharding.memory_kind
            self.places.append((number, SingleDeviceSharding(device, memory_kind=kind)))
        self.boxes = tuple(numbers)
        self._holders: list[list[tuple[int, Any]]] = [[] for _ in numbers]
        for at, (number, place) in enumerate(self.places):
            self._holders[number].append((at, place))

    def number(self, index: tuple[slice, ...] | None) -> int:
        """The box that JAX means by an index."""
        return 0 if index is None else self._number_of[_hashable(index)]

    def holders(self, box: int) -> list[tuple[int, Any]]:
        """Position among the local devices, and placement, of each device that holds a box."""
        return self._holders[box]


def _hashable(index: tuple[slice, ...]) -> tuple[Any, ...]:
    return tuple((s.start, s.stop) for s in index)


def wanters(sharding: Any, shape: Shape) -> dict[Box, tuple[int, ...]]:
    """The distinct boxes of a sharding in all processes, ascending, and who holds each.

    Of what is on devices of this process alone, or on its default device or its host, each
    process has its own.
    """
    everyone = tuple(range(processes.process_count()))
    if sharding is None:
        return {whole(shape): everyone}
    found: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        box = whole(shape) if index is None else box_of(index, shape)
        found.setdefault(box, set()).add(device.process_index)
    is_own = set().union(*found.values()) == {processes.process_index()}
    ascending = sorted(found, key=lambda box: (box.start, box.stop))
    return {box: everyone if is_own else tuple(sorted(found[box])) for box in ascending}


def from_boxes(shape: Shape, sharding: Any, layout: Layout, buffers: Sequence[Array]) -> jax.Array:
    """A global array from the boxes that this process holds; one call for all its devices."""
    return jax.make_array_from_callback(
        shape, sharding, lambda index: buffers[layout.number(index)]
    )


def put(buffers: Sequence[Array], places: Sequence[Any]) -> list[jax.Array]:
    """One call for all transfers; returns when the buffers may be let go.

    On CPU an aligned buffer becomes the array without a copy, so it must not be written again.
    A place of None is the default device, without commitment to it.
    """
    if not buffers:
        return []
    arrays: list[jax.Array] = jax.device_put(list(buffers), list(places))
    wait_for(arrays)
    return arrays


def wait_for(arrays: Sequence[jax.Array]) -> None:
    """Return when transfers to these arrays are done and host memory may be let go."""
    for array in arrays:
        array.block_until_ready()


def replicate(buffer: Array, sharding: Any) -> jax.Array:
    """A small array, whole on the devices of a sharding, or on the default device."""
    if sharding is None:
        array: jax.Array = jax.device_put(buffer)
        return array
    # Where some devices are of other processes, `device_put` would wait for these.
    return jax.make_array_from_callback(buffer.shape, sharding, lambda index: buffer[index])


def assemble(
    shape: Shape, sharding: Any, shards: Sequence[jax.Array], *, dtype: np.dtype[Any]
) -> jax.Array:
    """A global array from its shards in the order of the local devices, of which may be none."""
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards), dtype=dtype)


def finish(array: jax.Array, *, key_impl: str | None, weak_type: bool) -> jax.Array:
    """Keys from key data; the weak type that a Python scalar gave an array."""
    if key_impl is not None:
        return keys.wrap(array, key_impl)
    return _weakly_typed(array) if weak_type and not array.weak_type else array


def _weakly_typed(array: jax.Array) -> jax.Array:
    """An array of the same buffers that is weakly typed.

    No public function makes one of any shape, and the result of an operation would leave the
    memory that the array is in.
    """
    of_class: Any = type(array)
    shards = [shard.data for shard in array.addressable_shards]
    weak: jax.Array = of_class(
        array.aval.update(weak_type=True), array.sharding, shards, committed=array.committed
    )
    return weak
