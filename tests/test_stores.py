"""Checkpoints in object stores: the same promises, another protocol."""

import concurrent.futures
import errno
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.format.steps import StepNames
from pytree_ckpt.store import object_commit, objects
from pytree_ckpt.store.locations import locate
from pytree_ckpt.store.prefixes import Prefix
from pytree_ckpt.verbs.survey import pin, prune, survey
from tests.bitwise import assert_same
from tests.fake_gcs import fake_gcs
from tests.gates import Gate, after_writing
from tests.stores import Wire, make_bucket, moto, other_settings

SECONDS = 20
"""More than an error may take, on a busy machine; the retries themselves are over in three."""
_NAMES = map(str, itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with moto() as port:
        make_bucket(port, "bucket")
        yield port


@pytest.fixture
def wire(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """The way to the server, named by the environment."""
    found = Wire(server)
    _point_to(found, monkeypatch)
    yield found
    found.cut()


def _point_to(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in other_settings():
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("AWS_ENDPOINT_URL", wire.endpoint)


@pytest.fixture(params=["s3", "memory"])
def root(request: pytest.FixtureRequest) -> str:
    """An empty root in a store."""
    if request.param == "memory":
        return f"memory://roots/{next(_NAMES)}"
    request.getfixturevalue("wire")
    return f"s3://bucket/a root/größe/{next(_NAMES)}"


def state(number: int = 0) -> dict[str, Any]:
    """A leaf that is a file of its own, a small one, and a value."""
    large = np.random.default_rng(number).integers(0, 255, (1 << 20) + (1 << 19), np.uint8)
    return {"large": large, "small": jnp.full(5, number), "number": number}


def place_of(url: str) -> Prefix:
    found = locate(url)
    assert isinstance(found, Prefix)
    return found


def names_below(url: str) -> list[str]:
    place = place_of(url)
    return place.objects.names(f"{place.key}/")


def data_object(url: str, part: str) -> tuple[Prefix, str]:
    """The place of a checkpoint, and the key of the object whose name has `part` in it."""
    place = place_of(url)
    (name,) = [name for name in names_below(url) if part in name]
    return place, f"{place.key}/{name}"


# --- the verbs ----------------------------------------------------------------------------------


def test_every_verb_takes_a_store(root: str, mesh_4x2: Mesh, mesh_2x4: Mesh) -> None:
    path = str(pc.step_path(root, 7))
    spec = PartitionSpec("data", "model")
    kernel = jnp.arange(1 << 19, dtype=jnp.float32).reshape(512, -1)
    tree = {"kernel": jax.device_put(kernel, NamedSharding(mesh_4x2, spec)), **state()}
    assert pc.steps(root) == []
    manifest = pc.save(path, tree)
    assert pc.read_manifest(path) == manifest
    assert_same(pc.load(path, tree), tree)
    assert pc.steps(root) == [7]
    assert pc.latest_step(root) == 7
    other = {**tree, "kernel": jax.device_put(kernel, NamedSharding(mesh_2x4, spec))}
    assert_same(pc.load(path, other, reshard=True), other)
    with pc.open(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["kernel"][100:102, 5], kernel[100:102, 5])
    report = pc.verify(path)
    assert report.ok
    assert report.nbytes == manifest.nbytes
    assert pc.verify(path, quick=True).ok
    assert not [name for name in names_below(root) if "writer" in name]


def test_a_save_in_the_background_goes_to_a_store(root: str) -> None:
    pending = pc.save_async(f"{root}/a", state(1))
    pending.result()
    assert_same(pc.load(f"{root}/a", state()), state(1))


def test_a_checkpoint_is_replaced_only_on_request_and_leaves_nothing(root: str) -> None:
    pc.save(f"{root}/a", state(1))
    with pytest.raises(pc.ExistsError, match="overwrite=True"):
        pc.save(f"{root}/a", state(2))
    pc.save(f"{root}/a", state(2), overwrite=True)
    assert_same(pc.load(f"{root}/a", state()), state(2))
    assert len({name.split("/")[1] for name in names_below(root) if "data-" in name}) == 1


def test_what_is_not_there_is_said(root: str) -> None:
    with pytest.raises(pc.NotFoundError, match="there is nothing at"):
        pc.load(f"{root}/none")
    pc.save(f"{root}/step_00000001", state())
    with pytest.raises(pc.NotFoundError, match="has checkpoints in it: step_00000001"):
        pc.load(root)


def test_a_store_of_google_works_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gcs() as host:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL", raising=False)
        root = "gs://bucket/a root/größe"
        with pc.CheckpointManager(root, keep=pc.Keep(last=2)) as manager:
            for step in (1, 2, 3):
                manager.save(step, state(step))
            manager.wait()
            assert manager.steps() == pc.steps(root) == [2, 3]
            assert_same(manager.restore(state()), state(3))
        path = str(pc.step_path(root, 3))
        with pytest.raises(pc.ExistsError):
            pc.save(path, state())
        pc.save(path, state(4), overwrite=True)
        assert_same(pc.load(path, state()), state(4))
        assert pc.verify(path).ok
        assert len({name.split("/")[1] for name in names_below(root) if "data-" in name}) == 2


@pytest.mark.parametrize("url", ["s3://", "s3://bucket", "s3://Bucket_/x", "s3://bucket/a//b"])
def test_a_url_without_bucket_or_key_is_refused(url: str) -> None:
    with pytest.raises(pc.CheckpointError, match=r"bucket|key"):
        pc.load(url)


# --- a manager ----------------------------------------------------------------------------------


def test_a_manager_rotates_and_restores_in_a_store(root: str) -> None:
    with pc.CheckpointManager(root, keep=pc.Keep(last=2)) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state(step))
        manager.wait()
        assert manager.steps() == [3, 4]
        assert_same(manager.restore(state()), state(4))
    assert {name.split("/")[0] for name in names_below(root)} == {"step_00000003", "step_00000004"}


def test_a_damaged_step_is_marked_and_the_one_before_is_restored(root: str) -> None:
    with pc.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.wait()
        _flip(*data_object(str(pc.step_path(root, 2)), "arrays/large/c.0"))
        assert_same(manager.restore(state(), on_damage="previous"), state(1))
        assert manager.steps() == [1]
        manager.save(2, state(2))
        manager.wait()
        assert manager.steps() == [1, 2]


def test_a_pinned_step_stays_in_a_store(root: str) -> None:
    with pc.CheckpointManager(root, keep=pc.Keep(last=1, pinned={1})) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    assert [(found.step, found.pinned) for found in survey(root)] == [(1, True), (3, False)]
    pin(pc.step_path(root, 1), pinned=False)
    assert prune(root, pc.Keep(last=1), delete=True).deleted == (1,)
    assert not [name for name in names_below(root) if name.startswith("step_00000001")]


def test_a_manager_removes_what_dead_saves_left_and_a_save_leaves_it(root: str) -> None:
    path = str(pc.step_path(root, 1))
    place = place_of(path)
    dead = object_commit.ObjectAttempt(place.objects, place.key, objects.ABSENT)
    (place / f"data-{dead.nonce}" / "half").write_new(b"half")
    assert place_of(root).unfinished(StepNames()) == [(1, True)]
    pc.save(path, state(1))
    assert [name for name in names_below(path) if dead.nonce in name]
    with pc.CheckpointManager(root) as manager:
        manager.save(2, state(2))
    assert not [name for name in names_below(path) if dead.nonce in name]
    assert_same(pc.load(path, state()), state(1))


def test_what_somebody_else_has_under_the_name_of_a_leftover_stays(root: str) -> None:
    path = str(pc.step_path(root, 1))
    theirs = place_of(path) / f"data-{'a' * 32}" / "thesis.tex"
    theirs.write_new(b"mine")
    pc.save(path, state(1))
    pc.save(path, state(2), overwrite=True)
    with pc.CheckpointManager(root) as manager:
        manager.save(2, state(2))
    assert theirs.read_file(max_nbytes=9) == b"mine"


def test_names_that_are_no_text_are_those_of_somebody_else() -> None:
    root = f"memory://roots/{next(_NAMES)}"
    manager = pc.CheckpointManager(root, keep=pc.Keep(last=1), background=False)
    place = place_of(root)
    for name in (b"\xff", b"step_00000001/\xff"):
        place.objects.store.write(f"{place.key}/".encode() + name, b"theirs").result()
    for step in (1, 2):
        manager.save(step, state(step))
    assert pc.steps(root) == [2]
    assert [name for name in names_below(root) if "\udcff" in name]
    assert pc.verify(str(pc.step_path(root, 2)), quick=True).ok


def test_a_save_that_began_a_day_ago_is_dead_for_everybody(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(f"{root}/a")
    dead = object_commit.ObjectAttempt(place.objects, place.key, objects.ABSENT)
    (place / f"data-{dead.nonce}" / "half").write_new(b"half")
    later = time.time() + object_commit.DEAD_AFTER_S + 1
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: later)
        pc.save(f"{root}/a", state())
    assert not [name for name in names_below(root) if dead.nonce in name]


def test_a_save_that_was_taken_for_dead_fails_and_commits_nothing(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    with monkeypatch.context() as patch:
        after_writing(patch, gate.pass_through)
        pending = pc.save_async(str(pc.step_path(root, 1)), state())
        gate.wait_until_reached()
    place_of(root).reclaim(StepNames())
    gate.open()
    with pytest.raises(pc.CheckpointError, match="taken for dead"):
        pending.result()
    assert names_below(root) == []


@pytest.mark.parametrize("sees_the_commit", [False, True])
def test_an_overwrite_that_was_taken_for_dead_in_its_commit_puts_back_the_old(
    root: str, monkeypatch: pytest.MonkeyPatch, sees_the_commit: bool
) -> None:
    """Whether who takes it over looks at the manifest before it is there, or after."""
    path = str(pc.step_path(root, 1))
    pc.save(path, state(0))
    before, after = Gate(), Gate()
    put_if, state_of = objects.Objects.put_if, object_commit._state

    def gated(self: objects.Objects, key: str, *args: Any, **settings: Any) -> bytes | None:
        if not key.endswith("manifest.msgpack"):
            return put_if(self, key, *args, **settings)
        before.pass_through()
        done = put_if(self, key, *args, **settings)
        after.pass_through()
        return done

    def taking(*args: Any) -> str:
        found = state_of(*args)
        if found == "taken" and sees_the_commit:
            before.open()
            after.wait_until_reached()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(objects.Objects, "put_if", gated)
        pending = pc.save_async(path, state(1), overwrite=True)
        before.wait_until_reached()
    with monkeypatch.context() as patch:
        patch.setattr(object_commit, "_state", taking)
        place_of(root).reclaim(StepNames())
    before.open()
    after.wait_until_reached()
    place_of(root).reclaim(StepNames())  # as the next save of a manager does
    after.open()
    with pytest.raises(pc.CheckpointError, match="taken for dead"):
        pending.result()
    assert_same(pc.load(path, state()), state(0))
    assert len({name.split("/")[0] for name in names_below(path)}) == 2, "manifest and data"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_that_appears_after_its_request_was_given_up_has_its_data(
    root: str, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """A request that was not answered in time may still be on its way."""
    path = f"{root}/a"
    if overwrite:
        pc.save(path, state(0))
    put_if = objects.Objects.put_if
    late: list[Callable[[], object]] = []

    def lost(self: objects.Objects, key: str, *args: Any, **settings: Any) -> bytes | None:
        if not key.endswith("manifest.msgpack"):
            return put_if(self, key, *args, **settings)
        late.append(functools.partial(put_if, self, key, *args, **settings))
        raise TimeoutError(errno.ETIMEDOUT, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(objects.Objects, "put_if", lost)
        with pytest.raises(TimeoutError):
            pc.save(path, state(1), overwrite=overwrite)
    if overwrite:
        assert_same(pc.load(path, state()), state(0))
    for request in late:
        request()
    assert_same(pc.load(path, state()), state(1))


def test_checkpoints_that_were_copied_from_a_disk_are_those_of_a_store(
    root: str, tmp_path: Path
) -> None:
    """By any tool that copies files to objects, and step 2 to another number."""
    with pc.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        name = file.relative_to(tmp_path).as_posix().replace("step_00000002", "step_00000007")
        place_of(f"{root}/{name}").write_new(file.read_bytes())
    before = names_below(root)
    with pc.CheckpointManager(root, keep=pc.Keep(last=1)) as manager:
        assert manager.steps() == pc.steps(root) == [1, 7]
        assert_same(manager.restore(state()), state(2))
        assert names_below(root) == before
    assert all(pc.verify(pc.step_path(root, step)).ok for step in (1, 7))


# --- races, and stores that do not decide them ---------------------------------------------------


def test_of_savers_that_race_for_a_place_one_wins(wire: Wire) -> None:
    for number in range(2):
        path = f"s3://bucket/races/{number}"
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(pc.save, path, {"number": n}) for n in range(8)]
        errors = [job.exception() for job in jobs]
        winners = [n for n, error in enumerate(errors) if error is None]
        assert len(winners) == 1
        assert {type(error) for error in errors if error} == {pc.ExistsError}
        assert pc.load(path) == {"number": winners[0]}
        assert len({name.split("/")[0] for name in names_below(path)}) == 2, "manifest and data"


def test_an_overwrite_does_not_take_what_another_one_committed(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pc.save(f"{root}/a", state(0))
    gate = Gate()
    with monkeypatch.context() as patch:
        after_writing(patch, gate.pass_through)
        pending = pc.save_async(f"{root}/a", state(1), overwrite=True)
        gate.wait_until_reached()
    pc.save(f"{root}/a", state(2), overwrite=True)
    gate.open()
    with pytest.raises(pc.ExistsError, match="another save committed"):
        pending.result()
    assert_same(pc.load(f"{root}/a", state()), state(2))


def test_where_conditions_are_ignored_one_writer_goes_on_and_several_are_refused(
    server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(server, hide=b"if-none-match")
    _point_to(wire, monkeypatch)
    url = "s3://bucket/ignores"
    pc.save(url, state(1))
    pc.save(url, state(2), overwrite=True)
    assert_same(pc.load(url, state()), state(2))
    with (
        pytest.raises(pc.CheckpointError, match="ignores conditions"),
        locate(url + "2").attempt(overwrite=False, needed_nbytes=1, writers=2),
    ):
        pytest.fail("it went on")
    assert names_below(url + "2") == []
    wire.cut()


# --- stores that do not answer ------------------------------------------------------------------


def test_a_dead_endpoint_is_named_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(1)
    _point_to(wire, monkeypatch)
    wire.cut()
    started = time.monotonic()
    for verb in (pc.load, pc.steps, lambda path: pc.save(path, state())):
        with pytest.raises(OSError, match=f"s3://bucket/x.* at {wire.endpoint}"):
            verb("s3://bucket/x")
    assert time.monotonic() - started < 3 * SECONDS


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_store_that_goes_away_within_a_save_costs_that_save_only(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    url = f"s3://bucket/goes away {overwrite}"
    if overwrite:
        pc.save(url, state(1))
    started = time.monotonic()
    with monkeypatch.context() as patch:
        after_writing(patch, wire.cut)
        with pytest.raises(OSError, match="bucket/goes away"):
            pc.save(url, state(2), overwrite=overwrite)
    assert time.monotonic() - started < 2 * SECONDS
    wire.mend()
    if overwrite:
        assert_same(pc.load(url, state()), state(1))
    else:
        with pytest.raises(pc.NotFoundError, match="has not committed"):
            pc.load(url)
    pc.save(url, state(3), overwrite=overwrite)
    assert_same(pc.load(url, state()), state(3))


# --- damage -------------------------------------------------------------------------------------


def _flip(place: Prefix, key: str) -> None:
    data, _ = place.objects.read(key)
    assert data is not None
    middle = len(data) // 3
    place.objects.put(key, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


def _delete(place: Prefix, key: str) -> None:
    place.objects.remove(key)


def _cut_off(place: Prefix, key: str) -> None:
    data, _ = place.objects.read(key)
    assert data is not None
    place.objects.put(key, data[: len(data) // 2])


@pytest.mark.parametrize("harm", [_flip, _delete, _cut_off])
@pytest.mark.parametrize(
    ("part", "leaf"),
    [("arrays/large/c.0", "large"), ("packed/00000/c.0", "small"), ("tables/", None)],
    ids=["array", "packed", "table"],
)
def test_damage_in_a_store_is_found_and_named(
    root: str, harm: Any, part: str, leaf: str | None
) -> None:
    pc.save(f"{root}/a", {"large": state()["large"], "small": np.arange(9000), "number": 1})
    harm(*data_object(f"{root}/a", part))
    with pytest.raises(pc.IntegrityError) as caught:
        pc.load(f"{root}/a")
    assert {damage.path for damage in caught.value.damage} == {leaf}
    assert not pc.verify(f"{root}/a").ok


# --- requests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "pages"), [(5, 1), (1001, 2)])
def test_the_steps_of_a_root_are_one_request_for_each_thousand_objects(
    wire: Wire, count: int, pages: int
) -> None:
    root = f"s3://bucket/listed/{count}"
    objects = [place_of(f"{pc.step_path(root, step)}/manifest.msgpack") for step in range(count)]
    for written in [place.objects.store.write(place.key, b"") for place in objects]:
        written.result()
    before = wire.count(b"HTTP/1.1")
    assert pc.steps(root) == list(range(count))
    assert wire.count(b"HTTP/1.1") == before + pages
    assert pc.latest_step(root) == count - 1
    assert wire.count(b"HTTP/1.1") == before + 2 * pages


# --- where it is, and who asks ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "credentials", "where"),
    [
        ({"AWS_ACCESS_KEY_ID": "a"}, "environment", ""),
        ({}, "default", ""),
        ({"AWS_ENDPOINT_URL": "http://h:1"}, "anonymous", "at http://h:1"),
        ({"AWS_ENDPOINT_URL": "http://h:1", "AWS_PROFILE": "p"}, "default", "at http://h:1"),
        (
            {"AWS_ENDPOINT_URL": "http://h:1", "AWS_ENDPOINT_URL_S3": "http://h:2"},
            "anonymous",
            "at http://h:2",
        ),
    ],
)
def test_the_environment_says_where_and_who(
    env: dict[str, str],
    credentials: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**env, "AWS_REGION": "eu-north-1"}.items():
        monkeypatch.setenv(name, value)
    found = objects.bucket("s3", "bucket")
    spec = found.store.spec(retain_context=True).to_json()
    assert found.where == where
    assert spec["aws_region"] == "eu-north-1"
    assert spec["aws_credentials"]["type"] == credentials
