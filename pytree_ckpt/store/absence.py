"""What there is where no checkpoint is: the difference between a wrong path and a dead save."""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from pytree_ckpt.format.manifest import MANIFEST_FILE, is_data_dir

_ORBAX = frozenset({"_METADATA", "_CHECKPOINT_METADATA"})
_MOST_LOOKED_INTO = 1000
"""Of the names in a folder: an error need not wait for a share with a million of them."""


def why_not_found(path: Path) -> str:
    """In words, for an error: what is at a place that has no manifest, and what is near it."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):  # also when it goes at this moment
        if path.exists() and not path.is_dir():
            return f"{path} is a file, a checkpoint is a folder{_importer([path.name])}"
        try:
            beside = _listed(path.parent, os.listdir(path.parent), [MANIFEST_FILE])
        except OSError:
            beside = ""
        return f"there is nothing at {path}" + (f"; beside it are {beside}" if beside else "")
    if any(is_data_dir(name) for name in names):
        return f"{path} holds a save that has not committed: it is under way, or it died"
    if not _ORBAX.isdisjoint(names):
        return f"{path} is a checkpoint of orbax{_importer(names)}"
    if inside := _listed(path, names, [MANIFEST_FILE]):
        return f"{path} is no checkpoint, but has checkpoints in it: {inside}"
    if inside := _listed(path, names, _ORBAX):
        return f"{path} is no checkpoint, but has checkpoints of orbax in it: {inside}"
    return f"{path} is not a checkpoint: it has no {MANIFEST_FILE}{_importer(names)}"


def _listed(folder: Path, names: Iterable[str], marks: Iterable[str]) -> str:
    """Which of the folders in a folder have one of these files, a few of them by name."""
    looked_into = sorted(names)[:_MOST_LOOKED_INTO]
    # `os.path.isfile` is False also where one may not look.
    have = (n for n in looked_into if any(os.path.isfile(folder / n / mark) for mark in marks))
    found = list(itertools.islice(have, 6))
    return ", ".join(found[:5]) + (", …" if len(found) > 5 else "")


def _importer(names: Iterable[str]) -> str:
    """What makes a checkpoint of the files of another program."""
    for name in names:
        kind = "orbax" if name in _ORBAX else name.rpartition(".")[2]
        if kind in ("orbax", "safetensors", "npz"):
            return f"; import_{kind} converts it"
    return ""
