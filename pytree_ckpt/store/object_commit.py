"""The commit protocol of an object store: conditional writes of the manifest, and no locks.

A save writes below a fresh `data-<nonce>/`; the checkpoint appears with one conditional create,
or changes with one conditional replacement, of its manifest, which is read back: the nonce says
who won. There are no temporary names, nothing is renamed, and an object is durable once written.

Who is alive is said by `writer.<nonce>`, which a save writes first and deletes last. Whoever
reclaims the data of a save that seems dead overwrites that object, then looks whether the manifest
names the data; the save puts its manifest, then looks whether `writer.<nonce>` is still its own.
One of the two sees the other, so that no checkpoint is left without its data. A save that was
taken for dead when its manifest was on its way puts back the one before, so nothing is removed in
favour of a manifest whose `writer.<nonce>`, or whose data, says that this may yet come.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Literal

from pytree_ckpt.errors import CheckpointError, ExistsError, FormatError, NotFoundError
from pytree_ckpt.format import manifest_file, wire
from pytree_ckpt.format.manifest import (
    DATA_ENTRIES,
    MANIFEST_FILE,
    PIN_FILE,
    QUARANTINE_FILE,
    Manifest,
    data_dir,
)
from pytree_ckpt.store.objects import ABSENT, Objects

_OWN = re.compile(
    rf"(?:writer\.|data-)([0-9a-f]{{32}})(?:$|/(?:{'|'.join(sorted(DATA_ENTRIES))})/)", re.ASCII
)
_TAKEN = b"taken over "
DEAD_AFTER_S = 24 * 3600.0
"""A save that is older than this is dead, for a save to the same place; a manager need not wait."""


def _writer(key: str, nonce: str) -> str:
    return f"{key}/writer.{nonce}"


def read_manifest(objects: Objects, key: str) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises:
        NotFoundError: Nothing there, not a checkpoint, or a save that never committed.
        FormatError: The manifest is damaged, or of a newer release.
    """
    data, _ = objects.read(f"{key}/{MANIFEST_FILE}")
    if data is None:
        raise NotFoundError(_why_not_found(objects, key))
    return manifest_file.from_bytes(
        data[: wire.MAX_FILE_BYTES + 1], what=f"{objects.url}{key}/{MANIFEST_FILE}"
    )


def _why_not_found(objects: Objects, key: str) -> str:
    names = objects.names(f"{key}/")
    place = f"{objects.url}{key}"
    if not names:
        return f"there is nothing at {place} {objects.where}".rstrip()
    if any(name.startswith("data-") for name in names):
        return f"{place} holds a save that has not committed: it is under way, or it died"
    inside = sorted(n.removesuffix(f"/{MANIFEST_FILE}") for n in names if n.endswith(MANIFEST_FILE))
    if inside:
        shown = ", ".join(inside[:5]) + (", …" if len(inside) > 5 else "")
        return f"{place} is no checkpoint, but has checkpoints in it: {shown}"
    return f"{place} is not a checkpoint: it has no {MANIFEST_FILE}"


def check_free(objects: Objects, key: str, *, overwrite: bool) -> tuple[bytes | None, bytes]:
    """The manifest that a save will replace, None if it creates one, and its generation.

    Raises:
        ExistsError: There is a checkpoint, and it must not be replaced.
        OSError: The store does not answer.
    """
    data, generation = objects.read(f"{key}/{MANIFEST_FILE}")
    if data is not None and not overwrite:
        raise ExistsError(
            f"{objects.url}{key} already holds a checkpoint; pass overwrite=True to replace it"
        )
    return data, generation


@contextlib.contextmanager
def attempt(
    objects: Objects, key: str, *, overwrite: bool, writers: int = 1, nonce: str | None = None
) -> Iterator["ObjectAttempt"]:
    """One save: what it wrote is removed unless the block commits, or may have.

    Raises:
        ExistsError: There is a checkpoint and `overwrite` is False.
        CheckpointError: The store ignores conditions, and there are several writers.
        OSError: The store refuses or does not answer.
    """
    replaced, generation = check_free(objects, key, overwrite=overwrite)
    reclaim(objects, key, objects.names(f"{key}/"), take_over=False)
    current = ObjectAttempt(objects, key, generation, nonce, replaced=replaced)
    try:
        if writers > 1 and not current.is_conditional:
            raise CheckpointError(
                f"{objects.url}{key} {objects.where}: this store ignores conditions on writes, "
                f"so it cannot say which of several writers was first; save with one process"
            )
        yield current
    except BaseException:
        if not current.committed:
            current.abandon()
        raise
    if current.committed:
        current.settle()


class ObjectAttempt:
    """A save that is under way below `data-<nonce>/`."""

    def __init__(
        self,
        objects: Objects,
        key: str,
        generation: bytes,
        nonce: str | None = None,
        *,
        replaced: bytes | None = None,
    ) -> None:
        self.nonce = nonce or secrets.token_hex(16)
        self.committed = False
        self._objects = objects
        self._key = key
        self._generation = generation
        self._replaced = replaced
        self._in_doubt = False
        self._writer = _writer(key, self.nonce)
        who = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        self._mark = json.dumps(who).encode()
        objects.put(self._writer, self._mark)
        # It is there, so a store that honours conditions does not create it again.
        self.is_conditional = objects.put_if(self._writer, self._mark, generation=ABSENT) is None

    def commit(self, data: bytes) -> None:
        """Make the checkpoint appear, all at once; what it replaces goes with the end.

        Raises:
            ExistsError: Another save committed first.
            CheckpointError: This save was taken for dead, and its data reclaimed.
            OSError: The store did not answer, and it may or may not have committed.
        """
        objects, manifest = self._objects, f"{self._key}/{MANIFEST_FILE}"
        self._check_alive()
        self._in_doubt = True
        self._put(manifest, data)
        self._in_doubt = False
        found, generation = objects.read(manifest)
        if found != data:
            raise ExistsError(
                f"another save committed to {objects.url}{self._key} while this one was written"
            )
        try:
            self._check_alive()
        except CheckpointError:
            objects.put_if(manifest, self._replaced, generation=generation)
            raise
        self.committed = True

    def settle(self) -> None:
        """Remove what the commit has replaced, and the sign that somebody writes."""
        objects = self._objects
        with contextlib.suppress(OSError):
            objects.remove(self._writer)
            if self._generation != ABSENT:
                names = objects.names(f"{self._key}/")
                reclaim(objects, self._key, names, take_over=False)

    def _put(self, manifest: str, data: bytes) -> None:
        """Write the manifest, if it is what it was when the save began: who won is read afterwards.

        Raises:
            OSError: The store did not answer. It may have done it all the same, or may yet.
        """
        objects = self._objects
        if not self.is_conditional:
            if objects.read(manifest)[1] == self._generation:
                objects.put(manifest, data)
            return
        try:
            objects.put_if(manifest, data, generation=self._generation)
        except OSError:
            if objects.read(manifest)[0] != data:
                raise

    def _check_alive(self) -> None:
        if self._objects.read(self._writer)[0] != self._mark:
            raise CheckpointError(
                f"the save to {self._objects.url}{self._key} was taken for dead by another "
                "process, which has removed its data"
            )

    def abandon(self) -> None:
        """Take back what this save wrote. What cannot be removed now is reclaimed later.

        Its data stays if its manifest may yet appear: a request that was not answered may still
        be on its way.
        """
        if self._in_doubt:
            return
        with contextlib.suppress(OSError):
            mark, _ = self._objects.read(self._writer)
            if mark not in (self._mark, None) and not mark.startswith(_TAKEN):
                return  # Another process copies the same checkpoint here.
            if _named(self._objects, self._key) not in (self.nonce, _UNKNOWN):
                self._objects.remove_below(f"{self._key}/{data_dir(self.nonce)}/")
                self._objects.remove(self._writer)


def sees(objects: Objects, key: str, nonce: str) -> bool:
    """Whether a save has begun there."""
    return objects.read(_writer(key, nonce))[0] is not None


def reclaim(objects: Objects, key: str, names: Iterable[str], *, take_over: bool) -> None:
    """Remove the data of dead saves, and data that was replaced.

    Args:
        names: What is below the key.
        take_over: Every save that has not committed is dead, because the caller is the only one
            who saves here. Otherwise those are that began long ago.
    """
    nonces = {found[1] for name in names if (found := _OWN.match(name))}
    if not nonces or nonces == {_named(objects, key)}:
        return
    states = {nonce: _state(objects, key, nonce, take_over) for nonce in sorted(nonces)}
    # Only now: a save that was alive when it was looked at may have committed since.
    named = _named(objects, key)
    if named is not None and states.get(named) != "dead":
        # Its writer may yet see that it was taken for dead, and put back what it replaced.
        return
    for nonce in (nonce for nonce, state in states.items() if state != "alive"):
        if nonce != named:
            objects.remove_below(f"{key}/{data_dir(nonce)}/")
        objects.remove(_writer(key, nonce))


def _state(
    objects: Objects, key: str, nonce: str, take_over: bool
) -> Literal["alive", "dead", "taken"]:
    """Whether anybody writes this data; what is taken over, be it by this call, cannot commit.

    It may yet put its manifest, and take it back, until it has been taken over for long.
    """
    mark, _ = objects.read(_writer(key, nonce))
    if mark is None:
        return "dead"
    is_old = time.time() - _since(mark) >= DEAD_AFTER_S
    if mark.startswith(_TAKEN):
        return "dead" if is_old else "taken"
    if not (take_over or is_old):
        return "alive"
    objects.put(_writer(key, nonce), _TAKEN + json.dumps({"since": time.time()}).encode())
    return "taken"


def _since(mark: bytes) -> float:
    """When a save began, or was taken over; one that cannot be read began now."""
    try:
        return float(json.loads(mark.removeprefix(_TAKEN))["since"])
    except (ValueError, KeyError, TypeError):
        return time.time()


_UNKNOWN = "?"


def _named(objects: Objects, key: str) -> str | None:
    """The nonce that the manifest names; a damaged manifest may name any."""
    data, _ = objects.read(f"{key}/{MANIFEST_FILE}")
    if data is None:
        return None
    try:
        return manifest_file.from_bytes(data, what=key).nonce
    except FormatError:
        return _UNKNOWN


def delete(objects: Objects, key: str) -> bool:
    """Delete a checkpoint: the manifest first, then the data.

    Who reads it meanwhile gets an error that says so: a store has no locks.

    Returns:
        False, and nothing is touched, if it was just replaced.
    """
    manifest = f"{key}/{MANIFEST_FILE}"
    data, generation = objects.read(manifest)
    if data is not None and objects.put_if(manifest, None, generation=generation) is None:
        return False
    reclaim(objects, key, objects.names(f"{key}/"), take_over=False)
    for mark in (QUARANTINE_FILE, PIN_FILE):
        objects.remove(f"{key}/{mark}")
    return True
