"""Safetensors: one file, or several with an index, as the Hugging Face libraries write them.

In a file the tensors of the widest dtypes come first, so that each is aligned, and then in order of
their names. Tied weights are written once for each leaf: every reader finds both.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pytree_ckpt.errors import CheckpointError, FormatError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.values import Value
from pytree_ckpt.interop import names as naming
from pytree_ckpt.interop.exporting import ExportReport, elements_of, written_whole
from pytree_ckpt.interop.flat_files import open_regular, read_box, write_all, write_box
from pytree_ckpt.interop.json_objects import MAX_JSON_NBYTES
from pytree_ckpt.interop.making import ImportReport, make_checkpoint
from pytree_ckpt.interop.names import NamedArray
from pytree_ckpt.interop.safetensors_files import (
    CODES,
    METADATA_KEY,
    WIDEST_LAST,
    file_names,
    read_model,
)
from pytree_ckpt.options import SaveOptions, check_count
from pytree_ckpt.plan.saving import ArrayForm
from pytree_ckpt.plan.selecting import must_select
from pytree_ckpt.store import disk
from pytree_ckpt.store.locations import PathLike, local_path
from pytree_ckpt.verbs.checkpoint import open_checkpoint

_LACKS = {
    name: f"safetensors has no dtype {name}; convert it first"
    for name in dtypes.names()
    if name not in CODES
}

# --- out ----------------------------------------------------------------------------------------


def export_safetensors(
    src: PathLike,
    dst: PathLike,
    *,
    select: str | Sequence[str] = (),
    separator: str = ".",
    max_file_nbytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write arrays of a checkpoint as safetensors, shard by shard and verified.

    Args:
        src: The checkpoint.
        dst: A file that ends in `.safetensors`, or a folder for `model.safetensors`; with more than
            `max_file_nbytes` of tensors for `model-00001-of-00002.safetensors` and so on, with
            their index.
        select: Patterns of the leaves to take; all by default.
        separator: Between the keys of a path in the name of a tensor.
        max_file_nbytes: Bytes of tensors in a file; a larger tensor has a file of its own.
        metadata: More strings for the header. Without a `format` it has "pt", which says that names
            and values are as they are, and without which transformers refuses the file.
        overwrite: Replace files, also those of another number that are there.

    Raises:
        MismatchError: Patterns that match no leaf.
        UnsupportedLeafError: Dtypes and names that the format lacks, names that two leaves would
            have, and values per process: all of them; nothing was written.
        ExistsError: A file is there and `overwrite` is False.
        IntegrityError: A chunk of `src` is damaged.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pc.save(folder + "/a", {"params": {"w": np.ones((2, 3), np.float32)}})
        ...     report = export_safetensors(folder + "/a", folder + "/w.safetensors")
        ...     _ = import_safetensors(folder + "/w.safetensors", folder + "/b")
        ...     report.nbytes, pc.load(folder + "/b")["params"]["w"].shape
        (24, (2, 3))
    """
    strings = _checked_strings(metadata or {})
    check_count("max_file_nbytes", max_file_nbytes)
    with open_checkpoint(src) as checkpoint:
        manifest = checkpoint.manifest
        leaves = must_select(manifest.leaves, select)
        naming.refuse(leaves, _LACKS)
        arrays = [leaf for leaf in leaves if leaf.spec is not None]
        flat = naming.flat_names(arrays, separator, forbids=_forbidden)
        names = dict(zip(arrays, flat, strict=True))
        header = {"format": "pt", **strings}
        if len(leaves) == len(manifest.leaves):
            header[naming.TREE_KEY] = naming.record(manifest.tree, leaves, names)
        groups = _groups(names, max_file_nbytes)
        path = local_path(dst)
        files = file_names(path, len(groups))
        # What leads to the tensors of an export of another number of files.
        rival = file_names(path, 1 if len(groups) > 1 else 2)[-1]
        with written_whole(files, overwrite=overwrite, replaces=[rival]) as made:
            for file, group in zip(made, groups, strict=False):
                _write_file(file, group, header, checkpoint)
            if len(files) > len(groups):
                disk.write_new(made[-1], _index(groups, files))
    lost = [f"{leaf.text}: a Python value" for leaf in leaves if leaf.spec is None]
    return ExportReport(
        files=tuple(map(str, files)),
        nbytes=sum(leaf.array.nbytes for leaf in arrays),
        left_out=() if naming.TREE_KEY in header else tuple(lost),
    )


def _checked_strings(metadata: object) -> Mapping[str, str]:
    is_text = isinstance(metadata, Mapping) and all(
        isinstance(text, str) for pair in metadata.items() for text in pair
    )
    if not is_text or naming.TREE_KEY in metadata:  # type: ignore[operator]
        raise ValueError(
            f"metadata must be a dict of str to str without {naming.TREE_KEY!r}, not {metadata!r}"
        )
    return metadata  # type: ignore[return-value]


def _forbidden(name: str) -> str | None:
    if name == METADATA_KEY:
        return f"would have the name {name!r}, which safetensors keeps for its metadata"
    return None


def _groups(names: Mapping[Leaf, str], most: int) -> list[list[tuple[str, Leaf]]]:
    """The tensors of each file, in the order of the tree."""
    groups: list[list[tuple[str, Leaf]]] = [[]]
    used = 0
    for leaf, name in names.items():
        nbytes = leaf.array.nbytes
        if groups[-1] and used + nbytes > most:
            groups.append([])
            used = 0
        groups[-1].append((name, leaf))
        used += nbytes
    return groups


def _index(groups: Sequence[Sequence[tuple[str, Leaf]]], files: Sequence[Path]) -> bytes:
    weight_map = {
        name: file.name for file, group in zip(files, groups, strict=False) for name, _ in group
    }
    total = sum(leaf.array.nbytes for group in groups for _, leaf in group)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _write_file(
    path: Path, group: Sequence[tuple[str, Leaf]], metadata: Mapping[str, str], checkpoint: Any
) -> None:
    """One file, durable but for its name."""

    def rank(item: tuple[str, Leaf]) -> tuple[int, bytes]:
        return -WIDEST_LAST.index(CODES[item[1].array.dtype]), item[0].encode()

    header: dict[str, Any] = {METADATA_KEY: dict(sorted(metadata.items()))}
    at = 0
    ordered = sorted(group, key=rank)
    for name, leaf in ordered:
        shape, stop = list(leaf.array.shape), at + leaf.array.nbytes
        code = CODES[leaf.array.dtype]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_JSON_NBYTES:
        raise CheckpointError(f"the header of {path} would have {len(text)} bytes; use more files")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(fd, len(text).to_bytes(8, "little") + text, at=0)
        os.ftruncate(fd, 8 + len(text) + at)
        parts = [
            (name, leaf, box)
            for name, leaf in ordered
            if leaf.array.storage != "empty"
            for box in leaf.array.shards.boxes()
        ]
        found = elements_of(checkpoint, [(leaf, box) for _, leaf, box in parts])
        for (name, leaf, box), elements in zip(parts, found, strict=True):
            start = 8 + len(text) + header[name]["data_offsets"][0]
            write_box(fd, start, leaf.array.shape, box, elements)
        os.fsync(fd)
    finally:
        os.close(fd)


# --- in -----------------------------------------------------------------------------------------


def import_safetensors(
    src: PathLike,
    dst: PathLike,
    *,
    separator: str | None = ".",
    overwrite: bool = False,
    options: SaveOptions | None = None,
) -> ImportReport:
    """Make a checkpoint of safetensors, in bounded memory; arrays are arrays of the host.

    What `export_safetensors` wrote of a whole checkpoint comes back with its tree, Python values
    and random keys; what others wrote as nested dicts.

    Args:
        src: A file, or a folder with `model.safetensors` or its index.
        dst: The folder of the checkpoint.
        separator: What names are split at; None keeps them as they are.
        overwrite: Replace a checkpoint at `dst`.
        options: Digest, compression and threads.

    Raises:
        FormatError: A file is not safetensors, or has a dtype that is not known, by name.
        NotFoundError, OSError: The files cannot be read.
        ExistsError: There is a checkpoint at `dst` and `overwrite` is False.
    """
    path = local_path(src)
    tensors, metadata, left_out = read_model(path)
    whole = metadata.pop(naming.TREE_KEY, None)
    found: Sequence[NamedArray | Value]
    if whole is None:
        tree, found = naming.tree_of_names(list(tensors), separator)
    else:
        tree, found = naming.recorded(whole, what=str(path))
    named = {at: item for at, item in enumerate(found) if isinstance(item, NamedArray)}
    if sorted(item.name for item in named.values()) != sorted(tensors):
        raise FormatError(f"{path} has other tensors than the tree that it records")
    of_leaf = {at: tensors[item.name] for at, item in named.items()}
    leaves: list[ArrayForm | Value] = [
        item.form(of_leaf[at].dtype, of_leaf[at].shape) if isinstance(item, NamedArray) else item
        for at, item in enumerate(found)
    ]
    with ExitStack() as opened:
        fds: dict[Path, int] = {}
        for file in dict.fromkeys(tensor.file for tensor in tensors.values()):
            fds[file] = open_regular(file)
            opened.callback(os.close, fds[file])

        def view(leaf: int, box: Box) -> Any:
            tensor = of_leaf[leaf]
            dtype = dtypes.dtype_of(tensor.dtype)
            fd = fds[tensor.file]
            return read_box(fd, tensor.offset, tensor.shape, dtype, box, what=str(tensor.file))

        return make_checkpoint(
            dst,
            tree,
            leaves,
            view,
            source={
                "kind": "safetensors",
                "path": str(path),
                "holds": "weights" if whole is None else "all",
            },
            metadata={key: value for key, value in metadata.items() if key != "format"} or None,
            overwrite=overwrite,
            options=options,
            left_out=left_out,
        )
