"""Look into a checkpoint without devices: its manifest, and arrays read as numpy."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from pytree_ckpt.errors import NotFoundError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.boxes import Box, whole
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.paths import nearest
from pytree_ckpt.format.tables import ShardIndex
from pytree_ckpt.options import LoadOptions, check_flags, given_or_default
from pytree_ckpt.pictures.pages import manifest_html
from pytree_ckpt.plan.indexing import Index, to_box
from pytree_ckpt.plan.loading import plan_reads
from pytree_ckpt.store.locations import PathLike, locate

T = TypeVar("T")


def open_checkpoint(
    path: PathLike, *, verify: bool = True, options: LoadOptions | None = None
) -> "Checkpoint":
    """Open a checkpoint to read parts of it; chunks are read, and verified, when asked for.

    Raises:
        NotFoundError: No committed checkpoint is there.
        FormatError: The manifest is damaged, or (`NewerFormatError`) of a newer release.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pc.save(folder, {"w": np.arange(12.0).reshape(3, 4), "step": 7})
        ...     with pc.open(folder) as ckpt:
        ...         print(ckpt.keys(), ckpt["step"], ckpt["w"][1, 1:3])
        ['step', 'w'] 7 [5. 6.]
    """
    check_flags(verify=verify)
    return Checkpoint(path, verify=verify, options=given_or_default(options, LoadOptions))


def batches(items: Iterable[T], nbytes_of: Callable[[T], int], *, limit: int) -> Iterator[list[T]]:
    """Items that are read together, so that small arrays are not read one by one."""
    batch: list[T] = []
    nbytes = 0
    for item in items:
        if batch and nbytes + nbytes_of(item) > limit:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += nbytes_of(item)
    if batch:
        yield batch


class Checkpoint:
    """A checkpoint that is open for reading; its leaves are found by the text of their path."""

    def __init__(self, path: PathLike, *, verify: bool, options: LoadOptions) -> None:
        # TensorStore takes a third of a second to import, which a manifest does not need.
        from pytree_ckpt.store.reading import CheckpointReader

        location = locate(path)
        self.manifest, self._held = location.open_to_read()
        self._location = location
        self._closed = False
        self._reader = CheckpointReader(location, self.manifest, verify=verify, options=options)

    def keys(self) -> list[str]:
        """Text of the path of every leaf, in order."""
        return [leaf.text for leaf in self.manifest.leaves]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.manifest.leaf_codes)

    def __contains__(self, key: object) -> bool:
        return self._found(key) is not None

    def __getitem__(self, key: str) -> Any:
        """A `StoredArray`, a Python value, or the list of the values of all processes."""
        return self._value(self.leaf(key))

    def _found(self, key: object) -> Leaf | None:
        """The leaf that a person means; slashes at the ends do not count."""
        if not isinstance(key, str):
            return None
        leaves = self.manifest.by_text
        return leaves.get(key) or leaves.get(key.strip("/"))

    def leaf(self, key: str) -> Leaf:
        """What the manifest says of a leaf."""
        found = self._found(key)
        if found is None:
            near = nearest(str(key), self.manifest.by_text)
            raise KeyError(f"no leaf {key!r} in {self._location}{near}; keys() lists them")
        return found

    def _value(self, leaf: Leaf) -> Any:
        if leaf.per_process:
            return self._reader.per_process(leaf.index)
        return leaf.value if leaf.spec is None else StoredArray(self, leaf)

    def to_numpy(self) -> Any:
        """The whole tree in builtin containers, arrays as numpy, keys as their data.

        Raises:
            IntegrityError: Damaged chunks, all of them.
        """
        leaves = [self._value(leaf) for leaf in self.manifest.leaves]
        arrays = [leaf for leaf in leaves if isinstance(leaf, StoredArray)]
        filled = iter(self.read_boxes([(array.leaf, whole(array.shape)) for array in arrays]))
        return self.manifest.tree.build(
            [
                _host_value(leaf, next(filled)) if isinstance(leaf, StoredArray) else leaf
                for leaf in leaves
            ]
        )

    @property
    def index(self) -> ShardIndex:
        """Where every shard is, and the digests of its chunks."""
        return self._reader.index

    def read_box(self, leaf: Leaf, box: Box) -> npt.NDArray[Any]:
        """The elements of one box of a leaf, verified."""
        return self.read_boxes([(leaf, box)])[0]

    def read_boxes(self, wanted: list[tuple[Leaf, Box]]) -> list[npt.NDArray[Any]]:
        """The elements of boxes of leaves, verified; chunks that several need are read once."""
        from pytree_ckpt.store.requests import Request

        if self._closed:
            raise NotFoundError(f"{self._location} was closed")
        requests = [
            Request(parts=(leaf,), plan=plan_reads(leaf.array, [box])) for leaf, box in wanted
        ]
        # An empty part of a packed array lies in no window, so that no group has it.
        found: dict[int, npt.NDArray[Any]] = {
            at: np.empty(box.shape, dtypes.dtype_of(leaf.array.dtype))
            for at, (leaf, box) in enumerate(wanted)
            if box.size == 0
        }
        for group in self._reader.read(requests):
            for part in group:
                packed = wanted[part.request][0].array.storage == "packed"
                found[part.request] = part.buffer.copy() if packed else part.buffer
        return [found[at] for at in range(len(wanted))]

    def close(self) -> None:
        """Let the checkpoint go; it may then be replaced or deleted."""
        self._closed = True
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        """The picture in a notebook."""
        return manifest_html(self.manifest, title=str(self._location))

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"Checkpoint({str(self._location)!r}, {self.manifest!r}{closed})"


class StoredArray:
    """An array in a checkpoint; indexing with ints and slices reads the chunks that it needs."""

    def __init__(self, checkpoint: Checkpoint, leaf: Leaf) -> None:
        self.leaf = leaf
        self.spec = leaf.array
        self._checkpoint = checkpoint

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as stored; keys have the dimensions of their data at the end."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype as stored; keys are `uint32`."""
        return dtypes.dtype_of(self.spec.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> npt.NDArray[Any]:
        box, rest = to_box(index, self.shape)
        return self._checkpoint.read_box(self.leaf, box)[rest]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("an array in a checkpoint cannot be had without a copy: it is read")
        found = self._checkpoint.read_box(self.leaf, whole(self.shape))
        return found if dtype is None else found.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"StoredArray({self.leaf})"


def _host_value(array: StoredArray, buffer: npt.NDArray[Any]) -> Any:
    return buffer[()] if array.spec.kind == "scalar" else buffer
