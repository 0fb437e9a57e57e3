"""Plans of loads: each chunk that is needed is read once, and fills every box exactly once."""

import itertools
import math
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Box, Grid, whole
from pytree_ckpt.format.shardings import Single
from pytree_ckpt.format.tables import Packed
from pytree_ckpt.jaxio.shardings import box_of
from pytree_ckpt.plan.loading import ChunkRead, ReadPlan, plan_reads
from pytree_ckpt.plan.saving import pack
from pytree_ckpt.plan.windows import PackedShard, windows

P = PartitionSpec


def spec_of(
    shape: Sequence[int], shard: Sequence[int], chunk: Sequence[int], storage: str = "array"
) -> ArraySpec:
    return ArraySpec(
        kind="jax",
        dtype="int32",
        shape=tuple(shape),
        sharding=Single(device_id=0),
        storage="empty" if 0 in shape else storage,  # type: ignore[arg-type]
        shard_shape=tuple(shard),
        chunk_shape=tuple(chunk),
    )


@st.composite
def stored_arrays(draw: st.DrawFn) -> ArraySpec:
    """An array of any number of shards, the last ones ragged, each of any number of chunks."""
    shape, shard, chunk = [], [], []
    for _ in range(draw(st.integers(0, 3))):
        inner = draw(st.integers(1, 3))
        outer = inner * draw(st.integers(1, 3))
        extent = draw(st.one_of(st.just(outer * draw(st.integers(1, 3))), st.integers(outer, 12)))
        shape.append(extent)
        shard.append(outer)
        chunk.append(inner)
    return spec_of(shape, shard, chunk)


@st.composite
def requests(draw: st.DrawFn) -> tuple[ArraySpec, list[Box]]:
    """An array, and distinct boxes of it that may overlap, touch, and be empty."""
    spec = draw(stored_arrays())
    boxes = []
    for _ in range(draw(st.integers(1, 5))):
        pairs = [sorted(draw(st.tuples(*[st.integers(0, extent)] * 2))) for extent in spec.shape]
        boxes.append(Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs)))
    return spec, list(dict.fromkeys(boxes))


def chunk_at(spec: ArraySpec, shard_number: int, chunk_number: int) -> Box:
    """The elements of a chunk, worked out from its numbers alone."""
    shard = spec.shards.box(shard_number)
    inner = Grid(shard.shape, spec.chunk_shape).box(chunk_number)
    return Box(
        tuple(a + o for a, o in zip(inner.start, shard.start, strict=True)),
        tuple(b + o for b, o in zip(inner.stop, shard.start, strict=True)),
    )


def reads_of(plan: ReadPlan) -> list[ChunkRead]:
    return [read for unit in plan.units for read in unit.reads]


def execute(plan: ReadPlan, array: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Fill the boxes as the plan says, and count how often each element was filled."""
    filled = [np.full(box.shape, -1, array.dtype) for box in plan.boxes]
    times = [np.zeros(box.shape, int) for box in plan.boxes]
    for unit in plan.units:
        for read in unit.reads:
            assert read.box == chunk_at(plan.spec, read.shard, read.chunk)
            chunk = array[read.box.slices()]
            if read.into is not None:
                assert read.into in unit.boxes
                assert filled[read.into][read.place].flags.c_contiguous
                filled[read.into][read.place] = chunk
                times[read.into][read.place] += 1
            for copy in read.copies:
                assert copy.box in unit.boxes
                filled[copy.box][copy.place] = chunk[copy.source]
                times[copy.box][copy.place] += 1
    return filled, times


@given(requests())
@settings(max_examples=300)
def test_every_wanted_box_is_filled_exactly_once_with_its_own_elements(
    request_: tuple[ArraySpec, list[Box]],
) -> None:
    spec, boxes = request_
    array = np.arange(math.prod(spec.shape), dtype=np.int32).reshape(spec.shape)
    plan = plan_reads(spec, boxes)
    assert plan.boxes == tuple(boxes)
    filled, times = execute(plan, array)
    for box, content, count in zip(boxes, filled, times, strict=True):
        np.testing.assert_array_equal(content, array[box.slices()])
        assert (count == 1).all()


@given(requests())
@settings(max_examples=200)
def test_each_chunk_that_is_needed_is_read_once_and_no_other_is(
    request_: tuple[ArraySpec, list[Box]],
) -> None:
    spec, boxes = request_
    reads = reads_of(plan_reads(spec, boxes))
    numbers = [(read.shard, read.chunk) for read in reads]
    assert len(set(numbers)) == len(numbers)
    needed = set()
    for shard in range(spec.num_shards):
        count = Grid(spec.shards.box(shard).shape, spec.chunk_shape).size
        for chunk in range(count):
            elements = chunk_at(spec, shard, chunk)
            if any(box.size and (not box.shape or elements.intersect(box)) for box in boxes):
                needed.add((shard, chunk))
    assert set(numbers) == needed


@given(requests())
def test_every_box_is_in_one_unit_and_units_share_no_chunk(
    request_: tuple[ArraySpec, list[Box]],
) -> None:
    spec, boxes = request_
    plan = plan_reads(spec, boxes)
    members = [number for unit in plan.units for number in unit.boxes]
    assert sorted(members) == list(range(len(boxes)))
    for unit in plan.units:
        is_one_chunk = (
            len(unit.boxes) == 1
            and len(unit.reads) == 1
            and unit.reads[0].box == boxes[unit.boxes[0]]
        )
        assert unit.is_direct == is_one_chunk
        # A unit is as small as can be: its boxes hang together by the chunks they share.
        linked = {unit.boxes[0]}
        for _ in unit.boxes:
            for read in unit.reads:
                users = {copy.box for copy in read.copies} | {read.into} - {None}
                if users & linked:
                    linked |= users
        assert linked == set(unit.boxes)


@given(requests())
def test_the_bytes_of_a_plan_are_those_of_its_boxes_and_of_its_chunks(
    request_: tuple[ArraySpec, list[Box]],
) -> None:
    spec, boxes = request_
    plan = plan_reads(spec, boxes)
    assert plan.nbytes_needed == sum(4 * box.size for box in boxes)
    assert plan.nbytes_read == sum(
        4 * chunk_at(spec, read.shard, read.chunk).size for read in reads_of(plan)
    )


def test_the_layout_that_was_saved_is_read_into_place_without_a_copy() -> None:
    spec = spec_of((8, 8), (2, 8), (1, 8))
    boxes = list(spec.shards.boxes())
    plan = plan_reads(spec, boxes)
    assert len(plan.units) == len(boxes)
    assert all(read.into is not None and not read.copies for read in reads_of(plan))
    one_chunk_each = plan_reads(spec_of((8, 8), (2, 8), (2, 8)), boxes)
    assert all(unit.is_direct for unit in one_chunk_each.units)


def test_rows_to_columns_read_every_chunk_once_for_all_columns() -> None:
    spec = spec_of((8, 8), (1, 8), (1, 8))
    columns = list(Grid((8, 8), (8, 1)).boxes())
    plan = plan_reads(spec, columns)
    assert len(plan.units) == 1
    assert plan.nbytes_read == plan.nbytes_needed == 8 * 8 * 4
    assert all(len(read.copies) == 8 for read in reads_of(plan))


def test_a_part_of_the_array_reads_only_the_chunks_under_it() -> None:
    spec = spec_of((64, 8), (16, 8), (4, 8))
    plan = plan_reads(spec, [Box((17, 2), (21, 4))])
    assert [(read.shard, read.chunk) for read in reads_of(plan)] == [(1, 0), (1, 1)]
    assert plan.nbytes_read == 2 * 4 * 8 * 4


def test_arrays_without_elements_fill_their_boxes_without_a_read() -> None:
    spec = spec_of((0, 4), (1, 4), (1, 4))
    plan = plan_reads(spec, [Box((0, 0), (0, 2)), Box((0, 2), (0, 4))])
    assert reads_of(plan) == []
    assert sorted(number for unit in plan.units for number in unit.boxes) == [0, 1]


def test_an_empty_box_of_an_array_with_elements_needs_no_chunk() -> None:
    plan = plan_reads(spec_of((4, 4), (2, 4), (2, 4)), [Box((2, 0), (2, 4))])
    assert reads_of(plan) == []
    assert [unit.boxes for unit in plan.units] == [(0,)]


def test_a_scalar_is_one_read() -> None:
    plan = plan_reads(spec_of((), (), ()), [whole(())])
    (read,) = reads_of(plan)
    assert (read.shard, read.chunk, read.box) == (0, 0, whole(()))


def test_the_boxes_of_every_device_are_filled_whatever_the_two_layouts(
    mesh_4x2: jax.sharding.Mesh, mesh_2x4: jax.sharding.Mesh
) -> None:
    shape = (8, 8)
    array = np.arange(64, dtype=np.int32).reshape(shape)
    specs = [P(), P("data"), P(None, "data"), P("data", "model"), P(("model", "data"))]
    layouts = [NamedSharding(m, s) for m in (mesh_4x2, mesh_2x4) for s in specs]
    for saved, wanted in itertools.product(layouts, repeat=2):
        cell = saved.shard_shape(shape)
        spec = spec_of(shape, cell, cell)
        index_map = wanted.devices_indices_map(shape)
        boxes = list(dict.fromkeys(box_of(index, shape) for index in index_map.values()))
        plan = plan_reads(spec, boxes)
        filled, _ = execute(plan, array)
        for device, index in index_map.items():
            content = filled[boxes.index(box_of(index, shape))]
            np.testing.assert_array_equal(content, array[index], err_msg=str(device))
        assert plan.nbytes_read == array.nbytes


# --- windows over packed arrays ---------------------------------------------------------------


def packed_shards(
    sizes: Sequence[int], *, process: int = 0, keep: Sequence[bool] | None = None
) -> tuple[list[PackedShard], Packed]:
    """Shards as a save packs them, those that are wanted."""
    offsets, packed = pack(np.asarray(sizes, np.int64))
    assert packed is not None
    (read,) = reads_of(plan_reads(spec_of((), (), ()), [whole(())]))
    shards = [
        PackedShard(
            process=process,
            offset=int(offset),
            nbytes=size,
            digest=b"",
            request=number,
            unit=0,
            read=read,
        )
        for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    ]
    wanted = [s for at, s in enumerate(shards) if keep is None or keep[at]]
    return wanted, packed


SIZES = st.lists(
    st.one_of(st.integers(1, 500), st.integers(1, (1 << 20) - 1)), min_size=1, max_size=60
)


@st.composite
def wanted_shards(draw: st.DrawFn) -> tuple[list[PackedShard], dict[int, Packed]]:
    """Some of the packed shards of some processes, in any order."""
    shards: list[PackedShard] = []
    extents = {}
    for process in draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)):
        sizes = draw(SIZES)
        keep = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
        found, extents[process] = packed_shards(sizes, process=process, keep=keep)
        shards += found
    return draw(st.permutations(shards)), extents


@given(wanted_shards())
@settings(max_examples=200)
def test_no_chunk_of_a_packed_array_is_in_two_windows(
    case: tuple[list[PackedShard], dict[int, Packed]],
) -> None:
    shards, extents = case
    seen: set[tuple[int, int]] = set()
    for window in windows(shards, extents):
        packed = extents[window.process]
        assert window.start % packed.chunk_nbytes == window.stop % packed.chunk_nbytes == 0
        assert 0 <= window.start < window.stop <= packed.nbytes
        for chunk in range(window.start // packed.chunk_nbytes, window.stop // packed.chunk_nbytes):
            assert (window.process, chunk) not in seen
            seen.add((window.process, chunk))


@given(wanted_shards())
@settings(max_examples=200)
def test_every_wanted_shard_is_in_one_window_and_no_window_is_in_two_files(
    case: tuple[list[PackedShard], dict[int, Packed]],
) -> None:
    shards, extents = case
    covered: list[PackedShard] = []
    for window in windows(shards, extents):
        packed = extents[window.process]
        assert window.start // packed.shard_nbytes == (window.stop - 1) // packed.shard_nbytes
        for shard in window.shards:
            assert shard.process == window.process
            assert window.start <= shard.offset
            assert shard.offset + shard.nbytes <= window.stop
        covered += window.shards
    assert sorted(map(id, covered)) == sorted(map(id, shards))


@given(wanted_shards())
@settings(max_examples=50)
def test_a_chunk_without_a_wanted_shard_is_in_no_window(
    case: tuple[list[PackedShard], dict[int, Packed]],
) -> None:
    shards, extents = case
    for window in windows(shards, extents):
        chunk = extents[window.process].chunk_nbytes
        needed = set()
        for shard in window.shards:
            last = shard.offset + shard.nbytes - 1
            needed |= set(range(shard.offset // chunk, last // chunk + 1))
        assert needed == set(range(window.start // chunk, window.stop // chunk))


def test_a_thousand_small_shards_are_one_window() -> None:
    shards, packed = packed_shards([100] * 1000)
    (window,) = windows(shards, {0: packed})
    assert (window.start, window.stop) == (0, packed.nbytes)


def test_two_far_shards_are_two_windows_of_a_chunk_each() -> None:
    sizes = [1000] + [1 << 19] * 20 + [1000]
    shards, packed = packed_shards(sizes, keep=[True] + [False] * 20 + [True])
    found = list(windows(shards, {0: packed}))
    assert [w.stop - w.start for w in found] == [packed.chunk_nbytes] * 2


def test_neighbouring_chunks_are_one_window_and_files_are_not() -> None:
    for sizes in ([300_000] * 200, [1 << 19] * 128):
        shards, packed = packed_shards(sizes)
        found = list(windows(shards, {0: packed}))
        assert len(found) == -(-packed.nbytes // packed.shard_nbytes) == 4
        for window in found:
            assert window.start // packed.shard_nbytes == (window.stop - 1) // packed.shard_nbytes


def test_a_single_chunk_that_is_not_wanted_is_left_out() -> None:
    mib = 1 << 20
    shards, packed = packed_shards([mib - 64] * 4, keep=[True, False, False, True])
    found = list(windows(shards, {0: packed}))
    assert [(w.start // mib, w.stop // mib) for w in found] == [(0, 1), (2, 4)]


def test_nothing_wanted_makes_no_window() -> None:
    assert list(windows([], {})) == []


@pytest.mark.parametrize("count", [1000, 4000])
def test_the_plan_of_a_load_has_one_read_for_each_chunk_however_many_there_are(count: int) -> None:
    spec = spec_of((count, 2), (1, 2), (1, 2))
    plan = plan_reads(spec, list(spec.shards.boxes()))
    assert len(reads_of(plan)) == len(plan.units) == count


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


def test_the_cost_of_a_plan_grows_with_the_shards_no_faster_than_they_do() -> None:
    def planning(count: int) -> int:
        spec = spec_of((count, 2), (1, 2), (1, 2))
        boxes = list(spec.shards.boxes())
        return calls_of(lambda: plan_reads(spec, boxes))

    assert planning(1600) <= 8.5 * planning(200)


def test_a_part_of_a_vast_array_is_planned_without_looking_at_the_rest() -> None:
    def planning(count: int) -> int:
        spec = spec_of((count, 2), (1, 2), (1, 2))
        return calls_of(lambda: plan_reads(spec, [Box((count // 2, 0), (count // 2 + 3, 1))]))

    assert planning(1 << 40) == planning(1 << 10)
