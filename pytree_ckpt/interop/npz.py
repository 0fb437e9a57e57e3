"""Numpy's archives: one `.npy` for each array, all in one zip file."""

import ast
import math
import os
import secrets
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pytree_ckpt.errors import ExistsError, FormatError, UnsupportedLeafError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Box, Shape
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.interop import names as naming
from pytree_ckpt.interop.exporting import ExportReport, selected
from pytree_ckpt.interop.flat_files import read_box
from pytree_ckpt.interop.making import ImportReport, make_checkpoint
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.store import disk
from pytree_ckpt.store.locations import PathLike, local_path
from pytree_ckpt.verbs.checkpoint import open_checkpoint

_MAX_HEADER_NBYTES = 1 << 16
_LOCAL_HEADER_NBYTES = 30
_SLAB_NBYTES = 32 << 20


def export_npz(
    src: PathLike,
    dst: PathLike,
    *,
    select: str | Sequence[str] = (),
    separator: str = "/",
    overwrite: bool = False,
) -> ExportReport:
    """Write arrays of a checkpoint as an `.npz` that `numpy.load` reads, in parts and verified.

    Args:
        src: The checkpoint.
        dst: The file.
        select: Patterns of the leaves to take; all by default.
        separator: Between the keys of a path in the name of an array.
        overwrite: Replace the file.

    Raises:
        UnsupportedLeafError: Dtypes that numpy has not, names that two leaves would have, and
            values per process: all of them; nothing was written.
        ExistsError: The file is there and `overwrite` is False.
        IntegrityError: A chunk of `src` is damaged.
    """
    path = local_path(dst)
    with open_checkpoint(src) as checkpoint:
        leaves = selected(checkpoint.manifest.leaves, select)
        naming.refuse_values(leaves)
        arrays = [leaf for leaf in leaves if leaf.spec is not None]
        _refuse_dtypes(arrays)
        names = naming.flat_names(arrays, separator)
        if os.path.lexists(path) and not overwrite:
            raise ExistsError(f"{path} exists; pass overwrite=True to replace it")
        disk.make_dirs(path.parent)
        made = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with zipfile.ZipFile(made, "x") as archive:
                for leaf, name in zip(arrays, names, strict=True):
                    if leaf.spec is not None:
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                            _write_npy(out, leaf, leaf.spec, checkpoint)
            with made.open("rb") as done:
                os.fsync(done.fileno())
            os.replace(made, path)
        finally:
            made.unlink(missing_ok=True)
        disk.fsync_dir(path.parent)
    return ExportReport(
        files=(str(path),),
        nbytes=sum(leaf.spec.nbytes for leaf in arrays if leaf.spec is not None),
        left_out=tuple(f"{leaf.text}: a Python value" for leaf in leaves if leaf.spec is None),
    )


def _refuse_dtypes(leaves: Sequence[Leaf]) -> None:
    wrong = [
        (leaf.text, f"numpy has no dtype {leaf.spec.dtype} of its own; convert it first")
        for leaf in leaves
        if leaf.spec is not None and dtypes.dtype_of(leaf.spec.dtype).isbuiltin != 1
    ]
    if wrong:
        raise UnsupportedLeafError(wrong)


def _write_npy(out: Any, leaf: Leaf, spec: ArraySpec, checkpoint: Any) -> None:
    dtype = dtypes.dtype_of(spec.dtype)
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": spec.shape,
    }
    np.lib.format.write_array_header_1_0(out, header)
    for box in _slabs(spec):
        out.write(
            np.ascontiguousarray(checkpoint.read_box(leaf, spec, box)).reshape(-1).data.cast("B")
        )


def _slabs(spec: ArraySpec) -> Iterator[Box]:
    """The array in the order of its bytes: whole rows of chunks at a time."""
    if not spec.shape or spec.storage == "empty":
        if spec.storage != "empty":
            yield Box((), ())
        return
    row_nbytes = math.prod(spec.shape[1:]) * spec.itemsize
    height = spec.chunk_shape[0]
    height *= max(_SLAB_NBYTES // (height * row_nbytes), 1)
    rest = spec.shape[1:]
    for start in range(0, spec.shape[0], height):
        stop = min(start + height, spec.shape[0])
        yield Box((start, *(0,) * len(rest)), (stop, *rest))


# --- in -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """An array that lies flat in a file; `shape` is turned round if it is in Fortran order."""

    name: str
    dtype: str
    shape: Shape
    is_fortran: bool
    fd: int
    offset: int


def import_npz(
    src: PathLike,
    dst: PathLike,
    *,
    separator: str | None = "/",
    overwrite: bool = False,
    options: SaveOptions | None = None,
) -> ImportReport:
    """Make a checkpoint of an `.npz`, in bounded memory; compressed members go through a file.

    Raises:
        FormatError: Not an `.npz`, or an array of objects or of a dtype that is not known.
        OSError: The file cannot be read.
        ExistsError: There is a checkpoint at `dst` and `overwrite` is False.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(folder + "/a.npz", **{"params/w": np.ones(3)})
        ...     _ = import_npz(folder + "/a.npz", folder + "/b")
        ...     pc.load(folder + "/b")
        {'params': {'w': array([1., 1., 1.])}}
    """
    path = local_path(src)
    with ExitStack() as opened:
        members: dict[str, _Member] = {}
        for member in _members(path, opened):
            if members.setdefault(member.name, member) is not member:
                raise FormatError(f"{path} has the array {member.name!r} twice")
        tree, ordered = naming.tree_of_names(list(members), separator)
        found = [members[name] for name in ordered]

        def view(leaf: int, box: Box) -> Any:
            member = found[leaf]
            dtype = dtypes.dtype_of(member.dtype)
            if not member.is_fortran:
                return read_box(member.fd, member.offset, member.shape, dtype, box, what=str(path))
            turned = Box(box.start[::-1], box.stop[::-1])
            shape = member.shape[::-1]
            return read_box(member.fd, member.offset, shape, dtype, turned, what=str(path)).T

        manifest = make_checkpoint(
            dst,
            tree,
            [naming.form_of(member.dtype, member.shape, None, None) for member in found],
            view,
            source={"kind": "npz", "path": str(path), "holds": "weights"},
            metadata=None,
            overwrite=overwrite,
            options=options,
        )
    return ImportReport(manifest=manifest, left_out=())


def _members(path: Path, opened: ExitStack) -> Iterator[_Member]:
    try:
        file = opened.enter_context(path.open("rb"))
        archive = opened.enter_context(zipfile.ZipFile(file))
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                yield _member(path, name, file.fileno(), _start(file, info))
                continue
            unpacked = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it is one
            with archive.open(info) as packed:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            unpacked.flush()
            yield _member(path, name, unpacked.fileno(), 0)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, struct.error) as error:
        raise FormatError(f"{path} is not an .npz that can be read: {error}") from None


def _start(file: Any, info: zipfile.ZipInfo) -> int:
    """Where a member that is not compressed begins, after its header in the file."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER_NBYTES)
    name_nbytes, extra_nbytes = struct.unpack("<HH", header[26:30])
    return int(info.header_offset + _LOCAL_HEADER_NBYTES + name_nbytes + extra_nbytes)


def _member(path: Path, name: str, fd: int, start: int) -> _Member:
    """The `.npy` that begins at byte `start`; its header is a Python literal, never a pickle."""
    what = f"{path}: {name!r}"
    head = os.pread(fd, 12, start)
    if head[:6] != b"\x93NUMPY" or head[6] not in (1, 2, 3):
        raise FormatError(f"{what} is not an array of numpy")
    width = 2 if head[6] == 1 else 4
    length = int.from_bytes(head[8 : 8 + width], "little")
    if length > _MAX_HEADER_NBYTES:
        raise FormatError(f"{what} has a header of {length} bytes")
    try:
        text = os.pread(fd, length, start + 8 + width).decode("latin1")
        header = ast.literal_eval(text.strip())
        shape, is_fortran = tuple(header["shape"]), bool(header["fortran_order"])
        dtype = np.dtype(header["descr"])
        known = dtypes.name_of(dtype) if dtype.kind in "biufc" and dtype.isnative else None
        if not all(type(n) is int and 0 <= n < 1 << 60 for n in shape):
            raise ValueError(f"shape {shape}")
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise FormatError(f"{what} has no valid header: {error}") from None
    if known is None:
        raise FormatError(f"{what} has the dtype {header['descr']!r}, which cannot be imported")
    return _Member(
        name=name,
        dtype=known,
        shape=shape,
        is_fortran=is_fortran,
        fd=fd,
        offset=start + 8 + width + length,
    )
