"""Safetensors and npz, out and in, beside the libraries that define them."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.plan import chunking
from pytree_ckpt.verbs.checkpoint import Checkpoint
from tests.bitwise import assert_same
from tests.conftest import make_mesh


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a few hundred bytes are stored as large ones are."""
    monkeypatch.setattr(chunking, "PACK_BELOW_NBYTES", 128)
    monkeypatch.setattr(chunking, "MAX_CHUNK_NBYTES", 256)


def put(array: Any, *spec: Any) -> jax.Array:
    mesh = make_mesh((4, 2), ("data", "model"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def weights() -> dict[str, Any]:
    """A leaf of each dtype that the format has, and of each kind of shape."""
    random = np.random.default_rng(3)
    names = ["float16", "bfloat16", "float32", "float64", "complex64", "bool"]
    names += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    names += ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    return {
        **{name: random.integers(0, 2, (3, 5)).astype(np.dtype(name)) for name in names},
        "tiles": put(random.standard_normal((32, 16), np.float32), "data", "model"),
        "columns": put(random.standard_normal((32, 16)).astype("bfloat16"), None, "data"),
        "cube": put(random.standard_normal((4, 6, 8), np.float32), None, None, "data"),
        "scalar": np.asarray(1.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }


def tensors_of(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """What the safetensors library finds in a file."""
    found = safetensors.deserialize(file.read_bytes())
    return {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in found}


def test_what_is_exported_and_imported_is_what_it_was(tmp_path: Path) -> None:
    state = {
        "params": [weights(), {"1": np.ones(2), "2": np.zeros(2)}],
        "rng": jax.random.key(5, impl="rbg"),
        "step": 2**70,
        "lr": float("nan"),
        "more": (None, {}, "text", b"\x00\xff", True, 1j, np.int8(3)),
    }
    pc.save(tmp_path / "a", state)
    pc.export_safetensors(tmp_path / "a", tmp_path / "w.safetensors")
    pc.import_safetensors(tmp_path / "w.safetensors", tmp_path / "b")
    with pc.open(tmp_path / "a") as old, pc.open(tmp_path / "b") as new:
        assert_same(new.to_numpy(), old.to_numpy())
    assert pc.load(tmp_path / "b")["rng"].dtype == state["rng"].dtype
    assert pc.read_manifest(tmp_path / "b").source["holds"] == "all"


def test_the_library_reads_what_is_exported(tmp_path: Path) -> None:
    state = weights()
    pc.save(tmp_path / "a", state)
    file = tmp_path / "w.safetensors"
    report = pc.export_safetensors(tmp_path / "a", file, metadata={"license": "none"})
    found = tensors_of(file)
    assert sorted(found) == sorted(state)
    for name, array in state.items():
        assert found[name][1:] == (list(array.shape), np.asarray(array).tobytes()), name
    assert report.nbytes == sum(np.asarray(array).nbytes for array in state.values())
    with safetensors.safe_open(file, "numpy") as opened:
        assert opened.metadata()["license"] == "none"
        assert opened.get_tensor("tiles").tobytes() == np.asarray(state["tiles"]).tobytes()


def test_an_exported_file_is_the_librarys_byte_for_byte(tmp_path: Path) -> None:
    state = {
        name: np.asarray(array)
        for name, array in weights().items()
        if array.dtype.kind in "biuf" and array.dtype.name != "float16"
    }
    pc.save(tmp_path / "a", {**state, "other": 1})
    pc.export_safetensors(tmp_path / "a", tmp_path / "ours.safetensors", select=list(state))
    file = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file(state, file, metadata={"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == file.read_bytes()


def test_what_the_library_wrote_is_imported(tmp_path: Path) -> None:
    arrays = {
        "model.layers.0.w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "model.layers.1.w": np.ones(3, ml_dtypes.bfloat16),
        "head": np.zeros((0, 2), np.int64),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "w.safetensors", metadata={"by": "them"})
    pc.import_safetensors(tmp_path / "w.safetensors", tmp_path / "nested")
    layers = {"0": {"w": arrays["model.layers.0.w"]}, "1": {"w": arrays["model.layers.1.w"]}}
    wanted = {"head": arrays["head"], "model": {"layers": layers}}
    assert_same(pc.load(tmp_path / "nested"), wanted)
    pc.import_safetensors(tmp_path / "w.safetensors", tmp_path / "flat", separator=None)
    assert_same(pc.load(tmp_path / "flat"), dict(sorted(arrays.items())))
    manifest = pc.read_manifest(tmp_path / "nested")
    assert manifest.metadata == {"by": "them"}
    assert manifest.source["holds"] == "weights"
    with pytest.raises(pc.MismatchError, match=r"made of weights alone: .*w.safetensors"):
        pc.require(tmp_path / "nested", model=True, opt_state=True)


def test_several_files_have_an_index_by_the_rules_of_transformers(tmp_path: Path) -> None:
    state = weights()
    pc.save(tmp_path / "a", state)
    report = pc.export_safetensors(tmp_path / "a", tmp_path / "hf", max_file_nbytes=2100)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 1
    assert files == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert index["metadata"]["total_size"] == report.nbytes
    found = {file: tensors_of(tmp_path / "hf" / file) for file in files}
    assert {name: file for file in files for name in found[file]} == index["weight_map"]
    pc.import_safetensors(tmp_path / "hf", tmp_path / "b")
    with pc.open(tmp_path / "a") as old, pc.open(tmp_path / "b") as new:
        assert_same(new.to_numpy(), old.to_numpy())


def as_transformers(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """What `from_pretrained` finds in a folder, by the rules of its `modeling_utils` and `hub`."""
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert isinstance(index["metadata"]["total_size"], int)
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    found = {}
    for file in files:
        with safetensors.safe_open(file, "numpy") as opened:
            assert opened.metadata().get("format") in ("pt", "tf", "flax", "mlx")
        found |= tensors_of(file)
    return found


def test_transformers_finds_what_was_exported_last(tmp_path: Path) -> None:
    """It prefers one file to an index, so neither may be left of the export before."""
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        pc.save(tmp_path / name, {"v": np.full(8, value), "w": np.full(8, value)})
    hf = tmp_path / "hf"
    for name, value, most in (("a", 1.0, 999), ("b", 2.0, 64), ("c", 3.0, 999)):
        if name != "a":
            with pytest.raises(pc.ExistsError):
                pc.export_safetensors(tmp_path / name, hf, max_file_nbytes=most)
        pc.export_safetensors(tmp_path / name, hf, max_file_nbytes=most, overwrite=True)
        wanted = ("F64", [8], np.full(8, value).tobytes())
        assert as_transformers(hf) == {"v": wanted, "w": wanted}
        pc.import_safetensors(hf, tmp_path / "back", overwrite=True)
        assert pc.load(tmp_path / "back")["w"][0] == value
    pc.export_safetensors(tmp_path / "a", hf, metadata={"format": "flax"}, overwrite=True)
    with safetensors.safe_open(hf / "model.safetensors", "numpy") as opened:
        assert opened.metadata()["format"] == "flax"


def test_no_file_is_left_that_leads_to_an_export_before(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        pc.save(tmp_path / name, {"v": np.full(8, value), "w": np.full(8, value)})
    file, index = (tmp_path / f"w.safetensors{end}" for end in ("", ".index.json"))
    pc.export_safetensors(tmp_path / "a", file)
    with pytest.raises(pc.ExistsError):
        pc.export_safetensors(tmp_path / "b", file, max_file_nbytes=64)
    pc.export_safetensors(tmp_path / "b", file, max_file_nbytes=64, overwrite=True)
    assert (file.exists(), index.exists()) == (False, True)
    pc.export_safetensors(tmp_path / "a", file, overwrite=True)
    assert (file.exists(), index.exists()) == (True, False)


def test_an_export_that_dies_halfway_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        pc.save(tmp_path / name, {"v": np.full(8, value), "w": np.full(8, value)})
    pc.export_safetensors(tmp_path / "a", tmp_path / "hf", max_file_nbytes=64)
    replace, calls = Path.replace, []

    def once(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", once)
    with pytest.raises(KeyboardInterrupt):
        pc.export_safetensors(tmp_path / "b", tmp_path / "hf", max_file_nbytes=64, overwrite=True)
    with pytest.raises(pc.FormatError, match=r"neither model\.safetensors nor"):
        pc.import_safetensors(tmp_path / "hf", tmp_path / "back")
    assert not list((tmp_path / "hf").glob("*.tmp"))


def test_tied_weights_are_in_the_file_for_each_leaf(tmp_path: Path) -> None:
    tied = put(np.arange(128, dtype=np.float32).reshape(16, 8), "data")
    base = np.arange(8.0)
    state = {"embed": tied, "head": {"kernel": tied}, "view": base[:4], "view2": base[4:]}
    pc.save(tmp_path / "a", state)
    loaded = pc.load(tmp_path / "a", state)
    loaded["embed"].delete()  # as a donation does
    assert loaded["head"]["kernel"][3, 3] == tied[3, 3]
    pc.export_safetensors(tmp_path / "a", tmp_path / "w.safetensors")
    found = tensors_of(tmp_path / "w.safetensors")
    assert [found[name][2] for name in ("view", "view2")] == [
        base[:4].tobytes(),
        base[4:].tobytes(),
    ]
    assert found["embed"] == found["head.kernel"] == ("F32", [16, 8], np.asarray(tied).tobytes())


@pytest.mark.parametrize("act", [pc.export_safetensors, pc.export_npz])
def test_a_name_that_the_format_cannot_have_is_refused(tmp_path: Path, act: Any) -> None:
    names = ["__metadata__"] if act is pc.export_safetensors else ["a\0b", "é" * 40_000]
    pc.save(tmp_path / "a", {"good": np.ones(2), **{name: np.ones(2) for name in names}})
    with pytest.raises(pc.UnsupportedLeafError) as error:
        act(tmp_path / "a", tmp_path / "w.npz")
    assert len(error.value.leaves) == len(names)
    assert not (tmp_path / "w.npz").exists()
    act(tmp_path / "a", tmp_path / "w.npz", select="good")


@pytest.mark.parametrize("act", [pc.export_safetensors, pc.export_npz])
def test_small_arrays_are_exported_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Any
) -> None:
    pc.save(tmp_path / "a", {f"w{n}": np.full(5, n) for n in range(200)})
    calls = []
    read = Checkpoint.read_boxes

    def counting(self: Any, wanted: Any) -> Any:
        calls.append(len(wanted))
        return read(self, wanted)

    monkeypatch.setattr(Checkpoint, "read_boxes", counting)
    act(tmp_path / "a", tmp_path / "w.npz")
    assert calls == [200]


@pytest.mark.parametrize("act", [pc.export_safetensors, pc.export_npz])
@pytest.mark.parametrize("select", [["good", "nope"], ["nope"], ""], ids=repr)
def test_a_pattern_that_selects_nothing_is_refused(tmp_path: Path, act: Any, select: Any) -> None:
    pc.save(tmp_path / "a", {"good": np.ones(2)})
    with pytest.raises(pc.MismatchError) as error:
        act(tmp_path / "a", tmp_path / "w", select=select)
    assert [item.path for item in error.value.mismatches] == [select if not select else "nope"]
    assert not (tmp_path / "w").exists()


def test_what_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    state = {
        "q": jax.numpy.zeros(4, "int4"),
        "u": jax.numpy.zeros(4, "uint4"),
        "f": np.zeros(4, ml_dtypes.float8_e4m3b11fnuz),
        "z": np.zeros(2, np.complex128),
        "mine": pc.PerProcess(1),
        "good": np.zeros(2),
    }
    pc.save(tmp_path / "a", state)
    with pytest.raises(pc.UnsupportedLeafError, match="mine  belongs to one process"):
        pc.export_safetensors(tmp_path / "a", tmp_path / "w.safetensors")
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.export_safetensors(
            tmp_path / "a", tmp_path / "w.safetensors", select=["q", "u", "z", "f"]
        )
    assert sorted(leaf for leaf, _ in error.value.leaves) == ["f", "q", "u", "z"]
    assert not (tmp_path / "w.safetensors").exists()


def test_leaves_that_would_have_one_name_are_refused(tmp_path: Path) -> None:
    pc.save(tmp_path / "a", {"a": {"b": np.ones(2)}, "a.b": np.zeros(2), "c": np.ones(1)})
    with pytest.raises(pc.UnsupportedLeafError, match=r"a/b  would have the name 'a\.b'"):
        pc.export_safetensors(tmp_path / "a", tmp_path / "w.safetensors")
    pc.export_safetensors(tmp_path / "a", tmp_path / "w.safetensors", separator="/")
    assert sorted(tensors_of(tmp_path / "w.safetensors")) == ["a.b", "a/b", "c"]


def test_files_are_not_replaced_unless_asked_and_never_half_written(tmp_path: Path) -> None:
    pc.save(tmp_path / "a", weights())
    file = tmp_path / "out" / "w.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"precious")
    with pytest.raises(pc.ExistsError):
        pc.export_safetensors(tmp_path / "a", file)
    for chunk in (tmp_path / "a").glob("data-*/arrays/tiles/c*"):
        chunk.unlink()
    with pytest.raises(pc.IntegrityError):
        pc.export_safetensors(tmp_path / "a", file, overwrite=True)
    assert [entry.name for entry in file.parent.iterdir()] == ["w.safetensors"]
    assert file.read_bytes() == b"precious"


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def tensor(dtype: str, shape: list[Any], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "a length beyond the file": (1 << 62).to_bytes(8, "little") + b"{}",
    "no JSON": (3).to_bytes(8, "little") + b"abc",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "deep": (20000).to_bytes(8, "little") + b"[" * 20000,
    "a name twice": (23).to_bytes(8, "little") + b'{"a":{"x":1},"a":{} }  ',
    "a gap": header(a=tensor("U8", [1], 1, 2)) + b"xx",
    "an overlap": header(a=tensor("U8", [2], 0, 2), b=tensor("U8", [2], 1, 3)) + b"xxx",
    "too short": header(a=tensor("U8", [9], 0, 9)) + b"x",
    "too long": header(a=tensor("U8", [1], 0, 1)) + b"xxx",
    "bytes that do not fit the shape": header(a=tensor("F32", [3], 0, 4)) + b"xxxx",
    "a negative extent": header(a=tensor("U8", [-1, -1], 0, 1)) + b"x",
    "a huge extent": header(a=tensor("U8", [1 << 70], 0, 1 << 70)),
    "an unknown dtype": header(a=tensor("F7", [1], 0, 1)) + b"x",
    "extents that are no ints": header(a=tensor("U8", [True], 0, 1)) + b"x",
    "metadata that are no strings": header(__metadata__={"a": 1}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "w.safetensors").write_bytes(HOSTILE[kind])
    with pytest.raises(pc.FormatError, match=r"w\.safetensors"):
        pc.import_safetensors(tmp_path / "w.safetensors", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("call", ["export_npz", "export_safetensors", "import_npz"])
def test_a_disk_that_is_full_is_named(tmp_path: Path, call: str) -> None:
    """As one is for which a file is too large."""
    pc.save(tmp_path / "a", {"w": np.arange(20_000)})
    np.savez_compressed(tmp_path / "a.npz", w=np.arange(20_000))
    (tmp_path / "tmp").mkdir()
    code = (
        "import resource, sys, pytree_ckpt as pc\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "getattr(pc, sys.argv[1])(sys.argv[2], sys.argv[3])\n"
    )
    source, place = ("a.npz", "tmp") if call == "import_npz" else ("a", "out")
    done = subprocess.run(
        [sys.executable, "-c", code, call, tmp_path / source, tmp_path / "out" / "w.npz"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    assert f"File too large: '{tmp_path / place}" in done.stderr


def test_an_index_says_which_tensor_is_taken_from_which_file(tmp_path: Path) -> None:
    """Files that are reused have more in them, and some of it under names of other files."""
    files = {"one": {"a": 1, "b": 2}, "two": {"b": 3, "c": 4}}
    for name, values in files.items():
        tensors = {key: np.full(2, value) for key, value in values.items()}
        safetensors.numpy.save_file(tensors, tmp_path / f"{name}.safetensors")
    taken = {"a": "one.safetensors", "b": "two.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": taken}))
    report = pc.import_safetensors(tmp_path, tmp_path / "ours")
    assert_same(pc.load(tmp_path / "ours"), {"a": np.full(2, 1), "b": np.full(2, 3)})
    assert [what.split(":")[0] for what in report.left_out] == ["b", "c"]
    index.write_text(json.dumps({"weight_map": {**taken, "c": "one.safetensors"}}))
    with pytest.raises(pc.FormatError, match="names 'c', which one"):
        pc.import_safetensors(tmp_path, tmp_path / "others")


def test_metadata_may_be_null(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(header(__metadata__=None, a=tensor("U8", [1], 0, 1)) + b"x")
    assert safetensors.numpy.load_file(file)["a"] == [120]
    pc.import_safetensors(file, tmp_path / "ours")
    assert pc.load(tmp_path / "ours")["a"] == [120]


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    safetensors.numpy.save_file({"a": np.ones(1)}, tmp_path / "secret.safetensors")
    index = tmp_path / "hf/model.safetensors.index.json"
    for name in ("../secret.safetensors", "..", str(tmp_path / "secret.safetensors")):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(pc.FormatError, match="weight_map"):
            pc.import_safetensors(tmp_path / "hf", tmp_path / "b")


# --- npz ----------------------------------------------------------------------------------------


def numbers() -> dict[str, Any]:
    return {name: a for name, a in weights().items() if np.asarray(a).dtype.isbuiltin == 1}


def test_numpy_reads_an_exported_npz(tmp_path: Path) -> None:
    state = {"params": numbers(), "step": 3}
    pc.save(tmp_path / "a", state)
    report = pc.export_npz(tmp_path / "a", tmp_path / "w.npz")
    assert report.left_out == ("step: a Python value",)
    with np.load(tmp_path / "w.npz") as found:
        assert sorted(found) == sorted(f"params/{name}" for name in state["params"])
        for name, array in state["params"].items():
            assert found[f"params/{name}"].dtype == np.asarray(array).dtype
            assert found[f"params/{name}"].tobytes() == np.asarray(array).tobytes()
    pc.import_npz(tmp_path / "w.npz", tmp_path / "b")
    wanted = {k: np.asarray(v) for k, v in sorted(state["params"].items())}
    assert_same(pc.load(tmp_path / "b")["params"], wanted)


def test_what_numpy_wrote_is_imported_compressed_or_turned(tmp_path: Path) -> None:
    arrays = {
        "f": np.asfortranarray(np.arange(600.0).reshape(20, 30)),
        "c": np.arange(600, dtype=np.int16).reshape(20, 30),
    }
    for save, name in ((np.savez, "plain"), (np.savez_compressed, "packed")):
        save(tmp_path / f"{name}.npz", **arrays)
        pc.import_npz(tmp_path / f"{name}.npz", tmp_path / name)
        found = pc.load(tmp_path / name)
        assert all((found[key] == array).all() for key, array in arrays.items())


def test_npz_refuses_dtypes_that_numpy_has_not_and_pickles(tmp_path: Path) -> None:
    pc.save(tmp_path / "a", {"b": np.ones(2, ml_dtypes.bfloat16)})
    with pytest.raises(pc.UnsupportedLeafError, match="b  numpy has no dtype bfloat16"):
        pc.export_npz(tmp_path / "a", tmp_path / "w.npz")
    np.savez(tmp_path / "o.npz", o=np.asarray([{}], object))
    with pytest.raises(pc.FormatError, match=r"dtype '\|O'"):
        pc.import_npz(tmp_path / "o.npz", tmp_path / "b")
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("x.npy", b"not numpy")
    for file in ("bad.npz", "a/manifest.msgpack"):
        with pytest.raises(pc.FormatError):
            pc.import_npz(tmp_path / file, tmp_path / "b")
