"""The commit, weakened on purpose: each of these must be caught, or the campaigns prove nothing.

They are made in the child that runs the attack, from the source, and are gone with it.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tests.faults import disks, kill, power, replay
from tests.faults.judge import Judge, Tally
from tests.faults.scenarios import (
    Scenario,
    conversion,
    deletion,
    first_save,
    linked,
    overwrite,
    rotation,
)

COMMIT, DISK, ROOTS = (f"pytree_ckpt.store.{name}" for name in ("commit", "disk", "roots"))
RAW, WRITING = "pytree_ckpt.store.raw", "pytree_ckpt.store.writing"
CONVERT, ROTATION = "pytree_ckpt.verbs.convert", "pytree_ckpt.verbs.rotation"

Campaign = Callable[..., Tally]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A weakening: edits `(module, old text, new text)`, or a function that makes it."""

    name: str
    edits: Sequence[tuple[str, str, str]] = ()
    make: Callable[[], None] | None = None
    scenarios: Sequence[Callable[[], Scenario]] = field(default=(first_save, overwrite))
    campaigns: Sequence[str] = ("replay", "kill", "power")

    def sources(self) -> dict[str, str]:
        """The weakened source of each module."""
        sources: dict[str, str] = {}
        for name, old, new in self.edits:
            source = sources.get(name) or inspect.getsource(importlib.import_module(name))
            if source.count(old) != 1:
                raise RuntimeError(f"{name} does not have this text once: {old!r}")
            sources[name] = source.replace(old, new)
        return sources

    def weaken(self) -> None:
        """Weaken the code of this process."""
        for name, source in self.sources().items():
            _replace(importlib.import_module(name), source, self.name)
        if self.make is not None:
            self.make()


def _replace(module: ModuleType, source: str, name: str) -> None:
    """Run a module's new source in it, and give what is new to all who imported the old."""
    old = {
        id(value): key for key, value in vars(module).items() if not isinstance(value, ModuleType)
    }
    kept = list(vars(module).values())  # so that no id is used again
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    for other in [m for n, m in sys.modules.items() if n.partition(".")[0] == "pytree_ckpt"]:
        for key, value in list(vars(other).items()):
            if key == old.get(id(value)) and other is not module:
                setattr(other, key, vars(module)[key])
    del kept


def data_after_the_commit() -> None:
    """The arrays are written when table and manifest are there already."""
    from pytree_ckpt.store import commit, raw, writing

    late: list[Callable[[], None]] = []
    new_raw = raw.new_raw
    committed = commit.Attempt.commit

    @contextmanager
    def late_raw(file: str, **sizes: int) -> Iterator[Callable[..., None]]:
        blocks: list[bytes] = []
        yield lambda *parts: blocks.extend(map(bytes, parts))

        def write() -> None:
            with new_raw(file, **sizes) as append:
                for block in blocks:
                    append(memoryview(block))

        late.append(write)

    def commit_first(self: Any, data: bytes) -> None:
        committed(self, data)
        for job in late:
            job()
        late.clear()

    writing.new_raw = late_raw
    commit.Attempt.commit = commit_first  # type: ignore[method-assign]


UNSYNCED_CHUNKS = (RAW, "            os.fsync(fd)\n", "")
UNSYNCED_FOLDERS = (DISK, "    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)\n", "    return\n")
UNSYNCED_FILES = (
    DISK,
    "write_all(fd, data)\n        os.fsync(fd)\n",
    "write_all(fd, data)\n",
)
FOLDERS_FIRST = """        disk.fsync_dir(self.folder)
        disk.fsync_dir(path)
        disk.fsync_above(path, made=self._made)
"""
WRITE_TEMPORARY = "        disk.write_new(self.temporary, data)\n"
IN_PLACE = """        with open(path / MANIFEST_FILE, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        disk.fsync_dir(path)
        self.committed = True
        reclaim(self.path)
        return
"""
UNLINK = "            (path / MANIFEST_FILE).unlink()\n"
SYNC = "    disk.fsync_dir(path)\n"
REMOVE = "    if named is not None:\n        disk.remove_tree(path / named)\n"
REMOVE_FIRST = "            if named is not None:\n                disk.remove_tree(path / named)\n"
TABLE = "contents.table_file(self._data, self._process).write_new(data)"
SETTLE = """        if decision.dropped:
            self._tier.root.settle(self._tier.names, [n for n in decision.kept if n != step])
"""
NAMED = "if _named(self.path) in (self.folder.name, _UNKNOWN):"


def _rotation_1() -> Scenario:
    return rotation(1)


ALL = [
    Mutant(name="chunks are not synced", edits=[UNSYNCED_CHUNKS]),
    Mutant(
        name="the table is not synced",
        edits=[
            (
                WRITING,
                TABLE,
                "contents.table_file(self._data, self._process).path.write_bytes(data)",
            )
        ],
    ),
    Mutant(
        name="the manifest is not synced",
        edits=[(COMMIT, WRITE_TEMPORARY, "        self.temporary.write_bytes(data)\n")],
    ),
    Mutant(name="no folder is synced before the manifest", edits=[(COMMIT, FOLDERS_FIRST, "")]),
    Mutant(
        name="the folder is not synced after the manifest",
        edits=[(COMMIT, "share()\n        disk.fsync_dir(path)\n", "share()\n")],
    ),
    Mutant(
        name="with K = 1 the old step goes before the commit",
        edits=[(ROTATION, "if protect_last and infos:", "if False:")],
        scenarios=[_rotation_1],
    ),
    Mutant(
        name="the data is removed before the manifest",
        edits=[(ROOTS, UNLINK + SYNC + REMOVE, REMOVE_FIRST + UNLINK + SYNC)],
        scenarios=[deletion],
    ),
    Mutant(
        name="no sync after the manifest is unlinked",
        edits=[(ROOTS, UNLINK + SYNC, UNLINK)],
        scenarios=[deletion],
    ),
    Mutant(name="the manifest is written in place", edits=[(COMMIT, WRITE_TEMPORARY, IN_PLACE)]),
    Mutant(name="nothing is synced", edits=[UNSYNCED_CHUNKS, UNSYNCED_FOLDERS, UNSYNCED_FILES]),
    Mutant(
        name="folders of arrays are not synced",
        edits=[(WRITING, "(folder.sync for folder in folders)", "(folder.sync for folder in ())")],
    ),
    Mutant(
        name="folders of linked files are not synced",
        edits=[(WRITING, "(folder.sync for folder in folders)", "(folder.sync for folder in ())")],
        scenarios=[linked],
    ),
    Mutant(name="table and manifest before the data", make=data_after_the_commit),
    Mutant(
        name="digests of two chunks change places in the table",
        edits=[(WRITING, "found.append(running.digest())", "found.insert(0, running.digest())")],
    ),
    Mutant(
        name="folders that a dead save made are not synced",
        edits=[(COMMIT, "disk.fsync_above(path, made=self._made)", "pass")],
        campaigns=["restart"],
        scenarios=[first_save],
    ),
    Mutant(
        name="leftovers are removed before what unnamed them is durable",
        edits=[(COMMIT, "        disk.fsync_dir(path)\n        for name", "        for name")],
        campaigns=["restart"],
        scenarios=[overwrite],
    ),
    Mutant(
        name="a step goes for one that is not durable yet",
        edits=[(ROTATION, SETTLE, "")],
        campaigns=["restart"],
        scenarios=[_rotation_1],
    ),
    Mutant(
        name="a conversion that is there is not made durable",
        edits=[(CONVERT, "            commit.settle(self.folder)\n", "")],
        campaigns=["restart"],
        scenarios=[conversion],
    ),
    Mutant(
        name="a failed save takes its data back, committed or not",
        edits=[(COMMIT, NAMED, "if False:")],
        campaigns=["disk"],
        scenarios=[first_save],
    ),
]


def catch(
    judge: Judge, mutant: Mutant, *, stride: int, most: int, all_campaigns: bool
) -> dict[str, str]:
    """Which campaigns catch a mutant, and what they say; for one that does not, no text.

    Unless `all_campaigns`, none is tried after the first that does.
    """
    attacks: dict[str, Campaign] = {
        "replay": lambda s: replay.campaign(
            judge, s, most=most, weaken=mutant.weaken, stop_early=True
        ),
        "kill": lambda s: kill.campaign(
            judge, s, stride=stride, weaken=mutant.weaken, stop_early=True
        ),
        "power": lambda s: power.campaign(
            judge, s, power.ALL[0], stride=8, weaken=mutant.weaken, stop_early=True
        ),
        "restart": lambda s: replay.restart_campaign(
            judge, s, most=25, weaken=mutant.weaken, stop_early=True, backwards=True
        ),
        "disk": lambda s: disks.campaign(
            judge, s, disks.refused, weaken=mutant.weaken, stop_early=True, backwards=True
        ),
    }
    caught: dict[str, str] = {}
    for name in attacks:
        if name not in mutant.campaigns or (any(caught.values()) and not all_campaigns):
            continue
        if name == "power" and power.why_not(power.ALL[0]) is not None:
            continue
        caught[name] = ""
        for scenario in mutant.scenarios:
            found = attacks[name](scenario())
            if not found.is_clean:
                caught[name] = found.notes[0]
                break
    return caught
