"""The versions that a manifest records."""

import functools
import sys
from importlib import metadata

_OF = ("pytree-ckpt", "jax", "jaxlib", "numpy", "tensorstore")


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that matter, none of which is imported."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
