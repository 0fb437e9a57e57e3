"""Read a manifest: all there is to know without devices, and without array data."""

from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.store.locations import PathLike, locate


def read_manifest(path: PathLike) -> Manifest:
    """Read what a checkpoint holds; no devices and no array data are needed.

    Raises:
        NotFoundError: No committed checkpoint is there.
        FormatError: The manifest is damaged, or (`NewerFormatError`) of a newer release.
    """
    return locate(path).read_manifest()
