"""JSON from files that anybody may have written."""

import json
from typing import Any

from pytree_ckpt.errors import FormatError
from pytree_ckpt.format import wire

MAX_JSON_NBYTES = 100_000_000
"""As the safetensors library limits a header."""
MAX_JSON_ITEMS = 1 << 22
"""An empty object of two bytes takes 64 in memory."""


def json_object(data: bytes, *, what: str) -> dict[str, Any]:
    """The object that a text is.

    Raises:
        FormatError: It is none, is beyond a limit, or has a name twice.

    Example:
        >>> json_object(b'{"a": [1, null]}', what="this")
        {'a': [1, None]}
    """
    if len(data) > MAX_JSON_NBYTES or sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_ITEMS:
        raise FormatError(
            f"{what} has more than {MAX_JSON_NBYTES} bytes, or {MAX_JSON_ITEMS} elements"
        )
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=wire.without_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{what} is no JSON object")
    return found
