"""A mistake in an argument is refused by its name and value, not by what breaks of it later."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import pytree_ckpt as pc

Wrong = tuple[Callable[[Path], Any], type[Exception], str]


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    pc.save(tmp_path / "ckpt", {"params": {"w": np.ones((8, 4), np.float32)}, "step": 3})
    return tmp_path / "ckpt"


_SAVE_OPTIONS = r"options must be SaveOptions\(...\) or None, not {'threads': 2}"
_LOAD_OPTIONS = r"options must be LoadOptions\(...\) or None, not {'threads': 2}"
_OPTIONS: Any = {"threads": 2}
_EMPTY: Any = {}
_THREE: Any = 3
_HALF: Any = 2.5

PATHS: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: pc.save(path, {}),
    "base": lambda path: pc.save("new", {}, base=path),
    "load": pc.load,
    "open": pc.open,
    "verify": pc.verify,
    "read_manifest": pc.read_manifest,
    "diff": lambda path: pc.diff(path, path),
    "convert": lambda path: pc.convert(path, "new"),
    "require": lambda path: pc.require(path, step=True),
    "plan_restructure": pc.plan_restructure,
    "manager": pc.CheckpointManager,
    "steps": pc.steps,
    "step_path": lambda path: pc.step_path(path, 1),
    "export_npz": lambda path: pc.export_npz(path, "new"),
    "import_safetensors": lambda path: pc.import_safetensors(path, "new"),
}


@pytest.mark.parametrize("verb", PATHS)
@pytest.mark.parametrize("path", [3, None, b"ckpt", {"w": np.ones(1000)}], ids=type)
def test_what_is_no_path_is_refused_by_its_type(
    verb: str, path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if verb == "base" and path is None:
        return  # no base
    text = f"a path must be a str or a pathlib.Path, not {type(path).__name__}"
    with pytest.raises(TypeError, match=text):
        PATHS[verb](path)
    assert not list(tmp_path.iterdir())


WRONG: dict[str, Wrong] = {
    "save: options": (
        lambda ckpt: pc.save(ckpt, {}, overwrite=True, options=_OPTIONS),
        TypeError,
        _SAVE_OPTIONS,
    ),
    "save: options for loads": (
        lambda ckpt: pc.save(ckpt, {}, overwrite=True, options=pc.LoadOptions()),
        TypeError,
        r"options must be SaveOptions\(...\) or None, not LoadOptions\(max_inflight_bytes",
    ),
    "save_async: options": (
        lambda ckpt: pc.save_async(ckpt, {}, overwrite=True, options=_OPTIONS),
        TypeError,
        _SAVE_OPTIONS,
    ),
    "save: metadata": (
        lambda ckpt: pc.save(ckpt, {}, overwrite=True, metadata={"loss": np.float32(1)}),
        TypeError,
        r"metadata\['loss'\] is of type float32; it can be None, bool, int, float, str",
    ),
    "manager: save_every": (
        lambda ckpt: pc.CheckpointManager(ckpt.parent, save_every=_HALF),
        ValueError,
        "save_every must be an int of at least 1, not 2.5",
    ),
    "manager: metrics": (
        lambda ckpt: pc.CheckpointManager(ckpt.parent).save(1, {}, metrics=_THREE),
        TypeError,
        "metrics must be a dict of numbers, not 3",
    ),
    "open: options": (lambda ckpt: pc.open(ckpt, options=_EMPTY), TypeError, "not {}"),
    "verify: options": (lambda ckpt: pc.verify(ckpt, options=_OPTIONS), TypeError, _LOAD_OPTIONS),
    "diff: options": (lambda ckpt: pc.diff(ckpt, ckpt, options=_OPTIONS), TypeError, _LOAD_OPTIONS),
    "load: options": (lambda ckpt: pc.load(ckpt, options=_OPTIONS), TypeError, _LOAD_OPTIONS),
    "load: mesh": (
        lambda ckpt: pc.load(ckpt, {"a": 1}, mesh="data"),
        TypeError,
        "mesh must be a jax.sharding.Mesh of devices, not 'data'",
    ),
    "load: rename": (
        lambda ckpt: pc.load(ckpt, rename=[("a", "b")]),
        ValueError,
        r"rename must be a dict of saved paths to new paths, not \[\('a', 'b'\)\]",
    ),
    "load: stack": (
        lambda ckpt: pc.load(ckpt, stack={"a_{}": _THREE}),
        ValueError,
        "stack must be a dict of saved paths to new paths, not {'a_{}': 3}",
    ),
    "leaf": (
        lambda ckpt: pc.open(ckpt)["params"],
        KeyError,
        r"no leaf 'params' in .*ckpt \(nearest: params/w\); keys\(\) lists them",
    ),
    "leaf: no text": (lambda ckpt: pc.open(ckpt)[_THREE], KeyError, "no leaf 3 in"),
    "index": (
        lambda ckpt: pc.open(ckpt)["params/w"][0, 4],
        IndexError,
        "index 4 is out of bounds for dimension 1 of size 4",
    ),
    "export: select": (
        lambda ckpt: pc.export_npz(ckpt, "new", select=_THREE),
        ValueError,
        "select must be a pattern or a list of them, not 3",
    ),
    "export: separator": (
        lambda ckpt: pc.export_safetensors(ckpt, "new", separator=_THREE),
        ValueError,
        "separator must be a str such as '/', not 3",
    ),
    "export: max_file_nbytes": (
        lambda ckpt: pc.export_safetensors(ckpt, "new", max_file_nbytes=0),
        ValueError,
        "max_file_nbytes must be an int of at least 1, not 0",
    ),
    "export: metadata": (
        lambda ckpt: pc.export_safetensors(ckpt, "new", metadata={"epoch": _THREE}),
        ValueError,
        "metadata must be a dict of str to str without 'pytree_ckpt.tree', not {'epoch': 3}",
    ),
    "export: metadata of its own": (
        lambda ckpt: pc.export_safetensors(ckpt, "new", metadata={"pytree_ckpt.tree": "x"}),
        ValueError,
        "metadata must be a dict of str to str without 'pytree_ckpt.tree'",
    ),
    "import: item": (
        lambda ckpt: pc.import_orbax(ckpt, "new", item=_THREE),
        ValueError,
        "item must be a str such as 'state', not 3",
    ),
    "import of nothing": (
        lambda ckpt: pc.import_orbax(ckpt / "nothing", "new"),
        pc.NotFoundError,
        "nothing is no tree of orbax; there is nothing",
    ),
    "convert: options": (
        lambda ckpt: pc.convert(ckpt, "new", options=_EMPTY),
        TypeError,
        "options must be SaveOptions",
    ),
    "convert: layout": (
        lambda ckpt: pc.convert(ckpt, "new", layout={"data": 2}),
        TypeError,
        r"layout must be Layout\(...\) or the path of a checkpoint, not {'data': 2}",
    ),
    "convert: dtype": (
        lambda ckpt: pc.convert(ckpt, "new", dtype="bfloat16"),
        ValueError,
        r"dtype must be a dict such as {'params/\*\*': 'bfloat16'}, not 'bfloat16'",
    ),
    "convert: a dtype": (
        lambda ckpt: pc.convert(ckpt, "new", dtype={"**": np.float32}),
        ValueError,
        "a dtype is given by its name, such as 'bfloat16', not <class 'numpy.float32'>",
    ),
    "convert: select": (
        lambda ckpt: pc.convert(ckpt, "new", select=_THREE),
        ValueError,
        "select must be a pattern or a list of them, not 3",
    ),
    "convert: a pattern": (
        lambda ckpt: pc.convert(ckpt, "new", select=[_THREE]),
        ValueError,
        r"a pattern is a str such as 'params/\*\*', not 3",
    ),
    "convert: max_chunk_nbytes": (
        lambda ckpt: pc.convert(ckpt, "new", max_chunk_nbytes=-3),
        ValueError,
        "max_chunk_nbytes must be an int of at least 1, not -3",
    ),
    "convert: workers": (
        lambda ckpt: pc.convert(ckpt, "new", workers=0),
        ValueError,
        "workers must be an int from 1 to 99999, not 0",
    ),
    "convert: process": (
        lambda ckpt: pc.convert(ckpt, "new", process=(3, 2)),
        ValueError,
        r"process must be \(i, n\) with 0 <= i < n <= 99999, and workers 1, not \(3, 2\) and 1",
    ),
    "convert: more processes than tables have names": (
        lambda ckpt: pc.convert(ckpt, "new", process=(0, 100_000)),
        ValueError,
        r"process must be \(i, n\) with 0 <= i < n <= 99999",
    ),
    "convert: timeout_s": (
        lambda ckpt: pc.convert(ckpt, "new", timeout_s=-1),
        ValueError,
        "timeout_s must be a number of seconds above 0, not -1",
    ),
    "convert: to a store": (
        lambda ckpt: pc.convert(ckpt, "memory://a/b"),
        pc.CheckpointError,
        "convert writes to a disk, and memory://a/b is in an object store",
    ),
    "layout: mesh": (
        lambda _: pc.Layout(mesh="data=2"),
        ValueError,
        "mesh must be a dict such as {'data': 4, 'model': 2}, not 'data=2'",
    ),
    "layout: a mesh axis": (
        lambda _: pc.Layout(mesh={"data": 0}),
        ValueError,
        "mesh axis 'data' must be an int of at least 1, not 0",
    ),
    "layout: an axis that is no text": (
        lambda _: pc.Layout(mesh={1: 2}, specs={"**": ()}),
        ValueError,
        "a mesh axis is named by a str such as 'data', not 1",
    ),
    "layout: an axis without a name": (
        lambda _: pc.Layout(mesh={"": 2}),
        ValueError,
        "a mesh axis is named by a str such as 'data', not ''",
    ),
    "layout: more devices than there are": (
        lambda _: pc.Layout(mesh={"data": 1 << 40, "model": 2}),
        ValueError,
        "a mesh of 2199023255552 devices, more than 1048576",
    ),
    "layout: process_count": (
        lambda _: pc.Layout(process_count=10**20),
        ValueError,
        "process_count must be an int from 1 to 99999, not 100000000000000000000",
    ),
    "layout: specs": (
        lambda _: pc.Layout(specs="data"),
        ValueError,
        "specs must be a dict such as .* not 'data'",
    ),
    "layout: a spec": (
        lambda _: pc.Layout(specs={"**": _THREE}),
        ValueError,
        r"a spec is text such as 'data,None' or P\('data'\), not 3",
    ),
    "keep": (
        lambda ckpt: pc.CheckpointManager(ckpt.parent, keep=_THREE),
        TypeError,
        r"keep must be Keep\(...\), such as Keep\(last=3\), not 3",
    ),
    "mirror": (
        lambda ckpt: pc.CheckpointManager(ckpt, mirror=_THREE),
        TypeError,
        "a path must be a str or a pathlib.Path, not int",
    ),
    "mirror_every": (
        lambda ckpt: pc.CheckpointManager(ckpt, mirror="memory://a", mirror_every=0),
        ValueError,
        "mirror_every must be an int of at least 1, not 0",
    ),
    "mirror_every without a mirror": (
        lambda ckpt: pc.CheckpointManager(ckpt, mirror_every=10),
        ValueError,
        "mirror_every=10 without a mirror",
    ),
    "mirror_keep": (
        lambda ckpt: pc.CheckpointManager(ckpt, mirror="memory://a", mirror_keep=_THREE),
        TypeError,
        r"mirror_keep must be Keep\(...\), 'same' or None, not 3",
    ),
    "keep: best": (
        lambda _: pc.Keep(best=("loss", "min")),
        ValueError,
        r"Keep\(best=\('loss', 'min'\)\): must be like \('loss', 'min', 3\)",
    ),
    "keep: pinned": (lambda _: pc.Keep(pinned=_THREE), ValueError, r"Keep\(pinned=3\): must be a"),
    "keep: newer_than": (
        lambda _: pc.Keep(newer_than="day"),
        ValueError,
        "newer_than must be a number of seconds above 0, not 'day'",
    ),
    "manager: save_every_seconds": (
        lambda ckpt: pc.CheckpointManager(ckpt, save_every_seconds=True),
        ValueError,
        "save_every_seconds must be a number of seconds above 0, not True",
    ),
    "options: for ever": (
        lambda _: pc.LoadOptions(timeout_s=float("inf")),
        ValueError,
        r"timeout_s must be at most 1e\+09, not inf",
    ),
    "steps: prefix": (
        lambda ckpt: pc.steps(ckpt, prefix=None),
        ValueError,
        "a step prefix cannot be None",
    ),
    "steps: width": (
        lambda ckpt: pc.steps(ckpt, width="8"),
        ValueError,
        "a step has 0 to 64 digits, not '8'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_refused_by_name_and_value(case: str, ckpt: Path) -> None:
    call, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        call(ckpt)
    assert pc.load(ckpt)["step"] == 3, "nothing is overwritten"


FLAGS: dict[str, Callable[[Path, Any], Any]] = {
    "save overwrite": lambda ckpt, no: pc.save(ckpt, {}, overwrite=no),
    "save_async overwrite": lambda ckpt, no: pc.save_async(ckpt, {}, overwrite=no),
    "load reshard": lambda ckpt, no: pc.load(ckpt, reshard=no),
    "load cast": lambda ckpt, no: pc.load(ckpt, cast=no),
    "load partial": lambda ckpt, no: pc.load(ckpt, {}, partial=no),
    "load verify": lambda ckpt, no: pc.load(ckpt, verify=no),
    "open verify": lambda ckpt, no: pc.open(ckpt, verify=no),
    "verify quick": lambda ckpt, no: pc.verify(ckpt, quick=no),
    "convert overwrite": lambda ckpt, no: pc.convert(ckpt, ckpt, overwrite=no),
    "convert dry_run": lambda ckpt, no: pc.convert(ckpt, ckpt, dry_run=no),
    "export_npz overwrite": lambda ckpt, no: pc.export_npz(ckpt, ckpt.parent / "x", overwrite=no),
    "export_safetensors overwrite": lambda ckpt, no: pc.export_safetensors(
        ckpt, ckpt.parent / "x", overwrite=no
    ),
    "import overwrite": lambda ckpt, no: pc.import_npz(_npz(ckpt), ckpt, overwrite=no),
    "options striped": lambda ckpt, no: pc.load(ckpt, options=pc.LoadOptions(striped=no)),
    "manager background": lambda ckpt, no: pc.CheckpointManager(ckpt.parent, background=no),
    "manager link_unchanged": lambda ckpt, no: pc.CheckpointManager(ckpt.parent, link_unchanged=no),
    "manager on_sigterm": lambda ckpt, no: pc.CheckpointManager(ckpt.parent, on_sigterm=no),
    "manager.save force": lambda ckpt, no: pc.CheckpointManager(ckpt.parent).save(1, {}, force=no),
    "manager.save overwrite": lambda ckpt, no: pc.CheckpointManager(ckpt.parent).save(
        1, {}, overwrite=no
    ),
    "manager.save skip_if_busy": lambda ckpt, no: pc.CheckpointManager(ckpt.parent).save(
        1, {}, skip_if_busy=no
    ),
    "manager.restore cast": lambda ckpt, no: _manager_of(ckpt).restore(cast=no),
}


def _npz(ckpt: Path) -> Path:
    np.savez(ckpt.parent / "x.npz", a=np.ones(2))
    return ckpt.parent / "x.npz"


def _manager_of(ckpt: Path) -> pc.CheckpointManager:
    manager = pc.CheckpointManager(ckpt.parent, background=False)
    manager.save(1, {"w": 1})
    return manager


@pytest.mark.parametrize("call", FLAGS)
@pytest.mark.parametrize("value", ["no", 0, None], ids=repr)
def test_a_flag_is_true_or_false(call: str, value: Any, ckpt: Path) -> None:
    """The text "no" would count as True."""
    name = call.split()[1]
    with pytest.raises(ValueError, match=f"{name} must be True or False, not {value!r}"):
        FLAGS[call](ckpt, value)
    assert pc.load(ckpt)["step"] == 3, "nothing is overwritten"


def test_a_comparison_of_numpy_is_a_flag(ckpt: Path) -> None:
    pc.save(ckpt, {"step": 4}, overwrite=np.float64(1) > 0)
    assert pc.load(ckpt)["step"] == 4


@pytest.mark.parametrize("act", [pc.import_npz, pc.import_safetensors])
def test_a_separator_of_names_is_text(act: Any, ckpt: Path, tmp_path: Path) -> None:
    of_others = pc.export_safetensors(ckpt, tmp_path / "x.safetensors", select="params/**").files[0]
    source = of_others if act is pc.import_safetensors else _npz(ckpt)
    with pytest.raises(ValueError, match="separator must be a str such as '/', not 3"):
        act(source, tmp_path / "new", separator=_THREE)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("options", [pc.SaveOptions, pc.LoadOptions])
@pytest.mark.parametrize("name", ["max_inflight_bytes", "threads"])
@pytest.mark.parametrize("value", [0, -1, "1G", 1.5, True])
def test_a_count_in_options_is_an_int_of_at_least_one(options: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, not {value!r}"):
        options(**{name: value})


def test_a_mesh_for_the_saved_specs_must_be_one(tmp_path: Path, mesh_8: jax.sharding.Mesh) -> None:
    sharding = jax.sharding.NamedSharding(mesh_8, jax.sharding.PartitionSpec("data"))
    pc.save(tmp_path, {"w": jax.device_put(np.ones(8), sharding)})
    with pytest.raises(
        TypeError, match=r"mesh must be a jax\.sharding\.Mesh of devices, not {'data"
    ):
        pc.load(tmp_path, mesh={"data": 8})


def test_a_mesh_without_an_axis_of_the_saved_spec_is_named(
    tmp_path: Path, mesh_8: jax.sharding.Mesh, mesh_4x2: jax.sharding.Mesh
) -> None:
    sharding = jax.sharding.NamedSharding(mesh_4x2, jax.sharding.PartitionSpec("model"))
    pc.save(tmp_path, {"w": jax.device_put(np.ones(8), sharding)})
    with pytest.raises(pc.MismatchError, match=r"no axis 'model', but \('data',\)") as error:
        pc.load(tmp_path, mesh=mesh_8, reshard=True)
    assert "Pass a mesh= that has the saved axes" in error.value.remedy


def test_a_progress_that_raises_fails_the_save_which_commits_nothing(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        raise RuntimeError("no more paper")

    with pytest.raises(RuntimeError, match="no more paper"):
        pc.save(tmp_path / "ckpt", {"w": np.ones(3)}, options=pc.SaveOptions(progress=progress))
    with pytest.raises(pc.NotFoundError):
        pc.read_manifest(tmp_path / "ckpt")


def test_none_where_an_array_was_saved_says_what_is_where(ckpt: Path) -> None:
    with pytest.raises(pc.MismatchError) as caught:
        pc.load(ckpt, {"params": {"w": None}, "step": 3})
    assert "params/w  None in the target, not in the checkpoint" in str(caught.value)
