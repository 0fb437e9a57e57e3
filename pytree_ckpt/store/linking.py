"""Files of an earlier checkpoint that a save shares instead of writing the same bytes again.

A hard link is one more name of a file: each of two checkpoints stays whole when the other is
deleted. But a file that is damaged is damaged in both, so what is linked is read first, and
compared bit by bit with what is saved.
"""

import os
import stat
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from pytree_ckpt.errors import CheckpointError, IntegrityError
from pytree_ckpt.format import zarr
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Grid
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.tables import ShardIndex
from pytree_ckpt.store import arrays, contents
from pytree_ckpt.store.failures import UnreadableError, storage_errors
from pytree_ckpt.store.locations import Location


class Base:
    """A committed checkpoint whose files a save may link; it stays in place until `release`.

    Args:
        location: Where it is.
        target: Where the new one will be.
        texts: The paths of the leaves of the new one.
        digest: Its digest.

    Raises:
        NotFoundError, FormatError: There is no checkpoint that can be read.
        IntegrityError: Its tables are not the ones that its manifest names.
        CheckpointError: It is on another file system than `target`, where no link leads.
    """

    def __init__(
        self, location: Location, target: Location, *, texts: Sequence[str], digest: str
    ) -> None:
        manifest, self._held = location.open_to_read()
        try:
            _check_links(location, target)
            self._data = location / manifest.data_dir
            contents.refuse_link(self._data, None)
            tables = contents.read_tables(self._data, manifest)
            self._index = ShardIndex(manifest.leaf_specs, tables, digest=manifest.digest)
        except BaseException:
            self._held.close()
            raise
        # Digests of another kind compare with nothing.
        self._leaves = manifest.by_text if manifest.digest == digest else {}
        self._texts = texts
        self._ctx = arrays.context(threads=1)
        self._stores: dict[int, ts.TensorStore] = {}

    def twin(self, number: int, spec: ArraySpec) -> Leaf | None:
        """The leaf at the path of a new one, if its shards are cut and stored as `spec` says."""
        leaf = self._leaves.get(self._texts[number])
        if leaf is None or leaf.name is None:
            return None
        return leaf if _stored_as(leaf.array) == _stored_as(spec) else None

    def link(
        self, twin: Leaf, shard: int, source: npt.NDArray[Any], digests: bytes, folder: Location
    ) -> bool:
        """Give the file of a shard a name in `folder`, if it holds the elements of `source`.

        `digests` are those of the chunks of `source`. The folder must be synced afterwards.
        False if the elements differ, the file is damaged, or the file system refuses: the shard
        must then be written.
        """
        spec = twin.array
        if self._index.entry(twin.index, shard, spec).digests != digests:
            return False
        name = zarr.shard_file(spec.shards.position(shard))
        base = contents.array_folder(self._data, twin.name or "")
        file = base / name
        try:
            contents.refuse_link(base, twin.text)
            if not self._holds(twin, shard, source, file):
                return False
            os.link(str(file), str(folder / name), follow_symlinks=False)
        except (OSError, UnreadableError, IntegrityError):
            # Whatever is wrong with the old file, or with links here: a new file will be right.
            return False
        return True

    def _holds(self, twin: Leaf, shard: int, source: npt.NDArray[Any], file: Location) -> bool:
        """Whether a file is as a save leaves it, and reads as `source`, bit by bit."""
        spec, found = twin.array, os.lstat(str(file))
        if not stat.S_ISREG(found.st_mode) or contents.shard_nbytes(spec) not in (
            None,
            found.st_size,
        ):
            return False
        if twin.index not in self._stores:
            self._stores[twin.index] = arrays.open_leaf(
                self._data, twin.name or "", spec, self._ctx, write=False
            )
        with storage_errors(f"reading {file}"):
            store, start = self._stores[twin.index], spec.shards.box(shard).start
            return all(
                np.array_equal(
                    _bits(store[part.shifted(start).slices()].read().result()),
                    _bits(source[part.slices()]),
                )
                for part in Grid(source.shape, spec.chunk_shape).boxes()
            )

    def release(self) -> None:
        """Let the checkpoint go."""
        self._held.close()


def _stored_as(spec: ArraySpec) -> tuple[object, ...]:
    return spec.dtype, spec.shape, spec.shard_shape, spec.chunk_shape, spec.codec


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _check_links(base: Location, target: Location) -> None:
    if base.path is None or target.path is None:
        raise CheckpointError(f"{base} and {target} are not both on a disk: save without a base")
    at = target.path
    while not at.exists():
        at = at.parent
    if base.path.stat().st_dev != at.stat().st_dev:
        raise CheckpointError(
            f"the base {base} is on another file system than {at}, where no link leads; "
            "save without a base"
        )
