"""Patterns of leaf paths: which paths match, and what a match becomes under another pattern."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN = re.compile(r"(\*\*|\*|\{\}|%2A|%7B)")
_REGEX = {"*": "([^/]*)", "{}": "([0-9]+)", "%2A": r"\*", "%7B": r"\{"}
_LITERAL = {"%2A": "*", "%7B": "{"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A pattern of the text of a path.

    `*` stands for any characters of one key, `**` for any number of whole keys, `{}` for a number.
    `%2A` is a star and `%7B` a brace that a key has itself; the rest is as paths are written, so
    that `1` is an int and `'1'` a str.

    Example:
        >>> pattern = parse("params/*/kernel")
        >>> pattern.match("params/dense/kernel"), pattern.match("params/a/b/kernel")
        (('dense',), None)
        >>> parse("model/**").fill(("/dense/kernel",))
        'model/dense/kernel'
    """

    text: str
    tokens: tuple[str, ...]
    wildcards: tuple[str, ...]
    regex: re.Pattern[str]

    def match(self, text: str) -> tuple[str, ...] | None:
        """What the wildcards stand for in the text of a path, None if it does not match."""
        found = self.regex.fullmatch(_rooted(text))
        return None if found is None else found.groups()

    def fill(self, found: tuple[str, ...], number: str = "") -> str:
        """The text with what wildcards stand for elsewhere in their places, in order."""
        values = iter(found)
        parts = [
            number if token == "{}" else next(values) if token in ("*", "**") else token
            for token in self.tokens
        ]
        return "".join(_LITERAL.get(part, part) for part in parts).removeprefix("/")


def parse(text: str) -> Pattern:
    """A pattern from its text; slashes at the ends do not count.

    Raises:
        ValueError: No str, `**` beside other characters of a key, an empty key, `{}` twice.
    """
    if not isinstance(text, str):
        raise ValueError(f"a pattern is a str such as 'params/**', not {text!r}")
    tokens: list[str] = []
    regex = ""
    for key in _rooted(text.strip("/")).split("/")[1:]:
        if not key:
            raise ValueError(f"the pattern {text!r} has an empty key; the key '' is written \"''\"")
        if key == "**":
            # What it stands for begins with its slash, so that it may be nothing.
            tokens.append("**")
            regex += "((?:/[^/]+)*)"
            continue
        parts = [part for part in _TOKEN.split(key) if part]
        if "**" in parts:
            raise ValueError(f"in the pattern {text!r} '**' must be a whole key")
        tokens += ["/", *parts]
        regex += "/" + "".join(_REGEX.get(part) or re.escape(part) for part in parts)
    wildcards = tuple(token for token in tokens if token in ("*", "**", "{}"))
    if wildcards.count("{}") > 1:
        raise ValueError(f"the pattern {text!r} has '{{}}' twice")
    return Pattern(text=text, tokens=tuple(tokens), wildcards=wildcards, regex=re.compile(regex))


def parse_all(select: str | Sequence[str]) -> dict[str, Pattern]:
    """The patterns of a selection, by their text; errors as `parse`."""
    if not isinstance(select, Sequence):
        raise ValueError(f"select must be a pattern or a list of them, not {select!r}")
    return {text: parse(text) for text in ([select] if isinstance(select, str) else select)}


def _rooted(text: str) -> str:
    return f"/{text}" if text else ""
