"""As much of Google's object store as TensorStore asks for: objects with generations, in memory."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[bytes, int]]
    lock: threading.Lock

    def do_GET(self) -> None:
        with self.lock:
            name = self._name()
            if name is None:
                self._list()
            elif name not in self.objects:
                self._answer(404)
            else:
                self._send(*self.objects[name])

    def _list(self) -> None:
        query = self._query()
        start, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
        items = [self._about(name) for name in sorted(self.objects) if start <= name < end]
        self._answer(200, json.dumps({"items": items}).encode())

    def _send(self, data: bytes, generation: int) -> None:
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", ""))
        if found is None:
            self._answer(200, data, generation)
            return
        first, last = found.groups()
        start = int(first) if first else max(len(data) - int(last), 0)
        stop = min(int(last) + 1, len(data)) if first and last else len(data)
        self._answer(206, data[start:stop], generation, f"bytes {start}-{stop - 1}/{len(data)}")

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        with self.lock:
            name = self._query()["name"]
            if not self._is_met(name):
                self._answer(412)
                return
            self.objects[name] = data, max((g for _, g in self.objects.values()), default=0) + 1
            self._answer(200, json.dumps(self._about(name)).encode())

    def do_DELETE(self) -> None:
        with self.lock:
            name = self._name() or ""
            code = 404 if name not in self.objects else 204 if self._is_met(name) else 412
            if code == 204:
                del self.objects[name]
            self._answer(code)

    def _is_met(self, name: str) -> bool:
        wanted = self._query().get("ifGenerationMatch")
        return wanted is None or int(wanted) == self.objects.get(name, (b"", 0))[1]

    def _name(self) -> str | None:
        found = re.fullmatch(r"/storage/v1/b/[^/]+/o/(.+)", urlsplit(self.path).path)
        return None if found is None else unquote(found[1])

    def _query(self) -> dict[str, str]:
        return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}

    def _about(self, name: str) -> dict[str, str]:
        data, generation = self.objects[name]
        return {"name": name, "generation": str(generation), "size": str(len(data))}

    def _answer(self, code: int, body: bytes = b"", generation: int = 0, part: str = "") -> None:
        self.send_response(code)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-goog-generation", str(generation))
        if part:
            self.send_header("content-range", part)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


@contextlib.contextmanager
def fake_gcs() -> Iterator[str]:
    """A server without objects; yields host and port."""
    handler = type("Handler", (_Handler,), {"objects": {}, "lock": threading.Lock()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
