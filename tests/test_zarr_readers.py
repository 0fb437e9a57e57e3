"""Other programs read the arrays of a checkpoint, by path, with what Zarr v3 says and no more."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.format import dtypes, tables, zarr
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.plan import chunking
from tests.conftest import make_mesh

zarr_python = pytest.importorskip("zarr")

Read = Callable[[Path], np.ndarray]


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays are stored as large ones are: in files of several chunks."""
    monkeypatch.setattr(chunking, "PACK_BELOW_NBYTES", 16)
    monkeypatch.setattr(chunking, "MAX_CHUNK_NBYTES", 64)


def by_tensorstore(folder: Path) -> Any:
    """An array that is opened from what its `zarr.json` says."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    return ts.open(spec, open=True, read=True).result()


def by_zarr_python(folder: Path) -> Any:
    return zarr_python.open_array(folder, mode="r", zarr_format=3)


def array_folder(path: Path, manifest: pc.Manifest, text: str) -> Path:
    name = manifest.by_text[text].name
    assert name is not None
    return path / manifest.data_dir / "arrays" / name


def spec_of(manifest: pc.Manifest, text: str) -> ArraySpec:
    spec = manifest.by_text[text].spec
    assert spec is not None
    return spec


STANDARD = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
STANDARD += ["float16", "float32", "float64", "complex64", "complex128"]
EXTENDED = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2"]
EXTENDED += ["float8_e5m2fnuz"]
AS_BYTES = ["float8_e3m4", "float8_e4m3", "float8_e8m0fnu", "int4", "uint4", "int2", "uint2"]


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Elements of any bits; of a dtype below a byte, of any value."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    data = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if "int4" in dtype.name or "int2" in dtype.name:
        return rng.integers(0, 2, shape).astype(dtype)
    return data.view(dtype).reshape(shape)


def test_every_dtype_is_in_one_of_the_lists_that_are_tested() -> None:
    known = set(STANDARD + EXTENDED + AS_BYTES)
    beside = {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "int1", "uint1"}
    assert set(dtypes.names()) - known <= beside


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_arrays_of_standard_dtypes_are_read_by_both_with_the_grid_of_the_manifest(
    tmp_path: Path, compress: Any
) -> None:
    state = {name: random_array(np.dtype(name), (12, 8), n) for n, name in enumerate(STANDARD)}
    manifest = pc.save(tmp_path, state, options=pc.SaveOptions(compress=compress))
    for name, array in state.items():
        spec, folder = spec_of(manifest, name), array_folder(tmp_path, manifest, name)
        assert spec.chunk_shape != spec.shard_shape
        store = by_tensorstore(folder)
        assert store.dtype.numpy_dtype == array.dtype
        assert tuple(store.shape) == (12, 8)
        assert tuple(store.chunk_layout.read_chunk.shape) == spec.chunk_shape
        assert tuple(store.chunk_layout.write_chunk.shape) == spec.shard_shape
        assert store.read().result().tobytes() == array.tobytes(), name
        found = by_zarr_python(folder)
        assert found.dtype == array.dtype
        assert (found.shape, found.shards, found.chunks) == (
            (12, 8),
            spec.shard_shape,
            spec.chunk_shape,
        )
        assert found[...].tobytes() == array.tobytes(), name
        assert found[3:5, 1::3].tobytes() == array[3:5, 1::3].tobytes(), name


def test_a_sharded_array_is_one_array_of_a_file_for_each_device_shard(tmp_path: Path) -> None:
    mesh = make_mesh((4, 2), ("data", "model"))
    host = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    specs = {
        "both": PartitionSpec("data", "model"),
        "columns": PartitionSpec(None, ("model", "data")),
        "rows": PartitionSpec("data"),
        "whole": PartitionSpec(),
    }
    state = {k: jax.device_put(host, NamedSharding(mesh, spec)) for k, spec in specs.items()}
    manifest = pc.save(tmp_path, state)
    for name, files in {"both": 8, "columns": 8, "rows": 4, "whole": 1}.items():
        folder = array_folder(tmp_path, manifest, name)
        assert len(list(folder.glob("c.*"))) == files
        np.testing.assert_array_equal(by_tensorstore(folder).read().result(), host)
        np.testing.assert_array_equal(by_zarr_python(folder)[...], host)
        at = tuple(state[name].sharding.shard_shape((16, 8)))
        assert by_zarr_python(folder).shards == at == spec_of(manifest, name).shard_shape


@pytest.mark.parametrize("name", EXTENDED)
def test_an_extended_dtype_is_read_by_tensorstore_under_its_own_name(
    tmp_path: Path, name: str
) -> None:
    array = random_array(np.dtype(getattr(ml_dtypes, name)), (16, 8), 1)
    manifest = pc.save(tmp_path, {"w": array})
    folder = array_folder(tmp_path, manifest, "w")
    assert json.loads((folder / "zarr.json").read_text())["data_type"] == name
    found = by_tensorstore(folder).read().result()
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", [name for name in AS_BYTES if hasattr(ml_dtypes, name)])
def test_a_dtype_that_zarr_has_not_is_read_by_both_as_the_bytes_it_is_in_memory(
    tmp_path: Path, name: str
) -> None:
    array = random_array(np.dtype(getattr(ml_dtypes, name)), (16, 8), 2)
    manifest = pc.save(tmp_path, {"w": array})
    folder = array_folder(tmp_path, manifest, "w")
    assert json.loads((folder / "zarr.json").read_text())["data_type"] == "uint8"
    for found in (by_tensorstore(folder).read().result(), by_zarr_python(folder)[...]):
        assert found.dtype == np.uint8
        assert found.shape == (16, 8)
        assert found.tobytes() == array.tobytes()
        assert found.view(array.dtype).tobytes() == array.tobytes()


def test_leaves_are_found_by_their_escaped_path(tmp_path: Path) -> None:
    state = {
        "params": {"dense/0": {"kernel": np.arange(64.0)}, "..": np.arange(65.0)},
        "opt": [{"mu": np.arange(66.0)}],
        "größe": np.arange(67.0),
    }
    manifest = pc.save(tmp_path, state)
    names = {
        "params.dense%2F0.kernel": 64,
        "params.%2E%2E": 65,
        "opt.0.mu": 66,
        "gr%C3%B6%C3%9Fe": 67,
    }
    arrays = tmp_path / manifest.data_dir / "arrays"
    assert {folder.name for folder in arrays.iterdir()} == set(names)
    for name, length in names.items():
        for found in (by_tensorstore(arrays / name).read().result(), by_zarr_python(arrays / name)):
            np.testing.assert_array_equal(found[...], np.arange(float(length)))


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_small_shards_are_read_from_the_packed_array_at_the_offsets_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: Any
) -> None:
    monkeypatch.setattr(chunking, "PACK_BELOW_NBYTES", 1 << 20)
    mesh = make_mesh((4, 2), ("data", "model"))
    values = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    host = {
        "bf16": np.arange(5).astype(ml_dtypes.bfloat16),
        "bool": np.array([True, False, True]),
        "int4": np.arange(-8, 8).astype(ml_dtypes.int4),
        "scalar": np.complex64(1 - 2j),
        "sharded": values,
    }
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    state = host | {"sharded": jax.device_put(values, sharding)}
    manifest = pc.save(tmp_path, state, options=pc.SaveOptions(compress=compress))
    data = tmp_path / manifest.data_dir
    assert list((data / "arrays").iterdir()) == []
    table, _ = tables.from_bytes((data / "tables/00000.msgpack").read_bytes(), what="the table")
    for read in (by_tensorstore, by_zarr_python):
        packed = np.asarray(read(data / "packed/00000")[...])
        assert packed.dtype == np.uint8
        assert table.packed is not None
        assert packed.shape == (table.packed.nbytes,)
        found = {
            name: np.zeros(np.shape(array), np.asarray(array).dtype) for name, array in host.items()
        }
        own = table.packed_rows
        for leaf, shard, offset in zip(own.leaf, own.shard, own.offset, strict=True):
            at = manifest.leaves[int(leaf)]
            assert at.spec is not None
            box = at.spec.shards.box(int(shard))
            nbytes = box.size * at.spec.itemsize
            piece = packed[int(offset) : int(offset) + nbytes].view(dtypes.dtype_of(at.spec.dtype))
            found[at.text][box.slices()] = piece.reshape(box.shape)
        for name, array in host.items():
            assert found[name].tobytes() == np.asarray(array).tobytes(), name


def test_chunks_of_zeros_are_there_for_every_reader(tmp_path: Path) -> None:
    """Writers leave them out by default; then a lost chunk would read as zeros."""
    manifest = pc.save(tmp_path, {"z": np.zeros((16, 8)), "n": np.full((16, 8), -0.0)})
    for name in ("z", "n"):
        folder = array_folder(tmp_path, manifest, name)
        (file,) = folder.glob("c.*")
        assert file.stat().st_size == 16 * 8 * 8 + 16 * 16 + 4
        found = by_tensorstore(folder).read().result()
        assert np.signbit(found).all() == (name == "n")


def test_every_zarr_json_is_what_the_manifest_says(tmp_path: Path) -> None:
    """It is the same knowledge twice: once for this library, once for others."""
    state = {"w": np.ones((12, 8)), "b": np.ones(1)}
    manifest = pc.save(tmp_path, state, options=pc.SaveOptions(compress="zstd"))
    folder = array_folder(tmp_path, manifest, "w")
    assert json.loads((folder / "zarr.json").read_text()) == zarr.array_metadata(
        spec_of(manifest, "w")
    )
    for file in (tmp_path / manifest.data_dir).rglob("zarr.json"):
        found = json.loads(file.read_text())
        assert (found["zarr_format"], found["node_type"]) == (3, "array")
        assert [codec["name"] for codec in found["codecs"]] == ["sharding_indexed"]
        inner = found["codecs"][0]["configuration"]
        assert [codec["name"] for codec in inner["codecs"]] == ["bytes", "zstd"]
        assert [codec["name"] for codec in inner["index_codecs"]] == ["bytes", "crc32c"]
        assert inner["index_location"] == "end"
        assert found["chunk_key_encoding"]["configuration"]["separator"] == "."


def test_zarr_python_reads_a_resharded_part_of_what_jax_saved(tmp_path: Path) -> None:
    """The chunks of a shard are ranges of bytes, so a part costs a part."""
    mesh = make_mesh((2,), ("data",))
    host = np.arange(32 * 16, dtype=np.int32).reshape(32, 16)
    state = {"w": jax.device_put(host, NamedSharding(mesh, PartitionSpec("data")))}
    manifest = pc.save(tmp_path, state)
    found = by_zarr_python(array_folder(tmp_path, manifest, "w"))
    np.testing.assert_array_equal(found[15:17, ::5], host[15:17, ::5])
    np.testing.assert_array_equal(found[-1], host[-1])
