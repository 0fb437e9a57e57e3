"""How arrays are cut, how small shards are packed, and which process writes what."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Grid, is_contiguous
from pytree_ckpt.format.paths import Key
from pytree_ckpt.format.shardings import Mesh, Named, Sharding, Single, cell_of, holders
from pytree_ckpt.format.tables import Rows, ShardIndex, Table
from pytree_ckpt.plan import chunking
from pytree_ckpt.plan.saving import (
    PACKED_CHUNK_NBYTES,
    PACKED_SHARD_NBYTES,
    ArrayForm,
    SavePlan,
    pack,
    plan_save,
)

MIB = 1 << 20
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])
ANY_EXTENT = st.one_of(
    st.integers(1, 40),
    st.sampled_from([97, 1009, 4099, 65_537, 1_000_003, 2 * 1009, 50_257, 128_256]),
    st.integers(0, 26).map(lambda power: 1 << power),
)
SMOOTH_EXTENT = st.tuples(
    st.integers(0, 12), st.integers(0, 4), st.integers(0, 2), st.integers(0, 2)
).map(lambda powers: 2 ** powers[0] * 3 ** powers[1] * 5 ** powers[2] * 7 ** powers[3])


def shapes(extents: st.SearchStrategy[int], *, most: int = 4) -> st.SearchStrategy[Any]:
    return st.lists(extents, max_size=most).map(tuple)


def divides(part: Sequence[int], shape: Sequence[int]) -> bool:
    return len(part) == len(shape) and all(
        p >= 1 and s % p == 0 for p, s in zip(part, shape, strict=True)
    )


# --- cutting ----------------------------------------------------------------------------------


@given(shapes(ANY_EXTENT), ITEMSIZES, st.integers(1, 1 << 26), st.integers(1, 64))
@settings(max_examples=300)
def test_parts_divide_the_array_and_are_not_far_smaller_than_asked_for(
    shape: tuple[int, ...], itemsize: int, max_nbytes: int, min_parts: int
) -> None:
    part = chunking.cut(shape, itemsize, max_nbytes=max_nbytes, min_parts=min_parts)
    assert divides(part, shape)
    wanted = max(-(-math.prod(shape) * itemsize // max_nbytes), min_parts)
    assert math.prod(shape) // math.prod(part) <= 16 * wanted


@given(shapes(SMOOTH_EXTENT), ITEMSIZES, st.integers(16, 1 << 26), st.integers(1, 64))
@settings(max_examples=300)
def test_extents_with_small_factors_are_always_cut_about_as_small_as_asked(
    shape: tuple[int, ...], itemsize: int, max_nbytes: int, min_parts: int
) -> None:
    part = chunking.cut(shape, itemsize, max_nbytes=max_nbytes, min_parts=min_parts)
    assert divides(part, shape)
    assert 2 * math.prod(part) * itemsize <= 3 * max_nbytes
    parts = math.prod(shape) // math.prod(part)
    assert parts >= min(min_parts, math.prod(shape))


@given(shapes(st.integers(0, 16).map(lambda power: 1 << power)), ITEMSIZES)
def test_a_part_is_one_byte_range_of_an_array_of_powers_of_two(
    shape: tuple[int, ...], itemsize: int
) -> None:
    for max_nbytes in (64, 4096, MIB, 16 * MIB):
        part = chunking.cut(shape, itemsize, max_nbytes=max_nbytes)
        assert is_contiguous(part, shape)


@given(shapes(ANY_EXTENT), ITEMSIZES)
def test_an_array_within_the_bound_is_not_cut(shape: tuple[int, ...], itemsize: int) -> None:
    nbytes = math.prod(shape) * itemsize
    assert chunking.cut(shape, itemsize, max_nbytes=nbytes) == shape
    assert chunking.cut(shape, itemsize, max_nbytes=nbytes + 1) == shape


@pytest.mark.parametrize("prime", [1_000_003, 67_867_967, (1 << 31) - 1])
def test_a_prime_extent_is_kept_whole_and_another_is_cut_in_its_place(prime: int) -> None:
    assert chunking.cut((prime,), 4, max_nbytes=MIB) == (prime,)
    rows, columns = chunking.cut((prime, 4096), 4, max_nbytes=16 * MIB)
    assert rows == prime
    assert 4096 % columns == 0
    assert columns < 4096


def test_a_scalar_and_a_single_element_are_one_part() -> None:
    assert chunking.cut((), 16, max_nbytes=1) == ()
    assert chunking.cut((1, 1), 16, max_nbytes=1) == (1, 1)
    assert chunking.shard_shape((), 8, holders=100) == ()
    assert chunking.chunk_shape((), 8) == ()


@pytest.mark.parametrize("extent", [1 << 34, 10**10, 3 * (1 << 33)])
def test_a_huge_dimension_is_cut_into_files_and_chunks_within_the_bounds(extent: int) -> None:
    shard = chunking.shard_shape((extent,), 4, holders=1)
    chunk = chunking.chunk_shape(shard, 4)
    assert extent % shard[0] == shard[0] % chunk[0] == 0
    assert chunking.MAX_SHARD_NBYTES / 16 < shard[0] * 4 <= chunking.MAX_SHARD_NBYTES
    assert chunking.MAX_CHUNK_NBYTES / 16 < chunk[0] * 4 <= chunking.MAX_CHUNK_NBYTES


@given(shapes(ANY_EXTENT), ITEMSIZES, st.integers(1, 512))
@settings(max_examples=200)
def test_chunks_divide_files_and_files_divide_the_shard_of_a_device(
    cell: tuple[int, ...], itemsize: int, holding: int
) -> None:
    shard = chunking.shard_shape(cell, itemsize, holders=holding)
    chunk = chunking.chunk_shape(shard, itemsize)
    assert divides(shard, cell)
    assert divides(chunk, shard)
    if math.prod(cell) * itemsize <= MIB:
        assert shard == chunk == cell


def test_replicas_share_a_large_shard_in_slices_of_a_mebibyte_at_least() -> None:
    for holding in (1, 2, 8, 64, 1000):
        shard = chunking.shard_shape((4096, 1024), 4, holders=holding)
        slices = 4096 * 1024 // math.prod(shard)
        assert slices >= min(holding, 16)
        assert math.prod(shard) * 4 >= chunking.MIN_SLICE_NBYTES
    assert chunking.shard_shape((256, 1024), 4, holders=64) == (256, 1024)


# --- packing ----------------------------------------------------------------------------------


def check_packed(sizes: Sequence[int]) -> None:
    offsets, packed = pack(np.asarray(sizes, np.int64))
    assert packed is not None
    assert len(offsets) == len(sizes)
    assert (offsets % 64 == 0).all()
    ends = offsets + np.asarray(sizes)
    assert (ends[:-1] <= offsets[1:]).all()
    assert offsets[0] == 0
    assert ends[-1] <= packed.nbytes
    assert (offsets // packed.shard_nbytes == (ends - 1) // packed.shard_nbytes).all()
    assert packed.shard_nbytes <= PACKED_SHARD_NBYTES
    assert packed.chunk_nbytes <= PACKED_CHUNK_NBYTES
    # No file ends early but for want of room for the next shard, and none is empty.
    files = np.unique(offsets // packed.shard_nbytes)
    assert files.tolist() == list(range(-(-packed.nbytes // packed.shard_nbytes)))
    for first in np.flatnonzero(np.diff(offsets // packed.shard_nbytes)):
        room = packed.shard_nbytes - ends[first] % packed.shard_nbytes
        assert room < sizes[first + 1] + 64


@given(
    st.lists(
        st.one_of(st.integers(1, 300), st.integers(1, MIB - 1), st.just(MIB - 1)),
        min_size=1,
        max_size=120,
    )
)
@settings(max_examples=200)
def test_packed_shards_are_aligned_ascending_disjoint_and_within_one_file(
    sizes: list[int],
) -> None:
    check_packed(sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [64] * 3,
        [PACKED_CHUNK_NBYTES - 64, 64],
        [PACKED_CHUNK_NBYTES - 64, 65],
        [MIB - 1] * 16,
        [MIB - 1] * 17,
        [1] * (PACKED_SHARD_NBYTES // 64),
        [1] * (PACKED_SHARD_NBYTES // 64 + 1),
        [MIB - 1] * 15 + [MIB - 64, 65, 1],
    ],
)
def test_packs_that_fill_a_file_to_the_last_byte_are_no_special_case(sizes: list[int]) -> None:
    check_packed(sizes)


def test_nothing_to_pack_makes_no_packed_array() -> None:
    offsets, packed = pack(np.zeros(0, np.int64))
    assert len(offsets) == 0
    assert packed is None


def test_a_few_small_shards_make_a_packed_array_of_about_their_size() -> None:
    _, packed = pack(np.asarray([4, 4, 100]))
    assert packed is not None
    assert packed.nbytes == 64 + 64 + 128


# --- who writes what --------------------------------------------------------------------------


def mesh_of(sizes: Sequence[int], ids: Sequence[int] | None = None) -> Mesh:
    names = ("a", "b", "c")[: len(sizes)]
    return Mesh(
        axis_names=names,
        axis_sizes=tuple(sizes),
        axis_types=("Auto",) * len(sizes),
        device_ids=tuple(range(math.prod(sizes)) if ids is None else ids),
    )


def form(shape: Sequence[int], sharding: Sharding | None, dtype: str = "float32") -> ArrayForm:
    kind: Any = "numpy" if sharding is None else "jax"
    return ArrayForm(kind=kind, dtype=dtype, shape=tuple(shape), sharding=sharding)


def plans_of(
    forms: Sequence[ArrayForm], codes: Sequence[int], process_of: Mapping[int, int]
) -> dict[int, SavePlan]:
    """The plan of every process, each made without the others."""
    paths = [(Key("str", f"leaf{at}"),) for at in range(len(codes))]
    return {
        process: plan_save(paths, forms, codes, process=process, process_of=process_of, codec="raw")
        for process in sorted({0, *process_of.values()})
    }


def tables_of(plans: Mapping[int, SavePlan]) -> list[Table]:
    """The tables that the processes would write, with digests of zeros."""
    tables = []
    for process, plan in plans.items():
        chunks = sum(
            Grid(plan.spec(leaf).shards.box(shard).shape, plan.spec(leaf).chunk_shape).size
            for leaf, shard in zip(plan.array_leaf.tolist(), plan.array_shard.tolist(), strict=True)
        )
        tables.append(
            Table(
                process=process,
                arrays=Rows(
                    leaf=plan.array_leaf, shard=plan.array_shard, digests=bytes(32 * chunks)
                ),
                packed_rows=Rows(
                    leaf=plan.packed_leaf,
                    shard=plan.packed_shard,
                    offset=plan.packed_offset,
                    digests=bytes(32 * len(plan.packed_leaf)),
                ),
                packed=plan.packed,
                per_process={},
            )
        )
    return tables


def check_plans(
    forms: Sequence[ArrayForm], codes: Sequence[int], process_of: Mapping[int, int]
) -> dict[int, SavePlan]:
    plans = plans_of(forms, codes, process_of)
    first = plans[0]
    for plan in plans.values():
        assert (plan.specs, plan.codes, plan.names) == (first.specs, first.codes, first.names)
    written: dict[tuple[int, int], int] = {}
    for process, plan in plans.items():
        rows = [
            *zip(plan.array_leaf.tolist(), plan.array_shard.tolist(), strict=True),
            *zip(plan.packed_leaf.tolist(), plan.packed_shard.tolist(), strict=True),
        ]
        for row in rows:
            assert row not in written, f"{row} is written by {written[row]} and by {process}"
            written[row] = process
        sizes = [
            plan.spec(leaf).shards.box(shard).size * plan.spec(leaf).itemsize
            for leaf, shard in rows
        ]
        assert plan.nbytes == sum(sizes)
    expected = {
        (leaf, shard)
        for leaf, code in enumerate(codes)
        if code >= 0
        for shard in range(first.specs[code].num_shards)
    }
    assert set(written) == expected
    check_holders(first, codes, written, process_of)
    specs = [first.specs[code] if code >= 0 else None for code in codes]
    # The reader's own proof that the tables cover every leaf exactly once.
    ShardIndex(specs, tables_of(plans), digest="sha256")
    return plans


def check_holders(
    plan: SavePlan,
    codes: Sequence[int],
    written: Mapping[tuple[int, int], int],
    process_of: Mapping[int, int],
) -> None:
    """A process can only write what it holds."""
    for (leaf, shard), process in written.items():
        spec: ArraySpec = plan.specs[codes[leaf]]
        cells = Grid(spec.shape, cell_of(spec.sharding, spec.shape))
        box = spec.shards.box(shard)
        (cell,) = cells.overlapping(box)
        assert cells.box(cell).intersect(box) == box
        who = {process_of[device] for device in holders(spec.sharding, spec.shape)[cell]} or {0}
        assert process in who


EXTENTS = st.one_of(st.sampled_from([0, 1, 3, 7, 16]), st.sampled_from([512, 1009, 1200]))
SPECS: list[Any] = [(), (("a",),), ((), ("b",)), (("b",), ("a",)), (("a", "b"),), (("b", "a"),)]


@st.composite
def worlds(
    draw: st.DrawFn, extents: st.SearchStrategy[int] = EXTENTS
) -> tuple[list[ArrayForm], list[int], dict[int, int]]:
    """Arrays on meshes of some devices, and devices that belong to processes in any way."""
    count = draw(st.sampled_from([1, 2, 4, 6, 8, 16]))
    processes = draw(st.integers(1, min(count, 6)))
    process_of = {device: device * processes // count for device in range(count)}
    if draw(st.booleans()):
        process_of = {device: draw(st.integers(0, processes - 1)) for device in range(count)}
    forms = draw(st.lists(forms_on(count, extents), min_size=1, max_size=4))
    codes = draw(st.lists(st.integers(-2, len(forms) - 1), max_size=8))
    return forms, codes, process_of


@st.composite
def forms_on(draw: st.DrawFn, count: int, extents: st.SearchStrategy[int]) -> ArrayForm:
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int8", "complex128"]))
    kind = draw(st.sampled_from(["mesh", "mesh", "mesh", "single", "host"]))
    shape = draw(st.lists(extents, max_size=3))
    if kind == "host":
        return form(shape, None, dtype)
    if kind == "single":
        return form(shape, Single(device_id=draw(st.integers(0, count - 1))), dtype)
    fitting = [(a, b) for a in (1, 2, 3, 4, 8) for b in (1, 2, 4) if a * b <= count]
    sizes = draw(st.sampled_from(fitting))
    mesh = mesh_of(sizes, draw(st.permutations(range(count)))[: math.prod(sizes)])
    spec = draw(st.sampled_from(SPECS))[: len(shape)]
    while spec and not spec[-1]:
        spec = spec[:-1]
    entries = spec + ((),) * (len(shape) - len(spec))
    cut = [extent * mesh.size_of(axes) for extent, axes in zip(shape, entries, strict=True)]
    return form(cut, Named(mesh=mesh, spec=spec), dtype)


@given(worlds())
@settings(max_examples=200)
def test_every_shard_is_written_by_exactly_one_process_that_holds_it(
    world: tuple[list[ArrayForm], list[int], dict[int, int]],
) -> None:
    check_plans(*world)


@given(worlds(st.integers(0, 8)))
def test_shards_are_written_once_however_small_the_files_and_chunks(
    world: tuple[list[ArrayForm], list[int], dict[int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "MAX_SHARD_NBYTES", 256)
        patch.setattr(chunking, "MAX_CHUNK_NBYTES", 64)
        patch.setattr(chunking, "PACK_BELOW_NBYTES", 32)
        patch.setattr(chunking, "MIN_SLICE_NBYTES", 16)
        check_plans(*world)


def transformer(mesh: Mesh, spec: Any) -> tuple[list[ArrayForm], list[int]]:
    """The large arrays of a language model with Adam moments, one form for each shape."""
    shapes_of_layer = [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)]
    forms = [form(s, Named(mesh=mesh, spec=spec)) for s in [(50_304, 1024), *shapes_of_layer]]
    return forms, [0] * 3 + [1, 2, 3, 4] * 3 * 12


@pytest.mark.parametrize("processes", [2, 3, 8, 32])
@pytest.mark.parametrize("spec", [(), ((), ("b",))])
def test_replicas_share_the_writing_evenly(processes: int, spec: Any) -> None:
    devices = 4 * processes
    forms, codes = transformer(mesh_of((processes, 4)), spec)
    plans = check_plans(forms, codes, {device: device // 4 for device in range(devices)})
    load = [plan.nbytes for plan in plans.values()]
    assert len(load) == processes
    assert max(load) <= 1.2 * sum(load) / processes


def test_two_groups_of_replicas_share_each_its_own_shards_evenly() -> None:
    forms, codes = transformer(mesh_of((2, 8)), (("a",),))
    plans = check_plans(forms, codes, {device: device // 2 for device in range(16)})
    load = [plan.nbytes for plan in plans.values()]
    assert max(load) <= 1.2 * sum(load) / len(load)


def test_a_replicated_array_is_written_once_and_not_by_every_replica() -> None:
    mesh = mesh_of((8,))
    forms = [form((4096, 4096), Named(mesh=mesh, spec=()))]
    plans = check_plans(forms, [0], {device: device for device in range(8)})
    assert sum(plan.nbytes for plan in plans.values()) == 4096 * 4096 * 4
    assert all(plan.nbytes for plan in plans.values())


def test_equal_requests_make_equal_plans() -> None:
    forms, codes = transformer(mesh_of((8,)), ())
    process_of = {device: device // 2 for device in range(8)}
    first, second = (plans_of(forms, codes, process_of) for _ in range(2))
    for a, b in zip(first.values(), second.values(), strict=True):
        for name in ("array_leaf", "array_shard", "packed_leaf", "packed_shard", "packed_offset"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def calls_of(function: Callable[[], object]) -> int:
    """How many functions, Python's and C's, a call makes: a measure without a clock."""
    count = 0

    def tally(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tally)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def planning(leaves: int, processes: int, shape: tuple[int, ...], spec: Any) -> int:
    """The cost of one plan."""
    mesh = mesh_of((processes,))
    forms = [form(shape, Named(mesh=mesh, spec=spec)), form((8,), Named(mesh=mesh, spec=()))]
    paths = [(Key("str", f"leaf{at}"),) for at in range(2 * leaves)]
    process_of = {device: device for device in range(processes)}
    codes = [0] * leaves + [1] * leaves

    def plan() -> None:
        plan_save(paths, forms, codes, process=0, process_of=process_of, codec="raw")

    plan()  # what is cached is cached
    return calls_of(plan)


@pytest.mark.parametrize("spec", [(), (("a",),)])
def test_the_cost_of_a_plan_grows_with_the_leaves_no_faster_than_they_do(spec: Any) -> None:
    few, many = (planning(n, 8, (4096, 4096), spec) for n in (50, 400))
    assert many <= 8.5 * few


@pytest.mark.parametrize("spec", [(), (("a",),)])
def test_the_cost_of_a_plan_grows_with_the_processes_no_faster_than_they_do(spec: Any) -> None:
    few, many = (planning(3, n, (8192, 8192), spec) for n in (32, 256))
    assert many <= 8.5 * few
