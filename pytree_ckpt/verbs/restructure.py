"""See what rules of a load would do, without a load."""

from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.plan.restructure import Restructured, Rules, restructure
from pytree_ckpt.store.locations import PathLike
from pytree_ckpt.verbs.manifest import read_manifest


def plan_restructure(
    checkpoint: PathLike | Manifest,
    *,
    rename: Rules | None = None,
    stack: Rules | None = None,
    unstack: Rules | None = None,
) -> Restructured:
    """What `load` would make of the leaves of a checkpoint; only its manifest is read.

    Printed, the result is a line for each leaf that a rule takes.

    Raises:
        ValueError: A rule is not one.
        MismatchError: Rules that take nothing, two leaves for one path, and stacks with a gap or
            of unequal parts: every reason.
        NotFoundError: No committed checkpoint is there.
        FormatError: The manifest is damaged or of a newer version.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> layer = {"kernel": np.ones((2, 3)), "bias": np.ones(3)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = pc.save(folder, {"layer_0": layer, "layer_1": layer, "step": 7})
        >>> rules = {"layer_{}/kernel": "layers/w"}
        >>> print(plan_restructure(manifest, stack=rules, rename={"*/bias": "biases/*"}))
        layer_0/bias -> biases/layer_0
        layer_1/bias -> biases/layer_1
        layer_0/kernel … layer_1/kernel (stack of 2) -> layers/w
        1 other leaf stays where it is
    """
    manifest = checkpoint if isinstance(checkpoint, Manifest) else read_manifest(checkpoint)
    return restructure(manifest, rename=rename, stack=stack, unstack=unstack)
