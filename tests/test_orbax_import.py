"""Checkpoints that orbax itself writes are imported to the last bit."""

import json
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc
from tests.bitwise import assert_same
from tests.conftest import make_mesh

Moments = namedtuple("Moments", ["mu", "nu"])


def put(array: Any, *spec: Any) -> jax.Array:
    mesh = make_mesh((4, 2), ("data", "model"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def state() -> dict[str, Any]:
    random = np.random.default_rng(11)
    return {
        "w": put(random.standard_normal((64, 16), np.float32), "data", "model"),
        "columns": put(random.standard_normal((8, 16)).astype("bfloat16"), None, ("model", "data")),
        "fp8": put(random.standard_normal(16).astype(jnp.float8_e4m3fn)),
        "alone": jnp.float32(2),
        "key": jax.random.key(3),
        "keys": put(jax.random.split(jax.random.key(1, impl="rbg"), 8), "data"),
        "host": np.arange(6, dtype=np.int64).reshape(2, 3),
        "big": np.arange(1 << 19, dtype=np.float32),
        "list": [np.arange(3), {"deep": 1.5}],
        "tuple": (1, True, np.ones(2, np.int16)),
        "moments": Moments(np.ones(1), 2),
        "none": None,
        "empty": {},
        "a/b": np.ones(2),
        "text": "hello",
    }


def v0(**settings: Any) -> Callable[[Path], Path]:
    def save(path: Path) -> Path:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**settings)) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(state()))
        return path

    return save


def manager(path: Path) -> Path:
    tree = {k: v for k, v in state().items() if k != "text"}
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(tree), notes=ocp.args.JsonSave({"run": [1, 2]})
    )
    with ocp.CheckpointManager(path) as made:
        made.save(5, args=args)
    return path / "5"


def v1(path: Path) -> Path:
    orbax = pytest.importorskip("orbax.checkpoint.experimental.v1", reason="no v1 in this orbax")
    save = getattr(orbax, "save", None) or orbax.save_pytree
    save(path, state(), custom_metadata={"run": [1, 2]})
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "v0, zarr 2 in OCDBT": v0(use_ocdbt=True, use_zarr3=False),
    "v0, zarr 3 in OCDBT": v0(use_ocdbt=True, use_zarr3=True),
    "v0, zarr 2 in folders": v0(use_ocdbt=False, use_zarr3=False),
    "v0, zarr 3 in folders": v0(use_ocdbt=False, use_zarr3=True),
    "v0, a manager": manager,
    "v1": v1,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_orbax_wrote_comes_back_to_the_last_bit(tmp_path: Path, writer: str) -> None:
    path = WRITERS[writer](tmp_path / "orbax")
    with pytest.raises(pc.NotFoundError, match="import_orbax"):
        pc.load(path)
    report = pc.import_orbax(path, tmp_path / "ours")
    target = {k: v for k, v in state().items() if k != "text" or writer != "v0, a manager"}
    # What orbax does not record, the target has: tuples and named tuples.
    assert_same(pc.load(tmp_path / "ours", target, rename={"**": "**"}), target)
    (lost,) = report.left_out
    assert "list, tuple came as lists" in lost
    assert pc.verify(tmp_path / "ours").ok
    manifest = pc.read_manifest(tmp_path / "ours")
    assert manifest.source == {"kind": "orbax", "path": str(path), "holds": "all"}
    kept = {
        "v0, a manager": {"orbax": {"items": {"notes": {"run": [1, 2]}}}},
        "v1": {"orbax": {"custom_metadata": {"run": [1, 2]}}},
    }
    assert manifest.metadata == kept.get(writer)


@pytest.mark.parametrize("is_ocdbt", [True, False])
@pytest.mark.parametrize(
    "tree",
    [[np.arange(3), {"a": np.ones(2)}, [], None], np.arange(4.0), {"b": {"1": np.ones(1)}}],
    ids=["a list", "a leaf", "a dict"],
)
def test_a_tree_of_any_root_is_imported(tmp_path: Path, tree: Any, is_ocdbt: bool) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=is_ocdbt)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.PyTreeSave(tree))
    pc.import_orbax(tmp_path / "orbax", tmp_path / "ours")
    assert_same(pc.load(tmp_path / "ours"), tree)


def test_keys_that_may_have_been_ints_are_told(tmp_path: Path) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"blocks": {1: np.ones(1), 20: np.ones(2)}})
    report = pc.import_orbax(tmp_path / "orbax", tmp_path / "ours")
    assert pc.load(tmp_path / "ours")["blocks"].keys() == {"1", "20"}
    (lost,) = report.left_out
    assert "blocks/'1', blocks/'20' came as text" in lost


def test_an_item_may_be_beside(tmp_path: Path) -> None:
    path = manager(tmp_path / "root")
    pc.import_orbax(path / "notes", tmp_path / "ours", item="../state")
    assert pc.verify(tmp_path / "ours").ok


def test_an_import_needs_neither_orbax_nor_jax(tmp_path: Path) -> None:
    WRITERS["v0, zarr 3 in OCDBT"](tmp_path / "orbax")
    code = (
        "import sys, pytree_ckpt as pc; pc.import_orbax(*sys.argv[1:]); "
        "assert not {'jax', 'orbax'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "orbax", tmp_path / "ours"], check=True, timeout=120
    )


def test_a_root_names_its_steps_and_an_unfinished_save_is_refused(tmp_path: Path) -> None:
    manager(tmp_path / "root")
    with pytest.raises(pc.NotFoundError, match=r"steps \['5'\]"):
        pc.import_orbax(tmp_path / "root", tmp_path / "ours")
    unfinished = tmp_path / "5.orbax-checkpoint-tmp"
    (tmp_path / "root/5").rename(unfinished)
    with pytest.raises(pc.NotFoundError, match="did not finish"):
        pc.import_orbax(unfinished, tmp_path / "ours")
    with pytest.raises(pc.NotFoundError, match="no tree of orbax"):
        pc.import_orbax(tmp_path, tmp_path / "ours")


# --- hostile input --------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A small checkpoint in folders, whose files can be changed one by one."""
    tree = {"w": np.arange(12.0).reshape(3, 4), "s": "text"}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.PyTreeSave(tree))
    return tmp_path / "orbax"


def change(file: str, **fields: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**found, **fields}))

    return act


def write(file: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(data) and None


def grid(*chunk: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


def leaf(*keys: Any, kind: str = "np.ndarray") -> dict[str, Any]:
    named = [{"key": key, "key_type": 2} for key in keys]
    return {"x": {"key_metadata": named, "value_metadata": {"value_type": kind}}}


def link(folder: Path) -> None:
    (chunk,) = (file for file in (folder / "w/c").rglob("*") if file.is_file())
    chunk.rename(folder.parent / "elsewhere")
    chunk.symlink_to(folder.parent / "elsewhere")


HOSTILE: dict[str, Callable[[Path], None]] = {
    "a shape beyond any memory": change("w/zarr.json", shape=[1 << 40, 1 << 40]),
    "a chunk beyond any memory": change("w/zarr.json", chunk_grid=grid(1 << 40, 1)),
    "another rank of chunks": change("w/zarr.json", chunk_grid=grid(3)),
    "a negative shape": change("w/zarr.json", shape=[-3, 4]),
    "another shape": change("w/zarr.json", shape=[300, 4]),
    "an unknown dtype": change("w/zarr.json", data_type="float7"),
    "objects": change("w/zarr.json", data_type="|O"),
    "an unknown codec": change("w/zarr.json", codecs=[{"name": "evil"}]),
    "no codecs": change("w/zarr.json", codecs=7),
    "another format": change("w/zarr.json", zarr_format=9),
    "no JSON": write("w/zarr.json", b"\xff\xfe"),
    "deep JSON": write("_METADATA", b"[" * 100_000),
    "no tree": change("_METADATA", tree_metadata=[1]),
    "a leaf in another folder": change("_METADATA", tree_metadata=leaf("../../secret")),
    "a leaf at the root of the disk": change("_METADATA", tree_metadata=leaf("/etc")),
    "a leaf that is also nothing": lambda folder: change(
        "_METADATA", tree_metadata={"a": leaf("w")["x"], "b": leaf("w", kind="None")["x"]}
    )(folder),
    "a leaf without a key": change("_METADATA", tree_metadata=leaf(7)),
    "a leaf that is not there": change("_METADATA", tree_metadata=leaf("nothing")),
    "a text that is not there": change("_METADATA", tree_metadata=leaf("t", kind="string")),
    "a leaf below a leaf": lambda folder: change(
        "_METADATA", tree_metadata={"a": leaf("w")["x"], "b": leaf("w", "w")["x"]}
    )(folder),
    "shardings that are none": write("_sharding", b'{"dw==": "7"}'),
    "a mesh that is none": write(
        "_sharding", json.dumps({"dw==": json.dumps({"sharding_type": "NamedSharding"})}).encode()
    ),
    "a symbolic link": link,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_input_is_refused_by_name(folders: Path, kind: str) -> None:
    secret = folders.parent / "secret"
    secret.mkdir()
    HOSTILE[kind](folders)
    with pytest.raises((pc.FormatError, OSError)) as error:
        pc.import_orbax(folders, folders.parent / "ours")
    assert isinstance(error.value, pc.FormatError) or "shape" in kind, error.value
    assert not (folders.parent / "ours/manifest.msgpack").exists()


@pytest.mark.parametrize("size", [0, 20, 200])
def test_a_damaged_database_is_refused(tmp_path: Path, size: int) -> None:
    WRITERS["v0, zarr 3 in OCDBT"](tmp_path / "orbax")
    for file in sorted((tmp_path / "orbax").rglob("*")):
        if file.name == "manifest.ocdbt" or file.parent.name == "d":
            os.truncate(file, min(size, file.stat().st_size))
    with pytest.raises(pc.FormatError):
        pc.import_orbax(tmp_path / "orbax", tmp_path / "ours")
