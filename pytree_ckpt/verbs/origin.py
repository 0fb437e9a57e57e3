"""What a manifest records of who wrote it."""

import functools
import getpass
import socket
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


def written_by() -> str:
    """`user@host` of this process; without a user where the system does not name one."""
    try:
        user = f"{getpass.getuser()}@"
    except (OSError, KeyError, ImportError):  # a container may run under an id without a name
        user = ""
    return f"{user}{socket.gethostname()}".encode("utf-8", "replace").decode()
