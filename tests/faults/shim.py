"""The preloaded library that counts file operations, and kills or fails at the N-th of them."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

SOURCE = Path(__file__).with_name("shim.c")
Action = Literal["nothing", "kill", "fail", "short", "torn", "shutdown"]
_ACTIONS = ("nothing", "kill", "fail", "short", "torn", "shutdown")
CHANGE, SYNC, LOOK, GROW, WRITE = 1, 2, 4, 8, 16
"""Kinds of operations. GROW: changes that may need space; LOOK: opening what is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens at the `at`-th operation of `kinds`; with `sticky` at all later ones too.

    "kill" comes before the operation; "torn" in the middle of it if it is a write. `argument` is
    the errno of "fail", the flag of "shutdown".
    """

    action: Action = "nothing"
    at: int = 0
    argument: int = 0
    kinds: int = CHANGE | SYNC
    sticky: bool = False


def why_missing() -> str | None:
    """Why the shim cannot be used here, None if it can."""
    if sys.platform != "linux":
        return "the shim is for Linux"
    if shutil.which("cc") is None:
        return "there is no C compiler `cc`"
    return None


def build() -> Path:
    """The compiled shim, made once for each version of its source."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"pytree_ckpt-shim-{os.getuid()}"
    built = folder / f"{key}.so"
    if not built.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        made = folder / f"{key}.{os.getpid()}.tmp"
        command = [
            "cc",
            "-O1",
            "-shared",
            "-fPIC",
            "-o",
            str(made),
            str(SOURCE),
            "-ldl",
            "-lpthread",
        ]
        subprocess.run(command, check=True)
        made.rename(built)
    return built


def is_loaded() -> bool:
    return hasattr(_library(), "faults_arm")


def restart_with_shim(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the same command with the shim loaded."""
    os.environ["LD_PRELOAD"] = str(build())
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def arm(folder: Path, fault: Fault, *, log_fd: int = -1, plug_fd: int = -1) -> None:
    """Count from zero the operations below `folder`, which has no links in its name."""
    _library().faults_arm(
        os.fsencode(folder),
        _ACTIONS.index(fault.action),
        ctypes.c_long(fault.at),
        fault.argument,
        fault.kinds,
        int(fault.sticky),
        log_fd,
        plug_fd,
    )


def disarm() -> None:
    _library().faults_arm(b"", 0, ctypes.c_long(0), 0, 0, 0, -1, -1)


def count() -> int:
    """Operations since the shim was armed."""
    counted = _library().faults_count
    counted.restype = ctypes.c_long
    return int(counted())


def note(text: str) -> None:
    """Put what was promised into the log, in order with the operations."""
    _library().faults_note(text.encode())
