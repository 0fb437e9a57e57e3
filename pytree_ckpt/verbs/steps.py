"""Numbered checkpoints in a root."""

from pathlib import Path

from pytree_ckpt.format.steps import StepNames
from pytree_ckpt.store.locations import PathLike, locate


def step_path(root: PathLike, step: int, *, prefix: str = "step_", width: int = 8) -> Path | str:
    """Where the checkpoint of a step is, or will be: `root/step_00001000`.

    A `Path`; for a root in an object store its URL.

    Raises:
        ValueError: The step is negative or not an int, or the prefix leaves the root.

    Example:
        >>> step_path("/runs/a", 12, prefix="ppo-", width=1).as_posix()
        '/runs/a/ppo-12'
    """
    location = locate(root) / StepNames(prefix=prefix, width=width).name(step)
    return location.path or str(location)


def steps(root: PathLike, *, prefix: str = "step_", width: int = 8) -> list[int]:
    """The steps with a committed checkpoint, ascending as numbers.

    Only exact names count (`step_00001000`); other files and folders are left alone. A root that
    does not exist has no steps.

    Raises:
        OSError: The root cannot be read.

    Example:
        >>> import tempfile, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for step in (1000, 500):
        ...         _ = pc.save(pc.step_path(root, step), {"step": step})
        ...     steps(root)
        [500, 1000]
    """
    return locate(root).committed_steps(StepNames(prefix=prefix, width=width))


def latest_step(root: PathLike, *, prefix: str = "step_", width: int = 8) -> int | None:
    """The greatest step with a committed checkpoint, None if there is none.

    Raises:
        OSError: The root cannot be read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     print(latest_step(root))
        None
    """
    found = steps(root, prefix=prefix, width=width)
    return found[-1] if found else None
