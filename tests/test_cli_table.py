"""Every command on every kind of input, as it is installed: exit code, text, and JSON."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pytree_ckpt as pc
from pytree_ckpt.cli.main import main
from tests.cli_reference import PAGE
from tests.cli_shapes import SHAPES, misfits
from tests.entry_point import EntryPoint, entry_point, script

INPUTS = ("good", "flipped", "cut", "broken", "unfinished", "foreign", "file", "missing")
TABLE = """
ls {root}                             committed    0 0 0 0 0 0 3 3
tree {ck}                             kernel       0 0 0 4 3 3 3 3
show {ck}                             chunks       0 0 0 4 3 3 3 3
show {ck} params/kernel               chunk        0 0 0 4 3 3 3 3
show {ck} params/kernel --stats       least        0 5 5 4 3 3 3 3
show {ck} params/nothing              no_leaf        3 3 3 4 3 3 3 3
report {ck} -o {dst}.html             .html        0 0 0 4 3 3 3 3
verify {ck}                           whole        0 1 1 1 3 3 3 3
verify --quick {ck}                   whole        0 0 1 1 3 3 3 3
verify {other} {ck}                   whole        0 1 1 1 3 3 3 3
diff {ck} {other}                     different    1 5 5 4 3 3 3 3
diff {other} {ck}                     different    1 5 5 4 3 3 3 3
diff {ck} {ck}                        same         0 0 0 4 3 3 3 3
pin {ck}                              pinned       0 0 0 4 3 3 3 3
unpin {ck}                            unpinned     0 0 0 4 3 3 3 3
prune {root} --last 1                 newest       0 0 0 0 0 0 3 3
prune {root} --last 1 --yes           newest       0 0 0 0 0 0 3 3
convert {ck} {dst} --codec zstd       to_write     0 5 5 4 3 3 3 3
convert {ck} {dst} --dry-run          to_write     0 0 0 4 3 3 3 3
convert {other} {dst} --like {ck}     to_write     0 0 0 4 3 3 3 3
export {ck} {dst}                     bytes_in     0 5 5 4 3 3 3 3
export {ck} {dst}.npz                 bytes_in     0 5 5 4 3 3 3 3
import {hf} {dst}                     3_leaves     0 0 4 4 3 3 4 3
import {npz} {dst}                    2_leaves     0 4 4 4 3 4 4 3
"""
"""A command, a word of what it prints, and its exit code on each of the inputs. A flip in
safetensors cannot be seen: they have no digests."""
ROWS = [line.rsplit(None, 1 + len(INPUTS)) for line in TABLE.strip().splitlines()]
CELLS = [
    pytest.param(command, given, word.replace("_", " "), int(code), id=f"{command}-{given}")
    for command, word, *codes in ROWS
    for given, code in zip(INPUTS, codes, strict=True)
]
ERRORS = {3: "NotFoundError", 4: "FormatError", 5: "IntegrityError"}


def state() -> dict[str, Any]:
    return {
        "params": {"kernel": np.arange(12.0).reshape(3, 4) + 0.1, "bias": np.ones(7)},
        "step": 7,
    }


def changed(change: Callable[[bytes], bytes], *patterns: str) -> Callable[[Path], None]:
    """Changes the last file that each pattern finds."""

    def act(place: Path) -> None:
        for pattern in patterns:
            file = sorted(place.glob(pattern))[-1]
            file.write_bytes(change(file.read_bytes()))

    return act


def flip_kernel(data: bytes) -> bytes:
    kernel = state()["params"]["kernel"].tobytes()
    return data.replace(kernel, bytes([kernel[0] ^ 1]) + kernel[1:])


def lose(place: Path) -> None:
    """What a save, a download of one of two files, and a download of one leave unfinished."""
    (place / "step_00000001" / "manifest.msgpack").unlink()
    next((place / "hf").glob("*-00002-of-*")).unlink()
    (place / "w.npz").unlink()


def replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def act(place: Path) -> None:
        for name in ("step_00000001", "hf", "w.npz"):
            target = place / name
            target.unlink() if target.is_file() else shutil.rmtree(target)
            make(target)

    return act


def foreign(target: Path) -> None:
    target.mkdir()
    (target / "model.bin").write_text("of somebody else")


DATA, NPZ, SHARD = "step_*/data-*/packed/*/c.0", "w.npz", "hf/*.safetensors"
MAKE: dict[str, Callable[[Path], object]] = {
    "good": lambda _: None,
    "flipped": changed(flip_kernel, DATA, NPZ, SHARD),
    "cut": changed(lambda data: data[:-1], DATA, NPZ, SHARD),
    "broken": changed(lambda _: b"\x80", "step_*/manifest.msgpack", NPZ, SHARD),
    "unfinished": lose,
    "foreign": replace(foreign),
    "file": replace(lambda target: target.write_text("no folder")),
    "missing": replace(lambda _: None),
}


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EntryPoint]:
    with entry_point(tmp_path_factory.mktemp("entry point")) as run:
        yield run


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("originals")
    pc.save(place / "step_00000001", state())
    pc.export_npz(place / "step_00000001", place / "w.npz")
    pc.export_safetensors(place / "step_00000001", place / "hf", max_file_nbytes=100)
    pc.save(place / "other", {**state(), "params": {"kernel": np.zeros((3, 4))}})
    return place


@pytest.fixture
def places(originals: Path, tmp_path: Path, given: str) -> dict[str, Path]:
    """What is given in place of a checkpoint, of a root, and of files to import."""
    place = tmp_path / "a place"
    shutil.copytree(originals, place)
    (place / "other").rename(tmp_path / "other")
    MAKE[given](place)
    step = place / "step_00000001"
    of_others = given in ("foreign", "file", "missing")
    found = {"ck": step, "root": step if of_others else place, "other": tmp_path / "other"}
    return {**found, "hf": place / "hf", "npz": place / "w.npz"}


@pytest.mark.parametrize(("command", "given", "word", "code"), CELLS)
def test_a_command_ends_as_the_page_says(
    command_line: EntryPoint,
    places: dict[str, Path],
    tmp_path: Path,
    command: str,
    given: str,
    word: str,
    code: int,
) -> None:
    def run(dst: str, *options: str) -> Any:
        parts = (part.format(**places, dst=tmp_path / dst) for part in command.split())
        return command_line(*parts, *options)

    fails = code > 1
    if given in ("good", "flipped", "cut"):  # an error is said in the same way whatever it is
        text = run("as text")
        assert (text.code, bool(text.err), bool(text.out)) == (code, fails, not fails), text
        assert given != "good" or word in text.out + text.err
    done = run("as json", "--json")
    assert (done.code, bool(done.err)) == (code, fails), done
    assert "Traceback" not in done.err
    found = json.loads(done.out)
    name = "show LEAF" if command.startswith("show {ck} ") else command.split()[0]
    if name != "verify" and fails:
        assert not misfits(found, {"error": {"kind": str, "text": str}})
        assert found["error"]["kind"] == ERRORS[code]
    else:
        assert misfits(found, SHAPES[name]) == []
    if name == "verify":
        assert [error["kind"] for error in found["errors"]] == [ERRORS.get(code)] * fails
        damage = [d["path"] for report in found["checkpoints"] for d in report["damage"]]
        assert given != "flipped" or damage == ["params/kernel"] * code


def test_every_command_is_in_the_table() -> None:
    assert {command.split()[0] for command, *_ in ROWS} == set(main.commands)


@pytest.mark.parametrize("command", main.commands)
def test_a_wrong_command_line_prints_no_object(command_line: EntryPoint, command: str) -> None:
    done = command_line(command, "--json", "--no-such-option")
    assert (done.code, done.out) == (2, "")
    assert "No such option" in done.err


# --- completion -------------------------------------------------------------------------------

COMPLETE = """
{line}
COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
compopt() {{ echo "names: $2"; }}
_pytree_ckpt_completion pytree-ckpt
printf '%s\n' "${{COMPREPLY[@]}}"
"""


def shell(tmp_path: Path, text: str) -> str:
    """What bash prints, where the command is on the path."""
    folder = script(tmp_path).parent
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stderr == ""
    return done.stdout


def lines_of_the_page() -> dict[str, str]:
    """What the page tells to give to each shell."""
    found = re.findall(r"^\$ (.*=(\w+)_source pytree-ckpt.*?) +# (\w+)", PAGE.read_text(), re.M)
    assert all(shell == comment for _, shell, comment in found)
    return {shell: line for line, shell, _ in found}


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_page_tells_each_shell_how_to_complete(tmp_path: Path, name: str) -> None:
    (made,) = re.findall(
        rf"_PYTREE_CKPT_COMPLETE={name}_source pytree-ckpt", lines_of_the_page()[name]
    )
    text = shell(tmp_path, made)
    assert f"_PYTREE_CKPT_COMPLETE={name}_complete" in text
    assert "_pytree_ckpt_completion" in text


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("pytree-ckpt ve", ["verify"]),
        ("pytree-ckpt verify --q", ["--quick"]),
        ("pytree-ckpt convert a b --codec ''", ["raw", "zstd"]),
        ("pytree-ckpt verify runs/", ["names: default"]),
        ("pytree-ckpt report a -o pa", ["names: default"]),
    ],
)
def test_bash_completes_commands_options_and_paths(
    tmp_path: Path, words: str, offered: list[str]
) -> None:
    text = COMPLETE.format(line=lines_of_the_page()["bash"], words=words)
    assert shell(tmp_path, text).split("\n")[:-1] in (offered, [*offered, ""])
