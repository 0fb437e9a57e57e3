"""JAX shardings to plain data and back."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pytree_ckpt.format.boxes import Box, Grid, Shape
from pytree_ckpt.format.shardings import Mesh, Named, Sharding, Single, Spec, Tiled
from pytree_ckpt.jaxio import processes


class UnsupportedShardingError(ValueError):
    """A sharding that has no plain form; the message says why."""


def describe(sharding: Any, shape: Shape) -> Sharding:
    """The plain form of a sharding on concrete devices.

    Raises:
        UnsupportedShardingError: Axis names that are not text, unreduced or reduced axes, or
            boxes that make no regular grid.
    """
    if isinstance(sharding, NamedSharding):
        return Named(
            mesh=describe_mesh(sharding.mesh),
            spec=_spec(sharding.spec),
            memory_kind=_memory_kind(sharding, sharding.mesh.devices.flat[0]),
        )
    if isinstance(sharding, SingleDeviceSharding):
        device: Any = next(iter(sharding.device_set))
        return Single(device_id=device.id, memory_kind=_memory_kind(sharding, device))
    return _tiled(sharding, shape)


@functools.lru_cache(maxsize=16)
def describe_mesh(mesh: Any) -> Mesh:
    """The plain form of a concrete mesh."""
    if not all(isinstance(name, str) for name in mesh.axis_names):
        raise UnsupportedShardingError(f"mesh axis names {mesh.axis_names} are not all strings")
    types = getattr(mesh, "axis_types", None) or ("Auto",) * len(mesh.axis_names)
    return Mesh(
        axis_names=tuple(mesh.axis_names),
        axis_sizes=tuple(map(int, mesh.devices.shape)),
        axis_types=tuple(t.name if hasattr(t, "name") else str(t) for t in types),
        device_ids=tuple(d.id for d in mesh.devices.flat),
    )


def _spec(spec: PartitionSpec) -> Spec:
    if getattr(spec, "unreduced", None):
        raise UnsupportedShardingError(f"{spec} is unreduced: its shards are partial sums")
    if getattr(spec, "reduced", None):
        raise UnsupportedShardingError(
            f"{spec} is reduced, which no checkpoint says of an array: jax.reshard it without"
        )
    entries: list[tuple[str, ...]] = []
    for entry in spec:
        if entry is None:
            entries.append(())
        elif isinstance(entry, str):
            entries.append((entry,))
        elif isinstance(entry, tuple):
            entries.append(tuple(entry))
        else:
            raise UnsupportedShardingError(f"{spec} has an entry that is not an axis")
    return tuple(entries)


def _memory_kind(sharding: Any, device: Any) -> str | None:
    """The memory kind, None for the default of the device."""
    kind = sharding.memory_kind
    return None if kind is None or kind == device.default_memory().kind else str(kind)


def _tiled(sharding: Any, shape: Shape) -> Tiled:
    """A sharding of another class by the boxes it makes."""
    name = type(sharding).__name__
    try:
        where = sharding.devices_indices_map(shape)
    except ValueError as error:
        raise UnsupportedShardingError(str(error)) from None
    boxes = {device: box_of(index, shape) for device, index in where.items()}
    first = min(boxes.values(), key=lambda box: box.start)
    cell = tuple(max(extent, 1) for extent in first.shape)
    grid = Grid(shape, cell)
    numbers = {box: number for number, box in enumerate(grid.boxes())}
    if any(box not in numbers for box in boxes.values()) and 0 not in shape:
        raise UnsupportedShardingError(f"{name} cuts {shape} into parts that make no regular grid")
    devices = sorted(boxes, key=lambda device: int(device.id))
    return Tiled(
        name=name,
        cell=cell,
        cells=tuple(numbers.get(boxes[d], 0) for d in devices),
        device_ids=tuple(d.id for d in devices),
        memory_kind=_memory_kind(sharding, devices[0]),
    )


def in_process_0(sharding: Sharding) -> Sharding:
    """A sharding on devices of this process, on the like devices of process 0 instead.

    Raises:
        UnsupportedShardingError: Process 0 has no such devices.
    """
    place = processes.place_in_process_0()
    try:
        match sharding:
            case Single():
                return dataclasses.replace(sharding, device_id=place[sharding.device_id])
            case Tiled():
                ids = tuple(place[device_id] for device_id in sharding.device_ids)
                return dataclasses.replace(sharding, device_ids=ids)
            case Named():
                ids = tuple(place[device_id] for device_id in sharding.mesh.device_ids)
                mesh = dataclasses.replace(sharding.mesh, device_ids=ids)
                return dataclasses.replace(sharding, mesh=mesh)
    except KeyError as error:
        raise UnsupportedShardingError(
            f"it is on device {error} of one process alone, and process 0 has no such device"
        ) from None


def box_of(index: Sequence[slice], shape: Shape) -> Box:
    """A box from an index of slices, as JAX's index maps give it."""
    pairs = [s.indices(extent)[:2] for s, extent in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def rebuild_mesh(mesh: Mesh) -> jax.sharding.Mesh | None:
    """The saved mesh on the devices at hand, None if there are not enough of them.

    Devices are found by id; where ids differ, a mesh of all devices takes them in JAX's order.
    """
    devices = jax.devices()
    by_id = {device.id: device for device in devices}
    if all(number in by_id for number in mesh.device_ids):
        chosen = [by_id[number] for number in mesh.device_ids]
    elif len(devices) == len(mesh.device_ids):
        chosen = devices
    else:
        return None
    kinds = {kind.name: kind for kind in jax.sharding.AxisType}
    types = tuple(kinds.get(name, jax.sharding.AxisType.Auto) for name in mesh.axis_types)
    grid = np.asarray(chosen, dtype=object).reshape(mesh.axis_sizes)
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=types)


def named(mesh: jax.sharding.Mesh, sharding: Named) -> NamedSharding:
    """A saved spec and memory kind on a mesh.

    Raises:
        ValueError: The mesh lacks an axis of the spec, or the devices that kind of memory.
        TypeError: It is no mesh.
    """
    check_mesh(mesh)
    lacking = [axis for axes in sharding.spec for axis in axes if axis not in mesh.axis_names]
    if lacking:
        raise ValueError(f"the mesh has no axis {lacking[0]!r}, but {mesh.axis_names}")
    entries: list[Any] = [e if len(e) > 1 else e[0] if e else None for e in sharding.spec]
    spec = PartitionSpec(*entries)  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)


def check_mesh(mesh: object) -> None:
    """Refuse what a caller gave as `mesh=` and is none.

    Raises:
        TypeError: With what it is.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh of devices, not {mesh!r}")


def ambient_mesh() -> jax.sharding.Mesh | None:
    """The concrete mesh of `jax.set_mesh`, None outside of one."""
    get_mesh: Any = getattr(jax.sharding, "get_mesh", None)
    if get_mesh is None:  # JAX 0.8 has no public name for it.
        from jax._src import mesh as private

        get_mesh = private.get_concrete_mesh
    try:
        mesh = get_mesh()
    except ValueError:  # inside of jit
        return None
    return None if mesh is None or mesh.empty else mesh


def is_default(sharding: Any) -> bool:
    """Whether it is where JAX puts an array that is to be nowhere in particular."""
    device: Any = getattr(jax.config, "jax_default_device", None)
    if device is None or isinstance(device, str):  # the name of a platform
        device = jax.local_devices(backend=device)[0]
    return (
        isinstance(sharding, SingleDeviceSharding)
        and sharding.device_set == {device}
        and _memory_kind(sharding, device) is None
    )


def is_abstract(sharding: Any) -> bool:
    """Whether a sharding names no devices."""
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
