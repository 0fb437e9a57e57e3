"""A claim is believed only as far as the files bear it out, and planted links lead nowhere."""

import contextlib
import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgpack
import numpy as np
import pytest

import pytree_ckpt as pc
from pytree_ckpt.format import tables
from pytree_ckpt.plan import chunking
from pytree_ckpt.store import arrays
from pytree_ckpt.store.checks import ChunkCheck
from pytree_ckpt.store.packed import PackedReader
from tests.bitwise import assert_same
from tests.gates import before_writing
from tests.hostile import body_of, pack, sealed

MIB = 1 << 20
STATE: dict[str, Any] = {"large": np.arange(2000.0), "small": np.arange(3)}


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "PACK_BELOW_NBYTES", 128)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each buffer that a load takes."""
    found: list[int] = []
    make = arrays.aligned_empty

    def counted(shape: tuple[int, ...], dtype: np.dtype) -> Any:
        found.append(int(np.prod(shape, dtype=object)) * dtype.itemsize)
        return make(shape, dtype)

    monkeypatch.setattr(arrays, "aligned_empty", counted)
    return found


def saved(path: Path, codec: Literal["raw", "zstd"] = "raw") -> Path:
    pc.save(path, STATE, options=pc.SaveOptions(compress=None if codec == "raw" else "zstd"))
    return path


def change(file: Path, kind: str, edit: Callable[[dict[str, Any]], None]) -> list[Any]:
    """Change the content of a metadata file; returns its size and its digest, which is right."""
    content = msgpack.unpackb(body_of(file.read_bytes()))
    edit(content)
    data = sealed(pack(content), kind)
    file.write_bytes(data)
    return [len(data), hashlib.sha256(body_of(data)).digest()]


def claim(path: Path, storage: str, nbytes: int, *, packed: list[int] | None = None) -> None:
    """Make the one array of this storage `nbytes` of one chunk, in manifest and table."""
    if packed is not None:
        (table,) = path.glob("data-*/tables/00000.msgpack")
        reference = change(table, "table", lambda content: content.update(packed=packed))

    def edit(content: dict[str, Any]) -> None:
        (spec,) = [a for a in content["arrays"] if a["storage"] == storage]
        shape = [nbytes // 8]
        spec.update(shape=shape, shard_shape=shape, chunk_shape=shape)
        if packed is not None:
            content["tables"] = [reference]

    change(path / "manifest.msgpack", "manifest", edit)


def reads(path: Path) -> list[Callable[[], object]]:
    return [
        lambda: pc.load(path),
        lambda: pc.load(path, verify=False),
        lambda: pc.open(path).to_numpy(),
        lambda: pc.open(path)["large"][0:1],
    ]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("nbytes", [256 * MIB, 4 << 40], ids=["256 MiB", "4 TiB"])
def test_a_chunk_larger_than_its_file_bears_out_is_damage_before_memory_is_taken(
    tmp_path: Path, taken: list[int], codec: Literal["raw", "zstd"], nbytes: int
) -> None:
    path = saved(tmp_path / "ckpt", codec)
    claim(path, "array", nbytes)
    for read in reads(path):
        with pytest.raises(pc.IntegrityError, match=rf"large has {nbytes} bytes by its manifest"):
            read()
    report = pc.verify(path)
    assert [(d.path, d.kind) for d in report.damage if d.kind != "metadata"] == [("large", "size")]
    assert max(taken, default=0) < MIB


def test_a_packed_shard_larger_than_its_file_bears_out_is_damage_before_memory_is_taken(
    tmp_path: Path, taken: list[int]
) -> None:
    path = saved(tmp_path / "ckpt")
    claim(path, "packed", 512 * MIB, packed=[512 * MIB, 512 * MIB, 64 * MIB])
    for load in reads(path)[:3]:
        with pytest.raises(pc.IntegrityError, match="536870912 bytes by its manifest"):
            load()
    assert not pc.verify(path).ok
    assert max(taken, default=0) < MIB


def test_a_packed_array_in_files_beyond_any_writer_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond any limit"):
        tables.Packed(nbytes=2 << 30, shard_nbytes=2 << 30, chunk_nbytes=64 * MIB)


@pytest.mark.parametrize("what", ["arrays/large", "packed/00000"])
def test_a_file_far_larger_than_its_shard_is_damage_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its index could claim that one chunk is all of it."""
    path = saved(tmp_path / "ckpt")
    (file,) = path.glob(f"data-*/{what}/c.0")
    with file.open("r+b") as stream:
        stream.truncate(1 << 40)

    def read(*_: Any) -> None:
        raise AssertionError("the file is read")

    if "large" in what:
        monkeypatch.setattr(ChunkCheck, "fetch", read)
    else:
        monkeypatch.setattr(PackedReader, "_read_window", read)
    with pytest.raises(pc.IntegrityError) as caught:
        pc.open(path)["large" if "large" in what else "small"][...]
    assert [(d.kind, d.file) for d in caught.value.damage] == [("size", str(file))]


def test_a_compressed_array_of_zeros_is_far_larger_than_its_files_and_loads(tmp_path: Path) -> None:
    zeros = np.zeros(80 * MIB, np.uint8)
    path = tmp_path / "ckpt"
    pc.save(path, {"x": zeros}, options=pc.SaveOptions(compress="zstd"))
    stored = sum(f.stat().st_size for f in path.rglob("c.*"))
    assert zeros.nbytes > 10_000 * stored
    assert not pc.load(path)["x"].any()


# --- bombs ----------------------------------------------------------------------------------------


def zstd_zeros(nbytes: int) -> bytes:
    """A zstd frame of zeros, of blocks that repeat one byte 128 KiB times (RFC 8878, 3.1.1)."""
    block = 128 << 10
    count = nbytes // block
    heads = [block << 3 | 1 << 1] * (count - 1) + [block << 3 | 1 << 1 | 1]
    blocks = b"".join(struct.pack("<I", head)[:3] + b"\0" for head in heads)
    return b"\x28\xb5\x2f\xfd" + bytes([0x00, 7 << 3]) + blocks


def crc32c(data: bytes) -> int:
    rest = 0xFFFFFFFF
    for byte in data:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return rest ^ 0xFFFFFFFF


def shard_of(chunk: bytes) -> bytes:
    """A shard of one chunk, with its index."""
    index = struct.pack("<QQ", 0, len(chunk))
    return chunk + index + struct.pack("<I", crc32c(index))


def test_the_frame_that_bombs_are_made_of_is_what_a_reader_reads(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    zeros = np.zeros(MIB, np.uint8)
    pc.save(path, {"x": zeros}, options=pc.SaveOptions(compress="zstd"))
    (file,) = path.glob("data-*/arrays/x/c.0")
    file.write_bytes(shard_of(zstd_zeros(MIB)))
    np.testing.assert_array_equal(pc.load(path)["x"], zeros)


BOMB = """
import json, resource, sys
import numpy as np
import pytree_ckpt as pc

def peak_nbytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

with pc.open(sys.argv[1]) as checkpoint:
    checkpoint["small"][...]
    before = peak_nbytes()
    try:
        checkpoint["large"][...]
        outcome = "read"
    except pc.IntegrityError:
        outcome = "IntegrityError"
print(json.dumps([outcome, peak_nbytes() - before]))
"""


def test_a_chunk_that_decodes_to_far_more_than_it_should_takes_no_memory(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", "zstd")
    (file,) = path.glob("data-*/arrays/large/c.0")
    bomb = shard_of(zstd_zeros(1 << 30))
    assert len(bomb) < 65_536
    file.write_bytes(bomb)
    ended = subprocess.run(
        [sys.executable, "-c", BOMB, str(path)],
        cwd=Path(pc.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    outcome, nbytes = json.loads(ended.stdout)
    assert outcome == "IntegrityError"
    assert nbytes < 64 * MIB


# --- links that somebody planted where a save is about to write -----------------------------------

PLANTED = {
    "data": lambda data: data / "arrays",
    "array": lambda data: data / "arrays" / "large",
    "packed array": lambda data: data / "packed" / "00000",
    "packed data": lambda data: data / "packed",
    "tables": lambda data: data / "tables",
    "temporary manifest": lambda data: data.parent / f"manifest.{data.name[5:]}.tmp",
    "lock of a shard": lambda data: data / "arrays" / "large" / "c.0.__lock",
    "shard": lambda data: data / "arrays" / "large" / "c.0",
    "zarr.json": lambda data: data / "packed" / "00000" / "zarr.json",
    "table": lambda data: data / "tables" / "00000.msgpack",
}


@pytest.mark.parametrize("where", PLANTED)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_save_writes_through_no_planted_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, kind: str
) -> None:
    path, precious = tmp_path / "ckpt", tmp_path / "precious"
    if kind == "file":
        precious.write_bytes(b"precious")
    else:
        precious.mkdir()

    def plant() -> None:
        (data,) = path.glob("data-*")
        link = PLANTED[where](data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(precious, target_is_directory=kind == "folder")

    with monkeypatch.context() as patch:
        before_writing(patch, plant)
        try:
            pc.save(path, STATE)
        except FileExistsError:
            assert not path.exists()
        else:
            # The link is replaced, or lies there unused and is found.
            with contextlib.suppress(pc.IntegrityError):
                assert_same(pc.load(path), STATE)
    if kind == "file":
        assert precious.read_bytes() == b"precious"
    else:
        assert not list(precious.iterdir())
    pc.save(path, STATE, overwrite=True)
    assert_same(pc.load(path), STATE)
