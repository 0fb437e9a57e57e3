"""Mutations of metadata files, with every digest made right again, so that they are looked into."""

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from hypothesis import strategies as st


def pack(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True)


def sealed(body: bytes, kind: str = "manifest", /, **other: Any) -> bytes:
    """A file whose digest is right, whatever its body is."""
    digest = hashlib.sha256(body).digest()
    fields = {"format": "pytree_ckpt", "version": 1, "kind": kind, "id": digest, "body": body}
    return pack(fields | other)


def body_of(file: bytes) -> bytes:
    """The msgpack of the content of a metadata file."""
    return msgpack.unpackb(file)["body"]


# --- bytes ----------------------------------------------------------------------------------------

INTERESTING = [0, 1, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC4, 0xC6, 0xC9, 0xCB, 0xD4, 0xDD, 0xDF]
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "flip", "insert", "delete", "repeat"]),
        st.integers(0, 1 << 16),
        st.one_of(st.sampled_from(INTERESTING), st.integers(0, 255)),
        st.integers(1, 64),
    ),
    min_size=1,
    max_size=6,
)


def edited(data: bytes, edits: list[tuple[str, int, int, int]]) -> bytes:
    out = bytearray(data)
    for what, place, byte, length in edits:
        at = place % (len(out) + 1)
        if what == "set":
            out[at : at + 1] = bytes([byte])
        elif what == "flip" and at < len(out):
            out[at] ^= 1 << byte % 8
        elif what == "insert":
            out[at:at] = bytes([byte]) * length
        elif what == "delete":
            del out[at : at + length]
        elif what == "repeat":
            out[at:at] = out[at : at + length]
    return bytes(out)


# --- structure ------------------------------------------------------------------------------------

HUGE = 2**63 - 1
NUMBERS = st.sampled_from([0, 1, 2, 3, 8, 16, 255, 2**31, 2**32, 2**40, 2**62, HUGE, 2**64 - 1, -1])
REPLACEMENTS = st.one_of(
    NUMBERS,
    st.sampled_from(
        [None, True, False, 1.5, float("nan"), float("inf"), "", "x", "..", "a/b", b""]
    ),
    st.sampled_from(["jax", "key", "numpy", "scalar", "packed", "array", "empty", "zstd", "int4"]),
    st.sampled_from(["named", "single", "tiled", "float64", "uint8", "pinned_host", "device"]),
    st.lists(NUMBERS, max_size=4),
    st.binary(max_size=16),
    st.just({}),
)
CHANGES = st.lists(st.tuples(st.integers(0, 1 << 16), REPLACEMENTS), min_size=1, max_size=3)


def places_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a decoded value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, child in items:
        found.append((*at, key))
        if isinstance(child, (dict, list)):
            found += places_in(child, (*at, key))
    return found


def changed(content: dict[str, Any], changes: list[tuple[int, Any]]) -> dict[str, Any]:
    """Decoded content with other values in some places."""
    out = copy.deepcopy(content)
    for number, value in changes:
        places = places_in(out)
        *above, last = places[number % len(places)]
        at: Any = out
        for key in above:
            at = at[key]
        at[last] = value
    return out


COLUMNS = [("arrays", "leaf", 4), ("arrays", "shard", 8), ("packed_rows", "leaf", 4)]
COLUMNS += [("packed_rows", "shard", 8), ("packed_rows", "offset", 8)]
CELLS = st.lists(
    st.tuples(st.sampled_from(COLUMNS), st.integers(0, 255), NUMBERS), min_size=1, max_size=3
)


def recolumned(table: dict[str, Any], cells: list[tuple[Any, int, int]]) -> dict[str, Any]:
    """A decoded table with other numbers in its columns."""
    out = copy.deepcopy(table)
    for (part, column, nbytes), row, number in cells:
        data = bytearray(out[part][column])
        at = row % max(len(data) // nbytes, 1) * nbytes
        data[at : at + nbytes] = (number % 2 ** (8 * nbytes)).to_bytes(nbytes, "little")
        out[part][column] = bytes(data)
    return out


# --- whole checkpoints ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Files:
    """The two metadata files of a checkpoint that one process saved."""

    manifest: bytes
    table: bytes

    @classmethod
    def read(cls, path: Path) -> "Files":
        (table,) = path.glob("data-*/tables/00000.msgpack")
        return cls((path / "manifest.msgpack").read_bytes(), table.read_bytes())

    def write(self, path: Path) -> None:
        (table,) = path.glob("data-*/tables/00000.msgpack")
        (path / "manifest.msgpack").write_bytes(self.manifest)
        table.write_bytes(self.table)

    def with_table(self, body: bytes) -> "Files":
        """Another table, which the manifest names."""
        table = sealed(body, "table")
        content = msgpack.unpackb(body_of(self.manifest))
        content["tables"] = [[len(table), hashlib.sha256(body).digest()]]
        return Files(sealed(pack(content)), table)


@st.composite
def mutations(draw: st.DrawFn, good: Files) -> Files:
    """Files that differ from good ones, in bytes or in structure, signed anew or not."""
    kind = draw(st.sampled_from(["manifest", "table", "cells", "body", "table body", "file"]))
    manifest, table = body_of(good.manifest), body_of(good.table)
    if kind == "manifest":
        content = changed(msgpack.unpackb(manifest), draw(CHANGES))
        return Files(sealed(pack(content)), good.table)
    if kind == "table":
        return good.with_table(pack(changed(msgpack.unpackb(table), draw(CHANGES))))
    if kind == "cells":
        return good.with_table(pack(recolumned(msgpack.unpackb(table), draw(CELLS))))
    edits = draw(EDITS)
    if kind == "body":
        return Files(sealed(edited(manifest, edits)), good.table)
    if kind == "table body":
        return good.with_table(edited(table, edits))
    return Files(edited(good.manifest, edits), good.table)
