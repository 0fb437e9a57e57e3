"""Do all processes save the same thing? Each describes it; equal descriptions have equal bytes."""

import dataclasses
import hashlib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass

from pytree_ckpt.format import manifest_file, values, wire
from pytree_ckpt.format.manifest import Leaf, Manifest

MAX_SHOWN = 20
"""Leaves that are named, of those that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What one process is about to save.

    Attributes:
        draft: The manifest, but for what only process 0 decides.
        overwrite: Whether a checkpoint may be replaced.
        contents: Digests of the arrays that each process has a copy of, by leaf.
    """

    draft: Manifest
    overwrite: bool
    contents: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        """The same for all processes that save the same thing.

        User metadata, metrics and library versions may differ: those of process 0 are saved.
        """
        draft = dataclasses.replace(self.draft, metadata=None, metrics={}, versions={})
        data, _ = manifest_file.to_bytes(draft)
        return wire.encode([data, self.overwrite, sorted(self.contents.items())])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Intent":
        """As another process sent it."""
        draft, overwrite, contents = wire.decode(data, what="what another process saves")
        return cls(
            draft=manifest_file.from_bytes(draft, what="the manifest of another process"),
            overwrite=overwrite,
            contents=dict(contents),
        )


def fingerprint(intent: bytes) -> bytes:
    """A few bytes that stand for an intent."""
    return hashlib.sha256(intent).digest()


def differences(mine: Intent, theirs: Intent) -> list[str]:
    """In what another process would save something else than process 0, leaf by leaf.

    Values of leaves are compared too: what differs by process belongs in a `PerProcess`.
    """
    found = [
        f"{name}: {own} in process 0, {other} here"
        for name, own, other in (
            ("overwrite", mine.overwrite, theirs.overwrite),
            ("digest", mine.draft.digest, theirs.draft.digest),
        )
        if own != other
    ]
    own_leaves, other_leaves = mine.draft.by_text, theirs.draft.by_text
    for text in {**own_leaves, **other_leaves}:
        own, other = own_leaves.get(text), other_leaves.get(text)
        if own is None or other is None or own.spec != other.spec or own.path != other.path:
            found.append(f"{text or '(root)'}: {_words(own)} in process 0, {_words(other)} here")
        elif not values.same(own.value, other.value):
            pair = f"{reprlib.repr(own.value)} in process 0, {reprlib.repr(other.value)} here"
            found.append(f"{text or '(root)'}: {pair}{_ADVICE}")
        elif mine.contents.get(own.index) != theirs.contents.get(other.index):
            found.append(f"{text or '(root)'}: not the elements that it has in process 0{_ADVICE}")
    found = found or ["containers: of other kinds than in process 0, or in another order"]
    left = len(found) - MAX_SHOWN
    return [*found[:MAX_SHOWN], *([f"and {left} more"] if left > 0 else [])]


_ADVICE = "; what each process has its own of goes in PerProcess(value)"


def _words(leaf: Leaf | None) -> str:
    if leaf is None:
        return "missing"
    words = leaf.describe()
    if leaf.spec is not None:
        words += f" ({leaf.spec.codec}{', committed' if leaf.spec.committed else ''})"
    return words
