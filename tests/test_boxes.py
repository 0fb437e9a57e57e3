"""Boxes and grids against the index arithmetic of numpy."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytree_ckpt.format.boxes import Box, Grid, is_contiguous, whole

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
FULL_SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def cells_of(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*(st.integers(1, max(extent, 1) + 2) for extent in shape))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box inside an array, empty ones included."""
    pairs = [sorted(draw(st.tuples(*[st.integers(0, extent)] * 2))) for extent in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@st.composite
def shape_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(FULL_SHAPES)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


@st.composite
def grids(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] = SHAPES) -> Grid:
    shape = draw(shapes)
    return Grid(shape, draw(cells_of(shape)))


def marked(shape: tuple[int, ...], box: Box) -> np.ndarray:
    """Which elements of an array are in a box."""
    mask = np.zeros(shape, bool)
    mask[box.slices()] = True
    return mask


@given(shape_and_boxes())
def test_a_box_has_the_shape_and_size_of_the_slice_it_means(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    shape, box, _ = case
    taken = np.zeros(shape)[box.slices()]
    assert box.shape == taken.shape
    assert box.size == taken.size


@given(shape_and_boxes())
def test_an_intersection_is_the_elements_that_are_in_both(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    shape, a, b = case
    both = marked(shape, a) & marked(shape, b)
    common = a.intersect(b)
    assert common == b.intersect(a)
    if common is None:
        assert not both.any()
    else:
        assert common.size > 0
        np.testing.assert_array_equal(marked(shape, common), both)


@given(shape_and_boxes())
def test_slices_from_an_origin_index_an_array_that_begins_there(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    shape, a, b = case
    array = np.arange(math.prod(shape)).reshape(shape)
    common = a.intersect(b)
    if common is not None:
        part = array[a.slices()]
        np.testing.assert_array_equal(part[common.slices(a.start)], array[common.slices()])


def test_boxes_that_only_touch_have_nothing_in_common() -> None:
    assert Box((0, 0), (2, 4)).intersect(Box((2, 0), (4, 4))) is None
    assert Box((0,), (3,)).intersect(Box((2,), (5,))) == Box((2,), (3,))
    assert Box((), ()).intersect(Box((), ())) == Box((), ())


def test_a_box_reads_as_the_slices_that_a_person_would_write() -> None:
    assert str(Box((0, 4), (2, 8))) == "[0:2, 4:8]"
    assert str(Box((), ())) == "[]"


@given(FULL_SHAPES.flatmap(lambda s: st.tuples(st.just(s), boxes_in(s))))
def test_is_contiguous_agrees_with_the_flags_of_a_numpy_slice(
    case: tuple[tuple[int, ...], Box],
) -> None:
    shape, box = case
    if box.size == 0:
        return
    part = np.zeros(shape, np.int8)[box.slices()]
    assert is_contiguous(box.shape, shape) == part.flags.c_contiguous


def test_is_contiguous_is_right_for_every_box_of_a_small_array() -> None:
    for shape in itertools.product((1, 2, 3), repeat=3):
        array = np.zeros(shape, np.int8)
        for inner in itertools.product(*(range(1, extent + 1) for extent in shape)):
            part = array[tuple(map(slice, inner))]
            assert is_contiguous(inner, shape) == part.flags.c_contiguous, (inner, shape)


@given(grids())
def test_the_cells_of_a_grid_cover_every_element_exactly_once(grid: Grid) -> None:
    times = np.zeros(grid.shape, int)
    for box in grid.boxes():
        times[box.slices()] += 1
        assert box.size > 0
    assert (times == 1).all()
    assert sum(1 for _ in grid.boxes()) == grid.size == math.prod(grid.counts)


@given(grids())
def test_cells_are_numbered_in_c_order(grid: Grid) -> None:
    for number, box in enumerate(grid.boxes()):
        position = grid.position(number)
        assert position == tuple(map(int, np.unravel_index(number, grid.counts)))
        assert grid.box(number) == grid.box_at(position) == box
        assert box.start == tuple(p * c for p, c in zip(position, grid.cell, strict=True))


@given(grids().flatmap(lambda g: st.tuples(st.just(g), boxes_in(g.shape))))
def test_overlapping_names_exactly_the_cells_that_share_an_element(
    case: tuple[Grid, Box],
) -> None:
    grid, box = case
    wanted = [at for at, cell in enumerate(grid.boxes()) if box.size and cell.intersect(box)]
    if not grid.shape:
        wanted = [0]
    assert list(grid.overlapping(box)) == wanted


def test_overlapping_costs_only_the_cells_it_names() -> None:
    vast = Grid((1 << 40, 1 << 40), (1, 1))
    found = list(vast.overlapping(Box((5, 7), (6, 9))))
    assert found == [5 * (1 << 40) + 7, 5 * (1 << 40) + 8]
    assert vast.position(found[1]) == (5, 8)


def test_a_scalar_is_a_grid_of_one_cell() -> None:
    grid = Grid((), ())
    assert (grid.counts, grid.size) == ((), 1)
    assert list(grid.boxes()) == [whole(())] == [grid.box(0)]
    assert list(grid.overlapping(whole(()))) == [0]


def test_an_empty_array_is_a_grid_without_cells() -> None:
    grid = Grid((4, 0), (2, 1))
    assert grid.size == 0
    assert list(grid.boxes()) == []
    assert list(grid.overlapping(whole((4, 0)))) == []


@pytest.mark.parametrize(
    ("shape", "cell"),
    [((4,), (2, 2)), ((4, 4), (2,)), ((4,), (0,)), ((4,), (-1,)), ((-1,), (1,))],
)
def test_a_grid_that_makes_no_sense_is_refused(
    shape: tuple[int, ...], cell: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="grid"):
        Grid(shape, cell)
