"""Zarr arrays through TensorStore, opened from what the manifest says and never from a file."""

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from pytree_ckpt.format import zarr
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.store import contents
from pytree_ckpt.store.failures import storage_errors
from pytree_ckpt.store.locations import Location

ALIGNMENT = 64


def context(*, threads: int) -> ts.Context:
    """Resources of one save or one load. No cache: a reader must see the disk."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "file_io_sync": True,
            # Each name is written by one writer, in a folder that nobody else writes to.
            "file_io_locking": {"mode": "none"},
        },
        _pools(threads),
    )


@functools.cache
def _pools(threads: int) -> ts.Context:
    """TensorStore's threads, which stay as long as the process.

    Whoever hands them a task touches them once more when it, and all that waits for it, may be
    done. If they went with the last store that uses them, that would be memory that is gone.
    """
    return ts.Context(
        {
            "data_copy_concurrency": {"limit": threads},
            "file_io_concurrency": {"limit": max(4, 2 * threads)},
        }
    )


def open_array(
    folder: Location, metadata: dict[str, Any], ctx: ts.Context, *, write: bool
) -> ts.TensorStore:
    """An array in `folder` with this metadata; no file is read or written by opening it."""
    options: dict[str, Any] = (
        # TensorStore skips chunks equal to the fill value, which would make a lost chunk
        # read as zeros.
        {"store_data_equal_to_fill_value": True} if write else {"fill_missing_data_reads": False}
    )
    spec = {
        "driver": "zarr3",
        "metadata": metadata,
        **options,
    }
    with storage_errors(f"opening {folder.in_errors}"):
        return ts.open(
            spec,
            kvstore=folder.kvstore(),
            open=True,
            assume_metadata=True,
            read=not write,
            write=write,
            context=ctx,
        ).result()


def open_leaf(
    data: Location, name: str, spec: ArraySpec, ctx: ts.Context, *, write: bool
) -> ts.TensorStore:
    """The array of a leaf, its elements as `storage_dtype` has them."""
    folder = contents.array_folder(data, name)
    metadata = zarr.array_metadata(spec)
    if spec.dtype == "bool":
        metadata |= {"data_type": "uint8", "fill_value": 0}
    return open_array(folder, metadata, ctx, write=write)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> npt.NDArray[Any]:
    """A new C-order array whose memory XLA can use as it is.

    Large allocations of numpy are aligned to 16 bytes only; the CPU backend of JAX takes over a
    buffer without a copy if it is aligned to 64.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
