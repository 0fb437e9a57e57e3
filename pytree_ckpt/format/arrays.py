"""How one array is stored: its logical form, its shards, its chunks."""

import math
from dataclasses import dataclass, field
from typing import Literal

from pytree_ckpt.format import dtypes
from pytree_ckpt.format.boxes import Box, Grid, Shape
from pytree_ckpt.format.shardings import Sharding, cell_of, devices_of

ArrayKind = Literal["jax", "key", "numpy", "scalar"]
ARRAY_KINDS: tuple[ArrayKind, ...] = ("jax", "key", "numpy", "scalar")
"""A `jax.Array`, a typed key array (stored as its key data), a `numpy.ndarray`, a numpy scalar."""
Storage = Literal["array", "packed", "empty"]
STORAGES: tuple[Storage, ...] = ("array", "packed", "empty")
"""A Zarr array of its own; shards in the packed arrays of the processes; no bytes at all."""
CODECS = ("raw", "zstd")
MAX_NDIM = 32
MAX_ZARR_NDIM = 31
"""Most dimensions of an array that is not packed; TensorStore shards no more."""
MAX_ARRAY_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """The stored form of an array; many leaves share one.

    Attributes:
        shape: Shape as stored. For keys it ends with the `key_ndim` dimensions of the key data.
        sharding: None for a host array.
        shard_shape: Cell of the grid of zarr shards; a shard is written by one process.
        chunk_shape: Cell of the grid of chunks within a shard; a chunk has one digest.
        weak_type: Whether JAX promotes the array like a Python scalar.
        committed: Whether JAX holds the array to its device.
    """

    kind: ArrayKind
    dtype: str
    shape: Shape
    sharding: Sharding | None
    storage: Storage
    shard_shape: Shape
    chunk_shape: Shape
    codec: str = "raw"
    weak_type: bool = False
    committed: bool = True
    key_impl: str | None = None
    key_ndim: int = 0
    shards: Grid = field(init=False, repr=False, compare=False)
    """The grid of shards over the array."""
    chunks: Grid = field(init=False, repr=False, compare=False)
    """The grid of chunks over a shard."""

    def __post_init__(self) -> None:
        if not dtypes.is_known(self.dtype):
            raise ValueError(f"dtype {self.dtype!r} is not known to this release and ml_dtypes")
        if len(self.shape) > MAX_NDIM or any(extent < 0 for extent in self.shape):
            raise ValueError(f"bad shape {self.shape}")
        # numpy minds the other extents of an array without elements too.
        nbytes = math.prod(max(extent, 1) for extent in self.shape) * self.itemsize
        if nbytes > MAX_ARRAY_BYTES:
            raise ValueError(f"an array of {self.shape}, {nbytes} bytes, is beyond any limit")
        if (self.key_impl is not None) != (self.kind == "key") or self.key_ndim < 0:
            raise ValueError(f"an array of kind {self.kind} with key impl {self.key_impl}")
        if self.key_ndim > (len(self.shape) if self.kind == "key" else 0):
            raise ValueError(f"{self.key_ndim} key dimensions in an array of {self.shape}")
        if self.kind == "key" and (self.key_ndim < 1 or self.dtype != "uint32"):
            raise ValueError(f"keys with data of {self.dtype} in {self.key_ndim} dimensions")
        if (self.storage == "empty") != (math.prod(self.shape) == 0):
            raise ValueError(f"an array of {self.shape} stored as {self.storage}")
        if self.codec not in CODECS:
            raise ValueError(f"codec {self.codec!r} is not known to this release")
        Grid(self.shape, cell_of(self.sharding, self.shape))  # that it can be
        shards = Grid(self.shape, self.shard_shape)
        chunks = Grid(self.shard_shape, self.chunk_shape)
        object.__setattr__(self, "shards", shards)
        object.__setattr__(self, "chunks", chunks)
        if not chunks.is_even:
            raise ValueError(f"chunks of {self.chunk_shape} do not divide {self.shard_shape}")
        if self.storage == "packed" and chunks.size != 1:
            raise ValueError("a packed shard is one chunk")
        if shards.size and any(s > max(e, 1) for s, e in zip(shards.cell, self.shape, strict=True)):
            raise ValueError(f"shards of {self.shard_shape} in an array of {self.shape}")

    @property
    def logical_shape(self) -> Shape:
        """The shape that the user sees: for keys without the key data."""
        return self.shape[: len(self.shape) - self.key_ndim]

    @property
    def logical_dtype(self) -> str:
        """The dtype that the user sees: for keys `key<impl>`."""
        return self.dtype if self.key_impl is None else f"key<{self.key_impl}>"

    def describe(self) -> str:
        """Dtype, shape and layout as the user sees them."""
        shape = f"{self.logical_dtype}{list(self.logical_shape)}"
        return f"{shape} {self.sharding or 'host array'}"

    @property
    def itemsize(self) -> int:
        return int(dtypes.dtype_of(self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def num_shards(self) -> int:
        return self.shards.size

    def devices_of(self, box: Box) -> tuple[int, ...]:
        """Ids of the devices that held a part of `box`, ascending."""
        return devices_of(self.sharding, self.shape, box)

    @property
    def num_chunks(self) -> int:
        """Chunks of all shards; as they divide a shard, they are a grid over the array too."""
        return Grid(self.shape, self.chunk_shape).size
