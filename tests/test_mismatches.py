"""A request that does not fit is refused before anything is read, with every reason at once."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import pytree_ckpt as pc
from pytree_ckpt.format import manifest_file
from pytree_ckpt.format.manifest import MANIFEST_FILE

P = PartitionSpec
F32 = np.float32


def struct(shape: Any, dtype: Any = F32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def like(tree: Any) -> Any:
    """The target that asks for a tree as it is."""
    return jax.tree.map(
        lambda x: struct(x.shape, x.dtype, x.sharding) if isinstance(x, jax.Array) else x, tree
    )


def refusal(path: Path, target: Any, **options: Any) -> pc.MismatchError:
    with pytest.raises(pc.MismatchError) as error:
        pc.load(path, target, **options)
    return error.value


@pytest.fixture
def rows(mesh_8: Mesh) -> NamedSharding:
    return NamedSharding(mesh_8, P("data"))


@pytest.fixture
def kernel(rows: NamedSharding) -> jax.Array:
    return jax.device_put(np.arange(64, dtype=F32).reshape(8, 8), rows)


# --- one kind at a time -----------------------------------------------------------------------

Case = Callable[[Mesh], Any]
LAYOUTS: dict[str, tuple[Case, str, str]] = {
    # what the target's sharding is, and the two values in the message
    "mesh sizes": (
        lambda mesh: NamedSharding(Mesh(mesh.devices[:4], ("data",)), P("data")),
        "P('data') on mesh(data=8)",
        "P('data') on mesh(data=4)",
    ),
    "more axes": (
        lambda mesh: NamedSharding(
            Mesh(mesh.devices.reshape(8, 1), ("data", "model")), P("data", "model")
        ),
        "P('data') on mesh(data=8)",
        "P('data', 'model') on mesh(data=8, model=1)",
    ),
    "axis names": (
        lambda mesh: NamedSharding(Mesh(mesh.devices, ("batch",)), P("batch")),
        "P('data') on mesh(data=8)",
        "P('batch') on mesh(batch=8)",
    ),
    "partition spec": (
        lambda mesh: NamedSharding(mesh, P(None, "data")),
        "P('data') on mesh(data=8)",
        "P(None, 'data') on mesh(data=8)",
    ),
    "replicated": (
        lambda mesh: NamedSharding(mesh, P()),
        "P('data') on mesh(data=8)",
        "P() on mesh(data=8)",
    ),
    "single device": (
        lambda mesh: SingleDeviceSharding(mesh.devices[0]),
        "P('data') on mesh(data=8)",
        "single device",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout_is_refused_with_both_layouts(
    tmp_path: Path, kernel: jax.Array, mesh_8: Mesh, name: str
) -> None:
    make, saved, wanted = LAYOUTS[name]
    pc.save(tmp_path, {"dense": {"kernel": kernel}})
    target = {"dense": {"kernel": struct((8, 8), F32, make(mesh_8))}}
    error = refusal(tmp_path, target)
    (mismatch,) = error.mismatches
    assert (mismatch.path, mismatch.kind) == ("dense/kernel", "sharding")
    assert (mismatch.saved, mismatch.wanted) == (saved, wanted)
    assert f"dense/kernel  sharding: saved {saved}, wanted {wanted}" in str(error)
    assert "Pass reshard=True" in str(error)
    np.testing.assert_array_equal(
        pc.load(tmp_path, target, reshard=True)["dense"]["kernel"], kernel
    )


def test_a_layout_is_compared_for_uncommitted_and_array_targets_too(
    tmp_path: Path, kernel: jax.Array
) -> None:
    pc.save(tmp_path, {"w": kernel})
    (mismatch,) = refusal(tmp_path, {"w": jnp.zeros((8, 8))}).mismatches
    assert (mismatch.kind, mismatch.wanted) == ("sharding", "single device")


def test_another_kind_of_memory_is_refused_by_both_names(
    tmp_path: Path, kernel: jax.Array, mesh_8: Mesh
) -> None:
    if "pinned_host" not in {m.kind for m in jax.devices()[0].addressable_memories()}:
        pytest.skip("this backend has no pinned_host memory")
    on_host = NamedSharding(mesh_8, P("data"), memory_kind="pinned_host")
    pc.save(tmp_path, {"a": kernel, "b": jax.device_put(kernel, on_host)})
    error = refusal(tmp_path, {"a": struct((8, 8), F32, on_host), "b": like(kernel)})
    a, b = error.mismatches
    assert (a.path, a.kind, a.wanted) == ("a", "memory kind", "pinned_host")
    assert (b.path, b.kind, b.saved) == ("b", "memory kind", "pinned_host")
    assert "pinned_host" in str(error)
    assert "reshard=True" in str(error)


SHAPES = [((), (1,)), ((1,), ()), ((1,), (1, 1)), ((1, 1), (1,)), ((1, 1, 1, 8), (8,))]


@pytest.mark.parametrize(("saved", "wanted"), [*SHAPES, ((8, 8), (8, 9)), ((8, 8), (64,))])
def test_a_shape_that_only_broadcasts_is_another_shape(
    tmp_path: Path, saved: tuple[int, ...], wanted: tuple[int, ...], mesh_8: Mesh
) -> None:
    array = jax.device_put(np.ones(saved, F32), NamedSharding(mesh_8, P()))
    pc.save(tmp_path, {"jax": array, "np": np.ones(saved, F32)})
    target = {"jax": struct(wanted, F32, array.sharding), "np": np.ones(wanted, F32)}
    error = refusal(tmp_path, target, reshard=True, cast=True)
    assert [(m.path, m.kind, m.saved, m.wanted) for m in error.mismatches] == [
        (name, "shape", str(saved), str(wanted)) for name in ("jax", "np")
    ]
    assert f"shape: saved {saved}, wanted {wanted}" in str(error)
    assert "Shapes are never changed" in str(error)
    found = pc.load(tmp_path)
    assert found["jax"].shape == found["np"].shape == saved


def test_another_dtype_is_refused_with_both_dtypes(tmp_path: Path, kernel: jax.Array) -> None:
    pc.save(tmp_path, {"w": kernel, "n": np.int32(16_777_217), "b": np.zeros(2, bool)})
    target = {
        "w": struct((8, 8), jnp.bfloat16, kernel.sharding),
        "n": F32(0),
        "b": np.zeros(2, np.int8),
    }
    error = refusal(tmp_path, target)
    assert [(m.path, m.kind, m.saved, m.wanted) for m in error.mismatches] == [
        ("b", "dtype", "bool", "int8"),
        ("n", "dtype", "int32", "float32"),
        ("w", "dtype", "float32", "bfloat16"),
    ]
    assert "cast=True" in str(error)
    assert "reshard" not in str(error)


def test_keys_of_another_implementation_are_refused_though_their_data_has_one_shape(
    tmp_path: Path,
) -> None:
    pc.save(tmp_path, {"k": jax.random.key(0, impl="rbg")})
    error = refusal(tmp_path, {"k": jax.random.key(0, impl="unsafe_rbg")}, cast=True)
    (mismatch,) = error.mismatches
    assert (mismatch.kind, mismatch.saved, mismatch.wanted) == (
        "key impl",
        "key<rbg>",
        "key<unsafe_rbg>",
    )


def test_missing_leaves_name_the_nearest_that_there_is(tmp_path: Path) -> None:
    pc.save(tmp_path, {"opt": {"counter": 1, "mu": 2}})
    error = refusal(tmp_path, {"opt": {"count": 0, "mu": 0, "zzz": 0}}, partial=True)
    assert [(m.path, m.kind) for m in error.mismatches] == [
        ("opt/count", "missing"),
        ("opt/zzz", "missing"),
    ]
    assert "opt/count  missing in the checkpoint (nearest: opt/counter)" in str(error)
    assert "opt/zzz  missing in the checkpoint\n" in str(error)


def test_extra_leaves_say_what_they_are(tmp_path: Path, kernel: jax.Array) -> None:
    pc.save(tmp_path, {"w": kernel, "ema": {"w": kernel, "n": 3}})
    error = refusal(tmp_path, {"w": kernel})
    assert [(m.path, m.kind) for m in error.mismatches] == [("ema/n", "extra"), ("ema/w", "extra")]
    assert "float32[8, 8] P('data') on mesh(data=8)" in str(error)
    assert "partial=True" in str(error)


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    "target",
    [
        {"t": [1, 2]},
        {"t": {0: 1, 1: 2}},
        {"t": {"0": 1, "1": 2}},
        {"t": Pair(1, 2)},
    ],
)
def test_a_container_of_another_kind_is_another_structure(tmp_path: Path, target: Any) -> None:
    pc.save(tmp_path, {"t": (1, 2)})
    error = refusal(tmp_path, target)
    assert {m.path.split("/")[0] for m in error.mismatches} == {"t"}
    assert {m.kind for m in error.mismatches} <= {"missing", "extra", "structure"}


def test_a_key_of_another_kind_with_the_same_text_says_so(tmp_path: Path) -> None:
    pc.save(tmp_path, {"t": (1,)})
    error = refusal(tmp_path, {"t": [1]})
    assert "saved under a key of another kind: str/tuple, wanted str/list" in str(error)
    assert error.remedy.endswith('rename={"**": "**"} takes leaves to keys of another kind.')
    assert pc.load(tmp_path, {"t": [1]}, rename={"**": "**"}) == {"t": [1]}


@pytest.mark.parametrize(("target", "at"), [(1000, "(root)"), ({"t": 1, "s": 2}, "t")])
def test_a_leaf_where_a_container_was_saved_says_so(tmp_path: Path, target: Any, at: str) -> None:
    pc.save(tmp_path, {"t": {"w": 1}, "s": 2})
    error = refusal(tmp_path, target)
    assert f"  {at}  one leaf in the target, a container in the checkpoint\n" in str(error)
    assert "Ask for the kind of leaf and container that was saved." in error.remedy
    assert "containers without leaves" not in error.remedy


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({"x": None}, {"x": ()}),
        ({"x": ()}, {"x": None}),
        ({"x": ()}, {"x": []}),
        ({"x": {}}, {"x": []}),
        ({"x": {}}, {}),
        ({}, {"x": {}}),
        ({"x": None}, {}),
        ({"x": None}, {"x": 1}),
        ({"x": 1}, {"x": None}),
        ({}, []),
        ({}, None),
    ],
)
def test_nodes_without_leaves_are_structure_too(tmp_path: Path, saved: Any, wanted: Any) -> None:
    pc.save(tmp_path, {"a": 1, "tree": saved})
    assert pc.load(tmp_path, {"a": 0, "tree": saved}) == {"a": 1, "tree": saved}
    error = refusal(tmp_path, {"a": 0, "tree": wanted})
    assert all(m.path.startswith("tree") for m in error.mismatches)
    assert {m.kind for m in error.mismatches} <= {"missing", "extra", "structure"}
    assert "With partial=True containers without leaves may differ." in error.remedy
    if "missing" not in {m.kind for m in error.mismatches}:
        assert pc.load(tmp_path, {"a": 0, "tree": wanted}, partial=True)["a"] == 1


def saved_by_processes(path: Path, count: int) -> None:
    """Rewrite a manifest as if so many processes had the layout."""
    changed = dataclasses.replace(pc.read_manifest(path), process_count=count)
    data, _ = manifest_file.to_bytes(changed)
    (path / MANIFEST_FILE).write_bytes(data)


def test_another_number_of_processes_is_another_layout(tmp_path: Path, kernel: jax.Array) -> None:
    pc.save(tmp_path, {"w": kernel})
    saved_by_processes(tmp_path, 2)
    error = refusal(tmp_path, {"w": kernel})
    (mismatch,) = error.mismatches
    assert (mismatch.kind, mismatch.saved, mismatch.wanted) == ("process count", "2", "1")
    assert "process count: saved by 2, loading on 1" in str(error)
    assert "reshard=True" in str(error)
    np.testing.assert_array_equal(pc.load(tmp_path, {"w": kernel}, reshard=True)["w"], kernel)


def test_values_per_process_are_not_handed_to_another_number_of_processes(
    tmp_path: Path,
) -> None:
    pc.save(tmp_path, {"it": pc.PerProcess(3), "n": 1})
    saved_by_processes(tmp_path, 2)
    target = {"it": pc.PerProcess(None), "n": 0}
    error = refusal(tmp_path, target, reshard=True)
    assert [m.path for m in error.mismatches] == ["it"]
    assert pc.load(tmp_path, {"n": 0}, reshard=True, partial=True) == {"n": 1}


# --- what is no mismatch ----------------------------------------------------------------------


def test_trailing_nones_device_order_and_axis_types_are_no_mismatch(
    tmp_path: Path, kernel: jax.Array, mesh_8: Mesh
) -> None:
    pc.save(tmp_path, {"w": kernel})
    others = [
        NamedSharding(mesh_8, P("data", None)),
        NamedSharding(mesh_8, P(("data",), None)),
        NamedSharding(Mesh(mesh_8.devices[::-1], ("data",)), P("data")),
        NamedSharding(Mesh(mesh_8.devices, ("data",), axis_types=(AxisType.Explicit,)), P("data")),
    ]
    for sharding in others:
        found = pc.load(tmp_path, {"w": struct((8, 8), F32, sharding)})["w"]
        assert found.sharding == sharding
        np.testing.assert_array_equal(found, kernel)


def test_a_saved_spec_with_trailing_nones_fits_one_without(
    tmp_path: Path, kernel: jax.Array, mesh_8: Mesh
) -> None:
    pc.save(tmp_path, {"w": jax.device_put(kernel, NamedSharding(mesh_8, P("data", None)))})
    np.testing.assert_array_equal(pc.load(tmp_path, {"w": like(kernel)})["w"], kernel)


def test_the_device_of_a_single_device_array_is_no_mismatch(tmp_path: Path) -> None:
    array = jax.device_put(np.ones(3, F32), jax.devices()[2])
    pc.save(tmp_path, {"w": array})
    other = SingleDeviceSharding(jax.devices()[6])
    assert pc.load(tmp_path, {"w": struct((3,), F32, other)})["w"].sharding == other


# --- all kinds at once ------------------------------------------------------------------------


def test_one_error_lists_every_reason_of_every_kind(
    tmp_path: Path, kernel: jax.Array, mesh_8: Mesh
) -> None:
    rows = kernel.sharding
    kinds = {m.kind for m in jax.devices()[0].addressable_memories()}
    other = "pinned_host" if "pinned_host" in kinds else None
    saved = {
        "fits": kernel,
        "sizes": kernel,
        "names": kernel,
        "spec": kernel,
        "memory": jax.device_put(kernel, NamedSharding(mesh_8, P("data"), memory_kind=other)),
        "shape": np.zeros((4096,), F32),
        "dtype": np.zeros((3,), F32),
        "both": np.zeros((3,), F32),
        "key": jax.random.key(0, impl="rbg"),
        "kind": "text",
        "counter": 1,
        "ema": 2,
        "structure": (),
        "cut": kernel,
        "it": pc.PerProcess(0),
    }
    pc.save(tmp_path, saved)
    saved_by_processes(tmp_path, 4)
    target = {
        **like(saved),
        "sizes": struct((8, 8), F32, NamedSharding(Mesh(mesh_8.devices[:2], ("data",)), P("data"))),
        "names": struct((8, 8), F32, NamedSharding(Mesh(mesh_8.devices, ("batch",)), P("batch"))),
        "spec": struct((8, 8), F32, NamedSharding(mesh_8, P(None, "data"))),
        "memory": struct((8, 8), F32, rows),
        "shape": np.zeros((4097,), F32),
        "dtype": np.zeros((3,), np.float16),
        "both": np.zeros((4,), np.int8),
        "key": jax.random.key(0),
        "kind": b"bytes",
        "count": 0,
        "structure": [],
        "cut": struct((8, 8), F32, NamedSharding(Mesh(mesh_8.devices[:3], ("data",)), P("data"))),
    }
    del target["counter"], target["ema"]

    error = refusal(tmp_path, target)
    found = {(m.path, m.kind) for m in error.mismatches}
    expected = {
        ("", "process count"),
        ("it", "per process"),
        ("sizes", "sharding"),
        ("names", "sharding"),
        ("spec", "sharding"),
        ("shape", "shape"),
        ("dtype", "dtype"),
        ("both", "shape"),
        ("both", "dtype"),
        ("key", "key impl"),
        ("kind", "kind"),
        ("count", "missing"),
        ("counter", "extra"),
        ("ema", "extra"),
        ("structure", "structure"),
        ("cut", "divisibility"),
        ("cut", "sharding"),
    }
    assert found - {("memory", "memory kind")} == expected
    assert (("memory", "memory kind") in found) == (other is not None)
    assert len(error.mismatches) == len(found)

    # Each in the message, with its path, both values and what to do about it.
    text = str(error)
    lines = text.splitlines()
    for mismatch in error.mismatches:
        assert f"  {mismatch}" in lines
        assert mismatch.text in text
        for value in (mismatch.saved, mismatch.wanted):
            if value is not None and mismatch.kind not in ("divisibility", "structure"):
                assert value in mismatch.text
    assert "count  missing in the checkpoint (nearest: counter)" in text
    for word in ("reshard=True", "cast=True", "partial=True", "Shapes are never changed"):
        assert word in error.remedy
    assert lines[-1] == error.remedy
    assert "fits" not in {m.path for m in error.mismatches}

    paths = {m.path for m in error.mismatches} - {""}
    assert lines[0].startswith(f"{len(paths)} of 15 leaves do not fit")


def test_options_take_away_their_own_reasons_and_no_other(
    tmp_path: Path, kernel: jax.Array, mesh_8: Mesh
) -> None:
    pc.save(
        tmp_path, {"layout": kernel, "dtype": np.zeros(3, F32), "extra": 1, "shape": np.ones(2)}
    )
    target = {
        "layout": struct((8, 8), F32, NamedSharding(mesh_8, P())),
        "dtype": np.zeros(3, np.float16),
        "shape": np.ones(3),
        "gone": 0,
    }

    def kinds(**options: Any) -> set[str]:
        return {m.kind for m in refusal(tmp_path, target, **options).mismatches}

    everything = {"sharding", "dtype", "extra", "shape", "missing"}
    assert kinds() == everything
    assert kinds(reshard=True) == everything - {"sharding"}
    assert kinds(cast=True) == everything - {"dtype"}
    assert kinds(partial=True) == everything - {"extra"}
    assert kinds(reshard=True, cast=True, partial=True) == {"shape", "missing"}


def test_a_thousand_leaves_that_do_not_fit_for_one_reason_have_one_line(
    tmp_path: Path, mesh_8: Mesh, mesh_4x2: Mesh
) -> None:
    array = jax.device_put(np.ones(8, F32), NamedSharding(mesh_8, P("data")))
    saved = {f"layer_{n:04d}": array for n in range(1000)}
    pc.save(tmp_path, saved)
    wanted = struct((8,), F32, NamedSharding(mesh_4x2, P("data")))
    error = refusal(tmp_path, dict.fromkeys(saved, wanted))
    assert [m.path for m in error.mismatches] == sorted(saved)
    lines = str(error).splitlines()
    assert lines[0] == "1000 of 1000 leaves do not fit the target"
    assert lines[1:-1] == [
        "  1000 leaves  sharding: saved P('data') on mesh(data=8), "
        "wanted P('data') on mesh(data=4, model=2): "
        "layer_0000, layer_0001, layer_0002 and 997 more"
    ]

    error = refusal(tmp_path, {f"layers_{n:04d}": wanted for n in range(1000)})
    assert len([m for m in error.mismatches if m.kind == "missing"]) == 1000
    assert len([m for m in error.mismatches if m.kind == "extra"]) == 1000
    lines = str(error).splitlines()
    assert lines[1:-1] == [
        "  1000 leaves  missing in the checkpoint: layers_0000 (nearest: layer_0000), "
        "layers_0001 (nearest: layer_0001), layers_0002 (nearest: layer_0002) and 997 more",
        "  1000 leaves  not in the target: "
        + ", ".join(
            f"layer_000{n} (saved as float32[8] P('data') on mesh(data=8))" for n in range(3)
        )
        + " and 997 more",
    ]


def test_reasons_of_few_leaves_keep_a_line_for_each(tmp_path: Path) -> None:
    pc.save(tmp_path, {**{f"a{n}": np.ones(n + 1) for n in range(4)}, "b": 1, "c": 2, "d": 3})
    target = {**{f"a{n}": np.ones(n) for n in range(4)}, "b": "", "c": "", "d": ""}
    lines = str(refusal(tmp_path, target)).splitlines()
    assert lines[1:-1] == [
        *(f"  a{n}  shape: saved ({n + 1},), wanted ({n},)" for n in range(4)),
        *(f"  {name}  kind: saved int, wanted a str" for name in "bcd"),
    ]


# --- the error --------------------------------------------------------------------------------


def test_the_error_is_a_value_error_and_an_error_of_this_library(tmp_path: Path) -> None:
    pc.save(tmp_path, {"a": 1})
    error = refusal(tmp_path, {"a": "x"})
    assert isinstance(error, ValueError)
    assert isinstance(error, pc.CheckpointError)
    assert isinstance(error.mismatches, tuple)
    assert str(error).startswith("1 of 1 leaves does not fit the target\n  a  kind: saved int")


def test_a_tree_that_is_one_leaf_is_named_as_the_root(tmp_path: Path) -> None:
    pc.save(tmp_path, np.zeros(3))
    error = refusal(tmp_path, np.zeros(4))
    assert "(root)  shape: saved (3,), wanted (4,)" in str(error)
    assert error.mismatches[0].path == ""


def test_the_number_of_processes_is_not_counted_as_a_leaf(
    tmp_path: Path, kernel: jax.Array
) -> None:
    pc.save(tmp_path, {"w": kernel, "v": kernel})
    saved_by_processes(tmp_path, 2)
    lines = str(refusal(tmp_path, {"w": kernel, "v": kernel})).splitlines()
    assert lines[0] == "the checkpoint does not fit the processes that load it"
    assert lines[1] == "  process count: saved by 2, loading on 1"
    lines = str(refusal(tmp_path, {"w": kernel, "v": 0})).splitlines()
    assert lines[0] == "1 of 2 leaves does not fit the target"


def test_nothing_is_read_before_a_request_is_refused(tmp_path: Path, kernel: jax.Array) -> None:
    path = tmp_path / "ckpt"
    manifest = pc.save(path, {"w": kernel, "n": 1})
    for file in (path / manifest.data_dir).rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged beyond any doubt")
    with pytest.raises(pc.IntegrityError):
        pc.load(path, {"w": kernel, "n": 0})
    assert refusal(path, {"w": kernel, "n": ""})
    shutil.rmtree(path / manifest.data_dir)
    assert refusal(path, {"w": kernel, "n": ""})


def test_nothing_is_put_on_a_device_before_a_request_is_refused(
    tmp_path: Path, kernel: jax.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    pc.save(tmp_path, {"w": kernel, "n": 1})

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was put on a device")

    target = {"w": like(kernel), "n": ""}
    for name in ("device_put", "make_array_from_callback", "make_array_from_single_device_arrays"):
        monkeypatch.setattr(jax, name, refuse)
    assert refusal(tmp_path, target)
    with pytest.raises(AssertionError, match="put on a device"):
        pc.load(tmp_path, {"w": like(kernel), "n": 0})
