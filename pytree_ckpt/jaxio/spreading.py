"""Bytes from each process to each other one, through their devices."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.jaxio import processes

Array = npt.NDArray[Any]

_AXIS = "process"
_WORD = np.dtype(np.uint32)
"""What moves: no backend lacks it, and no XLA program changes its bits."""


class Spreader:
    """Moves `slot_nbytes` from each process to each other one, by one device of each.

    The words are placed with one row for each sender; the identity, jitted with another sharding
    for its result, leaves one column for each receiver. XLA makes a single all-to-all of it.
    """

    def __init__(self, slot_nbytes: int) -> None:
        count, self._words = processes.process_count(), slot_nbytes // _WORD.itemsize
        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self._device = first[processes.process_index()]
        self._mesh = Mesh(np.array([first[process] for process in range(count)]), (_AXIS,))
        rows = NamedSharding(self._mesh, PartitionSpec(_AXIS))  # type: ignore[no-untyped-call]
        columns = NamedSharding(self._mesh, PartitionSpec(None, _AXIS))  # type: ignore[no-untyped-call]
        self._rows, self._shape = rows, (count, count, self._words)
        self._moved = jax.jit(_identity, out_shardings=columns)

    def spread(self, send: Array) -> Array:
        """Row `q` of what this process sends goes to process `q`; row `p` is what `p` sent here.

        All processes call it together. Both arrays are `uint8[processes, slot_nbytes]`; the one
        that was sent may be written again.

        Raises:
            CheckpointError: The transfer failed, as when another process has ended.
        """
        try:
            # The caller may have switched jit off, or have a mesh of its own in use.
            with jax.disable_jit(False), jax.set_mesh(self._mesh):
                row = jax.device_put(send.view(_WORD)[np.newaxis], self._device)
                words = jax.make_array_from_single_device_arrays(self._shape, self._rows, [row])
                column = self._moved(words).addressable_data(0)
                received: Array = jax.device_get(column)
        except JaxRuntimeError as error:
            raise CheckpointError(f"the transfer between the processes failed: {error}") from None
        return received.reshape(len(send), self._words).view(np.uint8)


def _identity(words: jax.Array) -> jax.Array:
    return words
