"""Which device holds which slice of an array, as blocks to draw: of the array, and of the mesh."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Grid, Shape
from pytree_ckpt.format.shardings import Mesh, Named, cell_of, holders

MAX_SIDE = 16
"""Most blocks that are drawn in a row or a column."""
MAX_PANELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A slice, or a device. Blocks of one colour belong together: a device holds that slice."""

    label: str
    detail: str
    colour: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A plane of blocks; `title` says which plane of more than one."""

    title: str
    rows: tuple[tuple[Block, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The picture of an array on its devices.

    Attributes:
        words: In a sentence.
        slices: The array, cut; each block names the devices that hold it.
        devices: The mesh; each block is a device. Empty where there is no mesh.
        note: What is not drawn.
    """

    words: str
    slices: tuple[Panel, ...]
    devices: tuple[Panel, ...]
    note: str

    @property
    def drawn(self) -> tuple[tuple[str, tuple[Panel, ...]], ...]:
        """All planes, with what they show."""
        return (
            ("the array, and the devices that hold each part", self.slices),
            ("the devices, in the colour of what they hold", self.devices),
        )


def layout_of(spec: ArraySpec) -> Layout:
    """The layout of an array.

    Example:
        >>> from pytree_ckpt.format.shardings import Mesh
        >>> mesh = Mesh(
        ...     axis_names=("x", "y"),
        ...     axis_sizes=(2, 2),
        ...     axis_types=("Auto",) * 2,
        ...     device_ids=(0, 1, 2, 3),
        ... )
        >>> spec = ArraySpec(
        ...     kind="jax",
        ...     dtype="int8",
        ...     shape=(4, 4),
        ...     sharding=Named(mesh=mesh, spec=((), ("y",))),
        ...     storage="packed",
        ...     shard_shape=(4, 2),
        ...     chunk_shape=(4, 2),
        ... )
        >>> layout = layout_of(spec)
        >>> [[block.label for block in row] for row in layout.slices[0].rows]
        [['0 2', '1 3']]
        >>> layout.words
        'each device holds 4 × 2 of 4 × 4; dimension 1 is cut in 2 by y'
    """
    sharding = spec.sharding
    if sharding is None:
        return Layout(words="on the host", slices=(), devices=(), note="")
    held = holders(sharding, spec.shape)
    grid = Grid(spec.shape, cell_of(sharding, spec.shape))
    colour = {cell: number for number, cell in enumerate(sorted(held))}

    def slice_block(position: Shape) -> Block:
        cell = grid.number(position)
        return Block(
            label=devices_text(held.get(cell, [])),
            detail=str(grid.box_at(position)),
            colour=colour.get(cell, 0),
        )

    counts = tuple(max(count, 1) for count in grid.counts)
    slices, is_cut = _panels(counts, lambda d, n: f"dimension {d}, part {n}", slice_block)
    devices: tuple[Panel, ...] = ()
    if isinstance(sharding, Named):
        devices, more = _devices(sharding.mesh, held, colour, grid)
        is_cut = is_cut or more
    note = f"only the first {MAX_SIDE} in a row and in a column are drawn" if is_cut else ""
    return Layout(words=_words(spec, grid), slices=slices, devices=devices, note=note)


def _devices(
    mesh: Mesh, held: Mapping[int, Sequence[int]], colour: Mapping[int, int], grid: Grid
) -> tuple[tuple[Panel, ...], bool]:
    """The mesh, each device in the colour of the slice that it holds."""
    cell_of_device = {device: cell for cell, ids in held.items() for device in ids}
    places = Grid(mesh.axis_sizes, (1,) * len(mesh.axis_sizes))

    def block(position: Shape) -> Block:
        device = mesh.device_ids[places.number(position)]
        cell = cell_of_device[device]
        detail = str(grid.box(cell)) if grid.size else ""
        return Block(label=str(device), detail=detail, colour=colour[cell])

    return _panels(mesh.axis_sizes, lambda d, n: f"{mesh.axis_names[d]} = {n}", block)


def devices_text(ids: Sequence[int]) -> str:
    """Device ids, runs and long lists made short.

    Example:
        >>> devices_text([0, 1, 2, 3, 8]), devices_text(range(0, 64, 2))
        ('0–3 8', '0 2 4 … 62')
    """
    runs: list[list[int]] = []
    for device in ids:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run)
    return " ".join(texts if len(texts) <= 4 else [*texts[:3], "…", texts[-1]])


def shape_text(shape: Shape) -> str:
    """A shape for people.

    Example:
        >>> shape_text((3, 4)), shape_text(())
        ('3 × 4', 'one element')
    """
    return " × ".join(map(str, shape)) or "one element"


def _words(spec: ArraySpec, grid: Grid) -> str:
    sharding, shape = spec.sharding, spec.shape
    is_cut = any(count > 1 for count in grid.counts)
    part = shape_text(grid.cell) if is_cut else "all"
    words = [f"each device holds {part} of {shape_text(shape)}"]
    if isinstance(sharding, Named):
        for d, entry in enumerate(sharding.spec):
            if (size := sharding.mesh.size_of(entry)) > 1:
                words.append(f"dimension {d} is cut in {size} by {', '.join(entry)}")
    if sharding is not None and sharding.memory_kind:
        words.append(f"in {sharding.memory_kind}")
    return "; ".join(words)


def _panels(
    counts: Shape, title: Callable[[int, int], str], block: Callable[[Shape], Block]
) -> tuple[tuple[Panel, ...], bool]:
    """Planes of the last two dimensions that are cut, and whether some of it is left out."""
    cut = [d for d, count in enumerate(counts) if count > 1]
    outer, (row, column) = cut[:-2], [None, None, *cut][-2:]
    planes = itertools.product(*(range(counts[d]) for d in outer))
    panels = [
        Panel(
            title=", ".join(map(title, outer, plane)),
            rows=tuple(
                tuple(
                    block(_position(len(counts), (*outer, row, column), (*plane, y, x)))
                    for x in _shown(counts, column)
                )
                for y in _shown(counts, row)
            ),
        )
        for plane in itertools.islice(planes, MAX_PANELS)
    ]
    drawn = sum(len(line) for panel in panels for line in panel.rows)
    return tuple(panels), drawn < math.prod(counts)


def _position(ndim: int, dimensions: Sequence[int | None], at: Sequence[int]) -> Shape:
    """A position that is 0 but in some dimensions."""
    found = [0] * ndim
    for dimension, value in zip(dimensions, at, strict=True):
        if dimension is not None:
            found[dimension] = value
    return tuple(found)


def _shown(counts: Shape, dimension: int | None) -> range:
    return range(1 if dimension is None else min(counts[dimension], MAX_SIDE))
