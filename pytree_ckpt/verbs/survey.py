"""What is in a root of numbered checkpoints, and what a policy would delete of it."""

from dataclasses import dataclass
from typing import Literal

from pytree_ckpt.errors import NotFoundError
from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.format.steps import StepNames
from pytree_ckpt.plan.retention import Decision, Keep
from pytree_ckpt.store import health
from pytree_ckpt.store.locations import PathLike, locate
from pytree_ckpt.verbs.rotation import Rotation
from pytree_ckpt.verbs.tiers import Tier

StepStatus = Literal["committed", "damaged", "unreadable", "being written", "unfinished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """A step of a root.

    Attributes:
        status: "unreadable" if the storage, or a newer format, keeps this release from telling;
            "unfinished" if nobody is writing it any more.
        manifest: None unless it can be read.
        pinned: No policy deletes it.
        note: What is wrong, or that the step is a link.
    """

    step: int
    name: str
    status: StepStatus
    manifest: Manifest | None = None
    pinned: bool = False
    note: str = ""


def survey(root: PathLike, *, names: StepNames | None = None) -> tuple[StepSummary, ...]:
    """Every step of a root, ascending, also those whose save has not committed.

    Manifests are read, and files counted and measured; no array data is read.

    Raises:
        NotFoundError: The root does not exist.
        OSError: The root cannot be read.

    Example:
        >>> import tempfile, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = pc.save(pc.step_path(root, 5), {"w": 1})
        ...     [(found.step, found.status) for found in survey(root)]
        [(5, 'committed')]
    """
    tier = _existing(root, names)
    found = [
        StepSummary(
            step=state.step,
            name=tier.names.name(state.step),
            status="committed"
            if state.is_good
            else ("damaged" if state.is_damaged else "unreadable"),
            manifest=state.manifest,
            pinned=state.is_pinned,
            note=state.trouble or ("a link" if state.is_link else ""),
        )
        for state in tier.look()
    ]
    found += [
        StepSummary(
            step=step,
            name=tier.names.name(step),
            status="being written" if busy else "unfinished",
        )
        for step, busy in tier.root.unfinished(tier.names)
    ]
    return tuple(sorted(found, key=lambda summary: summary.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What a policy decides over a root.

    Attributes:
        decision: For each step why it stays or goes.
        deleted: Steps that are gone.
        in_use: Steps that were to go, but are being read, or were pinned meanwhile.
    """

    decision: Decision
    deleted: tuple[int, ...]
    in_use: tuple[int, ...]


def prune(
    root: PathLike, keep: Keep, *, names: StepNames | None = None, delete: bool = False
) -> PruneReport:
    """Decide which steps of a root `keep` drops, and with `delete` delete them.

    Also what dead saves left is then removed. The newest good step always stays, and so does what
    is damaged.

    Raises:
        NotFoundError: The root does not exist.
        OSError: The root cannot be read, or a step not be deleted.

    Example:
        >>> import tempfile, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for step in (1, 2, 3):
        ...         _ = pc.save(pc.step_path(root, step), {"w": 1})
        ...     print(prune(root, Keep(last=1), delete=True).deleted, pc.steps(root))
        (1, 2) [3]
    """
    rotation = Rotation(_existing(root, names), keep)
    decision = rotation.decision()
    in_use = rotation.carry_out(decision) if delete else ()
    gone = [step for step in decision.dropped if delete and step not in in_use]
    return PruneReport(decision=decision, deleted=tuple(gone), in_use=tuple(in_use))


def pin(path: PathLike, *, pinned: bool = True) -> None:
    """Keep a checkpoint from every policy, or with `pinned=False` let them have it again.

    Raises:
        NotFoundError, FormatError: There is no checkpoint that can be read.
        OSError: The storage refused.

    Example:
        >>> import tempfile, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for step in (1, 2):
        ...         _ = pc.save(pc.step_path(root, step), {"w": 1})
        ...     pin(pc.step_path(root, 1))
        ...     print(prune(root, Keep(last=1)).decision)
        keep 1: pinned
        keep 2: newest 1
    """
    location = locate(path)
    location.read_manifest()
    (health.pin if pinned else health.unpin)(location)


def _existing(root: PathLike, names: StepNames | None) -> Tier:
    location = locate(root)
    if location.path is not None and not location.path.is_dir():
        raise NotFoundError(f"there is no folder at {location}")
    return Tier(root=location, names=names or StepNames())
