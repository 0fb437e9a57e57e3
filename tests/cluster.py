"""Several processes with JAX's distributed runtime over loopback, that run functions of tests."""

import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, Self

_MEMBER = "import sys; from tests.cluster import member; member(*sys.argv[1:])"
REPOSITORY = Path(__file__).parents[1]
PATIENCE_S = 60
"""Longer than anything here takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An exception in a member, as it crosses to the test."""

    kind: str
    text: str
    trace: str
    bases: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dead:
    """A member that has ended, by this exit status, before it answered."""

    status: int


class Cluster:
    """`count` processes with `devices` CPU devices each."""

    def __init__(self, count: int, devices: int, *, heartbeat_s: int = 10) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.logs = [Path(self._folder.name, f"{index}.log") for index in range(count)]
        address, port = f"{self._folder.name}/test", _free_port()
        with Listener(address, "AF_UNIX", backlog=count) as listener:
            self.members = [
                self._start(address, port, count, index, devices, heartbeat_s)
                for index in range(count)
            ]
            found: dict[int, Connection] = {}
            for _ in range(count):
                connection = listener.accept()
                found[connection.recv()] = connection
        self._connections = [found[index] for index in range(count)]
        for index in range(count):
            assert self.answer(index) == "ready", self.logs[index].read_text()

    def _start(self, address: str, port: int, *rest: int) -> "subprocess.Popen[bytes]":
        with self.logs[rest[1]].open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _MEMBER, address, str(port), *map(str, rest)],
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
            )

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have every member call a function of a test module."""
        for connection in self._connections:
            connection.send((function.__module__, function.__qualname__, args, kwargs))

    def end(self) -> list[Any]:
        """What each member returned, or how it `Failed`, or that it is `Dead`."""
        return [self.answer(index) for index in range(len(self.members))]

    def outcomes(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call it, and wait for all."""
        self.begin(function, *args, **kwargs)
        return self.end()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As `outcomes`, but all must return."""
        found = self.outcomes(function, *args, **kwargs)
        for index, outcome in enumerate(found):
            assert not isinstance(outcome, Failed), f"process {index}: {outcome.trace}"
            assert not isinstance(outcome, Dead), self.logs[index].read_text()
        return found

    def answer(self, index: int) -> Any:
        """As `end`, of one member."""
        connection, member = self._connections[index], self.members[index]
        assert wait([connection], PATIENCE_S), f"process {index} does not answer"
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            return Dead(member.wait(PATIENCE_S))

    def is_alive(self) -> bool:
        return all(member.poll() is None for member in self.members)

    def close(self) -> None:
        for member in self.members:
            member.kill()
            member.wait()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def member(address: str, port: str, count: str, index: str, devices: str, beat: str) -> None:
    """Call what the test sends, as long as the test lives."""
    os.environ.pop("XLA_FLAGS", None)
    with Client(address, "AF_UNIX") as test:
        test.send(int(index))
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(devices))
        jax.distributed.initialize(
            f"127.0.0.1:{port}", int(count), int(index), heartbeat_timeout_seconds=int(beat)
        )
        assert jax.device_count() == int(count) * int(devices)
        test.send("ready")
        while True:
            try:
                module, name, args, kwargs = test.recv()
            except EOFError:
                os._exit(0)
            test.send(_outcome(module, name, args, kwargs))


def _outcome(module: str, name: str, args: Any, kwargs: Any) -> Any:
    import importlib

    try:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - told to the test
        wanted = ("missing", "failures", "errno")
        return Failed(
            kind=type(error).__name__,
            text=str(error),
            trace="".join(traceback.format_exception(error)),
            bases=tuple(base.__name__ for base in type(error).__mro__),
            attributes={n: getattr(error, n) for n in wanted if hasattr(error, n)},
        )
