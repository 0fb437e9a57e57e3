"""The file of a manifest: from the dataclass to bytes and back, every field checked."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pytree_ckpt.errors import NewerFormatError
from pytree_ckpt.format import values, wire
from pytree_ckpt.format.arrays import ARRAY_KINDS, STORAGES, ArraySpec
from pytree_ckpt.format.manifest import Manifest, TableRef
from pytree_ckpt.format.parse import Reader
from pytree_ckpt.format.paths import KEY_KINDS, MAX_KEY_DIGITS, Key
from pytree_ckpt.format.shardings import Mesh, Named, Sharding, Single, Tiled
from pytree_ckpt.format.trees import NODE_KINDS, Tree


def to_bytes(manifest: Manifest) -> tuple[bytes, bytes]:
    """The file of a manifest, and its id. Equal manifests give equal bytes."""
    meshes = manifest.meshes
    shardings = tuple(dict.fromkeys(s.sharding for s in manifest.specs if s.sharding is not None))
    return wire.seal(
        "manifest",
        {
            "required": [],
            "nonce": manifest.nonce,
            "digest": manifest.digest,
            "tree": tree_to_wire(manifest.tree),
            "meshes": [
                {
                    "axis_names": list(mesh.axis_names),
                    "axis_sizes": list(mesh.axis_sizes),
                    "axis_types": list(mesh.axis_types),
                    "device_ids": list(mesh.device_ids),
                }
                for mesh in meshes
            ],
            "shardings": [_sharding_to_wire(s, meshes) for s in shardings],
            "arrays": [_spec_to_wire(s, shardings) for s in manifest.specs],
            "leaves": np.asarray(manifest.leaf_codes, "<i4").tobytes(),
            "values": [values.to_wire(v) for v in manifest.values],
            "names": list(manifest.names),
            "process_count": manifest.process_count,
            "device_count": manifest.device_count,
            "platform": manifest.platform,
            "tables": [[table.nbytes, table.id] for table in manifest.tables],
            "metadata": manifest.metadata,
            "metrics": {k: float(v) for k, v in sorted(manifest.metrics.items())},
            "versions": dict(sorted(manifest.versions.items())),
            "created": float(manifest.created),
            "seconds": {k: float(v) for k, v in sorted(manifest.seconds.items())},
            **({"source": dict(sorted(manifest.source.items()))} if manifest.source else {}),
            **({"linked_nbytes": manifest.linked_nbytes} if manifest.linked_nbytes else {}),
            **({"written_by": manifest.written_by} if manifest.written_by else {}),
        },
    )


def tree_to_wire(tree: Tree) -> dict[str, Any]:
    """The columns of a tree."""
    return {
        "kinds": bytes(map(NODE_KINDS.index, tree.kinds)),
        "counts": np.asarray(tree.counts, "<u4").tobytes(),
        "key_kinds": bytes(KEY_KINDS.index(k.kind) for k in tree.keys if k is not None),
        "keys": [_key_to_wire(k.value) for k in tree.keys if k is not None],
    }


def _key_to_wire(value: str | int) -> str | int | bytes:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return str(value).encode()
    return value


def _key_from_wire(value: Any) -> str | int:
    if isinstance(value, bytes) and len(value) <= MAX_KEY_DIGITS + 1:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("a key is neither text nor a number")
    return value


def _sharding_to_wire(sharding: Sharding, meshes: Sequence[Mesh]) -> dict[str, Any]:
    match sharding:
        case Named():
            return {
                "kind": "named",
                "mesh": meshes.index(sharding.mesh),
                "spec": [list(entry) for entry in sharding.spec],
                "memory_kind": sharding.memory_kind,
            }
        case Single():
            return {
                "kind": "single",
                "device_ids": [sharding.device_id],
                "memory_kind": sharding.memory_kind,
            }
        case Tiled():
            return {
                "kind": "tiled",
                "name": sharding.name,
                "cell": list(sharding.cell),
                "cells": list(sharding.cells),
                "device_ids": list(sharding.device_ids),
                "memory_kind": sharding.memory_kind,
            }


def _spec_to_wire(spec: ArraySpec, shardings: Sequence[Sharding]) -> dict[str, Any]:
    return {
        "kind": spec.kind,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "sharding": None if spec.sharding is None else shardings.index(spec.sharding),
        "storage": spec.storage,
        "shard_shape": list(spec.shard_shape),
        "chunk_shape": list(spec.chunk_shape),
        "codec": spec.codec,
        "weak_type": spec.weak_type,
        "committed": spec.committed,
        "key_impl": spec.key_impl,
        "key_ndim": spec.key_ndim,
    }


def from_bytes(data: bytes, *, what: str) -> Manifest:
    """The manifest in a file.

    Raises:
        NewerFormatError: Of a newer version, or in need of features that are not known here.
        FormatError: Not a manifest, damaged, or in breach of the format.
    """
    content, digest = wire.unseal("manifest", data, what=what)
    with Reader.errors(what):
        reader = Reader(content, what)
        required = reader.texts("required")
        if required:
            raise NewerFormatError(
                f"{what} needs features that this release does not have: {', '.join(required)}"
            )
        shardings = _shardings_from_wire(reader, what)
        return Manifest(
            nonce=reader.text("nonce"),
            digest=reader.text("digest"),
            tree=tree_from_wire(Reader(reader.mapping("tree"), what)),
            specs=tuple(
                _spec_from_wire(Reader(item, what), shardings) for item in reader.list("arrays")
            ),
            leaf_codes=tuple(reader.column("leaves", "<i4").tolist()),
            values=tuple(map(values.from_wire, reader.list("values"))),
            names=reader.texts("names"),
            process_count=reader.count("process_count"),
            device_count=reader.count("device_count"),
            platform=reader.text("platform"),
            tables=tuple(_table_ref(item) for item in reader.list("tables")),
            metadata=content.get("metadata"),
            metrics=_numbers_of(reader.mapping("metrics")),
            versions=_texts_of(reader.mapping("versions")),
            created=reader.number("created"),
            seconds=_numbers_of(reader.mapping("seconds")),
            source=_texts_of(reader.mapping("source")) if reader.has("source") else {},
            linked_nbytes=reader.count("linked_nbytes") if reader.has("linked_nbytes") else 0,
            written_by=reader.text("written_by") if reader.has("written_by") else "",
            id=digest,
        )


def tree_from_wire(reader: Reader) -> Tree:
    """The tree that `tree_to_wire` made columns of; errors are for `Reader.errors`."""
    kinds, key_kinds = reader.binary("kinds"), reader.binary("key_kinds")
    keys = reader.list("keys")
    if len(keys) != len(key_kinds) or len(keys) != len(kinds) - 1:
        raise ValueError("the columns of the tree differ in length")
    typed: list[Key | None] = [None]
    for kind, value in zip(key_kinds, keys, strict=True):
        key = Key(KEY_KINDS[kind], _key_from_wire(value))
        if isinstance(key.value, str) != (key.kind in ("str", "attr")):
            raise ValueError(f"a key of kind {key.kind} is {key.value!r}")
        typed.append(key)
    counts = tuple(reader.column("counts", "<u4").tolist())
    return Tree(tuple(NODE_KINDS[kind] for kind in kinds), counts, tuple(typed))


def _shardings_from_wire(reader: Reader, what: str) -> list[Sharding]:
    meshes = []
    for item in reader.list("meshes"):
        mesh = Reader(item, what)
        meshes.append(
            Mesh(
                axis_names=mesh.texts("axis_names"),
                axis_sizes=mesh.ints("axis_sizes"),
                axis_types=mesh.texts("axis_types"),
                device_ids=mesh.ints("device_ids"),
            )
        )
    return [_sharding_from_wire(Reader(item, what), meshes) for item in reader.list("shardings")]


def _sharding_from_wire(reader: Reader, meshes: Sequence[Mesh]) -> Sharding:
    memory_kind = reader.optional_text("memory_kind")
    kind = reader.text("kind")
    if kind == "named":
        spec = reader.list("spec")
        if not all(isinstance(e, list) and all(isinstance(a, str) for a in e) for e in spec):
            raise ValueError("bad partition spec")
        mesh = meshes[reader.count("mesh")]
        return Named(mesh=mesh, spec=tuple(map(tuple, spec)), memory_kind=memory_kind)
    device_ids = reader.ints("device_ids")
    if kind == "single" and len(device_ids) == 1:
        return Single(device_id=device_ids[0], memory_kind=memory_kind)
    if kind == "tiled":
        return Tiled(
            name=reader.text("name"),
            cell=reader.ints("cell"),
            cells=reader.ints("cells"),
            device_ids=device_ids,
            memory_kind=memory_kind,
        )
    raise ValueError(f"sharding of unknown kind {kind!r}")


def _spec_from_wire(reader: Reader, shardings: Sequence[Sharding]) -> ArraySpec:
    kind, storage = reader.text("kind"), reader.text("storage")
    if kind not in ARRAY_KINDS or storage not in STORAGES:
        raise ValueError(f"array of unknown kind {kind!r} or storage {storage!r}")
    return ArraySpec(
        kind=ARRAY_KINDS[ARRAY_KINDS.index(kind)],
        dtype=reader.text("dtype"),
        shape=reader.ints("shape"),
        sharding=shardings[reader.count("sharding")] if reader.has("sharding") else None,
        storage=STORAGES[STORAGES.index(storage)],
        shard_shape=reader.ints("shard_shape"),
        chunk_shape=reader.ints("chunk_shape"),
        codec=reader.text("codec"),
        weak_type=reader.flag("weak_type"),
        committed=reader.flag("committed"),
        key_impl=reader.optional_text("key_impl"),
        key_ndim=reader.count("key_ndim"),
    )


def _table_ref(item: Any) -> TableRef:
    match item:
        case [int() as nbytes, bytes() as digest] if len(digest) == 32 and nbytes > 0:
            return TableRef(nbytes=nbytes, id=digest)
        case _:
            raise ValueError("bad reference to a table")


def _texts_of(items: dict[str, Any]) -> dict[str, str]:
    if not all(isinstance(v, str) for v in items.values()):
        raise ValueError("versions or source are not text")
    return items


def _numbers_of(items: dict[str, Any]) -> dict[str, float]:
    if not all(isinstance(v, float) for v in items.values()):
        raise ValueError("metrics or seconds are not numbers")
    return items
