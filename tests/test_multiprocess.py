"""Saves and loads by several processes, each with some of the devices."""

import errno
import inspect
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pytree_ckpt as pc
from pytree_ckpt.format import shardings as ckpt_shardings
from pytree_ckpt.format.paths import Key
from pytree_ckpt.plan.saving import ArrayForm, plan_save
from pytree_ckpt.store import commit, object_commit, writing
from pytree_ckpt.verbs import manager, save_job, schedule
from tests import stranger
from tests.bitwise import assert_same
from tests.cluster import Cluster

SHAPE = (16, 24)
LARGE = (2048, 1024)


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with Cluster(2, 4) as cluster:
        yield cluster


def numbers(seed: int, shape: tuple[int, ...] = SHAPE) -> "np.ndarray[Any, Any]":
    return np.random.default_rng(seed).integers(0, 1 << 30, shape).astype(np.float32)


ARRAYS = {
    "both": numbers(0),
    "rows": numbers(1),
    "columns": numbers(2),
    "replicated": numbers(3),
    "large": numbers(4, LARGE),
    "large replicated": numbers(5, LARGE),
    "local": numbers(6),
    "host": numbers(7),
}


def state() -> Any:
    """A state of every kind of leaf that a training loop of several processes has."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, 2), ("data", "model"))

    def put(name: str, *spec: Any) -> jax.Array:
        value, sharding = ARRAYS[name], NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return {
        "both": put("both", "data", "model"),
        "rows": put("rows", "data"),
        "columns": put("columns", None, "model"),
        "replicated": put("replicated"),
        "large": put("large", "data", "model"),
        "large replicated": put("large replicated"),
        "key": jax.random.key(7),
        "local": jax.device_put(ARRAYS["local"]),
        "host": ARRAYS["host"],
        "step": 12,
        "iterator": pc.PerProcess({"position": jax.process_index()}),
    }


def save(path: str, **options: Any) -> str:
    """Save `state`; the id of the manifest."""
    return pc.save(path, state(), **options).id.hex()


def load(path: str, reshard: bool = False) -> None:
    """Load onto the layout that `state` has here, and compare every bit."""
    target = state()
    if reshard:
        del target["iterator"]
    found = pc.load(path, target, reshard=reshard, partial=reshard)
    assert_same(found, target)


def load_resharded(path: str) -> None:
    """Load what was cut by rows cut by columns over all devices, and the reverse."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("all",))
    specs = {"both": P(None, "all"), "rows": P(None, "all"), "columns": P("all"), "large": P("all")}
    before = state()
    target = {
        name: jax.ShapeDtypeStruct(
            before[name].shape, np.float32, sharding=NamedSharding(mesh, spec)
        )
        for name, spec in specs.items()
    }
    found = pc.load(path, target, reshard=True, partial=True)
    for name, array in found.items():
        assert array.sharding == target[name].sharding
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), ARRAYS[name][shard.index])


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with Cluster(4, 2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def saved(pair: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint by two processes."""
    path = tmp_path_factory.mktemp("saved") / "by_two"
    pair.run(save, str(path))
    return path


# --- saves ----------------------------------------------------------------------------------------


def test_all_processes_save_one_checkpoint(pair: Cluster, tmp_path: Path) -> None:
    ids = pair.run(save, str(tmp_path / "a"))
    assert ids == [pc.read_manifest(tmp_path / "a").id.hex()] * 2


def test_a_stranger_reads_what_two_processes_wrote(saved: Path) -> None:
    found = dict(stranger.read(saved))
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name,], array)
    assert found["iterator",] == [{"position": 0}, {"position": 1}]
    assert pc.verify(saved).ok


def test_two_processes_load_what_they_saved(pair: Cluster, saved: Path) -> None:
    pair.run(load, str(saved))


def test_two_processes_load_another_layout(pair: Cluster, saved: Path) -> None:
    pair.run(load_resharded, str(saved))


# --- another number of processes ------------------------------------------------------------------


def test_another_number_of_processes_is_refused_and_right_with_reshard(
    pair: Cluster, four: Cluster, saved: Path, tmp_path: Path
) -> None:
    refused = four.outcomes(load, str(saved))
    assert [failed.kind for failed in refused] == ["MismatchError"] * 4
    assert all("saved by 2, loading on 4" in failed.text for failed in refused)
    four.run(load, str(saved), reshard=True)
    four.run(save, str(tmp_path / "by_four"))
    pair.run(load, str(tmp_path / "by_four"), reshard=True)
    load(str(tmp_path / "by_four"), reshard=True)
    with pytest.raises(pc.MismatchError, match="saved by 4, loading on 1"):
        load(str(tmp_path / "by_four"))


def test_four_processes_load_what_one_saved(four: Cluster, tmp_path: Path) -> None:
    save(str(tmp_path / "by_one"))
    four.run(load, str(tmp_path / "by_one"), reshard=True)


# --- what is wrong on one process -----------------------------------------------------------------


def save_otherwise(path: str, what: str) -> None:
    """As `save`, but the last process saves something else than the others."""
    import jax

    tree, options = state(), {}
    if jax.process_index() == jax.process_count() - 1:
        if what == "path":
            path += " elsewhere"
        elif what == "overwrite":
            options["overwrite"] = True
        elif what == "digest":
            options["options"] = pc.SaveOptions(digest="xxh3_128")
        elif what == "a value":
            tree["step"] = 13
        elif what == "an array of the host":
            tree["host"] = tree["host"] + 1
        elif what == "a local array":
            tree["local"] = tree["local"] + 1
        elif what == "a leaf more":
            tree["more"] = 1
        elif what == "a leaf less":
            del tree["step"]
        elif what == "a sharding":
            tree["both"] = tree["rows"]
        elif what == "a leaf that cannot be saved":
            tree["bad"] = object()
    pc.save(path, tree, **options)


DIFFERENCES = {
    "path": "all processes must save to one path on storage that they share",
    "overwrite": "overwrite: False in process 0, True here",
    "digest": "digest: sha256 in process 0, xxh3_128 here",
    "a value": "step: 12 in process 0, 13 here; what each process has its own of goes in PerPro",
    "an array of the host": "host: not the elements that it has in process 0; what each process",
    "a local array": "local: not the elements that it has in process 0",
    "a leaf more": "more: missing in process 0, int here",
    "a leaf less": "step: int in process 0, missing here",
    "a sharding": "both: float32[16, 24] P('data', 'model') on mesh(data=4, model=2)",
    "a leaf that cannot be saved": "bad  is a builtins.object",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_processes_that_do_not_save_the_same_all_learn_what_differs(
    pair: Cluster, tmp_path: Path, what: str
) -> None:
    failed = pair.outcomes(save_otherwise, str(tmp_path / "a"), what)
    assert all(DIFFERENCES[what] in one.text for one in failed), [one.text for one in failed]
    assert all("CheckpointError" in one.bases for one in failed)
    assert failed[0].kind == "PeerError"
    assert list(failed[0].attributes["failures"]) == [1]
    assert list(tmp_path.iterdir()) == []
    pair.run(save, str(tmp_path / "a"))  # the next one is not disturbed


POINTS = {
    "before it writes": (writing.Writer, "write"),
    "between two files": (writing.Writer, "_write_piece"),
    "before its table": (writing.tables, "to_bytes"),
    "before the commit": (commit.Attempt, "commit"),
    "within the commit": (commit.Attempt, "_create"),
    "before the commit to a store": (object_commit.ObjectAttempt, "commit"),
    "within the commit to a store": (object_commit.ObjectAttempt, "_put"),
}
OF_ALL = list(POINTS)[:3]


def save_failing(path: str, process: int, point: str, error: BaseException) -> None:
    """As `save`, but `process` fails when it comes to a point."""
    import jax

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == process:
            patch.setattr(*POINTS[point], fail)
        pc.save(path, state())


@pytest.mark.parametrize(
    ("process", "point"),
    [
        *((1, point) for point in OF_ALL),
        *((0, point) for point in (*OF_ALL, "before the commit", "within the commit")),
    ],
)
def test_what_fails_on_one_process_fails_on_all_and_commits_nothing(
    pair: Cluster, tmp_path: Path, process: int, point: str
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    failed = pair.outcomes(save_failing, str(tmp_path / "a"), process, point, full)
    assert failed[process].kind == "OSError"
    assert failed[process].attributes["errno"] == errno.ENOSPC
    other = failed[1 - process]
    assert other.kind == "PeerError"
    assert other.attributes["failures"] == {process: f"OSError: {full}"}
    assert f"{tmp_path}/a failed on process {process}" in other.text
    assert pc.steps(tmp_path) == []
    assert not (tmp_path / "a" / "manifest.msgpack").exists()
    pair.run(save, str(tmp_path / "a"))
    assert len(list((tmp_path / "a").iterdir())) == 2  # and nothing is left of the first


def save_with_shards_missing(path: str) -> None:
    """As `save`, but the last process takes its devices for those of another one."""
    import jax

    def plan_wrongly(*args: Any, process: int, **rest: Any) -> Any:
        return plan_save(*args, process=99 if process else 0, **rest)

    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index():
            patch.setattr(save_job, "plan_save", plan_wrongly)
        pc.save(path, state())


def test_a_shard_that_nobody_wrote_is_not_committed(pair: Cluster, tmp_path: Path) -> None:
    failed = pair.outcomes(save_with_shards_missing, str(tmp_path / "a"))
    assert [one.kind for one in failed] == ["FormatError", "PeerError"]
    assert all("shards, the manifest has" in one.text for one in failed)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_there_is_refused_alike_on_all_processes(
    pair: Cluster, saved: Path
) -> None:
    failed = pair.outcomes(save, str(saved))
    assert [one.kind for one in failed] == ["ExistsError"] * 2


def test_an_overwrite_leaves_the_new_checkpoint_alone(pair: Cluster, tmp_path: Path) -> None:
    first = pair.run(save, str(tmp_path / "a"))
    second = pair.run(save, str(tmp_path / "a"), overwrite=True)
    assert first[0] != second[0] == second[1]
    pair.run(load, str(tmp_path / "a"))
    assert len(list((tmp_path / "a").iterdir())) == 2


# --- in the background ----------------------------------------------------------------------------


def save_several_async(root: str) -> list[str]:
    """Three saves under way at once; the second one fails on the last process."""
    import jax

    last = jax.process_index() == jax.process_count() - 1
    wrong = {**state(), "step": 99} if last else state()
    trees = [state(), wrong, state()]
    pending = [pc.save_async(f"{root}/{number}", tree) for number, tree in enumerate(trees)]
    return [type(one.exception()).__name__ for one in pending if one.wait(30)]


def test_saves_in_the_background_do_not_mix(pair: Cluster, tmp_path: Path) -> None:
    assert (
        pair.run(save_several_async, str(tmp_path)) == [["NoneType", "PeerError", "NoneType"]] * 2
    )
    for number in (0, 2):
        pair.run(load, str(tmp_path / str(number)))


def keys_left() -> list[str]:
    """What is in the coordination service."""
    from jax._src.distributed import global_state

    return [key for key, _ in global_state.client.key_value_dir_get_bytes("pytree_ckpt/")]


def test_a_save_leaves_no_keys_in_the_coordination_service(pair: Cluster, tmp_path: Path) -> None:
    pair.run(save, str(tmp_path / "a"))
    pair.run(save, str(tmp_path / "b"))  # by then all have forgotten the first
    left = {key for key in pair.run(keys_left)[0] if "/opened/" not in key}
    assert len({key.split("/")[1] for key in left}) <= 1


def waits_of_a_save(path: str) -> "Counter[str]":
    """What this process asks of the coordination service; a device collective is an error."""
    from jax._src.distributed import global_state
    from jax.experimental import multihost_utils

    tree, client, asked = state(), global_state.client, Counter[str]()

    class Asked:
        def __getattr__(self, name: str) -> Any:
            asked[name] += 1
            return getattr(client, name)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a save needs the devices of all processes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_state, "client", Asked())
        for name in ("sync_global_devices", "broadcast_one_to_all", "process_allgather"):
            patch.setattr(multihost_utils, name, refuse)
        pc.save(path, tree)
    return asked


def test_a_save_has_three_synchronisations_and_none_of_the_devices(
    pair: Cluster, tmp_path: Path
) -> None:
    leader, follower = pair.run(waits_of_a_save, str(tmp_path / "a"))
    assert leader["blocking_key_value_get_bytes"] == 2  # what the other sees, and has written
    assert follower["blocking_key_value_get_bytes"] == 3  # where, that it may, and the outcome
    assert all("barrier" not in name for name in {*leader, *follower})


def test_the_default_deadlines_end_before_the_heartbeat_of_the_runtime() -> None:
    import jax

    heartbeat = inspect.signature(jax.distributed.initialize).parameters[
        "heartbeat_timeout_seconds"
    ]
    for options in (pc.SaveOptions(), pc.LoadOptions()):
        assert 2 * options.timeout_s < heartbeat.default


# --- a loop ---------------------------------------------------------------------------------------


def loop(root: str, mirror: str | None = None) -> list[int]:
    """Four steps, of which two are kept."""
    with pc.CheckpointManager(root, keep=pc.Keep(last=2), mirror=mirror) as own:
        for step in range(1, 5):
            own.save(step, {**state(), "step": step})
    return own.steps()


def restore(root: str, mirror: str | None = None, **options: Any) -> int:
    """Restore, compare, and tell which step it was."""
    with pc.CheckpointManager(root, mirror=mirror) as own:
        target = state()
        found = own.restore(target, **options)
        assert_same({**found, "step": 12}, target)
        return found["step"]


def test_a_loop_keeps_its_steps_and_restores_the_same_one_everywhere(
    pair: Cluster, tmp_path: Path
) -> None:
    assert pair.run(loop, str(tmp_path)) == [[3, 4]] * 2
    assert pair.run(restore, str(tmp_path)) == [4, 4]


def live_in_one_root(root: str) -> None:
    """Load, save beside it and over it, and load again: each time what was written last."""
    first = state()
    numbered = [{**first, "rows": first["rows"] + number, "step": number} for number in range(4)]
    with pc.CheckpointManager(root, keep=pc.Keep(last=1)) as own:
        own.save(1, numbered[0])
        assert_same(own.restore(numbered[3]), numbered[0])
        own.save(2, numbered[1])
        assert_same(own.restore(numbered[3]), numbered[1])
        assert own.steps() == [2]
        own.save(2, numbered[2], overwrite=True)
        assert_same(own.restore(numbered[3]), numbered[2])


def test_a_run_loads_from_and_saves_to_one_root(pair: Cluster, tmp_path: Path) -> None:
    pair.run(live_in_one_root, str(tmp_path))


def test_process_0_copies_for_all_and_all_restore_from_the_copy(
    pair: Cluster, tmp_path: Path
) -> None:
    root, far = str(tmp_path / "root"), str(tmp_path / "far")
    pair.run(loop, root, far)
    assert pc.steps(far)[-1] == 4
    copy = pc.read_manifest(pc.step_path(far, 4))
    assert copy == pc.read_manifest(pc.step_path(root, 4))
    assert copy.process_count == 2
    flip(next(Path(root).glob("step_00000004/data-*/arrays/large/c.3.1")))  # of process 1
    assert pair.run(restore, root, far, on_damage="previous") == [4, 4]
    shutil.rmtree(root)
    assert pair.run(restore, root, far) == [4, 4]


def test_what_a_copy_fails_with_is_raised_on_all_processes(pair: Cluster, tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.write_text("")
    failed = pair.outcomes(loop, str(tmp_path / "root"), str(far))
    assert [one.kind for one in failed] == ["NotADirectoryError", "PeerError"]
    assert all(str(far) in one.text for one in failed)
    assert pc.steps(tmp_path / "root") == [3, 4]


def test_damage_that_one_process_meets_is_damage_for_all(pair: Cluster, tmp_path: Path) -> None:
    pair.run(loop, str(tmp_path))
    flip(next(tmp_path.glob("step_00000004/data-*/arrays/large/c.3.1")))  # of process 1
    failed = pair.outcomes(restore, str(tmp_path))
    assert [one.kind for one in failed] == ["PeerError", "IntegrityError"]
    assert all("of large is damaged" in one.text for one in failed)
    assert pair.run(restore, str(tmp_path), on_damage="previous") == [3, 3]
    assert pair.run(restore, str(tmp_path)) == [3, 3]  # it is marked


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)


def restore_slowly(root: str, slow: int, timeout_s: float) -> None:
    """One process takes two seconds more than the others."""
    import jax

    call = manager.load

    def late(*args: Any, **kwargs: Any) -> Any:
        if jax.process_index() == slow:
            time.sleep(2)
        return call(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "load", late)
        with pc.CheckpointManager(root, load_options=pc.LoadOptions(timeout_s=timeout_s)) as own:
            own.restore()


def test_a_restore_that_is_late_in_one_process_fails_in_all_and_names_it(
    pair: Cluster, tmp_path: Path
) -> None:
    pair.run(save_by_the_clock, str(tmp_path))
    late = pair.outcomes(restore_slowly, str(tmp_path), slow=1, timeout_s=0.3)
    assert [one.kind for one in late] == ["PeerTimeoutError"] * 2
    assert [one.attributes["missing"] for one in late] == [(1,), (1,)]
    late = pair.outcomes(restore_slowly, str(tmp_path), slow=0, timeout_s=0.3)
    assert [one.kind for one in late] == ["PeerError", "PeerTimeoutError"]
    assert all("no answer from process 0 in 0.6 s" in one.text for one in late)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_process_that_reads_slowly_is_waited_for(
    pair: Cluster, tmp_path: Path, slow: int
) -> None:
    pair.run(save_by_the_clock, str(tmp_path))
    pair.run(restore_slowly, str(tmp_path), slow=slow, timeout_s=30)


def save_by_the_clock(root: str) -> list[int]:
    """Time passes for the last process only, and then for the first."""
    import jax

    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        with pc.CheckpointManager(root, save_every_seconds=60) as own:
            clock[0] += 100 * jax.process_index()
            own.save(1, {"step": 1})
            clock[0] += 100
            own.save(2, {"step": 2})
            own.save(3, {"step": 3})
    return own.steps()


def test_the_clock_of_process_0_counts(pair: Cluster, tmp_path: Path) -> None:
    assert pair.run(save_by_the_clock, str(tmp_path)) == [[2], [2]]


def roll_back(root: str) -> list[list[int]]:
    with pc.CheckpointManager(root) as own:
        deleted = own.rollback(3)
        own.save(4, {"step": 4})
        own.wait()
        with pytest.raises(pc.ExistsError):
            own.save(2, {"step": 2})
        return [deleted, own.steps()]


def test_process_0_alone_deletes(pair: Cluster, tmp_path: Path) -> None:
    pair.run(loop, str(tmp_path))
    assert pair.run(roll_back, str(tmp_path)) == [[[4], [3, 4]]] * 2


# --- leaves that move, and runs that resume -------------------------------------------------------


def stack_and_unstack(path: str) -> None:
    """Layers side by side load as their stack over all processes, and come apart again."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))

    def put(value: Any, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    parts = [numbers(n, LARGE if n < 4 else SHAPE) for n in range(8)]
    layers = {
        f"layer_{n}": {"large": put(parts[n], "data", "model"), "small": put(parts[n + 4], "data")}
        for n in range(4)
    }
    large, small = np.stack(parts[:4]), np.stack(parts[4:])
    stacked = {"large": put(large, None, "data", "model"), "small": put(small, None, "data")}
    pc.save(f"{path}/apart", layers)
    assert_same(pc.load(f"{path}/apart", stacked, stack={"layer_{}/*": "*"}), stacked)
    across = {"large": put(large, "data"), "small": put(small, "model")}
    loaded = pc.load(f"{path}/apart", across, stack={"layer_{}/*": "*"}, reshard=True)
    assert_same(loaded, across)
    pc.save(f"{path}/together", across)
    back = pc.load(f"{path}/together", layers, unstack={"*": "layer_{}/*"}, reshard=True)
    assert_same(back, layers)


def resume(path: str) -> None:
    """A run over all processes resumes to the bit; one with a counter of its own is found."""
    import jax
    import jax.numpy as jnp

    from pytree_ckpt.testing import assert_resumes

    start = {name: leaf for name, leaf in state().items() if name in ("both", "rows", "iterator")}
    counted = iter(range(100))

    @jax.jit
    def update(arrays: Any, batch: Any) -> Any:
        return jax.tree.map(lambda x: x / jnp.sum(x) + batch, arrays)

    def step_fn(before: Any, batch: float) -> Any:
        position = before["iterator"].value["position"] + 1
        arrays = {name: before[name] for name in ("both", "rows")}
        return {**update(arrays, batch), "iterator": pc.PerProcess({"position": position})}

    assert_resumes(step_fn, start, [0.5, 1.5, 2.5], f"{path}/good")
    with pytest.raises(AssertionError, match="drifts in step 2 of 3, saved after step 1: 2 of 3"):
        assert_resumes(
            lambda before, batch: step_fn(before, float(next(counted))),
            start,
            [0.5, 1.5, 2.5],
            f"{path}/bad",
        )


def test_layers_that_two_processes_saved_load_as_a_stack_and_back(
    pair: Cluster, tmp_path: Path
) -> None:
    pair.run(stack_and_unstack, str(tmp_path))


def test_a_run_of_two_processes_resumes(pair: Cluster, tmp_path: Path) -> None:
    pair.run(resume, str(tmp_path))


# --- what it costs --------------------------------------------------------------------------------

MIB = 1 << 20
BOUND = 16 * MIB
SLACK = 32 * MIB
"""What libraries, threads and allocators take for themselves."""


def costs(path: str, cut: int, copied: int) -> dict[str, float]:
    """Bytes that this process writes and reads of some MiB cut by rows and some on each device."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("all",))
    rows, everywhere = NamedSharding(mesh, P("all")), NamedSharding(mesh, P())

    def put(mib: int, sharding: NamedSharding) -> jax.Array:
        value = numbers(mib, (mib * MIB // 4096, 1024))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    tree = jax.block_until_ready({"cut": put(cut, rows), "copied": put(copied, everywhere)})
    with Spent() as saving:
        pc.save(path, tree, options=pc.SaveOptions(max_inflight_bytes=BOUND, threads=2))
    with Spent() as loading:
        found = pc.load(path, tree, options=pc.LoadOptions(max_inflight_bytes=BOUND, threads=2))
    assert_same(found, tree)
    return {
        "written": saving.nbytes,
        "read": loading.nbytes,
        "saving": saving.peak,
        "loading": loading.peak,
    }


class Spent:
    """Bytes that the log tells of, and memory at its peak above what there was, within a block."""

    def __enter__(self) -> "Spent":
        self.nbytes, self.peak = 0, 0
        self._handler = logging.Handler()
        self._handler.emit = self._note  # type: ignore[method-assign]
        self._logger = logging.getLogger("pytree_ckpt")
        self._level = self._logger.level
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self._handler)
        if os.access("/proc/self/clear_refs", os.W_OK):
            Path("/proc/self/clear_refs").write_text("5")
        self._before = status("VmRSS")
        return self

    def _note(self, record: logging.LogRecord) -> None:
        if record.msg.startswith(("saved", "loaded")):
            self.nbytes = record.args[2]  # type: ignore[index, assignment]

    def __exit__(self, *_: object) -> None:
        self.peak = status("VmHWM") - self._before
        self._logger.removeHandler(self._handler)
        self._logger.setLevel(self._level)


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field}")


def test_work_and_memory_are_shared_out(pair: Cluster, tmp_path: Path) -> None:
    pair.run(costs, str(tmp_path / "warm"), 4, 2)
    found = pair.run(costs, str(tmp_path / "a"), 64, 32)
    print(found)
    for process in found:
        assert process["written"] <= 1.2 * 96 * MIB / 2
        assert process["read"] == (64 / 2 + 32) * MIB  # only what its devices hold
        if os.access("/proc/self/clear_refs", os.W_OK):
            assert process["saving"] <= BOUND + SLACK
            assert process["loading"] <= (64 / 2 + 32) * MIB + BOUND + SLACK


@pytest.mark.parametrize("processes", [2, 4, 16])
def test_no_process_writes_more_than_its_share_of_a_replicated_state(processes: int) -> None:
    mesh = ckpt_shardings.Mesh(
        axis_names=("data",),
        axis_sizes=(4 * processes,),
        axis_types=("Auto",),
        device_ids=tuple(range(4 * processes)),
    )
    replicated = ckpt_shardings.Named(mesh=mesh, spec=(), memory_kind=None)
    shapes = [(50257, 768), (1024, 768), *[(768, 3072), (3072, 768), (768, 2304), (768,)] * 12]
    forms = [
        ArrayForm(kind="jax", dtype="float32", shape=shape, sharding=replicated) for shape in shapes
    ]
    plans = [
        plan_save(
            [(Key("list", at),) for at in range(len(forms))],
            forms,
            range(len(forms)),
            process=process,
            process_of={device: device // 4 for device in range(4 * processes)},
            codec="raw",
        )
        for process in range(processes)
    ]
    written = [plan.nbytes for plan in plans]
    total = sum(4 * int(np.prod(shape)) for shape in shapes)
    assert sum(written) == total
    assert max(written) <= 1.2 * total / processes
    pieces = {p.spec(leaf).shard_shape for p in plans for leaf in p.array_leaf.tolist()}
    assert all(4 * np.prod(piece) >= MIB / 1.5 for piece in pieces)


OTHER_CALLS = {
    "another step is restored": ("restore", "the choice of a step (1, on_damage='raise')"),
    "one alone asks whether it is time": ("should_save", "whether it is time to save step 3"),
    "one alone saves": ("save", "whether to replace step 3"),
}


def make_another_call(root: str, call: str) -> None:
    """Process 0 makes a call of its own; then both save."""
    import jax

    first = jax.process_index() == 0
    pc.save(f"{root}/step_00000001", {"step": 1})
    pc.save(f"{root}/step_00000002", {"step": 2})
    options = {
        "save_options": pc.SaveOptions(timeout_s=1),
        "load_options": pc.LoadOptions(timeout_s=1),
    }
    own = pc.CheckpointManager(root, save_every_seconds=1000, background=False, **options)  # type: ignore[arg-type]
    if call == "restore":
        own.restore(step=1 if first else 2)
    if call == "should_save" and first:
        own.should_save(3)
    if call == "save" and first:
        own.save(3, {"step": 3}, force=True)
    own.save(4, {"step": 4}, force=True)


@pytest.mark.parametrize("case", OTHER_CALLS)
def test_what_is_said_of_one_call_is_not_taken_for_another(tmp_path: Path, case: str) -> None:
    """A step that nobody asked for here would be restored; a yes to one question answer another."""
    call, matter = OTHER_CALLS[case]
    with Cluster(2, 1) as cluster:
        first, second = cluster.outcomes(make_another_call, str(tmp_path), call)
    assert first.kind in ("PeerError", "PeerTimeoutError"), first.trace
    assert second.kind == "PeerError", second.trace
    assert "all must make the same calls in one order, but process 0 is at the" in second.text
    assert matter in second.text
    assert pc.steps(tmp_path) == [1, 2]


def save_with_metrics(root: str) -> str:
    """The metric of one process is none."""
    import jax

    own = pc.CheckpointManager(root, background=False)
    bad: Any = {"loss": None if jax.process_index() else 0.5}
    with pytest.raises((pc.PeerError, TypeError)) as found:
        own.save(1, {"step": 1}, metrics=bad)
    own.save(2, {"step": 2}, metrics={"loss": 0.5})
    return str(found.value)


def test_a_metric_that_is_none_in_one_process_costs_all_that_save_only(
    pair: Cluster, tmp_path: Path
) -> None:
    told, own = pair.run(save_with_metrics, str(tmp_path))
    assert "process 1: TypeError: metrics['loss'] is no number" in told
    assert "metrics['loss'] is no number" in own
    assert pc.steps(tmp_path) == [2]
