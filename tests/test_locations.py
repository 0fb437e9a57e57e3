"""A path means one folder at the moment of the call, and a checkpoint knows no path of its own."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pytree_ckpt as pc
from pytree_ckpt.store.locations import locate
from tests.bitwise import assert_same

STATE = {"w": np.arange(6.0).reshape(2, 3), "step": 3}


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a sibling."""
    (tmp_path / "t" / "a").mkdir(parents=True)
    (tmp_path / "t" / "x").mkdir()
    monkeypatch.chdir(tmp_path / "t" / "a")
    return tmp_path / "t" / "a"


# --- what a path means --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("out", "out"),
        ("./out/", "out"),
        ("out//x/../y", "out/y"),
        ("../out", "../out"),
        ("../x/./out", "../x/out"),
        ("a b/c  d", "a b/c  d"),
        ("größe/空/🙂", "größe/空/🙂"),
        ("e\u0301", "e\u0301"),
        ("-o", "-o"),
        ("100%", "100%"),
        ("a%20b", "a%20b"),
        ("a:b", "a:b"),
        ("c:/d", "c:/d"),
        ("x=1,y=[2]*?#", "x=1,y=[2]*?#"),
        ("back\\slash", "back\\slash"),
        ("new\nline", "new\nline"),
        ("...", "..."),
        (Path("out"), "out"),
        (Path("..") / "out", "../out"),
    ],
)
def test_a_relative_path_is_relative_to_where_the_process_is(
    inside: Path, given: Any, meant: str
) -> None:
    path = Path(os.path.normpath(inside / meant))
    pc.save(given, STATE)
    assert (path / "manifest.msgpack").is_file()
    assert_same(pc.load(given), STATE)
    assert_same(pc.load(path), STATE)
    assert_same(pc.load(path.as_uri()), STATE)
    with pc.open(given) as checkpoint:
        assert repr(str(path)) in repr(checkpoint)
    assert pc.read_manifest(given) == pc.read_manifest(path)


def test_a_dot_is_the_working_folder(inside: Path) -> None:
    pc.save(".", STATE)
    assert_same(pc.load(inside), STATE)


def test_a_later_chdir_moves_nothing(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pc.save("out", STATE)
    checkpoint = pc.open("out")
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(checkpoint["w"][1], STATE["w"][1])
    checkpoint.close()
    assert_same(pc.load(inside / "out"), STATE)
    with pytest.raises(pc.NotFoundError, match="there is nothing at /out"):
        pc.load("out")
    monkeypatch.chdir(inside)
    assert_same(pc.load("out"), STATE)


def test_a_save_in_the_background_goes_where_the_process_was_at_the_call(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = pc.save_async("../out", STATE)
    monkeypatch.chdir("/")
    pending.result()
    assert_same(pc.load(inside.parent / "out"), STATE)


def test_a_tilde_is_the_home_of_the_user(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = inside.parent / "home"
    monkeypatch.setenv("HOME", str(home))
    pc.save("~/out", STATE)
    pc.save(Path("~") / "out2", STATE)
    pc.save("a~/~b", STATE)
    assert sorted(os.listdir(home)) == ["out", "out2"]
    assert (inside / "a~" / "~b" / "manifest.msgpack").exists()
    assert pc.steps("~/nothing") == []
    assert_same(pc.load("~/out"), STATE)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("file:///tmp/a", "/tmp/a"),
        ("file:///tmp/a%20b%25%3F%23", "/tmp/a b%?#"),
        ("file:///tmp/gr%C3%B6%C3%9Fe", "/tmp/größe"),
        ("file:///tmp/größe", "/tmp/größe"),
        ("file:///tmp/a+b", "/tmp/a+b"),
        ("file:///tmp/x/../y//z/", "/tmp/y/z"),
        ("file://localhost/tmp/a", "/tmp/a"),
        ("FILE:///tmp/a", "/tmp/a"),
        ("file:///~/a", "/~/a"),
    ],
)
def test_a_file_url_is_a_path_with_percent_encoding(url: str, meant: str) -> None:
    assert str(locate(url).path) == meant


def test_a_path_that_is_not_utf_8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    for given in (path, path.as_uri()):
        for verb in (pc.load, pc.open, lambda p: pc.save(p, STATE)):
            with pytest.raises(pc.CheckpointError, match="not UTF-8"):
                verb(given)
    assert os.listdir(tmp_path) == []
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"this file system takes only UTF-8: {error}")
    monkeypatch.chdir(path)
    with pytest.raises(pc.CheckpointError, match="not UTF-8"):
        pc.save("out", STATE)
    assert os.listdir(path) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("abfs+ssl://x", r"abfs\+ssl:// is not supported"),
        ("s3-eu.west://x", r"s3-eu\.west:// is not supported"),
        (Path("s3://bucket/key"), "what pathlib makes of a URL"),
        (Path("gs://bucket/key"), "what pathlib makes of a URL"),
        (Path("file:///tmp/x"), "what pathlib makes of a URL"),
        ("file://host/x", "names the host 'host'"),
        ("file://x", "names the host 'x'"),
        ("file://", "empty"),
        ("file:///tmp/a?b", "not percent-encoded"),
        ("file:///tmp/a#b", "not percent-encoded"),
        ("file:///tmp/a%00b", "NUL"),
        ("", "empty"),
        ("a\0b", "NUL"),
    ],
)
def test_what_names_no_folder_is_refused_by_every_verb(inside: Path, path: Any, text: str) -> None:
    verbs = [
        lambda: pc.save(path, STATE),
        lambda: pc.load(path),
        lambda: pc.open(path),
        lambda: pc.read_manifest(path),
        lambda: pc.steps(path),
        lambda: pc.latest_step(path),
        lambda: pc.step_path(path, 1),
    ]
    for verb in verbs:
        with pytest.raises(pc.CheckpointError, match=text):
            verb()
    assert os.listdir(inside) == []


@pytest.mark.parametrize("path", [b"out", 3, None, ["out"]])
def test_what_is_no_path_is_a_type_error(inside: Path, path: Any) -> None:
    for verb in (pc.load, pc.open, pc.read_manifest, pc.steps, lambda p: pc.save(p, STATE)):
        with pytest.raises(TypeError):
            verb(path)
    assert os.listdir(inside) == []


class Folder:
    """A path that is neither `str` nor `pathlib`."""

    def __fspath__(self) -> str:
        return "out"


def test_any_path_like_object_is_taken(inside: Path) -> None:
    pc.save(Folder(), STATE)
    assert_same(pc.load(Folder()), STATE)
    assert os.listdir(inside) == ["out"]


# --- a checkpoint that moves --------------------------------------------------------------------


def test_a_checkpoint_loads_wherever_it_is_moved_copied_or_linked(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "water"
    pc.save(path, STATE)
    moved = tmp_path / "elsewhere" / "w 2"
    moved.parent.mkdir()
    path.rename(moved)
    assert_same(pc.load(moved), STATE)
    with pytest.raises(pc.NotFoundError):
        pc.load(path)
    shutil.copytree(moved, tmp_path / "copy")
    assert_same(pc.load(tmp_path / "copy"), STATE)
    link = tmp_path / "link"
    link.symlink_to("elsewhere/w 2", target_is_directory=True)
    assert_same(pc.load(link), STATE)
    (tmp_path / "roots").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert_same(pc.load(tmp_path / "roots" / "w 2"), STATE)
    # A save through the link replaces what the link leads to.
    pc.save(link, {"step": 4}, overwrite=True)
    assert link.is_symlink()
    assert pc.load(moved) == {"step": 4}


def test_no_file_of_a_checkpoint_has_a_path_of_where_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "a_place_of_its_own" / "ckpt"
    pc.save(path, {"large": np.zeros(1 << 18), "small": np.zeros(3), "step": 1})
    for file in path.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            assert b"a_place_of_its_own" not in data, file
            assert os.fsencode(tmp_path.name) not in data, file


@pytest.mark.parametrize("verb", [pc.read_manifest, pc.verify, pc.load])
def test_a_link_that_leads_nowhere_is_no_damage(
    tmp_path: Path, verb: Callable[[Path], Any]
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links") as error:
        verb(tmp_path / "loop")
    assert error.value.errno == errno.ELOOP


def test_parents_are_made_and_a_dangling_link_is_not_followed(tmp_path: Path) -> None:
    pc.save(tmp_path / "a" / "b" / "c", STATE)
    assert_same(pc.load(tmp_path / "a" / "b" / "c"), STATE)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="exists"):
        pc.save(tmp_path / "dangling", STATE)
    assert not (tmp_path / "nowhere").exists()


# --- numbered checkpoints -----------------------------------------------------------------------


def test_steps_are_numbers_in_ascending_order(tmp_path: Path) -> None:
    numbers = [0, 12, 2_000_683_008, 2**31, 10**10, 2**53 + 1, 99_999_999, 100_000_000]
    for number in numbers:
        pc.save(pc.step_path(tmp_path, number), {"step": number})
    assert pc.steps(tmp_path) == sorted(numbers)
    assert pc.latest_step(tmp_path) == 2**53 + 1
    for number in numbers:
        assert pc.load(pc.step_path(tmp_path, number)) == {"step": number}


def test_step_0_is_a_step_and_no_step_is_none(tmp_path: Path) -> None:
    assert pc.latest_step(tmp_path) is None
    assert pc.latest_step(tmp_path / "missing") is None
    assert pc.steps(tmp_path / "missing") == []
    pc.save(pc.step_path(tmp_path, 0), {})
    assert pc.latest_step(tmp_path) == 0
    assert pc.steps(tmp_path) == [0]


@pytest.mark.parametrize(
    "step", [np.int64(3), np.uint8(3), np.int32(3), jnp.int32(3), np.array(3), 3]
)
def test_every_integer_is_a_step(tmp_path: Path, step: Any) -> None:
    assert pc.step_path(tmp_path, step) == tmp_path / "step_00000003"


@pytest.mark.parametrize(
    "step",
    [
        *(-1, np.int32(-1627389952), True, False, np.True_, 1.0, np.float32(1), jnp.float32(1)),
        *("5", b"5", None, np.array([1]), jnp.array([1, 2]), np.array(1.0), 1j),
    ],
)
def test_what_is_no_integer_from_0_up_is_no_step(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match="step"):
        pc.step_path(tmp_path, step)


FOREIGN = [
    "100",
    "100.backup",
    "100 (copy)",
    "1e3",
    "+400",
    "\N{ARABIC-INDIC DIGIT THREE}00",
    "step_00000001.backup",
    "old_step_00000001",
    "step_00000001 (copy)",
    "step_00000001~",
    ".step_00000001",
    "step_1",
    "step_0000001",
    "step_000000001",
    "step_-0000001",
    "step_+0000001",
    "step_ 0000001",
    "step_0000_001",
    "step_0x000001",
    "step_0000000\N{ARABIC-INDIC DIGIT ONE}",
    "step_00000001\n",
    "Step_00000001",
    "STEP_00000001",
    "step-00000001",
    "step_",
    "step",
    "logs",
    "latest",
]


def test_only_exact_names_are_steps(tmp_path: Path) -> None:
    for number in (100, 200, 300):
        pc.save(pc.step_path(tmp_path, number), {"step": number})
    for name in FOREIGN:
        shutil.copytree(tmp_path / "step_00000100", tmp_path / name)
    assert pc.steps(tmp_path) == [100, 200, 300]
    assert pc.latest_step(tmp_path) == 300


def test_a_name_of_more_digits_than_any_number_is_no_step(tmp_path: Path) -> None:
    (tmp_path / ("step_" + "9" * 250)).mkdir()
    assert pc.steps(tmp_path) == []


def test_what_has_the_name_of_a_step_but_no_manifest_is_no_step(tmp_path: Path) -> None:
    pc.save(pc.step_path(tmp_path, 7), {"step": 7})
    (tmp_path / "step_00000008").mkdir()
    (tmp_path / "step_00000009").write_text("a file")
    (tmp_path / "step_00000010").symlink_to("step_00000010")
    (tmp_path / "step_00000011").symlink_to("step_00000012")
    (tmp_path / "step_00000012").symlink_to("step_00000011")
    (tmp_path / "step_00000013").symlink_to("nowhere")
    pc.save(pc.step_path(tmp_path, 14), {})
    (pc.step_path(tmp_path, 14) / "manifest.msgpack").unlink()
    assert pc.steps(tmp_path) == [7]
    assert pc.latest_step(tmp_path) == 7


def test_a_damaged_step_is_a_step_that_does_not_load(tmp_path: Path) -> None:
    """Who asks for the newest step must not silently be given an older one."""
    for number in (10, 20):
        pc.save(pc.step_path(tmp_path, number), {"step": number})
    (pc.step_path(tmp_path, 20) / "manifest.msgpack").write_bytes(b"")
    assert pc.latest_step(tmp_path) == 20
    with pytest.raises(pc.FormatError):
        pc.load(pc.step_path(tmp_path, 20))


def test_a_link_to_a_checkpoint_elsewhere_is_a_step(tmp_path: Path) -> None:
    pc.save(tmp_path / "elsewhere", {"step": 5})
    root = tmp_path / "root"
    root.mkdir()
    (root / "step_00000005").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    assert pc.steps(tmp_path / "link") == [5]
    assert pc.load(pc.step_path(tmp_path / "link", 5)) == {"step": 5}


def test_a_root_that_cannot_be_read_is_an_error_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("?")
    for ask in (pc.steps, pc.latest_step):
        with pytest.raises(NotADirectoryError):
            ask(tmp_path / "file")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        pc.steps(tmp_path / "loop")
    pc.save(pc.step_path(tmp_path / "root", 1), {})

    def closed(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", closed)
        with pytest.raises(PermissionError):
            pc.latest_step(tmp_path / "root")
    # Nor is a step one that is not there because nobody may look at it.
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", closed)
        with pytest.raises(PermissionError):
            pc.latest_step(tmp_path / "root")
    assert pc.latest_step(tmp_path / "root") == 1


@pytest.mark.parametrize("path", ["~nobody-of-this-name/out", "~nobody-of-this-name"])
def test_a_tilde_that_is_nobodys_home_is_refused(inside: Path, path: str) -> None:
    with pytest.raises(
        pc.CheckpointError, match=r"nobody knows where ~nobody-of-this-name is.*\./~"
    ):
        pc.save(path, STATE)
    assert os.listdir(inside) == []
    pc.save(f"./{path}", STATE)
    assert_same(pc.load(inside / path), STATE)


def test_dots_behind_a_link_lead_where_they_lead_other_programs(inside: Path) -> None:
    (inside / "far" / "deep").mkdir(parents=True)
    (inside / "link").symlink_to("far/deep")
    pc.save("link/../out", STATE)
    assert os.path.exists("link/../out/manifest.msgpack")
    assert_same(pc.load(inside / "far" / "out"), STATE)
    assert_same(pc.load(inside / "link" / ".." / "out"), STATE)


def test_a_relative_path_in_a_working_folder_that_is_gone_says_so(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = inside / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError, match="the working folder is gone: 'out'"):
        pc.save("out", STATE)
    pc.save(inside / "out", STATE)


def test_a_path_that_the_system_encodes_in_another_way_is_refused(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python and TensorStore would write to two places."""
    monkeypatch.setattr(os, "fsencode", lambda path: str(path).encode("latin-1"))
    for path in ("größe", "日本"):
        with pytest.raises(pc.CheckpointError, match="not UTF-8 where names are"):
            pc.save(path, STATE)
