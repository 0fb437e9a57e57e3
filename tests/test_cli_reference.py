"""docs/cli.md says what `--help` says, and describes every object that is printed."""

import re
from pathlib import Path

import numpy as np
import pytest

import pytree_ckpt as pc
from pytree_ckpt.cli.main import main
from tests.cli_reference import PAGE, up_to_date
from tests.test_cli import run_json


def test_the_page_says_what_help_says() -> None:
    page = PAGE.read_text()
    assert up_to_date(page) == page, "python -m tests.cli_reference writes it"


@pytest.mark.parametrize("command", [*main.commands, "show LEAF"])
def test_every_key_of_an_object_is_described(command: str, tmp_path: Path) -> None:
    step = pc.step_path(tmp_path, 1)
    pc.save(step, {"w": np.ones(3), "v": 1}, metadata={"m": 1})
    other = pc.step_path(tmp_path, 2)
    pc.save(other, {"w": np.zeros(3), "v": 1})
    (file,) = other.glob("data-*/packed/*/c.0")
    arguments = {
        "ls": ("ls", tmp_path),
        "pin": ("pin", step),
        "unpin": ("unpin", step),
        "prune": ("prune", tmp_path, "--last", 1),
        "diff": ("diff", step, other),
        "report": ("report", step, "-o", f"{tmp_path}/a.html"),
        "show": ("show", step),
        "tree": ("tree", step),
        "verify": ("verify", other),
        "convert": ("convert", step, tmp_path / "converted"),
        "export": ("export", step, tmp_path / "w.safetensors"),
        "import": ("import", tmp_path / "w.safetensors", tmp_path / "imported"),
        "show LEAF": ("show", step, "w", "--stats"),
    }
    if command == "verify":
        file.write_bytes(b"\0" + file.read_bytes()[1:])
    if command == "import":
        run_json(*arguments["export"])
    _, found = run_json(*arguments[command])
    described = set(re.findall(r"`(\w+)`", row_of(command)))
    if command == "ls":
        described |= set(re.findall(r"`(\w+)`", row_of("show CK")))
    if command == "show LEAF":
        described |= set(re.findall(r"`(\w+)`", row_of("tree")))
    assert keys(found) <= described


def row_of(command: str) -> str:
    names = {"show": "`show CK`", "show LEAF": "`show CK LEAF`"}
    names |= dict.fromkeys(("pin", "unpin"), "`pin`, `unpin`")
    name = names.get(command, f"`{command}`")
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", PAGE.read_text(), flags=re.MULTILINE)
    return row


def keys(value: object) -> set[str]:
    """All keys, but those that come from the checkpoint itself."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if isinstance(value, dict):
        own = {"versions", "metadata", "metrics", "seconds"}
        below = (keys(item) for key, item in value.items() if key not in own)
        return set(value).union(*below)
    return set()
