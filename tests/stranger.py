"""A reader of format version 1, written from docs/format.md alone.

It uses zarr-python for the arrays, as a stranger would, and nothing of this package.
"""

import hashlib
import itertools
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import zarr


def sealed(file: Path, kind: str) -> tuple[dict[str, Any], bytes]:
    """Content and id of a file of metadata."""
    outer = msgpack.unpackb(file.read_bytes(), strict_map_key=True)
    assert outer["format"] == "pytree_ckpt"
    assert (outer["version"], outer["kind"]) == (1, kind)
    assert hashlib.sha256(outer["body"]).digest() == outer["id"]
    return msgpack.unpackb(outer["body"], strict_map_key=True), outer["id"]


def leaf_paths(tree: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The keys from the root to each leaf."""
    counts = np.frombuffer(tree["counts"], "<u4").tolist()
    keys = iter([None, *tree["keys"]])
    nodes = iter(zip(tree["kinds"], counts, keys, strict=True))
    found: list[tuple[Any, ...]] = []

    def node(path: tuple[Any, ...]) -> None:
        kind, count, key = next(nodes)
        here = path if key is None and not path and not found else (*path, key)
        if kind == 0:
            found.append(here)
        for _ in range(count):
            node(here)

    node(())
    return found


def value(item: list[Any]) -> Any:
    """A Python value."""
    tag, payload = item
    if tag == "i" and isinstance(payload, bytes):
        return int.from_bytes(payload, "little", signed=True)
    if tag == "f":
        return struct.unpack("<d", payload)[0]
    if tag == "c":
        return complex(*struct.unpack("<dd", payload))
    return payload


def digest(algorithm: str, data: bytes) -> bytes:
    """Digest of the bytes of a chunk."""
    if algorithm == "sha256":
        return hashlib.sha256(data).digest()
    import xxhash

    return xxhash.xxh3_128(data).digest()


def cells(shape: list[int], cell: list[int]) -> list[tuple[slice, ...]]:
    """The boxes of a regular grid in C order, the last ones cut off."""
    axes = [range(0, extent, step) for extent, step in zip(shape, cell, strict=True)]
    return [
        tuple(slice(a, min(a + c, s)) for a, c, s in zip(start, cell, shape, strict=True))
        for start in itertools.product(*axes)
    ]


def zarr_array(folder: Path) -> np.ndarray:
    """A whole array by zarr-python."""
    return np.asarray(zarr.open_array(store=str(folder), mode="r")[...])


def read(checkpoint: Path) -> list[tuple[tuple[Any, ...], Any]]:
    """Every leaf with its path, all digests checked."""
    manifest, _ = sealed(checkpoint / "manifest.msgpack", "manifest")
    assert manifest["required"] == []
    data = checkpoint / f"data-{manifest['nonce']}"
    tables = []
    for number, (nbytes, wanted) in enumerate(manifest["tables"]):
        file = data / "tables" / f"{number:05d}.msgpack"
        assert file.stat().st_size == nbytes
        table, found = sealed(file, "table")
        assert found == wanted
        tables.append(table)
    shards = {
        (leaf, shard): place
        for table in tables
        for leaf, shard, place in rows(manifest, data, table)
    }
    values = iter(manifest["values"])
    names = iter(manifest["names"])
    out: list[tuple[tuple[Any, ...], Any]] = []
    codes = np.frombuffer(manifest["leaves"], "<i4").tolist()
    for number, (path, code) in enumerate(zip(leaf_paths(manifest["tree"]), codes, strict=True)):
        if code == -1:
            out.append((path, value(next(values))))
        elif code == -2:
            own = [row for table in tables for row in table["per_process"] if row[0] == number]
            out.append((path, [v for _, _, v in sorted(own, key=lambda row: row[1])]))
        else:
            name = next(names) if manifest["arrays"][code]["storage"] == "array" else None
            out.append(
                (path, array(manifest, manifest["arrays"][code], number, data, name, shards))
            )
    return out


def rows(manifest: dict[str, Any], data: Path, table: dict[str, Any]) -> list[Any]:
    """Every shard of a table: leaf, number, and (digests, bytes of a packed shard)."""
    size = 32 if manifest["digest"] == "sha256" else 16
    codes = np.frombuffer(manifest["leaves"], "<i4").tolist()
    found = []
    for kind in ("arrays", "packed_rows"):
        leaf = np.frombuffer(table[kind]["leaf"], "<u4").tolist()
        shard = np.frombuffer(table[kind]["shard"], "<u8").tolist()
        offset = np.frombuffer(table[kind]["offset"], "<u8").tolist()
        digests = table[kind]["digests"]
        packed = b""
        if kind == "packed_rows" and table["packed"]:
            packed = zarr_array(data / "packed" / f"{table['process']:05d}").tobytes()
        at = 0
        for row, (leaf_number, shard_number) in enumerate(zip(leaf, shard, strict=True)):
            spec = manifest["arrays"][codes[leaf_number]]
            box = cells(spec["shape"], spec["shard_shape"])[shard_number]
            shape = [s.stop - s.start for s in box]
            count = len(cells(shape, spec["chunk_shape"]))
            body = b""
            if kind == "packed_rows":
                nbytes = math.prod(shape) * itemsize(spec["dtype"])
                body = packed[offset[row] : offset[row] + nbytes]
            place = ([digests[(at + n) * size : (at + n + 1) * size] for n in range(count)], body)
            found.append((leaf_number, shard_number, place))
            at += count
        assert at * size == len(digests)
    return found


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def itemsize(name: str) -> int:
    return dtype_of(name).itemsize


def array(
    manifest: dict[str, Any],
    spec: dict[str, Any],
    leaf: int,
    data: Path,
    name: str | None,
    shards: dict[tuple[int, int], Any],
) -> np.ndarray:
    """One array, from its own Zarr array or from packed shards."""
    out = np.zeros(spec["shape"], dtype_of(spec["dtype"]))
    if spec["storage"] == "empty":
        return out
    stored = zarr_array(data / "arrays" / name) if name else None
    for number, box in enumerate(cells(spec["shape"], spec["shard_shape"])):
        digests, body = shards[leaf, number]
        if stored is None:
            shape = out[box].shape
            part = np.frombuffer(body, out.dtype).reshape(shape)
        else:
            part = stored[box]
        for wanted, chunk in zip(digests, cells(part.shape, spec["chunk_shape"]), strict=True):
            assert digest(manifest["digest"], part[chunk].tobytes()) == wanted
        out[box] = part
    return out
