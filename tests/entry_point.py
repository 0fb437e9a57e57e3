"""The command as it is installed: the script itself, in a process of its own for every command."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORKING = """
import json, os, runpy, sys
sys.modules["jax"] = None  # whoever imports it fails
import pytree_ckpt.cli.documents, pytree_ckpt.cli.drawing  # what most commands need, once
import pytree_ckpt.verbs.convert, pytree_ckpt.interop.orbax
for line in sys.stdin:
    argv, *files = json.loads(line)
    if not (child := os.fork()):
        for number, file in enumerate((os.devnull, *files)):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666), number)
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs a script in a fork of itself for each line: imports cost more than most commands."""


def script(folder: Path) -> Path:
    """The script of the environment, or what an installer would write where there is none."""
    found = Path(sys.executable).with_name("pytree-ckpt")
    if found.exists():
        return found
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["pytree-ckpt"].split(":")
    made = folder / "pytree-ckpt"
    made.write_text(
        f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\n"
        f"if __name__ == '__main__':\n    sys.exit({function}())\n"
    )
    made.chmod(0o755)
    return made


def installed(folder: Path, *args: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    """A command in a process of its own; the script is made in `folder` where there is none."""
    command = [str(script(folder)), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command left: its exit code and its two streams."""

    code: int
    out: str
    err: str


class EntryPoint:
    """Runs the script; what it imports is there already."""

    def __init__(self, server: "subprocess.Popen[str]", folder: Path) -> None:
        self._server, self._script = server, str(script(folder))
        self._files = folder / "stdout", folder / "stderr"

    def __call__(self, *args: object) -> Done:
        assert self._server.stdin
        assert self._server.stdout
        argv = [self._script, *map(str, args)]
        self._server.stdin.write(json.dumps([argv, *map(str, self._files)]) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        out, err = (file.read_text() for file in self._files)
        return Done(code=code, out=out, err=err)


@contextmanager
def entry_point(folder: Path) -> Iterator[EntryPoint]:
    """The entry point, until the end of the block; `folder` is for what it writes."""
    # A thread of numpy's would be one too many for a fork.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORKING], env=environment, **pipes) as server:
        yield EntryPoint(server, folder)
        assert server.stdin
        server.stdin.close()
