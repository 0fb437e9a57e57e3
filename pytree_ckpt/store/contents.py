"""What is in the data folder of a checkpoint: the tables, and files that do not belong."""

import math
import os
import re

from pytree_ckpt.errors import Damage, DamageKind, FormatError, IntegrityError
from pytree_ckpt.format import tables, wire, zarr
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.format.tables import Table
from pytree_ckpt.store import disk
from pytree_ckpt.store.locations import Location, SizeOf


def array_folder(data: Location, name: str) -> Location:
    """Folder of the array of a leaf."""
    return data / "arrays" / name


def packed_folder(data: Location, process: int) -> Location:
    """Folder of the packed array of a process."""
    return data / "packed" / f"{process:05d}"


def table_file(data: Location, process: int) -> Location:
    """File of the table of a process."""
    return data / "tables" / f"{process:05d}.msgpack"


def read_table(data_folder: Location, manifest: Manifest, process: int) -> Table:
    """The table of one process.

    Raises:
        IntegrityError: It is missing, a link, or not the one that the manifest names.
    """
    file = table_file(data_folder, process)
    wanted = manifest.tables[process]
    try:
        data = file.read_file(max_nbytes=wire.MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise damaged("missing", f"the table {file} is missing", file=file) from None
    except OSError as error:
        if error.errno in disk.NO_FILE:
            raise damaged("link", f"{file} is not a regular file", file=file) from None
        raise
    if len(data) != wanted.nbytes:
        text = f"the table {file} has {len(data)} bytes, the manifest says {wanted.nbytes}"
        raise damaged("size", text, file=file)
    try:
        table, found = tables.from_bytes(data, what=str(file))
    except FormatError as error:
        raise damaged("digest", str(error), file=file) from None
    if found != wanted.id or table.process != process:
        text = f"the table {file} is not the one that the manifest names"
        raise damaged("digest", text, file=file)
    return table


def read_tables(data_folder: Location, manifest: Manifest) -> tuple[Table, ...]:
    """The tables of all processes; errors as `read_table`."""
    refuse_link(data_folder / "tables", None)
    return tuple(read_table(data_folder, manifest, p) for p in range(len(manifest.tables)))


def refuse_link(place: Location, leaf: str | None) -> None:
    """Raise an `IntegrityError` if `place` is a symbolic link."""
    if place.path is not None and place.path.is_symlink():
        text = f"{place} is a symbolic link; a checkpoint has none"
        raise damaged("link", text, leaf=leaf, file=place)


def damaged(
    kind: DamageKind, text: str, *, leaf: str | None = None, file: object = None
) -> IntegrityError:
    """The error of one damaged file, or of the files of a leaf."""
    where = None if file is None else str(file)
    return IntegrityError([Damage(path=leaf, kind=kind, text=text, file=where)])


def check_folder(folder: Location, counts: tuple[int, ...], leaf: str | None) -> list[Damage]:
    """What does not belong in the folder of an array: links, pipes, shards outside the grid.

    Where there is damage of kind "link" nothing may be read: a link leads out of the checkpoint,
    and who opens a pipe waits for good. A shard that is missing shows when it is read.
    """
    if folder.path is None:
        return []
    try:
        refuse_link(folder, leaf)
        entries = list(os.scandir(folder.path))
    except IntegrityError as error:
        return list(error.damage)
    except (FileNotFoundError, NotADirectoryError):
        return []
    damage: list[Damage] = []
    for entry in entries:
        kind: DamageKind | None = None
        if entry.is_symlink():
            kind, what = "link", "is a symbolic link; a checkpoint has none"
        elif _SHARD_FILE.fullmatch(entry.name):
            if not _in_grid(entry.name, counts):
                kind, what = "extra", "is a shard that the array does not have"
            elif not entry.is_file(follow_symlinks=False):
                kind, what = "link", "is not a regular file"
        if kind is not None:
            text = f"{entry.path} {what}"
            damage.append(Damage(path=leaf, kind=kind, text=text, file=entry.path))
    return damage


_SHARD_FILE = re.compile(r"c(\.\d+)*", re.ASCII)


def _in_grid(name: str, counts: tuple[int, ...]) -> bool:
    numbers = name.split(".")[1:]
    return len(numbers) == len(counts) and all(
        str(int(n)) == n and int(n) < count for n, count in zip(numbers, counts, strict=True)
    )


def missing_files(data_folder: Location, manifest: Manifest, size_of: SizeOf) -> list[Damage]:
    """Files of a checkpoint that are not there, or whose size cannot be right.

    Tables must have their exact size, shards without a codec too; compressed ones must not be
    empty. Only tables are read, and those only if there is a packed array.
    """
    damage: list[Damage] = []
    codec = manifest.packed_codec
    for process, ref in enumerate(manifest.tables):
        wrong = _wrong_size(table_file(data_folder, process), ref.nbytes, None, size_of)
        damage += wrong
        if codec is not None and not wrong:
            damage += _missing_pieces(data_folder, manifest, process, size_of, codec)
    for leaf in manifest.leaves:
        if leaf.name is None:
            continue
        grid, nbytes = leaf.array.shards, shard_nbytes(leaf.array)
        folder = array_folder(data_folder, leaf.name)
        for shard in range(grid.size):
            file = folder / zarr.shard_file(grid.position(shard))
            damage += _wrong_size(file, nbytes, leaf.text, size_of)
    return damage


def shard_nbytes(spec: ArraySpec) -> int | None:
    """Size of the file of every shard of an array, None if it depends on the content."""
    if spec.codec != "raw" or not spec.shards.is_even:
        return None
    return math.prod(spec.shard_shape) * spec.itemsize + zarr.index_nbytes(spec.chunks.size)


def _missing_pieces(
    data_folder: Location, manifest: Manifest, process: int, size_of: SizeOf, codec: str
) -> list[Damage]:
    """As `missing_files`, of the packed array of one process."""
    try:
        packed = read_table(data_folder, manifest, process).packed
    except IntegrityError as error:
        return list(error.damage)
    if packed is None:
        return []
    folder = packed_folder(data_folder, process)
    index_nbytes = zarr.index_nbytes(packed.chunks_per_file)
    for piece, start in enumerate(range(0, packed.nbytes, packed.shard_nbytes)):
        inside = min(packed.shard_nbytes, packed.nbytes - start)
        nbytes = -(-inside // packed.chunk_nbytes) * packed.chunk_nbytes + index_nbytes
        file = folder / zarr.shard_file((piece,))
        wrong = _wrong_size(file, nbytes if codec == "raw" else None, None, size_of)
        if wrong:  # One is enough: a table that lies may name more than can be counted.
            return wrong
    return []


def _wrong_size(
    file: Location, nbytes: int | None, leaf: str | None, size_of: SizeOf
) -> list[Damage]:
    """What is wrong with a file of so many bytes; with None of any number but none."""
    try:
        found = size_of(file)
    except (FileNotFoundError, NotADirectoryError):
        return [Damage(path=leaf, kind="missing", text=f"{file} is missing", file=str(file))]
    if found is None or (found > 0 if nbytes is None else found == nbytes):
        return []
    text = f"{file} has {found} bytes" if found >= 0 else f"{file} is not a regular file"
    text += f", not {nbytes}" if nbytes is not None and found >= 0 else ""
    return [Damage(path=leaf, kind="size", text=text, file=str(file))]


def wrong_metadata(data_folder: Location, manifest: Manifest) -> list[Damage]:
    """`zarr.json` files that are missing, or that say something else than the manifest.

    A load does not need them; other programs do.

    Raises:
        OSError: The storage failed.
    """
    damage: list[Damage] = []
    for leaf in manifest.leaves:
        if leaf.name is None:
            continue
        file = array_folder(data_folder, leaf.name) / "zarr.json"
        expected = zarr.to_json(zarr.array_metadata(leaf.array))
        try:
            if file.read_file(max_nbytes=len(expected)) == expected:
                continue
            what = "does not say what the manifest says"
        except (FileNotFoundError, NotADirectoryError):
            what = "is missing"
        except OSError as error:
            if error.errno not in disk.NO_FILE:
                raise
            what = "is not a regular file"
        text = f"{file} {what}"
        damage.append(Damage(path=leaf.text, kind="metadata", text=text, file=str(file)))
    return damage
