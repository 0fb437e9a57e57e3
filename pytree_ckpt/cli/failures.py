"""Exit codes, and which error has which."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping

import click

from pytree_ckpt.errors import (
    CheckpointError,
    ExistsError,
    FormatError,
    IntegrityError,
    MismatchError,
    NotFoundError,
    PeerTimeoutError,
    UnsupportedLeafError,
)

OK = 0
FOUND = 1
FAULT = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

MEANINGS: Mapping[int, str] = {
    OK: "it is done; what was checked is whole, what was compared is the same",
    FOUND: "`verify` found damage, `diff` found differences",
    2: "the command line is wrong",
    3: "there is no checkpoint, no such leaf in it, or nothing to import (`NotFoundError`)",
    4: "no file of a checkpoint, or of a version that this release cannot read (`FormatError`)",
    5: "the bytes are not those that were saved (`IntegrityError`)",
    6: "the request does not fit the checkpoint (`MismatchError`, `UnsupportedLeafError`)",
    7: "something is in the way of what is to be written (`ExistsError`)",
    8: "the storage failed or refused (`OSError`)",
    9: "another process did not answer (`PeerTimeoutError`)",
    10: "any other error that the library names (`CheckpointError`), or a package that is missing",
    FAULT: "a fault of this program itself, with a traceback",
    INTERRUPTED: "Ctrl-C; nothing is committed",
    BROKEN_PIPE: "whoever read the output went away, as `head` does",
}
"""The table in docs/cli.md."""

_CODES: Mapping[type[Exception], int] = {
    NotFoundError: 3,
    FormatError: 4,
    IntegrityError: 5,
    MismatchError: 6,
    UnsupportedLeafError: 6,
    ExistsError: 7,
    PeerTimeoutError: 9,
    CheckpointError: 10,
    ImportError: 10,
    BrokenPipeError: BROKEN_PIPE,
    OSError: 8,
}
"""The first that fits counts."""


def exit_code(error: Exception) -> int:
    """The exit code of an error that a command ended with.

    Example:
        >>> exit_code(NotFoundError("nothing there")), exit_code(PermissionError())
        (3, 8)
    """
    return next(code for kind, code in _CODES.items() if isinstance(error, kind))


def fault() -> int:
    """Print what nobody foresaw; the exit code, for which Python's own would mean damage."""
    with contextlib.suppress(OSError):
        traceback.print_exc()
    return FAULT


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Say as click does what is wrong with a value; what the library names is raised as it is."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@contextlib.contextmanager
def any_streams() -> Iterator[None]:
    """Go on whatever becomes of what is printed.

    A stream that is closed is the null device: a file that is opened would get its number, and
    all that anybody prints. One that takes nothing more is it in the end, when Python flushes it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, errors="backslashreplace"))  # noqa: SIM115
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
