"""Manifests and tables with right digests and wrong content: refused by name, within bounds."""

import copy
import hashlib
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.format import manifest_file, tables, wire
from pytree_ckpt.format.tables import ShardIndex
from pytree_ckpt.plan import chunking
from tests.bitwise import assert_same
from tests.conftest import make_mesh
from tests.hostile import CHANGES, EDITS, HUGE, body_of, edited, pack, places_in, sealed

MIB = 1 << 20
Content = dict[str, Any]
Change = Callable[[Content], object]


def outer(file: bytes, **fields: Any) -> bytes:
    """A file with other fields around its body."""
    return pack(msgpack.unpackb(file) | fields)


class Checkpoint:
    """A small checkpoint with every kind of leaf, and what its two metadata files say."""

    def __init__(self, path: Path, state: Any) -> None:
        self.path = path
        self.state = state
        self.manifest_bytes = (path / "manifest.msgpack").read_bytes()
        self.table_bytes = self.table_file(path).read_bytes()
        self.manifest = msgpack.unpackb(body_of(self.manifest_bytes))
        self.table = msgpack.unpackb(body_of(self.table_bytes))

    @staticmethod
    def table_file(path: Path) -> Path:
        (found,) = path.glob("data-*/tables/00000.msgpack")
        return found

    def craft(
        self, path: Path, *, manifest: Change | None = None, table: Change | None = None
    ) -> Path:
        """A copy with other content in its metadata, all digests of it made right again."""
        shutil.copytree(self.path, path, dirs_exist_ok=True)
        content = copy.deepcopy(self.manifest)
        if table is not None:
            other = copy.deepcopy(self.table)
            table(other)
            body = pack(other)
            data = sealed(body, "table")
            self.table_file(path).write_bytes(data)
            content["tables"] = [[len(data), hashlib.sha256(body).digest()]]
        if manifest is not None:
            manifest(content)
        (path / "manifest.msgpack").write_bytes(sealed(pack(content)))
        return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    mesh = make_mesh((4, 2), ("data", "model"))
    state = {
        "both": jax.device_put(
            np.arange(64, dtype=np.float32).reshape(8, 8),
            NamedSharding(mesh, PartitionSpec("data", "model")),
        ),
        "empty": np.zeros((0, 3), np.int8),
        "host": np.arange(5),
        "key": jax.random.key(1),
        "large": jax.device_put(
            np.arange(128, dtype=np.float32).reshape(16, 8),
            NamedSharding(mesh, PartitionSpec("data")),
        ),
        "list": [jnp.ones(3), (1, 2.5, "x", b"y", 3j, True)],
        "one": jax.device_put(np.arange(3), jax.devices()[3]),
        "own": pc.PerProcess({"position": 7}),
        "scalar": np.float16(2),
    }
    path = tmp_path_factory.mktemp("hostile") / "base"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "PACK_BELOW_NBYTES", 128)
        patch.setattr(chunking, "MAX_CHUNK_NBYTES", 64)
        pc.save(path, state, metadata={"run": "a", "rates": [0.1, 0.2]})
    return Checkpoint(path, state)


def refused(data: bytes, parse: Callable[..., Any] = manifest_file.from_bytes) -> str:
    """The text of the `FormatError` that `data` is refused with."""
    with pytest.raises(pc.FormatError) as caught:
        parse(data, what="the file")
    assert str(caught.value).startswith("the file ")
    return str(caught.value)


# --- the envelope -------------------------------------------------------------------------------

PARSERS = {"manifest": manifest_file.from_bytes, "table": tables.from_bytes}


@pytest.mark.parametrize("kind", ["manifest", "table"])
@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("empty", lambda d: b"", "empty"),
        ("not msgpack", lambda d: b"\xc1" + d, "not valid"),
        ("a list", lambda d: pack([1, 2]), "not a pytree_ckpt file"),
        ("an int", lambda d: b"\x07", "not a pytree_ckpt file"),
        ("text", lambda d: b"#!/bin/sh\n", "not valid"),
        ("trailing byte", lambda d: d + b"\0", "not valid"),
        ("two objects", lambda d: d + d, "not valid"),
        ("cut", lambda d: d[:-1], "not valid"),
        ("another format", lambda d: sealed(b"\x80", format="orbax"), "not a pytree_ckpt file"),
        ("no format", lambda d: pack({"version": 1}), "not a pytree_ckpt file"),
        ("version 2", lambda d: sealed(b"\x80", version=2), "format version 2"),
        ("version 0", lambda d: sealed(b"\x80", version=0), "format version 0"),
        ("version -1", lambda d: sealed(b"\x80", version=-1), "format version -1"),
        ("version True", lambda d: sealed(b"\x80", version=True), "format version True"),
        ("version text", lambda d: sealed(b"\x80", version="1"), "format version '1'"),
        ("version huge", lambda d: sealed(b"\x80", version=2**64 - 1), "format version 184467"),
        ("extra key", lambda d: sealed(b"\x80", more=1), "is not a pytree_ckpt"),
        ("other kind", lambda d: sealed(b"\x80", "other"), "is not a pytree_ckpt"),
        ("digest of else", lambda d: outer(d, id=bytes(32)), "damaged"),
        ("digest as text", lambda d: outer(d, id="0" * 32), "damaged"),
        ("body as text", lambda d: outer(d, body="{}"), "damaged"),
        ("body as a map", lambda d: outer(d, body={}), "damaged"),
        ("int keys", lambda d: pack({1: 2}), "not valid"),
    ],
)
def test_a_file_that_is_not_of_this_format_is_refused(
    base: Checkpoint, kind: str, name: str, change: Callable[[bytes], bytes], text: str
) -> None:
    good = base.manifest_bytes if kind == "manifest" else base.table_bytes
    assert text in refused(change(good), PARSERS[kind])


def test_a_table_is_no_manifest_and_a_manifest_is_no_table(base: Checkpoint) -> None:
    assert "is not a pytree_ckpt manifest" in refused(base.table_bytes)
    assert "is not a pytree_ckpt table" in refused(base.manifest_bytes, tables.from_bytes)


@pytest.mark.parametrize("kind", ["manifest", "table"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("array of 2**32-1", b"\xdd\xff\xff\xff\xff"),
        ("map of 2**32-1", b"\xdf\xff\xff\xff\xff"),
        ("text of 2**32-1", b"\xdb\xff\xff\xff\xff"),
        ("bytes of 2**32-1", b"\xc6\xff\xff\xff\xff"),
        ("ext of 2**32-1", b"\xc9\xff\xff\xff\xff\x01"),
        ("array of 65535", b"\xdc\xff\xff"),
        ("map of 65535", b"\xde\xff\xff"),
        ("ext", pack(msgpack.ExtType(5, b"abc"))),
        ("fixext 1", b"\xd4\x01\x00"),
        ("timestamp", pack(msgpack.Timestamp(1, 2))),
        ("ext in a map", b"\x81\xa1a\xd6\xff\x00\x00\x00\x00"),
        ("invalid utf-8", b"\xa2\xff\xfe"),
        ("invalid utf-8 key", b"\x81\xa2\xff\xfe\x01"),
        ("duplicate key", b"\x82\xa1a\x01\xa1a\x02"),
        ("bytes as key", b"\x81\xc4\x01a\x01"),
        ("list as key", b"\x81\x90\x01"),
        ("nil as key", b"\x81\xc0\x01"),
        ("reserved byte", b"\xc1"),
        ("nested arrays", b"\x91" * 10_000 + b"\xc0"),
        ("nested maps", b"\x81\xa1a" * 10_000 + b"\xc0"),
        ("nested to 33", b"\x91" * 33 + b"\xc0"),
        ("nested headers of large arrays", b"\xdd\x00\x40\x00\x00" * 500),
        ("nan", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),
        ("float", b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"),
        ("nothing", b""),
        ("nil", b"\xc0"),
        ("empty map", b"\x80"),
    ],
)
def test_msgpack_that_no_writer_writes_is_refused(
    kind: str, inside: bool, name: str, data: bytes
) -> None:
    refused(sealed(data, kind) if inside else data, PARSERS[kind])


def test_a_value_nested_32_deep_is_read_and_33_is_refused(base: Checkpoint) -> None:
    def nested(depth: int) -> bytes:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return sealed(pack(base.manifest | {"metadata": value}))

    # The map of the content is one level itself.
    assert manifest_file.from_bytes(nested(31), what="the file").nonce == base.manifest["nonce"]
    assert "deep" in refused(nested(32))


BOMBS = """
import hashlib, json, msgpack, resource, struct, sys, time
from pytree_ckpt.errors import FormatError
from pytree_ckpt.format import manifest_file, tables, wire

SIZE = wire.MAX_FILE_BYTES - 200

def sealed(body):
    digest = hashlib.sha256(body).digest()
    fields = {"format": "pytree_ckpt", "version": 1, "kind": "manifest", "id": digest, "body": body}
    return msgpack.packb(fields, use_bin_type=True)

def filled(item):
    # One array of arrays, each full to the limit of the format.
    count = min(1 << 22, SIZE // len(item) // 4)
    inner = b"\\xdd" + struct.pack(">I", count) + item * count
    number = SIZE // len(inner)
    return b"\\xdc" + struct.pack(">H", number) + inner * number

def headers(count):
    return b"\\xdd" + struct.pack(">I", count)

bombs = {
    "empty arrays": lambda: filled(b"\\x90"),
    "empty maps": lambda: filled(b"\\x80"),
    "arrays of one": lambda: filled(b"\\x91\\x01"),
    "ints": lambda: filled(b"\\xcd\\xff\\xfe"),
    "floats": lambda: filled(b"\\xcb" + bytes(8)),
    "short texts": lambda: filled(b"\\xa2ab"),
    "nested headers": lambda: headers(1 << 22) * 400 + bytes(SIZE - 2000),
    "one text": lambda: b"\\xdb" + struct.pack(">I", SIZE - 5) + b"a" * (SIZE - 5),
}
read = {"outer": lambda data: data, "body": sealed}

def vm_nbytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()

for where, wrap in read.items():
    for name, make in bombs.items():
        data = wrap(make())
        assert len(data) <= wire.MAX_FILE_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (vm_nbytes() + (256 << 20), hard))
        started = time.monotonic()
        try:
            manifest_file.from_bytes(data, what="the bomb")
            outcome = "read"
        except FormatError:
            outcome = "FormatError"
        except MemoryError:
            outcome = "MemoryError"
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        print(json.dumps([where, name, outcome, time.monotonic() - started]), flush=True)
        del data
"""


def run_python(code: str, *arguments: str, timeout_s: float = 100) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(pc.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads its own size in /proc")
def test_the_largest_files_are_refused_within_256_mib() -> None:
    run = run_python(BOMBS)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    print(*found, sep="\n")
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(found) == 16
    assert [bomb for bomb in found if bomb[2] != "FormatError"] == []


@pytest.mark.parametrize("nbytes", [64 * MIB + 1, 1 << 40])
def test_a_file_beyond_the_limit_is_refused_by_its_size(
    base: Checkpoint, tmp_path: Path, nbytes: int
) -> None:
    path = base.craft(tmp_path / "ckpt")
    with (path / "manifest.msgpack").open("r+b") as file:
        file.truncate(nbytes)
    for read in (pc.read_manifest, pc.load, pc.open):
        with pytest.raises(pc.FormatError, match=r"the limit is 67108864"):
            read(path)
    path = base.craft(tmp_path / "ckpt")
    with base.table_file(path).open("r+b") as file:
        file.truncate(nbytes)
    with pytest.raises(pc.IntegrityError, match="the table"):
        pc.load(path)


# --- the manifest -------------------------------------------------------------------------------


def set_(*where: str | int, to: Any) -> Change:
    """Set a field, deep in the content."""

    def change(content: Content) -> None:
        at: Any = content
        for key in where[:-1]:
            at = at[key]
        at[where[-1]] = to

    return change


def spec_of(content: Content, storage: str, kind: str = "jax") -> Content:
    return next(a for a in content["arrays"] if (a["storage"], a["kind"]) == (storage, kind))


def set_spec(storage: str = "array", kind: str = "jax", /, **to: Any) -> Change:
    return lambda content: spec_of(content, storage, kind).update(to)


def set_sharding(kind: str, /, **to: Any) -> Change:
    def change(content: Content) -> None:
        next(s for s in content["shardings"] if s["kind"] == kind).update(to)

    return change


def replace_sharding(**to: Any) -> Change:
    def change(content: Content) -> None:
        at = next(i for i, s in enumerate(content["shardings"]) if s["kind"] == "single")
        content["shardings"][at] = {"memory_kind": None} | to

    return change


def deep_tree(depth: int) -> Content:
    """A chain of lists with one leaf."""
    return {
        "kinds": bytes([4] * depth + [0]),
        "counts": np.array([1] * depth + [0], "<u4").tobytes(),
        "key_kinds": bytes([2] * depth),
        "keys": [0] * depth,
    }


def one_leaf(content: Content) -> None:
    """Make all but the tree fit a tree of one leaf, the value 1."""
    content.update(leaves=struct.pack("<i", -1), values=[["i", 1]], names=[], arrays=[])


def tree(kinds: list[int], counts: list[int], key_kinds: list[int], keys: list[Any]) -> Change:
    columns = {
        "kinds": bytes(kinds),
        "counts": np.array(counts, "<u4").tobytes(),
        "key_kinds": bytes(key_kinds),
        "keys": keys,
    }

    def change(content: Content) -> None:
        leaves = kinds.count(0)
        one_leaf(content)
        content.update(
            leaves=struct.pack("<i", -1) * leaves, values=[["i", 1]] * leaves, tree=columns
        )

    return change


HOSTILE_MANIFESTS: dict[str, Change] = {
    # what it asks of the reader
    "an unknown feature": set_("required", to=["warp"]),
    "features that are not text": set_("required", to=[1]),
    # keys of maps
    "metrics named by bytes": set_("metrics", to={b"loss": 1.0}),
    "metadata with a key of bytes": set_("metadata", to=[{"run": {b"a": 1}}]),
    # paths
    "nonce with a slash": set_("nonce", to="../../../../tmp/" + "0" * 16),
    "nonce of dots": set_("nonce", to=".." + "0" * 30),
    "nonce too short": set_("nonce", to="0" * 31),
    "nonce with a newline": set_("nonce", to="0" * 32 + "\n"),
    "nonce in capitals": set_("nonce", to="A" * 32),
    "nonce in other digits": set_("nonce", to="\N{ARABIC-INDIC DIGIT ZERO}" * 32),
    "nonce as bytes": set_("nonce", to=b"0" * 32),
    "name with a slash": set_("names", to=["a/b"]),
    "absolute name": set_("names", to=["/tmp/x"]),
    "name ..": set_("names", to=[".."]),
    "name .": set_("names", to=["."]),
    "hidden name": set_("names", to=[".git"]),
    "empty name": set_("names", to=[""]),
    "name with NUL": set_("names", to=["a\0b"]),
    "name with a backslash": set_("names", to=["a\\b"]),
    "name with a newline": set_("names", to=["large\n"]),
    "name in unicode": set_("names", to=["größe"]),
    "name too long": set_("names", to=["a" * 256]),
    "name as bytes": set_("names", to=[b"large"]),
    "one name too many": set_("names", to=["large", "other"]),
    "no names": set_("names", to=[]),
    # algorithms
    "unknown digest": set_("digest", to="md5"),
    "unknown codec": set_spec(codec="blosc"),
    "unknown dtype": set_spec(dtype="float128"),
    "dtype of objects": set_spec(dtype="object"),
    "dtype of structs": set_spec(dtype="V8"),
    "unknown kind of array": set_spec(kind="pickle"),
    "unknown storage": set_spec(storage="s3"),
    "unknown kind of sharding": set_sharding("single", kind="magic"),
    "unknown kind of node": tree([99], [0], [], []),
    "unknown kind of key": tree([2, 0], [1, 0], [9], ["a"]),
    "unknown tag of a value": set_("values", 0, to=["x", 1]),
    "unknown key implementation": set_spec("packed", "key", key_impl="rot13"),
    "unknown kind of memory": set_sharding("named", memory_kind="tape"),
    "unknown kind of memory of one device": lambda c: [
        s.update(memory_kind="tape") for s in c["shardings"] if s["kind"] == "single"
    ],
    # counts that disagree
    "too few leaves": lambda c: c.update(leaves=c["leaves"][4:]),
    "too many leaves": lambda c: c.update(leaves=c["leaves"] + b"\xff" * 4),
    "leaves cut": lambda c: c.update(leaves=c["leaves"][:-1]),
    "leaf of no spec": lambda c: c.update(leaves=struct.pack("<i", 99) + c["leaves"][4:]),
    "leaf of code -3": lambda c: c.update(leaves=struct.pack("<i", -3) + c["leaves"][4:]),
    "a value too many": lambda c: c["values"].append(["i", 1]),
    "a value too few": lambda c: c["values"].pop(),
    "no table": set_("tables", to=[]),
    "no process": set_("process_count", to=0),
    "negative process count": set_("process_count", to=-1),
    "negative device count": set_("device_count", to=-1),
    "device count true": set_("device_count", to=True),
    # references to tables
    "table of no bytes": lambda c: c["tables"][0].__setitem__(0, 0),
    "table of -1 bytes": lambda c: c["tables"][0].__setitem__(0, -1),
    "table id cut": lambda c: c["tables"][0].__setitem__(1, bytes(31)),
    "table reference of three": lambda c: c["tables"][0].append(1),
    "table reference as text": set_("tables", to=["00000.msgpack"]),
    # the tree
    "no nodes": tree([], [], [], []),
    "two roots": tree([0, 0], [0, 0], [2], [0]),
    "ends too early": tree([4, 0], [2, 0], [2], [0]),
    "count of 2**32-1": tree([4, 0], [2**32 - 1, 0], [2], [0]),
    "leaf with children": tree([0, 0], [1, 0], [2], [0]),
    "none with children": tree([1, 0], [1, 0], [2], [0]),
    "key twice": tree([2, 0, 0], [2, 0, 0], [0, 0], ["a", "a"]),
    "int key twice": tree([2, 0, 0], [2, 0, 0], [1, 1], [1, b"1"]),
    "counts cut": lambda c: c["tree"].update(counts=c["tree"]["counts"][:-4]),
    "keys cut": lambda c: c["tree"]["keys"].pop(),
    "text as index": tree([4, 0], [1, 0], [2], ["0"]),
    "number as name": tree([2, 0], [1, 0], [0], [7]),
    "true as key": tree([2, 0], [1, 0], [1], [True]),
    "float as key": tree([2, 0], [1, 0], [1], [1.5]),
    "nil as key": tree([2, 0], [1, 0], [0], [None]),
    "key of digits that are none": tree([2, 0], [1, 0], [1], [b"12x"]),
    "key of many digits": tree([2, 0], [1, 0], [1], [b"9" * 5000]),
    "deeper than any tree": lambda c: (one_leaf(c), c.update(tree=deep_tree(257))),
    "paths that are far longer than the file": tree(
        [2, 2] + [0] * 200, [1, 200] + [0] * 200, [0] + [1] * 200, ["k" * MIB, *range(200)]
    ),
    "very deep": lambda c: (one_leaf(c), c.update(tree=deep_tree(100_000))),
    # meshes and shardings
    "mesh of size 0": set_("meshes", 0, "axis_sizes", to=[0, 2]),
    "mesh of size -4": set_("meshes", 0, "axis_sizes", to=[-4, -2]),
    "mesh of 2**62 devices": set_("meshes", 0, "axis_sizes", to=[2**31, 2**31]),
    "mesh with an axis twice": set_("meshes", 0, "axis_names", to=["data", "data"]),
    "mesh with a size too many": set_("meshes", 0, "axis_sizes", to=[4, 2, 1]),
    "mesh with a device too few": set_("meshes", 0, "device_ids", to=list(range(7))),
    "mesh with a device twice": set_("meshes", 0, "device_ids", to=[0] * 8),
    "no mesh": set_("meshes", to=[]),
    "mesh -1": set_sharding("named", mesh=-1),
    "mesh 2**63": set_sharding("named", mesh=2**63),
    "axis that the mesh lacks": set_sharding("named", spec=[["pipe"]]),
    "axis used twice": set_sharding("named", spec=[["data"], ["data"]]),
    "axis that is a number": set_sharding("named", spec=[[1]]),
    "spec longer than the array": set_sharding("named", spec=[[], [], [], ["data"]]),
    "sharding 99": set_spec(sharding=99),
    "sharding -1": set_spec(sharding=-1),
    "single on two devices": set_sharding("single", device_ids=[0, 1]),
    "single on none": set_sharding("single", device_ids=[]),
    "tiled on none": replace_sharding(kind="tiled", name="X", cell=[3], cells=[], device_ids=[]),
    "tiled with a cell too few": replace_sharding(
        kind="tiled", name="X", cell=[3], cells=[0], device_ids=[0, 1]
    ),
    # shapes
    "negative shape": set_spec(shape=[-16, 8]),
    "shape of 33 dimensions": set_spec(
        shape=[1] * 31 + [16, 8], shard_shape=[1] * 31 + [4, 8], chunk_shape=[1] * 31 + [2, 8]
    ),
    "shape of 2**64 bytes": set_spec(shape=[2**62, 8]),
    "shape beyond 64 bits": set_spec(shape=[2**63, 2**63]),
    "shape as floats": set_spec(shape=[16.0, 8.0]),
    "shape as bools": set_spec(shape=[True, True]),
    "shape of another rank": set_spec(shape=[128]),
    "shard of 0": set_spec(shard_shape=[0, 8]),
    "negative shard": set_spec(shard_shape=[-4, 8]),
    "shard larger than the array": set_spec(shard_shape=[32, 8]),
    "chunk of 0": set_spec(chunk_shape=[0, 8]),
    "chunk that does not divide": set_spec(chunk_shape=[3, 8]),
    "chunk larger than the shard": set_spec(chunk_shape=[8, 8]),
    "chunk of another rank": set_spec(chunk_shape=[2, 8, 1]),
    "empty with elements": set_spec(storage="empty"),
    "array without elements": set_spec(shape=[0, 8]),
    "packed in several chunks": set_spec("packed", chunk_shape=[1, 1]),
    "packed that was an array": set_spec(storage="packed"),
    "more key dimensions than there are": set_spec("packed", "key", key_ndim=3),
    "negative key dimensions": set_spec("packed", "key", key_ndim=-1),
    "no key dimensions": set_spec("packed", "key", key_ndim=0),
    "keys without implementation": set_spec("packed", "key", key_impl=None),
    "keys in floats": set_spec("packed", "key", dtype="float32"),
    "implementation without keys": set_spec(key_impl="rbg"),
    "weak type of 1": set_spec(weak_type=1),
    # scalars
    "created NaN": set_("created", to=float("nan")),
    "created as int": set_("created", to=1),
    "seconds as text": set_("seconds", to={"plan": "1"}),
    "versions as numbers": set_("versions", to={"jax": 1}),
    "int as text": set_("values", 0, to=["i", "1"]),
    "int of no bytes": set_("values", 0, to=["i", b""]),
    "int of 2 MiB": set_("values", 0, to=["i", bytes(2 * MIB)]),
    "float of 4 bytes": set_("values", 0, to=["f", bytes(4)]),
    "complex of 8 bytes": set_("values", 0, to=["c", bytes(8)]),
    "text of bytes": set_("values", 0, to=["s", b"x"]),
    "bool of 1": set_("values", 0, to=["b", 1]),
    "value of nothing": set_("values", 0, to=[]),
    "value that is nil": set_("values", 0, to=None),
}


@pytest.mark.parametrize("name", HOSTILE_MANIFESTS)
def test_a_manifest_that_lies_is_refused_by_every_reader(
    base: Checkpoint, tmp_path: Path, name: str
) -> None:
    path = base.craft(tmp_path / "ckpt", manifest=HOSTILE_MANIFESTS[name])
    with pytest.raises(pc.CheckpointError) as caught:
        pc.load(path)
    assert len(str(caught.value)) < 20_000
    # What no device can lay out may still be read without devices, but only as it was saved.
    for read in (pc.read_manifest, lambda p: pc.open(p).to_numpy()):
        try:
            read(path)
        except pc.IntegrityError:
            continue
        except pc.FormatError as error:
            text = str(error)
        else:
            continue
        assert str(path) in text


def test_what_a_newer_release_wrote_is_refused_with_a_remedy(
    base: Checkpoint, tmp_path: Path
) -> None:
    path = base.craft(tmp_path / "ckpt", manifest=set_("required", to=["warp", "fold"]))
    for read in (pc.read_manifest, pc.load, pc.open):
        with pytest.raises(pc.FormatError, match=r"does not have: warp, fold"):
            read(path)
    (path / "manifest.msgpack").write_bytes(sealed(b"\xc1 unknown to this release", version=2))
    for read in (pc.read_manifest, pc.load, pc.open):
        with pytest.raises(pc.FormatError) as caught:
            read(path)
        text = str(caught.value)
        assert "format version 2" in text
        assert "reads version 1" in text
        assert "newer pytree_ckpt" in text


def test_a_field_that_this_release_does_not_know_is_ignored(
    base: Checkpoint, tmp_path: Path
) -> None:
    path = base.craft(tmp_path / "ckpt", manifest=lambda c: c.update(comment="hello"))
    assert pc.read_manifest(path) == pc.read_manifest(base.path)
    assert_same(pc.load(path, base.state), base.state)


WRONG: list[Any] = [None, True, 0, -1, 2**64 - 1, 1.5, float("inf"), "x", b"x", b"", [], {}]
WRONG += [[None], [[]], [{}], {"a": 1}, [[1, 2, 3]], ["a", 1], [float("nan")], bytes(32), "0" * 32]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: repr(value)[:20])
def test_a_field_of_another_type_is_refused(base: Checkpoint, wrong: Any) -> None:
    places: list[tuple[str | int, ...]] = [(key,) for key in base.manifest]
    places += [("tree", key) for key in base.manifest["tree"]]
    places += [("meshes", 0, key) for key in base.manifest["meshes"][0]]
    for at, sharding in enumerate(base.manifest["shardings"]):
        places += [("shardings", at, key) for key in sharding]
    places += [("arrays", 0, key) for key in base.manifest["arrays"][0]]
    places += [(key, 0) for key in ("meshes", "shardings", "arrays", "values", "names", "tables")]
    good = manifest_file.from_bytes(base.manifest_bytes, what="the file")
    for place in places:
        content = copy.deepcopy(base.manifest)
        set_(*place, to=wrong)(content)
        try:
            found = manifest_file.from_bytes(sealed(pack(content)), what="the file")
        except pc.FormatError:
            continue
        look_through(found)
        assert found != good or found.id == good.id or place[0] == "metadata", place


def look_through(manifest: pc.Manifest) -> None:
    """All that a manifest tells without devices; none of it may fail."""
    assert repr(manifest)
    assert all(str(leaf) for leaf in manifest.leaves)
    assert len(manifest.by_text) == len(manifest.leaf_codes)
    assert manifest.nbytes >= 0


@pytest.mark.parametrize("where", ["manifest", "table"])
def test_no_field_may_be_missing(base: Checkpoint, where: str) -> None:
    content = base.manifest if where == "manifest" else base.table
    optional = {"metadata", "packed", "written_by"}
    for key in content:
        if key not in optional:
            without = {k: v for k, v in content.items() if k != key}
            assert key in refused(sealed(pack(without), where), PARSERS[where])


# --- tables -------------------------------------------------------------------------------------


def rows(where: str, **columns: Callable[[Any], Any]) -> Change:
    """Change columns of a table, as arrays of their numbers."""
    types = {"leaf": "<u4", "shard": "<u8", "offset": "<u8"}

    def change(content: Content) -> None:
        part = content[where]
        for name, new in columns.items():
            if name == "digests":
                part[name] = new(part[name])
            else:
                part[name] = np.asarray(
                    new(np.frombuffer(part[name], types[name]).copy()), types[name]
                ).tobytes()

    return change


def put(at: int, value: int) -> Callable[[Any], Any]:
    def change(column: Any) -> Any:
        column[at] = value
        return column

    return change


HOSTILE_TABLES: dict[str, Change] = {
    "another process": set_("process", to=1),
    "negative process": set_("process", to=-1),
    "rows in another order": rows("packed_rows", shard=lambda c: c[::-1]),
    "a row twice": rows(
        "packed_rows",
        leaf=lambda c: np.r_[c[:1], c],
        shard=lambda c: np.r_[c[:1], c],
        offset=lambda c: np.r_[c[:1], c],
        digests=lambda d: d[:32] + d,
    ),
    "a row in place of another": rows("packed_rows", shard=put(1, 0)),
    "the first row missing": rows(
        "packed_rows",
        leaf=lambda c: c[1:],
        shard=lambda c: c[1:],
        offset=lambda c: c[1:],
        digests=lambda d: d[32:],
    ),
    "no rows of arrays": set_(
        "arrays", to={"leaf": b"", "shard": b"", "offset": b"", "digests": b""}
    ),
    "columns of two lengths": rows("packed_rows", shard=lambda c: c[1:]),
    "offsets too few": rows("packed_rows", offset=lambda c: c[1:]),
    "no offsets": rows("packed_rows", offset=lambda c: c[:0]),
    "offsets of arrays": rows("arrays", offset=lambda _: [0, 1, 2, 3]),
    "leaf out of range": rows("packed_rows", leaf=put(-1, 99)),
    "leaf 2**32-1": rows("packed_rows", leaf=put(-1, 2**32 - 1)),
    "leaf that is a value": rows("packed_rows", leaf=put(-1, 7)),
    "leaf that is an array of its own": rows("packed_rows", leaf=lambda c: np.full_like(c, 4)),
    "shard out of range": rows("packed_rows", shard=put(7, 8)),
    "shard 2**63-1": rows("packed_rows", shard=put(7, HUGE)),
    "shard 2**64-1": rows("packed_rows", shard=put(7, 2**64 - 1)),
    "offset outside": rows("packed_rows", offset=lambda c: c + 1024),
    "offset 2**63-1": rows("packed_rows", offset=put(0, HUGE)),
    "offset 2**64-1": rows("packed_rows", offset=put(0, 2**64 - 1)),
    "all at one offset": rows("packed_rows", offset=lambda c: c * 0),
    "digests cut": rows("arrays", digests=lambda d: d[:-1]),
    "a digest too few": rows("arrays", digests=lambda d: d[:-32]),
    "a digest too many": rows("arrays", digests=lambda d: d + bytes(32)),
    "no digests": rows("arrays", digests=lambda _: b""),
    "digests in another order": rows("arrays", digests=lambda d: d[32:] + d[:32]),
    "column cut": lambda c: c["arrays"].update(leaf=c["arrays"]["leaf"][:-1]),
    "packed extent of two": set_("packed", to=[64, 64]),
    "packed extent nil": set_("packed", to=None),
    "packed extent of 0": set_("packed", to=[0, 0, 0]),
    "negative packed extent": set_("packed", to=[-64, -64, -64]),
    "packed chunks of 0": set_("packed", to=[1024, 1024, 0]),
    "packed chunks that do not divide": set_("packed", to=[1024, 1024, 1000]),
    "packed shards that chunks do not divide": set_("packed", to=[1024, 768, 512]),
    "packed extent of 1 PiB": set_("packed", to=[2**50] * 3),
    "packed extent of 2**63": set_("packed", to=[2**63] * 3),
    "packed extent of 2**62 in small chunks": set_("packed", to=[2**62, 2**62, 64]),
    "packed chunks of one byte": lambda c: c.update(packed=[c["packed"][0], c["packed"][0], 1]),
    "no value of the process": set_("per_process", to=[]),
    "value of another process": set_("per_process", to=[[13, 1, 0]]),
    "value twice": lambda c: c["per_process"].append(c["per_process"][0]),
    "value of a negative leaf": lambda c: c["per_process"].append([-1, 0, 0]),
    "value without a process": set_("per_process", to=[[13, 0]]),
    "values as a map": set_("per_process", to={}),
}


@pytest.mark.parametrize("name", HOSTILE_TABLES)
def test_a_table_that_lies_is_refused(base: Checkpoint, tmp_path: Path, name: str) -> None:
    assert pc.read_manifest(base.path).by_text["own"].index == 13
    path = base.craft(tmp_path / "ckpt", table=HOSTILE_TABLES[name])
    for load in (pc.load, lambda p: pc.open(p).to_numpy()):
        try:
            found = load(path)
        except pc.CheckpointError:
            continue
        # A value that nobody asks for.
        assert name == "value of a negative leaf"
        del found


def test_a_table_with_a_right_digest_for_a_wrong_place_is_refused(
    base: Checkpoint, tmp_path: Path
) -> None:
    """The rows of a table are what binds a digest to its leaf and position."""

    def swap(content: Content) -> None:
        digests = content["arrays"]["digests"]
        content["arrays"]["digests"] = digests[32:64] + digests[:32] + digests[64:]

    path = base.craft(tmp_path / "ckpt", table=swap)
    with pytest.raises(pc.IntegrityError) as caught:
        pc.load(path)
    assert [(d.path, d.chunk) for d in caught.value.damage] == [
        ("large", (0, 0)),
        ("large", (1, 0)),
    ]


# --- sizes that only the data could bear out ----------------------------------------------------


def huge(shard: int, chunk: int) -> Change:
    return set_spec(
        kind="numpy",
        sharding=None,
        dtype="uint8",
        shape=[2**40],
        shard_shape=[shard],
        chunk_shape=[chunk],
    )


@pytest.mark.parametrize(
    ("shard", "chunk"), [(2**40, 1), (1, 1), (2**20, 1), (2**40, 2**20), (2**20, 2**20)]
)
def test_more_chunks_than_the_tables_have_digests_of_are_refused_before_they_are_counted(
    base: Checkpoint, tmp_path: Path, shard: int, chunk: int
) -> None:
    path = base.craft(tmp_path / "ckpt", manifest=huge(shard, chunk))
    for read in (pc.read_manifest, pc.load, pc.open):
        with pytest.raises(pc.FormatError, match="chunks"):
            read(path)
    assert not pc.verify(path).ok


def test_a_table_claimed_to_be_huge_bears_out_nothing(base: Checkpoint, tmp_path: Path) -> None:
    def change(content: Content) -> None:
        huge(2**20, 1)(content)
        content["tables"][0][0] = 2**62

    path = base.craft(tmp_path / "ckpt", manifest=change)
    with pytest.raises(pc.FormatError, match="larger than any table"):
        pc.read_manifest(path)


def test_more_processes_than_can_be_listed_have_no_values(base: Checkpoint, tmp_path: Path) -> None:
    path = base.craft(tmp_path / "ckpt", manifest=set_("process_count", to=HUGE))
    with pc.open(path) as found, pytest.raises(pc.FormatError, match="lack values of leaf 13"):
        found["own"]


def test_an_array_in_more_shards_than_can_be_listed_is_not_converted(
    base: Checkpoint, tmp_path: Path
) -> None:
    """A chunk of 1 PiB takes a few bytes of a manifest, and millions of files."""

    def manifest(content: Content) -> None:
        one_leaf(content)
        content["tree"] = {"kinds": b"\0", "counts": bytes(4), "key_kinds": b"", "keys": []}
        content["arrays"] = [spec_of(base.manifest, "array") | claimed]
        content.update(leaves=bytes(4), names=["a"], values=[])

    extent = {"shape": [2**50], "shard_shape": [2**50], "chunk_shape": [2**50]}
    claimed = {"kind": "numpy", "sharding": None, "dtype": "uint8", **extent}
    path = base.craft(tmp_path / "ckpt", manifest=manifest)
    with pytest.raises(pc.CheckpointError, match="cut into 33554432 shards, more than 1048576"):
        pc.convert(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_more_chunks_than_64_bits_count_are_refused(base: Checkpoint, tmp_path: Path) -> None:
    """Sixteen arrays of 2**60 chunks: their sum, cut to 64 bits, is zero."""

    def manifest(content: Content) -> None:
        spec = spec_of(content, "array") | {
            "kind": "numpy",
            "sharding": None,
            "dtype": "uint8",
            "shape": [2**60],
            "shard_shape": [2**60],
            "chunk_shape": [1],
        }
        one_leaf(content)
        content.update(
            arrays=[spec],
            leaves=bytes(4 * 16),
            values=[],
            names=[f"a{number}" for number in range(16)],
            tree={
                "kinds": bytes([4] + [0] * 16),
                "counts": np.array([16] + [0] * 16, "<u4").tobytes(),
                "key_kinds": bytes([2] * 16),
                "keys": list(range(16)),
            },
        )

    def table(content: Content) -> None:
        nothing = {"leaf": b"", "shard": b"", "offset": b"", "digests": b""}
        content.update(
            arrays={
                "leaf": np.arange(16, dtype="<u4").tobytes(),
                "shard": np.zeros(16, "<u8").tobytes(),
                "offset": b"",
                "digests": b"",
            },
            packed_rows=nothing,
            packed=None,
            per_process=[],
        )

    path = base.craft(tmp_path / "ckpt", manifest=manifest, table=table)
    for read in (pc.read_manifest, pc.load, pc.open):
        with pytest.raises(pc.FormatError, match=str(2**64)):
            read(path)


def test_a_date_beyond_all_calendars_is_refused_or_shown(base: Checkpoint) -> None:
    for created in (float("inf"), -float("inf"), 1e300, -1e15, 253402300800.0):
        try:
            found = manifest_file.from_bytes(
                sealed(pack(base.manifest | {"created": created})), what="the file"
            )
        except pc.FormatError:
            continue
        assert repr(found)


# --- zarr.json, which belongs to others ---------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        json.dumps({"zarr_format": 3, "node_type": "group"}),
        '{"zarr_format": 3, "node_type": "array", "shape": [1099511627776]}',
        "[" * 100_000,
    ],
)
def test_a_hostile_zarr_json_is_not_even_read(base: Checkpoint, tmp_path: Path, text: str) -> None:
    path = base.craft(tmp_path / "ckpt")
    for file in path.rglob("zarr.json"):
        good = json.loads(file.read_text())
        file.write_text(text)
        if "1099511627776" in text:
            chunks = {"name": "regular", "configuration": {"chunk_shape": [2**40]}}
            file.write_text(json.dumps(good | {"shape": [2**40], "chunk_grid": chunks}))
    assert_same(pc.load(path, base.state), base.state)
    with pc.open(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["large"][...], base.state["large"])


# --- fuzz ---------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=150)
@given(edits=EDITS)
def test_an_edited_file_is_refused_or_the_same(base: Checkpoint, edits: Any) -> None:
    """The digest in the file finds every edit of its body."""
    for parse, data in (
        (manifest_file.from_bytes, base.manifest_bytes),
        (tables.from_bytes, base.table_bytes),
    ):
        other = edited(data, edits)
        try:
            found: Any = parse(other, what="the file")
        except pc.FormatError:
            assert other != data
            continue
        if parse is tables.from_bytes:
            assert found[1] == hashlib.sha256(msgpack.unpackb(data)["body"]).digest()
        else:
            assert found == parse(data, what="the file")


@hypothesis.settings(max_examples=500)
@given(edits=EDITS)
def test_an_edited_body_with_a_right_digest_is_refused_or_sound(
    base: Checkpoint, edits: Any
) -> None:
    body = edited(body_of(base.manifest_bytes), edits)
    try:
        found = manifest_file.from_bytes(sealed(body), what="the file")
    except pc.FormatError:
        return
    look_through(found)
    again, _ = manifest_file.to_bytes(found)
    assert repr(manifest_file.from_bytes(again, what="again").leaves) == repr(found.leaves)


@hypothesis.settings(max_examples=500)
@given(edits=EDITS)
def test_an_edited_table_with_a_right_digest_is_refused_or_covers_all(
    base: Checkpoint, edits: Any
) -> None:
    manifest = manifest_file.from_bytes(base.manifest_bytes, what="the file")
    body = edited(body_of(base.table_bytes), edits)
    try:
        found, _ = tables.from_bytes(sealed(body, "table"), what="the file")
        index = ShardIndex(manifest.leaf_specs, [found], digest=manifest.digest)
    except pc.FormatError:
        return
    for leaf in manifest.leaves:
        if leaf.spec is None:
            continue
        for shard in range(leaf.spec.num_shards):
            entry = index.entry(leaf.index, shard, leaf.spec)
            chunks = 1 if leaf.spec.storage == "packed" else leaf.spec.chunks.size
            assert len(entry.digests) == 32 * chunks


@hypothesis.settings(
    max_examples=250, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@given(changes=CHANGES)
def test_replaced_fields_never_load_as_wrong_values(
    base: Checkpoint, tmp_path: Path, changes: list[tuple[int, Any]]
) -> None:
    """Bytes that the digests do not pin are none; a layout may change, elements may not."""

    def change(content: Content) -> None:
        for number, value in changes:
            places = [p for p in places_in(content) if p[0] != "metadata"]
            place = places[number % len(places)]
            set_(*place, to=value)(content)

    path = base.craft(tmp_path / "ckpt", manifest=change)
    saved = {
        key: value
        for key, value in zip(
            pc.read_manifest(base.path).by_text, jax.tree.leaves(base.state), strict=True
        )
        if isinstance(value, (jax.Array, np.ndarray)) and key != "key"
    }
    for load in (pc.load, lambda p: pc.open(p).to_numpy()):
        try:
            found = load(path)
        except pc.CheckpointError:
            continue
        if not isinstance(found, dict):
            continue
        for key in ("both", "host", "large", "scalar"):
            value = found.get(key)
            if isinstance(value, (jax.Array, np.ndarray, np.generic)):
                assert np.asarray(value).tobytes() == np.asarray(saved.get(key, value)).tobytes()


def test_the_limits_of_the_format_have_names() -> None:
    assert wire.MAX_FILE_BYTES == 64 * MIB
    assert wire.MAX_MSGPACK_DEPTH == 32
