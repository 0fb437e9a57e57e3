"""A location on a disk, mounted network storage included: `commit` and `roots` do the work."""

import os
import stat
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.format.steps import StepNames
from pytree_ckpt.store import commit, disk, roots
from pytree_ckpt.store.locations import Attempt, Location, SizeOf


@dataclass(frozen=True, slots=True)
class Folder(Location):
    """An absolute path of the local file system."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> "Folder":
        return Folder(self.path / name)

    def kvstore(self) -> Any:
        # A manifest is read without TensorStore, which takes a third of a second to import.
        import tensorstore as ts

        return ts.KvStore.Spec({"driver": "file", "path": f"{self.path}{os.sep}"})

    def make_folder(self) -> None:
        disk.make_dir(self.path)

    def sync(self) -> None:
        disk.fsync_dir(self.path)

    def read_file(self, *, max_nbytes: int) -> bytes:
        return disk.read_file(self.path, max_nbytes=max_nbytes)

    def write_new(self, data: bytes) -> None:
        disk.write_new(self.path, data)

    def remove_file(self) -> None:
        self.path.unlink(missing_ok=True)

    def sizes(self) -> SizeOf:
        return _size_of

    def read_manifest(self) -> Manifest:
        return commit.read_manifest(self.path)

    def open_to_read(self) -> tuple[Manifest, ExitStack]:
        manifest, lock = commit.open_to_read(self.path)
        stack = ExitStack()
        stack.enter_context(lock)
        return manifest, stack

    def check_free(self, *, overwrite: bool) -> None:
        commit.check_free(self.path, overwrite=overwrite)

    def attempt(
        self, *, overwrite: bool, needed_nbytes: int, writers: int = 1, nonce: str | None = None
    ) -> AbstractContextManager[Attempt]:
        return commit.attempt(
            self.path, overwrite=overwrite, needed_nbytes=needed_nbytes, nonce=nonce
        )

    def sees(self, nonce: str) -> bool:
        return commit.sees(self.path, nonce)

    def delete(self) -> bool:
        return roots.delete(self.path)

    def steps_and_sizes(self, names: StepNames) -> tuple[list[int], SizeOf]:
        return roots.committed_steps(self.path, names), _size_of

    def unfinished(self, names: StepNames) -> list[tuple[int, bool]]:
        return roots.unfinished(self.path, names)

    def reclaim(self, names: StepNames) -> None:
        roots.reclaim(self.path, names)

    def settle(self, names: StepNames, steps: Iterable[int]) -> None:
        roots.settle(self.path, names, steps)


def _size_of(file: Location) -> int | None:
    """Size of a regular file; of anything else one that no file has."""
    found = os.lstat(str(file))
    return found.st_size if stat.S_ISREG(found.st_mode) else -1
