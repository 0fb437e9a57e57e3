"""The target of a load as plain data, and the JAX objects that the plain data stands for."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from pytree_ckpt.errors import Mismatch, UnsupportedLeafError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.paths import to_text
from pytree_ckpt.format.per_process import PerProcess
from pytree_ckpt.format.shardings import Named, Sharding, Single
from pytree_ckpt.format.trees import Tree
from pytree_ckpt.jaxio import keys, shardings, trees
from pytree_ckpt.plan.compare import Want

_PYTHON: dict[type, Any] = {t: t.__name__ for t in (bool, int, float, complex, str, bytes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One leaf of a target.

    `sharding` is JAX's, None where the target leaves it open or wants no device. `committed` and
    `weak_type` are what JAX calls so; None leaves them as they were saved. A struct cannot say
    that it stands for an uncommitted array, so one on the default device leaves that open.
    """

    want: Want
    sharding: Any = None
    weak_type: bool | None = None
    committed: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTree:
    """A target taken apart."""

    tree: Tree
    treedef: Any
    leaves: list[Target]
    mismatches: list[Mismatch]


def describe_target(target: Any, *, mesh: jax.sharding.Mesh | None) -> TargetTree:
    """Describe what a target asks for; abstract meshes become `mesh` or the ambient one.

    Raises:
        UnsupportedLeafError: Leaves that ask for nothing that a checkpoint can give.
    """
    flat = trees.flatten(target)
    leaves: list[Target] = []
    refused = list(flat.refused)
    mismatches: list[Mismatch] = []
    if mesh is not None:
        shardings.check_mesh(mesh)
    concrete = mesh if mesh is not None else shardings.ambient_mesh()
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        try:
            leaves.append(_describe(leaf, concrete))
        except _AbstractMeshError as error:
            text = to_text(path)
            mismatches.append(Mismatch(path=text, kind="mesh", text=str(error)))
            leaves.append(Target(want=Want(kind="jax")))
        except (shardings.UnsupportedShardingError, TypeError) as error:
            refused.append((to_text(path), str(error)))
    if refused:
        raise UnsupportedLeafError(refused, target=True)
    return TargetTree(tree=flat.tree, treedef=flat.treedef, leaves=leaves, mismatches=mismatches)


class _AbstractMeshError(Exception):
    """A sharding on a mesh without devices, and no mesh to put in its place."""


def _describe(leaf: Any, mesh: jax.sharding.Mesh | None) -> Target:
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError("the target has a tracer here: load outside of jit, grad and vmap")
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return _describe_jax(leaf, mesh)
    if isinstance(leaf, np.generic):
        return Target(want=Want(kind="scalar", dtype=_dtype_name(leaf.dtype)))
    if type(leaf) in (np.ndarray, np.memmap):
        return Target(want=Want(kind="numpy", shape=leaf.shape, dtype=_dtype_name(leaf.dtype)))
    if isinstance(leaf, PerProcess):
        return Target(want=Want(kind="process"))
    if type(leaf) in _PYTHON:
        return Target(want=Want(kind=_PYTHON[type(leaf)]))
    raise TypeError(
        f"the target has a {type(leaf).__qualname__} here; a target leaf is a ShapeDtypeStruct, "
        "an array, a number, str, bytes or PerProcess (eqx.filter leaves out the rest)"
    )


def _describe_jax(leaf: Any, mesh: jax.sharding.Mesh | None) -> Target:
    if not all(isinstance(extent, (int, np.integer)) for extent in leaf.shape):
        raise TypeError(f"the target has the shape {leaf.shape} here, which is not all numbers")
    shape = tuple(map(int, leaf.shape))
    is_struct = isinstance(leaf, jax.ShapeDtypeStruct)
    sharding = _concrete(leaf.sharding, mesh)
    plain = None if sharding is None else shardings.describe(sharding, shape)
    committed: bool | None = True
    if sharding is None or (is_struct and shardings.is_default(sharding)):
        committed = None
    elif not is_struct:
        committed = bool(getattr(leaf, "committed", True))
    is_key = keys.is_key_dtype(leaf.dtype)
    want = Want(
        kind="key" if is_key else "jax",
        shape=shape,
        dtype="uint32" if is_key else _dtype_name(np.dtype(leaf.dtype)),
        key_impl=keys.impl_of_dtype(leaf.dtype) if is_key else None,
        sharding=plain,
    )
    weak = bool(getattr(leaf, "weak_type", False))
    return Target(want=want, sharding=sharding, weak_type=weak, committed=committed)


def _concrete(sharding: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """A sharding on devices."""
    if not shardings.is_abstract(sharding):
        return sharding
    wanted = sharding.mesh
    if mesh is None:
        raise _AbstractMeshError(
            f"the target's mesh {wanted} is abstract: pass mesh=, or load inside jax.set_mesh"
        )
    have = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    asked = dict(zip(wanted.axis_names, wanted.axis_sizes, strict=True))
    if have != asked:
        raise _AbstractMeshError(f"the target's abstract mesh {asked} is not the mesh {have}")
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _dtype_name(dtype: np.dtype[Any]) -> str:
    name = dtypes.name_of(dtype)
    if name is None:
        raise TypeError(f"the target has the dtype {dtype}, which no checkpoint can hold")
    return name


def as_saved(leaf: Leaf) -> Target:
    """The target that asks for a leaf as it was saved, its sharding left open."""
    spec = leaf.spec
    if leaf.per_process:
        return Target(want=Want(kind="process"))
    if spec is None:
        return Target(want=Want(kind=_PYTHON[type(leaf.value)]))
    return Target(
        want=Want(
            kind=spec.kind, shape=spec.logical_shape, dtype=spec.dtype, key_impl=spec.key_impl
        )
    )


def check_dtype(leaf: Leaf, want: Want) -> list[Mismatch]:
    """A dtype that JAX has not, and a 64-bit one that it would narrow without a word."""
    if want.kind != "jax" or want.dtype is None:
        return []
    dtype = dtypes.dtype_of(want.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        why = f"{want.dtype} needs jax_enable_x64, which is off here; enable it, or ask"
    elif not _has_dtype(want.dtype):
        why = f"this JAX has no arrays of {want.dtype}; ask"
    else:
        return []
    text = f"dtype: {why} for a numpy.ndarray"
    return [Mismatch(path=leaf.text, kind="dtype", text=text, saved=want.dtype)]


@functools.lru_cache
def _has_dtype(name: str) -> bool:
    """Whether arrays on devices can have a dtype; nothing but to make one tells."""
    try:
        jax.device_put(np.zeros((), dtypes.dtype_of(name)), jax.local_devices()[0])
    except TypeError:
        return False
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith(("INVALID_ARGUMENT", "UNIMPLEMENTED")):
            return False
        raise  # such as of a device without memory, which says nothing of the dtype
    return True


def check_impl(leaf: Leaf, want: Want) -> list[Mismatch]:
    """Keys of an implementation that is not registered in this process, or is another one here."""
    spec = leaf.spec
    if want.kind != "key" or want.key_impl is None:
        return []
    if not keys.has_impl(want.key_impl):
        text = f"key impl: JAX has no {want.key_impl!r} here; register it before the load"
    elif spec is None or spec.key_impl != want.key_impl:
        return []  # which is compared elsewhere
    else:
        saved, needed = spec.shape[len(spec.logical_shape) :], keys.data_shape(want.key_impl)
        if saved == needed:
            return []
        text = f"key impl: a key of {want.key_impl!r} has data of {needed} here, saved {saved}"
    return [Mismatch(path=leaf.text, kind="key impl", text=text, saved=want.key_impl)]


def open_sharding(
    leaf: Leaf, *, mesh: jax.sharding.Mesh | None, reshard: bool
) -> tuple[Any, Sharding | None, list[Mismatch]]:
    """A sharding for a leaf whose target names none: the saved layout on the devices at hand.

    Returns:
        JAX's sharding, its plain form, and why there is none. None without a mismatch is the
        default device.
    """
    saved = leaf.spec.sharding if leaf.spec is not None else None
    if isinstance(saved, Named):
        chosen = mesh if mesh is not None else shardings.rebuild_mesh(saved.mesh)
        if chosen is not None:
            return _on_mesh(leaf, saved, chosen)
        if reshard:
            return None, None, []
        text = f"saved as {saved} of {len(saved.mesh.device_ids)} devices, "
        return None, None, [_no_devices(leaf, f"{text}there are {jax.device_count()} here")]
    if isinstance(saved, Single):
        if not leaf.array.committed:
            return None, None, []
        devices = {device.id: device for device in jax.local_devices()}
        device = devices.get(saved.device_id, jax.local_devices()[0])
        if not _has_memory(device, saved.memory_kind):
            text = f"saved in {saved.memory_kind} memory, which {device} does not have"
            return None, None, [_no_devices(leaf, text)]
        chosen_one = jax.sharding.SingleDeviceSharding(device, memory_kind=saved.memory_kind)
        return chosen_one, saved, []
    if saved is None or reshard:
        return None, None, []
    return None, None, [_no_devices(leaf, f"saved as {saved}, which has no rule to rebuild it")]


def _on_mesh(
    leaf: Leaf, saved: Named, mesh: jax.sharding.Mesh
) -> tuple[Any, Sharding | None, list[Mismatch]]:
    try:
        sharding = shardings.named(mesh, saved)
        return sharding, shardings.describe(sharding, leaf.array.logical_shape), []
    except ValueError as error:
        text = f"saved as {saved}, which cannot be laid out here: {error}"
        return None, None, [_no_devices(leaf, text)]


def _has_memory(device: Any, kind: str | None) -> bool:
    return kind is None or any(memory.kind == kind for memory in device.addressable_memories())


def _no_devices(leaf: Leaf, text: str) -> Mismatch:
    return Mismatch(path=leaf.text, kind="devices", text=text)
