"""Read a manifest: all there is to know without devices, and without array data."""

from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.store.locations import PathLike, locate


def read_manifest(path: PathLike) -> Manifest:
    """Read what a checkpoint holds; no devices and no array data are needed.

    Raises:
        NotFoundError: No committed checkpoint is there.
        FormatError: The manifest is damaged, or (`NewerFormatError`) of a newer release.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pc.save(folder, {"w": np.ones((2, 3)), "step": 7}, metadata={"run": "a"})
        ...     manifest = read_manifest(folder)
        >>> manifest.nbytes, manifest.metadata, manifest.by_text["step"].value
        (48, {'run': 'a'}, 7)
    """
    return locate(path).read_manifest()
