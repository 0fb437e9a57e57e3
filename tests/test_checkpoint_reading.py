"""An open checkpoint: its leaves by name, its arrays indexed as numpy indexes them."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.plan import chunking

P = PartitionSpec
ARRAYS: dict[str, np.ndarray] = {
    "chunked": np.arange(16 * 12 * 4, dtype=np.int32).reshape(16, 12, 4),
    "rows": np.arange(64 * 8, dtype=np.float32).reshape(64, 8),
    "line": np.arange(100, dtype=np.float64),
    "packed": np.arange(6, dtype=np.int16).reshape(2, 3),
    "bf16": np.arange(24).astype(ml_dtypes.bfloat16).reshape(4, 6),
    "int4": np.arange(-4, 4).astype(ml_dtypes.int4).reshape(2, 4),
    "scalar": np.array(7.5, np.float32),
    "one": np.ones((1, 1), np.complex64),
    "empty": np.zeros((0, 3), np.float32),
    "hollow": np.zeros((2, 0, 3), np.int8),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays of many chunks, of one, and of none; and values."""
    path = tmp_path_factory.mktemp("reading") / "ckpt"
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    tree = {
        **ARRAYS,
        "rows": jax.device_put(ARRAYS["rows"], NamedSharding(mesh, P("x"))),
        "chunked": jax.device_put(ARRAYS["chunked"], NamedSharding(mesh, P("x", "y"))),
        "key": jax.random.key(3, impl="rbg"),
        "number": np.float64(0.1),
        "values": {"step": 7, "name": "run", "raw": b"\0", "flag": True, "c": 1j, "none": None},
        "iterator": pc.PerProcess({"at": [1, 2]}),
        "a/b": 1,
        "nested": [{"x": (5, 6)}, {}],
        "7": 8,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "PACK_BELOW_NBYTES", 256)
        patch.setattr(chunking, "MAX_SHARD_NBYTES", 1024)
        patch.setattr(chunking, "MAX_CHUNK_NBYTES", 128)
        pc.save(path, tree)
    return path


@pytest.fixture
def ckpt(saved: Path) -> Iterator[pc.Checkpoint]:
    with pc.open(saved) as opened:
        yield opened


# --- names and values -------------------------------------------------------------------------

KEYS = [
    "'7'",
    "a%2Fb",
    "bf16",
    "chunked",
    "empty",
    "hollow",
    "int4",
    "iterator",
    "key",
    "line",
    "nested/0/x/0",
    "nested/0/x/1",
    "number",
    "one",
    "packed",
    "rows",
    "scalar",
    "values/c",
    "values/flag",
    "values/name",
    "values/raw",
    "values/step",
]


def test_keys_are_the_paths_of_all_leaves_in_order(ckpt: pc.Checkpoint) -> None:
    assert ckpt.keys() == KEYS == list(ckpt) == [leaf.text for leaf in ckpt.manifest.leaves]
    assert len(ckpt) == len(KEYS)
    assert all(key in ckpt for key in KEYS)
    for key in ("values", "nested", "nested/1", "values/none", "7", "a/b", "", "Rows"):
        assert key not in ckpt
    assert 7 not in ckpt
    assert None not in ckpt


def test_a_key_may_begin_and_end_with_a_slash(ckpt: pc.Checkpoint) -> None:
    assert "/values/step/" in ckpt
    assert ckpt["/values/step"] == 7


@pytest.mark.parametrize("key", ["missing", "values", "nested/0/x/2", "7"])
def test_a_key_that_is_not_there_names_itself_and_the_checkpoint(
    ckpt: pc.Checkpoint, saved: Path, key: str
) -> None:
    with pytest.raises(KeyError) as error:
        ckpt[key]
    assert repr(key) in str(error.value)
    assert str(saved) in str(error.value)
    assert "keys()" in str(error.value)


def test_python_values_are_there_as_they_were(ckpt: pc.Checkpoint) -> None:
    values = [ckpt[f"values/{name}"] for name in ("step", "name", "raw", "flag", "c")]
    assert values == [7, "run", b"\0", True, 1j]
    assert list(map(type, values)) == [int, str, bytes, bool, complex]
    assert (ckpt["nested/0/x/1"], ckpt["a%2Fb"], ckpt["'7'"]) == (6, 1, 8)


def test_a_value_per_process_is_the_list_of_all_of_them(ckpt: pc.Checkpoint) -> None:
    assert ckpt["iterator"] == [{"at": [1, 2]}]


def test_a_tree_that_is_one_leaf_has_the_empty_key(tmp_path: Path) -> None:
    pc.save(tmp_path, np.arange(3))
    with pc.open(tmp_path) as ckpt:
        assert ckpt.keys() == [""]
        assert "" in ckpt
        np.testing.assert_array_equal(ckpt[""], np.arange(3))


def test_a_checkpoint_without_leaves_is_empty(tmp_path: Path) -> None:
    pc.save(tmp_path, {"a": [], "b": None})
    with pc.open(tmp_path) as ckpt:
        assert len(ckpt) == 0
        assert ckpt.keys() == []
        assert ckpt.to_numpy() == {"a": [], "b": None}


# --- stored arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARRAYS)
def test_a_stored_array_has_the_attributes_of_the_array(ckpt: pc.Checkpoint, name: str) -> None:
    stored, array = ckpt[name], ARRAYS[name]
    assert isinstance(stored, pc.StoredArray)
    for attribute in ("shape", "dtype", "ndim", "size", "nbytes"):
        assert getattr(stored, attribute) == getattr(array, attribute)
    if array.ndim:
        assert len(stored) == len(array)
    else:
        with pytest.raises(TypeError):
            len(stored)


@pytest.mark.parametrize("name", ARRAYS)
def test_a_stored_array_becomes_the_numpy_array(ckpt: pc.Checkpoint, name: str) -> None:
    for found in (np.asarray(ckpt[name]), ckpt[name][...], ckpt[name].__array__()):
        assert type(found) is np.ndarray
        assert (found.dtype, found.shape) == (ARRAYS[name].dtype, ARRAYS[name].shape)
        assert found.tobytes() == ARRAYS[name].tobytes()
    assert np.asarray(ckpt[name], np.complex128).dtype == np.complex128


def test_what_is_read_is_the_callers_own(ckpt: pc.Checkpoint) -> None:
    for name in ("packed", "rows"):
        first = np.asarray(ckpt[name])
        first[:] = 0
        np.testing.assert_array_equal(ckpt[name], ARRAYS[name])


def test_an_array_that_must_not_be_copied_is_a_value_error_as_in_numpy(ckpt: pc.Checkpoint) -> None:
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(ckpt["rows"], copy=False)


def test_a_small_array_does_not_keep_the_memory_of_its_neighbours(tmp_path: Path) -> None:
    pc.save(tmp_path, {f"leaf{n}": np.arange(100.0) for n in range(500)})
    with pc.open(tmp_path) as ckpt:
        kept = [ckpt["leaf7"][...], np.asarray(ckpt["leaf8"]), ckpt.to_numpy()["leaf9"]]
    kept.append(pc.load(tmp_path)["leaf10"])
    for array in kept:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        assert owner.nbytes <= array.nbytes + 64


def test_keys_are_stored_as_their_data(ckpt: pc.Checkpoint) -> None:
    data = np.asarray(jax.random.key_data(jax.random.key(3, impl="rbg")))
    assert ckpt["key"].dtype == np.uint32
    np.testing.assert_array_equal(ckpt["key"], data)


def test_representations_say_what_is_there(ckpt: pc.Checkpoint, saved: Path) -> None:
    assert repr(ckpt["rows"]) == ("StoredArray(rows  float32[64, 8] P('x') on mesh(x=4, y=2))")
    assert repr(ckpt["line"]) == "StoredArray(line  float64[100] host array)"
    assert str(saved) in repr(ckpt)
    assert "22 leaves" in repr(ckpt)


SLICES = st.builds(
    slice,
    st.none() | st.integers(-20, 20),
    st.none() | st.integers(-20, 20),
    st.none() | st.integers(-7, 7).filter(bool),
)
INTS = st.integers(-17, 17)


@given(
    st.sampled_from(sorted(ARRAYS)),
    st.lists(SLICES | SLICES | INTS | INTS.map(np.int64) | st.just(...), max_size=4),
    st.booleans(),
)
@settings(max_examples=400)
def test_indexing_is_numpys(saved: Path, name: str, index: list[Any], is_tuple: bool) -> None:
    array = ARRAYS[name]
    asked = tuple(index) if is_tuple or len(index) != 1 else index[0]
    with pc.open(saved) as ckpt:
        try:
            expected = array[asked]
        except IndexError:
            with pytest.raises(IndexError):
                ckpt[name][asked]
            return
        found = ckpt[name][asked]
    assert type(found) is type(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def test_parts_without_elements_have_the_shape_that_numpy_gives_them(
    ckpt: pc.Checkpoint,
) -> None:
    for name, index in [
        ("packed", np.s_[0:0]),
        ("packed", np.s_[1, 2:1]),
        ("rows", np.s_[5:5, ::2]),
        ("line", np.s_[50:10]),
        ("line", np.s_[100:]),
        ("empty", np.s_[:, 1]),
        ("hollow", np.s_[1]),
    ]:
        found, expected = ckpt[name][index], ARRAYS[name][index]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)


@pytest.mark.parametrize(
    "index",
    [1.0, "x", None, True, [0, 1], np.array([0, 1]), np.array([True]), (0, None), (0, 1.5), {}],
)
def test_an_index_that_is_no_int_or_slice_is_a_type_error(ckpt: pc.Checkpoint, index: Any) -> None:
    with pytest.raises(TypeError):
        ckpt["rows"][index]


@pytest.mark.parametrize("index", [64, -65, (0, 8), (0, -9), (0, 0, 0), (..., ...)])
def test_an_index_out_of_bounds_is_an_index_error(ckpt: pc.Checkpoint, index: Any) -> None:
    with pytest.raises(IndexError):
        ckpt["rows"][index]


def test_a_step_of_zero_is_a_value_error_as_in_numpy(ckpt: pc.Checkpoint) -> None:
    with pytest.raises(ValueError, match="zero"):
        ckpt["rows"][::0]


# --- reads ------------------------------------------------------------------------------------


def read_by(saved: Path, name: str, index: Any) -> tuple[int, int]:
    """Chunks and bytes that one access reads."""
    with pc.open(saved) as ckpt:
        stats = ckpt._reader.stats
        assert (stats.chunks, stats.nbytes) == (0, 0)
        ckpt[name][index]
        return stats.chunks, stats.nbytes


def test_a_part_reads_only_the_chunks_that_it_lies_in(saved: Path) -> None:
    spec = pc.read_manifest(saved).by_text["rows"].spec
    assert spec is not None
    assert spec.chunk_shape == (4, 8)
    chunk = 4 * 8 * 4
    assert read_by(saved, "rows", 0) == (1, chunk)
    assert read_by(saved, "rows", np.s_[3:5]) == (2, 2 * chunk)
    assert read_by(saved, "rows", np.s_[4:8, 2]) == (1, chunk)
    assert read_by(saved, "rows", np.s_[17::-1]) == (5, 5 * chunk)
    assert read_by(saved, "rows", ...) == (16, 16 * chunk)
    assert read_by(saved, "rows", np.s_[5:5]) == (0, 0)
    assert read_by(saved, "empty", ...) == (0, 0)


def test_a_small_array_is_read_without_its_neighbours(saved: Path) -> None:
    assert read_by(saved, "packed", 0) == (1, ARRAYS["packed"].nbytes)


def test_opening_and_looking_reads_no_array(saved: Path) -> None:
    with pc.open(saved) as ckpt:
        assert [ckpt[key] for key in ckpt]
        assert repr([ckpt[key] for key in ckpt])
        assert ckpt._reader.stats.chunks == 0


def test_to_numpy_is_the_whole_tree_and_reads_each_chunk_once(saved: Path) -> None:
    with pc.open(saved) as ckpt:
        tree = ckpt.to_numpy()
        manifest = ckpt.manifest
        assert ckpt._reader.stats.nbytes == manifest.nbytes
    for name, array in ARRAYS.items():
        assert type(tree[name]) is np.ndarray
        assert (tree[name].dtype, tree[name].shape) == (array.dtype, array.shape)
        assert tree[name].tobytes() == array.tobytes()
        assert tree[name].flags.writeable
    assert type(tree["number"]) is np.float64
    assert tree["number"] == 0.1
    assert tree["values"] == {
        "step": 7,
        "name": "run",
        "raw": b"\0",
        "flag": True,
        "c": 1j,
        "none": None,
    }
    assert tree["nested"] == [{"x": (5, 6)}, {}]
    assert (tree["a/b"], tree["7"]) == (1, 8)
    assert tree["iterator"] == [{"at": [1, 2]}]
    np.testing.assert_array_equal(tree["key"], jax.random.key_data(jax.random.key(3, impl="rbg")))


# --- its life ---------------------------------------------------------------------------------


def test_a_closed_checkpoint_says_that_it_is_closed(saved: Path) -> None:
    ckpt = pc.open(saved)
    rows = ckpt["rows"]
    ckpt.close()
    ckpt.close()
    for access in (lambda: rows[0], lambda: np.asarray(rows), ckpt.to_numpy):
        with pytest.raises(pc.CheckpointError, match="closed"):
            access()
    assert ckpt["values/step"] == 7  # what the manifest holds is still at hand
    assert rows.shape == (64, 8)


def test_leaving_the_block_closes_the_checkpoint(saved: Path) -> None:
    with pytest.raises(RuntimeError, match="by the user"), pc.open(saved) as ckpt:
        raise RuntimeError("by the user")
    with pytest.raises(pc.CheckpointError, match="closed"):
        ckpt["rows"][0]


def test_an_open_checkpoint_can_be_read_while_another_save_replaces_it(tmp_path: Path) -> None:
    old, new = np.arange(1 << 18), np.arange(1 << 18)[::-1].copy()
    pc.save(tmp_path, {"w": old})
    with pc.open(tmp_path) as ckpt:
        pc.save(tmp_path, {"w": new}, overwrite=True)
        np.testing.assert_array_equal(ckpt["w"], old)
        np.testing.assert_array_equal(pc.load(tmp_path)["w"], new)
    pc.save(tmp_path, {"w": old}, overwrite=True)
    assert len(list(tmp_path.glob("data-*"))) == 1  # nothing is left of the two before


def test_a_lost_data_folder_is_damage_and_not_a_closed_checkpoint(tmp_path: Path) -> None:
    manifest = pc.save(tmp_path, {"w": np.arange(3), "n": 1})
    shutil.rmtree(tmp_path / manifest.data_dir)
    with pc.open(tmp_path) as ckpt:
        assert ckpt["n"] == 1
        with pytest.raises(pc.IntegrityError, match="missing"):
            ckpt["w"][0]


def test_what_is_no_checkpoint_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(pc.NotFoundError):
            pc.open(path)
        with pytest.raises(FileNotFoundError):
            pc.read_manifest(path)


WITHOUT_JAX = """
    import sys

    import pytree_ckpt as pc

    path = sys.argv[1]
    manifest = pc.read_manifest(path)
    assert len(manifest.leaves) == 22
    assert "P('x') on mesh(x=4, y=2)" in str(manifest.by_text["rows"])
    assert pc.steps(path) == []
    assert "tensorstore" not in sys.modules
    with pc.open(path) as ckpt:
        assert ckpt["rows"][1:3, 0].tolist() == [8.0, 16.0]
        assert ckpt.to_numpy()["nested"] == [{"x": (5, 6)}, {}]
    assert pc.LoadOptions and pc.SaveOptions and pc.MismatchError
    loaded = {name.split(".")[0] for name in sys.modules}
    assert not loaded & {"jax", "jaxlib", "flax"}, loaded
    print("without jax")
"""


def test_a_checkpoint_is_read_without_jax(saved: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_JAX), saved],
        env={**os.environ, "PYTHONPATH": str(Path(pc.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "without jax\n"


def test_a_checkpoint_that_is_open_when_the_interpreter_ends_says_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, numpy as np, pytree_ckpt as pc\n"
        "pc.save(sys.argv[1], {'w': np.ones(3)})\n"
        "checkpoint = pc.open(sys.argv[1])\n"
        "checkpoint['w'][:]\n"
    )
    command = [sys.executable, str(script), str(tmp_path / "ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
