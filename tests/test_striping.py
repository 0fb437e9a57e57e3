"""Striped loads: each chunk is read by one process of the cluster, and reaches all that want it."""

import errno
import itertools
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pytree_ckpt as pc
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Box, Shape, whole
from pytree_ckpt.plan import striping
from pytree_ckpt.plan.loading import plan_reads
from pytree_ckpt.plan.striping import Job, Round, Wants
from pytree_ckpt.store.reading import CheckpointReader
from tests.bitwise import assert_same
from tests.cluster import Cluster
from tests.test_multiprocess import ARRAYS, BOUND, LARGE, SLACK, Spent, flip, numbers, save, state

MIB = 1 << 20
STRIPED = pc.LoadOptions(striped=True, timeout_s=20)

# --- the plan -------------------------------------------------------------------------------------


@st.composite
def arrays(draw: st.DrawFn) -> ArraySpec:
    """An array of any shape in any shards and chunks."""
    shape, shard, chunk = [], [], []
    for _ in range(draw(st.integers(0, 3))):
        chunk.append(draw(st.integers(1, 7)))
        shard.append(chunk[-1] * draw(st.integers(1, 2)))
        shape.append(draw(st.integers(shard[-1], 2 * shard[-1])))
    return ArraySpec(
        kind="numpy",
        dtype=draw(st.sampled_from(["uint8", "int32", "complex128"])),
        shape=tuple(shape),
        sharding=None,
        storage="array",
        shard_shape=tuple(shard),
        chunk_shape=tuple(chunk),
    )


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    start = [draw(st.integers(0, extent - 1)) for extent in shape]
    stop = [draw(st.integers(a + 1, extent)) for a, extent in zip(start, shape, strict=True)]
    return Box(tuple(start), tuple(stop))


@st.composite
def wants_of_all(draw: st.DrawFn) -> tuple[int, list[Wants]]:
    """A few arrays, of which each of some processes wants any boxes."""
    processes = draw(st.integers(1, 4))
    who = st.sets(st.integers(0, processes - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    wants = []
    for spec in draw(st.lists(arrays(), min_size=1, max_size=4)):
        boxes = draw(st.lists(boxes_in(spec.shape), min_size=1, max_size=4, unique=True))
        wanters = tuple(draw(who) for _ in boxes)
        wants.append(Wants(plan=plan_reads(spec, boxes), wanters=wanters))
    return processes, wants


def jobs_of(wants: list[Wants]) -> list[Job]:
    return [
        Job(reads=((number, read),), is_packed=number % 2 > 0)
        for number, want in sorted(enumerate(wants), key=lambda entry: -(entry[0] % 2))
        for unit in want.plan.units
        for read in unit.reads
    ]


@given(wants_of_all(), st.integers(1, 2000))
def test_every_chunk_that_is_wanted_is_read_by_one_process_that_wants_it(
    case: tuple[int, list[Wants]], bound: int
) -> None:
    processes, wants = case
    rounds = striping.plan_rounds(
        jobs_of(wants), wants, processes=processes, max_inflight_bytes=bound
    )
    readers = Counter(
        (request, read.shard, read.chunk)
        for one in rounds
        for jobs in one
        for job in jobs
        for request, read in job.reads
    )
    needed = {
        (number, read.shard, read.chunk)
        for number, want in enumerate(wants)
        for box in want.plan.boxes
        for unit in plan_reads(want.plan.spec, [box]).units
        for read in unit.reads
    }
    assert set(readers) == needed
    assert set(readers.values()) <= {1}
    for one in rounds:
        assert any(one)
        for process, jobs in enumerate(one):
            assert sum(j.nbytes for j in jobs) <= striping.step_nbytes(bound) or len(jobs) == 1
            for job in jobs:
                wanted_by = {
                    p
                    for request, read in job.reads
                    for use in striping.uses(read)
                    for p in wants[request].wanters[use.box]
                }
                assert process in wanted_by


@given(wants_of_all(), st.integers(1, 2000), st.sampled_from([16, 32, 64, 1024]))
def test_what_processes_keep_and_send_fills_every_box(
    case: tuple[int, list[Wants]], bound: int, slot: int
) -> None:
    processes, wants = case
    originals = [
        np.arange(1, 1 + math.prod(w.plan.spec.shape)).reshape(w.plan.spec.shape) for w in wants
    ]
    held = {
        (process, request, box): np.zeros(want.plan.boxes[box].shape, int)
        for request, want in enumerate(wants)
        for box, who in enumerate(want.wanters)
        for process in who
    }

    def put(process: int, request: int, box: int, place: Any, part: Any) -> None:
        target = held[process, request, box]
        assert not target[place].any()
        target[place] = part

    rounds = striping.plan_rounds(
        jobs_of(wants), wants, processes=processes, max_inflight_bytes=bound
    )
    for source, jobs in (entry for one in rounds for entry in enumerate(one)):
        reads = [entry for job in jobs for entry in job.reads]
        chunks = [originals[request][read.box.slices()] for request, read in reads]
        for (request, read), chunk in zip(reads, chunks, strict=True):
            for use in striping.uses(read):
                if source in wants[request].wanters[use.box]:
                    put(source, request, use.box, use.place, chunk[use.source])
        for to in set(range(processes)) - {source}:
            end = (0, 0)
            for piece in striping.pieces(jobs, wants, to=to, slot_nbytes=slot):
                assert end <= (piece.hop, piece.offset) <= (end[0] + 1, slot)
                assert piece.offset + piece.nbytes <= slot
                assert piece.offset % striping.ALIGNMENT == 0
                end = (piece.hop, piece.offset + piece.nbytes)
                part = chunks[piece.read][piece.source]
                assert part.shape == piece.shape
                put(to, piece.request, piece.box, piece.place, part)
    for (_, request, box), found in held.items():
        wanted = originals[request][wants[request].plan.boxes[box].slices()]
        np.testing.assert_array_equal(found, wanted)


def replicated(shapes: list[Shape], processes: int) -> list[Wants]:
    everyone = (tuple(range(processes)),)
    return [
        Wants(
            plan=plan_reads(
                ArraySpec(
                    kind="numpy",
                    dtype="float32",
                    shape=shape,
                    sharding=None,
                    storage="array",
                    shard_shape=shape,
                    chunk_shape=(min(shape[0], MIB), *shape[1:]),
                ),
                [whole(shape)],
            ),
            wanters=everyone,
        )
        for shape in shapes
    ]


@pytest.mark.parametrize("processes", [2, 4, 16])
def test_reads_are_shared_out_within_the_bound(processes: int) -> None:
    """64 arrays of 4 MiB and one of 1 GiB, all of which all processes want."""
    bound = 256 * MIB
    wants = replicated([(MIB,)] * 32 + [(256 * MIB,)] + [(MIB,)] * 32, processes)
    rounds = striping.plan_rounds(
        jobs_of_arrays(wants), wants, processes=processes, max_inflight_bytes=bound
    )
    total = [sum(job.nbytes for one in rounds for job in one[p]) for p in range(processes)]
    assert sum(total) == (64 * 4 + 1024) * MIB
    assert max(total) <= 1.2 * sum(total) / processes
    slot = striping.slot_nbytes(rounds, processes=processes, max_inflight_bytes=bound)
    for one in rounds:
        held = max(sum(job.nbytes for job in jobs) for jobs in one)
        assert 2 * held + 2 * processes * slot <= bound / 2
    for open_at_once in open_boxes(rounds, wants):
        assert sum(wants[n].most_nbytes for n in open_at_once) <= bound / 2 or open_at_once == {32}


def jobs_of_arrays(wants: list[Wants]) -> list[Job]:
    return [
        Job(reads=((number, read),), is_packed=False)
        for number, want in enumerate(wants)
        for unit in want.plan.units
        for read in unit.reads
    ]


def open_boxes(rounds: list[Round], wants: list[Wants]) -> Iterator[set[int]]:
    """After each round the arrays that are begun and not full."""
    left = Counter({n: want.plan.nbytes_read for n, want in enumerate(wants)})
    begun: set[int] = set()
    for one in rounds:
        for number, read in (entry for jobs in one for job in jobs for entry in job.reads):
            begun.add(number)
            left[number] -= read.nbytes
        yield begun
        begun = {number for number in begun if left[number]}
        yield begun
    assert not begun


def test_what_all_have_is_not_sent() -> None:
    """The same layout: each process reads its own, and no piece goes to another one."""
    spec = replicated([(4 * MIB,)], 1)[0].plan.spec
    boxes = [Box((n * MIB,), ((n + 1) * MIB,)) for n in range(4)]
    wants = [Wants(plan=plan_reads(spec, boxes), wanters=((0,), (1,), (2,), (3,)))]
    (one,) = striping.plan_rounds(
        jobs_of_arrays(wants), wants, processes=4, max_inflight_bytes=64 * MIB
    )
    for source, to in itertools.permutations(range(4), 2):
        assert not list(striping.pieces(one[source], wants, to=to, slot_nbytes=MIB))
    assert [len(jobs) for jobs in one] == [1] * 4


# --- clusters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with Cluster(2, 4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with Cluster(4, 2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def by_two(pair: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "by_two"
    pair.run(save, str(path))
    return path


@pytest.fixture(scope="module")
def by_four(four: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "by_four"
    four.run(save, str(path))
    return path


class Counting:
    """What `jax.monitoring` tells of the bytes that loads of this process read."""

    told: ClassVar[list[float]] = []

    def __enter__(self) -> "Counting":
        import jax.monitoring

        if not self.told:  # a listener stays
            self.told.append(0)
            jax.monitoring.register_scalar_listener(_note)
        self.before = sum(self.told)
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = int(sum(self.told) - self.before)


def _note(event: str, value: float, **_: Any) -> None:
    if event == "/pytree_ckpt/load/read_nbytes":
        Counting.told.append(value)


def load(path: str, reshard: bool = False, options: pc.LoadOptions = STRIPED) -> int:
    """Load onto the layout that `state` has here, compare every bit; bytes read here."""
    target = state()
    if reshard:
        del target["iterator"]
    with Counting() as read:
        found = pc.load(path, target, reshard=reshard, partial=reshard, options=options)
    assert_same(found, target)
    return read.nbytes


STATE_NBYTES = sum(a.nbytes for a in ARRAYS.values()) + 8  # and a key


def test_the_same_layout_loads_striped(
    pair: Cluster, four: Cluster, by_two: Path, by_four: Path
) -> None:
    for cluster, path in ((pair, by_two), (four, by_four)):
        assert sum(cluster.run(load, str(path))) == STATE_NBYTES


def test_another_number_of_processes_loads_striped(
    pair: Cluster, four: Cluster, by_two: Path, by_four: Path, tmp_path: Path
) -> None:
    assert sum(four.run(load, str(by_two), reshard=True)) == STATE_NBYTES
    assert sum(pair.run(load, str(by_four), reshard=True)) == STATE_NBYTES
    assert load(str(by_four), reshard=True) == STATE_NBYTES  # one process
    save(str(tmp_path / "by_one"))
    assert sum(four.run(load, str(tmp_path / "by_one"), reshard=True)) == STATE_NBYTES


def sharded(value: Any, *spec: Any) -> Any:
    """An array over all devices in a line."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("all",))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def rows_of(count: int) -> dict[str, Any]:
    return {f"w{n}": numbers(n, LARGE) for n in range(count)}


def save_rows(path: str, count: int = 2) -> None:
    pc.save(path, {name: sharded(value, "all") for name, value in rows_of(count).items()})


def load_as(path: str, *spec: Any, count: int = 2, **options: Any) -> int:
    """Load what was cut by rows with another spec, compare; bytes that this process read."""
    target = {name: sharded(value, *spec) for name, value in rows_of(count).items()}
    with Counting() as read:
        found = pc.load(path, target, reshard=True, options=pc.LoadOptions(**options))
    assert_same(found, target)
    return read.nbytes


def costs(path: str, count: int) -> tuple[int, int]:
    """Bytes read, and memory at its peak above what there was, of a load onto all devices."""
    import jax

    target = jax.ShapeDtypeStruct(LARGE, np.float32, sharding=sharded(np.zeros(1)).sharding)
    options = pc.LoadOptions(striped=True, max_inflight_bytes=BOUND, threads=2)
    with Spent() as spent:
        _ = pc.load(
            path,
            {f"w{n}": target for n in range(count)},
            reshard=True,
            partial=True,
            options=options,
        )
    return spent.nbytes, spent.peak


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="this system does not tell the peak of a process's memory",
)
def test_memory_is_bounded_and_the_log_tells_the_bytes(pair: Cluster, tmp_path: Path) -> None:
    save_rows(str(tmp_path / "a"), 16)
    pair.run(costs, str(tmp_path / "a"), 1)
    found = pair.run(costs, str(tmp_path / "a"), 16)
    print(found)
    for nbytes, peak in found:
        assert nbytes == 64 * MIB
        assert peak <= 128 * MIB + BOUND + SLACK


@pytest.mark.parametrize("cluster", ["pair", "four"])
def test_storage_is_read_once_when_striped_and_by_each_process_when_not(
    cluster: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    members: Cluster = request.getfixturevalue(cluster)
    count, path, once = len(members.members), str(tmp_path / "a"), 2 * 8 * MIB
    members.run(save_rows, path)
    assert sum(members.run(load_as, path)) == count * once
    for spec in ((), (None, "all")):  # replicated, transposed
        for bound in (256 * MIB, 8 * MIB):
            read = members.run(load_as, path, *spec, striped=True, max_inflight_bytes=bound)
            assert sum(read) == once
            assert max(read) <= 1.2 * once / count
    assert members.run(load_as, path, "all", striped=True) == [once // count] * count


def bits(dtype: Any, shape: Shape) -> Any:
    """Every pattern of bits that a dtype has, or many: NaNs with payloads, zeros with a sign."""
    import ml_dtypes

    dtype = np.dtype(dtype)
    raw = np.random.default_rng(5).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype == np.bool_:
        raw &= 1
    elif dtype.kind == "V" and "float" not in dtype.name and dtype.name != "bfloat16":
        return np.asarray(raw[..., 0] % 2).astype(dtype)
    elif dtype.name in ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"):
        raw &= (1 << ml_dtypes.finfo(dtype).bits) - 1
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


def every_dtype(spec: tuple[Any, ...]) -> dict[str, Any]:
    """Arrays of every dtype of JAX, uneven ones, keys, arrays of the host and Python values."""
    import jax
    import jax.numpy as jnp

    from pytree_ckpt.format import dtypes

    tree: dict[str, Any] = {}
    for name in dtypes.names():
        value = bits(dtypes.dtype_of(name), (8, 3, 16))
        tree[f"host {name}"] = value
        try:
            if jax.dtypes.canonicalize_dtype(value.dtype) == value.dtype:
                tree[name] = sharded(value, *spec)
        except (TypeError, ValueError, jax.errors.JaxRuntimeError):
            continue  # JAX has no arrays of it
    tree |= {
        "prime": sharded(numbers(8, (1009, 7))),
        "large and prime": sharded(numbers(9, (3, 300_007))),
        "no dimensions": sharded(np.float32(-0.0).reshape(())),
        "no elements": sharded(np.zeros((8, 0, 16), np.float32), *spec),
        "keys": jax.random.split(jax.random.key(3), 5),
        "weak": jnp.asarray(2.5),
        "scalar": np.float16(1.5),
        "word": "text",
        "own": pc.PerProcess(jax.process_index()),
    }
    return tree


def save_every_dtype(path: str) -> None:
    pc.save(path, every_dtype(("all",)))


def load_every_dtype(path: str) -> int:
    target = every_dtype((None, None, "all"))
    with Counting() as read:
        found = pc.load(path, target, reshard=True, options=STRIPED)
    assert_same(found, target)
    return read.nbytes


def test_every_dtype_is_striped_to_the_bit(pair: Cluster, tmp_path: Path) -> None:
    pair.run(save_every_dtype, str(tmp_path / "a"))
    assert (
        sum(pair.run(load_every_dtype, str(tmp_path / "a")))
        == pc.read_manifest(tmp_path / "a").nbytes
    )


def stack_and_unstack(path: str) -> None:
    """Layers side by side load as their stack cut otherwise, and a stack as layers."""
    layers = {f"layer_{n}": {"w": sharded(numbers(n, (64, 32)), "all")} for n in range(4)}
    large = {f"large_{n}": sharded(numbers(n, (1024, 512)), "all") for n in range(3)}
    pc.save(f"{path}/apart", layers | large)
    stacked = {
        "layers": {"w": sharded(np.stack([numbers(n, (64, 32)) for n in range(4)]), None, None)},
        "large": sharded(np.stack([numbers(n, (1024, 512)) for n in range(3)]), None, None, "all"),
    }
    rules = {"layer_{}": "layers", "large_{}": "large"}
    found = pc.load(f"{path}/apart", stacked, stack=rules, reshard=True, options=STRIPED)
    assert_same(found, stacked)
    pc.save(f"{path}/together", stacked)
    back = {new: old for old, new in rules.items()}
    target = layers | large
    assert_same(
        pc.load(f"{path}/together", target, unstack=back, reshard=True, options=STRIPED), target
    )


def test_layers_are_stacked_and_unstacked_striped(pair: Cluster, tmp_path: Path) -> None:
    pair.run(stack_and_unstack, str(tmp_path))


def load_in_odd_circumstances(path: str, count: int) -> None:
    """With a mesh of the caller in use, and with jit switched off."""
    import jax

    values = rows_of(count)
    target = {name: sharded(value) for name, value in values.items()}
    mesh = jax.make_mesh((jax.device_count(),), ("other",))
    with jax.set_mesh(mesh):
        assert_same(pc.load(path, target, reshard=True, options=STRIPED), target)
    with jax.disable_jit():
        found = pc.load(path, target, reshard=True, options=STRIPED)
    assert_same(found, target)
    # Without a target everything goes to each process's default device.
    found = pc.load(path, reshard=True, options=STRIPED)
    for name, value in values.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value)
        assert found[name].devices() == {jax.local_devices()[0]}


def test_a_striped_load_minds_no_mesh_of_the_caller(pair: Cluster, tmp_path: Path) -> None:
    pair.run(save_rows, str(tmp_path / "a"), 2)
    pair.run(load_in_odd_circumstances, str(tmp_path / "a"), 2)


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [0, 1])
def test_damage_that_one_process_reads_is_damage_on_all(
    pair: Cluster, by_two: Path, tmp_path: Path, owner: int
) -> None:
    path = shutil.copytree(by_two, tmp_path / "a")
    flip(next(path.glob(f"data-*/arrays/large/c.{3 * owner}.1")))
    flip(next(path.glob(f"data-*/packed/0000{owner}/c.0")))
    failed = pair.outcomes(load, str(path))
    assert [one.kind for one in failed] == ["IntegrityError"] * 2
    assert failed[0].text == failed[1].text
    assert f"chunk ({3 * owner}, 1) of large is damaged" in failed[0].text
    assert len(failed[0].text.splitlines()) == 2  # and what is packed
    assert sum(pair.run(load, str(by_two))) == STATE_NBYTES  # the next load is not disturbed


def test_a_chunk_that_is_missing_is_named_on_all(
    four: Cluster, by_four: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(by_four, tmp_path / "a")
    next(path.glob("data-*/arrays/large/c.3.1")).unlink()
    failed = four.outcomes(load, str(path))
    assert [one.kind for one in failed] == ["IntegrityError"] * 4
    assert {one.text for one in failed} == {failed[0].text}
    assert "chunk (3, 1) of large is missing" in failed[0].text


def load_failing(path: str, process: int) -> None:
    """As `load`, but the storage fails for one process in its second round."""
    import jax

    read, calls = CheckpointReader.read, itertools.count()

    def failing(self: CheckpointReader, requests: Any) -> Any:
        if next(calls) == 1:
            raise OSError(errno.EIO, "the disk is gone")
        return read(self, requests)

    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == process:
            patch.setattr(CheckpointReader, "read", failing)
        load_as(path, striped=True, max_inflight_bytes=MIB)


@pytest.mark.parametrize("process", [0, 1])
def test_a_failure_of_one_process_is_told_to_the_others(
    pair: Cluster, tmp_path: Path, process: int
) -> None:
    path = str(tmp_path / "a")
    pair.run(save_rows, path)
    failed = pair.outcomes(load_failing, path, process)
    assert failed[process].kind == "OSError"
    other = failed[1 - process]
    assert other.kind == "PeerError"
    assert list(other.attributes["failures"]) == [process]
    assert "the disk is gone" in other.text
    pair.run(load_as, path, striped=True)


def load_elsewhere(path: str, process: int) -> None:
    """As `load`, but one process has another path."""
    import jax

    load(path + ("elsewhere" if jax.process_index() == process else ""))


@pytest.mark.parametrize("process", [0, 1])
def test_a_checkpoint_that_one_process_does_not_see_fails_on_all(
    pair: Cluster, by_two: Path, process: int
) -> None:
    failed = pair.outcomes(load_elsewhere, str(by_two), process)
    assert failed[process].kind == "NotFoundError"
    assert failed[1 - process].kind == "PeerError"
    assert "NotFoundError" in failed[1 - process].text


def load_what_does_not_fit(path: str) -> None:
    pc.load(path, {**state(), "more": 1}, options=STRIPED)


def test_a_target_that_does_not_fit_is_a_mismatch_on_all(pair: Cluster, by_two: Path) -> None:
    failed = pair.outcomes(load_what_does_not_fit, str(by_two))
    assert [one.kind for one in failed] == ["MismatchError"] * 2


def load_another_target(path: str) -> None:
    """Each process asks for another part of one leaf, and for the same of the others."""
    import jax

    target = state()
    if jax.process_index():
        target["rows"] = sharded(ARRAYS["rows"], None, "all")
    pc.load(path, target, reshard=True, options=STRIPED)


def test_processes_that_ask_for_different_things_are_refused_by_name(
    pair: Cluster, by_two: Path
) -> None:
    failed = pair.outcomes(load_another_target, str(by_two))
    assert [one.kind for one in failed] == ["MismatchError"] * 2
    assert all("rows  sharding: not the same for all processes" in one.text for one in failed)
    assert all("large" not in one.text for one in failed)


def load_on_some_devices(path: str, first: int, last: int) -> int:
    """A target on a part of the devices, of which some processes have none."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[first:last]), ("all",))
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    target = {"w0": jax.ShapeDtypeStruct(LARGE, np.float32, sharding=sharding)}
    for options in (pc.LoadOptions(), STRIPED):
        with Counting() as read:
            (found,) = pc.load(path, target, reshard=True, partial=True, options=options).values()
        assert (found.shape, found.dtype, found.sharding) == (LARGE, np.float32, sharding)
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), numbers(0, LARGE)[shard.index])
    return read.nbytes


def test_a_target_on_the_devices_of_some_processes_is_read_by_these(
    four: Cluster, tmp_path: Path
) -> None:
    four.run(save_rows, str(tmp_path / "a"))
    assert four.run(load_on_some_devices, str(tmp_path / "a"), 2, 6) == [0, 4 * MIB, 4 * MIB, 0]


def test_a_target_on_the_devices_of_one_process_is_refused_by_name(
    four: Cluster, tmp_path: Path
) -> None:
    four.run(save_rows, str(tmp_path / "a"))
    failed = four.outcomes(load_on_some_devices, str(tmp_path / "a"), 0, 2)
    assert [one.kind for one in failed] == ["MismatchError"] * 4
    assert all("w0  sharding: not the same" in one.text for one in failed)


def load_otherwise(path: str) -> None:
    import jax

    bound = (1 + jax.process_index()) * MIB
    load(path, options=pc.LoadOptions(striped=True, max_inflight_bytes=bound))


def test_processes_with_different_bounds_are_refused(pair: Cluster, by_two: Path) -> None:
    failed = pair.outcomes(load_otherwise, str(by_two))
    assert [one.kind for one in failed] == ["CheckpointError"] * 2
    assert all(
        f"one max_inflight_bytes for all processes, not [{MIB}, {2 * MIB}]" in one.text
        for one in failed
    )


def load_late(path: str, slow: int) -> None:
    """One process reads for longer than the others wait."""
    import time

    import jax

    read = CheckpointReader.read

    def late(self: CheckpointReader, requests: Any) -> Any:
        time.sleep(2)
        return read(self, requests)

    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == slow:
            patch.setattr(CheckpointReader, "read", late)
        load(path, options=pc.LoadOptions(striped=True, timeout_s=0.3))


def test_a_process_that_is_late_is_named(pair: Cluster, by_two: Path) -> None:
    failed = pair.outcomes(load_late, str(by_two), 1)
    assert [one.kind for one in failed] == ["PeerTimeoutError"] * 2
    assert [one.attributes["missing"] for one in failed] == [(1,), (1,)]


def restore(root: str) -> int:
    with pc.CheckpointManager(root, load_options=STRIPED) as own:
        return own.restore({"step": 0, **state()}, on_damage="previous")["step"]


def save_steps(root: str) -> None:
    with pc.CheckpointManager(root) as own:
        for step in (1, 2):
            own.save(step, {**state(), "step": step})


def test_a_manager_restores_the_last_good_step_striped(pair: Cluster, tmp_path: Path) -> None:
    pair.run(save_steps, str(tmp_path))
    assert pair.run(restore, str(tmp_path)) == [2, 2]
    flip(next(tmp_path.glob("step_00000002/data-*/arrays/large/c.3.1")))
    assert pair.run(restore, str(tmp_path)) == [1, 1]
