"""TensorStore reports every failure as `ValueError` or `KeyError`; here they get their names."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

_OS_ERROR = re.compile(r"(?:os_error_code='|\[OS error )(\d+)")
"""As TensorStore 0.1.86 writes it, and as 0.1.76 does."""
_BY_CURL = {"7": errno.ECONNREFUSED, "28": errno.ETIMEDOUT}
_CURL_ERROR = re.compile(r"curl_code='(\d+)'")
_BY_STATUS = {
    "NOT_FOUND": errno.ENOENT,
    "PERMISSION_DENIED": errno.EACCES,
    "UNAUTHENTICATED": errno.EACCES,
    "RESOURCE_EXHAUSTED": errno.ENOSPC,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
    "UNAVAILABLE": errno.ECONNREFUSED,
    "ABORTED": errno.ECONNABORTED,
}
_UNREADABLE = ("DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")


class UnreadableError(Exception):
    """Bytes that TensorStore cannot decode: damage, not a failure of the storage."""


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Raise what TensorStore reports while doing `what` as an `OSError`, or as unreadable bytes.

    Raises:
        OSError: The storage refused or failed; `FileNotFoundError`, `PermissionError` and so on
            by its error number.
        UnreadableError: The stored bytes are not what their Zarr metadata says.
    """
    try:
        yield
    except (ValueError, KeyError, NotImplementedError) as error:
        message = str(error)
        found = _OS_ERROR.search(message)
        if found:
            raise _os_error(int(found[1]), what, message) from None
        status = message.split(":", 1)[0].strip("'\" ")
        if status in _BY_STATUS:
            curl = _CURL_ERROR.search(message)
            number = _BY_CURL.get(curl[1] if curl else "", _BY_STATUS[status])
            raise _os_error(number, what, message) from None
        if status in _UNREADABLE or message.startswith('Error parsing object member "metadata"'):
            raise UnreadableError(f"{what}: {message}") from None
        raise OSError(errno.EIO, f"{what}: {message}") from None


def _os_error(number: int, what: str, message: str) -> OSError:
    return OSError(number, f"{what}: {os.strerror(number)} ({message})")
