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
    **dict.fromkeys(("Checkpoint", "StoredArray", "open"), "verbs.checkpoint"),
    **dict.fromkeys(("ConvertReport", "convert"), "verbs.convert"),
    **dict.fromkeys(("DiffReport", "diff"), "verbs.diff"),
    **dict.fromkeys(("LoadOptions", "SaveOptions"), "options"),
    **dict.fromkeys(("VerifyReport", "verify"), "verbs.verify"),
    **dict.fromkeys(("export_npz", "import_npz"), "interop.npz"),
    **dict.fromkeys(("export_safetensors", "import_safetensors"), "interop.safetensors"),
    **dict.fromkeys(("latest_step", "step_path", "steps"), "verbs.steps"),
    **dict.fromkeys(("save", "save_async"), "verbs.save"),
    "CheckpointManager": "verbs.manager",
    "Keep": "plan.retention",
    "Layout": "plan.layouts",
    "Manifest": "format.manifest",
    "PendingSave": "verbs.pending",
    "PerProcess": "format.per_process",
    "Preempted": "verbs.preemption",
    "import_orbax": "interop.orbax",
    "load": "verbs.load",
    "plan_restructure": "verbs.restructure",
    "read_manifest": "verbs.manifest",
    "require": "verbs.require",
}
"""The module of each name that is no error."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME.get(name, 'errors')}")
    value = getattr(module, "open_checkpoint" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
