"""Saves and loads by several processes, each with some of the devices, to an object store."""

import errno
import itertools
import signal
import time
from collections.abc import Iterator

import pytest

import pytree_ckpt as pc
from pytree_ckpt.store import object_commit
from pytree_ckpt.store.locations import locate
from pytree_ckpt.store.prefixes import Prefix
from tests.cluster import Cluster, Dead
from tests.faults import cluster as faults
from tests.stores import Wire, make_bucket, moto, pointed_to
from tests.test_multiprocess import (
    DIFFERENCES,
    OF_ALL,
    live_in_one_root,
    load,
    load_resharded,
    loop,
    restore,
    save,
    save_failing,
    save_otherwise,
)

SECONDS = 40
"""More than an error may take, on a busy machine; the retries themselves are over in three."""
_NAMES = map(str, itertools.count())


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    """The way to a server, named by the environment of this process and of those it starts."""
    with moto() as port:
        make_bucket(port, "bucket")
        found = Wire(port)
        with pointed_to(found.port):
            yield found
        found.cut()


@pytest.fixture(scope="module")
def pair(wire: Wire) -> Iterator[Cluster]:
    with Cluster(2, 4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four(wire: Wire) -> Iterator[Cluster]:
    with Cluster(4, 2) as cluster:
        yield cluster


@pytest.fixture
def path(wire: Wire) -> str:
    """A place where nothing is."""
    return f"s3://bucket/größe/{next(_NAMES)}"


def names_below(url: str) -> list[str]:
    place = locate(url)
    assert isinstance(place, Prefix)
    return place.objects.names(f"{place.key}/")


def below(url: str) -> set[str]:
    """What a checkpoint has in it, and no more: the manifest, and one folder of data."""
    return {name.split("/")[0] for name in names_below(url)}


# --- what works on a disk works in a store --------------------------------------------------------


def test_processes_load_from_a_store_what_as_many_others_or_one_saved(
    pair: Cluster, four: Cluster, path: str
) -> None:
    for cluster, other in ((pair, four), (four, pair)):
        url = f"{path}/{len(cluster.members)}"
        assert set(cluster.run(save, url)) == {pc.read_manifest(url).id.hex()}
        cluster.run(load, url)
        cluster.run(load_resharded, url)
        refused = other.outcomes(load, url)
        assert {one.kind for one in refused} == {"MismatchError"}
        other.run(load, url, reshard=True)
        load(url, reshard=True)
        assert pc.verify(url).ok
        assert len(below(url)) == 2
    save(f"{path}/1")
    for cluster in (pair, four):
        cluster.run(load, f"{path}/1", reshard=True)


def test_a_checkpoint_in_a_store_is_replaced_only_on_request(pair: Cluster, path: str) -> None:
    first = pair.run(save, path)
    assert [one.kind for one in pair.outcomes(save, path)] == ["ExistsError"] * 2
    second = pair.run(save, path, overwrite=True)
    assert first[0] != second[0] == second[1]
    pair.run(load, path)
    assert len(below(path)) == 2


def test_a_manager_of_two_processes_keeps_its_steps_in_a_store(pair: Cluster, path: str) -> None:
    assert pair.run(loop, path) == [[3, 4]] * 2
    assert pair.run(restore, path) == [4, 4]
    assert below(path) == {"step_00000003", "step_00000004"}


def test_a_run_loads_from_and_saves_to_one_root_in_a_store(pair: Cluster, path: str) -> None:
    pair.run(live_in_one_root, path)
    assert below(path) == {"step_00000002"}


# --- what fails on one fails on all ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("process", "point"),
    [
        *((1, point) for point in OF_ALL),
        *((0, point) for point in (*OF_ALL, "before the commit", "within the commit")),
    ],
)
def test_what_fails_on_one_process_commits_nothing_to_a_store(
    pair: Cluster, path: str, process: int, point: str
) -> None:
    error = OSError(errno.EIO, "the store failed")
    at = point.replace("commit", "commit to a store")
    failed = pair.outcomes(save_failing, path, process, at, error)
    assert failed[process].attributes["errno"] == errno.EIO
    assert failed[1 - process].kind == "PeerError"
    assert failed[1 - process].attributes["failures"] == {process: f"OSError: {error}"}
    assert not [name for name in names_below(path) if "manifest" in name]
    pair.run(save, path)
    # What process 1 wrote while process 0 failed is gone too, unless its manifest may yet appear.
    left = 2 if point == "within the commit" else 0
    assert len(below(path)) == 2 + left


def save_too_late(path: str) -> None:
    """As `save`, but another run commits to the same place first."""
    commit = object_commit.ObjectAttempt.commit

    def late(self: object_commit.ObjectAttempt, data: bytes) -> None:
        (locate(path) / "manifest.msgpack").write_new(b"of the other run")
        commit(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_commit.ObjectAttempt, "commit", late)
        save(path)


def test_of_two_runs_that_save_to_one_place_the_later_one_fails_on_all_processes(
    pair: Cluster, path: str
) -> None:
    failed = pair.outcomes(save_too_late, path)
    assert [one.kind for one in failed] == ["ExistsError"] * 2
    assert all("another save committed" in one.text for one in failed)
    assert (locate(path) / "manifest.msgpack").read_file(max_nbytes=99) == b"of the other run"


def test_a_store_that_ignores_conditions_is_refused_by_several_processes(
    pair: Cluster, wire: Wire, path: str
) -> None:
    wire.hide = b"if-none-match"
    failed = pair.outcomes(save, path)
    wire.hide = b""
    assert [one.kind for one in failed] == ["CheckpointError", "PeerError"]
    assert all("ignores conditions" in one.text for one in failed)
    assert names_below(path) == []


def test_processes_that_save_to_two_places_in_a_store_all_learn_it(
    pair: Cluster, path: str
) -> None:
    failed = pair.outcomes(save_otherwise, path, "path")
    assert all(DIFFERENCES["path"] in one.text for one in failed)
    assert names_below(path) == names_below(path + " elsewhere") == []


def test_the_memory_of_one_process_is_no_place_for_several(pair: Cluster) -> None:
    failed = pair.outcomes(save, f"memory://{next(_NAMES)}")
    assert [one.kind for one in failed] == ["PeerError"] * 2
    assert all("on storage that they share" in one.text for one in failed)


# --- a server that goes away ----------------------------------------------------------------------

REQUESTS = {
    "to begin": rb"PUT \S*/writer\.",
    "with an array": rb"PUT \S*/arrays/large/",
    "with the table of process 0": rb"PUT \S*/tables/00000",
    "with the table of process 1": rb"PUT \S*/tables/00001",
    "to commit": rb"PUT \S*/manifest\.msgpack",
}


@pytest.mark.parametrize(
    ("asked", "overwrite"),
    [*zip(REQUESTS, itertools.cycle([False, True]), strict=False), ("to commit", True)],
)
def test_a_server_that_goes_away_within_a_save_costs_all_that_save_only(
    pair: Cluster, wire: Wire, path: str, asked: str, overwrite: bool
) -> None:
    if overwrite:
        before = pair.run(save, path)
    wire.cut_at(REQUESTS[asked])
    started = time.monotonic()
    failed = pair.outcomes(save, path, overwrite=overwrite)
    assert time.monotonic() - started < SECONDS
    wire.mend()
    assert all({"OSError", "PeerError"} & set(one.bases) for one in failed), failed
    assert any("at http://127.0.0.1" in one.text for one in failed), failed
    if overwrite:
        assert pc.read_manifest(path).id.hex() == before[0]
        pair.run(load, path)
    else:
        with pytest.raises(pc.NotFoundError):
            pc.load(path)
    pair.run(save, path, overwrite=overwrite)
    pair.run(load, path)


# --- a process that dies --------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_cluster_that_loses_a_process_within_a_save_to_a_store_is_followed_by_another(
    wire: Wire, path: str, victim: int
) -> None:
    with Cluster(2, 2) as cluster:
        cluster.run(faults.save, path, 1)
        fault = ("SIGKILL", victim, "before its table")
        ended = cluster.outcomes(faults.save_under_fault, path, 2, *fault)
    assert ended[victim] == Dead(-signal.SIGKILL)
    assert ended[1 - victim] is not None
    assert pc.steps(path) == [1]
    if victim == 0:  # the other way round process 0 takes it back
        assert any(name.startswith("step_00000002/data-") for name in names_below(path))
    with Cluster(2, 2) as cluster:
        assert cluster.run(faults.resume, path) == [1, 1]
    assert pc.steps(path) == [1, 2]
    assert len(below(f"{path}/step_00000002")) == 2
