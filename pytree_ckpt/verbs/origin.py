"""What a manifest records of how it was written: by whom, with what, when, in what time."""

import dataclasses
import functools
import getpass
import socket
import sys
import time
from collections.abc import Sequence
from importlib import metadata

from pytree_ckpt.clock import StageClock
from pytree_ckpt.format import manifest_file
from pytree_ckpt.format.manifest import Manifest, TableRef

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


def completed(
    draft: Manifest,
    *,
    nonce: str,
    tables: Sequence[TableRef],
    clock: StageClock,
    linked_nbytes: int = 0,
) -> tuple[Manifest, bytes]:
    """The manifest of a save that has written everything, and its file."""
    complete = dataclasses.replace(
        draft,
        nonce=nonce,
        tables=tuple(tables),
        created=time.time(),
        seconds=dict(clock.seconds),
        linked_nbytes=linked_nbytes,
        written_by=_written_by(),
    )
    data, digest = manifest_file.to_bytes(complete)
    return dataclasses.replace(complete, id=digest), data


def _written_by() -> str:
    """`user@host` of this process; without a user where the system does not name one."""
    try:
        user = f"{getpass.getuser()}@"
    except (OSError, KeyError, ImportError):  # a container may run under an id without a name
        user = ""
    return f"{user}{socket.gethostname()}".encode("utf-8", "replace").decode()
