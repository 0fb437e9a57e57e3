"""Python values that live in the manifest: exact in type and in every bit."""

import struct
from typing import Any

Value = bool | int | float | complex | str | bytes
MAX_INT_BYTES = 1 << 20
"""Largest `int`, in bytes of two's complement."""

MAX_TEXT = 80
"""Most characters of a text that are shown."""


def to_wire(value: Value) -> list[Any]:
    """A tag and a payload. Floats go as their eight bytes, so that a NaN keeps its bits."""
    if isinstance(value, bool):
        return ["b", value]
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 63:
            return ["i", int(value)]
        nbytes = value.bit_length() // 8 + 1
        if nbytes > MAX_INT_BYTES:
            raise ValueError(f"an int of {nbytes} bytes is larger than {MAX_INT_BYTES}")
        return ["i", value.to_bytes(nbytes, "little", signed=True)]
    if isinstance(value, float):
        return ["f", struct.pack("<d", value)]
    if isinstance(value, complex):
        return ["c", struct.pack("<dd", value.real, value.imag)]
    if isinstance(value, str):
        return ["s", str(value)]
    return ["y", bytes(value)]


def from_wire(item: Any) -> Value:
    """The value of a tag and a payload.

    Raises:
        ValueError: Unknown tag, or a payload that does not fit it.
    """
    match item:
        case ["b", bool() as value]:
            return value
        case ["i", bytes() as data] if 0 < len(data) <= MAX_INT_BYTES:
            return int.from_bytes(data, "little", signed=True)
        case ["i", int() as value] if not isinstance(value, bool):
            return value
        case ["f", bytes() as data] if len(data) == 8:
            return float(struct.unpack("<d", data)[0])
        case ["c", bytes() as data] if len(data) == 16:
            return complex(*struct.unpack("<dd", data))
        case ["s", str() as value]:
            return value
        case ["y", bytes() as value]:
            return value
        case _:
            raise ValueError(f"a value of unknown form: {str(item)[:80]}")


def same(a: Value | None, b: Value | None) -> bool:
    """Whether two values, or the lack of one, are equal in type and in every bit."""
    if a is None or b is None:
        return a is b
    return to_wire(a) == to_wire(b)


def to_text(value: object) -> str:
    """A value in one short line; the whole of it may be a megabyte.

    Example:
        >>> to_text(10**400), to_text("x" * 99)[-4:]
        ('an int of 1329 bits', "xx'…")
    """
    if isinstance(value, int) and value.bit_length() > 512:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]!r}…"
    text = repr(value)
    return text if len(text) <= 2 * MAX_TEXT else f"{text[: 2 * MAX_TEXT]}…"


def count_text(count: int, one: str, many: str | None = None) -> str:
    """A number and its noun.

    Example:
        >>> count_text(1, "leaf", "leaves"), count_text(1200, "chunk")
        ('1 leaf', '1,200 chunks')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def is_utf8(text: str) -> bool:
    """Whether a text can be written; a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_metadata(value: Any, where: str = "metadata", depth: int = 0) -> Any:
    """User metadata as plain JSON-like data that can be written.

    Raises:
        TypeError: Something that is not None, bool, int, float, str, bytes, list, tuple or dict
            with `str` keys.
        ValueError: An int beyond 64 bits, text that is not UTF-8, or nesting deeper than 16.
    """
    if depth > 16:
        raise ValueError(f"{where} is nested deeper than 16")
    if isinstance(value, str) and not is_utf8(value):
        raise ValueError(f"{where} is {value!r}, which is not valid UTF-8")
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"{where} is an int beyond 64 bits; write it as a string")
        return value
    if isinstance(value, (list, tuple)):
        return [check_metadata(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; keys must be strings")
            check_metadata(key, f"a key of {where}")
        return {k: check_metadata(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
    raise TypeError(
        f"{where} is of type {type(value).__name__}; it can be None, bool, int, float, str, bytes, "
        "list, tuple or dict"
    )
