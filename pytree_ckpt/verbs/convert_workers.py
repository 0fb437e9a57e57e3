"""The other processes of a conversion, where one call is to start them all."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.options import SaveOptions
from pytree_ckpt.plan.layouts import Layout


@contextmanager
def started(settings: Mapping[str, Any], workers: int) -> Iterator[Callable[[], None]]:
    """The other processes; yields a check that none of them has failed."""
    command = [sys.executable, "-m", __name__]
    helpers = [
        subprocess.Popen(
            [*command, json.dumps({**settings, "process": [number, workers]}, default=list)],
            stderr=subprocess.PIPE,
        )
        for number in range(1, workers)
    ]

    def check() -> None:
        for helper in helpers:
            if helper.poll():
                text = (helper.stderr.read() if helper.stderr else b"").decode(errors="replace")
                reason = text.strip().rpartition("\n")[2]
                raise CheckpointError(f"a process of the conversion failed: {reason}")

    try:
        yield check
        for helper in helpers:
            helper.wait()
        check()
    finally:
        for helper in helpers:
            helper.kill()
            helper.communicate()


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
