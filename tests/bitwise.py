"""What a leaf is to the last bit, so that two of them can be compared without `==` of values."""

import hashlib
import struct
from typing import Any

import jax
import numpy as np


def bits_of(leaf: Any) -> Any:
    """All that must survive a save and a load, as one comparable value.

    A `jax.Array` is what each of its devices holds, byte for byte; NaNs keep their payload and
    zeros their sign.
    """
    if isinstance(leaf, jax.Array):
        return _bits_of_jax(leaf)
    if isinstance(leaf, np.ndarray):
        return ("ndarray", leaf.dtype, leaf.shape, Content(leaf.tobytes()))
    if isinstance(leaf, np.generic):
        return (type(leaf), leaf.dtype, leaf.tobytes())
    if isinstance(leaf, float):
        return (type(leaf), struct.pack("<d", leaf))
    if isinstance(leaf, complex):
        return (type(leaf), struct.pack("<dd", leaf.real, leaf.imag))
    return (type(leaf), leaf)


def _bits_of_jax(array: jax.Array) -> Any:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _bits_of_jax(jax.random.key_data(array))
        return ("key", str(jax.random.key_impl(array)), array.shape, array.sharding, *data[4:])
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return (
        "jax.Array",
        array.dtype,
        array.shape,
        array.sharding,
        array.weak_type,
        array.committed,
        [(s.device.id, str(s.index), Content(np.asarray(s.data).tobytes())) for s in shards],
    )


class Content(bytes):
    """Bytes that a failed assertion can print."""

    def __repr__(self) -> str:
        if len(self) <= 64:
            return self.hex()
        return f"{len(self)} bytes, sha256 {hashlib.sha256(self).hexdigest()[:12]}"


def assert_same(found: Any, saved: Any) -> None:
    """Equal containers of equal classes, and in them leaves that are equal to the last bit."""
    assert jax.tree.structure(found) == jax.tree.structure(saved)
    pairs = zip(jax.tree.leaves(found), jax.tree_util.tree_leaves_with_path(saved), strict=True)
    different = [
        f"{jax.tree_util.keystr(path)}: {bits_of(now)} is not {bits_of(before)}"
        for now, (path, before) in pairs
        if bits_of(now) != bits_of(before)
    ]
    assert not different, "\n".join(different)


def struct_of(tree: Any) -> Any:
    """The tree with a `ShapeDtypeStruct` for each `jax.Array`; it names committed devices only."""

    def struct_of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding if leaf.committed else None,
            weak_type=getattr(leaf, "weak_type", False),
        )

    return jax.tree.map(struct_of_leaf, tree)
