"""What a load gives back: each leaf as its target's kind, and without a target as it was saved."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

import pytree_ckpt as pc
from pytree_ckpt.format import dtypes
from tests.bitwise import assert_same

P = PartitionSpec
F32 = np.float32


def struct(
    shape: tuple[int, ...], dtype: Any = F32, sharding: Any = None, **more: Any
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, **more)


def same(found: Any, wanted: Any) -> bool:
    """Equal in type, dtype, shape, sharding, weak type, commitment and every bit."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, jax.Array):
        about = [(x.dtype, x.shape, x.sharding, x.weak_type, x.committed) for x in (found, wanted)]
        return about[0] == about[1] and np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    if isinstance(wanted, (np.ndarray, np.generic)):
        return (found.dtype, found.shape, found.tobytes()) == (
            wanted.dtype,
            wanted.shape,
            wanted.tobytes(),
        )
    return bool(found == wanted)


def mismatches(path: Path, target: Any, **options: Any) -> tuple[pc.Mismatch, ...]:
    """Why a load is refused."""
    with pytest.raises(pc.MismatchError) as error:
        pc.load(path, target, **options)
    return error.value.mismatches


@pytest.fixture
def rows(mesh_4x2: Mesh) -> NamedSharding:
    return NamedSharding(mesh_4x2, P("data"))


@pytest.fixture
def array(rows: NamedSharding) -> jax.Array:
    return jax.device_put(np.arange(32, dtype=F32).reshape(8, 4), rows)


# --- each kind of target ----------------------------------------------------------------------


def test_a_struct_with_a_sharding_gives_an_array_with_that_sharding(
    tmp_path: Path, array: jax.Array, rows: NamedSharding
) -> None:
    pc.save(tmp_path, {"w": array})
    assert same(pc.load(tmp_path, {"w": struct((8, 4), sharding=rows)})["w"], array)


def test_a_struct_without_a_sharding_gives_the_saved_layout(
    tmp_path: Path, array: jax.Array
) -> None:
    pc.save(tmp_path, {"w": array})
    assert same(pc.load(tmp_path, {"w": struct((8, 4))})["w"], array)


def test_an_array_gives_an_array_like_it_and_is_itself_left_alone(
    tmp_path: Path, array: jax.Array
) -> None:
    pc.save(tmp_path, {"w": array})
    target = {"w": array * 0}
    assert same(pc.load(tmp_path, target)["w"], array)
    assert not np.asarray(target["w"]).any()


def test_a_deleted_array_is_still_a_target(tmp_path: Path, array: jax.Array) -> None:
    expected = np.asarray(array).copy()
    pc.save(tmp_path, {"w": array})
    target = {"w": jnp.copy(array)}
    target["w"].delete()
    np.testing.assert_array_equal(pc.load(tmp_path, target)["w"], expected)


def test_a_numpy_array_gives_a_writable_numpy_array(tmp_path: Path, array: jax.Array) -> None:
    pc.save(tmp_path, {"w": array})
    target = {"w": np.zeros((8, 4), F32)}
    found = pc.load(tmp_path, target)["w"]
    assert same(found, np.asarray(array))
    assert found.flags.writeable
    assert found.flags.c_contiguous
    assert not target["w"].any()


def test_what_is_open_in_a_target_leaf_does_not_touch_its_neighbours(
    tmp_path: Path, array: jax.Array, rows: NamedSharding
) -> None:
    state = {"a": array, "b": array + 1, "c": array + 2, "d": 7}
    pc.save(tmp_path, state)
    target = {
        "a": struct((8, 4)),
        "b": np.zeros((8, 4), F32),
        "c": struct((8, 4), sharding=rows),
        "d": 0,
    }
    found = pc.load(tmp_path, target)
    assert same(found["a"], state["a"])
    assert same(found["b"], np.asarray(state["b"]))
    assert same(found["c"], state["c"])
    assert same(found["d"], 7)


def test_a_tree_that_is_one_leaf_is_its_own_target(tmp_path: Path, array: jax.Array) -> None:
    pc.save(tmp_path / "a", array)
    assert same(pc.load(tmp_path / "a", array), array)
    assert same(pc.load(tmp_path / "a"), array)
    pc.save(tmp_path / "b", 12)
    assert same(pc.load(tmp_path / "b", 0), 12)


INT32 = np.int32(12)
CROSS_KINDS = [
    # saved, target, loaded
    (lambda: jnp.int32(12), lambda: np.zeros((), np.int32), np.asarray(INT32)),
    (lambda: jnp.int32(12), lambda: np.int32(0), INT32),
    (lambda: jnp.int32(12), lambda: 0, 12),
    (lambda: jnp.uint8(255), lambda: 0, 255),
    (lambda: jnp.float32(0.1), lambda: 0.0, float(F32(0.1))),
    (lambda: jnp.bfloat16(1.5), lambda: 0.0, 1.5),
    (lambda: jnp.complex64(1 + 2j), lambda: 0j, 1 + 2j),
    (lambda: jnp.bool_(True), lambda: False, True),
    (lambda: np.int64(1 << 60), lambda: 0, 1 << 60),
    (lambda: np.float64(0.1), lambda: 0.0, 0.1),
    (lambda: np.float64(0.1), lambda: np.zeros((), np.float64), np.asarray(0.1)),
    (lambda: np.zeros((), np.float64), lambda: np.float64(1), np.float64(0)),
    (lambda: 12, lambda: np.int32(0), INT32),
    (lambda: 12, lambda: np.zeros((), np.int32), np.asarray(INT32)),
    (lambda: 1 << 62, lambda: np.int64(0), np.int64(1 << 62)),
    (lambda: (1 << 64) - 1, lambda: np.uint64(0), np.uint64((1 << 64) - 1)),
    (lambda: 0.1, lambda: np.float64(0), np.float64(0.1)),
    (lambda: 1 + 2j, lambda: np.complex128(0), np.complex128(1 + 2j)),
    (lambda: True, lambda: np.bool_(False), np.bool_(True)),
    (lambda: 10**30, lambda: 0, 10**30),
    (lambda: "text", lambda: "", "text"),
    (lambda: b"bytes", lambda: b"", b"bytes"),
]


@pytest.mark.parametrize(("saved", "target", "loaded"), CROSS_KINDS)
def test_a_value_comes_back_as_the_kind_of_its_target(
    tmp_path: Path, saved: Any, target: Any, loaded: Any
) -> None:
    pc.save(tmp_path, {"x": saved()})
    assert same(pc.load(tmp_path, {"x": target()})["x"], loaded)


def test_a_numpy_array_loads_into_a_sharded_jax_array(tmp_path: Path, rows: NamedSharding) -> None:
    original = np.arange(32, dtype=F32).reshape(8, 4)
    pc.save(tmp_path, {"w": original, "n": np.int32(3), "k": 5})
    found = pc.load(
        tmp_path,
        {
            "w": struct((8, 4), sharding=rows),
            "n": struct((), np.int32),
            "k": struct((), np.int32, NamedSharding(rows.mesh, P())),
        },
    )
    assert same(found["w"], jax.device_put(original, rows))
    # A host array belongs to no device: it comes back uncommitted, unless a sharding is asked for.
    assert same(found["n"], jnp.asarray(np.int32(3)))
    assert same(found["k"], jax.device_put(np.int32(5), NamedSharding(rows.mesh, P())))


def test_a_jax_array_of_any_layout_loads_into_numpy_without_reshard(
    tmp_path: Path, array: jax.Array, mesh_2x4: Mesh
) -> None:
    columns = jax.device_put(array, NamedSharding(mesh_2x4, P(None, "model")))
    pc.save(tmp_path, {"a": array, "b": columns})
    target = {"a": np.zeros((8, 4), F32), "b": np.zeros((8, 4), F32)}
    found = pc.load(tmp_path, target)
    assert same(found["a"], np.asarray(array))
    assert same(found["b"], np.asarray(array))


REFUSED_KINDS = [
    # saved, target, kind of the mismatch
    (lambda: 3, lambda: 0.0, "dtype"),
    (lambda: 3, lambda: False, "dtype"),
    (lambda: True, lambda: 0, "dtype"),
    (lambda: 3.0, lambda: 0, "dtype"),
    (lambda: 0.1, lambda: np.float32(0), "dtype"),
    (lambda: 0.1, lambda: jnp.float32(0), "dtype"),
    (lambda: 300, lambda: np.uint8(0), "dtype"),
    (lambda: -1, lambda: np.uint8(0), "dtype"),
    (lambda: 1 << 31, lambda: np.int32(0), "dtype"),
    (lambda: 1 << 40, lambda: jnp.int32(0), "dtype"),
    (lambda: jnp.int32(3), lambda: 0.0, "dtype"),
    (lambda: jnp.float32(3), lambda: 0, "dtype"),
    (lambda: jnp.bool_(True), lambda: 0, "dtype"),
    (lambda: np.float64(0.1), lambda: np.float32(0), "dtype"),
    (lambda: np.zeros(1, np.int32), lambda: 0, "shape"),
    (lambda: 3, lambda: np.zeros(1, np.int64), "shape"),
    (lambda: "text", lambda: b"", "kind"),
    (lambda: b"text", lambda: "", "kind"),
    (lambda: "3", lambda: 0, "kind"),
    (lambda: 3, lambda: "", "kind"),
    (lambda: "x", lambda: np.zeros((), np.int32), "kind"),
    (lambda: np.zeros(3), lambda: "", "kind"),
    (lambda: jax.random.key(0), lambda: np.zeros(2, np.uint32), "kind"),
    (lambda: np.zeros(2, np.uint32), lambda: jax.random.key(0), "kind"),
    (lambda: 3, lambda: jax.random.key(0), "kind"),
    (lambda: pc.PerProcess(3), lambda: 3, "kind"),
    (lambda: 3, lambda: pc.PerProcess(3), "kind"),
    (lambda: np.zeros(3), lambda: pc.PerProcess(3), "kind"),
]


@pytest.mark.parametrize(("saved", "target", "kind"), REFUSED_KINDS)
def test_a_value_is_not_turned_into_another_kind_without_being_asked(
    tmp_path: Path, saved: Any, target: Any, kind: str
) -> None:
    pc.save(tmp_path, {"x": saved()})
    (mismatch,) = mismatches(tmp_path, {"x": target()})
    assert (mismatch.path, mismatch.kind) == ("x", kind)


def test_values_per_process_come_back_in_their_wrapper(tmp_path: Path) -> None:
    pc.save(tmp_path, {"it": pc.PerProcess({"at": 3})})
    for found in (pc.load(tmp_path), pc.load(tmp_path, {"it": pc.PerProcess(None)})):
        assert found == {"it": pc.PerProcess({"at": 3})}


@pytest.mark.parametrize(
    "leaf",
    [
        *(object(), {1, 2}, lambda x: x, np.array(["a"])),
        struct(jax.export.symbolic_shape("rows, 3")),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_a_target_that_asks_for_nothing_storable_is_refused_with_its_path(
    tmp_path: Path, leaf: Any
) -> None:
    pc.save(tmp_path, {"x": np.zeros(3)})
    with pytest.raises(pc.UnsupportedLeafError, match="x  "):
        pc.load(tmp_path, {"x": leaf})


def test_64_bit_values_are_not_narrowed_into_a_jax_array(tmp_path: Path) -> None:
    assert not jax.config.jax_enable_x64
    pc.save(tmp_path, {"i": np.int64([1 << 40]), "f": np.float64([0.1])})
    target = {"i": struct((1,), np.int64), "f": struct((1,), np.float64)}
    found = mismatches(tmp_path, target)
    assert [(m.path, m.kind) for m in found] == [("f", "dtype"), ("i", "dtype")]
    assert all("jax_enable_x64" in m.text for m in found)
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path, target, cast=True)
    assert "cast=True" not in str(error.value)  # it would not help
    assert same(pc.load(tmp_path)["i"], np.int64([1 << 40]))


# --- no target --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "types",
    [
        (AxisType.Auto, AxisType.Auto),
        (AxisType.Explicit, AxisType.Explicit),
        (AxisType.Explicit, AxisType.Auto),
    ],
)
def test_without_a_target_the_saved_mesh_is_rebuilt_with_its_axis_types(
    tmp_path: Path, types: tuple[AxisType, ...]
) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    w = jax.device_put(np.arange(32).astype(np.int32).reshape(4, 8), NamedSharding(mesh, P("data")))
    pc.save(tmp_path, {"w": w})
    found = pc.load(tmp_path)["w"]
    assert same(found, w)
    assert found.sharding.mesh.axis_types == types
    assert jax.typeof(found) == jax.typeof(w)


def test_without_a_target_containers_are_builtin_and_values_as_saved(
    tmp_path: Path, array: jax.Array
) -> None:
    state = {
        "list": [array, 1],
        "tuple": (2.5, "three", b"four"),
        "dict": {3: None, 1: 10**25},
        "empty": [(), {}, [], None],
    }
    pc.save(tmp_path, state)
    found = pc.load(tmp_path)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert all(map(same, jax.tree.leaves(found), jax.tree.leaves(state)))


def test_a_mesh_takes_the_saved_specs(tmp_path: Path, array: jax.Array) -> None:
    pc.save(
        tmp_path, {"w": array, "r": jax.device_put(array, NamedSharding(array.sharding.mesh, P()))}
    )
    reversed_mesh = Mesh(array.sharding.mesh.devices[::-1], ("data", "model"))
    found = pc.load(tmp_path, mesh=reversed_mesh)
    assert found["w"].sharding == NamedSharding(reversed_mesh, P("data"))
    assert found["r"].sharding == NamedSharding(reversed_mesh, P())
    np.testing.assert_array_equal(found["w"], array)


def test_another_mesh_is_another_layout_and_needs_reshard(
    tmp_path: Path, array: jax.Array, mesh_2x4: Mesh
) -> None:
    pc.save(tmp_path, {"w": array})
    (mismatch,) = mismatches(tmp_path, None, mesh=mesh_2x4)
    assert mismatch.kind == "sharding"
    found = pc.load(tmp_path, mesh=mesh_2x4, reshard=True)["w"]
    assert found.sharding == NamedSharding(mesh_2x4, P("data"))
    np.testing.assert_array_equal(found, array)


def test_a_mesh_without_the_axes_of_a_saved_spec_is_refused_by_their_name(
    tmp_path: Path, array: jax.Array
) -> None:
    pc.save(tmp_path, {"w": array})
    mesh = Mesh(np.array(jax.devices()), ("other",))
    (mismatch,) = mismatches(tmp_path, None, mesh=mesh, reshard=True)
    assert mismatch.path == "w"
    assert "data" in mismatch.text
    assert "other" in mismatch.text


def test_a_mesh_also_fills_the_open_leaves_of_a_target(
    tmp_path: Path, array: jax.Array, mesh_2x4: Mesh, rows: NamedSharding
) -> None:
    pc.save(tmp_path, {"a": array, "b": array})
    target = {"a": struct((8, 4)), "b": struct((8, 4), sharding=rows)}
    found = pc.load(tmp_path, target, mesh=mesh_2x4, reshard=True)
    assert found["a"].sharding == NamedSharding(mesh_2x4, P("data"))
    assert found["b"].sharding == rows  # what the target says, counts more


def test_reshard_without_target_and_mesh_loads_onto_the_default_device(
    tmp_path: Path, array: jax.Array
) -> None:
    key = jax.random.key(1)
    pc.save(tmp_path, {"w": array, "k": key, "n": np.arange(3), "i": 4})
    found = pc.load(tmp_path, reshard=True)
    assert same(found["w"], jnp.asarray(np.asarray(array)))
    assert found["k"].dtype == key.dtype
    assert same(found["n"], np.arange(3))
    assert same(found["i"], 4)
    with jax.default_device(jax.devices()[3]):
        assert pc.load(tmp_path, reshard=True)["w"].devices() == {jax.devices()[3]}


# --- fewer devices than saved -----------------------------------------------------------------

FOUR_DEVICES = """
    import sys

    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    import pytree_ckpt as pc

    path = sys.argv[1]
    assert len(jax.devices()) == 4
    expected = np.arange(32, dtype=np.float32).reshape(8, 4)
    struct = jax.ShapeDtypeStruct((8, 4), np.float32)

    for target, options in [
        (None, {}),
        ({"w": struct, "half": struct, "n": 0}, {}),
        ({"w": struct, "half": struct, "n": 0}, {"cast": True, "partial": True}),
    ]:
        try:
            pc.load(path, target, **options)
        except pc.MismatchError as error:
            (mismatch,) = error.mismatches
            assert (mismatch.path, mismatch.kind) == ("w", "devices"), mismatch
            assert "8 devices, there are 4 here" in mismatch.text, mismatch
            assert "mesh=" in str(error), error
            assert "reshard=True" in str(error), error
        else:
            raise AssertionError("eight devices were made of four")

    # Half of the devices were enough for one leaf: it is where it was.
    found = pc.load(path, {"half": struct}, partial=True)["half"]
    assert len(found.sharding.device_set) == 4
    np.testing.assert_array_equal(found, expected)

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    try:
        pc.load(path, mesh=mesh)
    except pc.MismatchError as error:
        assert {m.kind for m in error.mismatches} == {"sharding"}, error
    else:
        raise AssertionError("another mesh was taken for the saved one")
    found = pc.load(path, mesh=mesh, reshard=True)
    assert found["w"].sharding == NamedSharding(mesh, P("data", "model"))
    np.testing.assert_array_equal(found["w"], expected)

    wanted = NamedSharding(mesh, P(("model", "data")))
    target = {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=wanted)}
    found = pc.load(path, target, reshard=True, partial=True)["w"]
    assert found.sharding == wanted
    np.testing.assert_array_equal(found, expected)

    found = pc.load(path, {"w": np.zeros((8, 4), np.float32)}, partial=True)["w"]
    np.testing.assert_array_equal(found, expected)
    for target in (None, {"w": struct}):  # to the default device, because it was asked for
        found = pc.load(path, target, reshard=True, partial=True)["w"]
        assert found.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(found, expected)
    print("all good")
"""


def test_fewer_devices_than_saved_is_an_error_that_names_both_numbers(
    tmp_path: Path, array: jax.Array
) -> None:
    mesh = array.sharding.mesh
    half = Mesh(mesh.devices.reshape(-1)[:4], ("data",))
    state = {
        "w": jax.device_put(array, NamedSharding(mesh, P("data", "model"))),
        "half": jax.device_put(array, NamedSharding(half, P("data"))),
        "n": 3,
    }
    pc.save(tmp_path, state)
    library = str(Path(pc.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FOUR_DEVICES), tmp_path],
        env={
            **os.environ,
            "PYTHONPATH": library,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all good\n"


# --- abstract meshes --------------------------------------------------------------------------


def abstract(mesh: Mesh, spec: PartitionSpec) -> dict[str, Any]:
    sharding = NamedSharding(mesh.abstract_mesh, spec)
    return {"w": struct((8, 4), sharding=sharding)}


def test_an_abstract_mesh_becomes_the_mesh_of_the_call(
    tmp_path: Path, array: jax.Array, rows: NamedSharding
) -> None:
    pc.save(tmp_path, {"w": array})
    target = abstract(rows.mesh, P("data"))
    assert same(pc.load(tmp_path, target, mesh=rows.mesh)["w"], array)


def test_an_abstract_mesh_becomes_the_mesh_that_is_set(
    tmp_path: Path, array: jax.Array, rows: NamedSharding
) -> None:
    pc.save(tmp_path, {"w": array})
    target = abstract(rows.mesh, P("data"))
    with jax.set_mesh(rows.mesh):
        assert same(pc.load(tmp_path, target)["w"], array)


def test_an_abstract_mesh_without_a_concrete_one_is_refused_and_says_what_to_do(
    tmp_path: Path, array: jax.Array, rows: NamedSharding
) -> None:
    pc.save(tmp_path, {"w": array, "v": array})
    target = {**abstract(rows.mesh, P("data")), "v": struct((8, 4))}
    for options in ({}, {"reshard": True}):
        with pytest.raises(pc.MismatchError) as error:
            pc.load(tmp_path, target, **options)
        (mismatch,) = error.value.mismatches
        assert (mismatch.path, mismatch.kind) == ("w", "mesh")
        assert "abstract" in mismatch.text
        assert "mesh=" in mismatch.text
        assert "set_mesh" in mismatch.text
        assert "reshard=True" not in str(error.value)  # that would not help


def test_an_abstract_mesh_of_other_axes_than_the_concrete_one_is_refused(
    tmp_path: Path, array: jax.Array, mesh_2x4: Mesh, rows: NamedSharding
) -> None:
    pc.save(tmp_path, {"w": array})
    (mismatch,) = mismatches(tmp_path, abstract(rows.mesh, P("data")), mesh=mesh_2x4)
    assert mismatch.kind == "mesh"
    assert "'data': 4" in mismatch.text
    assert "'data': 2" in mismatch.text


def test_an_abstract_mesh_of_other_axes_than_saved_still_needs_reshard(
    tmp_path: Path, array: jax.Array, mesh_2x4: Mesh
) -> None:
    pc.save(tmp_path, {"w": array})
    target = abstract(mesh_2x4, P("data", "model"))
    (mismatch,) = mismatches(tmp_path, target, mesh=mesh_2x4)
    assert mismatch.kind == "sharding"
    found = pc.load(tmp_path, target, mesh=mesh_2x4, reshard=True)["w"]
    assert found.sharding == NamedSharding(mesh_2x4, P("data", "model"))
    np.testing.assert_array_equal(found, array)


def test_a_mesh_is_abstract_by_its_class_and_not_by_its_axis_types(
    tmp_path: Path, array: jax.Array
) -> None:
    pc.save(tmp_path, {"w": array})
    mesh = AbstractMesh((4, 2), ("data", "model"))
    target = {"w": struct((8, 4), sharding=NamedSharding(mesh, P("data")))}
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    found = pc.load(tmp_path, target, mesh=explicit)["w"]
    assert found.sharding == NamedSharding(explicit, P("data"))


# --- fewer leaves -----------------------------------------------------------------------------


def model(array: jax.Array) -> dict[str, Any]:
    return {
        "params": {"dense": {"kernel": array, "bias": array + 1}, "empty": {}},
        "opt": (array + 2, {"count": 3, "none": None}),
        "ema": [array + 3],
    }


def test_partial_loads_the_params_alone(tmp_path: Path, array: jax.Array) -> None:
    state = model(array)
    pc.save(tmp_path, state)
    target = {"params": jax.tree.map(jnp.zeros_like, state["params"])}
    assert mismatches(tmp_path, target)
    found = pc.load(tmp_path, target, partial=True)
    assert jax.tree.structure(found) == jax.tree.structure(target)
    assert same(found["params"]["dense"]["kernel"], array)
    assert same(found["params"]["dense"]["bias"], array + 1)


def test_partial_takes_none_in_place_of_what_is_not_wanted(
    tmp_path: Path, array: jax.Array
) -> None:
    state = model(array)
    pc.save(tmp_path, state)
    target = {
        "params": {"dense": {"kernel": array, "bias": None}, "empty": {}},
        "opt": None,
        "ema": [None],
    }
    with pytest.raises(pc.MismatchError):
        pc.load(tmp_path, target)
    found = pc.load(tmp_path, target, partial=True)
    assert jax.tree.structure(found) == jax.tree.structure(target)
    assert same(found["params"]["dense"]["kernel"], array)
    assert found["params"]["dense"]["bias"] is None
    assert found["opt"] is None
    assert found["ema"] == [None]


def test_partial_takes_empty_containers_too(tmp_path: Path, array: jax.Array) -> None:
    pc.save(tmp_path, model(array))
    targets: list[Any] = [{}, [], {"params": {}, "opt": ()}, {"opt": {}, "ema": []}]
    for target in targets:
        assert pc.load(tmp_path, target, partial=True) == target


def test_partial_still_refuses_what_the_checkpoint_does_not_have(
    tmp_path: Path, array: jax.Array
) -> None:
    pc.save(tmp_path, model(array))
    target = {"params": {"dense": {"kernal": array, "scale": array}}, "new": 0}
    found = mismatches(tmp_path, target, partial=True)
    assert {(m.path, m.kind) for m in found} == {
        ("params/dense/kernal", "missing"),
        ("params/dense/scale", "missing"),
        ("new", "missing"),
    }
    (near,) = (m for m in found if m.path.endswith("kernal"))
    assert "nearest: params/dense/kernel" in near.text


def test_extra_and_missing_leaves_are_all_listed(tmp_path: Path, array: jax.Array) -> None:
    pc.save(tmp_path, model(array))
    target = model(array)
    target["opt"] = ((target["opt"][0],), target["opt"][1])
    del target["ema"]
    found = {(m.path, m.kind) for m in mismatches(tmp_path, target)}
    assert found == {("opt/0", "extra"), ("opt/0/0", "missing"), ("ema/0", "extra")}


def test_partial_does_not_allow_another_layout_or_dtype(
    tmp_path: Path, array: jax.Array, mesh_2x4: Mesh
) -> None:
    pc.save(tmp_path, model(array))
    wanted = struct((8, 4), np.int32, NamedSharding(mesh_2x4, P()))
    found = mismatches(tmp_path, {"ema": [wanted]}, partial=True)
    assert {m.kind for m in found} >= {"dtype"}
    found = mismatches(tmp_path, {"ema": [struct((8, 4), F32, wanted.sharding)]}, partial=True)
    assert {m.kind for m in found} == {"sharding"}


# --- casts ------------------------------------------------------------------------------------

HARD = np.array([1e-3, 3e38, 1 + 2**-20, -0.0, np.inf, np.nan, 65504.0, 1e-45], F32)


@pytest.mark.parametrize(
    "dtype",
    [ml_dtypes.bfloat16, np.float16, np.float64, ml_dtypes.float8_e4m3fn, np.complex64],
)
def test_a_cast_is_numpys_own(tmp_path: Path, dtype: Any) -> None:
    pc.save(tmp_path, {"w": HARD})
    assert mismatches(tmp_path, {"w": np.zeros(8, dtype)})[0].kind == "dtype"
    with np.errstate(all="ignore"):
        expected = HARD.astype(dtype)
    assert same(pc.load(tmp_path, {"w": np.zeros(8, dtype)}, cast=True)["w"], expected)


def test_a_cast_keeps_the_sharding_and_overflows_to_infinity(tmp_path: Path, mesh_8: Mesh) -> None:
    rows = NamedSharding(mesh_8, P("data"))
    pc.save(tmp_path, {"w": jax.device_put(HARD, rows)})
    for dtype in (np.float16, ml_dtypes.bfloat16):
        target = {"w": struct((8,), dtype, rows)}
        found = pc.load(tmp_path, target, cast=True)["w"]
        with np.errstate(all="ignore"):
            assert same(found, jax.device_put(HARD.astype(dtype), rows))
    assert np.isinf(pc.load(tmp_path, {"w": np.zeros(8, np.float16)}, cast=True)["w"][1])


@pytest.mark.parametrize("target", [np.zeros(2, F32), np.zeros(2, np.int8), np.zeros(2, bool)])
def test_an_imaginary_part_is_not_dropped_even_by_a_cast(tmp_path: Path, target: Any) -> None:
    pc.save(tmp_path, {"a": np.array([1, 2j], np.complex64), "b": 1j})
    found = mismatches(tmp_path, {"a": target, "b": target[0]}, cast=True)
    assert [(m.path, m.kind) for m in found] == [("a", "dtype"), ("b", "dtype")]
    found = mismatches(tmp_path, {"a": target, "b": 1.0}, cast=True)
    assert [(m.path, m.kind) for m in found] == [("a", "dtype"), ("b", "dtype")]


NUMBER_DTYPES = [
    *map(np.dtype, (bool, np.int8, np.int32, np.int64, np.uint8, np.uint64)),
    *map(np.dtype, (np.float16, np.float32, np.float64, np.complex64)),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)),
    *map(np.dtype, (ml_dtypes.float8_e3m4, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn)),
    *map(np.dtype, (ml_dtypes.int4, ml_dtypes.uint2)),
]


def test_a_cast_between_any_two_dtypes_keeps_the_numbers_that_both_can_hold(
    tmp_path: Path,
) -> None:
    numbers = np.array([1, 2, 1, 2], F32)
    pc.save(tmp_path, {dtype.name: numbers.astype(dtype) for dtype in NUMBER_DTYPES})
    for wanted in NUMBER_DTYPES:
        names = [d.name for d in NUMBER_DTYPES if d.kind != "c" or wanted.kind == "c"]
        target = {name: np.zeros(4, wanted) for name in names}
        found = pc.load(tmp_path, target, cast=True, partial=True)
        for name in names:
            held = numbers.astype(bool) if name == "bool" else numbers
            assert same(found[name], held.astype(wanted)), (name, wanted)


@pytest.mark.parametrize("name", sorted({*dtypes.names()} - {"bool"}))
def test_whatever_is_in_memory_for_true_is_cast_to_one(tmp_path: Path, name: str) -> None:
    dtype = dtypes.dtype_of(name)
    pc.save(tmp_path, {"w": np.uint8([1, 0, 4, 255]).view(bool)})
    target = {"w": np.zeros(4, dtype)}
    if name == "int1":  # of a sign alone
        assert mismatches(tmp_path, target, cast=True)[0].kind == "dtype"
    else:
        found = pc.load(tmp_path, target, cast=True)["w"]
        assert same(found, np.uint8([1, 0, 1, 1]).astype(dtype))


def test_a_cast_turns_numbers_of_python_into_one_another_and_into_arrays(tmp_path: Path) -> None:
    pc.save(tmp_path, {"i": 3, "f": 2.75, "b": True, "big": 10**30})
    found = pc.load(tmp_path, {"i": 0.0, "f": np.float16(0), "b": 0, "big": 0.0}, cast=True)
    assert same(found["i"], 3.0)
    assert same(found["f"], np.float16(2.75))
    assert same(found["b"], 1)
    assert same(found["big"], 1e30)
    assert same(pc.load(tmp_path, {"big": F32(0)}, cast=True, partial=True)["big"], F32(1e30))
    assert same(
        pc.load(tmp_path, {"f": jnp.bfloat16(0)}, cast=True, partial=True)["f"],
        jnp.asarray(2.75, jnp.bfloat16),
    )
    pc.save(tmp_path, {"c": 1 + 2j}, overwrite=True)
    assert same(pc.load(tmp_path, {"c": np.complex64(0)}, cast=True)["c"], np.complex64(1 + 2j))


@pytest.mark.parametrize(
    ("saved", "target"),
    [  # named, because pytest would name a case by all digits of its number
        (10**30, np.int32(0)),
        (1 << 40, np.int32(0)),
        (-1, np.uint8(0)),
        (300.5, np.uint8(0)),
        (float("nan"), 0),
        (float("inf"), 0),
        (float("nan"), np.int32(0)),
        (10**400, 0.0),
        (10**400, np.float32(0)),
        (10**5000, np.float32(0)),
        (1j, 0.0),
        (1j, np.float32(0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_number_of_python_that_the_wanted_type_cannot_hold_is_refused_even_by_a_cast(
    tmp_path: Path, saved: Any, target: Any
) -> None:
    pc.save(tmp_path, {"x": saved})
    for options in ({"cast": True}, {}):
        (mismatch,) = mismatches(tmp_path, {"x": target}, **options)
        assert (mismatch.path, mismatch.kind) == ("x", "dtype")
        assert mismatch.saved
        assert len(mismatch.text) < 200


def test_a_cast_does_not_change_a_shape_or_a_layout(
    tmp_path: Path, array: jax.Array, mesh_2x4: Mesh
) -> None:
    pc.save(tmp_path, {"w": array})
    (mismatch,) = mismatches(tmp_path, {"w": np.zeros((4, 8), np.int8)}, cast=True)
    assert mismatch.kind == "shape"
    wanted = NamedSharding(mesh_2x4, P())
    (mismatch,) = mismatches(tmp_path, {"w": struct((8, 4), np.int8, wanted)}, cast=True)
    assert mismatch.kind == "sharding"


# --- weak types, committed arrays -------------------------------------------------------------


def test_weak_types_are_kept_without_a_target_and_are_the_targets_with_one(
    tmp_path: Path,
) -> None:
    weak, strong = jnp.asarray(2.0), jnp.asarray(2.0, jnp.float32)
    assert weak.weak_type
    assert not strong.weak_type
    pc.save(tmp_path, {"a": weak, "b": strong})
    found = pc.load(tmp_path)
    assert same(found["a"], weak)
    assert same(found["b"], strong)
    # It is also weak to the cache of a function that was compiled for a strong one.
    identity = jax.jit(lambda x: x)
    assert [identity(x).weak_type for x in (strong, found["a"])] == [False, True]
    found = pc.load(tmp_path, {"a": strong, "b": weak})
    assert same(found["a"], strong)
    assert same(found["b"], weak)
    found = pc.load(tmp_path, jax.eval_shape(lambda: {"a": jnp.asarray(2.0), "b": strong}))
    assert (found["a"].weak_type, found["b"].weak_type) == (True, False)


@pytest.mark.parametrize("spec", [P(), P("data")], ids=str)
def test_a_weakly_typed_array_stays_in_the_memory_that_it_was_saved_from(
    tmp_path: Path, mesh_8: Mesh, spec: PartitionSpec
) -> None:
    on_host = NamedSharding(mesh_8, spec, memory_kind="pinned_host")
    weak = jax.device_put(jnp.full(8, 2), on_host)
    assert weak.weak_type
    pc.save(tmp_path, {"w": weak})
    for target in (None, {"w": weak}):
        assert same(pc.load(tmp_path, target)["w"], weak)


def test_uncommitted_arrays_stay_uncommitted_and_committed_ones_committed(
    tmp_path: Path,
) -> None:
    device = jax.devices()[2]
    state = {
        "free": jnp.arange(3),
        "bound": jax.device_put(np.arange(3), device),
        "home": jax.device_put(np.arange(3), jax.devices()[0]),
        "key": jax.random.key(0),
    }
    assert not state["free"].committed
    assert state["bound"].committed
    assert not state["key"].committed
    pc.save(tmp_path, state)
    structs = jax.tree.map(lambda x: struct(x.shape, x.dtype), state)
    placed = jax.tree.map(lambda x: struct(x.shape, x.dtype, sharding=x.sharding), state)
    for target in (None, state, structs, placed):
        found = pc.load(tmp_path, target)
        for name in ("free", "bound", "home"):
            assert same(found[name], state[name])
        assert not found["key"].committed
    with jax.default_device("cpu"):
        for target in (state, placed):
            assert same(pc.load(tmp_path, target)["free"], state["free"])
    swapped = {**state, "free": state["bound"], "bound": state["free"]}
    found = pc.load(tmp_path, swapped)
    assert same(found["free"], state["bound"])
    assert same(found["bound"], state["free"])


def test_a_sharded_state_with_an_uncommitted_counter_goes_on_training_after_a_load(
    tmp_path: Path, mesh_4x2: Mesh
) -> None:
    @jax.jit
    def step(state: dict[str, Any]) -> dict[str, Any]:
        noise = jax.random.normal(jax.random.fold_in(state["rng"], state["count"]), (8, 4))
        return {
            "w": state["w"] * 0.5 + noise + state["count"],
            "count": state["count"] + 1,
            "rng": state["rng"],
        }

    state = {
        "w": jax.device_put(
            np.arange(32, dtype=F32).reshape(8, 4), NamedSharding(mesh_4x2, P("data", "model"))
        ),
        "count": jnp.zeros((), jnp.int32),
        "rng": jax.random.key(3),
    }
    expected = step(state)
    pc.save(tmp_path / "a", state)
    structs = jax.eval_shape(lambda: state)
    with_shardings = jax.tree.map(lambda x: struct(x.shape, x.dtype, sharding=x.sharding), state)
    for target in (None, state, structs, with_shardings):
        after = step(pc.load(tmp_path / "a", target))
        np.testing.assert_array_equal(after["w"], expected["w"])
        assert after["w"].sharding == expected["w"].sharding
        assert after["count"] == 1
    # And what the step gave, which JAX has committed to the mesh, goes round as well.
    pc.save(tmp_path / "b", expected)
    twice = step(expected)
    for target in (None, expected):
        after = step(pc.load(tmp_path / "b", target))
        np.testing.assert_array_equal(after["w"], twice["w"])


# --- meshes that are set, donation ------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_save_and_load_work_while_a_mesh_is_set(tmp_path: Path, kind: AxisType) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        keys = jax.random.split(jax.random.key(0), 8)
        state = {
            "w": jax.device_put(
                np.arange(32, dtype=F32).reshape(8, 4), NamedSharding(mesh, P("data", "model"))
            ),
            "made_here": jnp.ones((8,)),
            "weak": jnp.asarray(2.0),
            "keys": jax.device_put(keys, NamedSharding(mesh, P("data"))),
        }
        pc.save(tmp_path, state)
        others = jax.eval_shape(lambda: state)
        loaded = [pc.load(tmp_path), pc.load(tmp_path, state), pc.load(tmp_path, others)]
        loaded.append(pc.load(tmp_path, mesh=mesh))
    loaded.append(pc.load(tmp_path))
    for found in loaded:
        for name in ("w", "made_here", "weak"):
            assert same(found[name], state[name]), name
        assert found["keys"].dtype == keys.dtype
        assert found["keys"].sharding == state["keys"].sharding
        np.testing.assert_array_equal(jax.random.key_data(found["keys"]), jax.random.key_data(keys))
    with jax.set_mesh(mesh):
        assert pc.load(tmp_path, reshard=True)["w"].shape == (8, 4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_save_and_load_work_while_a_mesh_of_other_devices_is_set(
    tmp_path: Path, mesh_8: Mesh, kind: AxisType
) -> None:
    one, rows = jax.devices()[1], NamedSharding(mesh_8, P("data"))
    state = {
        "w": jax.device_put(np.arange(8, dtype=F32), rows),
        "weak": jax.device_put(jnp.asarray(2.0), one),
        "key": jax.device_put(jax.random.key(0), one),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), rows),
        "free": jnp.asarray(2.0),
    }
    with jax.set_mesh(Mesh(np.array(jax.devices()[4:]), ("x",), axis_types=(kind,))):
        pc.save(tmp_path / "ckpt", state)
        pc.save_async(tmp_path / "background", state).result()
        for path in (tmp_path / "ckpt", tmp_path / "background"):
            assert_same(pc.load(path), state)
            assert_same(pc.load(path, state), state)


def test_what_a_traced_function_closes_over_is_saved_and_loaded(
    tmp_path: Path, array: jax.Array
) -> None:
    state = {"w": array, "free": jnp.asarray(2.0), "key": jax.random.key(0), "step": 3}
    found = []

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        pc.save(tmp_path / "ckpt", state)
        pc.save_async(tmp_path / "background", state).result()
        found.extend([pc.load(tmp_path / "ckpt"), pc.load(tmp_path / "background", state)])
        return x + found[0]["free"]

    assert traced(1.0) == 3.0
    for loaded in found:
        assert_same(loaded, state)


def test_a_weakly_typed_nan_is_loaded_where_jax_looks_for_nans(tmp_path: Path) -> None:
    weak = jnp.asarray(float("nan"))
    pc.save(tmp_path, weak)
    with jax.debug_nans(True):
        assert same(pc.load(tmp_path), weak)


def test_donating_one_loaded_array_changes_no_other(tmp_path: Path, mesh_8: Mesh) -> None:
    # On CPU the replicas of an array, and many small arrays, share memory of the host.
    everywhere = NamedSharding(mesh_8, P())
    for shape in ((16,), (1024, 512)):
        folder = tmp_path / str(len(shape))
        original = {name: np.full(shape, value, F32) for value, name in enumerate("abc", 1)}
        state = jax.device_put(original, everywhere)
        pc.save(folder, state)
        first, second = pc.load(folder, state), pc.load(folder)

        add = jax.jit(lambda x: x + 100, donate_argnums=0)
        for _ in range(3):
            first["a"] = add(first["a"])
        np.testing.assert_array_equal(first["a"], original["a"] + 300)
        for name in "bc":
            np.testing.assert_array_equal(first[name], original[name])
        for name in "abc":
            np.testing.assert_array_equal(second[name], original[name])
            np.testing.assert_array_equal(pc.load(folder)[name], original[name])
            for shard in second[name].addressable_shards:
                np.testing.assert_array_equal(shard.data, original[name])


def test_the_replicas_of_a_donated_array_do_not_overwrite_one_another(
    tmp_path: Path, mesh_8: Mesh
) -> None:
    everywhere = NamedSharding(mesh_8, P())
    original = np.arange(1024 * 512, dtype=F32).reshape(1024, 512)
    pc.save(tmp_path, {"w": jax.device_put(original, everywhere)})
    double = jax.jit(lambda x: x * 2, donate_argnums=0, out_shardings=everywhere)
    result = double(pc.load(tmp_path)["w"])
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(shard.data, original * 2)


def test_writing_to_a_loaded_numpy_array_changes_no_other_load(tmp_path: Path) -> None:
    original = {"small": np.arange(4.0), "also": np.arange(4.0), "large": np.arange(1 << 18) * 1.0}
    pc.save(tmp_path, original)
    first, second = pc.load(tmp_path), pc.load(tmp_path)
    mixed = pc.load(tmp_path, {"small": np.zeros(4), "also": struct((4,))}, partial=True, cast=True)
    for name in ("small", "large"):
        first[name][:] = -1
    mixed["small"][:] = -1
    np.testing.assert_array_equal(mixed["also"], original["also"])
    for found in (second, pc.load(tmp_path)):
        for name, array in original.items():
            np.testing.assert_array_equal(found[name], array)
    np.testing.assert_array_equal(first["also"], original["also"])


def test_one_array_in_two_leaves_becomes_two_arrays(tmp_path: Path, array: jax.Array) -> None:
    pc.save(tmp_path, {"embed": array, "head": {"kernel": array}})
    expected = np.asarray(array).copy()
    found = pc.load(tmp_path)
    jax.block_until_ready(jax.jit(lambda x: x * 2, donate_argnums=0)(found["embed"]))
    np.testing.assert_array_equal(found["head"]["kernel"], expected)


def test_a_single_device_array_comes_back_to_its_device(tmp_path: Path) -> None:
    w = jax.device_put(np.arange(4, dtype=F32), jax.devices()[5])
    pc.save(tmp_path, {"w": w})
    assert same(pc.load(tmp_path)["w"], w)
    # Which device it is, is no layout: another one is loaded onto without a word.
    elsewhere = SingleDeviceSharding(jax.devices()[1])
    found = pc.load(tmp_path, {"w": struct((4,), F32, elsewhere)})["w"]
    assert found.sharding == elsewhere
    np.testing.assert_array_equal(found, w)


def test_a_guard_against_transfers_allows_those_of_a_save_and_a_load(
    tmp_path: Path, array: jax.Array
) -> None:
    state = {
        "array": array,
        "key": jax.random.key(3),
        "loose": jnp.asarray(2.0),
        "host": np.arange(3),
    }
    paths = [tmp_path / "ckpt", tmp_path / "background"]
    with jax.transfer_guard("disallow"):
        pc.save(paths[0], state)
        pc.save_async(paths[1], state).result()
        loaded = [pc.load(path, target) for path in paths for target in (state, None)]
    for found in loaded:
        assert set(found) == set(state)
        assert all(same(found[k], state[k]) for k in ("array", "loose", "host"))
        data = jax.random.key_data(found["key"])
        assert jnp.array_equal(data, jax.random.key_data(state["key"]))
