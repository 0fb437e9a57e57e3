"""The leaves that a selection takes."""

from collections.abc import Sequence

from pytree_ckpt.errors import Mismatch, MismatchError
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.plan import patterns


def selected(
    leaves: Sequence[Leaf], select: str | Sequence[str]
) -> tuple[list[Leaf], list[Mismatch]]:
    """The leaves that any pattern matches, all if there is none; and the patterns that match none.

    Raises:
        ValueError: A pattern that is none.
    """
    wanted = patterns.parse_all(select)
    if not wanted:
        return list(leaves), []
    unused = dict(wanted)
    found = []
    for leaf in leaves:
        hits = [text for text, pattern in wanted.items() if pattern.match(leaf.text) is not None]
        if hits:
            found.append(leaf)
        for text in hits:
            unused.pop(text, None)
    missing = "missing: no leaf matches this pattern"
    return found, [Mismatch(path=text, kind="missing", text=missing) for text in unused]


def must_select(leaves: Sequence[Leaf], select: str | Sequence[str]) -> list[Leaf]:
    """As `selected`.

    Raises:
        MismatchError: Patterns that match no leaf, all of them.
        ValueError: A pattern that is none.
    """
    found, wrong = selected(leaves, select)
    if wrong:
        raise MismatchError(
            wrong,
            leaves=len(leaves),
            remedy="Every pattern must match a leaf.",
            title="the selection does not fit the checkpoint",
        )
    return found
