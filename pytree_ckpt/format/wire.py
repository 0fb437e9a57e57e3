"""Strict, deterministic msgpack, and the envelope that every metadata file is in.

A file is one msgpack map `{format, version, kind, id, body}`; `body` is the msgpack of the
content and `id` is the sha256 of the body. Everything here is read from files that may be
damaged or hostile, so sizes are checked before memory is taken.
"""

import hashlib
from typing import Any, Literal

import msgpack

from pytree_ckpt.errors import FormatError

FORMAT = "pytree_ckpt"
VERSION = 1
MAX_FILE_BYTES = 64 << 20
"""Largest manifest or table that is written or read."""
MAX_ITEMS = 1 << 22
"""Most elements of one list or map."""
MAX_MSGPACK_DEPTH = 32
"""Deepest nesting of lists and maps."""

FileKind = Literal["manifest", "table"]


def encode(value: Any) -> bytes:
    """The bytes of a value made of None, bool, int, float, str, bytes, list, tuple, dict."""
    out: bytes = msgpack.packb(value, use_bin_type=True, strict_types=False)
    return out


def decode(data: bytes | memoryview, *, what: str) -> Any:
    """The value of one msgpack object that fills `data`.

    Raises:
        FormatError: Not msgpack, trailing bytes, an extension type, a duplicate key, a count or
            a depth beyond the limits.
    """
    limit = min(len(data), MAX_ITEMS)
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            object_pairs_hook=_without_duplicates,
            ext_hook=_no_extension,
            max_array_len=limit,
            max_map_len=limit,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FormatError(f"{what} is not valid: {_reason(error)}") from None
    _check_depth(value, what)
    return value


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a map has a key twice")
    return out


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _check_depth(value: Any, what: str) -> None:
    level = [value]
    for _ in range(MAX_MSGPACK_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, (list, dict))
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (list, dict))
        ]
        if not level:
            return
    raise FormatError(f"{what} is nested deeper than {MAX_MSGPACK_DEPTH}")


def seal(kind: FileKind, content: Any) -> tuple[bytes, bytes]:
    """A metadata file and its id.

    Raises:
        FormatError: The file would be larger than `MAX_FILE_BYTES`.
    """
    body = encode(content)
    digest = hashlib.sha256(body).digest()
    data = encode({"format": FORMAT, "version": VERSION, "kind": kind, "id": digest, "body": body})
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(
            f"the {kind} would have {len(data)} bytes, the limit is {MAX_FILE_BYTES}; "
            "store long strings and bytes as arrays (numpy.frombuffer)"
        )
    return data, digest


def unseal(kind: FileKind, data: bytes, *, what: str) -> tuple[Any, bytes]:
    """The content of a metadata file and its id, after version, digest and limits are checked.

    Raises:
        FormatError: Too large, not a file of this kind, a newer version, or damaged.
    """
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(f"{what} has {len(data)} bytes, the limit is {MAX_FILE_BYTES}")
    if not data:
        raise FormatError(f"{what} is empty")
    outer = decode(data, what=what)
    if not isinstance(outer, dict) or outer.get("format") != FORMAT:
        raise FormatError(f"{what} is not a {FORMAT} file")
    version = outer.get("version")
    if version != VERSION or isinstance(version, bool):
        raise FormatError(
            f"{what} has format version {version!r}, this release reads version {VERSION}; "
            "a newer pytree_ckpt may read it"
        )
    if set(outer) != {"format", "version", "kind", "id", "body"} or outer["kind"] != kind:
        raise FormatError(f"{what} is not a {FORMAT} {kind}")
    body, digest = outer["body"], outer["id"]
    if not isinstance(body, bytes) or hashlib.sha256(body).digest() != digest:
        raise FormatError(f"{what} is damaged: its content does not match its own digest")
    return decode(body, what=what), digest
