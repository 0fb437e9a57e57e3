"""Every promise on the page of guarantees names a test or a campaign, and these exist."""

import re
from pathlib import Path

import pytest

from tests.faults import mutants
from tests.faults.__main__ import CAMPAIGNS
from tests.faults.scenarios import all_scenarios

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "guarantees.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
QUOTED = re.compile(r"`([a-z-]+)`")


def backers(text: str) -> list[str]:
    """The tests and campaigns that a text names."""
    files = [f"{file}::{name}" for file, name in NAMED.findall(text)]
    return files + [word for word in QUOTED.findall(text) if word in CAMPAIGNS]


def promises(section: str) -> list[str]:
    """The rows of a table "promise, backed by", and the entries of lists."""
    rows = re.findall(r"^\| ([A-Z`].+) \|$", section, re.MULTILINE)
    return rows + re.findall(r"^- .+?(?=^- |^$|\Z)", section, re.MULTILINE | re.DOTALL)


LOCAL = promises(SECTIONS["On a local file system"])


def test_there_are_promises_to_look_at() -> None:
    assert len(LOCAL) > 20
    assert "Not promised" in SECTIONS


@pytest.mark.parametrize("promise", LOCAL, ids=range(len(LOCAL)))
def test_a_promise_names_what_backs_it(promise: str) -> None:
    backed_by = promise.rpartition(" | ")[2]
    assert backers(backed_by) or re.search(r'mutant ".+"', backed_by), promise


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_names_what_backs_it(section: str) -> None:
    assert backers(SECTIONS[section])


@pytest.mark.parametrize("file_and_name", sorted(set(NAMED.findall(PAGE))), ids="::".join)
def test_a_named_test_exists(file_and_name: tuple[str, str]) -> None:
    file, name = file_and_name
    source = (REPOSITORY / file).read_text()
    assert not name or re.search(rf"^def {name}\(", source, re.MULTILINE)


def test_named_mutants_and_scenarios_exist() -> None:
    for name in re.findall(r'mutant "(.+?)"', PAGE):
        assert name in {mutant.name for mutant in mutants.ALL}
    scenarios = {scenario.name.partition(",")[0] for scenario in all_scenarios()}
    for campaigns, names in re.findall(r"((?:`\w+`(?:, )?)+): ([a-z, ]+?) (?:\||;)", PAGE):
        if set(QUOTED.findall(campaigns)) <= {"kill", "replay", "restart", "power"}:
            assert {name.strip() for name in names.split(",")} <= scenarios | {"all linked"}


def test_every_campaign_backs_a_promise() -> None:
    assert set(CAMPAIGNS) <= set(QUOTED.findall(PAGE))
