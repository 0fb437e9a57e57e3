"""Folders of numbered checkpoints: what is in them, and how one is deleted."""

import os
from pathlib import Path

from pytree_ckpt.format.manifest import MANIFEST_FILE
from pytree_ckpt.format.steps import StepNames


def committed_steps(root: Path, names: StepNames) -> list[int]:
    """Steps that have a manifest, ascending. A root that does not exist has none.

    Raises:
        OSError: The root cannot be read.
    """
    try:
        entries = os.listdir(root)
    except FileNotFoundError:
        return []
    found = ((names.step(entry), entry) for entry in entries)
    return sorted(
        step
        for step, entry in found
        if step is not None and os.path.lexists(root / entry / MANIFEST_FILE)
    )
