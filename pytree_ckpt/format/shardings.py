"""Shardings as plain data: which device holds which box of an array.

The rule is JAX's: a dimension is cut into as many equal parts as the product of the sizes of the
mesh axes in its entry of the partition spec, the first axis being the slowest.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytree_ckpt.format.boxes import Box, Grid, Shape

MAX_DEVICES = 1 << 20
"""Most devices of a mesh that is made of its sizes alone."""

SpecEntry = tuple[str, ...]
Spec = tuple[SpecEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A named grid of devices. `device_ids` are in C order of the grid."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    axis_types: tuple[str, ...]
    device_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.axis_names) == len(self.axis_sizes) == len(self.axis_types):
            raise ValueError("a mesh needs one size and one type for each axis")
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"mesh axes {self.axis_names} are not distinct")
        if any(size < 1 for size in self.axis_sizes):
            raise ValueError(f"mesh sizes {self.axis_sizes} are not positive")
        if len(self.device_ids) != math.prod(self.axis_sizes):
            raise ValueError(f"{len(self.device_ids)} devices in a mesh of {self.axis_sizes}")
        if len(set(self.device_ids)) != len(self.device_ids):
            raise ValueError("a mesh has a device twice")

    @staticmethod
    def first_ids(sizes: Sequence[int]) -> tuple[int, ...]:
        """Ids for the devices of a mesh of which only the sizes are known.

        Raises:
            ValueError: They are more than any machine has, and each would be listed.
        """
        count = math.prod(sizes)
        if count > MAX_DEVICES:
            raise ValueError(f"a mesh of {count} devices, more than {MAX_DEVICES}")
        return tuple(range(count))

    def size_of(self, axes: SpecEntry) -> int:
        sizes = dict(zip(self.axis_names, self.axis_sizes, strict=True))
        return math.prod(sizes[axis] for axis in axes)

    def same_layout(self, other: "Mesh") -> bool:
        """Equal axes and sizes; device order and axis types do not count."""
        return (self.axis_names, self.axis_sizes) == (other.axis_names, other.axis_sizes)

    def __str__(self) -> str:
        pairs = zip(self.axis_names, self.axis_sizes, strict=True)
        return f"mesh({', '.join(f'{name}={size}' for name, size in pairs)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """`jax.sharding.NamedSharding`. `memory_kind` is None for the default of the device."""

    mesh: Mesh
    spec: Spec
    memory_kind: str | None = None

    def __post_init__(self) -> None:
        used = [axis for entry in self.spec for axis in entry]
        if len(set(used)) != len(used) or not set(used) <= set(self.mesh.axis_names):
            raise ValueError(f"spec {spec_text(self.spec)} does not fit {self.mesh}")

    def __str__(self) -> str:
        return f"{spec_text(self.spec)} on {self.mesh}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """All of an array on one device."""

    device_id: int
    memory_kind: str | None = None

    def __str__(self) -> str:
        return "single device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """A sharding of another class, known only by the regular grid of boxes it makes.

    Device `device_ids[i]` holds cell number `cells[i]` of the grid of `cell`.
    """

    name: str
    cell: Shape
    cells: tuple[int, ...]
    device_ids: tuple[int, ...]
    memory_kind: str | None = None

    def __post_init__(self) -> None:
        if len(self.cells) != len(self.device_ids) or not self.device_ids:
            raise ValueError("a sharding needs one cell for each device")

    def __str__(self) -> str:
        return f"{self.name} with shards of {self.cell} on {len(self.device_ids)} devices"


Sharding = Named | Single | Tiled


def spec_text(spec: Spec) -> str:
    """A partition spec as a person writes it.

    Example:
        >>> spec_text((("data",), (), ("x", "y")))
        "P('data', None, ('x', 'y'))"
    """
    parts = ["None" if not e else repr(e[0]) if len(e) == 1 else repr(tuple(e)) for e in spec]
    return f"P({', '.join(parts)})"


def _stripped(spec: Spec) -> Spec:
    """A spec without the empty entries at its end, which mean nothing."""
    count = len(spec)
    while count and not spec[count - 1]:
        count -= 1
    return spec[:count]


def same_layout(a: Sharding, b: Sharding) -> bool:
    """Whether two shardings are one layout; memory kinds are compared apart."""
    match a, b:
        case Named(), Named():
            return a.mesh.same_layout(b.mesh) and _stripped(a.spec) == _stripped(b.spec)
        case Single(), Single():
            return True
        case Tiled(), Tiled():
            return (a.name, a.cell, a.cells) == (b.name, b.cell, b.cells)
        case _:
            return False


def same_place(a: Sharding | None, b: Sharding | None) -> bool:
    """Whether two arrays of one shape are laid out alike, in one kind of memory."""
    if a is None or b is None:
        return a is b
    return a.memory_kind == b.memory_kind and same_layout(a, b)


def place_text(sharding: Sharding | None) -> str:
    """Layout and kind of memory in words; `None` is a host array."""
    if sharding is None:
        return "host array"
    return f"{sharding} in {sharding.memory_kind}" if sharding.memory_kind else str(sharding)


def cell_of(sharding: Sharding | None, shape: Shape) -> Shape:
    """Shape of the box that one device holds; `None` is a host array, held whole.

    Raises:
        ValueError: A dimension is not divisible by the mesh axes that cut it.
    """
    if isinstance(sharding, Tiled):
        return sharding.cell
    if not isinstance(sharding, Named):
        return tuple(max(extent, 1) for extent in shape)
    if len(sharding.spec) > len(shape):
        raise ValueError(f"{spec_text(sharding.spec)} has more entries than {shape} dimensions")
    entries = sharding.spec + ((),) * (len(shape) - len(sharding.spec))
    cell = []
    for dim, (extent, entry) in enumerate(zip(shape, entries, strict=True)):
        parts = sharding.mesh.size_of(entry)
        if extent % parts:
            raise ValueError(
                f"dimension {dim} has {extent} elements, not divisible by {parts} "
                f"(axes {', '.join(entry)}); {extent} % {parts} = {extent % parts}"
            )
        cell.append(max(extent // parts, 1))
    return tuple(cell)


def holders(sharding: Sharding | None, shape: Shape) -> dict[int, list[int]]:
    """For each cell of the grid the ids of the devices that hold it, in device order.

    A host array has the one cell 0 and no devices.
    """
    match sharding:
        case None:
            return {0: []}
        case Single():
            return {0: [sharding.device_id]}
        case Tiled():
            found: dict[int, list[int]] = {}
            for cell, device_id in zip(sharding.cells, sharding.device_ids, strict=True):
                found.setdefault(cell, []).append(device_id)
            return found
        case Named():
            return _named_holders(sharding, len(shape))


def devices_of(sharding: Sharding | None, shape: Shape, box: Box) -> tuple[int, ...]:
    """Ids of the devices that hold a part of `box`, ascending; none for a host array.

    Example:
        >>> mesh = Mesh(axis_names=("x",), axis_sizes=(2,), axis_types=("Auto",), device_ids=(4, 5))
        >>> devices_of(Named(mesh=mesh, spec=(("x",),)), (8,), Box((0,), (3,)))
        (4,)
    """
    if not box.size:
        return ()
    grid = Grid(shape, cell_of(sharding, shape))
    # Cell by cell that is held: a manifest may claim more cells than anybody can count.
    held = holders(sharding, shape).items()
    return tuple(sorted({d for cell, ids in held if grid.box(cell).intersect(box) for d in ids}))


def _named_holders(sharding: Named, ndim: int) -> dict[int, list[int]]:
    mesh = sharding.mesh
    axis = {name: at for at, name in enumerate(mesh.axis_names)}
    entries = sharding.spec + ((),) * (ndim - len(sharding.spec))
    found: dict[int, list[int]] = {}
    positions = itertools.product(*map(range, mesh.axis_sizes))
    for position, device_id in zip(positions, mesh.device_ids, strict=True):
        cell = 0
        for entry in entries:
            for name in entry:
                cell = cell * mesh.axis_sizes[axis[name]] + position[axis[name]]
        found.setdefault(cell, []).append(device_id)
    return found
