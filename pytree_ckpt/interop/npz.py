"""Numpy's archives: one `.npy` for each array, all in one zip file."""

import ast
import itertools
import math
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pytree_ckpt.errors import FormatError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Box, Shape
from pytree_ckpt.interop import names as naming
from pytree_ckpt.interop.exporting import ExportReport, elements_of, written_whole
from pytree_ckpt.interop.flat_files import full_disk_named, open_regular, read_box
from pytree_ckpt.interop.making import ImportReport, make_checkpoint
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.plan.selecting import must_select
from pytree_ckpt.store.locations import PathLike, local_path
from pytree_ckpt.verbs.checkpoint import open_checkpoint

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEAD_NBYTES = 1 << 16
"""Largest header of an array."""
_NAME_NBYTES = 0xFFFF
"""Largest name of a member of a zip file."""
_PART_NBYTES = 1 << 20
_LOCAL_HEADER_NBYTES = 30
_SLAB_NBYTES = 32 << 20
_RATIO = 1100
"""Deflate packs no more than this many bytes in one."""
_LACKS = {
    name: f"numpy has no dtype {name} of its own; convert it first"
    for name in dtypes.names()
    if dtypes.dtype_of(name).isbuiltin != 1
}


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
        MismatchError: Patterns that match no leaf.
        UnsupportedLeafError: Dtypes that numpy has not, names that two leaves would have or that a
            zip file cannot, and values per process: all of them; nothing was written.
        ExistsError: The file is there and `overwrite` is False.
        IntegrityError: A chunk of `src` is damaged.
    """
    path = local_path(dst)
    with open_checkpoint(src) as checkpoint:
        leaves = must_select(checkpoint.manifest.leaves, select)
        naming.refuse(leaves, _LACKS)
        arrays = [leaf for leaf in leaves if leaf.spec is not None]
        names = naming.flat_names(arrays, separator, forbids=_forbidden)
        with written_whole([path], overwrite=overwrite) as (made,):
            slabs = [(leaf, list(_slabs(leaf.array))) for leaf in arrays]
            parts = [(leaf, box) for leaf, boxes in slabs for box in boxes]
            elements = elements_of(checkpoint, parts)
            with zipfile.ZipFile(made, "x") as archive:
                for name, (leaf, boxes) in zip(names, slabs, strict=True):
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                        _write_npy(out, leaf.array, itertools.islice(elements, len(boxes)))
            with made.open("rb") as done:
                os.fsync(done.fileno())
    return ExportReport(
        files=(str(path),),
        nbytes=sum(leaf.array.nbytes for leaf in arrays),
        left_out=tuple(f"{leaf.text}: a Python value" for leaf in leaves if leaf.spec is None),
    )


def _forbidden(name: str) -> str | None:
    if "\0" in name:
        return f"would have the name {name!r}, and a zip file ends a name at the NUL"
    nbytes = len(f"{name}.npy".encode())
    if nbytes > _NAME_NBYTES:
        return f"would have a name of {nbytes} bytes, and a zip file has at most {_NAME_NBYTES}"
    return None


def _write_npy(out: Any, spec: ArraySpec, slabs: Iterable[npt.NDArray[Any]]) -> None:
    dtype = dtypes.dtype_of(spec.dtype)
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": spec.shape,
    }
    np.lib.format.write_array_header_1_0(out, header)
    for slab in slabs:
        out.write(np.ascontiguousarray(slab).reshape(-1).data.cast("B"))


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
    header_nbytes: int
    fd: int
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the member: of the header and the elements."""
        return self.header_nbytes + math.prod(self.shape) * dtypes.dtype_of(self.dtype).itemsize

    @property
    def offset(self) -> int:
        return self.start + self.header_nbytes


def import_npz(
    src: PathLike,
    dst: PathLike,
    *,
    separator: str | None = "/",
    overwrite: bool = False,
    options: SaveOptions | None = None,
) -> ImportReport:
    """Make a checkpoint of an `.npz`, in bounded memory; compressed members go through a file.

    Args as `import_safetensors`.

    Raises:
        FormatError: Not an `.npz`, or an array of objects or of a dtype that is not known.
        NotFoundError, OSError: The file cannot be read.
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
        tree, arrays = naming.tree_of_names(list(members), separator)
        found = [members[array.name] for array in arrays]

        def view(leaf: int, box: Box) -> Any:
            member = found[leaf]
            dtype = dtypes.dtype_of(member.dtype)
            if not member.is_fortran:
                return read_box(member.fd, member.offset, member.shape, dtype, box, what=str(path))
            turned = Box(box.start[::-1], box.stop[::-1])
            shape = member.shape[::-1]
            return read_box(member.fd, member.offset, shape, dtype, turned, what=str(path)).T

        return make_checkpoint(
            dst,
            tree,
            [array.form(m.dtype, m.shape) for array, m in zip(arrays, found, strict=True)],
            view,
            source={"kind": "npz", "path": str(path), "holds": "weights"},
            metadata=None,
            overwrite=overwrite,
            options=options,
        )


def _members(path: Path, opened: ExitStack) -> Iterator[_Member]:
    """The arrays of an archive: where they lie in it, or in a file that they are unpacked to."""
    file = opened.enter_context(os.fdopen(open_regular(path), "rb"))
    nbytes = os.fstat(file.fileno()).st_size
    try:
        archive = opened.enter_context(zipfile.ZipFile(file))
        infos = archive.infolist()
        if sum(info.compress_size for info in infos) > nbytes:
            raise FormatError(f"{path} has members that overlap, or end beyond it")
        for info in infos:
            name = info.filename.removesuffix(".npy")
            what = f"{path}: {name!r}"
            if info.flag_bits & 1 or info.compress_type not in _METHODS:
                raise FormatError(f"{what} is encrypted, or packed as numpy does not")
            with archive.open(info) as content:
                head = content.read(_HEAD_NBYTES)
                if info.compress_type == zipfile.ZIP_STORED:
                    into = None
                    member = _member(what, name, head, file.fileno(), _start(file, info))
                else:
                    into = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it is one
                    member = _member(what, name, head, into.fileno(), 0)
                if member.nbytes != info.file_size or info.file_size > info.compress_size * _RATIO:
                    raise FormatError(
                        f"{what} has {info.file_size} bytes in {info.compress_size}, which is not "
                        f"what an array of {member.dtype}{list(member.shape)} has"
                    )
                with full_disk_named(Path(tempfile.gettempdir())):
                    _read_through(head, content, into)
            yield member
    except (
        *(zipfile.BadZipFile, zlib.error, struct.error, EOFError),
        *(NotImplementedError, RuntimeError),
    ) as error:
        raise FormatError(f"{path} is not an .npz that can be read: {error}") from None


def _read_through(head: bytes, content: Any, into: Any) -> None:
    """Read a member, whose first bytes are `head`, to its end, where its checksum is checked."""
    part = head
    while part:
        if into is not None:
            into.write(part)
        part = content.read(_PART_NBYTES)
    if into is not None:
        into.flush()


def _start(file: Any, info: zipfile.ZipInfo) -> int:
    """Where a member that is not compressed begins, after its header in the file."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER_NBYTES)
    name_nbytes, extra_nbytes = struct.unpack("<HH", header[26:30])
    return int(info.header_offset + _LOCAL_HEADER_NBYTES + name_nbytes + extra_nbytes)


def _member(what: str, name: str, head: bytes, fd: int, start: int) -> _Member:
    """The `.npy` that begins with `head`; its header is a Python literal, never a pickle."""
    if head[:6] != b"\x93NUMPY" or head[6:7] not in (b"\1", b"\2", b"\3"):
        raise FormatError(f"{what} is not an array of numpy")
    width = 2 if head[6] == 1 else 4
    length = int.from_bytes(head[8 : 8 + width], "little")
    if length > _HEAD_NBYTES - 8 - width:
        raise FormatError(f"{what} has a header of {length} bytes")
    try:
        header = ast.literal_eval(head[8 + width : 8 + width + length].decode("latin1").strip())
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
        header_nbytes=8 + width + length,
        fd=fd,
        start=start,
    )
