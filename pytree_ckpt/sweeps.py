"""Python's collector of cycles, kept from walking a large heap again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_sweeps() -> Iterator[None]:
    """Make many objects that live on, without a collection meanwhile.

    Whoever makes them by the ten thousand sets off full collections, and each walks all objects
    of the process, of which JAX alone has half a million. For short blocks only: what other
    threads drop in cycles waits until the end. Blocks may overlap, also on several threads.

    Example:
        >>> with no_sweeps():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
