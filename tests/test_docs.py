"""What the pages of the documentation show can be run."""

import os
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["quickstart.md", "layouts.md"])
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.M)
    assert blocks
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), page, "exec"), {})
    assert os.listdir(tmp_path)


def test_every_page_is_reached_from_the_menu() -> None:
    menu = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(re.findall(r"[\w/]+\.md", menu)) == pages, "mkdocs.yml lists the pages"
