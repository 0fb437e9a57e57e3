"""Digest algorithms by the names that the format gives them."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Digest = Callable[[Any], bytes]


def digest_function(name: str) -> Digest:
    """The function from a contiguous buffer to its digest; it releases the GIL.

    Raises:
        ModuleNotFoundError: `"xxh3_128"` without the package `xxhash`.
    """
    if name == "sha256":
        return lambda data: hashlib.sha256(data).digest()
    try:
        import xxhash
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the digest xxh3_128 needs the package xxhash: pip install 'pytree-ckpt[xxhash]'",
            name="xxhash",
        ) from None
    return lambda data: bytes(xxhash.xxh3_128_digest(data))


def digest_of(function: Digest, array: npt.NDArray[Any]) -> bytes:
    """Digest of the C-order bytes of an array, copied only if it is not contiguous."""
    if array.size == 0:
        return function(b"")
    return function(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
