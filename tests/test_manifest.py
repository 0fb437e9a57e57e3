"""The manifest says all about a checkpoint, in bytes that depend on nothing else."""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.format import dtypes, manifest_file, wire
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Grid
from pytree_ckpt.format.manifest import PER_PROCESS, VALUE, Manifest, TableRef
from pytree_ckpt.format.paths import Key
from pytree_ckpt.format.shardings import Mesh, Named, Single, Tiled
from pytree_ckpt.format.trees import Tree
from tests.conftest import make_mesh


def spec(**fields: Any) -> ArraySpec:
    """A packed array, but for the fields that are given."""
    return ArraySpec(
        **{
            "kind": "numpy",
            "dtype": "float32",
            "shape": (4, 2),
            "sharding": None,
            "storage": "packed",
            "shard_shape": (4, 2),
            "chunk_shape": (4, 2),
        }
        | fields
    )


def manifest(**fields: Any) -> Manifest:
    """A manifest of `{"a": array of its own, "b": packed, "c": 1}`, but for the given fields."""
    keys = (None, Key("str", "a"), Key("str", "b"), Key("str", "c"))
    return Manifest(
        **{
            "nonce": "0123456789abcdef" * 2,
            "digest": "sha256",
            "tree": Tree(("dict", "leaf", "leaf", "leaf"), (3, 0, 0, 0), keys),
            "specs": (spec(storage="array", shard_shape=(2, 2), chunk_shape=(1, 2)), spec()),
            "leaf_codes": (0, 1, VALUE),
            "values": (1,),
            "names": ("a",),
            "process_count": 1,
            "device_count": 8,
            "platform": "cpu",
            "tables": (TableRef(nbytes=1000, id=bytes(32)),),
            "metadata": {"run": 1},
            "metrics": {"loss": 0.5},
            "versions": {"jax": "0.10"},
            "created": 1.5,
            "seconds": {"write": 0.25},
        }
        | fields
    )


# --- round trips --------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        TEXTS,
        st.binary(max_size=8),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
VALUES = st.one_of(
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    TEXTS,
    st.binary(max_size=8),
)
NUMBERS = st.dictionaries(TEXTS, st.floats(allow_nan=False), max_size=3)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    names = draw(st.lists(TEXTS, min_size=len(sizes), max_size=len(sizes), unique=True))
    types = draw(st.lists(st.sampled_from(["Auto", "Explicit", "Manual"]), min_size=3, max_size=3))
    ids = draw(st.permutations(range(math.prod(sizes))))
    return Mesh(
        axis_names=tuple(names),
        axis_sizes=tuple(sizes),
        axis_types=tuple(types[: len(sizes)]),
        device_ids=tuple(ids),
    )


@st.composite
def array_specs(draw: st.DrawFn) -> ArraySpec:
    ndim = draw(st.integers(0, 3))
    chunk = draw(st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim))
    per_shard = draw(st.lists(st.integers(1, 2), min_size=ndim, max_size=ndim))
    shard = [c * n for c, n in zip(chunk, per_shard, strict=True)]
    shape = [s * draw(st.integers(1, 3)) - draw(st.integers(0, s - 1)) for s in shard]
    shape = [max(extent, s) for extent, s in zip(shape, shard, strict=True)]
    storage = draw(st.sampled_from(["array", "packed", "empty"]))
    if storage == "packed":
        chunk = shard
    if storage == "empty":
        shape, shard, chunk = [0, *shape], [1, *shard], [1, *chunk]
    kind = draw(st.sampled_from(["jax", "key", "numpy", "scalar"]))
    is_key = kind == "key"
    if is_key:
        shape, shard, chunk = [*shape, 2], [*shard, 2], [*chunk, 2]
    memory = draw(st.sampled_from([None, "device", "pinned_host"]))
    mesh = draw(meshes())
    axes = draw(st.lists(st.sampled_from(mesh.axis_names), unique=True, max_size=len(shape)))
    named = Named(mesh=mesh, spec=tuple((axis,) for axis in axes), memory_kind=memory)
    sizes = [mesh.size_of(entry) for entry in named.spec]
    divides = all(e % n == 0 for e, n in zip(shape, sizes, strict=False))
    sharding = draw(
        st.sampled_from(
            [
                None,
                Single(device_id=3, memory_kind=memory),
                # An axis that does not divide its dimension is refused.
                named if divides else Named(mesh=mesh, spec=(), memory_kind=memory),
                Tiled(name="Other", cell=tuple(shard), cells=(1, 0), device_ids=(0, 7)),
            ]
        )
    )
    return spec(
        kind=kind,
        dtype="uint32" if is_key else draw(st.sampled_from(dtypes.names())),
        shape=tuple(shape),
        sharding=sharding,
        storage=storage,
        shard_shape=tuple(shard),
        chunk_shape=tuple(chunk),
        codec=draw(st.sampled_from(["raw", "zstd"])),
        weak_type=draw(st.booleans()),
        committed=draw(st.booleans()),
        key_impl="rbg" if is_key else None,
        key_ndim=1 if is_key else 0,
    )


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    kinds: list[Any] = []
    counts: list[int] = []
    keys: list[Key | None] = []

    def node(key: Key | None, depth: int) -> None:
        kind = draw(
            st.sampled_from(
                ["leaf", "none", "dict", "ordereddict", "list", "tuple", "namedtuple", "custom"]
            )
        )
        count = 0 if kind in ("leaf", "none") or depth > 3 else draw(st.integers(0, 3))
        kinds.append(kind)
        counts.append(count)
        keys.append(key)
        used = draw(
            st.lists(
                st.one_of(TEXTS, st.integers(), st.integers(-(2**80), 2**80)),
                min_size=count,
                max_size=count,
                unique_by=lambda k: (type(k), k),
            )
        )
        for number, value in enumerate(used):
            if kind in ("list", "tuple"):
                node(Key(kind, number), depth + 1)
            elif isinstance(value, str):
                node(Key(draw(st.sampled_from(["str", "attr"])), value), depth + 1)
            else:
                node(Key(draw(st.sampled_from(["int", "flat"])), value), depth + 1)

    node(None, 0)
    return Tree(tuple(kinds), tuple(counts), tuple(keys))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    tree = draw(trees())
    specs = tuple(draw(st.lists(array_specs(), max_size=3, unique=True)))
    codes = draw(
        st.lists(
            st.integers(PER_PROCESS, len(specs) - 1),
            min_size=tree.num_leaves,
            max_size=tree.num_leaves,
        )
    )
    own = sum(code >= 0 and specs[code].storage == "array" for code in codes)
    names = st.text(string.ascii_lowercase + string.digits + "_-+=,@%", min_size=1, max_size=9)
    number = codes.count(VALUE)
    return manifest(
        nonce=draw(st.text("0123456789abcdef", min_size=32, max_size=32)),
        digest=draw(st.sampled_from(["sha256", "xxh3_128"])),
        tree=tree,
        specs=specs,
        leaf_codes=tuple(codes),
        values=tuple(draw(st.lists(VALUES, min_size=number, max_size=number))),
        names=tuple(draw(st.lists(names, min_size=own, max_size=own, unique=True))),
        process_count=draw(st.integers(1, 2**31)),
        device_count=draw(st.integers(0, 2**31)),
        platform=draw(TEXTS),
        tables=tuple(
            TableRef(nbytes=nbytes, id=bytes([nbytes % 256]) * 32)
            for nbytes in draw(st.lists(st.integers(10**6, wire.MAX_FILE_BYTES), min_size=1))
        ),
        metadata=draw(JSON),
        metrics=draw(NUMBERS),
        versions=draw(st.dictionaries(TEXTS, TEXTS, max_size=3)),
        created=draw(st.floats(0, 1e11)),
        seconds=draw(NUMBERS),
    )


def as_typed(value: Any) -> Any:
    """A value in which 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return [as_typed(item) for item in value]
    if isinstance(value, dict):
        return [(key, as_typed(item)) for key, item in value.items()]
    return type(value), repr(value)


@hypothesis.settings(max_examples=150, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(made=manifests())
def test_every_manifest_reads_back_as_it_was_written(made: Manifest) -> None:
    data, digest = manifest_file.to_bytes(made)
    found = manifest_file.from_bytes(data, what="it")
    assert found == made
    assert found.id == digest
    assert as_typed(found.values) == as_typed(made.values)
    assert as_typed(found.metadata) == as_typed(made.metadata)
    assert repr(found.leaves) == repr(made.leaves)
    assert manifest_file.to_bytes(found) == (data, digest)


@given(bits=st.integers(0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF) | st.integers(0, 2**64 - 1))
def test_a_float_keeps_its_bits_also_if_it_is_not_a_number(bits: int) -> None:
    odd = np.uint64(bits).view(np.float64).item()
    made = manifest(
        tree=Tree(("leaf",), (0,), (None,)), leaf_codes=(VALUE,), values=(odd,), names=(), specs=()
    )
    found = manifest_file.from_bytes(manifest_file.to_bytes(made)[0], what="it")
    assert np.float64(found.values[0]).view(np.uint64) == np.float64(odd).view(np.uint64)


# --- deterministic bytes ------------------------------------------------------------------------


def test_equal_manifests_give_equal_bytes() -> None:
    one = manifest(versions={"a": "1", "b": "2"}, metrics={"x": 1.0, "y": 2.0})
    two = manifest(versions={"b": "2", "a": "1"}, metrics={"y": 2.0, "x": 1.0})
    assert one == two
    assert manifest_file.to_bytes(one) == manifest_file.to_bytes(two)
    assert manifest_file.to_bytes(one) == manifest_file.to_bytes(dataclasses.replace(one))


def test_the_id_is_the_sha256_of_the_content_and_pins_every_field() -> None:
    data, digest = manifest_file.to_bytes(manifest())
    outer = msgpack.unpackb(data)
    assert list(outer) == ["format", "version", "kind", "id", "body"]
    assert outer["id"] == digest == hashlib.sha256(outer["body"]).digest()
    others = {
        "nonce": "f" * 32,
        "values": (2,),
        "names": ("b",),
        "process_count": 2,
        "device_count": 4,
        "platform": "gpu",
        "tables": (TableRef(nbytes=1000, id=bytes([1] * 32)),),
        "metadata": {"run": 2},
        "metrics": {},
        "versions": {},
        "created": 2.5,
        "seconds": {},
        "leaf_codes": (0, VALUE, 1),
        "source": {"kind": "npz"},
        "linked_nbytes": 1,
        "written_by": "ada@host",
    }
    ids = {manifest_file.to_bytes(manifest(**{name: new}))[1] for name, new in others.items()}
    assert len(ids | {digest}) == len(others) + 1


def test_two_saves_of_one_state_differ_in_nothing_but_nonce_and_time(tmp_path: Path) -> None:
    state = {
        "large": jax.device_put(
            np.arange(1 << 19, dtype=np.float32),
            NamedSharding(make_mesh((2,), ("x",)), PartitionSpec("x")),
        ),
        "small": jnp.arange(5),
        "host": np.arange(7),
        "own": pc.PerProcess({"position": 3}),
        "step": 1,
    }
    contents, files = [], []
    for name in ("a", "b"):
        found = pc.save(tmp_path / name, state, metadata={"k": [1, 2]})
        body = msgpack.unpackb((tmp_path / name / "manifest.msgpack").read_bytes())["body"]
        contents.append(msgpack.unpackb(body))
        data = tmp_path / name / found.data_dir
        files.append({f.relative_to(data): f.read_bytes() for f in data.rglob("*") if f.is_file()})
    differ = {key for key in contents[0] if contents[0][key] != contents[1][key]}
    assert differ <= {"nonce", "created", "seconds"}
    assert "nonce" in differ
    assert len(files[0]) == 6
    assert files[0] == files[1]


def test_save_returns_what_read_manifest_reads(tmp_path: Path) -> None:
    saved = pc.save(tmp_path, {"w": np.ones((2, 3)), "n": 1}, metadata="note")
    found = pc.read_manifest(tmp_path)
    assert found == saved
    assert found.id == saved.id != b""
    assert found.metadata == "note"
    assert found.process_count == len(found.tables) == 1
    assert found.device_count == 8
    assert found.platform == "cpu"
    assert set(found.versions) >= {"python", "jax", "numpy", "tensorstore", "pytree-ckpt"}
    assert set(found.seconds) >= {"plan"}
    assert all(passed >= 0 for passed in found.seconds.values())
    assert found.nbytes == 48


# --- what cannot be -----------------------------------------------------------------------------

ONE_LEAF = Tree(("leaf",), (0,), (None,))
MESH = Mesh(
    axis_names=("x", "y"), axis_sizes=(2, 2), axis_types=("Auto",) * 2, device_ids=(0, 1, 2, 3)
)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"nonce": "0" * 31}, "bad nonce"),
        ({"nonce": "g" * 32}, "bad nonce"),
        ({"nonce": "0" * 32 + "\n"}, "bad nonce"),
        ({"digest": "md5"}, "digest 'md5'"),
        ({"tree": ONE_LEAF}, "3 leaves in a tree of 1"),
        ({"leaf_codes": (0, 1, 2)}, "code without meaning"),
        ({"leaf_codes": (0, 1, -3)}, "code without meaning"),
        ({"values": ()}, "values and leaves differ"),
        ({"values": (1, 2)}, "values and leaves differ"),
        ({"names": ()}, "array folders and leaves differ"),
        ({"names": ("a", "b")}, "array folders and leaves differ"),
        ({"leaf_codes": (0, 0, VALUE), "names": ("a", "A")}, "two share a name"),
        ({"names": ("..",)}, "could leave the checkpoint"),
        ({"names": ("a/b",)}, "could leave the checkpoint"),
        ({"names": ("",)}, "could leave the checkpoint"),
        ({"tables": ()}, "at least one table"),
        ({"process_count": 0}, "one process"),
        ({"tables": (TableRef(nbytes=2**30, id=bytes(32)),)}, "larger than any table"),
        ({"tables": (TableRef(nbytes=100, id=bytes(32)),)}, "digests of 5 chunks"),
        ({"created": -1.0}, "bad time"),
        ({"created": float("inf")}, "bad time"),
        ({"created": float("nan")}, "bad time"),
    ],
)
def test_a_manifest_that_cannot_be_is_not_made(fields: dict[str, Any], text: str) -> None:
    assert manifest()
    with pytest.raises(ValueError, match=text):
        manifest(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dtype": "float128"}, "dtype 'float128'"),
        ({"shape": (-4, 2)}, "bad shape"),
        ({"shape": (1,) * 33}, "bad shape"),
        ({"shape": (2**40, 2**40)}, "beyond any limit"),
        ({"kind": "key"}, "kind key with key impl None"),
        ({"key_impl": "rbg"}, "kind numpy with key impl rbg"),
        ({"key_ndim": -1}, "key impl"),
        ({"key_ndim": 1}, "key dimensions"),
        ({"kind": "key", "key_impl": "rbg", "key_ndim": 3}, "3 key dimensions"),
        ({"kind": "key", "key_impl": "rbg", "key_ndim": 0, "dtype": "uint32"}, "keys with data"),
        ({"kind": "key", "key_impl": "rbg", "key_ndim": 1}, "keys with data of float32"),
        ({"storage": "empty"}, "stored as empty"),
        ({"shape": (0, 2)}, "stored as packed"),
        ({"codec": "blosc"}, "codec 'blosc'"),
        ({"shard_shape": (4,)}, "does not fit an array"),
        ({"chunk_shape": (4,)}, "does not fit an array"),
        ({"shard_shape": (0, 2)}, "bad grid"),
        ({"chunk_shape": (0, 2)}, "bad grid"),
        ({"storage": "array", "chunk_shape": (3, 2)}, "do not divide"),
        ({"chunk_shape": (2, 2)}, "a packed shard is one chunk"),
        ({"shard_shape": (8, 2), "chunk_shape": (8, 2)}, "shards of"),
    ],
)
def test_an_array_that_cannot_be_is_not_made(fields: dict[str, Any], text: str) -> None:
    assert spec()
    with pytest.raises(ValueError, match=text):
        spec(**fields)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: dataclasses.replace(MESH, axis_sizes=(2,)), "one size and one type"),
        (lambda: dataclasses.replace(MESH, axis_types=("Auto",)), "one size and one type"),
        (lambda: dataclasses.replace(MESH, axis_names=("x", "x")), "not distinct"),
        (lambda: dataclasses.replace(MESH, axis_sizes=(4, 0)), "not positive"),
        (lambda: dataclasses.replace(MESH, device_ids=(0, 1)), "2 devices in a mesh"),
        (lambda: dataclasses.replace(MESH, device_ids=(0, 1, 1, 2)), "a device twice"),
        (lambda: Named(mesh=MESH, spec=(("z",),)), "does not fit"),
        (lambda: Named(mesh=MESH, spec=(("x",), ("x",))), "does not fit"),
        (lambda: Tiled(name="X", cell=(1,), cells=(0,), device_ids=(0, 1)), "one cell for each"),
        (lambda: Tiled(name="X", cell=(1,), cells=(), device_ids=()), "one cell for each"),
        (lambda: Tree((), (), ()), "differ in length"),
        (lambda: Tree(("leaf",), (0, 0), (None,)), "differ in length"),
        (lambda: Tree(("leaf", "leaf"), (0, 0), (None, Key("str", "a"))), "one root"),
        (lambda: Tree(("leaf",), (0,), (Key("str", "a"),)), "one root"),
        (lambda: Tree(("leaf",), (1,), (None,)), "has 1 children"),
        (lambda: Tree(("list",), (-1,), (None,)), "has -1 children"),
        (lambda: Tree(("list",), (1,), (None,)), "ends before"),
    ],
)
def test_a_layout_or_a_tree_that_cannot_be_is_not_made(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@hypothesis.settings(max_examples=100)
@given(made=array_specs())
def test_the_chunks_of_all_shards_are_the_chunks_of_the_array(made: ArraySpec) -> None:
    if made.storage == "empty":
        assert made.num_chunks == 0
        return
    shards = made.shards
    counted = [Grid(box.shape, made.chunk_shape).size for box in shards.boxes()]
    assert made.num_chunks == sum(counted)


# --- for people ---------------------------------------------------------------------------------


def test_the_repr_of_a_manifest_says_what_there_is(tmp_path: Path) -> None:
    mesh = make_mesh((4, 2), ("data", "model"))
    state = {
        "w": jax.device_put(
            np.ones((8, 8), np.float32), NamedSharding(mesh, PartitionSpec("data", "model"))
        ),
        "key": jax.random.key(0),
        "own": pc.PerProcess(1),
        "host": np.ones(2, np.int8),
        "step": 5,
    }
    saved = pc.save(tmp_path, state)
    text = repr(saved)
    assert text.startswith(
        "Manifest(5 leaves in host, key, own, step, w; 266 bytes; mesh(data=4, model=2); "
        "1 process with 8 cpu devices; sha256; 20"
    )
    assert text.endswith(f" UTC; id {saved.id.hex()[:12]})")
    assert [str(leaf) for leaf in saved.leaves] == [
        "host  int8[2] host array",
        "key  key<threefry2x32>[] single device",
        "own  one value per process",
        "step  int",
        "w  float32[8, 8] P('data', 'model') on mesh(data=4, model=2)",
    ]
    with pc.open(tmp_path) as checkpoint:
        assert repr(saved) in repr(checkpoint)
        assert repr(checkpoint["w"]) == f"StoredArray({saved.by_text['w']})"
    assert repr(manifest(process_count=2)).count("2 processes") == 1
    assert "no mesh" in repr(manifest())
    assert "; loss=0.25; acc=1; " in repr(manifest(metrics={"loss": 0.25, "acc": 1.0}))
    many = pc.save(tmp_path / "many", {f"k{n}": n for n in range(9)})
    assert repr(many).startswith("Manifest(9 leaves in k0, k1, k2, k3, k4, …; 0 bytes; no mesh; ")
    root = pc.save(tmp_path / "root", 7)
    assert [str(leaf) for leaf in root.leaves] == ["(root)  int"]


# --- metadata -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        ("text", "text"),
        (
            {"a": {"b": [1, 2.5, True, None, "x", b"\0y"]}},
            {"a": {"b": [1, 2.5, True, None, "x", b"\0y"]}},
        ),
        ({"": {}}, {"": {}}),
        ([], []),
        ((1, (2, ())), [1, [2, []]]),
        ({"z": 1, "a": 2}, {"z": 1, "a": 2}),
        (2**64 - 1, 2**64 - 1),
        (-(2**63), -(2**63)),
        (np.float64(0.1), 0.1),
        (-0.0, -0.0),
        ("größe 空 🙂 \0", "größe 空 🙂 \0"),
        (float("inf"), float("inf")),
    ],
)
def test_metadata_comes_back(tmp_path: Path, given: Any, found: Any) -> None:
    pc.save(tmp_path, {}, metadata=given)
    for manifest_ in (pc.read_manifest(tmp_path), pc.open(tmp_path).manifest):
        assert as_typed(manifest_.metadata) == as_typed(found)


def test_a_nan_in_metadata_comes_back(tmp_path: Path) -> None:
    pc.save(tmp_path, {}, metadata={"loss": float("nan")})
    assert math.isnan(pc.read_manifest(tmp_path).metadata["loss"])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("metadata", "error", "text"),
    [
        ({1: 2}, TypeError, "metadata has the key 1; keys must be strings"),
        ({"a": [{None: 1}]}, TypeError, r"metadata\['a'\]\[0\] has the key None"),
        ({b"a": 1}, TypeError, "keys must be strings"),
        ({"a": object()}, TypeError, r"metadata\['a'\] is of type object"),
        ({"a": {1, 2}}, TypeError, r"metadata\['a'\] is of type set"),
        (np.int64(1), TypeError, "metadata is of type int64"),
        (np.ones(2), TypeError, "metadata is of type ndarray"),
        ({"w": jnp.ones(2)}, TypeError, r"metadata\['w'\] is of type ArrayImpl"),
        (1j, TypeError, "metadata is of type complex"),
        (2**64, ValueError, "beyond 64 bits"),
        ({"a": -(2**63) - 1}, ValueError, r"metadata\['a'\] is an int beyond 64 bits"),
        (nested(17), ValueError, "nested deeper than 16"),
        (nested(100_000), ValueError, "nested deeper than 16"),
        ("\ud800", ValueError, "metadata is .* not valid UTF-8"),
        ({"a": {"\udfff": 1}}, ValueError, r"a key of metadata\['a'\] is .* not valid UTF-8"),
        ([0] * (wire.MAX_ITEMS + 1), pc.FormatError, "elements"),
        (bytes(wire.MAX_FILE_BYTES), pc.FormatError, "the limit is 67108864"),
    ],
    ids=itertools.count(),
)
def test_metadata_that_would_not_come_back_is_refused_before_a_byte_is_written(
    tmp_path: Path, metadata: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        pc.save(tmp_path / "ckpt", {"w": np.ones(2)}, metadata=metadata)
    assert os.listdir(tmp_path) == []


def test_metadata_as_deep_as_allowed_is_saved(tmp_path: Path) -> None:
    pc.save(tmp_path, {}, metadata=nested(16))
    assert pc.read_manifest(tmp_path).metadata == nested(16)


def test_what_is_in_the_manifest_is_never_too_much_to_read_back(tmp_path: Path) -> None:
    """A commit that no reader takes would be the loss of a checkpoint."""
    for name, tree in {
        "keys": dict.fromkeys(range(200)) | {10**300: 1, -(10**300): 2},
        "deep": nested(200),
        "long": {"k" * 10_000: 1, "s": "t" * 100_000, "b": bytes(100_000), "i": 1 << 100_000},
    }.items():
        pc.save(tmp_path / name, tree)
        assert pc.load(tmp_path / name) == tree


# --- without devices ----------------------------------------------------------------------------

WITHOUT = """
import json, sys

def loaded():
    return [name for name in ("jax", "tensorstore", "numpy", "msgpack") if name in sys.modules]

found = {}
import pytree_ckpt as pc
found["import"] = loaded()
sys.modules["jax"] = None  # an import of it is now an error
pc.SaveOptions(), pc.CheckpointError, pc.PerProcess
found["names"] = loaded()
manifest = pc.read_manifest(sys.argv[1])
found["read_manifest"] = loaded()
found["leaves"] = [str(leaf) for leaf in manifest.leaves]
repr(manifest)
found["steps"] = pc.steps(sys.argv[1])
found["after steps"] = loaded()
with pc.open(sys.argv[1]) as checkpoint:
    found["w"] = float(checkpoint["w"][1, 2])
    found["key"] = checkpoint.to_numpy()["key"].tolist()
found["open"] = loaded()
del sys.modules["jax"]
found["jax"] = [name for name in sys.modules if name.split(".")[0] == "jax"]
print(json.dumps(found))
"""


def test_a_checkpoint_is_read_without_jax_and_its_manifest_without_tensorstore(
    tmp_path: Path,
) -> None:
    state = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(7)}
    pc.save(tmp_path, state)
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(pc.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["import"] == []
    assert set(found["names"]) <= {"jax", "msgpack", "numpy"}
    assert "tensorstore" not in found["read_manifest"]
    assert "tensorstore" not in found["after steps"]
    assert "tensorstore" in found["open"]
    assert found["jax"] == []
    assert found["leaves"][1] == "w  float32[2, 3] single device"
    assert found["w"] == 5.0
    assert found["key"] == np.asarray(jax.random.key_data(state["key"])).tolist()
