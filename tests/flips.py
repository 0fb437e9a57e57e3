"""Random flips of bits, each with the leaf that it damages: found by its bytes, not by a table."""

import random
from pathlib import Path
from typing import Any

import numpy as np

import pytree_ckpt as pc


def state(large_nbytes: int) -> dict[str, Any]:
    """Leaves with a file of their own, and small ones that share one; no two have equal bytes."""
    rng = np.random.default_rng(11)
    shape = (large_nbytes // 4096, 1024)
    large = {f"large{n}": rng.integers(0, 1 << 32, shape, np.uint32) for n in range(2)}
    return large | {f"small{n}": rng.integers(0, 1 << 32, 300 + n, np.uint32) for n in range(40)}


def wrongly_reported(
    folder: Path, *, count: int, seed: int, large_nbytes: int = 1 << 21
) -> list[str]:
    """Flips in the data of leaves that `verify` does not report as damage of that leaf alone."""
    tree = state(large_nbytes)
    pc.save(folder, tree)
    places = [
        place for file in sorted(folder.glob("data-*/*/*/c*")) for place in _places(file, tree)
    ]
    rng = random.Random(seed)
    wrong = []
    for file, start, nbytes, leaf in rng.choices(places, [place[2] for place in places], k=count):
        at, bit = start + rng.randrange(nbytes), rng.randrange(8)
        _flip(file, at, bit)
        found = [(damage.path, damage.kind) for damage in pc.verify(folder).damage]
        _flip(file, at, bit)
        if found != [(leaf, "digest")]:
            wrong.append(f"bit {bit} of byte {at} of {file.name}, in {leaf}: {found}")
    return wrong


def _places(file: Path, tree: dict[str, Any]) -> list[tuple[Path, int, int, str]]:
    """Where in a file the bytes of leaves are."""
    data = file.read_bytes()
    found = [(name, array.tobytes()) for name, array in tree.items()]
    return [(file, data.find(b), len(b), name) for name, b in found if b in data]


def _flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))
