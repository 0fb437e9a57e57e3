"""The files of safetensors: their names, their headers, their dtypes.

A file is the length of a header (8 bytes), the header (JSON, padded with spaces to a multiple of
8), and the tensors without gaps.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytree_ckpt.errors import FormatError
from pytree_ckpt.format import dtypes
from pytree_ckpt.interop.flat_files import open_regular
from pytree_ckpt.interop.json_objects import MAX_JSON_NBYTES, json_object

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
METADATA_KEY = "__metadata__"
"""The one entry of a header that is no tensor."""
WIDEST_LAST = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16"),
    *("I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)
"""The order in which the library sorts dtypes; the last comes first in a file."""
_NAMES: Mapping[str, str] = {
    "BOOL": "bool",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "BF16": "bfloat16",
    "C64": "complex64",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
CODES = {name: code for code, name in _NAMES.items()}
"""What the format calls the dtypes that it has."""
_PLAIN_NAME = re.compile(r"[^/\\\0]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor in a file: its elements begin at byte `offset`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(dtypes.dtype_of(self.dtype).itemsize)


def file_names(dst: Path, count: int) -> list[Path]:
    """The files, and the index where there are several."""
    if dst.suffix == ".safetensors":
        folder, stem = dst.parent, dst.stem
    else:
        folder, stem = dst, "model"
    if count == 1:
        return [folder / f"{stem}.safetensors"]
    files = [folder / f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    return [*files, folder / f"{stem}.safetensors.index.json"]


def read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """The tensors of a file, or of a model in a folder, by name, and the metadata of its files.

    Of a folder the files are those that transformers would take, and with an index from each file
    the tensors that it takes from there: what else is in it, it says last.

    Raises:
        FormatError: A file is not safetensors, or an index none, or it leads out of its folder.
    """
    index = path / INDEX_FILE
    if not path.is_dir():
        files, names = [path], None
    elif (path / WHOLE_FILE).exists():
        files, names = [path / WHOLE_FILE], None
    else:
        names = _weight_map(index)
        files = [path / name for name in sorted(set(names.values()))]
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    left_out: list[str] = []
    for file in files:
        found, strings = _read_header(file)
        metadata |= strings
        for tensor in found:
            if names is None or names.get(tensor.name) == file.name:
                tensors[tensor.name] = tensor
            else:
                left_out.append(f"{tensor.name}: it is in {file.name}, not by {INDEX_FILE}")
    for name, file_name in (names or {}).items():
        if name not in tensors:
            raise FormatError(f"{index} names {name!r}, which {file_name} does not have")
    return tensors, metadata, left_out


def _weight_map(index: Path) -> dict[str, str]:
    """For each tensor the name of its file, which is in the folder of the index."""
    if not index.exists():
        raise FormatError(f"{index.parent} has neither {WHOLE_FILE} nor {INDEX_FILE}")
    with os.fdopen(open_regular(index), "rb") as opened:
        names = json_object(opened.read(MAX_JSON_NBYTES + 1), what=str(index)).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(name, str) and _PLAIN_NAME.fullmatch(name) and name not in (".", "..")
        for name in names.values()
    ):
        raise FormatError(f"{index} has no valid weight_map")
    return names


def _read_header(file: Path) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of a file and its metadata; no tensor is read.

    Raises:
        FormatError: Not safetensors: a size, a shape or an offset that cannot be, gaps, or a dtype
            that is not known.
    """
    what = str(file)
    with os.fdopen(open_regular(file), "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(MAX_JSON_NBYTES, size - 8):
            raise FormatError(f"{what} is not a safetensors file: its header has {length} bytes")
        header = json_object(opened.read(length), what=f"the header of {what}")
    metadata = header.pop(METADATA_KEY, None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{what} has metadata that are not strings")
    tensors = [_tensor(name, item, file, 8 + length) for name, item in header.items()]
    at = 8 + length
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != at:
            raise FormatError(f"{what} has a gap, or an overlap, before {tensor.name!r}")
        at += tensor.nbytes
    if at != size:
        raise FormatError(f"{what} has {size} bytes, its tensors end at {at}")
    return tensors, metadata


def _tensor(name: str, item: Any, file: Path, base: int) -> Tensor:
    match item:
        case {
            "dtype": str() as code,
            "shape": [*shape],
            "data_offsets": [int() as start, int() as stop],
        } if not isinstance(start, bool) and not isinstance(stop, bool):
            pass
        case _:
            raise FormatError(f"{file} has no valid entry for {name!r}")
    if code not in _NAMES or not dtypes.is_known(_NAMES[code]):
        raise FormatError(
            f"{file}: {name!r} has the dtype {code}, which this release does not know"
        )
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in shape) or start < 0:
        raise FormatError(f"{file}: {name!r} has the shape {shape} at {start}")
    tensor = Tensor(
        name=name, dtype=_NAMES[code], shape=tuple(shape), file=file, offset=base + start
    )
    if tensor.nbytes != stop - start:
        raise FormatError(f"{file}: {name!r} has {stop - start} bytes, not {tensor.nbytes}")
    return tensor
