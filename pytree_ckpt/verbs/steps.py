"""Numbered checkpoints in a root."""

import os
from pathlib import Path

from pytree_ckpt.format.manifest import MANIFEST_FILE
from pytree_ckpt.format.steps import step_name, step_of
from pytree_ckpt.store.locations import PathLike, locate


def step_path(root: PathLike, step: int) -> Path:
    """Where the checkpoint of a step is, or will be: `root/step_00001000`.

    Raises:
        ValueError: The step is negative or not an int.
    """
    return locate(root).path / step_name(step)


def steps(root: PathLike) -> list[int]:
    """The steps with a committed checkpoint, ascending as numbers.

    Only exact names count (`step_00001000`); other files and folders are left alone. A root that
    does not exist has no steps.

    Raises:
        OSError: The root cannot be read.
    """
    try:
        names = os.listdir(locate(root).path)
    except FileNotFoundError:
        return []
    found = ((step_of(name), name) for name in names)
    return sorted(step for step, name in found if step is not None and _is_committed(root, name))


def _is_committed(root: PathLike, name: str) -> bool:
    return os.path.lexists(locate(root).path / name / MANIFEST_FILE)


def latest_step(root: PathLike) -> int | None:
    """The greatest step with a committed checkpoint, None if there is none.

    Raises:
        OSError: The root cannot be read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     print(latest_step(root))
        None
    """
    found = steps(root)
    return found[-1] if found else None
