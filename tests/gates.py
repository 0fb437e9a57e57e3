"""Points in a save where a test stops it, looks around, and lets it go on."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pytree_ckpt.store.writing import Writer

PATIENCE_S = 60
"""Longer than anything here takes; a test that waits so long has failed."""


class Gate:
    """Holds the thread that comes to `pass_through` until it is opened."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def pass_through(self) -> None:
        self._reached.set()
        if not self._opened.wait(PATIENCE_S):
            raise AssertionError("nobody opened the gate")

    def wait_until_reached(self) -> None:
        assert self._reached.wait(PATIENCE_S), "nobody came to the gate"

    def open(self) -> None:
        self._opened.set()


def before_writing(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Every save does `action` when it has its folder, and nothing is in it yet."""
    write = Writer.write

    def acting(self: Writer, *args: Any) -> Any:
        action()
        return write(self, *args)

    monkeypatch.setattr(Writer, "write", acting)


def after_writing(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Every save does `action` when its data is written, and nothing is committed yet."""
    write = Writer.write

    def acting(self: Writer, *args: Any) -> Any:
        found = write(self, *args)
        action()
        return found

    monkeypatch.setattr(Writer, "write", acting)


class FullDisk:
    """An action that fails as a full disk does, while `is_full`."""

    def __init__(self) -> None:
        self.is_full = True

    def __call__(self) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
