"""Shard files that are written and read without TensorStore are TensorStore's, byte for byte."""

import itertools
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import pytree_ckpt as pc
from pytree_ckpt.format import zarr
from pytree_ckpt.format.tables import Packed
from pytree_ckpt.plan import chunking, saving
from pytree_ckpt.store.raw import open_raw
from tests.bitwise import assert_same


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "PACK_BELOW_NBYTES", 512)
    monkeypatch.setattr(chunking, "MAX_SHARD_NBYTES", 4096)
    monkeypatch.setattr(chunking, "MAX_CHUNK_NBYTES", 1024)


def _rewritten(array: np.ndarray, metadata: dict, folder: Path) -> dict[str, bytes]:
    """The files of TensorStore's own for an array."""
    store = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{folder}/"},
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
        },
        create=True,
    ).result()
    store.write(array).result()
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", (64, 40)),
        ("bfloat16", (48, 33)),
        ("bool", (30, 70)),
        ("complex64", (7, 11, 13)),
        ("float32", (2111,)),
    ],
    ids=str,
)
def test_files_are_those_that_tensorstore_writes(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, (*shape, np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize))
    array = (bits % 2 if dtype == "bool" else bits).astype(np.uint8)
    array = array.view(getattr(ml_dtypes, dtype, dtype))[..., 0]
    manifest = pc.save(tmp_path / "ckpt", {"w": array})
    leaf = manifest.leaves[0]
    assert leaf.spec is not None
    assert leaf.spec.storage == "array"
    ours = tmp_path / "ckpt" / manifest.data_dir / "arrays" / str(leaf.name)
    found = {name: (ours / name).read_bytes() for name in sorted(os.listdir(ours))}
    theirs = _rewritten(array, zarr.array_metadata(leaf.spec), tmp_path / "theirs")
    del found["zarr.json"], theirs["zarr.json"]  # the same facts in another order
    assert found == theirs


def test_the_packed_file_is_the_one_that_tensorstore_writes(tmp_path: Path) -> None:
    manifest = pc.save(tmp_path, {f"leaf {n}": np.full(n, n, np.int16) for n in range(200)})
    folder = tmp_path / manifest.data_dir / "packed" / "00000"
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "fill_missing_data_reads": False,
    }
    packed = ts.open(spec, open=True).result()
    values = packed.read().result()
    theirs = _rewritten(values, packed.spec().to_json()["metadata"], tmp_path / "theirs")
    assert theirs["c.0"] == (folder / "c.0").read_bytes()


def test_what_lies_between_packed_shards_is_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that files are packed in is used again, and must not show what was in it."""
    monkeypatch.setattr(saving, "PACKED_CHUNK_NBYTES", 1024)
    monkeypatch.setattr(saving, "PACKED_SHARD_NBYTES", 4096)
    state = {f"leaf {n:03}": np.full(101 + n % 7, 0xFF, np.uint8) for n in range(200)}
    manifest = pc.save(tmp_path, state, options=pc.SaveOptions(threads=1))
    folder = tmp_path / manifest.data_dir / "packed" / "00000"
    files = [file.read_bytes() for file in folder.glob("c.*")]
    assert len(files) > 3
    data = b"".join(file[: len(file) - 16 * 4 - 4] for file in files)
    assert sum(data) == 0xFF * sum(array.size for array in state.values())


@pytest.mark.parametrize("at", ["first", "last", "index", "checksum"])
def test_only_an_index_as_usual_is_read_without_tensorstore(tmp_path: Path, at: str) -> None:
    data, nbytes = bytes(range(256)) * 4, 256
    array = np.frombuffer(data, np.uint8)
    packed = Packed(nbytes=1024, shard_nbytes=1024, chunk_nbytes=nbytes)
    metadata = zarr.packed_metadata(packed, "raw")
    _rewritten(array, metadata, tmp_path)
    file = tmp_path / "c.0"
    with open_raw(file, chunk_nbytes=nbytes, chunks=4, present=4) as shard:
        assert shard is not None
        place = np.zeros(512, np.uint8)
        shard.fill(place, 256)
        assert place.tobytes() == data[256:768]
    raw = bytearray(file.read_bytes())
    raw[{"first": 0, "last": 1023, "index": 1024 + 17, "checksum": len(raw) - 1}[at]] ^= 1
    file.write_bytes(raw)
    with open_raw(file, chunk_nbytes=nbytes, chunks=4, present=4) as shard:
        assert (shard is None) == (at in ("index", "checksum"))


def test_chunks_in_another_order_load_all_the_same(tmp_path: Path) -> None:
    """Zarr does not say in which order the chunks of a shard lie; another writer may choose."""
    array = np.arange(2048, dtype=np.float32)
    manifest = pc.save(tmp_path, {"w": array})
    spec = manifest.leaves[0].spec
    assert spec is not None
    assert spec.chunks.size > 1
    folder = tmp_path / manifest.data_dir / "arrays" / str(manifest.leaves[0].name)
    for file in folder.glob("c.*"):
        file.write_bytes(_reversed(file.read_bytes(), spec.chunks.size))
    assert_same(pc.load(tmp_path, {"w": array}), {"w": array})


def _reversed(shard: bytes, chunks: int) -> bytes:
    """A shard with its chunks the other way round, and an index that says so."""
    from pytree_ckpt.store import raw

    nbytes = (len(shard) - 16 * chunks - 4) // chunks
    parts = [shard[at * nbytes : (at + 1) * nbytes] for at in range(chunks)]
    places = [((chunks - 1 - at) * nbytes, nbytes) for at in range(chunks)]
    index = np.asarray(list(itertools.chain(*places)), "<u8").tobytes()
    checksum = np.asarray([raw._crc32c(index)], "<u4").tobytes()
    return b"".join(parts[::-1]) + index + checksum
