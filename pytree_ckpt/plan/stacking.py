"""The form of a stack of arrays, and of one index of an array."""

import dataclasses

from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.shardings import Named, Sharding, Tiled, cell_of


def stacks_with(a: ArraySpec, b: ArraySpec) -> bool:
    """Whether two arrays can be parts of one stack."""
    return (a.kind, a.dtype, a.logical_shape, a.key_impl) == (
        b.kind,
        b.dtype,
        b.logical_shape,
        b.key_impl,
    )


def stacked(spec: ArraySpec, count: int) -> ArraySpec:
    """A stack of `count` arrays, in the layout of one behind a leading dimension.

    Raises:
        ValueError: It would have too many dimensions or bytes.

    Example:
        >>> part = ArraySpec(
        ...     kind="numpy",
        ...     dtype="int8",
        ...     shape=(4,),
        ...     sharding=None,
        ...     storage="packed",
        ...     shard_shape=(4,),
        ...     chunk_shape=(4,),
        ... )
        >>> stacked(part, 3).shape, index_of(stacked(part, 3)) == part
        ((3, 4), True)
    """
    sharding = spec.sharding
    if isinstance(sharding, Named):
        sharding = dataclasses.replace(sharding, spec=((), *sharding.spec))
    elif isinstance(sharding, Tiled):
        sharding = dataclasses.replace(sharding, cell=(count, *sharding.cell))
    return dataclasses.replace(
        spec,
        kind="numpy" if spec.kind == "scalar" else spec.kind,
        shape=(count, *spec.shape),
        sharding=sharding,
        shard_shape=(1, *spec.shard_shape),
        chunk_shape=(1, *spec.chunk_shape),
    )


def cuts_leading(spec: ArraySpec) -> bool:
    """Whether the leading dimension lies on several devices in parts."""
    return spec.sharding is not None and cell_of(spec.sharding, spec.shape)[0] != spec.shape[0]


def index_of(spec: ArraySpec) -> ArraySpec:
    """One index of the leading dimension, in the layout that the rest has."""
    sharding: Sharding | None = spec.sharding
    if isinstance(sharding, Named):
        sharding = dataclasses.replace(sharding, spec=sharding.spec[1:])
    elif isinstance(sharding, Tiled):
        cut = cuts_leading(spec)
        sharding = None if cut else dataclasses.replace(sharding, cell=sharding.cell[1:])
    return dataclasses.replace(
        spec,
        shape=spec.shape[1:],
        sharding=sharding,
        shard_shape=spec.shard_shape[1:],
        chunk_shape=spec.chunk_shape[1:],
    )
