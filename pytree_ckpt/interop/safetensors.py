"""Safetensors: one file, or several with an index, as the Hugging Face libraries write them.

In a file the tensors of the widest dtypes come first, so that each is aligned, and then in order of
their names. Tied weights are written once for each leaf: every reader finds both.
"""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pytree_ckpt.errors import CheckpointError, ExistsError, FormatError, UnsupportedLeafError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.interop import names as naming
from pytree_ckpt.interop.exporting import ExportReport, selected
from pytree_ckpt.interop.flat_files import read_box, write_box
from pytree_ckpt.interop.making import ImportReport, make_checkpoint
from pytree_ckpt.interop.safetensors_files import (
    CODES,
    MAX_HEADER_NBYTES,
    WIDEST_LAST,
    Tensor,
    file_names,
    files_to_read,
    read_header,
)
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.store import disk
from pytree_ckpt.store.locations import PathLike, local_path
from pytree_ckpt.verbs.checkpoint import open_checkpoint

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
        metadata: More strings for the header.
        overwrite: Replace files.

    Raises:
        UnsupportedLeafError: Dtypes that the format lacks, names that two leaves would have, and
            values per process: all of them; nothing was written.
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
    with open_checkpoint(src) as checkpoint:
        manifest = checkpoint.manifest
        leaves = selected(manifest.leaves, select)
        naming.refuse_values(leaves)
        arrays = [leaf for leaf in leaves if leaf.spec is not None]
        _refuse_dtypes(arrays)
        by_leaf = dict(zip(arrays, naming.flat_names(arrays, separator), strict=True))
        header = {"format": "pytree_ckpt", **(metadata or {})}
        if len(leaves) == len(manifest.leaves):
            numbered = {at: by_leaf[leaf] for at, leaf in enumerate(leaves) if leaf in by_leaf}
            header[naming.TREE_KEY] = naming.record(manifest.tree, leaves, numbered)
        groups = _groups(by_leaf, max_file_nbytes)
        files = file_names(local_path(dst), len(groups))
        if not overwrite and (there := [str(f) for f in files if os.path.lexists(f)]):
            raise ExistsError(f"{there[0]} exists; pass overwrite=True to replace it")
        disk.make_dirs(files[0].parent)
        with ExitStack() as temporary:
            renames = []
            for file, group in zip(files, groups, strict=False):
                made = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
                temporary.callback(made.unlink, missing_ok=True)
                _write_file(made, group, header, checkpoint)
                renames.append((made, file))
            if len(files) > len(groups):
                made = files[-1].with_name(f".{files[-1].name}.{secrets.token_hex(8)}.tmp")
                temporary.callback(made.unlink, missing_ok=True)
                disk.write_new(made, _index(groups, files))
                renames.append((made, files[-1]))
            for made, file in renames:
                os.replace(made, file)
        disk.fsync_dir(files[0].parent)
    lost = [f"{leaf.text}: a Python value" for leaf in leaves if leaf.spec is None]
    return ExportReport(
        files=tuple(map(str, files)),
        nbytes=sum(leaf.spec.nbytes for leaf in arrays if leaf.spec is not None),
        left_out=() if naming.TREE_KEY in header else tuple(lost),
    )


def _refuse_dtypes(leaves: Sequence[Leaf]) -> None:
    wrong = [
        (leaf.text, f"safetensors has no dtype {leaf.spec.dtype}; convert it first")
        for leaf in leaves
        if leaf.spec is not None and leaf.spec.dtype not in CODES
    ]
    if wrong:
        raise UnsupportedLeafError(wrong)


def _groups(names: Mapping[Leaf, str], most: int) -> list[list[tuple[str, Leaf]]]:
    """The tensors of each file, in the order of the tree."""
    groups: list[list[tuple[str, Leaf]]] = [[]]
    used = 0
    for leaf, name in names.items():
        nbytes = leaf.spec.nbytes if leaf.spec is not None else 0
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
    total = sum(leaf.spec.nbytes for group in groups for _, leaf in group if leaf.spec is not None)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _write_file(
    path: Path, group: Sequence[tuple[str, Leaf]], metadata: Mapping[str, str], checkpoint: Any
) -> None:
    """One file, durable but for its name."""

    def rank(item: tuple[str, Leaf]) -> tuple[int, bytes]:
        spec = item[1].spec
        code = CODES[spec.dtype] if spec is not None else ""
        return -WIDEST_LAST.index(code), item[0].encode()

    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    ordered = sorted(group, key=rank)
    for name, leaf in ordered:
        if leaf.spec is not None:
            shape, stop = list(leaf.spec.shape), at + leaf.spec.nbytes
            code = CODES[leaf.spec.dtype]
            header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, stop]}
            at = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise CheckpointError(f"the header of {path} would have {len(text)} bytes; use more files")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(fd, len(text).to_bytes(8, "little") + text)
        os.ftruncate(fd, 8 + len(text) + at)
        for name, leaf in ordered:
            spec = leaf.spec
            if spec is None or spec.storage == "empty":
                continue
            start = 8 + len(text) + header[name]["data_offsets"][0]
            for box in spec.shards.boxes():
                elements = checkpoint.read_box(leaf, spec, box)
                write_box(fd, start, spec.shape, box, elements)
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
    files = files_to_read(path)
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        found, strings = read_header(file)
        for tensor in found:
            if tensor.name in tensors:
                raise FormatError(f"{tensor.name!r} is in {tensors[tensor.name].file} and {file}")
            tensors[tensor.name] = tensor
        metadata |= strings
    whole = metadata.pop(naming.TREE_KEY, None)
    if whole is not None:
        tree = naming.recorded(whole, what=str(path))
        if sorted(filter(None, tree.names)) != sorted(tensors):
            raise FormatError(f"{path} has other tensors than the tree that it records")
    else:
        plain, ordered = naming.tree_of_names(list(tensors), separator)
        nothing = (None,) * len(ordered)
        tree = naming.Recorded(
            tree=plain, names=tuple(ordered), values=nothing, kinds=nothing, key_impls=nothing
        )
    leaves: list[Any] = [
        value
        if name is None
        else naming.form_of(tensors[name].dtype, tensors[name].shape, kind, impl)
        for name, value, kind, impl in zip(
            tree.names, tree.values, tree.kinds, tree.key_impls, strict=True
        )
    ]
    with ExitStack() as opened:
        fds = {file: os.open(file, os.O_RDONLY) for file in files}
        for fd in fds.values():
            opened.callback(os.close, fd)

        def view(leaf: int, box: Box) -> Any:
            tensor = tensors[tree.names[leaf] or ""]
            dtype = dtypes.dtype_of(tensor.dtype)
            fd = fds[tensor.file]
            return read_box(fd, tensor.offset, tensor.shape, dtype, box, what=str(tensor.file))

        manifest = make_checkpoint(
            dst,
            tree.tree,
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
        )
    return ImportReport(manifest=manifest, left_out=())
