"""How arrays are cut: a device shard into zarr shards (files), a zarr shard into chunks."""

import functools
import math

from pytree_ckpt.format.boxes import Shape

MIB = 1 << 20
MAX_SHARD_NBYTES = 64 * MIB
"""A zarr shard is written in one piece, so its size bounds the memory of a writer."""
MAX_CHUNK_NBYTES = 16 * MIB
"""A chunk is the unit of digest and of ranged reads."""
PACK_BELOW_NBYTES = MIB
"""Smaller shards go into the packed array of their process."""
MIN_SLICE_NBYTES = MIB
"""Replicas share the writing of a device shard in slices of at least this size."""


def cut(shape: Shape, itemsize: int, *, max_nbytes: int, min_parts: int = 1) -> Shape:
    """Shape of equal parts of an array, each of at most about `max_nbytes`.

    Leading dimensions are cut first, because then a part is one byte range of the array. A
    dimension is cut only into a number of parts that divides it; where its divisors would make
    parts much smaller than asked for, the parts stay larger.

    Example:
        >>> cut((4096, 4096), 4, max_nbytes=16 << 20)
        (1024, 4096)
        >>> cut((1009, 64), 4, max_nbytes=1 << 16)
        (1009, 16)
    """
    part = list(shape)
    for dim, extent in enumerate(shape):
        nbytes = math.prod(part) * itemsize
        done = math.prod(shape) // max(math.prod(part), 1)
        wanted = max(-(-nbytes // max_nbytes), -(-min_parts // done))
        if wanted <= 1:
            break
        part[dim] = extent // _parts(extent, wanted)
    return tuple(part)


@functools.lru_cache(maxsize=4096)
def _parts(extent: int, wanted: int) -> int:
    """A divisor of `extent` near `wanted`: the next above, unless the next below is nearer."""
    above, below = extent, 1
    for small in range(1, math.isqrt(extent) + 1):
        if extent % small == 0:
            for divisor in (small, extent // small):
                if divisor >= wanted:
                    above = min(above, divisor)
                else:
                    below = max(below, divisor)
    if above < wanted:
        return above
    return above if above <= 8 * wanted else below


def shard_shape(cell: Shape, itemsize: int, *, holders: int) -> Shape:
    """The zarr shards of a device shard that `holders` processes can share out."""
    nbytes = math.prod(cell) * itemsize
    slices = min(holders, max(nbytes // MIN_SLICE_NBYTES, 1))
    return cut(cell, itemsize, max_nbytes=MAX_SHARD_NBYTES, min_parts=slices)


def chunk_shape(shard: Shape, itemsize: int) -> Shape:
    """The chunks of a zarr shard."""
    return cut(shard, itemsize, max_nbytes=MAX_CHUNK_NBYTES)
