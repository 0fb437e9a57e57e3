"""Which device holds which box: the pure rule against JAX's own index maps."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from pytree_ckpt.format.boxes import Box, Grid
from pytree_ckpt.format.shardings import (
    Mesh,
    Named,
    Sharding,
    Single,
    Tiled,
    cell_of,
    devices_of,
    holders,
    same_layout,
)
from pytree_ckpt.jaxio import shardings as jax_shardings

P = PartitionSpec
MESH_SHAPES = [
    shape
    for ndim in (1, 2, 3)
    for shape in itertools.product((1, 2, 3, 4, 8), repeat=ndim)
    if math.prod(shape) <= 8
]


@st.composite
def named_shardings(draw: st.DrawFn) -> tuple[NamedSharding, tuple[int, ...]]:
    """A sharding on a mesh of some of the devices in any order, and a shape that it divides."""
    sizes = draw(st.sampled_from(MESH_SHAPES))
    names = draw(st.permutations(["x", "y", "z"]))[: len(sizes)]
    order = draw(st.permutations(range(8)))[: math.prod(sizes)]
    devices = np.array([jax.devices()[at] for at in order]).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, tuple(names))
    ndim = draw(st.integers(0, 4))
    free = draw(st.permutations(names))
    entries: list[Any] = []
    for _ in range(draw(st.integers(0, ndim))):
        taken = draw(st.integers(0, len(free)))
        entries.append(tuple(free[:taken]) if taken > 1 else free[0] if taken else None)
        free = free[taken:]
    extents = dict(zip(names, sizes, strict=True))
    shape = []
    for dim in range(ndim):
        entry = entries[dim] if dim < len(entries) else None
        axes = (entry,) if isinstance(entry, str) else entry or ()
        shape.append(math.prod(extents[a] for a in axes) * draw(st.integers(0, 3)))
    return NamedSharding(mesh, P(*entries)), tuple(shape)


def boxes_by_device(plain: Sharding | None, shape: tuple[int, ...]) -> dict[int, Box]:
    """The rule under test: the box of each device id, from plain data alone."""
    cell = cell_of(plain, shape)
    out = {}
    for number, ids in holders(plain, shape).items():
        counts = tuple(max(-(-s // c), 1) for s, c in zip(shape, cell, strict=True))
        position = np.unravel_index(number, counts) if counts else ()
        start = tuple(int(p) * c for p, c in zip(position, cell, strict=True))
        stop = tuple(min(a + c, s) for a, c, s in zip(start, cell, shape, strict=True))
        out.update(dict.fromkeys(ids, Box(start, stop)))
    return out


def boxes_of_jax(sharding: Any, shape: tuple[int, ...]) -> dict[int, Box]:
    return {
        device.id: jax_shardings.box_of(index, shape)
        for device, index in sharding.devices_indices_map(shape).items()
    }


@given(named_shardings())
@settings(max_examples=300)
def test_every_device_holds_the_box_that_jax_gives_it(
    case: tuple[NamedSharding, tuple[int, ...]],
) -> None:
    sharding, shape = case
    plain = jax_shardings.describe(sharding, shape)
    expected = boxes_of_jax(sharding, shape)
    assert {device.id for device in sharding.device_set} == set(expected)
    if 0 in shape:  # every box is empty: where it begins does not matter
        assert sum(map(len, holders(plain, shape).values())) == len(expected)
        return
    assert boxes_by_device(plain, shape) == expected
    grid = Grid(shape, cell_of(plain, shape))
    assert sorted(holders(plain, shape)) == list(range(grid.size))


def test_the_order_of_axes_in_one_entry_counts(mesh_2x4: jax.sharding.Mesh) -> None:
    seen = {}
    for entry in (("data", "model"), ("model", "data")):
        sharding = NamedSharding(mesh_2x4, P(entry))
        plain = jax_shardings.describe(sharding, (8,))
        assert boxes_by_device(plain, (8,)) == boxes_of_jax(sharding, (8,))
        seen[entry] = plain
    first, second = seen.values()
    assert holders(first, (8,)) != holders(second, (8,))
    assert not same_layout(first, second)


def test_replicas_of_a_box_are_listed_together(mesh_4x2: jax.sharding.Mesh) -> None:
    plain = jax_shardings.describe(NamedSharding(mesh_4x2, P("model")), (4,))
    assert holders(plain, (4,)) == {0: [0, 2, 4, 6], 1: [1, 3, 5, 7]}
    everywhere = jax_shardings.describe(NamedSharding(mesh_4x2, P()), (4,))
    assert holders(everywhere, (4,)) == {0: list(range(8))}


def test_host_arrays_and_single_devices_hold_all_in_one_cell() -> None:
    assert cell_of(None, (3, 0)) == (3, 1)
    assert holders(None, (3, 0)) == {0: []}
    single = jax_shardings.describe(SingleDeviceSharding(jax.devices()[5]), (3, 4))
    assert single == Single(device_id=5)
    assert cell_of(single, (3, 4)) == (3, 4)
    assert holders(single, (3, 4)) == {0: [5]}


def test_a_dimension_that_cannot_be_cut_names_itself_and_its_axes() -> None:
    mesh = Mesh(
        axis_names=("x", "y"), axis_sizes=(2, 4), axis_types=("Auto",) * 2, device_ids=range_ids(8)
    )
    with pytest.raises(ValueError, match=r"dimension 1 has 12 elements, not divisible by 8") as e:
        cell_of(Named(mesh=mesh, spec=((), ("x", "y"))), (4, 12))
    assert "axes x, y" in str(e.value)
    assert "12 % 8 = 4" in str(e.value)
    with pytest.raises(ValueError, match="more entries than"):
        cell_of(Named(mesh=mesh, spec=((), ("x",))), (4,))


def range_ids(count: int) -> tuple[int, ...]:
    return tuple(range(count))


@given(named_shardings())
def test_a_description_rebuilds_the_very_sharding(
    case: tuple[NamedSharding, tuple[int, ...]],
) -> None:
    sharding, shape = case
    plain = jax_shardings.describe(sharding, shape)
    assert isinstance(plain, Named)
    mesh = jax_shardings.rebuild_mesh(plain.mesh)
    assert mesh is not None
    assert mesh == sharding.mesh
    rebuilt = jax_shardings.named(mesh, plain)
    assert rebuilt.is_equivalent_to(sharding, len(shape))
    assert jax_shardings.describe(rebuilt, shape) == plain


def test_trailing_nones_do_not_make_another_layout(mesh_8: jax.sharding.Mesh) -> None:
    short, long = (
        jax_shardings.describe(NamedSharding(mesh_8, spec), (8, 2, 2))
        for spec in (P("data"), P("data", None, None))
    )
    assert short != long
    assert same_layout(short, long)
    assert same_layout(
        jax_shardings.describe(NamedSharding(mesh_8, P(None, None)), (8, 2)),
        jax_shardings.describe(NamedSharding(mesh_8, P()), (8, 2)),
    )
    inner, other = (
        jax_shardings.describe(NamedSharding(mesh_8, spec), (8, 8))
        for spec in (P("data"), P(None, "data"))
    )
    assert not same_layout(inner, other)


def test_device_order_and_axis_types_are_not_layout_but_names_and_sizes_are() -> None:
    def on(**changes: Any) -> Named:
        fields: dict[str, Any] = {
            "axis_names": ("x", "y"),
            "axis_sizes": (2, 4),
            "axis_types": ("Auto", "Auto"),
            "device_ids": range_ids(8),
        }
        return Named(mesh=Mesh(**{**fields, **changes}), spec=(("x",),))

    assert same_layout(on(), on(device_ids=tuple(reversed(range(8)))))
    assert same_layout(on(), on(axis_types=("Explicit", "Explicit")))
    assert not same_layout(on(), on(axis_names=("x", "z")))
    assert not same_layout(on(), on(axis_sizes=(4, 2)))
    assert not same_layout(on(), on(axis_names=("y", "x")))
    assert not same_layout(on(), Single(device_id=0))
    assert same_layout(Single(device_id=0), Single(device_id=3))


@pytest.mark.parametrize(
    "fields",
    [
        {"axis_names": ("x",)},
        {"axis_names": ("x", "x")},
        {"axis_sizes": (0, 4), "device_ids": ()},
        {"device_ids": range_ids(7)},
        {"axis_types": ()},
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "axis_names": ("x", "y"),
        "axis_sizes": (2, 4),
        "axis_types": ("Auto", "Auto"),
        "device_ids": range_ids(8),
    }
    Mesh(**good)
    with pytest.raises(ValueError, match=r"mesh|device"):
        Mesh(**{**good, **fields})


@pytest.mark.parametrize("spec", [(("z",),), (("x",), ("x",)), (("x", "x"),)])
def test_a_spec_that_does_not_fit_its_mesh_is_refused(spec: Sequence[Any]) -> None:
    mesh = Mesh(axis_names=("x",), axis_sizes=(2,), axis_types=("Auto",), device_ids=(0, 1))
    with pytest.raises(ValueError, match=r"spec"):
        Named(mesh=mesh, spec=tuple(spec))


def test_axis_types_are_described_and_rebuilt() -> None:
    types = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=types)
    plain = jax_shardings.describe_mesh(mesh)
    assert plain.axis_types == ("Explicit", "Auto")
    assert jax_shardings.rebuild_mesh(plain) == mesh


def test_axis_names_that_are_not_text_are_refused() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), (("a", 1),))
    with pytest.raises(jax_shardings.UnsupportedShardingError, match="not all strings"):
        jax_shardings.describe(NamedSharding(mesh, P()), (8,))


def test_specs_that_do_not_say_what_a_shard_holds_are_refused() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    sums = P("data", unreduced={"model"})
    with pytest.raises(jax_shardings.UnsupportedShardingError, match="partial sums"):
        jax_shardings.describe(NamedSharding(mesh, sums), (8,))
    gradients = P("data", reduced={"model"})
    with pytest.raises(jax_shardings.UnsupportedShardingError, match="is reduced"):
        jax_shardings.describe(NamedSharding(mesh, gradients), (8,))
    open_to_jax = P(P.UNCONSTRAINED)
    with pytest.raises(jax_shardings.UnsupportedShardingError, match="not an axis"):
        jax_shardings.describe(NamedSharding(mesh, open_to_jax), (8,))


def test_a_mesh_of_more_devices_than_there_are_is_not_rebuilt() -> None:
    mesh = Mesh(axis_names=("x",), axis_sizes=(16,), axis_types=("Auto",), device_ids=range_ids(16))
    assert jax_shardings.rebuild_mesh(mesh) is None


def test_a_mesh_of_devices_with_other_ids_takes_all_devices_in_order() -> None:
    mesh = Mesh(
        axis_names=("x",),
        axis_sizes=(8,),
        axis_types=("Auto",),
        device_ids=tuple(range(2048, 2056)),
    )
    rebuilt = jax_shardings.rebuild_mesh(mesh)
    assert rebuilt is not None
    assert list(rebuilt.devices) == jax.devices()


def test_a_tiled_sharding_is_its_cell_and_the_cells_of_its_devices() -> None:
    plain = Tiled(name="Other", cell=(2, 4), cells=(1, 0, 1, 0), device_ids=(4, 5, 6, 7))
    assert cell_of(plain, (4, 4)) == (2, 4)
    assert holders(plain, (4, 4)) == {0: [5, 7], 1: [4, 6]}
    with pytest.raises(ValueError, match="one cell for each device"):
        Tiled(name="Other", cell=(2,), cells=(0, 1), device_ids=(0,))


def test_devices_are_found_among_more_cells_than_can_be_counted() -> None:
    tiled = Tiled(name="X", cell=(1,), cells=(0, 7), device_ids=(3, 2))
    found = [devices_of(tiled, (1 << 60,), Box((a,), (1 << 60,))) for a in (0, 1, 8)]
    assert found == [(2, 3), (2,), ()]


def test_shardings_read_as_a_person_writes_them(mesh_4x2: jax.sharding.Mesh) -> None:
    plain = jax_shardings.describe(NamedSharding(mesh_4x2, P(None, ("data", "model"))), (1, 8))
    assert str(plain) == "P(None, ('data', 'model')) on mesh(data=4, model=2)"
    assert str(jax_shardings.describe(NamedSharding(mesh_4x2, P()), (1,))) == (
        "P() on mesh(data=4, model=2)"
    )
