"""Import checkpoints of orbax, v0 and v1, without orbax and without JAX."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from pytree_ckpt.errors import FormatError
from pytree_ckpt.format import dtypes, values
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.format.paths import Path as LeafPath
from pytree_ckpt.format.paths import to_text
from pytree_ckpt.format.shardings import Sharding, Single, cell_of
from pytree_ckpt.format.trees import NodeKind, Tree, from_ends
from pytree_ckpt.interop import orbax_files
from pytree_ckpt.interop.making import ImportReport, make_checkpoint
from pytree_ckpt.interop.orbax_files import Entry, Item, ZarrArray
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.plan.saving import ArrayForm
from pytree_ckpt.store.failures import UnreadableError, storage_errors
from pytree_ckpt.store.locations import PathLike, local_path

_CACHE_NBYTES = 128 << 20
"""Decoded chunks that are kept: one of orbax may be larger than what is read of it at a time."""
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_PYTHON = ("bool", "int64", "float64", "complex128")
"""The dtypes in which orbax writes Python numbers."""


def import_orbax(
    src: PathLike,
    dst: PathLike,
    *,
    item: str | None = None,
    overwrite: bool = False,
    options: SaveOptions | None = None,
) -> ImportReport:
    """Make a checkpoint of one that orbax wrote (v0 or v1; Zarr 2 or 3, OCDBT or folders).

    Tree, dtypes, shardings, random keys, Python numbers and strings, None and empty containers are
    kept; metadata go below `"orbax"` in the metadata. What cannot be carried over is in the report.

    Args:
        src: The folder of a checkpoint, or of one item in it.
        dst: The folder of the new checkpoint.
        item: Which item, where there are several trees.
        overwrite: Replace a checkpoint at `dst`.
        options: Digest, compression and threads.

    Raises:
        NotFoundError: There is no tree, or orbax did not finish it.
        FormatError: The files are not as orbax writes them, or beyond a limit.
        ExistsError: There is a checkpoint at `dst` and `overwrite` is False.
        OSError: The storage refused or failed.
    """
    path = local_path(src)
    tree = orbax_files.read_item(orbax_files.find_item(path, item))
    return _Import(path, tree).run(dst, overwrite=overwrite, options=options)


class _Import:
    """An import under way."""

    def __init__(self, path: Path, item: Item) -> None:
        self._path = path
        self._item = item
        self._ctx = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_NBYTES}})
        self._left_out: list[str] = []
        self._kv = self._open_root()

    def _open_root(self) -> Any:
        base = {"driver": "file", "path": f"{self._item.folder}/"}
        spec = {"driver": "ocdbt", "base": base} if self._item.is_ocdbt else base
        with storage_errors(f"opening {self._item.folder}"):
            return ts.KvStore.open(spec, context=self._ctx).result()

    def run(self, dst: PathLike, *, overwrite: bool, options: SaveOptions | None) -> ImportReport:
        ends: dict[LeafPath, NodeKind] = {}
        found: dict[LeafPath, Any] = {}
        stores: dict[LeafPath, Any] = {}
        for entry in self._item.entries:
            if entry.path in ends:
                raise FormatError(f"{self._item.folder} has {to_text(entry.path)!r} twice")
            if entry.kind in ("none", "dict", "list", "tuple"):
                ends[entry.path] = entry.kind  # type: ignore[assignment]
                continue
            leaf, store = self._leaf(entry)
            if leaf is None:
                continue
            ends[entry.path], found[entry.path], stores[entry.path] = "leaf", leaf, store
        try:
            tree = from_ends(ends, known=Tree(("none",), (0,), (None,)))
        except ValueError as error:
            raise FormatError(f"{self._item.folder} has a tree that is none: {error}") from None
        paths = tree.leaf_paths()
        self._note_containers(tree)

        def view(leaf: int, box: Box) -> Any:
            return self._read(stores[paths[leaf]], box, to_text(paths[leaf]))

        return make_checkpoint(
            dst,
            tree,
            [found[path] for path in paths],
            view,
            source={"kind": "orbax", "path": str(self._path), "holds": "all"},
            metadata=self._metadata(),
            overwrite=overwrite,
            options=options,
            left_out=self._left_out,
        )

    def _leaf(self, entry: Entry) -> tuple[Any, Any]:
        """The form or the value of a leaf, and where its elements are; None if it is left out."""
        where = to_text(entry.path)
        if entry.kind == "string":
            if entry.name not in self._item.strings:
                raise FormatError(f"{self._item.folder} lacks the text of {where}")
            return self._item.strings[entry.name], None
        if entry.kind not in _ARRAYS:
            self._left_out.append(f"{where}: orbax has it as a {entry.kind}")
            return None, None
        array = self._describe(entry)
        store = self._open(entry, array)
        if entry.kind == "scalar" and not array.shape and array.dtype in _PYTHON:
            return self._read(store, Box((), ()), where).item(), None
        return self._form(entry, array), store

    def _describe(self, entry: Entry) -> ZarrArray:
        """The array of a leaf, by its own metadata file."""
        parts = set(entry.name.split("/")) if entry.path else set()
        if not self._item.is_ocdbt and ({"", ".", ".."} & parts or "\0" in entry.name):
            raise FormatError(f"{self._item.folder} has a leaf named {entry.name!r}")
        name = ".zarray" if self._item.zarr_format == 2 else "zarr.json"
        what = f"{self._item.folder}: {to_text(entry.path)}"
        with _readable(what):
            found = self._kv.read(f"{_folder_of(entry)}{name}").result()
        if found.state != "value":
            raise FormatError(f"{what} has no {name}")
        return orbax_files.zarr_array(found.value, self._item.zarr_format, what=what)

    def _open(self, entry: Entry, array: ZarrArray) -> Any:
        what = f"{self._item.folder}: {to_text(entry.path)}"
        spec = {
            "driver": "zarr" if self._item.zarr_format == 2 else "zarr3",
            "kvstore": (self._kv / _folder_of(entry)).spec().to_json(),
            "metadata": dict(array.metadata),
            "fill_missing_data_reads": not self._item.stores_fill_values,
        }
        with _readable(what):
            return ts.open(
                spec, open=True, assume_metadata=True, read=True, context=self._ctx
            ).result()

    def _form(self, entry: Entry, array: ZarrArray) -> ArrayForm:
        sharding = self._sharding(entry, array)
        impl = self._item.key_impls.get(entry.name)
        kind = "key" if impl else "numpy" if sharding is None else "jax"
        if entry.kind == "scalar" and not array.shape:
            kind = "scalar"
        return ArrayForm(
            kind=kind,  # type: ignore[arg-type]
            dtype=array.dtype,
            shape=array.shape,
            sharding=sharding,
            committed=sharding is not None and not isinstance(sharding, Single),
            key_impl=impl,
            key_ndim=1 if impl else 0,
        )

    def _sharding(self, entry: Entry, array: ZarrArray) -> Sharding | None:
        if entry.kind != "jax.Array":
            return None
        found = self._item.shardings.get(entry.name)
        why = "orbax has not recorded its sharding"
        if found is not None:
            try:
                cell_of(found, array.shape)
            except ValueError as error:
                why = str(error)
            else:
                return found
        self._left_out.append(f"{to_text(entry.path)}: its layout; it is on one device ({why})")
        return Single(device_id=0)

    def _note_containers(self, tree: Tree) -> None:
        """Say where a tuple may have become a list, an int a text: orbax writes both alike."""
        numbers = [
            to_text(path)
            for path, _ in tree.walk()
            if path and path[-1].kind == "str" and str(path[-1].value).isdecimal()
        ]
        if numbers:
            self._left_out.append(
                "which keys of dicts are ints: orbax does not say; "
                f"{', '.join(numbers)} came as text"
            )
        lists = [to_text(path) or "(root)" for path, kind in tree.walk() if kind == "list"]
        if lists:
            self._left_out.append(
                "which sequences are tuples and which dicts named tuples: orbax does not say; "
                f"{', '.join(lists)} came as lists; load into a target with rename={{'**': '**'}} "
                "for the classes of the target"
            )

    def _read(self, store: Any, box: Box, where: str) -> Any:
        if math.prod(box.shape) == 0:
            return np.empty(
                box.shape, dtypes.dtype_of(dtypes.name_of(store.dtype.numpy_dtype) or "")
            )
        what = f"{self._item.folder}: {where}"
        with _readable(what):
            return store[box.slices()].read(order="C").result()

    def _metadata(self) -> Any:
        """What orbax keeps beside the arrays: of the tree, of the checkpoint, of JSON items."""
        found: dict[str, Any] = {}
        if self._item.metadata:
            found["tree"] = self._item.metadata
        for folder in dict.fromkeys((self._item.folder, self._item.folder.parent)):
            outer = orbax_files.optional_json(folder / "_CHECKPOINT_METADATA")
            for key in ("custom_metadata", "metrics"):
                if outer.get(key):
                    found.setdefault(key, outer[key])
        for file in sorted(self._item.folder.parent.glob("*/metadata")):
            if self._item.folder != self._path and not file.is_symlink() and file.is_file():
                found.setdefault("items", {})[file.parent.name] = orbax_files.read_json(file)
        try:
            return {"orbax": values.check_metadata(found)} if found else None
        except (TypeError, ValueError) as error:
            self._left_out.append(f"metadata: {error}")
            return None


def _folder_of(entry: Entry) -> str:
    """Where the array of a leaf is; that of a tree which is one leaf lies at the top."""
    return f"{entry.name}/" if entry.path else ""


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Bytes that TensorStore cannot decode, and arrays that it does not find, are bad format."""
    try:
        with storage_errors(f"reading {what}"):
            yield
    except (UnreadableError, FileNotFoundError) as error:
        raise FormatError(f"{what} cannot be read: {error}") from None
