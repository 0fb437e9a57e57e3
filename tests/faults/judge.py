"""Whether a root fulfils the promises: the bar of every campaign."""

import hashlib
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import pytree_ckpt as pc
from tests.faults.scenarios import STEP, Expected, Scenario, all_scenarios, is_content

VERSIONS = range(10)
T = TypeVar("T")


@dataclass(slots=True)
class Tally:
    """What a campaign found. All but `points` must be zero.

    Attributes:
        lost: Checkpoints that had to load and did not.
        silent: Loads that gave other values than were saved.
        broken: Listed checkpoints that did not load.
        leftovers: Files and folders of dead saves that the next save left.
        failed: Anything else: a save that does not work, an error without a name, too much disk.
    """

    points: int = 0
    lost: int = 0
    silent: int = 0
    broken: int = 0
    leftovers: int = 0
    failed: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.silent or self.broken or self.leftovers or self.failed)

    def add(self, other: "Tally", *, where: str = "") -> None:
        self.points += other.points
        self.lost += other.lost
        self.silent += other.silent
        self.broken += other.broken
        self.leftovers += other.leftovers
        self.failed += other.failed
        self.notes += [f"{where}: {note}" if where else note for note in other.notes]

    def wrong(self, kind: str, note: str, *, by: int = 1) -> None:
        setattr(self, kind, getattr(self, kind) + by)
        self.notes.append(f"{kind}: {note}")


def judge(root: Path, scenario: Scenario, expected: Expected, *, bound: bool = True) -> Tally:
    """Look at a root after a crash, go on with the next save, and look again. Changes the root."""
    tally = Tally(points=1)
    if bound and (found := len(list(root.glob("step_*/data-*")))) > expected.most:
        tally.wrong("failed", f"{found} data folders, at most {expected.most}")
    good = look(root, expected, tally)
    if expected.only is not None and set(pc.steps(root)) - expected.only:
        tally.wrong("failed", f"listed after their deletion: {pc.steps(root)}")
    missing = expected.required - good
    if missing:
        tally.wrong("lost", f"steps {sorted(missing)}; {sorted(good)} load", by=len(missing))
    if expected.any_of and not expected.any_of & good:
        tally.wrong("lost", f"none of {sorted(expected.any_of)}; {sorted(good)} load")
    if tally.is_clean:
        _go_on(root, scenario, expected, good, tally)
    return tally


def look(root: Path, expected: Expected, tally: Tally) -> set[int]:
    """Load everything that is listed; the steps that are as they must be."""
    good = set()
    for step in pc.steps(root):
        allowed = expected.versions.get(step, frozenset([0]))
        found = version_at_rest(root / f"step_{step:08d}", step)
        if isinstance(found, str):
            tally.wrong("broken", f"step {step} is listed: {found}")
        elif found is None:
            tally.wrong("silent", f"step {step} has values that were never saved")
        elif found not in allowed:
            tally.wrong("lost", f"step {step} has version {found}, not one of {sorted(allowed)}")
        else:
            good.add(step)
    return good


_loaded: dict[bytes, int] = {}


def version_at_rest(path: Path, step: int) -> int | str | None:
    """As `version_of`, of what nobody writes to; what has loaded before, byte for byte, is known.

    Most of what a crash state, or a copy, holds has been loaded in another one.
    """
    key = hashlib.sha256(b"%d" % step)
    for base, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            file = os.path.join(base, name)
            data = os.readlink(file).encode() if os.path.islink(file) else Path(file).read_bytes()
            key.update(f"{os.path.relpath(file, path)} {len(data)} ".encode() + data)
    if key.digest() not in _loaded:
        found = version_of(path, step)
        if not isinstance(found, int):
            return found
        _loaded[key.digest()] = found
    return _loaded[key.digest()]


def version_of(path: Path, step: int) -> int | str | None:
    """Which content a checkpoint has; None if one that was never saved; an error as text."""
    try:
        with pc.open(path) as checkpoint:
            tree = checkpoint.to_numpy()
    except (pc.CheckpointError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return next((v for v in VERSIONS if is_content(tree, step, v)), None)


def _go_on(
    root: Path, scenario: Scenario, expected: Expected, good: set[int], tally: Tally
) -> None:
    try:
        made = scenario.go_on(root)
    except Exception as error:  # noqa: BLE001 - any error is a finding
        tally.wrong("failed", f"the next save: {type(error).__name__}: {error}")
        return
    versions = {**expected.versions, made: frozenset(VERSIONS)}
    now = look(root, Expected(versions=versions), tally)
    wanted = set(sorted(good | {made})[-scenario.keep :])
    if wanted - now:
        tally.wrong("lost", f"after the next save: {sorted(wanted - now)}")
    stray = list(stray_files(root))
    if stray:
        tally.wrong("leftovers", ", ".join(stray[:4]), by=len(stray))


_OWN = re.compile(r"data-[0-9a-f]{32}|manifest\.[0-9a-f]{32}\.tmp")


def stray_files(root: Path) -> Iterable[str]:
    """What dead saves left in the folders of steps."""
    for folder in sorted(root.iterdir()):
        if not STEP.fullmatch(folder.name):
            continue
        try:
            named = pc.read_manifest(folder).data_dir
        except pc.CheckpointError:
            named = None
            yield folder.name  # a folder of a step without a checkpoint
        for entry in sorted(os.listdir(folder)):
            if _OWN.fullmatch(entry) and entry != named:
                yield f"{folder.name}/{entry}"
        if named is not None:
            for base, _, files in os.walk(folder / named):
                yield from (f"{base}/{file}" for file in files if file.endswith(".__lock"))


class Judge:
    """A process of its own that judges: it may use JAX, which must not be used before a fork."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._pipe), daemon=True)
        self._process.start()
        other.close()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of a module there.

        Raises:
            Exception: What it raised.
        """
        self._pipe.send((function, arguments))
        result, error = self._pipe.recv()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def ask(self, root: Path, scenario: Scenario, expected: Expected, **settings: Any) -> Tally:
        """As `judge`; the root is removed."""
        return self.call(_judge_named, root, scenario.name, expected, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join()


def _judge_named(root: Path, name: str, expected: Expected, settings: dict[str, Any]) -> Tally:
    (scenario,) = [known for known in all_scenarios() if known.name == name]
    tally = judge(root, scenario, expected, **settings)
    shutil.rmtree(root, ignore_errors=True)
    return tally


def _serve(pipe: Any, other: Any) -> None:
    other.close()
    while (asked := pipe.recv()) is not None:
        function, arguments = asked
        try:
            answer = (function(*arguments), None)
        except Exception as error:  # noqa: BLE001 - raised by whoever asked
            answer = (None, RuntimeError(f"{type(error).__name__}: {error}"))
        pipe.send(answer)
