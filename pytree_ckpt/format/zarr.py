"""Zarr v3 metadata of the arrays of a checkpoint, derived from the manifest alone."""

import json
from typing import Any

from pytree_ckpt.format import dtypes
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Shape
from pytree_ckpt.format.tables import Packed

PACKED_ALIGNMENT = 64
"""Start of each packed shard, in bytes: a loaded view of it is aligned for XLA."""


def array_metadata(spec: ArraySpec) -> dict[str, Any]:
    """`zarr.json` of an array leaf."""
    return _metadata(
        spec.shape,
        dtype=dtypes.zarr_dtype(spec.dtype),
        shard_shape=spec.shard_shape,
        chunk_shape=spec.chunk_shape,
        codec=spec.codec,
    )


def packed_metadata(packed: Packed, codec: str) -> dict[str, Any]:
    """`zarr.json` of the packed array of a process."""
    return _metadata(
        (packed.nbytes,),
        dtype="uint8",
        shard_shape=(packed.shard_nbytes,),
        chunk_shape=(packed.chunk_nbytes,),
        codec=codec,
    )


def _metadata(
    shape: Shape, *, dtype: str, shard_shape: Shape, chunk_shape: Shape, codec: str
) -> dict[str, Any]:
    order = {"name": "bytes", "configuration": {"endian": "little"}}
    if dtype in ("bool", "int8", "uint8") or dtype.startswith("float8"):
        order = {"name": "bytes"}
    inner: list[dict[str, Any]] = [order]
    if codec == "zstd":
        inner.append({"name": "zstd", "configuration": {"level": 3, "checksum": False}})
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": list(chunk_shape),
            "codecs": inner,
            "index_codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
            "index_location": "end",
        },
    }
    fill: Any = False if dtype == "bool" else [0.0, 0.0] if dtype.startswith("complex") else 0
    if dtype.startswith(("float", "bfloat")):
        fill = 0.0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard_shape)}},
        # A dot keeps all shards of an array in one folder, which TensorStore itself fsyncs.
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill,
        "codecs": [sharding],
    }


def shard_file(position: Shape) -> str:
    """Name of the file of the shard at a position of the grid.

    Example:
        >>> shard_file((0, 3)), shard_file(())
        ('c.0.3', 'c')
    """
    return ".".join(["c", *map(str, position)])


def index_nbytes(chunks: int) -> int:
    """Bytes of the index that ends a shard file: offset and size of each chunk, and a crc32c."""
    return 16 * chunks + 4


def to_json(metadata: dict[str, Any]) -> bytes:
    """Deterministic bytes of a `zarr.json`."""
    return (json.dumps(metadata, indent=1) + "\n").encode()
