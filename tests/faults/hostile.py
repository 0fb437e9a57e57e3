"""Mutated metadata with right digests: whatever it says, only named errors come of it."""

import resource
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import jax
import numpy as np

import pytree_ckpt as pc
from pytree_ckpt.format import manifest_file, tables, wire
from tests.faults import children
from tests.faults.judge import Tally
from tests.faults.scenarios import path_of, state
from tests.hostile import Files, mutations

BATCH = 500
"""Mutations of one child, which may die of one."""
MEMORY_NBYTES = 4 * wire.MAX_FILE_BYTES
"""How far the memory of a child may grow."""
SPACE_NBYTES = 16 << 30
"""Address space beyond which a child gets no more: what takes that is a finding, not a wait."""


def campaign(*, mutated: int) -> Tally:
    """Try so many mutations: parse each, and load what is parsed."""
    tally = Tally()
    folder = children.scratch()
    try:
        saved = children.run(lambda root, _: pc.save(path_of(root, 1), _state()), folder)
        if saved.error:
            raise RuntimeError(f"cannot prepare: {saved}")
        for seed, start in enumerate(range(0, mutated, BATCH)):
            number = min(BATCH, mutated - start)
            _batch(folder, seed, number, tally)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def _batch(folder: Path, seed: int, number: int, tally: Tally) -> None:
    def attack(root: Path, acknowledge: children.Acknowledge) -> None:
        _Attack(path_of(root, 1), acknowledge).run(number, seed)

    ended = children.run(attack, folder)
    for told in ended.acks:
        kind, _, text = told.partition(" ")
        if kind == "tried":
            tally.points += int(text)
        else:
            tally.wrong(kind, text)
    if ended.error or ended.killed or ended.hung:
        tally.wrong("failed", f"batch {seed}: {ended.error or ended}")


def _state() -> dict[str, Any]:
    """A leaf of each kind: the format's every field is in use."""
    return {
        **state(1),
        "empty": np.zeros((0, 3), np.int8),
        "key": jax.random.key(1),
        "list": [np.float16(2), (1.5, b"y", 3j, True, None)],
    }


class _Attack:
    def __init__(self, path: Path, tell: children.Acknowledge) -> None:
        self._path, self._tell = path, tell
        self._good = Files.read(path)
        with pc.open(path) as checkpoint:
            found = jax.tree.leaves(checkpoint.to_numpy())
        self._saved = {_bytes_of(leaf) for leaf in found}
        self._tried = 0

    def run(self, number: int, seed: int) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_space_nbytes() + SPACE_NBYTES, -1))
        before = _peak_nbytes()

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=number,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(mutations(self._good))
        def attack(files: Files) -> None:
            self._tried += 1
            self._one(files)

        try:
            attack()
        except Exception as error:  # noqa: BLE001 - a finding
            text = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
            self._tell(f"{'silent' if isinstance(error, _SilentError) else 'failed'} {text[:1500]}")
        self._good.write(self._path)
        if (grown := _peak_nbytes() - before) > MEMORY_NBYTES:
            self._tell(f"failed batch {seed} took {grown} bytes")
        self._tell(f"tried {self._tried}")

    def _one(self, files: Files) -> None:
        try:
            manifest_file.from_bytes(files.manifest, what="the manifest")
            tables.from_bytes(files.table, what="the table")
        except pc.FormatError:
            return
        files.write(self._path)
        for load in (_without_devices, pc.load):
            try:
                found = load(self._path)
            except pc.CheckpointError:
                continue
            for leaf in jax.tree.leaves(found):
                if _bytes_of(leaf) not in self._saved:
                    raise _SilentError(f"an array was never saved: {leaf!r}")


class _SilentError(Exception):
    pass


def _without_devices(path: Path) -> Any:
    with pc.open(path) as checkpoint:
        return checkpoint.to_numpy()


def _bytes_of(leaf: Any) -> bytes:
    """The bytes of an array; nothing of a value, which the manifest itself has."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    return np.asarray(leaf).tobytes() if is_array else b""


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _space_nbytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
