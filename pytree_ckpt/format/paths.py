"""Leaf paths: the typed keys from the root of a tree to a leaf.

A path has three forms, each injective within one tree: the keys themselves, a text for people
(`params/dense/kernel`), and a file name that is safe on every file system.
"""

import difflib
import functools
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

KeyKind = Literal["str", "int", "list", "tuple", "attr", "flat"]
KEY_KINDS: tuple[KeyKind, ...] = ("str", "int", "list", "tuple", "attr", "flat")
"""A `dict` key that is a `str` or an `int`, an index of a list or tuple, the name of a field, or
the position of a child in a node that names none of its children."""

_MAX_COMPARED = 2000
"""Texts among which the nearest is looked for."""

MAX_KEY_DIGITS = 400
"""Longest `int` key, in decimal digits."""
MAX_FILE_NAME = 160
"""Longest name of an array folder in bytes; most file systems stop at 255."""

_INTEGER = re.compile(r"-?\d+", re.ASCII)
_ESCAPED = re.compile(rb"[^A-Za-z0-9_\-+=,@]")
_FILE_NAME = re.compile(r"[A-Za-z0-9_\-+=,@.%]{1,255}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Key:
    """One step from a container to its child."""

    kind: KeyKind
    value: str | int

    def __str__(self) -> str:
        if isinstance(self.value, int):
            return str(self.value)
        return _text_of(self.value)


Path = tuple[Key, ...]


@functools.lru_cache(maxsize=4096)
def _text_of(name: str) -> str:
    """A string key as text, never empty, never like an integer, never with a bare slash."""
    if name == "" or _INTEGER.fullmatch(name):
        return f"'{name}'"
    out = name.replace("%", "%25").replace("/", "%2F")
    if out.startswith("'"):
        out = "%27" + out[1:]
    if out.isprintable():
        return out
    return "".join(
        c if c.isprintable() else _percent(c.encode("utf-8", "surrogatepass")) for c in out
    )


def _percent(data: bytes) -> str:
    return "".join(f"%{b:02X}" for b in data)


def to_text(path: Path) -> str:
    """The path for people: keys joined with `/`; two paths of one tree never get one text.

    Example:
        >>> to_text((Key("str", "a/b"), Key("tuple", 0), Key("str", "1")))
        "a%2Fb/0/'1'"
    """
    return "/".join(map(str, path))


def key_from_text(text: str) -> Key:
    """The `dict` key that is written so in a path.

    Example:
        >>> key_from_text("7"), key_from_text("'7'"), key_from_text("a%2Fb").value
        (Key(kind='int', value=7), Key(kind='str', value='7'), 'a/b')
    """
    if _INTEGER.fullmatch(text):
        return Key("int", int(text))
    if text == "''" or (_INTEGER.fullmatch(text[1:-1]) and text[0] == text[-1] == "'"):
        return Key("str", text[1:-1])
    return Key("str", unquote(text))


def _segment(key: Key) -> str:
    """A key as part of a file name: only ASCII, no dot, no slash."""
    if isinstance(key.value, int):
        return str(key.value)
    if not key.value:
        return "%_"
    if _INTEGER.fullmatch(key.value):
        return _percent(key.value[:1].encode()) + key.value[1:]
    return _ESCAPED.sub(lambda byte: _percent(byte[0]).encode(), key.value.encode()).decode()


def _digest(path: Path) -> str:
    canonical = repr([(key.kind, key.value) for key in path]).encode("utf-8", "backslashreplace")
    return hashlib.sha256(canonical).hexdigest()[:16]


def to_file_names(paths: Sequence[Path]) -> list[str]:
    """One folder name for each path, distinct even where a file system ignores case.

    Segments are escaped and joined with dots. A name that is too long, or that differs from
    another only by case, ends in a digest of its path.

    Example:
        >>> to_file_names([(Key("attr", "params"), Key("str", "..")), ()])
        ['params.%2E%2E', '%root']
    """
    names = [".".join(map(_segment, path)) or "%root" for path in paths]
    seen = Counter(name.lower() for name in names)
    return [
        name
        if len(name) <= MAX_FILE_NAME and seen[name.lower()] == 1
        else f"{name[: MAX_FILE_NAME - 18]}%-{_digest(path)}"
        for name, path in zip(names, paths, strict=True)
    ]


def is_safe_file_name(name: str) -> bool:
    """Whether a name read from a file can only name an entry of its own folder."""
    return _FILE_NAME.fullmatch(name) is not None and not name.startswith(".")


def nearest(text: str, known: Iterable[str]) -> str:
    """A note of the known text that is spelled most like another; empty if none is.

    Example:
        >>> nearest("opt_stat", ["params", "opt_state"])
        ' (nearest: opt_state)'
    """
    found = difflib.get_close_matches(text, itertools.islice(known, _MAX_COMPARED), n=1)
    return f" (nearest: {found[0]})" if found else ""
