"""What is attacked: saves, overwrites, rotations, deletions, and what must hold at each moment."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pytree_ckpt as pc
from pytree_ckpt.plan import chunking
from tests.faults.children import Acknowledge

STEP = re.compile(r"step_(\d{8})")


def small_files() -> None:
    """Arrays of a few KiB are stored as large ones are: several files of several chunks."""
    chunking.PACK_BELOW_NBYTES = 2048
    chunking.MAX_CHUNK_NBYTES = 4096


def content(step: int, version: int = 0) -> dict[str, Any]:
    """The state of a step as it must load; two versions of it differ in every leaf.

    Of two steps all leaves differ but `host`, which may be linked.
    """
    tag = 100 * step + version
    return {
        "bias": np.arange(6, dtype=np.int32) * tag,
        "host": np.arange(version, version + 700, dtype=np.float64),
        "large": np.arange(tag, tag + 4096, dtype=np.float32).reshape(64, 64),
        "name": f"run {tag}",
        "own": pc.PerProcess({"position": tag}),
        "step": tag,
    }


def state(step: int, version: int = 0) -> dict[str, Any]:
    """`content` with two leaves on devices; `large` is sharded where there are two of them."""
    devices = np.array(jax.devices()[:2])
    mesh = jax.sharding.Mesh(devices, ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tree = content(step, version)
    tree["bias"] = jax.device_put(tree["bias"], devices[0])
    tree["large"] = jax.device_put(tree["large"], rows)
    return tree


def plain(tree: dict[str, Any]) -> dict[str, Any]:
    """Each value of the one process as a load without a target gives it."""
    return {k: [v.value] if isinstance(v, pc.PerProcess) else v for k, v in tree.items()}


def is_content(found: Any, step: int, version: int) -> bool:
    """Equal to the last bit, of equal types."""
    found, wanted = plain(found), plain(content(step, version))
    return list(found) == list(wanted) and all(
        type(found[key]) is type(value)
        and (
            (found[key].dtype, found[key].shape, found[key].tobytes())
            == (value.dtype, value.shape, value.tobytes())
            if isinstance(value, np.ndarray)
            else found[key] == value
        )
        for key, value in wanted.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The bar at one moment.

    Attributes:
        required: Steps that must load.
        any_of: At least one of these must load, if there are any.
        versions: The contents that a step may have; one that is not named may have version 0.
        only: If given, no other step may be listed.
        most: The number of data folders that may be there.
    """

    required: frozenset[int] = frozenset()
    any_of: frozenset[int] = frozenset()
    versions: dict[int, frozenset[int]] = field(default_factory=dict)
    only: frozenset[int] | None = None
    most: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Something to attack.

    Attributes:
        prepare: Makes what is there before; acknowledged and durable.
        act: What is attacked; acknowledges each thing that it got done.
        expect: What must hold, from what was acknowledged.
        go_on: The next save. It must work, reclaim all leftovers, and leave the newest steps.
        keep: How many of them.
        next_version: What `go_on` saves step 1 with; None if it saves a new step.
        is_ordered: Whether the operations always come in the same order.
    """

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path, Acknowledge], None]
    expect: Callable[[Sequence[str]], Expected]
    go_on: Callable[[Path], int]
    keep: int
    next_version: int | None = None
    is_ordered: bool = True


def path_of(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def manager(
    root: Path, keep: int | None, *, background: bool = False, link: bool = False
) -> pc.CheckpointManager:
    policy = None if keep is None else pc.Keep(last=keep)
    return pc.CheckpointManager(root, keep=policy, background=background, link_unchanged=link)


def _save_next(keep: int | None, *, link: bool = False) -> Callable[[Path], int]:
    def go_on(root: Path) -> int:
        step = (pc.latest_step(root) or 0) + 1
        with manager(root, keep, link=link) as made:
            made.save(step, state(step))
        return step

    return go_on


def _nothing(_: Path) -> None:
    pass


# --- first save and overwrite -------------------------------------------------------------------


def first_save(*, background: bool = False) -> Scenario:
    def act(root: Path, acknowledge: Acknowledge) -> None:
        if background:
            pc.save_async(path_of(root, 1), state(1)).result()
        else:
            pc.save(path_of(root, 1), state(1))
        acknowledge("1.0")

    def expect(acks: Sequence[str]) -> Expected:
        return Expected(required=frozenset([1] if acks else []), most=1)

    return Scenario(
        name="first save" + (", background" if background else ""),
        prepare=_nothing,
        act=act,
        expect=expect,
        go_on=_overwrite_next,
        keep=1,
        next_version=9,
        is_ordered=not background,
    )


def _overwrite_next(root: Path) -> int:
    pc.save(path_of(root, 1), state(1, 9), overwrite=True)
    return 1


def overwrite() -> Scenario:
    def prepare(root: Path) -> None:
        pc.save(path_of(root, 1), state(1))

    def act(root: Path, acknowledge: Acknowledge) -> None:
        for version in (1, 2):
            pc.save(path_of(root, 1), state(1, version), overwrite=True)
            acknowledge(f"1.{version}")

    def expect(acks: Sequence[str]) -> Expected:
        done = len(acks)
        versions = {done, min(done + 1, 2)}
        return Expected(required=frozenset([1]), versions={1: frozenset(versions)}, most=2)

    return Scenario(
        name="overwrite",
        prepare=prepare,
        act=act,
        expect=expect,
        go_on=_overwrite_next,
        keep=1,
        next_version=9,
    )


def linked() -> Scenario:
    """Each overwrite links all files of what it replaces, whose own names then go."""

    def prepare(root: Path) -> None:
        pc.save(path_of(root, 1), state(1))

    def act(root: Path, acknowledge: Acknowledge) -> None:
        for _ in range(2):
            made = pc.save(path_of(root, 1), state(1), overwrite=True, base=path_of(root, 1))
            if not made.linked_nbytes:
                raise RuntimeError("nothing was linked")
            acknowledge("1.0")

    def expect(_: Sequence[str]) -> Expected:
        return Expected(required=frozenset([1]), most=2)

    return Scenario(
        name="overwrite, all linked",
        prepare=prepare,
        act=act,
        expect=expect,
        go_on=_overwrite_next,
        keep=1,
        next_version=9,
    )


def conversion() -> Scenario:
    """To other shards; after an interruption the same call goes on from what is finished."""

    def prepare(root: Path) -> None:
        pc.save(root / "src", state(1))

    def convert(root: Path) -> int:
        layout = pc.Layout(mesh={"data": 4}, specs={"large": "None,data", "host": "data"})
        pc.convert(root / "src", path_of(root, 1), layout=layout)
        return 1

    def act(root: Path, acknowledge: Acknowledge) -> None:
        convert(root)
        acknowledge("1.0")

    def expect(acks: Sequence[str]) -> Expected:
        return Expected(required=frozenset([1] if acks else []), most=1)

    return Scenario(
        name="conversion",
        prepare=prepare,
        act=act,
        expect=expect,
        go_on=convert,
        keep=1,
        next_version=0,
    )


# --- rotation -----------------------------------------------------------------------------------


def rotation(keep: int, *, background: bool = False, link: bool = False) -> Scenario:
    first, last = keep + 1, keep + 2

    def prepare(root: Path) -> None:
        with manager(root, keep, link=link) as made:
            for step in range(1, first):
                pending = made.save(step, state(step))
        if link and not (pending and pending.result().linked_nbytes):
            raise RuntimeError("nothing was linked")

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with manager(root, keep, background=background, link=link) as made:
            for step in (first, last):
                made.save(step, state(step))
                made.wait()
                acknowledge(f"{step}.0")

    def expect(acks: Sequence[str]) -> Expected:
        newest = keep + len(acks)
        if newest == last:
            required = range(last - keep + 1, last + 1)
            return Expected(required=frozenset(required), most=max(keep, 2))
        if keep == 1:
            return Expected(any_of=frozenset([newest, newest + 1]), most=2)
        return Expected(required=frozenset(range(newest - keep + 2, newest + 1)), most=keep)

    return Scenario(
        name=f"rotation, K = {keep}" + ", background" * background + ", linked" * link,
        prepare=prepare,
        act=act,
        expect=expect,
        go_on=_save_next(keep, link=link),
        keep=keep,
        is_ordered=not background,
    )


def copies() -> Scenario:
    """The root is the mirror of another one, which is in it."""
    keep = 2

    def copy(root: Path, *steps: int, done: Callable[[int], None] = lambda step: None) -> None:
        policy = pc.Keep(last=keep)
        with pc.CheckpointManager(root / "near", keep=policy, mirror=root) as made:
            for step in steps:
                made.save(step, state(step))
                made.wait()
                done(step)

    def act(root: Path, acknowledge: Acknowledge) -> None:
        copy(root, 3, 4, done=lambda step: acknowledge(f"{step}.0"))

    def expect(acks: Sequence[str]) -> Expected:
        newest = keep + len(acks)
        required = frozenset([newest, newest - 1] if newest == 4 else [newest])
        return Expected(required=required, most=keep)

    def go_on(root: Path) -> int:
        step = 1 + max(pc.latest_step(root) or 0, pc.latest_step(root / "near") or 0)
        copy(root, step)
        return step

    return Scenario(
        name="copies",
        prepare=lambda root: copy(root, 1, 2),
        act=act,
        expect=expect,
        go_on=go_on,
        keep=keep,
        is_ordered=False,
    )


# --- deletion and leftovers ---------------------------------------------------------------------


def deletion() -> Scenario:
    def prepare(root: Path) -> None:
        with manager(root, None) as made:
            for step in (1, 2, 3):
                made.save(step, state(step))

    def act(root: Path, acknowledge: Acknowledge) -> None:
        with manager(root, None) as made:
            made.rollback(1)
        acknowledge("rolled back")

    def expect(acks: Sequence[str]) -> Expected:
        only = frozenset([1]) if acks else None
        return Expected(required=frozenset([1]), only=only, most=3)

    return Scenario(
        name="deletion", prepare=prepare, act=act, expect=expect, go_on=_save_next(None), keep=99
    )


def leftovers() -> Scenario:
    """Dead saves left data and temporary manifests beside a checkpoint, and a step of their own."""

    def prepare(root: Path) -> None:
        with manager(root, 2) as made:
            for step in (1, 2):
                made.save(step, state(step))
        (data,) = path_of(root, 2).glob("data-*")
        for nonce in ("0" * 32, "f" * 32):
            shutil.copytree(data, path_of(root, 2) / f"data-{nonce}")
            shutil.copytree(data, path_of(root, 3) / f"data-{nonce}")
            (path_of(root, 2) / f"manifest.{nonce}.tmp").write_bytes(b"dead")
            (path_of(root, 3) / f"manifest.{nonce}.tmp").write_bytes(b"dead")

    def act(root: Path, acknowledge: Acknowledge) -> None:
        pc.save(path_of(root, 2), state(2, 1), overwrite=True)
        acknowledge("2.1")
        with manager(root, 2) as made:
            made.save(3, state(3))
        acknowledge("3.0")

    def expect(acks: Sequence[str]) -> Expected:
        versions = {2: frozenset([1] if acks else [0, 1])}
        required = frozenset([[1, 2], [2], [2, 3]][len(acks)])
        return Expected(required=required, versions=versions, most=7)

    return Scenario(
        name="leftovers", prepare=prepare, act=act, expect=expect, go_on=_save_next(2), keep=2
    )


def all_scenarios() -> list[Scenario]:
    return [
        first_save(),
        first_save(background=True),
        overwrite(),
        linked(),
        conversion(),
        *(rotation(keep) for keep in (1, 2, 3)),
        *(rotation(keep, background=True) for keep in (1, 2, 3)),
        rotation(2, link=True),
        copies(),
        deletion(),
        leftovers(),
    ]
