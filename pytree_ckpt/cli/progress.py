"""How far a command is, on a terminal: bytes, rate, time left."""

from contextlib import AbstractContextManager

from pytree_ckpt.options import Progress
from pytree_ckpt.pictures.text import plain
from pytree_ckpt.progress import showing


def progress(what: str) -> AbstractContextManager[Progress | None]:
    """A bar on stderr while the block runs; None where nobody would see it."""
    return showing(plain(what), True)
