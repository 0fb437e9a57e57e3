"""`verify` finds every damage and names the leaf, without loading anything."""

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import pytree_ckpt as pc
from pytree_ckpt.store import disk
from tests import flips

Codec = Literal["zstd"] | None


def state() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "large": rng.integers(0, 1 << 16, (1024, 1024), np.int32),
        "small": {f"w{n}": rng.standard_normal(100) for n in range(20)},
        "step": 3,
    }


@pytest.fixture(params=[None, "zstd"], ids=["raw", "zstd"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    pc.save(tmp_path / "ckpt", state(), options=pc.SaveOptions(compress=request.param))
    return tmp_path / "ckpt"


def data_files(checkpoint: Path) -> list[Path]:
    return sorted(p for p in checkpoint.rglob("*") if p.is_file())


def test_a_whole_checkpoint_is_whole(checkpoint: Path) -> None:
    report = pc.verify(checkpoint)
    assert report.ok
    assert report.unchecked == ()
    assert report.nbytes == pc.read_manifest(checkpoint).nbytes
    assert "whole" in str(report)


def test_quick_says_what_it_did_not_check(checkpoint: Path) -> None:
    report = pc.verify(checkpoint, quick=True)
    assert report.ok
    assert report.chunks == 0
    assert any("digests of 21 chunks" in what for what in report.unchecked)


def test_a_flipped_bit_anywhere_is_found_and_the_leaf_named(checkpoint: Path) -> None:
    """Padding between packed shards is the one place where a flip means nothing."""
    choose = random.Random(5)
    harmless = 0
    for file in data_files(checkpoint):
        for _ in range(12):
            whole = file.read_bytes()
            at = choose.randrange(len(whole))
            flipped = bytearray(whole)
            flipped[at] ^= 1 << choose.randrange(8)
            file.write_bytes(flipped)
            report = pc.verify(checkpoint)
            file.write_bytes(whole)
            if report.ok:
                assert file.parent.parent.name == "packed", (file, at)
                harmless += 1
            elif file.parent.parent.name == "arrays":
                assert {d.path for d in report.damage} == {"large"}
            elif file.parent.parent.name == "packed" and file.name != "zarr.json":
                assert {str(d.path).split("/")[0] for d in report.damage} <= {"small"}
    assert harmless < 24
    assert pc.verify(checkpoint).ok


def test_a_flip_is_reported_as_damage_of_its_leaf_alone(tmp_path: Path) -> None:
    assert flips.wrongly_reported(tmp_path / "ckpt", count=50, seed=1) == []


@pytest.mark.parametrize("quick", [False, True])
def test_a_missing_file_is_found(checkpoint: Path, quick: bool) -> None:
    for file in data_files(checkpoint):
        if file.name == "manifest.msgpack" or (quick and file.parent.parent.name == "packed"):
            continue
        whole = file.read_bytes()
        file.unlink()
        needless = file.parent.parent.name == "packed" and file.name == "zarr.json"
        assert needless or not pc.verify(checkpoint, quick=quick).ok, file
        file.write_bytes(whole)


def test_a_damaged_manifest_is_reported_and_a_missing_one_raises(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.msgpack"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    report = pc.verify(checkpoint)
    assert [d.kind for d in report.damage] == ["metadata"]
    assert report.unchecked
    manifest.unlink()
    with pytest.raises(pc.NotFoundError):
        pc.verify(checkpoint)


@pytest.mark.parametrize("name", ["manifest.msgpack", "00000.msgpack", "zarr.json"])
def test_a_storage_that_fails_is_not_called_damage(
    checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = disk.open_file

    def failing(path: Path | str) -> int:
        if Path(path).name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path)

    monkeypatch.setattr(disk, "open_file", failing)
    with pytest.raises(OSError, match="Input/output error"):
        pc.verify(checkpoint)


def test_every_damaged_chunk_is_listed(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {f"w{n}": np.full((512, 1024), n) for n in range(4)})
    for name in ("w1", "w3"):
        (file,) = (tmp_path / "ckpt").glob(f"data-*/arrays/{name}/c.*")
        content = bytearray(file.read_bytes())
        content[1000] ^= 1
        file.write_bytes(content)
    report = pc.verify(tmp_path / "ckpt")
    assert [(d.path, d.kind, d.chunk) for d in report.damage] == [
        ("w1", "digest", (0, 0)),
        ("w3", "digest", (0, 0)),
    ]


def test_verify_imports_no_jax(checkpoint: Path) -> None:
    code = (
        "import sys, json, pytree_ckpt as pc\n"
        f"report = pc.verify({str(checkpoint)!r})\n"
        "print(json.dumps([report.ok, 'jax' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, False]
