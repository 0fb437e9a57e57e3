"""Say whether a run can resume from a checkpoint, or what it lacks for that."""

from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.plan.parts import Part, require_parts
from pytree_ckpt.store.locations import PathLike
from pytree_ckpt.verbs.manifest import read_manifest


def require(checkpoint: PathLike | Manifest, /, **parts: Part) -> Manifest:
    """Check that a checkpoint has all parts of a state; only its manifest is read.

    Each keyword is a part: `True` asks for something at the key of that name, a pattern of paths
    as in `load(..., rename=)` for something that matches it, a list of patterns for each of them;
    `False` asks for nothing. An empty container counts (`optax.sgd` has no leaves), `None` does
    not.

    Returns:
        The manifest.

    Raises:
        MismatchError: Parts that are missing, each with the nearest that is there.
        ValueError: No part is asked for, or a pattern is not one.
        NotFoundError: No committed checkpoint is there.
        FormatError: The manifest is damaged or of a newer version.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights = pc.save(folder, {"params": {"w": np.ones(3)}})
        >>> require(weights, params=True).nbytes
        24
        >>> require(weights, params=True, opt_state=True, step="**/step")
        Traceback (most recent call last):
        pytree_ckpt.errors.MismatchError: the checkpoint lacks 2 of 3 required parts
          opt_state  nothing matches 'opt_state'
          step  nothing matches '**/step'
        It holds nothing but params: load with partial=True takes that, for inference or to start
        from, but no run can resume from it.
    """
    if isinstance(checkpoint, Manifest):
        manifest, what = checkpoint, "the checkpoint"
    else:
        manifest, what = read_manifest(checkpoint), str(checkpoint)
    require_parts(manifest, parts, what=what)
    return manifest
