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
    """Shape of equal parts of an array, each of about `max_nbytes`, at most half as much again.

    Leading dimensions are cut first, because then a part is one byte range of the array. A
    dimension is cut only into a number of parts that divides it. Smaller parts are taken down to
    a sixteenth; where no divisor serves, the next dimension is cut too, or parts stay larger.

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
        pieces = -(-min_parts // done)
        wanted = max(-(-nbytes // max_nbytes), pieces)
        if wanted <= 1:
            break
        least = max(-(-2 * nbytes // (3 * max_nbytes)), pieces)
        parts = _parts(extent, least, wanted)
        part[dim] = extent // parts
        if extent > 1 and least <= parts:
            break
    return tuple(part)


@functools.lru_cache(maxsize=4096)
def _parts(extent: int, least: int, wanted: int) -> int:
    """A divisor of `extent`: the first from `wanted` on, or a smaller one that is enough.

    If the first is more than sixteen times `wanted`, the greatest below `least`.
    """
    divisors = sorted(
        divisor
        for small in range(1, math.isqrt(extent) + 1)
        if extent % small == 0
        for divisor in {small, extent // small}
    )
    above = [divisor for divisor in divisors if divisor >= wanted]
    enough = [divisor for divisor in divisors if least <= divisor < wanted]
    if above and above[0] <= 2 * wanted:
        return above[0]
    if enough:
        return enough[-1]
    if above and above[0] <= 16 * wanted:
        return above[0]
    return [divisor for divisor in divisors if divisor < least or divisor == 1][-1]


def shard_shape(
    cell: Shape, itemsize: int, *, holders: int, max_nbytes: int | None = None
) -> Shape:
    """The zarr shards of a device shard that `holders` processes can share out."""
    nbytes = math.prod(cell) * itemsize
    slices = min(holders, max(nbytes // MIN_SLICE_NBYTES, 1))
    return cut(cell, itemsize, max_nbytes=max_nbytes or MAX_SHARD_NBYTES, min_parts=slices)


def chunk_shape(shard: Shape, itemsize: int, *, max_nbytes: int | None = None) -> Shape:
    """The chunks of a zarr shard."""
    return cut(shard, itemsize, max_nbytes=max_nbytes or MAX_CHUNK_NBYTES)
