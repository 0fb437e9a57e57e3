"""Digest algorithms by the names that the format gives them."""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Digest = Callable[[Any], bytes]


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


def digest_function(name: str) -> Digest:
    """The function from a contiguous buffer to its digest; errors as `new_digest`."""
    start = new_digest(name)
    return lambda data: start(data).digest()


def digest_of(function: Digest, array: npt.NDArray[Any]) -> bytes:
    """Digest of the C-order bytes of an array, copied only if it is not contiguous."""
    if array.size == 0:
        return function(b"")
    return function(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
