"""Object stores through TensorStore: where they are, who asks, and single objects.

Endpoint, region and credentials come from the environment variables that other programs use too.
"""

import errno
import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorstore as ts

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.store.failures import UnreadableError, storage_errors

ABSENT = b"\x02"
"""TensorStore's generation of an object that is not there, for conditional writes."""
_LOST = b""
"""The generation that a conditional write returns when its condition did not hold."""

_ANSWER_S = 60.0
"""A request for a small object that takes longer than this has failed."""
_SLOWEST = 1 << 18
"""A large object may take longer: at least so many bytes a second must come through."""
_RETRIES = {"max_retries": 5, "initial_delay": "100ms", "max_delay": "1s"}
"""A busy store is asked again for about two seconds; so a dead one is reported after as long."""
_STALLED_S = "20"
"""A transfer that moves less than a byte a second for so long is broken off."""


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of one bucket; `where` names it, and the endpoint, in messages."""

    url: str
    where: str
    store: ts.KvStore

    def read(self, key: str) -> tuple[bytes | None, bytes]:
        """An object, None if there is none, and its generation."""
        with self._doing("reading", key):
            found = self.store.read(key).result(timeout=_ANSWER_S)
        return (found.value if found.state == "value" else None), found.stamp.generation

    def put(self, key: str, data: bytes) -> bytes:
        """Write an object, whatever is there; its generation."""
        with self._doing("writing", key):
            timeout_s = _ANSWER_S + len(data) / _SLOWEST
            return bytes(self.store.write(key, data).result(timeout=timeout_s).generation)

    def put_if(self, key: str, data: bytes | None, *, generation: bytes) -> bytes | None:
        """Write an object, or delete it with None, if what is there has this generation.

        Returns:
            The new generation; None if another one was there.
        """
        with self._doing("writing", key):
            written = self.store.write(key, data, if_equal=generation)
            found = bytes(written.result(timeout=_ANSWER_S).generation)
        return None if found == _LOST else found

    def remove(self, key: str) -> None:
        """Delete an object, if it is there."""
        with self._doing("deleting", key):
            self.store.write(key, None).result(timeout=_ANSWER_S)

    def names(self, prefix: str) -> list[str]:
        """The keys below a prefix, without it; one request for each thousand."""
        with self._doing("listing", prefix):
            found = self.store.list(_below(prefix)).result()
        # What others have here may have names that are no text; it is theirs.
        names = (name.decode(errors="surrogateescape") for name in found)
        return sorted(name[len(prefix) :] for name in names)

    def remove_below(self, prefix: str) -> None:
        """Delete everything below a prefix."""
        with self._doing("deleting", prefix):
            self.store.delete_range(_below(prefix)).result()

    @contextmanager
    def _doing(self, what: str, key: str) -> Iterator[None]:
        """Name what failed, and where, as an `OSError`."""
        doing = f"{what} {self.url}{key} {self.where}".rstrip()
        try:
            with storage_errors(doing):
                yield
        except TimeoutError as error:
            if error.errno is not None:
                raise
            text = f"{doing}: no answer in {_ANSWER_S:g} s"
            raise TimeoutError(errno.ETIMEDOUT, text) from None
        except UnreadableError as error:
            raise OSError(errno.EIO, str(error)) from None


def _below(prefix: str) -> ts.KvStore.KeyRange:
    """All keys that begin with a prefix, which ends with a slash or is empty."""
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + "0" if prefix else "")


_BUCKET = re.compile(r"[a-z0-9][a-z0-9._\-]{1,221}[a-z0-9]", re.ASCII)


def bucket(scheme: str, name: str) -> Objects:
    """The objects of a bucket of `s3`, `gs` or `memory`; nothing is asked of it yet.

    `memory` has one bucket, of this process, for tests.

    Raises:
        CheckpointError: Not a name of a bucket.
    """
    url = f"{scheme}://{name}/" if name else f"{scheme}://"
    if scheme == "memory":
        spec, context, where = {"driver": "memory"}, _memory(), ""
    elif not _BUCKET.fullmatch(name):
        raise CheckpointError(f"{url!r} does not name a bucket")
    else:
        # Read when TensorStore makes its first request. Without it a store that accepts a
        # connection and then says nothing would hold a save for good.
        os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", _STALLED_S)
        os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
        spec, settings, where = (_s3 if scheme == "s3" else _gcs)(name)
        context = ts.Context(settings)
    with storage_errors(f"opening {url}"):
        return Objects(url, where, ts.KvStore.open(spec, context=context).result())


@functools.cache
def _memory() -> ts.Context:
    """The memory that all `memory://` URLs of this process share."""
    return ts.Context({"memory_key_value_store": {}})


def _s3(name: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    spec: dict[str, Any] = {"driver": "s3", "bucket": name, "use_conditional_write": True}
    if endpoint:
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    settings = {"s3_request_retries": _RETRIES, "aws_credentials": {"type": _credentials(endpoint)}}
    return spec, settings, f"at {endpoint}" if endpoint else ""


_ELSEWHERE = (
    "AWS_PROFILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def _credentials(endpoint: str | None) -> str:
    """How to find credentials; a store of one's own, without any, is asked anonymously."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return "environment"
    files = (os.path.expanduser(f"~/.aws/{name}") for name in ("credentials", "config"))
    has_some = any(map(os.path.exists, files)) or any(map(os.environ.get, _ELSEWHERE))
    return "anonymous" if endpoint and not has_some else "default"


def _gcs(name: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        # TensorStore takes the endpoint of GCS from nowhere else.
        url = emulator if "://" in emulator else f"http://{emulator}"
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = url.rstrip("/")
    spec = {"driver": "gcs", "bucket": name}
    return spec, {"gcs_request_retries": _RETRIES}, f"at {emulator}" if emulator else ""
