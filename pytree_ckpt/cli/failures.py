"""Exit codes, and which error has which."""

import os
import sys
from collections.abc import Mapping

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


def end_quietly() -> int:
    """Let nothing more be written to a pipe that nobody reads; the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
