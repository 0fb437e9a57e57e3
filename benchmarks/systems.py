"""What is measured: one class for each way to save and load a state, behind one interface.

An adapter is constructed, and its state prepared, before the clock starts. Peers are imported
when their adapter is constructed, so that the driver imports none of them.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import limit

Tree = Any  # a pytree


class Adapter:
    """One way to save and load."""

    def prepare(self, tree: Tree) -> Any:
        """What `save` takes, from the state; done before the clock starts."""
        return tree

    def save(self, path: Path, state: Any) -> None:
        """Save to a folder that does not exist; return when there is nothing left to wait for."""
        raise NotImplementedError

    def start(self, path: Path, state: Any) -> Callable[[], object]:
        """Save in the background; return once the state may be donated. The result waits."""
        raise NotImplementedError

    def load(self, path: Path, target: Tree, *, reshard: bool) -> Tree | None:
        """The state as arrays on the shardings of `target`; None if nothing is placed."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of threads."""


class Ours(Adapter):
    """This library."""

    def __init__(self, digest: str, compress: str | None = None) -> None:
        import pytree_ckpt as pc

        self._save, self._load, self._save_async = pc.save, pc.load, pc.save_async
        self._options = pc.SaveOptions(digest=digest, compress=compress)

    def save(self, path: Path, state: Any) -> None:
        self._save(path, state, options=self._options)

    def start(self, path: Path, state: Any) -> Callable[[], object]:
        return self._save_async(path, state, options=self._options).result

    def load(self, path: Path, target: Tree, *, reshard: bool) -> Tree:
        return self._load(path, target, reshard=reshard)


class OrbaxV0(Adapter):
    """The checkpointer that orbax's documentation starts with."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self._checkpointer = ocp.StandardCheckpointer()

    def save(self, path: Path, state: Any) -> None:
        self.start(path, state)()

    def start(self, path: Path, state: Any) -> Callable[[], object]:
        self._checkpointer.save(path, state)
        return self._checkpointer.wait_until_finished

    def load(self, path: Path, target: Tree, *, reshard: bool) -> Tree:
        return self._checkpointer.restore(path, target)

    def close(self) -> None:
        self._checkpointer.close()


class OrbaxV0Raw(Adapter):
    """The same machinery without what costs it most: zarr3, and no compression."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
        self._ocp = ocp
        self._checkpointer = ocp.Checkpointer(handler)

    def save(self, path: Path, state: Any) -> None:
        self._checkpointer.save(path, args=self._ocp.args.PyTreeSave(state))

    def load(self, path: Path, target: Tree, *, reshard: bool) -> Tree:
        restore = self._ocp.checkpoint_utils.construct_restore_args(target)
        arguments = self._ocp.args.PyTreeRestore(item=target, restore_args=restore)
        return self._checkpointer.restore(path, args=arguments)

    def close(self) -> None:
        self._checkpointer.close()


class OrbaxV1(Adapter):
    """The new interface of orbax."""

    def __init__(self, *, compress: bool) -> None:
        import orbax.checkpoint.experimental.v1 as ocp

        self._ocp = ocp
        self._context = ocp.Context()
        if not compress:
            self._context.array.saving.use_compression = False

    def save(self, path: Path, state: Any) -> None:
        with self._context:
            self._ocp.save(path, state)

    def start(self, path: Path, state: Any) -> Callable[[], object]:
        with self._context:
            return self._ocp.save_async(path, state).result

    def load(self, path: Path, target: Tree, *, reshard: bool) -> Tree:
        with self._context:
            return self._ocp.load(path, target)


class JaxPytree(Adapter):
    """What JAX itself has."""

    def __init__(self) -> None:
        from jax.experimental.array_serialization import pytree_serialization

        self._module = pytree_serialization

    def save(self, path: Path, state: Any) -> None:
        self._module.save(state, path)

    def load(self, path: Path, target: Tree, *, reshard: bool) -> Tree:
        return self._module.load(path, target)


class Safetensors(Adapter):
    """Gather each array on the host, write one file; load all of it, put it on the devices."""

    def __init__(self) -> None:
        import safetensors.numpy

        self._module = safetensors.numpy

    def save(self, path: Path, state: Any) -> None:
        path.mkdir()
        self._module.save_file(_gathered(state), path / "model.safetensors")

    def load(self, path: Path, target: Tree, *, reshard: bool) -> Tree:
        return _placed(self._module.load_file(path / "model.safetensors"), target)


class TorchDcp(Adapter):
    """torch.distributed.checkpoint in one process: gather, and hand over as tensors."""

    def __init__(self) -> None:
        import torch
        import torch.distributed.checkpoint as dcp

        self._torch, self._dcp = torch, dcp
        # No process group is what is meant; JAX's arrays are read only, and are not written to.
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def save(self, path: Path, state: Any) -> None:
        tensors = {name: self._torch.from_numpy(x) for name, x in _gathered(state).items()}
        self._dcp.save(tensors, checkpoint_id=path)

    def load(self, path: Path, target: Tree, *, reshard: bool) -> Tree:
        tensors = {
            name: self._torch.empty(x.shape, dtype=getattr(self._torch, str(x.dtype)))
            for name, x in _named(target).items()
        }
        self._dcp.load(tensors, checkpoint_id=path)
        return _placed({name: tensor.numpy() for name, tensor in tensors.items()}, target)


class Limit(Adapter):
    """Files and digests of the same bytes, and nothing else."""

    def __init__(self, digest: str) -> None:
        self._digest = limit.digest_named(digest)

    def prepare(self, tree: Tree) -> Any:
        return limit.files(limit.views(tree))

    def save(self, path: Path, state: Any) -> None:
        limit.write(path, state, self._digest)

    def load(self, path: Path, target: Tree, *, reshard: bool) -> None:
        limit.read(path, self._digest)


def _named(tree: Tree) -> dict[str, Any]:
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def _gathered(state: Tree) -> dict[str, Any]:
    import numpy as np

    return {name: np.asarray(leaf) for name, leaf in _named(state).items()}


def _placed(arrays: dict[str, Any], target: Tree) -> Tree:
    import jax

    wanted = _named(target)
    shardings = [leaf.sharding for leaf in wanted.values()]
    placed = jax.device_put([arrays[name] for name in wanted], shardings)
    return jax.tree.unflatten(jax.tree.structure(target), placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """An entry of the tables.

    Attributes:
        label: Name in tables and charts.
        settings: How it is set up, for the reader of a report.
        package: The distribution whose version decides.
        modules: What must be installed.
        is_ours, is_limit: Whether it is this library, or the limit of the machine.
    """

    label: str
    settings: str
    package: str
    modules: tuple[str, ...]
    make: Callable[[], Adapter]
    is_ours: bool = False
    is_limit: bool = False

    def missing(self) -> str | None:
        """A module that it needs and that is not installed."""
        return next((m for m in self.modules if importlib.util.find_spec(m) is None), None)


_ours = partial(System, package="pytree-ckpt", is_ours=True)
_orbax = partial(System, package="orbax-checkpoint", modules=("orbax",))
_limit = partial(System, package="python", is_limit=True)
_LIMIT_SETTINGS = "16 MiB files, fsync, fresh memory; no format, no devices"

SYSTEMS = {
    "ours-sha256": _ours(
        label="ours, sha256",
        settings="the defaults: raw, fsync, every digest checked",
        modules=("pytree_ckpt",),
        make=lambda: Ours("sha256"),
    ),
    "ours-xxh3": _ours(
        label="ours, xxh3",
        settings='digest="xxh3_128"',
        modules=("pytree_ckpt", "xxhash"),
        make=lambda: Ours("xxh3_128"),
    ),
    "ours-zstd": _ours(
        label="ours, sha256 + zstd",
        settings='compress="zstd"',
        modules=("pytree_ckpt",),
        make=lambda: Ours("sha256", "zstd"),
    ),
    "orbax-v0": _orbax(
        label="orbax v0",
        settings="StandardCheckpointer, the defaults: zarr, zstd, OCDBT",
        make=OrbaxV0,
    ),
    "orbax-v0-raw": _orbax(
        label="orbax v0, raw",
        settings="PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)",
        make=OrbaxV0Raw,
    ),
    "orbax-v1": _orbax(
        label="orbax v1",
        settings="experimental.v1 save and load, the defaults: zarr3, zstd, OCDBT",
        make=lambda: OrbaxV1(compress=True),
    ),
    "orbax-v1-raw": _orbax(
        label="orbax v1, raw",
        settings="array.saving.use_compression=False",
        make=lambda: OrbaxV1(compress=False),
    ),
    "jax": System(
        label="JAX pytree",
        settings="pytree_serialization, the defaults: zarr3, OCDBT, no compression",
        package="jax",
        modules=("flatbuffers",),
        make=JaxPytree,
    ),
    "safetensors": System(
        label="safetensors",
        settings="gather and save_file, load_file and device_put; no digest, no fsync",
        package="safetensors",
        modules=("safetensors",),
        make=Safetensors,
    ),
    "torch-dcp": System(
        label="torch DCP",
        settings="gather and dcp.save, dcp.load and device_put; the defaults: fsync, one thread",
        package="torch",
        modules=("torch",),
        make=TorchDcp,
    ),
    "limit-sha256": _limit(
        label="limit, sha256",
        settings=_LIMIT_SETTINGS,
        modules=(),
        make=lambda: Limit("sha256"),
    ),
    "limit-xxh3": _limit(
        label="limit, xxh3",
        settings=_LIMIT_SETTINGS,
        modules=("xxhash",),
        make=lambda: Limit("xxh3_128"),
    ),
}
"""All systems, in the order of the tables."""
