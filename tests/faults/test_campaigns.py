"""A little of each campaign; `make faults-short` tries more, and `make faults` everything."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import mutants, shim
from tests.faults.__main__ import SIZES, Table
from tests.faults.judge import Tally
from tests.faults.mutants import Mutant

REPOSITORY = Path(__file__).parents[2]
needs_shim = pytest.mark.skipif(shim.why_missing() is not None, reason=str(shim.why_missing()))


def outcome(*campaigns: str) -> str:
    only = [word for name in campaigns for word in ("--only", name)]
    command = [sys.executable, "-m", "tests.faults", "--size", "tiny", *only]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@needs_shim
def test_a_kill_loses_nothing() -> None:
    assert "kill: rotation, K = 1" in outcome("kill", "torn")


@needs_shim
def test_no_crash_state_loses_anything() -> None:
    assert "crash states: overwrite" in outcome("replay", "restart")


@needs_shim
def test_a_failing_disk_loses_nothing() -> None:
    assert "EIO on each fsync" in outcome("disk")


@needs_shim
def test_no_damage_is_silent() -> None:
    assert "damage: zstd" in outcome("damage")


@needs_shim
def test_mutated_metadata_is_refused_by_name() -> None:
    assert "hostile: mutated metadata" in outcome("hostile")


@needs_shim
def test_of_several_writers_one_wins_and_readers_see_whole_checkpoints() -> None:
    assert "3 writers on one root" in outcome("race", "readers")


@needs_shim
def test_what_befalls_one_process_of_a_cluster_is_known_to_all_and_commits_nothing() -> None:
    assert "cluster: SIGSTOP in process 0" in outcome("cluster")


@needs_shim
def test_random_sequences_do_what_the_model_says() -> None:
    assert "state machine" in outcome("machine")


@pytest.mark.parametrize("kind", ["lost", "silent", "broken", "leftovers", "failed"])
def test_one_number_that_is_not_zero_is_an_error(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table()
    table.add("good", lambda: Tally(points=3))
    assert table.finish() == 0
    table.add("bad", lambda: Tally(points=1, **{kind: 1}))
    assert table.finish() == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["all", "4"]


def test_a_campaign_that_raises_is_an_error_and_the_next_one_is_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table()
    table.add("bad", lambda: 1 // 0)
    table.add("good", lambda: Tally(points=3))
    assert table.finish() == 1
    out = capsys.readouterr().out
    assert "ZeroDivisionError" in out
    assert out.splitlines()[-1].split()[:2] == ["all", "3"]


def test_a_mutant_that_nobody_catches_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "ALL", mutants.ALL[:2])
    monkeypatch.setattr(
        mutants, "catch", lambda _, mutant, **__: {"kill": "" if mutant is mutants.ALL[1] else "x"}
    )
    table = Table()
    table.add_mutants(None, SIZES["tiny"])
    assert table.finish() == 1
    assert f"nobody caught the mutant: {mutants.ALL[1].name}" in capsys.readouterr().out


def test_the_full_size_tries_every_operation_and_what_it_says() -> None:
    full = SIZES["full"]
    strides = (full.kill_stride, full.torn_stride, full.disk_stride, full.power_stride)
    assert set(strides) == {1}
    assert full.race_steps >= 500
    assert (full.examples, full.steps) >= (500, 50)
    assert full.mutated >= SIZES["short"].mutated >= 10_000


@pytest.mark.parametrize("mutant", mutants.ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_still_fits_the_code(mutant: Mutant) -> None:
    for source in mutant.sources().values():
        compile(source, mutant.name, "exec")
