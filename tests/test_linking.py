"""A save links the files of its base that it would only repeat, and nothing else."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.plan import chunking
from tests.bitwise import assert_same
from tests.conftest import make_mesh


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a few hundred bytes are stored as large ones are."""
    monkeypatch.setattr(chunking, "PACK_BELOW_NBYTES", 128)
    monkeypatch.setattr(chunking, "MAX_CHUNK_NBYTES", 256)


def state_of(trained: int) -> dict[str, Any]:
    """Frozen weights that are always the same, trained ones that are all `trained`."""
    rows = NamedSharding(make_mesh((4,), ("data",)), PartitionSpec("data"))
    frozen = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    half = np.concatenate([frozen[:32], np.full((32, 8), trained, np.float32)])
    return {
        "frozen": jax.device_put(frozen, rows),
        "half": jax.device_put(half, rows),
        "bf16": jax.device_put(frozen.astype("bfloat16"), rows),
        "small": np.full(3, trained),
        "step": trained,
    }


def files(checkpoint: Path) -> dict[str, int]:
    """Every file of arrays below the data folder, with its inode."""
    (data,) = checkpoint.glob("data-*")
    found = sorted(data.glob("arrays/*/c*"))
    return {str(file.relative_to(data)): file.stat().st_ino for file in found}


def shared(a: Path, b: Path) -> list[str]:
    """Files that are one file in both."""
    ours, theirs = files(a), files(b)
    assert list(ours) == list(theirs)
    return [name for name, inode in ours.items() if theirs[name] == inode]


FROZEN = [f"arrays/{name}/c.{shard}.0" for name in ("bf16", "frozen") for shard in range(4)]
UNCHANGED = sorted([*FROZEN, "arrays/half/c.0.0", "arrays/half/c.1.0"])


@pytest.mark.parametrize("compress", [None, "zstd"], ids=["raw", "zstd"])
def test_only_shards_that_changed_are_written(tmp_path: Path, compress: Any) -> None:
    options = pc.SaveOptions(compress=compress)
    pc.save(tmp_path / "1", state_of(1), options=options)
    manifest = pc.save(tmp_path / "2", state_of(2), base=tmp_path / "1", options=options)
    assert shared(tmp_path / "1", tmp_path / "2") == UNCHANGED
    assert manifest.linked_nbytes == 2048 + 1024 + 1024
    assert pc.read_manifest(tmp_path / "2").linked_nbytes == manifest.linked_nbytes
    assert_same(pc.load(tmp_path / "2", state_of(0)), state_of(2))
    assert pc.verify(tmp_path / "2").ok


@pytest.mark.parametrize("gone", ["1", "2"])
def test_each_checkpoint_is_whole_when_the_other_is_deleted(tmp_path: Path, gone: str) -> None:
    pc.save(tmp_path / "1", state_of(1))
    pc.save(tmp_path / "2", state_of(2), base=tmp_path / "1")
    shutil.rmtree(tmp_path / gone)
    left = 2 if gone == "1" else 1
    assert_same(pc.load(tmp_path / str(left), state_of(0)), state_of(left))


def test_a_checkpoint_may_be_the_base_of_what_replaces_it(tmp_path: Path) -> None:
    pc.save(tmp_path / "1", state_of(1))
    before = files(tmp_path / "1")
    pc.save(tmp_path / "1", state_of(2), base=tmp_path / "1", overwrite=True)
    after = files(tmp_path / "1")
    assert [name for name in after if after[name] == before[name]] == UNCHANGED
    assert_same(pc.load(tmp_path / "1", state_of(0)), state_of(2))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[10] ^= 1
    file.write_bytes(data)


def swap_with_a_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "cut": lambda file: os.truncate(file, 100),
    "longer": lambda file: file.write_bytes(b"junk" + file.read_bytes()),
    "missing": Path.unlink,
    "a symbolic link": swap_with_a_link,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_of_the_base_is_not_linked(tmp_path: Path, kind: str) -> None:
    pc.save(tmp_path / "1", state_of(1))
    (data,) = (tmp_path / "1").glob("data-*")
    DAMAGE[kind](data / "arrays/frozen/c.2.0")
    pc.save(tmp_path / "2", state_of(2), base=tmp_path / "1")
    linked = [n for n, i in files(tmp_path / "2").items() if i in files(tmp_path / "1").values()]
    assert linked == [name for name in UNCHANGED if name != "arrays/frozen/c.2.0"]
    assert pc.verify(tmp_path / "2").ok
    assert_same(pc.load(tmp_path / "2", state_of(0)), state_of(2))


def other_sharding() -> dict[str, Any]:
    columns = NamedSharding(make_mesh((4,), ("data",)), PartitionSpec(None, "data"))
    return jax.tree.map(
        lambda x: jax.device_put(x, columns) if isinstance(x, jax.Array) else x, state_of(1)
    )


def test_nothing_is_linked_between_other_shards_codecs_or_digests(tmp_path: Path) -> None:
    pc.save(tmp_path / "1", state_of(1))
    zstd = pc.SaveOptions(compress="zstd")
    xxh3 = pc.SaveOptions(digest="xxh3_128")
    assert pc.save(tmp_path / "2", other_sharding(), base=tmp_path / "1").linked_nbytes == 0
    for name, options in (("3", zstd), ("4", xxh3)):
        found = pc.save(tmp_path / name, state_of(1), base=tmp_path / "1", options=options)
        assert found.linked_nbytes == 0
        assert_same(pc.load(tmp_path / name, state_of(0)), state_of(1))


def test_where_links_are_refused_the_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    pc.save(tmp_path / "1", state_of(1))
    monkeypatch.setattr(os, "link", refuse)
    manifest = pc.save(tmp_path / "2", state_of(2), base=tmp_path / "1")
    assert manifest.linked_nbytes == 0
    assert_same(pc.load(tmp_path / "2", state_of(0)), state_of(2))


def test_a_base_that_is_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    pc.save(tmp_path / "1", state_of(1))
    with pytest.raises(pc.NotFoundError, match="nothing at"):
        pc.save(tmp_path / "2", state_of(2), base=tmp_path / "0")
    (table,) = (tmp_path / "1").glob("data-*/tables/*")
    flip(table)
    with pytest.raises(pc.IntegrityError, match="table"):
        pc.save(tmp_path / "2", state_of(2), base=tmp_path / "1")
    assert not (tmp_path / "2").exists()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system is at hand")
def test_a_base_on_another_file_system_is_refused(tmp_path: Path) -> None:
    if os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system is at hand")
    pc.save(tmp_path / "1", state_of(1))
    with pytest.raises(pc.CheckpointError, match="another file system"):
        pc.save("/dev/shm/pytree_ckpt-test-linking", state_of(2), base=tmp_path / "1")
    assert not os.path.exists("/dev/shm/pytree_ckpt-test-linking")


def test_the_manager_links_to_the_latest_step_that_is_whole(tmp_path: Path) -> None:
    with pc.CheckpointManager(tmp_path, link_unchanged=True) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    one, two, three = (pc.step_path(tmp_path, step) for step in (1, 2, 3))
    assert shared(Path(one), Path(two)) == UNCHANGED
    (table,) = Path(two).glob("data-*/tables/*")
    flip(table)
    with pc.CheckpointManager(tmp_path, link_unchanged=True, keep=pc.Keep(last=9)) as manager:
        manager.save(3, state_of(3))
    assert shared(Path(one), Path(three)) == UNCHANGED
    assert_same(pc.load(three, state_of(0)), state_of(3))
