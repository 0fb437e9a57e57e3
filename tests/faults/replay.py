"""Crash states: a logged run replayed with what was not synced lost, in part, or out of order.

After ALICE (OSDI 2014). What a power cut leaves is any state in which everything that an fsync
covered is there: data of a file by an fsync of the file, an entry by an fsync of its folder. Of the
rest any part may be there, in any order, and of a write any blocks of 4 KiB.
"""

import itertools
import os
import random
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.faults import children, kill
from tests.faults.judge import Judge, Tally
from tests.faults.kill import Weaken
from tests.faults.scenarios import Expected, Scenario
from tests.faults.shim import Fault

BLOCK = 4096
WORK = "work"
"""The folder of each run and of each state: a conversion goes on only from the same path."""
_HEAD = struct.Struct("=II")


@dataclass(eq=False, slots=True)
class Node:
    """A file or a folder, whatever names it has."""

    data: bytes | None
    entries: dict[str, "Node"] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Operation:
    """A change of `node`; it is durable once `node` is synced.

    "name" gives `other` a name in the folder `node`, "move" a new one for an old one, "drop" takes
    a name away, "write" and "cut" change a file; "sync", "note" and "nothing" change nothing.
    """

    kind: Literal["name", "move", "drop", "write", "cut", "sync", "note", "nothing"]
    node: Node
    other: Node | None = None
    name: str = ""
    old: str = ""
    offset: int = 0
    data: bytes = b""

    @property
    def changes(self) -> bool:
        return self.kind not in ("sync", "note", "nothing")

    def parts(self) -> list["Operation"]:
        """Ways in which a write may be there in part."""
        if self.kind != "write" or not self.data:
            return []
        size = len(self.data)
        starts = range(0, size, BLOCK)
        zeros = bytes(size)
        pieces = [zeros, self.data[: size // 2]]
        for start in list(starts)[:3]:
            block = self.data[start : start + BLOCK]
            pieces.append(zeros[:start] + block + zeros[start + len(block) :])
        return [
            Operation(kind="write", node=self.node, offset=self.offset, data=piece)
            for piece in pieces
            if piece != self.data
        ]


@dataclass(slots=True)
class History:
    """What was there, and what was done to it."""

    root: Node
    before: dict[Node, bytes | dict[str, Node]]
    operations: list[Operation]


def read_log(log: Path) -> Iterator[tuple[str, int, int, str, str, bytes]]:
    """Operation, inode, offset, path, second path, data."""
    data = log.read_bytes()
    at = 0
    while at < len(data):
        head_nbytes, data_nbytes = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        head, path2 = data[at : at + head_nbytes].decode().split("\0")
        name, _, inode, offset, path = head.split(" ", 4)
        at += head_nbytes
        yield name, int(inode), int(offset), path, path2, data[at : at + data_nbytes]
        at += data_nbytes


class Recorder:
    """Follows a folder from before the first operation, then reads the log."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._inodes: dict[int, Node] = {}
        self.root = self._scan(base)
        self.before = {
            node: node.entries.copy() if node.data is None else node.data
            for node in self._inodes.values()
        }

    def _scan(self, path: Path) -> Node:
        node = Node(None if path.is_dir() else path.read_bytes())
        self._inodes[path.stat().st_ino] = node
        if node.data is None:
            node.entries = {entry.name: self._scan(entry) for entry in path.iterdir()}
        return node

    def read(self, log: Path) -> History:
        operations = [self._operation(*record) for record in read_log(log)]
        return History(self.root, self.before, operations)

    def _place(self, path: str) -> tuple[Node, str]:
        node = self.root
        *folders, name = Path(path).relative_to(self._base).parts
        for part in folders:
            node = node.entries[part]
        return node, name

    def _operation(
        self, name: str, inode: int, offset: int, path: str, path2: str, data: bytes
    ) -> Operation:
        if name in ("note", "nothing"):
            return Operation(name, self.root, name=path)
        if name == "fsync":
            return Operation("sync", self._inodes[inode])
        if name == "write":
            return Operation("write", self._inodes[inode], offset=offset, data=data)
        if name in ("truncate", "ftruncate"):
            return Operation("cut", self._inodes[inode])
        folder, entry = self._place(path)
        if name in ("create", "mkdir"):
            node = self._inodes[inode] = Node(None if name == "mkdir" else b"")
            folder.entries[entry] = node
            return Operation("name", folder, node, entry)
        if name == "unlink":
            del folder.entries[entry]
            return Operation("drop", folder, name=entry)
        folder2, entry2 = self._place(path2)
        node = folder2.entries[entry2] = folder.entries[entry]
        if name == "link":
            return Operation("name", folder2, node, entry2)
        if folder is not folder2:
            raise NotImplementedError("a rename between folders")
        del folder.entries[entry]
        return Operation("move", folder, node, entry2, old=entry)


def pending_at(operations: Sequence[Operation]) -> tuple[list[int], list[int]]:
    """Of these operations, which a power cut after the last one must leave, and which it may."""
    synced: dict[Node, int] = {}
    for at, operation in enumerate(operations):
        if operation.kind == "sync":
            synced[operation.node] = at
    sure, open_ = [], []
    for at, operation in enumerate(operations):
        if operation.changes:
            (sure if synced.get(operation.node, -1) > at else open_).append(at)
    return sure, open_


def choices(open_: Sequence[int], extra: int, rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Which of the pending operations are there: all subsets if they are few, else many."""
    if len(open_) <= 5:
        for size in range(len(open_) + 1):
            yield from itertools.combinations(open_, size)
        return
    coarse = 1 if extra >= 40 else max(1, len(open_) // 8)
    for cut in range(0, len(open_) + 1, coarse):
        yield tuple(open_[:cut])
        yield tuple(open_[cut:])
    for one in open_[::coarse]:
        yield (one,)
        yield tuple(o for o in open_ if o != one)
    for pair in list(itertools.combinations(open_, 2))[:extra]:
        yield tuple(o for o in open_ if o not in pair)
    for _ in range(extra):
        yield tuple(o for o in open_ if rng.random() < 0.5)


Tree = tuple[tuple[str, bytes | None], ...]


def build(history: History, chosen: Iterable[Operation]) -> Tree:
    """The files and folders that can be reached, by path, after the chosen operations."""
    now: dict[Node, bytes | dict[str, Node]] = {
        node: value.copy() if isinstance(value, dict) else value
        for node, value in history.before.items()
    }
    for operation in chosen:
        node = operation.node
        if node not in now:
            now[node] = {} if node.data is None else b""
        value = now[node]
        if isinstance(value, bytes):
            if operation.kind == "cut":
                now[node] = b""
            else:
                base = value.ljust(operation.offset, b"\0")
                end = operation.offset + len(operation.data)
                now[node] = base[: operation.offset] + operation.data + base[end:]
        elif operation.kind == "drop":
            value.pop(operation.name, None)
        elif operation.other is not None:
            value.pop(operation.old, None)
            value[operation.name] = operation.other
    found: list[tuple[str, bytes | None]] = []
    _walk(history.root, "", now, found)
    return tuple(found)


def _walk(
    node: Node,
    path: str,
    now: dict[Node, bytes | dict[str, Node]],
    found: list[tuple[str, bytes | None]],
) -> None:
    value = now.get(node, {} if node.data is None else b"")
    if isinstance(value, bytes):
        found.append((path, value))
        return
    found.append((path, None))
    for name in sorted(value):
        _walk(value[name], f"{path}/{name}" if path else name, now, found)


def states(
    history: History, *, start: int, extra: int, seed: int, thin: float = 1
) -> Iterator[tuple[int, tuple[str, ...], Tree]]:
    """Distinct crash states: number of operations issued, what was acknowledged, the tree.

    With `thin` below 1, about that part of them.
    """
    rng = random.Random(seed)
    seen: set[int] = set()
    operations = history.operations
    for issued in range(start, len(operations) + 1):
        done = operations[:issued]
        acks = tuple(o.name for o in done if o.kind == "note")
        sure, open_ = pending_at(done)
        plans = [[done[i] for i in sorted({*sure, *some})] for some in choices(open_, extra, rng)]
        everything = [o for o in done if o.changes]
        for at in open_:
            for part in done[at].parts():
                plans += [[part if o is done[at] else o for o in everything]]
        for plan in plans:
            if rng.random() > thin:
                continue
            tree = build(history, plan)
            key = hash((acks, tree))
            if key not in seen:
                seen.add(key)
                yield issued, acks, tree


def write_tree(tree: Tree, base: Path) -> None:
    for path, data in tree:
        if data is None:
            os.mkdir(base / path)
        else:
            with open(base / path, "wb") as file:
                file.write(data)


def record(
    scenario: Scenario,
    folder: Path,
    *,
    weaken: Weaken | None = None,
    kill_at: int = 0,
) -> tuple[History, int]:
    """Log a run; with `kill_at` it is killed there, and the next save is logged too.

    Returns:
        The history, and the number of operations of the run that was killed.
    """
    template = kill.prepared(scenario, folder)
    work, log = folder / WORK, folder / "log"
    shutil.copytree(template, work)
    recorder = Recorder(work)
    root = work / "root"
    fault = Fault(action="kill", at=kill_at) if kill_at else None
    act = kill.acting(scenario, weaken)
    ended = children.run(act, root, below=work, fault=fault, log=log)
    if ended.error or ended.hung:
        raise RuntimeError(f"{scenario.name} fails without a fault: {ended}")
    names = [name for name, *_ in read_log(log)]
    counted = kill_at - 1 if kill_at else ended.operations
    if len(names) - names.count("note") != counted:
        raise RuntimeError(f"{scenario.name}: {counted} operations, but the log has {names}")
    start = 0
    if kill_at:
        start = len(names)

        def go_on(root: Path, acknowledge: children.Acknowledge) -> None:
            if weaken is not None:
                weaken()
            acknowledge(f"go on {scenario.go_on(root)}")

        ended = children.run(go_on, root, below=work, log=log)
        if ended.error or ended.hung:
            raise RuntimeError(f"{scenario.name} does not go on: {ended}")
    history = recorder.read(log)
    for leftover in (template, work):
        shutil.rmtree(leftover)
    log.unlink()
    return history, start


def campaign(
    judge: Judge,
    scenario: Scenario,
    *,
    extra: int = 40,
    most: int | None = None,
    weaken: Weaken | None = None,
    stop_early: bool = False,
) -> Tally:
    """Judge the crash states of a scenario."""
    total = Tally()
    folder = children.scratch()
    try:
        history, _ = record(scenario, folder, weaken=weaken)
        thin = 1 if most is None or most > 100 else 0.3
        found = sample(states(history, start=0, extra=extra, seed=0, thin=thin), most)
        for number, (issued, acks, tree) in enumerate(found):
            work = folder / WORK
            write_tree(tree, work)
            (work / "root").mkdir(exist_ok=True)
            verdict = judge.ask(work / "root", scenario, scenario.expect(acks), bound=False)
            shutil.rmtree(work)
            where = f"{scenario.name}, state {number} after {issued} operations"
            total.add(verdict, where=where)
            if stop_early and not total.is_clean:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return total


# --- killed, gone on, and then a power cut --------------------------------------------------------


def expected_after(
    scenario: Scenario, base: Expected, good: frozenset[int], acks: Sequence[str]
) -> Expected:
    """The bar while a save goes on after a kill, when the steps `good` could be loaded.

    Args:
        scenario: What was killed.
        base: The bar at the kill.
        good: What loads after it; some of it perhaps not durable, and not acknowledged.
        acks: What was acknowledged since.
    """
    newest = sorted(good)
    version = scenario.next_version
    made = 1 if version is not None else (newest[-1:] or [0])[0] + 1
    versions = dict(base.versions)
    is_done = len(acks) > 0
    if version is not None:
        before = base.versions.get(1, frozenset([0]))
        versions[1] = frozenset([version]) if is_done else before | {version}
    if is_done:
        kept = sorted(good | {made})[-scenario.keep :]
        return Expected(required=frozenset(kept), versions=versions)
    kept = newest[-(scenario.keep - 1) :] if scenario.keep > 1 else []
    any_of = base.any_of | frozenset(newest[-scenario.keep :]) | {made}
    if not base.required | base.any_of:
        any_of = frozenset()
    required = base.required & frozenset(kept) if version is None else base.required
    return Expected(required=required, any_of=any_of, versions=versions)


def restart_campaign(
    judge: Judge,
    scenario: Scenario,
    *,
    stride: int = 1,
    most: int | None = None,
    extra: int = 4,
    weaken: Weaken | None = None,
    stop_early: bool = False,
    backwards: bool = False,
) -> Tally:
    """Kill before each sync of a folder; judge the crash states of the next save."""
    total = Tally()
    folder = children.scratch()
    try:
        operations = record(scenario, folder, weaken=weaken)[0].operations
        counted = [o for o in operations if o.kind != "note"]
        # Before a sync there is most that may be lost.
        syncs = [i for i, o in enumerate(counted, 1) if o.kind == "sync" and o.node.data is None]
        for at in syncs[::-stride] if backwards else syncs[::stride]:
            _restarted(judge, scenario, at, folder, total, most, extra, weaken)
            if stop_early and not total.is_clean:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return total


def _restarted(
    judge: Judge,
    scenario: Scenario,
    at: int,
    folder: Path,
    total: Tally,
    most: int | None,
    extra: int,
    weaken: Weaken | None,
) -> None:
    history, start = record(scenario, folder, weaken=weaken, kill_at=at)
    notes = [o.name for o in history.operations[:start] if o.kind == "note"]
    base = scenario.expect(notes)
    good = frozenset(steps_in(build(history, history.operations[:start])))
    for number, (issued, acks, tree) in enumerate(
        sample(states(history, start=start, extra=extra, seed=at), most)
    ):
        work = folder / WORK
        write_tree(tree, work)
        (work / "root").mkdir(exist_ok=True)
        bar = expected_after(scenario, base, good, acks[len(notes) :])
        verdict = judge.ask(work / "root", scenario, bar, bound=False)
        shutil.rmtree(work)
        where = f"{scenario.name}, killed at {at}, state {number} after {issued - start} more"
        total.add(verdict, where=where)


def steps_in(tree: Tree) -> list[int]:
    """Steps of a tree that have a manifest."""
    found = (_LISTED.fullmatch(path) for path, _ in tree)
    return sorted(int(match[1]) for match in found if match)


_LISTED = re.compile(r"root/step_(\d{8})/manifest\.msgpack")


def sample(
    found: Iterator[tuple[int, tuple[str, ...], Tree]], most: int | None
) -> Iterable[tuple[int, tuple[str, ...], Tree]]:
    """At most `most` of them, evenly over all."""
    if most is None:
        return found
    everything = list(found)
    stride = max(1, -(-len(everything) // most))
    return everything[::-1][::stride][::-1]
