"""docs/cli.md says what `--help` says, and describes every object that is printed."""

import re

import pytest

from tests.cli_reference import PAGE, up_to_date
from tests.cli_shapes import SHAPES


def test_the_page_says_what_help_says() -> None:
    page = PAGE.read_text()
    assert up_to_date(page) == page, "python -m tests.cli_reference writes it"


@pytest.mark.parametrize("command", SHAPES)
def test_every_key_of_an_object_is_described(command: str) -> None:
    described = set(re.findall(r"`(\w+)`", row_of(command)))
    if command == "ls":
        described |= set(re.findall(r"`(\w+)`", row_of("show")))
    if command == "show LEAF":
        described |= set(re.findall(r"`(\w+)`", row_of("tree")))
    assert keys(SHAPES[command]) <= described


def row_of(command: str) -> str:
    names = {"show": "`show CK`", "show LEAF": "`show CK LEAF`"}
    names |= dict.fromkeys(("pin", "unpin"), "`pin`, `unpin`")
    name = names.get(command, f"`{command}`")
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", PAGE.read_text(), flags=re.MULTILINE)
    return row


def keys(shape: object) -> set[str]:
    if isinstance(shape, (list, tuple)):
        return set().union(*map(keys, shape))
    return set(shape).union(*map(keys, shape.values())) if isinstance(shape, dict) else set()
