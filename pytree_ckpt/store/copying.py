"""The data of a checkpoint, copied file by file, byte for byte, to another place."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pytree_ckpt.format import zarr
from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.format.tables import Table
from pytree_ckpt.options import LoadOptions
from pytree_ckpt.store import contents, disk
from pytree_ckpt.store.budget import ByteBudget
from pytree_ckpt.store.locations import Location
from pytree_ckpt.store.workers import Workers, thread_count

Within = Callable[[Location], Location]
"""From a data folder to a place in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file of a checkpoint.

    Attributes:
        place: Where it is.
        nbytes: At least as many as it has, if it is whole.
        data: Its bytes, where manifest and tables say what they are.
        leaf: Whose elements it holds; None if it is not of one leaf.
    """

    place: Within
    nbytes: int = 0
    data: bytes | None = None
    leaf: str | None = None


def copy_data(
    source: Location, target: Location, manifest: Manifest, *, options: LoadOptions
) -> None:
    """Copy what a manifest names from one data folder to another, durably up to `target`.

    Only tables are verified, which say what else there is. Other files in `source` stay behind.

    Args:
        source: Data folder of a committed checkpoint.
        target: A data folder that is empty.
        manifest: That of the checkpoint.
        options: Threads, and the bound on the bytes in memory.

    Raises:
        IntegrityError: In `source` a table is damaged, or a file is missing or a link.
        OSError: A storage refused or failed.
    """
    tables = contents.read_tables(source, manifest)
    folders = [within(target) for within in _folders(manifest, tables)]
    budget = ByteBudget(options.max_inflight_bytes)

    def copy(file: _File) -> None:
        with budget.hold(file.nbytes):
            file.place(target).write_new(_bytes_of(file, source))

    for folder in folders:
        folder.make_folder()
    count = thread_count(options.threads, in_store=source.path is None or target.path is None)
    with Workers(count, "pytree_ckpt-copy", all_or_nothing=True) as pool:
        pool.submit(partial(copy, file) for file in _files(manifest, tables)).results()
    for folder in reversed(folders):
        folder.sync()


def _bytes_of(file: _File, source: Location) -> bytes:
    if file.data is not None:
        return file.data
    place = file.place(source)
    try:
        return place.read_file(max_nbytes=file.nbytes)
    except (FileNotFoundError, NotADirectoryError):
        text = f"{place} is missing"
        raise contents.damaged("missing", text, leaf=file.leaf, file=place) from None
    except OSError as error:
        if error.errno not in disk.NO_FILE:
            raise
        text = f"{place} is not a regular file"
        raise contents.damaged("link", text, leaf=file.leaf, file=place) from None


def _folders(manifest: Manifest, tables: Sequence[Table]) -> Iterator[Within]:
    """The folders of a checkpoint, each after the one that it is in."""
    for name in ("arrays", "packed", "tables"):
        yield _in(name)
    for process, table in enumerate(tables):
        if table.packed is not None:
            yield partial(contents.packed_folder, process=process)
    for leaf in manifest.leaves:
        if leaf.name is not None:
            yield partial(contents.array_folder, name=leaf.name)


def _files(manifest: Manifest, tables: Sequence[Table]) -> Iterator[_File]:
    codec = manifest.packed_codec or "raw"
    for process, table in enumerate(tables):
        place: Within = partial(contents.table_file, process=process)
        yield _File(place=place, nbytes=manifest.tables[process].nbytes)
        packed = table.packed
        if packed is not None:
            yield from _array(
                partial(contents.packed_folder, process=process),
                zarr.to_json(zarr.packed_metadata(packed, codec)),
                [zarr.shard_file((n,)) for n in range(packed.num_files)],
                nbytes=_most(packed.shard_nbytes, packed.chunks_per_file),
            )
    for leaf in manifest.leaves:
        if leaf.name is not None:
            spec = leaf.array
            yield from _array(
                partial(contents.array_folder, name=leaf.name),
                zarr.to_json(zarr.array_metadata(spec)),
                [zarr.shard_file(spec.shards.position(n)) for n in range(spec.num_shards)],
                nbytes=_most(math.prod(spec.shard_shape) * spec.itemsize, spec.chunks.size),
                leaf=leaf.text,
            )


def _array(
    folder: Within, metadata: bytes, shards: Sequence[str], *, nbytes: int, leaf: str | None = None
) -> Iterator[_File]:
    yield _File(place=_in("zarr.json", folder), data=metadata)
    for name in shards:
        yield _File(place=_in(name, folder), nbytes=nbytes, leaf=leaf)


def _in(name: str, folder: Within = lambda data: data) -> Within:
    return lambda data: folder(data) / name


_MORE_NBYTES = 1 << 16


def _most(nbytes: int, chunks: int) -> int:
    """The most that the file of a shard has, also where its chunks do not compress at all."""
    return nbytes + nbytes // 128 + 64 * chunks + _MORE_NBYTES
