"""Strict, deterministic msgpack, and the envelope that every metadata file is in.

A file is one msgpack map `{format, version, kind, id, body}`; `body` is the msgpack of the
content and `id` is the sha256 of the body. Everything here is read from files that may be
damaged or hostile, so sizes are checked before memory is taken.
"""

import hashlib
from typing import Any, Literal

import msgpack

from pytree_ckpt.errors import FormatError, NewerFormatError

FORMAT = "pytree_ckpt"
VERSION = 1
MAX_FILE_BYTES = 64 << 20
"""Largest manifest or table that is written or read."""
MAX_ITEMS = 1 << 20
"""Most elements of all lists and maps of a file together, keys and values counted apart."""
MAX_MSGPACK_DEPTH = 32
"""Deepest nesting of lists and maps."""

FileKind = Literal["manifest", "table"]


def encode(value: Any) -> bytes:
    """The bytes of a value made of None, bool, int, float, str, bytes, list, tuple, dict."""
    out: bytes = msgpack.packb(value, use_bin_type=True, strict_types=False)
    return out


def decode(data: bytes, *, what: str) -> Any:
    """The value of one msgpack object that fills `data`.

    Raises:
        FormatError: Not msgpack, trailing bytes, an extension type, a key that is no text or is
            there twice, a count or a depth beyond the limits.
    """
    _check_extent(data, what)
    limit = min(len(data), MAX_ITEMS)
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            object_pairs_hook=_map,
            ext_hook=_no_extension,
            max_array_len=limit,
            max_map_len=limit,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FormatError(f"{what} is not valid: {str(error) or type(error).__name__}") from None


def _map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if not all(isinstance(key, str) for key, _ in pairs):
        raise ValueError("a map has a key that is no text")
    return without_duplicates(pairs)


def without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map of pairs, for a parser; a `ValueError` if two have one key."""
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a map has a key twice")
    return out


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _steps() -> list[int]:
    """For each first byte of an item without children or length its bytes, else 0."""
    steps = [1] * 256
    for head in range(0xA0, 0xC0):
        steps[head] += head - 0xA0
    for head in (0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB, *range(0x80, 0xA0), *range(0xDC, 0xE0)):
        steps[head] = 0
    for head, nbytes in zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True):
        steps[head] += nbytes
    return steps


_STEP = _steps()
_LENGTH_NBYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_COUNT_NBYTES = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def _check_extent(data: bytes, what: str) -> None:
    """Count elements and depth before memory is taken: an empty list of one byte takes 80.

    What is not msgpack is left to msgpack.

    Raises:
        FormatError: More than `MAX_ITEMS`, or deeper than `MAX_MSGPACK_DEPTH`.
    """
    at, left, total = 0, 1, 1
    above: list[int] = []
    while at < len(data):
        while not left:
            if not above:
                return
            left = above.pop()
        left -= 1
        head = data[at]
        step = _STEP[head]
        if step:
            at += step
            continue
        at += 1
        if head in _LENGTH_NBYTES:
            width = _LENGTH_NBYTES[head]
            at += width + int.from_bytes(data[at : at + width], "big")
            continue
        width = _COUNT_NBYTES.get(head, 0)
        count = int.from_bytes(data[at : at + width], "big") if width else head & 0x0F
        at += width
        count *= 2 if head < 0x90 or head >= 0xDE else 1
        total += count
        if total > MAX_ITEMS:
            raise FormatError(f"{what} has more than {MAX_ITEMS} elements")
        above.append(left)
        left = count
        if len(above) > MAX_MSGPACK_DEPTH:
            raise FormatError(f"{what} is nested deeper than {MAX_MSGPACK_DEPTH}")


def seal(kind: FileKind, content: Any) -> tuple[bytes, bytes]:
    """A metadata file and its id.

    Raises:
        FormatError: The file would be larger than `MAX_FILE_BYTES`, or have more elements than
            a reader takes.
    """
    body = encode(content)
    _check_extent(body, f"the {kind}")
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
        NewerFormatError: A newer version.
        FormatError: Too large, not a file of this kind, or damaged.
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
        is_newer = isinstance(version, int) and version > VERSION
        raise (NewerFormatError if is_newer else FormatError)(
            f"{what} has format version {version!r}, this release reads version {VERSION}; "
            "a newer pytree_ckpt may read it"
        )
    if set(outer) != {"format", "version", "kind", "id", "body"} or outer["kind"] != kind:
        raise FormatError(f"{what} is not a {FORMAT} {kind}")
    body, digest = outer["body"], outer["id"]
    if not isinstance(body, bytes) or hashlib.sha256(body).digest() != digest:
        raise FormatError(f"{what} is damaged: its content does not match its own digest")
    return decode(body, what=what), digest
