"""The limit: what this machine takes to move and digest the same bytes, and nothing else.

Files of 16 MiB, each written and synced (or read into fresh memory) by one thread, which digests
1 MiB at a time while it is in the cache. No format, no metadata, no devices. The list of views
that is written is made before the clock starts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

FILE_NBYTES = 16 << 20
BLOCK_NBYTES = 1 << 20
MAX_VIEWS = 512
"""Views in one `writev`; the kernel takes 1024."""

Block = list[memoryview]
Digest = Callable[[], Any]


def thread_count() -> int:
    """One for each processor that this process may run on: what the library takes."""
    return len(os.sched_getaffinity(0))


def digest_named(name: str) -> Digest:
    """A constructor like those of hashlib."""
    if name == "sha256":
        return hashlib.sha256
    import xxhash

    return xxhash.xxh3_128


def views(tree: Any) -> list[memoryview]:
    """The bytes of a state where they are, those of replicated shards once."""
    import jax

    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return [
        memoryview(np.asarray(shard.data).reshape(-1).view(np.uint8))
        for shard in shards
        if shard.replica_id == 0
    ]


def files(found: list[memoryview]) -> list[list[Block]]:
    """Cut and join views into files of at most 16 MiB, each a list of blocks."""
    blocks = list(_blocks(found))
    grouped: list[list[Block]] = []
    room = 0
    for block in blocks:
        size = sum(map(len, block))
        if size > room:
            grouped.append([])
            room = FILE_NBYTES
        grouped[-1].append(block)
        room -= size
    return grouped


def _blocks(found: list[memoryview]) -> Iterator[Block]:
    block: Block = []
    size = 0
    for view in found:
        for start in range(0, len(view), BLOCK_NBYTES):
            part = view[start : start + BLOCK_NBYTES]
            if size + len(part) > BLOCK_NBYTES or len(block) == MAX_VIEWS:
                yield block
                block, size = [], 0
            block.append(part)
            size += len(part)
    if block:
        yield block


def write(folder: Path, grouped: list[list[Block]], digest: Digest) -> None:
    """Write, sync and digest every file."""
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(thread_count()) as pool:
        digests = list(
            pool.map(
                lambda item: _write_file(folder / f"{item[0]:06d}", item[1], digest),
                enumerate(grouped),
            )
        )
    _write_file(folder / "digests", [[memoryview("\n".join(digests).encode())]], digest)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _write_file(path: Path, blocks: list[Block], digest: Digest) -> str:
    running = digest()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for block in blocks:
            if os.writev(descriptor, block) != sum(map(len, block)):
                raise OSError(f"{path} was cut short")
            for view in block:
                running.update(view)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return str(running.hexdigest())


def read(folder: Path, digest: Digest) -> memoryview:
    """Read every file into one fresh piece of memory, and compare the digests.

    Raises:
        ValueError: A digest is not the one that was written.
    """
    digests = (folder / "digests").read_text().split("\n")
    paths = [folder / f"{number:06d}" for number in range(len(digests))]
    sizes = [path.stat().st_size for path in paths]
    memory = memoryview(np.empty(sum(sizes), np.uint8))
    places, start = [], 0
    for size in sizes:
        places.append(memory[start : start + size])
        start += size
    with ThreadPoolExecutor(thread_count()) as pool:
        found = list(
            pool.map(lambda item: _read_file(*item, digest), zip(paths, places, strict=True))
        )
    if found != digests:
        raise ValueError(f"{folder} is damaged")
    return memory


def _read_file(path: Path, place: memoryview, digest: Digest) -> str:
    running = digest()
    with open(path, "rb", buffering=0) as file:
        for start in range(0, len(place), BLOCK_NBYTES):
            part = place[start : start + BLOCK_NBYTES]
            if file.readinto(part) != len(part):
                raise OSError(f"{path} was cut short")
            running.update(part)
    return str(running.hexdigest())
