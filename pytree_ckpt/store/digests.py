"""Digest algorithms by the names that the format gives them."""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class RunningDigest(Protocol):
    """A digest of bytes that come in parts; `update` releases the GIL."""

    def update(self, data: Any, /) -> None: ...

    def digest(self) -> bytes: ...


NewDigest = Callable[..., RunningDigest]
"""Starts a digest, empty or of the bytes it is given."""


def new_digest(name: str) -> NewDigest:
    """What starts a digest.

    Raises:
        ModuleNotFoundError: `"xxh3_128"` without the package `xxhash`.
    """
    if name == "sha256":
        return hashlib.sha256
    try:
        import xxhash
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the digest xxh3_128 needs the package xxhash: pip install xxhash",
            name="xxhash",
        ) from None
    start: NewDigest = xxhash.xxh3_128
    return start


def digest_of(start: NewDigest, array: npt.NDArray[Any]) -> bytes:
    """Digest of the C-order bytes of an array, copied only if it is not contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return start(flat.view(np.uint8) if flat.size else b"").digest()
