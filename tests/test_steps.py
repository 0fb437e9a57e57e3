"""Names of steps: only the exact name counts, steps are ordered as numbers, and 0 is a step."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pytree_ckpt as pc
from pytree_ckpt.format.steps import StepNames, checked_step

STEPS = st.one_of(st.integers(0, 10**9), st.integers(0, 10**60))
PREFIXES = st.one_of(
    st.sampled_from(["", "step_", "a.b", "2024", "run-1", "ckpt 1", "é", "+", "-", "a\n"]),
    st.text(
        st.characters(exclude_characters="/\\\0", exclude_categories=["Cs"]), max_size=8
    ).filter(lambda prefix: not prefix.startswith(".")),
)
NAMES = st.builds(StepNames, prefix=PREFIXES, width=st.integers(0, 20))


def save(path: Path, value: int = 0) -> None:
    pc.save(path, {"value": value})


# --- names ----------------------------------------------------------------------------------------


@given(NAMES, STEPS)
def test_the_name_of_a_step_means_that_step(names: StepNames, step: int) -> None:
    assert names.step(names.name(step)) == step


@given(NAMES, st.text(max_size=12))
def test_only_the_exact_name_counts(names: StepNames, text: str) -> None:
    for candidate in (text, names.prefix + text):
        step = names.step(candidate)
        assert step is None or names.name(step) == candidate


@given(NAMES, STEPS, st.data())
def test_a_name_with_one_character_changed_is_another_step_or_none(
    names: StepNames, step: int, data: st.DataObject
) -> None:
    name = names.name(step)
    at = data.draw(st.integers(0, len(name)))
    changed = name[:at] + data.draw(st.text(max_size=2)) + name[at + data.draw(st.integers(0, 1)) :]
    assert names.step(changed) != step or changed == name


@pytest.mark.parametrize(
    "name",
    [
        "100",
        "step_100",
        "step_0000100",
        "step_000000100",
        "step_00000100.backup",
        "step_00000100 ",
        "step_00000100\n",
        "step_00000100 (copy)",
        "old_step_00000100",
        "Step_00000100",
        "step_+0000100",
        "step_-0000100",
        "step_0000_100",
        "step_0x000064",
        "step_00001e02",
        "step_" + "\u0660" * 5 + "\u0661\u0660\u0660",
        "step_00000\uff1100",
        "step_0000010²",
        "step_" + "9" * 5000,
        "step_",
        "",
    ],
)
def test_what_only_looks_like_a_step_is_none(name: str) -> None:
    assert StepNames().step(name) is None


def test_a_step_wider_than_the_width_has_all_its_digits() -> None:
    assert StepNames(width=2).name(12345) == "step_12345"
    assert StepNames(width=2).step("step_12345") == 12345
    assert StepNames(width=2).step("step_012345") is None


def test_of_two_prefixes_each_sees_its_own_steps() -> None:
    pairs = [("a", "a_b"), ("a_", "a_b_"), ("step", "step_"), ("", "x"), ("ckpt 1", "ckpt 1.")]
    for one, other in pairs:
        for width in (0, 8):
            first, second = StepNames(prefix=one, width=width), StepNames(prefix=other, width=width)
            assert first.step(second.name(7)) is None
            assert second.step(first.name(7)) is None


@pytest.mark.parametrize("prefix", ["a/b", "a\\b", "a\0b", ".hidden", "..", "../x_"])
def test_a_prefix_that_leaves_the_root_or_hides_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        StepNames(prefix=prefix)


@pytest.mark.parametrize("width", [-1, 65])
def test_a_width_that_no_name_has_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match="digits"):
        StepNames(width=width)


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3), 2**80])
def test_an_integer_of_any_kind_is_a_step(step: Any) -> None:
    found = checked_step(step)
    assert type(found) is int
    assert found == int(step)


@pytest.mark.parametrize(
    "step",
    [
        -1,
        np.int32(-1627389952),
        True,
        np.bool_(True),
        np.array(True),
        jnp.array(True),
        1.0,
        np.float32(3),
        jnp.float32(3),
        "5",
        b"5",
        None,
        [5],
        np.array([5]),
    ],
    ids=repr,
)
def test_anything_else_is_not_a_step(step: Any, tmp_path: Path) -> None:
    for attempt in (checked_step, StepNames().name, lambda step: pc.step_path(tmp_path, step)):
        with pytest.raises(ValueError, match="a step is"):
            attempt(step)


def test_a_state_in_the_place_of_a_step_is_not_printed_whole() -> None:
    with pytest.raises(ValueError, match="a step is an int") as error:
        checked_step({"params": [0] * 1000})
    assert len(str(error.value)) < 100


# --- steps of a root ------------------------------------------------------------------------------


def test_steps_are_ordered_as_numbers_and_not_by_name_or_age(tmp_path: Path) -> None:
    for step in (10**9, 5, 2**53 + 1, 100_000_000, 99_999_999, 0):
        save(pc.step_path(tmp_path, step), step)
    os.utime(pc.step_path(tmp_path, 5))
    assert pc.steps(tmp_path) == [0, 5, 99_999_999, 100_000_000, 10**9, 2**53 + 1]
    assert pc.latest_step(tmp_path) == 2**53 + 1


def test_step_zero_is_a_step(tmp_path: Path) -> None:
    assert pc.latest_step(tmp_path) is None
    save(pc.step_path(tmp_path, 0), 11)
    assert pc.latest_step(tmp_path) == 0
    assert pc.load(pc.step_path(tmp_path, 0)) == {"value": 11}


def test_a_root_that_does_not_exist_has_no_steps_and_is_not_made(tmp_path: Path) -> None:
    assert pc.steps(tmp_path / "root") == []
    assert pc.latest_step(tmp_path / "root") is None
    assert not (tmp_path / "root").exists()


def test_a_root_that_cannot_be_read_is_an_error_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    for root in ("file", "loop"):
        with pytest.raises(OSError, match=root):
            pc.steps(tmp_path / root)

    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionError):
        pc.latest_step(tmp_path)


def make_foreign(root: Path) -> None:
    """What else may lie in a root, and looks like a step to somebody in a hurry."""
    real = pc.step_path(root, 100)
    for name in (
        "step_00000100.backup",
        "old_step_00000100",
        "step_00000100 (copy)",
        "step_00000\u066300",
    ):
        shutil.copytree(real, root / name)
    shutil.copytree(real, root / "step_400")
    (root / "step_00000500").write_text("a file named like a step")
    (root / "step_00000600").mkdir()
    (root / "step_00000600" / "notes.txt").write_text("a folder named like a step")
    (root / "logs").mkdir()
    (root / "logs" / "events").write_text("")
    (root / "manifest.msgpack").write_text("not here")
    (root / "step_00000700").symlink_to("step_00000700")
    (root / "step_00000800").symlink_to("nowhere")
    (root / "step_00000900").symlink_to("logs")
    (root / "latest").symlink_to("latest")
    (root / "checkpoint").write_text("step_00000500")


def test_the_steps_of_another_prefix_and_width_are_found_by_it(tmp_path: Path) -> None:
    names = {"prefix": "ppo_networks_", "width": 3}
    for step in (7, 12, 4000):
        save(pc.step_path(tmp_path, step, **names), step)
    save(pc.step_path(tmp_path, 5), 5)
    assert sorted(os.listdir(tmp_path))[:2] == ["ppo_networks_007", "ppo_networks_012"]
    assert pc.steps(tmp_path, **names) == [7, 12, 4000]
    assert pc.latest_step(tmp_path, **names) == 4000
    assert pc.steps(tmp_path) == [5]
    assert pc.steps(tmp_path, prefix="ppo_networks_", width=4) == [4000]
    with pytest.raises(ValueError, match="prefix"):
        pc.steps(tmp_path, prefix="../")


def test_foreign_files_folders_and_links_are_no_steps(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(pc.step_path(tmp_path, step))
    make_foreign(tmp_path)
    assert pc.steps(tmp_path) == [100, 200, 300]
    assert pc.latest_step(tmp_path) == 300


def test_a_link_to_a_checkpoint_is_a_step_and_a_root_may_be_a_link(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    save(pc.step_path(root, 100), 1)
    save(elsewhere, 2)
    pc.step_path(root, 200).symlink_to(elsewhere)
    (tmp_path / "link").symlink_to("root")
    assert pc.steps(tmp_path / "link") == [100, 200]
    assert pc.load(pc.step_path(tmp_path / "link", 200)) == {"value": 2}


def test_a_save_that_never_committed_is_no_step(tmp_path: Path) -> None:
    save(pc.step_path(tmp_path, 1))
    save(pc.step_path(tmp_path, 2))
    (pc.step_path(tmp_path, 2) / "manifest.msgpack").unlink()
    assert pc.steps(tmp_path) == [1]


def test_a_root_that_was_copied_or_moved_has_the_same_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        save(pc.step_path(tmp_path / "a", step), step)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    pc.step_path(tmp_path / "b", 2).rename(pc.step_path(tmp_path / "b", 7))
    (tmp_path / "a").rename(tmp_path / "c d")
    assert pc.steps(tmp_path / "b") == [1, 7]
    assert pc.load(pc.step_path(tmp_path / "b", 7)) == {"value": 2}
    assert pc.steps(tmp_path / "c d") == [1, 2]
    assert pc.load(pc.step_path(tmp_path / "c d", 2)) == {"value": 2}
