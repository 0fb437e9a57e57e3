"""The other processes of a conversion, where one call is to start them all."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import IO, Any

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.plan.layouts import Layout


@contextmanager
def started(settings: Mapping[str, Any], workers: int) -> Iterator[Callable[[], None]]:
    """The other processes; yields a check that none of them has failed."""
    command = [sys.executable, "-m", __name__]
    helpers: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    def check() -> None:
        for helper, said in helpers:
            if helper.poll():
                said.seek(0)
                reason = said.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise CheckpointError(f"a process of the conversion failed: {reason}")

    with ExitStack() as stack:
        for number in range(1, workers):
            # A file, because who writes to a pipe that is full waits for a reader.
            said = stack.enter_context(tempfile.TemporaryFile())
            text = json.dumps({**settings, "process": [number, workers]}, default=list)
            helper = stack.enter_context(subprocess.Popen([*command, text], stderr=said))
            stack.callback(helper.kill)
            helpers.append((helper, said))
        yield check
        for helper, _ in helpers:
            helper.wait()
        check()


def _run_process(text: str) -> None:
    """Do the part of one process of a conversion that another process has started."""
    from pytree_ckpt.verbs.convert import convert

    settings = json.loads(text)
    if isinstance(settings["layout"], dict):
        settings["layout"] = Layout(**settings["layout"])
    settings["process"] = tuple(settings["process"])
    settings["options"] = SaveOptions(**settings["options"])
    convert(**settings)


if __name__ == "__main__":
    _run_process(sys.argv[1])
