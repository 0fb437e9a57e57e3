"""Files of other formats that are damaged, or made to do harm, end in an error with a name."""

import base64
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import pytree_ckpt as pc
from pytree_ckpt.format import wire
from pytree_ckpt.interop import json_objects, names
from tests.bitwise import assert_same
from tests.test_safetensors import header, tensor

# --- safetensors ----------------------------------------------------------------------------------


def header_of(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def one_byte(**changed: Any) -> bytes:
    return header(a={**tensor("U8", [1], 0, 1), **changed}) + b"x"


CLAIMS: dict[str, bytes] = {
    "no elements, but huge extents": header(a=tensor("U8", [0, 1 << 59, 1 << 59], 0, 0)),
    "more dimensions than an array has": one_byte(shape=[1] * 40),
    "a name that is no unicode": header(**{"\ud800": tensor("U8", [1], 0, 1)}) + b"x",
    "metadata that are no unicode": header(__metadata__={"a": "\ud800"}),
    "a name that nests without end": header(**{"a." * 100_000: tensor("U8", [1], 0, 1)}) + b"x",
    "an offset of ten thousand digits": header_of(b'{"a": [0, ' + b"9" * 10_000 + b"]}"),
    "an offset that is no int": one_byte(data_offsets=[0, 1.0]),
    "an offset that is a bool": one_byte(data_offsets=[False, True]),
}


@pytest.mark.parametrize("kind", CLAIMS)
def test_a_header_that_claims_what_cannot_be_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(CLAIMS[kind])
    with pytest.raises(pc.FormatError):
        pc.import_safetensors(file, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("item", [b"[],", b"{},", b"0,"])
def test_json_with_more_elements_than_memory_is_for_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, item: bytes
) -> None:
    text = b'{"a":[' + item * (json_objects.MAX_JSON_ITEMS + 1) + b"0]}"
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was decoded"))
    (tmp_path / "w.safetensors").write_bytes(header_of(text))
    with pytest.raises(pc.FormatError, match="4194304 elements"):
        pc.import_safetensors(tmp_path / "w.safetensors", tmp_path / "b")


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for act in (pc.import_safetensors, pc.import_npz):
        with pytest.raises(pc.FormatError, match="not a regular file"):
            act(tmp_path / "pipe", tmp_path / "b")


def test_a_model_may_be_links_as_in_a_cache_of_models(tmp_path: Path) -> None:
    pc.save(tmp_path / "a", {"w": np.arange(3), "v": np.ones(3)})
    pc.export_safetensors(tmp_path / "a", tmp_path / "blobs", max_file_nbytes=30)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    pc.import_safetensors(tmp_path / "snapshot", tmp_path / "b")
    assert_same(pc.load(tmp_path / "b"), {"w": np.arange(3), "v": np.ones(3)})


RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a column too short": lambda c: {**c, "codes": c["codes"][:-1]},
    "a kind that is none": lambda c: {**c, "codes": bytes([99]) + c["codes"][1:]},
    "a name too many": lambda c: {**c, "names": [*c["names"], "w"]},
    "a name that is not in the file": lambda c: {**c, "names": [*c["names"][:-1], "other"]},
    "a name twice": lambda c: {**c, "names": [c["names"][0], *c["names"][:-1]]},
    "a key with too many dimensions": lambda c: {**c, "keys": [["rbg", 9]]},
    "a key that is none": lambda c: {**c, "keys": [3]},
    "a value that is none": lambda c: {**c, "values": [["b", 1]]},
    "a tree without a root": lambda c: {**c, "tree": {**c["tree"], "kinds": b""}},
    "a key of a tree of another kind": lambda c: {**c, "tree": {**c["tree"], "keys": [0] * 3}},
    "a list": lambda c: [c],
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_recorded_tree_that_does_not_fit_the_file_is_refused(tmp_path: Path, kind: str) -> None:
    pc.save(tmp_path / "a", {"k": jax.random.key(1, impl="rbg"), "w": np.ones(2), "n": 1})
    file = tmp_path / "w.safetensors"
    pc.export_safetensors(tmp_path / "a", file)
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8 : 8 + length])
    content = wire.decode(base64.b64decode(head["__metadata__"][names.TREE_KEY]), what="it")
    changed = base64.b64encode(wire.encode(RECORDS[kind](content))).decode()
    head["__metadata__"][names.TREE_KEY] = changed
    file.write_bytes(header(**head) + data[8 + length :])
    with pytest.raises(pc.FormatError):
        pc.import_safetensors(file, tmp_path / "b")


# --- npz ------------------------------------------------------------------------------------------


def npy(shape: tuple[int, ...] = (1,), data: bytes = b"x", descr: Any = "|u1") -> bytes:
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


MEMBERS: dict[str, bytes] = {
    "a huge shape": npy((1 << 50,)),
    "more elements than an array has": npy((1 << 59, 1 << 59)),
    "no elements, but huge extents": npy((0, 1 << 59, 1 << 59), b""),
    "more dimensions than an array has": npy((1,) * 40),
    "far more bytes than it claims": npy(data=bytes(1 << 20)),
    "an extent that is no int": npy((True,)),
    "a dtype in a dtype": npy(descr=[("a", "|u1")]),
    "objects in a dtype": npy(descr=[("a", "|O")]),
    "another byte order": npy(descr=">f8", data=bytes(8)),
    "an expression for a header": npy().replace(b"(1,)", b"(9**9**9,)"),
    "a header without end": b"\x93NUMPY\x03\x00\xff\xff\xff\xff" + b"(" * 70_000,
    "an empty file": b"",
}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=str)
@pytest.mark.parametrize("kind", MEMBERS)
def test_an_array_that_cannot_be_is_refused(tmp_path: Path, kind: str, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "w.npz", "w", method) as archive:
        archive.writestr("a.npy", MEMBERS[kind])
    with pytest.raises(pc.FormatError):
        pc.import_npz(tmp_path / "w.npz", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that packs too well, nor one whose members are the same bytes."""
    monkeypatch.setattr("pytree_ckpt.interop.npz._read_through", lambda *_: pytest.fail("it was"))
    with zipfile.ZipFile(tmp_path / "w.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.npy", npy((1 << 24,), bytes(1 << 24)))
    with pytest.raises(pc.FormatError, match="packed as numpy does not"):
        pc.import_npz(tmp_path / "w.npz", tmp_path / "b")
    with zipfile.ZipFile(tmp_path / "w.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy((1 << 24,), bytes(1 << 24)))
        (info,) = archive.filelist
        archive.filelist += [info] * 50
    with pytest.raises(pc.FormatError, match="overlap"):
        pc.import_npz(tmp_path / "w.npz", tmp_path / "b")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_flipped_bit_in_an_npz_changes_no_array(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    """It may lose one: nothing in a zip file guards the list of what is in it."""
    arrays = {"a": np.arange(50, dtype=np.uint8), "b": np.eye(4)}
    save(tmp_path / "good.npz", **arrays)
    data = (tmp_path / "good.npz").read_bytes()
    rng = random.Random(3)
    refused = 0
    for _ in range(80):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "w.npz").write_bytes(changed)
        try:
            pc.import_npz(tmp_path / "w.npz", tmp_path / "b", overwrite=True)
        except (pc.FormatError, OSError):
            refused += 1
        else:
            found = pc.load(tmp_path / "b")
            assert_same(found, {name: arrays[name] for name in found})
    assert refused > 40


# --- orbax ----------------------------------------------------------------------------------------


def orbax(path: Path, **settings: Any) -> Path:
    tree = {"w": np.arange(12.0).reshape(3, 4), "b": np.ones(3, np.int8), "s": "text", "n": 3}
    handler = ocp.PyTreeCheckpointHandler(**settings)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


def change(data: bytes, rng: random.Random) -> bytes:
    """What a disk, or a copy that was cut short, may make of a file."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3)) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    at = rng.randrange(len(data) + 1)
    return rng.choice((bytes(changed), bytes(changed), data[:at], data[:at] + bytes(8), data * 2))


@pytest.mark.parametrize("is_ocdbt", [True, False], ids=["OCDBT", "folders"])
@pytest.mark.parametrize("is_zarr3", [True, False], ids=["Zarr 3", "Zarr 2"])
def test_a_damaged_file_of_orbax_ends_in_an_error_with_a_name(
    tmp_path: Path, is_ocdbt: bool, is_zarr3: bool
) -> None:
    """Orbax has no digests: what decodes is imported. Nothing else escapes, and nothing aborts."""
    good = orbax(tmp_path / "good", use_ocdbt=is_ocdbt, use_zarr3=is_zarr3)
    files = sorted(file.relative_to(good) for file in good.rglob("*") if file.is_file())
    rng = random.Random(5)
    refused = 0
    for number in range(60):
        bad = tmp_path / "bad"
        shutil.copytree(good, bad)
        file = bad / files[number % len(files)]
        if number % 7:
            file.write_bytes(change(file.read_bytes(), rng))
        else:
            file.unlink()
        try:
            pc.import_orbax(bad, tmp_path / "b", overwrite=True)
        except (pc.CheckpointError, OSError):
            refused += 1
        shutil.rmtree(bad)
    assert refused > 10


SHAPES = {
    "more shards than a table lists": ([1 << 57], [1 << 20]),
    "more bytes than the disk has": ([1 << 42], [1 << 20]),
    "one chunk of a gigabyte": ([1 << 30], [1 << 27]),
    "a prime extent": ([2147483647], [1 << 20]),
    "no elements, but huge extents": ([0, 1 << 59, 1 << 59], [1, 1, 1]),
    "more dimensions than an array has": ([1] * 40, [1] * 40),
    "a chunk without extent": ([12], [0]),
}


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_shape_that_orbax_cannot_have_written_is_refused(
    tmp_path: Path, kind: str, zarr_format: int
) -> None:
    path = orbax(tmp_path / "orbax", use_ocdbt=False, use_zarr3=zarr_format == 3)
    file = path / "w" / (".zarray" if zarr_format == 2 else "zarr.json")
    found = json.loads(file.read_text())
    found["shape"], chunks = SHAPES[kind]
    if zarr_format == 2:
        found["chunks"] = chunks
    else:
        found["chunk_grid"]["configuration"]["chunk_shape"] = chunks
    file.write_text(json.dumps(found))
    with pytest.raises((pc.CheckpointError, OSError)):
        pc.import_orbax(path, tmp_path / "b")
    assert not (tmp_path / "b/manifest.msgpack").exists()


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def sharding_of(**changed: Any) -> Callable[[Path], None]:
    named = {"sharding_type": "NamedSharding", "shape": [2], "axis_names": ["x"]}

    def act(path: Path) -> None:
        text = json.dumps({**named, "partition_spec": ["x"], **changed})
        (path / "_sharding").write_text(json.dumps({base64.b64encode(b"w").decode(): text}))
        edited(path / "_METADATA", lambda c: of_leaf(c, "w").update(value_type="jax.Array"))

    return act


def of_leaf(content: dict[str, Any], name: str) -> Any:
    (found,) = (
        item["value_metadata"]
        for item in content["tree_metadata"].values()
        if item["key_metadata"][0]["key"] == name
    )
    return found


def key_of(key: Any, key_type: int) -> Callable[[Path], None]:
    def act(content: dict[str, Any]) -> None:
        item = next(iter(content["tree_metadata"].values()))
        item["key_metadata"] = [{"key": key, "key_type": key_type}]

    return lambda path: edited(path / "_METADATA", act)


def zarray(**changed: Any) -> Callable[[Path], None]:
    return lambda path: edited(path / "w" / ".zarray", lambda content: content.update(changed))


CLAIMS_OF_ORBAX: dict[str, Callable[[Path], None]] = {
    "a mesh of more devices than memory lists": sharding_of(shape=[1 << 40]),
    "an infinite mesh": sharding_of(shape=[float("inf")]),
    "an infinite device": sharding_of(device_mesh={"mesh": [{"id": float("inf")}, {"id": 1}]}),
    "an infinite index": key_of(float("inf"), 1),
    "a key that is no unicode": key_of("\ud800", 2),
    "a key that ends a name": key_of("a\0b", 2),
    "a compressor that is none": zarray(compressor={"id": "bogus"}),
    "a filter": zarray(filters=[{"id": "delta", "dtype": "<f8"}]),
    "a fill value that is none": zarray(fill_value="bogus"),
    "an order that is none": zarray(order="Z"),
}


@pytest.mark.parametrize("kind", CLAIMS_OF_ORBAX)
def test_what_orbax_cannot_have_written_is_bad_format(tmp_path: Path, kind: str) -> None:
    path = orbax(tmp_path / "orbax", use_ocdbt=False, use_zarr3=False)
    CLAIMS_OF_ORBAX[kind](path)
    with pytest.raises(pc.FormatError):
        pc.import_orbax(path, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_keys_whose_data_no_key_has_are_refused_by_the_load(tmp_path: Path) -> None:
    """The shape of the data is known to JAX alone, which an import does without."""
    pc.save(tmp_path / "a", {"k": jax.random.key(1)})
    file = tmp_path / "w.safetensors"
    pc.export_safetensors(tmp_path / "a", file)
    wider = file.read_bytes().replace(
        b'"shape":[2],"data_offsets":[0,8]', b'"shape":[3],"data_offsets":[0,12]'
    )
    length = struct.unpack("<Q", wider[:8])[0]
    text = wider[8 : wider.index(b"}}") + 2].ljust(length)
    file.write_bytes(header_of(text) + bytes(12))
    pc.import_safetensors(file, tmp_path / "b")
    with pytest.raises(pc.MismatchError, match=r"a key of 'threefry2x32' has data of \(2,\)"):
        pc.load(tmp_path / "b")
