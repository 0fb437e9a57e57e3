"""What the exports of all formats share."""

from collections.abc import Sequence
from dataclasses import dataclass

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.plan import patterns


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The files that an export wrote, the bytes of their tensors, and what it left out."""

    files: tuple[str, ...]
    nbytes: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.nbytes} bytes in {len(self.files)} files", *self.files]
        return "\n".join([*lines, *(f"not carried over: {what}" for what in self.left_out)])


def selected(leaves: Sequence[Leaf], select: str | Sequence[str]) -> list[Leaf]:
    """The leaves that any pattern matches; all, if there is no pattern.

    Raises:
        CheckpointError: None matches.
    """
    texts = [select] if isinstance(select, str) else select
    wanted = [patterns.parse(text) for text in texts]
    found = [
        leaf
        for leaf in leaves
        if not wanted or any(pattern.match(leaf.text) is not None for pattern in wanted)
    ]
    if not found and leaves:
        raise CheckpointError(f"no leaf matches {', '.join(texts)}")
    return found
