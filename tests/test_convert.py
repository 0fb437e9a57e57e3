"""A converted checkpoint loads as the original does with `reshard=True`, bit for bit."""

import concurrent.futures
import itertools
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.format.shardings import Named
from pytree_ckpt.plan import chunking, converting
from pytree_ckpt.store import disk, journal
from tests.bitwise import assert_same
from tests.conftest import make_mesh
from tests.gates import PATIENCE_S, Gate

P = PartitionSpec


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a few hundred bytes are stored as large ones are, and read in many batches."""
    monkeypatch.setattr(chunking, "PACK_BELOW_NBYTES", 128)
    monkeypatch.setattr(chunking, "MAX_CHUNK_NBYTES", 256)
    monkeypatch.setattr(chunking, "MAX_SHARD_NBYTES", 2048)
    monkeypatch.setattr(converting, "BATCH_NBYTES", 2048)


def put(array: Any, axes: dict[str, int], *spec: Any) -> jax.Array:
    mesh = make_mesh(tuple(axes.values()), tuple(axes))
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def state(axes: dict[str, int], *spec: Any) -> dict[str, Any]:
    """One of everything; `kernel` and `keys` are laid out by `spec`."""
    random = np.random.default_rng(7)
    return {
        "params": {
            "kernel": put(random.standard_normal((48, 16), np.float32), axes, *spec),
            "bias": put(random.standard_normal(16, np.float32), axes),
            "count": put(np.arange(16, dtype=np.int32), axes),
        },
        "keys": put(jax.random.split(jax.random.key(3), (8, 8)), axes, *spec),
        "host": np.arange(100, dtype=np.int64),
        "scalar": np.float16(2),
        "empty": put(np.zeros((0, 4), np.float32), axes),
        "data": pc.PerProcess({"position": 7}),
        "none": [None, (), "text", 2**80, True],
    }


LAYOUTS: list[tuple[dict[str, int], tuple[Any, ...]]] = [
    ({"data": 4, "model": 2}, ("data", "model")),
    ({"data": 2, "model": 4}, ("data", "model")),
    ({"data": 8}, ("data", None)),
    ({"data": 8}, (None, "data")),
    ({"data": 2, "model": 2}, (("data", "model"),)),
    ({"data": 1}, ()),
]


@pytest.mark.parametrize(
    ("saved", "wanted"),
    list(itertools.permutations(range(len(LAYOUTS)), 2)),
    ids=lambda number: f"{LAYOUTS[number][0]}{LAYOUTS[number][1]}",
)
def test_a_converted_checkpoint_loads_as_the_original_with_reshard(
    tmp_path: Path, saved: int, wanted: int
) -> None:
    axes, spec = LAYOUTS[wanted]
    target = state(axes, *spec)
    pc.save(tmp_path / "src", state(LAYOUTS[saved][0], *LAYOUTS[saved][1]))
    specs = {"params/kernel": spec, "keys": spec}
    pc.convert(tmp_path / "src", tmp_path / "dst", layout=pc.Layout(mesh=axes, specs=specs))
    assert_same(pc.load(tmp_path / "dst", target), pc.load(tmp_path / "src", target, reshard=True))
    assert pc.verify(tmp_path / "dst").ok
    manifest = pc.read_manifest(tmp_path / "dst")
    assert manifest.source["holds"] == "all"


AXES = {"data": 4, "model": 2}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    pc.save(tmp_path / "src", state(AXES, "data", "model"), metadata={"run": 3})
    return tmp_path / "src"


def test_specs_may_be_text_and_what_no_pattern_matches_keeps_its_own(src: Path) -> None:
    layout = pc.Layout(mesh={"data": 2, "model": 4}, specs={"**/kernel": "data+model,None"})
    pc.convert(src, src.with_name("dst"), layout=layout)
    found = pc.read_manifest(src.with_name("dst")).by_text
    kernel, keys = found["params/kernel"].spec.sharding, found["keys"].spec.sharding
    assert isinstance(kernel, Named)
    assert str(kernel) == "P(('data', 'model'), None) on mesh(data=2, model=4)"
    assert str(keys) == "P('data', 'model', None) on mesh(data=2, model=4)"


def test_the_layout_of_another_checkpoint_is_taken(src: Path) -> None:
    other = src.with_name("other")
    target = state({"data": 2, "model": 2}, "model", "data")
    pc.save(other, target)
    pc.convert(src, src.with_name("dst"), layout=other)
    assert_same(pc.load(src.with_name("dst"), target), pc.load(src, target, reshard=True))


def test_a_dtype_by_pattern_changes_floats_and_leaves_counters_and_keys(src: Path) -> None:
    report = pc.convert(src, src.with_name("dst"), dtype={"**": "bfloat16"})
    assert report.plan.passed_over == ("host", "keys", "params/count")
    with pc.open(src) as old, pc.open(src.with_name("dst")) as new:
        was, now = old.to_numpy(), new.to_numpy()
    assert now["params"]["kernel"].dtype == ml_dtypes.bfloat16
    expected = was["params"]["kernel"].astype(ml_dtypes.bfloat16)
    assert now["params"]["kernel"].tobytes() == expected.tobytes()
    assert now["params"]["count"].dtype == np.int32
    assert (now["keys"] == was["keys"]).all()


def test_an_int_is_cast_if_its_whole_path_is_given(src: Path) -> None:
    pc.convert(src, src.with_name("dst"), dtype={"params/count": "int8"})
    with pc.open(src.with_name("dst")) as new:
        assert new["params/count"][:].tolist() == list(range(16))
    with pytest.raises(pc.MismatchError, match=r"host.*int4 cannot hold"):
        pc.convert(src, src.with_name("other"), dtype={"host": "int4"})
    assert not pc.steps(src.parent)


def test_sizes_of_a_layout_may_be_numbers_of_numpy(src: Path) -> None:
    layout = pc.Layout(mesh={"data": np.int64(2)}, specs={"**": ()}, process_count=np.int32(1))
    dst = src.parent / "dst"
    pc.convert(src, dst, select="params/bias", layout=layout)
    assert pc.read_manifest(dst).meshes[0].axis_sizes == (2,)


def test_only_what_is_selected_is_taken(src: Path) -> None:
    pc.convert(src, src.with_name("dst"), select="params/**")
    with pc.open(src.with_name("dst")) as new:
        assert new.keys() == ["params/bias", "params/count", "params/kernel"]
        assert new.manifest.source["holds"] == "part"
        assert new.manifest.metadata == {"run": 3}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a pattern that no leaf matches": ({"select": "parms/**"}, "parms/.*no leaf matches"),
    "a spec that no array needs": (
        {"layout": pc.Layout(mesh={"x": 2}, specs={"nothing": "x", "**": ""})},
        "nothing.*no array",
    ),
    "an axis that the mesh has not": (
        {"layout": pc.Layout(mesh={"data": 2})},
        r"params/kernel.*'model'",
    ),
    "a dimension that cannot be cut": (
        {"layout": pc.Layout(mesh={"data": 5}, specs={"**": "data"})},
        "params/kernel.*not divisible by 5",
    ),
    "keys as numbers": ({"dtype": {"keys": "float32"}}, "keys.*no numbers"),
    "a dtype that changes nothing": ({"dtype": {"keys/**": "float32"}}, "no array is converted"),
    "values of other processes": (
        {"layout": pc.Layout(process_count=3)},
        "data.*one value for each of 1 processes, converting for 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(src: Path, case: str) -> None:
    asked, text = REFUSED[case]
    with pytest.raises(pc.MismatchError, match=text):
        pc.convert(src, src.with_name("dst"), **asked)
    assert not src.with_name("dst").exists()


def test_a_dry_run_says_what_would_be_done(src: Path) -> None:
    report = pc.convert(src, src.with_name("dst"), dtype={"**": "bfloat16"}, dry_run=True)
    assert "params/kernel  float32[48, 16]" in str(report)
    assert "-> bfloat16[48, 16]" in str(report)
    assert not src.with_name("dst").exists()


def test_damage_is_found_and_nothing_is_committed(src: Path) -> None:
    file = next(src.glob("data-*/arrays/params.kernel/c.0.0"))
    data = bytearray(file.read_bytes())
    data[3] ^= 4
    file.write_bytes(data)
    with pytest.raises(pc.IntegrityError, match=r"chunk \(0, 0\) of params/kernel is damaged"):
        pc.convert(src, src.with_name("dst"))
    with pytest.raises(pc.NotFoundError):
        pc.read_manifest(src.with_name("dst"))


def test_a_checkpoint_is_not_replaced_unless_asked(src: Path) -> None:
    dst = src.with_name("dst")
    pc.save(dst, {"x": 1})
    with pytest.raises(pc.ExistsError):
        pc.convert(src, dst)
    pc.convert(src, dst, overwrite=True)
    assert_same(pc.load(dst), pc.load(src))
    pc.convert(src, src, overwrite=True, dtype={"**/kernel": "float64"})
    with pc.open(src) as new:
        assert new["params/kernel"].dtype == np.float64
    assert [folder.name for folder in src.glob("data-*")] == [pc.read_manifest(src).data_dir]


# --- several processes, and interrupted ones ------------------------------------------------------

CHILD = """
    import json, os, signal, sys
    from pytree_ckpt.plan import chunking, converting
    chunking.PACK_BELOW_NBYTES, chunking.MAX_CHUNK_NBYTES = 128, 256
    chunking.MAX_SHARD_NBYTES = converting.BATCH_NBYTES = 2048
    import pytree_ckpt as pc
    from pytree_ckpt.store import commit, journal

    src, dst, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    die_after = settings.pop("die_after", None)
    add = journal.Journal.add

    def dying(self, *args):
        global die_after
        if die_after == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        die_after -= 1
        add(self, *args)

    if die_after == "commit":
        commit.Attempt.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif die_after is not None:
        journal.Journal.add = dying
    if settings.get("process"):
        settings["process"] = tuple(settings["process"])
    layout = pc.Layout(mesh={"data": 2, "model": 4})
    report = pc.convert(src, dst, layout=layout, options=pc.SaveOptions(threads=1), **settings)
    assert "jax" not in sys.modules
    print(report.kept_nbytes)
"""


def start(src: Path, dst: Path, **settings: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(CHILD), src, dst, json.dumps(settings)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child: "subprocess.Popen[str]") -> int:
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    return int(out)


@pytest.mark.parametrize("moment", [0, 5, "commit"])
def test_a_killed_conversion_goes_on_where_it_was(src: Path, moment: Any) -> None:
    dst = src.with_name("dst")
    killed = start(src, dst, die_after=moment)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(pc.NotFoundError):
        pc.read_manifest(dst)
    kept = finish(start(src, dst))
    assert (kept > 0) == (moment != 0)
    target = state({"data": 2, "model": 4}, "data", "model")
    assert_same(pc.load(dst, target), pc.load(src, target, reshard=True))
    assert pc.verify(dst).ok
    assert not list(dst.rglob("unfinished")) + list(dst.rglob("*.__lock"))


def test_what_died_within_its_commit_is_made_durable_by_the_same_call(
    src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = src.with_name("dst")
    made = pc.convert(src, dst).manifest
    assert made is not None
    (dst / f"manifest.{made.nonce}.tmp").write_bytes(b"its other name")
    synced: list[Path] = []
    monkeypatch.setattr(disk, "fsync_dir", synced.append)
    assert pc.convert(src, dst).manifest == made
    assert synced == [dst]
    assert sorted(file.name for file in dst.iterdir()) == [made.data_dir, "manifest.msgpack"]


def test_what_was_finished_and_then_damaged_is_written_again(src: Path) -> None:
    dst = src.with_name("dst")
    start(src, dst, die_after=8).communicate(timeout=120)
    (first, *_) = sorted(dst.glob("data-*/arrays/params.kernel/c*"))
    first.write_bytes(first.read_bytes()[:-3] + b"abc")
    finish(start(src, dst))
    assert pc.verify(dst).ok


def test_what_is_finished_needs_no_space_again(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dst = src.with_name("dst")
    start(src, dst, die_after=8).communicate(timeout=120)
    layout = pc.Layout(mesh={"data": 2, "model": 4})
    needed = pc.convert(src, dst, layout=layout, dry_run=True).plan.parts[0].plan.nbytes
    monkeypatch.setattr(disk, "free_nbytes", lambda _: needed - 1)
    with pytest.raises(OSError, match="are free"):
        pc.convert(src, dst.with_name("another"), layout=layout)
    assert pc.convert(src, dst, layout=layout).kept_nbytes
    assert pc.verify(dst).ok


def test_a_save_reclaims_what_an_interrupted_conversion_left(src: Path) -> None:
    dst = src.with_name("dst")
    start(src, dst, die_after=5).communicate(timeout=120)
    pc.save(dst, {"x": 1})
    assert len(list(dst.glob("data-*"))) == 1


def test_processes_of_a_launcher_commit_together(src: Path) -> None:
    dst = src.with_name("dst")
    children = [start(src, dst, process=[number, 3]) for number in range(3)]
    for child in children:
        finish(child)
    target = state({"data": 2, "model": 4}, "data", "model")
    assert_same(pc.load(dst, target), pc.load(src, target, reshard=True))
    assert len(pc.read_manifest(dst).tables) == 3
    assert pc.verify(dst).ok


def part_of(src: Path, number: int, **settings: Any) -> pc.Manifest:
    """The part of one of two processes, here in this one."""
    layout = pc.Layout(mesh={"data": 2, "model": 4})
    dst = src.with_name("dst")
    report = pc.convert(src, dst, layout=layout, process=(number, 2), **settings)
    assert report.manifest is not None
    return report.manifest


@pytest.mark.parametrize("moment", ["created", "written"])
def test_nothing_is_committed_before_what_the_others_wrote_is_durable(
    src: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The table of the other one has its name before it has its bytes, and before they last."""
    gate, create, sync = Gate(), disk.create, disk.fsync_dir

    def gated_create(path: Path | str) -> int:
        fd = create(path)
        if moment == "created" and str(path).endswith("tables/00001.msgpack"):
            gate.pass_through()
        return fd

    def gated_sync(path: Path) -> None:
        if moment == "written" and (path.parent / "tables/00001.msgpack").exists():
            gate.pass_through()
        sync(path)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(disk, "create", gated_create)
            patch.setattr(disk, "fsync_dir", gated_sync)
            other = pool.submit(part_of, src, 1, timeout_s=PATIENCE_S)
            gate.wait_until_reached()
        try:
            with pytest.raises(pc.PeerTimeoutError, match=r"processes \[1\]"):
                part_of(src, 0, timeout_s=0.3)
            assert not src.with_name("dst").joinpath("manifest.msgpack").exists()
        finally:
            gate.open()
        assert part_of(src, 0) == other.result()
    assert pc.verify(src.with_name("dst")).ok


def test_a_process_that_comes_late_leaves_alone_what_is_committed_already(
    src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it finished in an earlier run was all that the others waited for."""
    dst = src.with_name("dst")
    with pytest.raises(pc.PeerTimeoutError):
        part_of(src, 1, timeout_s=0.3)
    gate, begin = Gate(), journal.Journal.__init__

    def late(self: journal.Journal, data: Path, process: int) -> None:
        if process:
            gate.pass_through()
        begin(self, data, process)

    def seen() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in dst.rglob("*") if file.is_file()}

    monkeypatch.setattr(journal.Journal, "__init__", late)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(part_of, src, 1, timeout_s=PATIENCE_S)
        gate.wait_until_reached()
        try:
            made = part_of(src, 0)
            before = seen()
        finally:
            gate.open()
        assert other.result() == made
    assert seen() == before
    assert pc.verify(dst).ok


def test_a_process_that_does_not_come_is_named(src: Path) -> None:
    with pytest.raises(pc.PeerTimeoutError, match=r"processes \[1\]"):
        pc.convert(src, src.with_name("dst"), process=(0, 2), timeout_s=0.3)


def test_workers_are_started_here(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the workers cut arrays as usual, and so must this process
    dst = src.with_name("dst")
    pc.convert(src, dst, dtype={"params/kernel": "bfloat16"}, workers=2)
    assert len(pc.read_manifest(dst).tables) == 2
    assert pc.verify(dst).ok


def test_a_worker_may_say_more_than_a_pipe_holds(
    src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONVERBOSE", "1")
    pc.convert(src, src.with_name("dst"), workers=2, timeout_s=PATIENCE_S)
    assert pc.verify(src.with_name("dst")).ok


def test_a_worker_that_fails_fails_the_conversion(src: Path) -> None:
    for file in src.glob("data-*/packed/*/c*"):
        file.unlink()
    with pytest.raises((pc.CheckpointError, OSError), match=r"missing|failed"):
        pc.convert(src, src.with_name("dst"), workers=2, timeout_s=60)
