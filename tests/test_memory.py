"""How much memory a save and a load take, and that none of it stays; the numbers are printed."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc

P = PartitionSpec
MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="this system does not tell the peak of a process's memory",
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if it has the room: so the disk's speed does not matter."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shutil.disk_usage(shared).free < 2048 * MIB:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as name:
        yield Path(name)


PEAK = """
    import gc, os, sys

    import numpy as np
    import pytree_ckpt as pc

    MIB = 1 << 20
    folder = sys.argv[1]


    def status(field):
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith(field + ":"))
        return int(line.split()[1]) << 10


    class Peak:
        # Memory above what there is now, at its peak within the block.
        def __enter__(self):
            gc.collect()
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self.before = status("VmRSS")
            return self

        def __exit__(self, *_):
            self.mib = (status("VmHWM") - self.before) / MIB
"""

PRELUDE = """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))


    def state_of(mib, leaves):
        shape = (2048, mib * MIB // leaves // 2048 // 4)
        rng = np.random.default_rng(0)
        return {
            f"leaf{n}": jax.device_put(rng.random(shape, np.float32), rows) for n in range(leaves)
        }


    # Libraries, threads and allocators take their own share once.
    small = state_of(4, 2)
    pc.save(folder + "/small", small)
    pc.load(folder + "/small", small)
"""


def run(folder: Path, *parts: str) -> dict[str, float]:
    """The numbers that a script prints, from a process of its own with eight devices."""
    done = subprocess.run(
        [sys.executable, "-c", "".join(map(textwrap.dedent, (PEAK, *parts))), folder],
        env={**os.environ, "PYTHONPATH": str(Path(pc.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return {name: float(value) for name, value in map(str.split, done.stdout.splitlines())}


PEAKS = """
    state = state_of(256, 8)
    save = pc.SaveOptions(threads=2, max_inflight_bytes=64 * MIB)
    load = pc.LoadOptions(threads=2, max_inflight_bytes=64 * MIB)

    with Peak() as peak:
        pc.save(folder + "/raw", state, options=save)
    print("save_raw", peak.mib)
    with Peak() as peak:
        pc.save(folder + "/raw", state, options=save, overwrite=True)
    print("save_again", peak.mib)

    with Peak() as peak:
        pc.save_async(folder + "/async", state, options=save).result()
    print("save_async", peak.mib)

    def loaded(name, sharding, dtype=np.float32, **options):
        target = {
            key: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)
            for key, x in state.items()
        }
        with Peak() as peak:
            found = pc.load(folder + "/raw", target, options=load, **options)
            jax.block_until_ready(found)
        assert np.array_equal(found["leaf7"], np.asarray(state["leaf7"]).astype(dtype))
        print(name, peak.mib)

    loaded("load_rows", rows)
    loaded("load_columns", columns, reshard=True)
    loaded("load_one", SingleDeviceSharding(jax.devices()[3]), reshard=True)
    loaded("load_bf16", rows, jax.numpy.bfloat16, cast=True)

    # The eight leaves as the stack of them, with its shards on one axis or the other, and back.
    shape = (8, *state["leaf0"].shape)
    for name, spec in (("load_stack", P(None, "data")), ("load_stack_apart", P("data"))):
        layout = NamedSharding(mesh, spec)
        target = {"all": jax.ShapeDtypeStruct(shape, np.float32, sharding=layout)}
        with Peak() as peak:
            found = pc.load(
                folder + "/raw", target, stack={"leaf{}": "all"}, reshard=True, options=load
            )
            jax.block_until_ready(found)
        assert np.array_equal(found["all"][7], np.asarray(state["leaf7"]))
        print(name, peak.mib)
    pc.save(folder + "/stack", found)
    del found
    with Peak() as peak:
        found = pc.load(
            folder + "/stack", state, unstack={"all": "leaf{}"}, reshard=True, options=load
        )
        jax.block_until_ready(found)
    assert np.array_equal(found["leaf7"], np.asarray(state["leaf7"]))
    print("load_unstacked", peak.mib)
    del found

    with Peak() as peak:
        with pc.open(folder + "/raw", options=load) as ckpt:
            element = ckpt["leaf0"][0, 0]
    assert element == np.asarray(state["leaf0"])[0, 0]
    print("read_one_element", peak.mib)

    save = pc.SaveOptions(threads=2, max_inflight_bytes=64 * MIB, compress="zstd")
    with Peak() as peak:
        pc.save(folder + "/zstd", state, options=save)
    print("save_zstd", peak.mib)
"""


def test_a_save_and_a_load_take_little_more_than_the_state(folder: Path) -> None:
    state, constant = 256, 32
    mib = run(folder, PRELUDE, PEAKS)
    for name in ("save_raw", "save_again", "save_async", "save_zstd"):
        assert mib[name] <= 0.25 * state + constant, name
    for name in ("load_rows", "load_columns", "load_one"):
        assert state * 0.9 <= mib[name] <= 1.25 * state + constant, name
    # Less than the state where the allocator still has memory of the load before.
    for name in ("load_stack", "load_stack_apart", "load_unstacked"):
        assert mib[name] <= 1.25 * state + constant, name
    # Half of the state, what is in flight, and a part of that in the new dtype.
    assert mib["load_bf16"] <= 0.5 * state + 64 + 32 + constant
    assert mib["read_one_element"] <= constant


SOURCES = """
    import orbax.checkpoint as ocp

    state = state_of(512, 4)
    pc.save(folder + "/a", state)
    pc.save(folder + "/b", {name: array + 1 for name, array in state.items()})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=False)) as checkpointer:
        checkpointer.save(f"{folder}/orbax", args=ocp.args.PyTreeSave(state))
"""

OFFLINE = """
    import glob, shutil

    a, out = folder + "/a", folder + "/out"
    pc.verify(folder + "/small")
    pc.export_npz(folder + "/small", folder + "/small.npz")
    layout = pc.Layout(mesh={"data": 8}, specs={"**": (None, "data")})
    actions = {
        "verify": lambda: pc.verify(a),
        "diff": lambda: pc.diff(a, folder + "/b"),
        "convert": lambda: pc.convert(a, out + "0", layout=layout, dtype={"**": "bfloat16"}),
        "export_safetensors": lambda: pc.export_safetensors(a, out + ".safetensors"),
        "import_safetensors": lambda: pc.import_safetensors(out + ".safetensors", out + "1"),
        "export_npz": lambda: pc.export_npz(a, out + ".npz"),
        "import_npz": lambda: pc.import_npz(out + ".npz", out + "2"),
        "import_orbax": lambda: pc.import_orbax(folder + "/orbax", out + "3"),
    }
    for name, action in actions.items():
        with Peak() as peak:
            action()
        print(name, peak.mib)
        if "import" in name or name == "convert":
            shutil.rmtree(max(glob.glob(out + "[0-9]")))
    assert not {"jax", "orbax"} & set(sys.modules)
"""


def test_what_is_done_offline_takes_less_memory_than_the_state(folder: Path) -> None:
    """What is in flight is 256 MiB where it is read, 64 MiB where it is also written; the chunks of
    orbax are decoded whole and cached.
    """
    run(folder, PRELUDE, SOURCES)
    bounds = {"verify": 384, "diff": 384, "import_orbax": 448}
    for name, mib in run(folder, OFFLINE).items():
        assert mib <= bounds.get(name, 256), name


LEAKS = """
    path, state = folder + "/ckpt", state_of(64, 4)
    options = pc.SaveOptions(digest="xxh3_128")
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), state)


    def repeated(name, action):
        for number in range(1, 21):
            action()
            gc.collect()
            if number in (5, 20):
                print(f"{name}_rss_{number}", status("VmRSS") / MIB)
                print(f"{name}_files_{number}", len(os.listdir("/proc/self/fd")))
                print(f"{name}_threads_{number}", status("Threads") >> 10)


    repeated("save", lambda: pc.save(path, state, overwrite=True, options=options))
    repeated("load", lambda: pc.load(path, target))
    repeated("open", lambda: pc.open(path)["leaf0"][0])
"""


def test_twenty_saves_and_loads_leave_no_memory_files_or_threads_behind(folder: Path) -> None:
    found = run(folder, PRELUDE, LEAKS)
    for name in ("save", "load", "open"):
        assert abs(found[f"{name}_rss_20"] - found[f"{name}_rss_5"]) < 64, name
        assert found[f"{name}_files_20"] == found[f"{name}_files_5"], name
        assert found[f"{name}_threads_20"] <= found[f"{name}_threads_5"] + 1, name


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("bound", [1, 1 * MIB])
def test_a_request_above_the_bound_goes_alone(
    folder: Path, mesh_8: jax.sharding.Mesh, bound: int, compress: None
) -> None:
    rows, columns = (NamedSharding(mesh_8, spec) for spec in (P("data"), P(None, "data")))
    original = np.arange(4 * MIB, dtype=np.float32).reshape(2048, 2048)
    state = {
        "large": jax.device_put(original, rows),
        "small": jax.device_put(np.arange(64.0, dtype=np.float32), rows),
        "host": np.arange(MIB),
        "n": 3,
    }
    pc.save(
        folder,
        state,
        options=pc.SaveOptions(max_inflight_bytes=bound, compress=compress, threads=4),
    )
    target = {**state, "large": jax.ShapeDtypeStruct((2048, 2048), np.float32, sharding=columns)}
    found = pc.load(
        folder, target, reshard=True, options=pc.LoadOptions(max_inflight_bytes=bound, threads=4)
    )
    assert found["large"].sharding == columns
    np.testing.assert_array_equal(found["large"], original)
    np.testing.assert_array_equal(found["small"], state["small"])
    np.testing.assert_array_equal(found["host"], state["host"])
    assert found["n"] == 3


def test_bounds_that_make_no_sense_are_refused() -> None:
    for options in (pc.SaveOptions, pc.LoadOptions):
        with pytest.raises(ValueError, match="max_inflight_bytes"):
            options(max_inflight_bytes=0)
        with pytest.raises(ValueError, match="threads"):
            options(threads=0)


@pytest.mark.parametrize("on", [True, False])
def test_a_save_and_a_load_leave_the_collector_of_cycles_as_it_was(
    tmp_path: Path, on: bool
) -> None:
    (gc.enable if on else gc.disable)()
    try:
        pc.save(tmp_path / "ckpt", {"a": np.arange(3)})
        pc.load(tmp_path / "ckpt")
        with pytest.raises(pc.MismatchError):
            pc.load(tmp_path / "ckpt", {"b": np.arange(3)})
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_a_save_that_is_interrupted_leaves_the_collector_of_cycles_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disable = gc.disable

    def interrupted() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pc.save(tmp_path / "ckpt", {"a": np.arange(3)})
    assert gc.isenabled()
