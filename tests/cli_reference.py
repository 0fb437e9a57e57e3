"""`python -m tests.cli_reference` writes docs/cli.md anew where `--help` and the exit codes are."""

import re
from pathlib import Path

from click.testing import CliRunner

from pytree_ckpt.cli.failures import MEANINGS
from pytree_ckpt.cli.main import main

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def exit_codes() -> str:
    rows = [f"| {code} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n".join(["| code | meaning |", "|---|---|", *rows])


def reference() -> str:
    parts = []
    for name in ("", *main.commands):
        command = [name, "--help"] if name else ["--help"]
        done = CliRunner().invoke(main, command, prog_name="pytree-ckpt", terminal_width=88)
        title = f"### {name}\n\n" if name else ""
        parts.append(f"{title}```text\n{done.stdout}```")
    return "\n\n".join(parts)


def up_to_date(page: str) -> str:
    """The page with each part between its marks made anew."""
    for name, text in (("exit codes", exit_codes()), ("reference", reference())):
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = f"{re.escape(marks[0])}.*?{re.escape(marks[1])}"
        new = f"{marks[0]}\n{text}\n{marks[1]}"
        page, count = re.subn(pattern, lambda _, new=new: new, page, flags=re.DOTALL)
        assert count == 1, f"{PAGE} has not one part for {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(up_to_date(PAGE.read_text()))
