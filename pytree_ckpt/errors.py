"""What can go wrong, grouped by what the caller would do next.

Every error of this library is a `CheckpointError`, and also the built-in error that fits.
Failures of the storage itself (a full disk, a folder without write permission) are `OSError`s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MismatchKind = Literal[
    "sharding",
    "memory kind",
    "process count",
    "per process",
    "shape",
    "dtype",
    "key impl",
    "kind",
    "missing",
    "extra",
    "structure",
    "divisibility",
    "devices",
    "mesh",
    "rule",
]
DamageKind = Literal["digest", "missing", "unreadable", "extra", "link", "size", "metadata"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One way in which a request does not fit a checkpoint.

    `reason` is the beginning of `text` that other leaves share; all of it if it is empty.
    """

    path: str
    kind: MismatchKind
    text: str
    saved: str | None = None
    wanted: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.kind == "process count":
            return self.text  # of the checkpoint, not of a leaf
        return f"{self.path or '(root)'}  {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One place where the bytes of a checkpoint are not what its manifest says.

    Attributes:
        path: The leaf, None where it is not about one.
        file: The file, where it is about a whole one.
        chunk: Position in the grid of the chunks of the leaf.
        box: Start and stop of the damaged elements, in each dimension of the leaf.
        devices: Ids of the devices that held them when they were saved.
    """

    path: str | None
    kind: DamageKind
    text: str
    file: str | None = None
    chunk: tuple[int, ...] | None = None
    box: tuple[tuple[int, int], ...] | None = None
    devices: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.text


class CheckpointError(Exception):
    """Base of all errors that this library raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with the message alone. In a pool of processes an error that
        # cannot be unpickled takes the pool with it, and nobody learns what it was.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[Exception], args: tuple[Any, ...], fields: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.args = args  # OSError.__new__ leaves that to __init__
    error.__dict__.update(fields)
    return error


class MismatchError(CheckpointError, ValueError):
    """The request does not fit the checkpoint; `mismatches` has every reason, not the first."""

    def __init__(
        self,
        mismatches: Sequence[Mismatch],
        *,
        leaves: int,
        remedy: str,
        title: str | None = None,
    ) -> None:
        self.mismatches = tuple(mismatches)
        self.remedy = remedy
        lines = [title or _title(mismatches, leaves), *_lines(mismatches), remedy]
        super().__init__("\n".join(lines).rstrip())


def _title(mismatches: Sequence[Mismatch], leaves: int) -> str:
    if all(m.kind == "rule" for m in mismatches):
        return "the rules do not fit the checkpoint"
    count = len({m.path for m in mismatches if m.kind != "process count"})
    if not count:
        return "the checkpoint does not fit the processes that load it"
    verb = "does" if count == 1 else "do"
    return f"{count} of {max(leaves, count)} leaves {verb} not fit the target"


_ONE_BY_ONE = 3
"""Leaves of one reason that have a line each; more share one."""


def _lines(mismatches: Sequence[Mismatch]) -> list[str]:
    """A line for each, but one for those that are alike, where the first of them is."""
    alike: dict[str, list[str]] = {}
    for m in mismatches:
        leaf = f"{m.path or '(root)'}{m.text.removeprefix(m.reason) if m.reason else ''}"
        alike.setdefault(m.reason or m.text, []).append(leaf)
    lines = []
    for m in mismatches:
        reason = m.reason or m.text
        leaves = alike.get(reason, [])
        if len(leaves) > _ONE_BY_ONE:
            first, more = ", ".join(leaves[:_ONE_BY_ONE]), len(leaves) - _ONE_BY_ONE
            lines.append(f"  {len(leaves)} leaves  {reason}: {first} and {more} more")
            del alike[reason]
        elif leaves:
            lines.append(f"  {m}")
    return lines


class IntegrityError(CheckpointError):
    """The bytes on storage are not what the manifest says; `damage` lists where."""

    def __init__(self, damage: Sequence[Damage], *, note: str = "") -> None:
        self.damage = tuple(damage)
        super().__init__("\n".join([*(str(d) for d in damage), *([note] if note else [])]))


class FormatError(CheckpointError, ValueError):
    """A file is not a checkpoint file, is of a version that this release cannot read, or lies."""


class NewerFormatError(FormatError):
    """A checkpoint that is not damaged, but was written by a release that knows more than this."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """Leaves that cannot be saved or asked for, each with its path; nothing was written."""

    def __init__(self, leaves: Sequence[tuple[str, str]], *, target: bool = False) -> None:
        self.leaves = tuple(leaves)
        count = f"{len(leaves)} leaves" if len(leaves) != 1 else "1 leaf"
        what = "of the target cannot be loaded" if target else "cannot be stored in a checkpoint"
        lines = _lines([Mismatch(path=path, kind="kind", text=text) for path, text in leaves])
        super().__init__("\n".join([f"{count} {what}", *lines]))


class NotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this path."""


class ExistsError(CheckpointError, FileExistsError):
    """There is a checkpoint at this path, and `overwrite=True` was not given."""


class PeerTimeoutError(CheckpointError, TimeoutError):
    """Other processes did not answer before the deadline; `missing` has their indices."""

    def __init__(self, message: str, *, missing: Sequence[int]) -> None:
        self.missing = tuple(missing)
        super().__init__(message)


class PeerError(CheckpointError):
    """What failed on another process failed here too; `failures` says by process what it was."""

    def __init__(self, message: str, *, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__(message)
