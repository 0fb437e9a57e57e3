"""An S3 server that others wrote, on loopback, behind a wire that a test cuts, counts and bends."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

PATIENCE_S = 60


@contextlib.contextmanager
def moto() -> Iterator[int]:
    """A running `moto_server`; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(port, server)
            yield port
        finally:
            server.kill()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/data.json", timeout=5):
                return
        except urllib.error.URLError:
            if server.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.05)


def make_bucket(port: int, name: str) -> None:
    """A bucket that everybody may write to."""
    url = f"http://127.0.0.1:{port}/{name}"
    headers = {"x-amz-acl": "public-read-write"}
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)):
        return


class Wire:
    """Passes connections on to a server, until it is cut; remembers what was asked.

    What it hides is unreadable for the server.
    """

    def __init__(self, port: int, *, hide: bytes = b"") -> None:
        self._to = port
        self.hide = hide
        self._last: re.Pattern[bytes] | None = None
        self._asked: list[bytes] = []
        self._open: list[socket.socket] = []
        self._listen(0)
        self.port = self._server.getsockname()[1]

    def _listen(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", port))
        self._accepting = threading.Thread(target=self._accept, args=(self._server,), daemon=True)
        self._accepting.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, text: bytes) -> int:
        """How often a request has had this text."""
        return b"".join(self._asked).count(text)

    def cut_at(self, pattern: bytes) -> None:
        """Cut it as soon as a request matches, which the server does not get to see."""
        self._last = re.compile(pattern)

    def cut(self) -> None:
        """From now on nobody answers here."""
        # A thread that waits in accept() keeps the port open until it is woken.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._server.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Answer again, at the same port."""
        self._last = None
        self._listen(self.port)

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = server.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                for pair in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if asks:
                    self._asked.append(data[:4096])
                    if self._last and self._last.search(data):
                        return self.cut()
                    if self.hide:
                        data = data.replace(self.hide, b"x" * len(self.hide))
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def other_settings() -> list[str]:
    """Names of the variables that would make a test talk to something else."""
    return [name for name in os.environ if name.startswith(("AWS_", "STORAGE_EMULATOR"))]


@contextlib.contextmanager
def pointed_to(port: int) -> Iterator[None]:
    """The environment of those who want to talk to this server."""
    before = {name: os.environ.pop(name) for name in other_settings()}
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    try:
        yield
    finally:
        del os.environ["AWS_ENDPOINT_URL"]
        os.environ.update(before)
