"""Sharded checkpoints of JAX pytrees, verified on every load.

Everything public is here, and is imported when it is first used: a manifest can be read without
importing JAX or TensorStore.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytree_ckpt.errors import (
        CheckpointError,
        Damage,
        ExistsError,
        FormatError,
        IntegrityError,
        Mismatch,
        MismatchError,
        NewerFormatError,
        NotFoundError,
        PeerError,
        PeerTimeoutError,
        UnsupportedLeafError,
    )
    from pytree_ckpt.format.manifest import Manifest
    from pytree_ckpt.format.per_process import PerProcess
    from pytree_ckpt.interop.npz import export_npz, import_npz
    from pytree_ckpt.interop.orbax import import_orbax
    from pytree_ckpt.interop.safetensors import export_safetensors, import_safetensors
    from pytree_ckpt.options import LoadOptions, SaveOptions
    from pytree_ckpt.plan.layouts import Layout
    from pytree_ckpt.plan.retention import Keep
    from pytree_ckpt.verbs.checkpoint import Checkpoint, StoredArray
    from pytree_ckpt.verbs.checkpoint import open_checkpoint as open
    from pytree_ckpt.verbs.convert import ConvertReport, convert
    from pytree_ckpt.verbs.diff import DiffReport, diff
    from pytree_ckpt.verbs.load import load
    from pytree_ckpt.verbs.manager import CheckpointManager
    from pytree_ckpt.verbs.manifest import read_manifest
    from pytree_ckpt.verbs.pending import PendingSave
    from pytree_ckpt.verbs.preemption import Preempted
    from pytree_ckpt.verbs.require import require
    from pytree_ckpt.verbs.restructure import plan_restructure
    from pytree_ckpt.verbs.save import save, save_async
    from pytree_ckpt.verbs.steps import latest_step, step_path, steps
    from pytree_ckpt.verbs.verify import VerifyReport, verify

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "ConvertReport",
    "Damage",
    "DiffReport",
    "ExistsError",
    "FormatError",
    "IntegrityError",
    "Keep",
    "Layout",
    "LoadOptions",
    "Manifest",
    "Mismatch",
    "MismatchError",
    "NewerFormatError",
    "NotFoundError",
    "PeerError",
    "PeerTimeoutError",
    "PendingSave",
    "PerProcess",
    "Preempted",
    "SaveOptions",
    "StoredArray",
    "UnsupportedLeafError",
    "VerifyReport",
    "convert",
    "diff",
    "export_npz",
    "export_safetensors",
    "import_npz",
    "import_orbax",
    "import_safetensors",
    "latest_step",
    "load",
    "open",
    "plan_restructure",
    "read_manifest",
    "require",
    "save",
    "save_async",
    "step_path",
    "steps",
    "verify",
]

_HOME = {
    "open": ("verbs.checkpoint", "open_checkpoint"),
    **dict.fromkeys(("Checkpoint", "StoredArray"), ("verbs.checkpoint", None)),
    "read_manifest": ("verbs.manifest", None),
    **dict.fromkeys(("DiffReport", "diff"), ("verbs.diff", None)),
    **dict.fromkeys(("load",), ("verbs.load", None)),
    **dict.fromkeys(("save", "save_async"), ("verbs.save", None)),
    **dict.fromkeys(("export_npz", "import_npz"), ("interop.npz", None)),
    "import_orbax": ("interop.orbax", None),
    **dict.fromkeys(("export_safetensors", "import_safetensors"), ("interop.safetensors", None)),
    "PendingSave": ("verbs.pending", None),
    **dict.fromkeys(("latest_step", "step_path", "steps"), ("verbs.steps", None)),
    "require": ("verbs.require", None),
    "plan_restructure": ("verbs.restructure", None),
    **dict.fromkeys(("LoadOptions", "SaveOptions"), ("options", None)),
    "CheckpointManager": ("verbs.manager", None),
    "Preempted": ("verbs.preemption", None),
    **dict.fromkeys(("ConvertReport", "convert"), ("verbs.convert", None)),
    "Layout": ("plan.layouts", None),
    "Keep": ("plan.retention", None),
    **dict.fromkeys(("VerifyReport", "verify"), ("verbs.verify", None)),
    "Manifest": ("format.manifest", None),
    "PerProcess": ("format.per_process", None),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOME.get(name, ("errors", None))
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
