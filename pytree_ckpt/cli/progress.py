"""How far a command is, on a terminal: bytes, rate, time left."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pytree_ckpt.cli.output import console
from pytree_ckpt.options import Progress
from pytree_ckpt.pictures.text import plain


@contextmanager
def progress(what: str) -> Iterator[Progress | None]:
    """A bar on stderr while the block runs; None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(plain(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
