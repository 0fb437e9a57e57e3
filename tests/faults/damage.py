"""Damaged files: flipped bits, cuts, lost, emptied, zeroed, swapped and older files."""

import contextlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

import pytree_ckpt as pc
from pytree_ckpt.plan import chunking
from tests.faults import children
from tests.faults.judge import Judge, Tally
from tests.faults.scenarios import content, is_content, path_of, plain, state
from tests.flips import wrongly_reported

Kind = Literal["raw", "zstd", "packed"]
KINDS: tuple[Kind, ...] = ("raw", "zstd", "packed")
BLOCK = 4096


def campaign(judge: Judge, kind: Kind, *, flips: int, stride: int) -> Tally:
    """Damage a checkpoint in every way, and load it whole, in part, and on other devices."""
    folder = children.scratch()
    try:
        return judge.call(_damage, folder, kind, flips, stride)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _damage(folder: Path, kind: Kind, flips: int, stride: int) -> Tally:
    tally = Tally()
    old, new = path_of(folder / "old", 1), path_of(folder / "new", 1)
    for path, version in ((old, 1), (new, 2)):
        pc.save(path, _state(kind, version), options=_options(kind))
    if _loads(new, kind) != ["exact"] * 3:
        raise RuntimeError("the checkpoint does not load before it is damaged")
    rng = random.Random(0)
    for label, damaged in itertools.chain(
        _flips(new, rng, flips), _cuts(new), _whole_files(new), _swaps(new), _older(new, old)
    ):
        if tally.points % stride == 0 or label == "flip":
            with damaged:
                outcomes = _loads(new, kind)
            for outcome in outcomes:
                if outcome == "silent":
                    tally.wrong("silent", f"{kind}: {label}")
                elif outcome not in ("exact", "named"):
                    tally.wrong("failed", f"{kind}: {label}: {outcome}")
        tally.points += 1
    return tally


def verify_campaign(judge: Judge, *, flips: int) -> Tally:
    """Flip bits in the data of leaves; `verify` must name the leaf of each."""
    folder = children.scratch()
    try:
        return judge.call(_verify, folder / "ckpt", flips)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _verify(path: Path, flips: int) -> Tally:
    tally = Tally()
    for wrong in wrongly_reported(
        path, count=flips, seed=0, large_nbytes=8 * chunking.MAX_CHUNK_NBYTES
    ):
        tally.wrong("silent", wrong)
    tally.points = flips
    return tally


def _options(kind: Kind) -> pc.SaveOptions:
    return pc.SaveOptions(compress="zstd" if kind == "zstd" else None)


def _state(kind: Kind, version: int) -> dict[str, Any]:
    """A packed checkpoint has no leaf that is large enough for files of its own."""
    tree = state(1, version)
    if kind == "packed":
        del tree["large"], tree["host"]
        tree |= {f"small {i}": np.arange(200) * version + i for i in range(20)}
    return tree


def _wanted(kind: Kind) -> dict[str, Any]:
    tree = _state(kind, 2)
    return {k: np.asarray(v) if isinstance(v, jax.Array) else v for k, v in tree.items()}


def _loads(path: Path, kind: Kind) -> list[str]:
    """What comes of loading all, a part, and all onto one device."""
    wanted = _wanted(kind)
    part = "bias" if kind == "packed" else "large"

    def whole() -> bool:
        with pc.open(path) as checkpoint:
            return _same(checkpoint.to_numpy(), wanted)

    def partial() -> bool:
        with pc.open(path) as checkpoint:
            return bool((checkpoint[part][3:5] == wanted[part][3:5]).all())

    def elsewhere() -> bool:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
        target = {
            k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=device)
            if isinstance(v, jax.Array)
            else v
            for k, v in _state(kind, 2).items()
        }
        found = pc.load(path, target, reshard=True)
        return _same(
            {k: np.asarray(v) if isinstance(v, jax.Array) else v for k, v in found.items()}, wanted
        )

    return [_outcome(load) for load in (whole, partial, elsewhere)]


def _outcome(load: Callable[[], bool]) -> str:
    try:
        return "exact" if load() else "silent"
    except pc.CheckpointError:
        return "named"
    except Exception as error:  # noqa: BLE001 - an error without a name is a finding
        return f"{type(error).__name__}: {error}"


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    if set(wanted) == set(content(1)):
        return is_content({key: found[key] for key in content(1)}, 1, 2)
    found, wanted = plain(found), plain(wanted)
    return set(found) == set(wanted) and all(np.array_equal(found[k], v) for k, v in wanted.items())


# --- the damage ---------------------------------------------------------------------------------

Damages = Iterator[tuple[str, contextlib.AbstractContextManager[None]]]


@contextmanager
def _replaced(file: Path, data: bytes | None) -> Iterator[None]:
    """The file has other bytes, or is gone, within the block."""
    before = file.read_bytes()
    try:
        if data is None:
            file.unlink()
        else:
            file.write_bytes(data)
        yield
    finally:
        file.write_bytes(before)


@contextmanager
def _exchanged(one: Path, other: Path) -> Iterator[None]:
    a, b = one.read_bytes(), other.read_bytes()
    with _replaced(one, b), _replaced(other, a):
        yield


def _files(path: Path) -> list[Path]:
    """All but `zarr.json`, which nothing reads: it is there for other programs."""
    return sorted(f for f in path.rglob("*") if f.is_file() and f.name != "zarr.json")


def _flips(path: Path, rng: random.Random, number: int) -> Damages:
    files = _files(path)
    sizes = [file.stat().st_size for file in files]
    for file in rng.choices(files, sizes, k=number):
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield "flip", _replaced(file, bytes(data))


def _cuts(path: Path) -> Damages:
    for file in _files(path):
        data = file.read_bytes()
        for at in range(0, len(data), BLOCK):
            yield f"{file.name} cut at {at}", _replaced(file, data[:at])


def _whole_files(path: Path) -> Damages:
    for file in _files(path):
        size = file.stat().st_size
        for label, data in (("lost", None), ("emptied", b""), ("zeroed", bytes(size))):
            yield f"{file.name} {label}", _replaced(file, data)


def _swaps(path: Path) -> Damages:
    for one, other in itertools.combinations(_files(path), 2):
        if one.stat().st_size == other.stat().st_size:
            yield f"{one.name} and {other.name} swapped", _exchanged(one, other)


def _older(path: Path, old: Path) -> Damages:
    for file in _files(path):
        name = file.relative_to(path).parts[1:]
        (data,) = old.glob("data-*")
        if name:
            older = data.joinpath(*name).read_bytes()
            yield f"{file.name} of an older save", _replaced(file, older)
