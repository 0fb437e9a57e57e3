"""Typed access to decoded msgpack, where every surprise is a `FormatError`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pytree_ckpt.errors import FormatError


class Reader:
    """A decoded map whose fields are asked for by name and type."""

    __slots__ = ("_content", "_what")

    def __init__(self, content: Any, what: str) -> None:
        if not isinstance(content, dict):
            raise FormatError(f"{what} has a {type(content).__name__} where a map belongs")
        self._content = content
        self._what = what

    @staticmethod
    @contextmanager
    def errors(what: str) -> Iterator[None]:
        """Turn a broken invariant into a `FormatError`."""
        try:
            yield
        except FormatError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            raise FormatError(f"{what} is not valid: {error}") from None

    def _get(self, key: str, kind: type) -> Any:
        value = self._content.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FormatError(f"{self._what} has no valid field {key!r}")
        return value

    def has(self, key: str) -> bool:
        """Whether the field is there and not None."""
        return self._content.get(key) is not None

    def integer(self, key: str) -> int:
        value: int = self._get(key, int)
        return value

    def count(self, key: str) -> int:
        """A non-negative integer."""
        value = self.integer(key)
        if value < 0:
            raise FormatError(f"{self._what} has a negative {key!r}")
        return value

    def number(self, key: str) -> float:
        value: float = self._get(key, float)
        if value != value:
            raise FormatError(f"{self._what} has a NaN in {key!r}")
        return value

    def text(self, key: str) -> str:
        value: str = self._get(key, str)
        return value

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if self.has(key) else None

    def binary(self, key: str) -> bytes:
        value: bytes = self._get(key, bytes)
        return value

    def flag(self, key: str) -> bool:
        value: bool = self._get(key, bool)
        return value

    def list(self, key: str) -> list[Any]:
        value: list[Any] = self._get(key, list)
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value: dict[str, Any] = self._get(key, dict)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.list(key)
        if not all(isinstance(v, str) for v in value):
            raise FormatError(f"{self._what} has something that is not text in {key!r}")
        return tuple(value)

    def ints(self, key: str) -> tuple[int, ...]:
        value = self.list(key)
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise FormatError(f"{self._what} has something that is not an int in {key!r}")
        return tuple(value)

    def optional_ints(self, key: str, length: int) -> tuple[int, ...] | None:
        if not self.has(key):
            return None
        value = self.ints(key)
        if len(value) != length:
            raise FormatError(f"{self._what} has {len(value)} numbers in {key!r}, not {length}")
        return value

    def column(self, key: str, dtype: str) -> npt.NDArray[np.int64]:
        """A column of fixed-width little-endian integers, as int64."""
        data = self.binary(key)
        width = np.dtype(dtype).itemsize
        if len(data) % width:
            raise FormatError(f"{self._what} has a column {key!r} of {len(data)} bytes")
        values = np.frombuffer(data, dtype)
        if width == 8 and len(values) and values.max() > np.iinfo(np.int64).max:
            raise FormatError(f"{self._what} has a number beyond 63 bits in {key!r}")
        return values.astype(np.int64)
