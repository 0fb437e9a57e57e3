"""What the metadata files of an orbax checkpoint say, checked: nothing of it is trusted.

A checkpoint is a folder of items, or an item itself. An item that is a tree has `_METADATA` (each
leaf with its keys and the type of its value), `_sharding` and `array_metadatas`, and its arrays as
Zarr 2 or 3, each in a folder of its own or all of them in one OCDBT database.
"""

import base64
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pytree_ckpt.errors import FormatError, NotFoundError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.arrays import MAX_ARRAY_BYTES
from pytree_ckpt.format.paths import Key
from pytree_ckpt.format.paths import Path as LeafPath
from pytree_ckpt.format.shardings import Mesh, Named, Sharding, Single
from pytree_ckpt.format.trees import MAX_DEPTH
from pytree_ckpt.interop.json_objects import MAX_JSON_NBYTES, json_object
from pytree_ckpt.store import disk

METADATA_FILE = "_METADATA"
UNFINISHED = ".orbax-checkpoint-tmp"
"""In the name of a folder that orbax has not committed."""
MAX_CHUNK_NBYTES = 4 << 30
"""Largest chunk that is decoded, in one piece."""
_SEQUENCE, _DICT = 1, 2
_EMPTY = {"None": "none", "Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "dict"}
_DEVICE = re.compile(r"[A-Za-z]+[:_](\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A leaf or an empty node: its path, its name in orbax, and the type of its value."""

    path: LeafPath
    name: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A tree in an orbax checkpoint."""

    folder: Path
    entries: tuple[Entry, ...]
    is_ocdbt: bool
    zarr_format: int
    stores_fill_values: bool
    shardings: Mapping[str, Sharding]
    key_impls: Mapping[str, str]
    strings: Mapping[str, str]
    metadata: Any


def read_json(file: Path) -> dict[str, Any]:
    """A file that is one JSON object; links are not followed.

    Raises:
        FormatError: It is not.
        FileNotFoundError: There is no such file.
    """
    return json_object(disk.read_file(file, max_nbytes=MAX_JSON_NBYTES), what=str(file))


def optional_json(file: Path) -> dict[str, Any]:
    """As `read_json`; empty where there is no such file."""
    try:
        return read_json(file)
    except FileNotFoundError:
        return {}


def find_item(path: Path, item: str | None) -> Path:
    """The folder of the tree to import.

    Raises:
        NotFoundError: There is none, more than one, or orbax has not committed it.
        FormatError: There is a link below it.
        ValueError: The item is no str.
    """
    if item is not None and not isinstance(item, str):
        raise ValueError(f"item must be a str such as 'state', not {item!r}")
    if UNFINISHED in path.name:
        raise NotFoundError(f"{path} is a save that orbax did not finish")
    folder = path if item is None else Path(os.path.abspath(path / item))
    if not (folder / METADATA_FILE).is_file():
        items = [p.parent.name for p in sorted(folder.glob(f"*/{METADATA_FILE}"))]
        if item is not None or len(items) != 1:
            steps = sorted(p.parent.parent.name for p in path.glob(f"*/*/{METADATA_FILE}"))
            has = f"items {items}, name one" if items else f"steps {steps}" if steps else ""
            note = f"; it has {has}" if has else "" if folder.exists() else "; there is nothing"
            raise NotFoundError(f"{folder} is no tree of orbax{note}")
        folder = folder / items[0]
    _refuse_links(folder)
    return folder


def _refuse_links(folder: Path) -> None:
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if os.path.islink(os.path.join(base, name)):
                raise FormatError(f"{base}/{name} is a symbolic link, which orbax does not make")


def read_item(folder: Path) -> Item:
    """What the files of a tree say.

    Raises:
        FormatError: They do not say it as orbax does.
    """
    what = folder / METADATA_FILE
    found = read_json(what)
    try:
        entries = tuple(_entries(found["tree_metadata"]))
        arrays: dict[str, str] = {}
        for file in sorted((folder / "array_metadatas").glob("process_*")):
            arrays |= _key_impls(read_json(file))
        shardings = {
            base64.b64decode(key).decode(): _sharding(json_object(text.encode(), what=key))
            for key, text in optional_json(folder / "_sharding").items()
        }
        strings = optional_json(folder / "_strings.json")
        if not all(isinstance(text, str) for text in strings.values()):
            raise ValueError("_strings.json has something that is not text")
        return Item(
            folder=folder,
            entries=entries,
            is_ocdbt=bool(found.get("use_ocdbt", (folder / "manifest.ocdbt").is_file())),
            zarr_format=3 if found.get("use_zarr3") else 2,
            stores_fill_values=bool(found.get("store_array_data_equal_to_fill_value")),
            shardings={name: s for name, s in shardings.items() if s is not None},
            key_impls=arrays,
            strings=strings,
            metadata=found.get("custom_metadata"),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise FormatError(f"{what}, or a file beside it, is not valid: {error!r}") from None


def _entries(tree: Mapping[str, Any]) -> Iterator[Entry]:
    for item in tree.values():
        path = tuple(_key(key) for key in item["key_metadata"])
        if len(path) >= MAX_DEPTH:
            raise ValueError(f"a leaf below {len(path)} containers")
        name = ".".join(str(key.value) for key in path)
        kind = item["value_metadata"]["value_type"]
        if not isinstance(kind, str):
            raise ValueError(f"the type of {name!r} is {kind!r}")
        yield Entry(path=path, name=name, kind=_EMPTY.get(kind, kind))


def _key(item: Mapping[str, Any]) -> Key:
    key, kind = item["key"], item["key_type"]
    if kind == _SEQUENCE:
        return Key("list", int(key))
    if kind != _DICT or not isinstance(key, str):
        raise ValueError(f"a key of type {kind!r}: {key!r}")
    key.encode()  # JSON can write what is no unicode, and a file system cannot
    return Key("str", key)


def _key_impls(found: Mapping[str, Any]) -> dict[str, str]:
    impls = {}
    for entry in found["array_metadatas"]:
        item = entry["array_metadata"]
        impl = (item.get("ext_metadata") or {}).get("random_key_impl")
        if impl is not None:
            impls[str(item["param_name"])] = str(impl)
    return impls


def _sharding(found: Mapping[str, Any]) -> Sharding | None:
    """A sharding, None for a kind that is not known."""
    kind = found.get("sharding_type")
    if kind == "SingleDeviceSharding":
        device = _DEVICE.search(str(found.get("device_str")))
        return Single(device_id=int(device[1]) if device else 0)
    if kind != "NamedSharding":
        return None
    sizes, names = found["shape"], found["axis_names"]
    mesh = (found.get("device_mesh") or {}).get("mesh")
    ids = [int(device["id"]) for device in np.asarray(mesh, object).flat] if mesh else []
    types = [str(t).rpartition(".")[2] for t in found.get("axis_types") or ["Auto"] * len(names)]
    extents = tuple(map(int, sizes))
    return Named(
        mesh=Mesh(
            axis_names=tuple(map(str, names)),
            axis_sizes=extents,
            axis_types=tuple(types),
            device_ids=tuple(ids) or Mesh.first_ids(extents),
        ),
        spec=tuple(
            () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            for entry in found["partition_spec"]
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZarrArray:
    """An array as its metadata say; `metadata` has what of them is passed on to TensorStore."""

    dtype: str
    shape: tuple[int, ...]
    metadata: Mapping[str, Any]


_PASSED_ON = {
    2: ("chunks", "compressor", "dimension_separator", "dtype", "fill_value", "filters", "order"),
    3: ("chunk_grid", "chunk_key_encoding", "codecs", "data_type", "fill_value", "node_type"),
}


def zarr_array(data: bytes, zarr_format: int, *, what: str) -> ZarrArray:
    """An array from its `.zarray` or `zarr.json`, whose sizes are within bounds.

    Raises:
        FormatError: It is not valid, or larger than any limit.
    """
    try:
        found = json_object(data, what=what)
        if found["zarr_format"] != zarr_format:
            raise ValueError(f"Zarr format {found['zarr_format']}")
        shape = _extents(found["shape"])
        chunk = (
            found["chunks"]
            if zarr_format == 2
            else found["chunk_grid"]["configuration"]["chunk_shape"]
        )
        name = _dtype_name(found["dtype"] if zarr_format == 2 else found["data_type"])
        size = int(dtypes.dtype_of(name).itemsize)
        if math.prod(shape) * size > MAX_ARRAY_BYTES or len(chunk) != len(shape):
            raise ValueError(f"shape {shape} in chunks of {chunk}")
        if math.prod(_extents(chunk)) * size > MAX_CHUNK_NBYTES:
            raise ValueError(f"chunks of {chunk}, more than {MAX_CHUNK_NBYTES} bytes")
        if zarr_format == 3 and any(c.get("name") not in _CODECS for c in _all(found["codecs"])):
            raise ValueError("a codec that is not known")
        kept = {key: found[key] for key in _PASSED_ON[zarr_format] if key in found}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"{what} has metadata that are not valid: {error!r}") from None
    metadata = {**kept, "shape": list(shape), "zarr_format": zarr_format}
    return ZarrArray(dtype=name, shape=shape, metadata=metadata)


_CODECS = ("sharding_indexed", "bytes", "transpose", "zstd", "gzip", "blosc", "crc32c")


def _all(codecs: Any) -> Iterator[Mapping[str, Any]]:
    """Every codec, also those in shards."""
    for codec in codecs:
        yield codec
        inner = codec.get("configuration") or {}
        yield from _all(inner.get("codecs") or ())
        yield from _all(inner.get("index_codecs") or ())


def _extents(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(n) is int and 0 <= n < 1 << 60 for n in values):
        raise ValueError(f"extents {values!r}")
    return tuple(values)


def _dtype_name(text: Any) -> str:
    if isinstance(text, str) and dtypes.is_known(text):
        return text
    name = dtypes.name_of(np.dtype(text)) if isinstance(text, str) else None
    if name is None or ">" in text:
        raise ValueError(f"dtype {text!r}")
    return name
