"""Which checkpoints of a root are good, as far as is known without reading their data."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from pytree_ckpt.errors import CheckpointError, NewerFormatError, NotFoundError
from pytree_ckpt.format.manifest import PIN_FILE, QUARANTINE_FILE, Manifest
from pytree_ckpt.format.steps import StepNames
from pytree_ckpt.store import contents
from pytree_ckpt.store.locations import Location, SizeOf

_NO_MANIFEST = "the manifest"
_MAX_MARK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """A committed step as a glance shows it: its manifest, or what is wrong with it.

    Attributes:
        is_pinned: No policy deletes it.
        is_damaged: The trouble is damage. Otherwise the step may be whole, but cannot be read now,
            or not by this release.
    """

    step: int
    is_link: bool
    is_pinned: bool = False
    manifest: Manifest | None = None
    trouble: str | None = None
    is_damaged: bool = False

    @property
    def is_good(self) -> bool:
        return self.trouble is None


def look(root: Location, names: StepNames) -> list[StepState]:
    """Every committed step: manifests are read, files counted and measured, no data is read.

    Raises:
        OSError: The root cannot be read.
    """
    steps, size_of = root.steps_and_sizes(names)
    found = (_look_at(root / names.name(step), step, size_of) for step in steps)
    return [state for state in found if state is not None]


def _look_at(location: Location, step: int, size_of: SizeOf) -> StepState | None:
    """A step, None if it has just been deleted."""
    is_link = location.path is not None and location.path.is_symlink()
    state = partial(StepState, step=step, is_link=is_link)
    try:
        state = partial(state, is_pinned=_is_there(location / PIN_FILE, size_of))
    except OSError as error:
        return state(trouble=str(error))
    if is_marked(location):
        mark = location / QUARANTINE_FILE
        return state(trouble=f"marked as damaged, see {mark}", is_damaged=True)
    try:
        manifest = location.read_manifest()
        damage = contents.missing_files(location / manifest.data_dir, manifest, size_of)
    except NotFoundError:
        return None
    except (NewerFormatError, OSError) as error:
        return state(trouble=str(error))
    except CheckpointError as error:
        return state(trouble=str(error), is_damaged=True)
    if damage:
        return state(manifest=manifest, trouble=str(damage[0]), is_damaged=True)
    return state(manifest=manifest)


def _is_there(file: Location, size_of: SizeOf) -> bool:
    try:
        size_of(file)
    except FileNotFoundError:
        return False
    return True


def is_pinned(location: Location) -> bool:
    """Whether a checkpoint is pinned at this moment.

    Raises:
        OSError: It cannot be told.
    """
    try:
        (location / PIN_FILE).read_file(max_nbytes=0)
    except FileNotFoundError:
        return False
    return True


def pin(location: Location) -> None:
    """Keep a checkpoint from every policy."""
    with suppress(FileExistsError):
        (location / PIN_FILE).write_new(b"pinned: no policy deletes this checkpoint\n")
    location.sync()


def unpin(location: Location) -> None:
    """Let policies have a checkpoint again."""
    (location / PIN_FILE).remove_file()
    location.sync()


def quarantine(location: Location, named: str | None, reason: str) -> None:
    """Mark a checkpoint as damaged and leave it in place; where that is refused, nothing.

    `named` is the data folder of the one that was looked at, which may have been replaced since.
    """
    text = f"{named or _NO_MANIFEST}\n{reason}\n"
    mark = location / QUARANTINE_FILE
    try:
        mark.remove_file()
        mark.write_new(text.encode("utf-8", "replace")[:_MAX_MARK_NBYTES])
        location.sync()
    except OSError:
        return


def is_marked(location: Location) -> bool:
    """Whether a checkpoint is marked; the mark of one that was replaced since says nothing."""
    try:
        mark = (location / QUARANTINE_FILE).read_file(max_nbytes=_MAX_MARK_NBYTES)
    except OSError:
        return False
    found = named_by(location)
    return found is None or mark.split(b"\n", 1)[0] == found.encode()


def named_by(location: Location) -> str | None:
    """The data folder that the manifest names, None where it cannot be read."""
    try:
        return location.read_manifest().data_dir
    except (CheckpointError, OSError):
        return None


def unmark(location: Location) -> None:
    """Remove the mark, if there is one."""
    (location / QUARANTINE_FILE).remove_file()
