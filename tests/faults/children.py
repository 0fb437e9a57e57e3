"""Runs an action in a forked child that a fault hits, and hears what it got done before."""

import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import shim
from tests.faults.shim import Fault

TIMEOUT_S = 120.0
Acknowledge = Callable[[str], None]
Action = Callable[[Path, Acknowledge], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended: killed by the fault, with an error, or well.

    Attributes:
        acks: What it acknowledged, in order.
        error: `(class names from the class up, text)` of what it raised.
        operations: How many there were; 0 if it was killed.
        hung: It did not end in time.
    """

    acks: list[str] = field(default_factory=list)
    error: tuple[list[str], str] | None = None
    operations: int = 0
    killed: bool = False
    hung: bool = False


def scratch() -> Path:
    """A fresh folder in memory where there is one; its name has no links."""
    shm = Path("/dev/shm")
    base = shm if shm.is_dir() and os.access(shm, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="pytree_ckpt-faults-", dir=base)).resolve()


def run(
    action: Action,
    root: Path,
    *,
    below: Path | None = None,
    fault: Fault | None = None,
    log: Path | None = None,
    plug_fd: int = -1,
    kill_after_s: float | None = None,
) -> Ended:
    """Run `action(root, acknowledge)` in a forked child; the fault counts operations `below`.

    This process must have no threads.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(action, root, below or root, fault, log, plug_fd, writer)
    os.close(writer)
    return _follow(pid, reader, kill_after_s)


def _child(
    action: Action,
    root: Path,
    below: Path,
    fault: Fault | None,
    log: Path | None,
    plug_fd: int,
    writer: int,
) -> None:
    def tell(kind: str, what: Any) -> None:
        os.write(writer, json.dumps([kind, what]).encode() + b"\n")

    def acknowledge(text: str) -> None:
        if log is not None:
            shim.note(text)
        tell("ack", text)

    code = 0
    try:
        if fault is not None or log is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            log_fd = -1 if log is None else os.open(log, flags, 0o600)
            shim.arm(below, fault or Fault(), log_fd=log_fd, plug_fd=plug_fd)
        action(root, acknowledge)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        names = [kind.__name__ for kind in type(error).__mro__]
        tell("error", [names, f"{type(error).__name__}: {error}"[:2000]])
        code = 1
    if fault is not None or log is not None:
        tell("count", shim.count())
    os._exit(code)


def _follow(pid: int, reader: int, kill_after_s: float | None) -> Ended:
    started = time.monotonic()
    data = b""
    hung = False
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            limit = TIMEOUT_S if kill_after_s is None else kill_after_s
            left = started + limit - time.monotonic()
            ready = select.select([pipe], [], [], max(left, 0))[0]
            if not ready:
                hung = kill_after_s is None
                os.kill(pid, signal.SIGKILL)
                kill_after_s = TIMEOUT_S
                continue
            piece = pipe.read(65536)
            if not piece:
                break
            data += piece
    _, status = os.waitpid(pid, 0)
    told = [json.loads(line) for line in data.splitlines() if line.endswith(b"]")]
    errors = [what for kind, what in told if kind == "error"]
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number not in (0, signal.SIGKILL):
        errors.append([["Signal"], f"it died of {signal.Signals(number).name}"])
    return Ended(
        acks=[what for kind, what in told if kind == "ack"],
        error=tuple(errors[0]) if errors else None,
        operations=next((what for kind, what in told if kind == "count"), 0),
        killed=number == signal.SIGKILL and not hung,
        hung=hung,
    )
