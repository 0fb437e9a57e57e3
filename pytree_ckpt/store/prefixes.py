"""A location in an object store; `object_commit` does the work."""

import errno
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.format.manifest import MANIFEST_FILE, Manifest
from pytree_ckpt.format.steps import StepNames
from pytree_ckpt.store import object_commit
from pytree_ckpt.store.locations import Attempt, Location, SizeOf
from pytree_ckpt.store.objects import Objects, bucket


def prefix_of(scheme: str, rest: str) -> "Prefix":
    """The location that the URL `scheme://rest` means; it is taken as it is, `%` and all.

    Raises:
        CheckpointError: No bucket, or a key that is empty, or has parts that are.
    """
    name, _, key = rest.partition("/")
    key = key.rstrip("/")
    if scheme == "memory":
        name, key = "", f"{name}/{key}".strip("/")
    parts = key.split("/")
    if not all(parts) or "." in parts or ".." in parts:
        raise CheckpointError(
            f"{scheme}://{rest} has no key, or one with parts that are empty or dots"
        )
    return Prefix(bucket(scheme, name), key)


@dataclass(frozen=True, slots=True)
class Prefix(Location):
    """The objects of a bucket whose keys are `key`, or begin with it and a slash."""

    objects: Objects
    key: str

    def __str__(self) -> str:
        return f"{self.objects.url}{self.key}"

    def __truediv__(self, name: str) -> "Prefix":
        return Prefix(self.objects, f"{self.key}/{name}")

    @property
    def path(self) -> None:
        return None

    @property
    def in_errors(self) -> str:
        return f"{self} {self.objects.where}".rstrip()

    def kvstore(self) -> Any:
        return self.objects.store / f"{self.key}/"

    def make_folder(self) -> None:
        """There are no folders."""

    def sync(self) -> None:
        """An object is durable when it is written."""

    def read_file(self, *, max_nbytes: int) -> bytes:
        data, _ = self.objects.read(self.key)
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return data

    def write_new(self, data: bytes) -> None:
        self.objects.put(self.key, data)

    def remove_file(self) -> None:
        self.objects.remove(self.key)

    def sizes(self) -> SizeOf:
        return self._sizes(set(self.objects.names(f"{self.key}/")))

    def _sizes(self, names: set[str]) -> SizeOf:
        def size_of(file: Location) -> None:
            if str(file).removeprefix(f"{self}/") not in names:
                raise FileNotFoundError(errno.ENOENT, "no such object", str(file))

        return size_of

    def read_manifest(self) -> Manifest:
        return object_commit.read_manifest(self.objects, self.key)

    def open_to_read(self) -> tuple[Manifest, ExitStack]:
        return self.read_manifest(), ExitStack()

    def check_free(self, *, overwrite: bool) -> None:
        object_commit.check_free(self.objects, self.key, overwrite=overwrite)

    def attempt(
        self, *, overwrite: bool, needed_nbytes: int, writers: int = 1, nonce: str | None = None
    ) -> AbstractContextManager[Attempt]:
        return object_commit.attempt(
            self.objects, self.key, overwrite=overwrite, writers=writers, nonce=nonce
        )

    def sees(self, nonce: str) -> bool:
        return object_commit.sees(self.objects, self.key, nonce)

    def delete(self) -> bool:
        return object_commit.delete(self.objects, self.key)

    def steps_and_sizes(self, names: StepNames) -> tuple[list[int], SizeOf]:
        found = self.objects.names(f"{self.key}/")
        folders = [name.removesuffix(f"/{MANIFEST_FILE}") for name in found]
        steps = [names.step(f) for f, name in zip(folders, found, strict=True) if f != name]
        return sorted(step for step in steps if step is not None), self._sizes(set(found))

    def unfinished(self, names: StepNames) -> list[tuple[int, bool]]:
        found = [name.partition("/") for name in self.objects.names(f"{self.key}/")]
        committed = {folder for folder, _, rest in found if rest == MANIFEST_FILE}
        written = {folder for folder, _, rest in found if rest.startswith("writer.")}
        begun = {folder for folder, _, rest in found if rest.startswith("data-")} | written
        steps = [(names.step(folder), folder in written) for folder in begun - committed]
        return sorted((step, busy) for step, busy in steps if step is not None)

    def reclaim(self, names: StepNames) -> None:
        inside: dict[str, list[str]] = {}
        for name in self.objects.names(f"{self.key}/"):
            folder, _, rest = name.partition("/")
            inside.setdefault(folder, []).append(rest)
        for folder, found in inside.items():
            if names.step(folder) is not None:
                key = f"{self.key}/{folder}"
                object_commit.reclaim(self.objects, key, found, take_over=True)

    def settle(self, names: StepNames, steps: Iterable[int]) -> None:
        """An object that can be read is durable."""
