"""Settings of a save and of a load, with their invariants."""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

MIB = 1 << 20

Progress = Callable[[int, int], None]
"""Is told the bytes done and the bytes in all, from any thread, one call at a time."""
ProgressChoice = bool | Literal["auto"] | Progress
DigestName = Literal["sha256", "xxh3_128"]
CodecName = Literal["raw", "zstd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a checkpoint is written.

    Attributes:
        digest: Algorithm of the chunk digests. `"xxh3_128"` is several times faster than
            `"sha256"` and finds every accident, but is no proof against a forger; it needs the
            package `xxhash`, also to read the checkpoint.
        compress: `"zstd"` compresses each chunk; `None` stores raw bytes.
        max_inflight_bytes: Bound on the bytes that are copied or buffered at one time. A single
            request above it goes alone.
        threads: Threads that write and hash; `None` takes one for each processor. On a disk a few
            more wait until files are durable.
        timeout_s: With several processes, how long process 0 waits for the others when it has come
            to the same point; they wait twice as long for process 0. What one process takes longer
            to write than another counts. For an error that names who is missing, keep twice this
            below the `heartbeat_timeout_seconds` of `jax.distributed.initialize` (100 by default),
            after which the runtime ends every process.
        progress: `True` shows a bar on the terminal of process 0, `"auto"` only for what takes
            over a second and is not in the background; a function is called instead.

    Example:
        >>> SaveOptions(compress="zstd").digest
        'sha256'
    """

    digest: DigestName = "sha256"
    compress: Literal["zstd"] | None = None
    max_inflight_bytes: int = 256 * MIB
    threads: int | None = None
    timeout_s: float = 45.0
    progress: ProgressChoice = "auto"

    def __post_init__(self) -> None:
        if self.digest not in ("sha256", "xxh3_128"):
            raise ValueError(f"digest must be 'sha256' or 'xxh3_128', not {self.digest!r}")
        if self.compress not in (None, "zstd"):
            raise ValueError(f"compress must be None or 'zstd', not {self.compress!r}")
        _check_bounds(self)

    @property
    def codec(self) -> CodecName:
        """Name of the chunk codec in the manifest."""
        return self.compress or "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a checkpoint is read.

    Attributes:
        max_inflight_bytes: Bound on the bytes that are read but not yet placed on devices. A
            single request above it goes alone.
        threads: Threads that read and verify; `None` takes one for each processor.
        progress: As in `SaveOptions`, for `load` and what else reads all of a checkpoint.
        timeout_s: With several processes, how long a manager that has restored a step waits for
            the others, and how long a striped load waits in each round; see
            `SaveOptions.timeout_s`.
        striped: With several processes, have each chunk that any of them needs read and verified
            by one of them, and sent to the others by an XLA program. So a replicated or transposed
            load reads the checkpoint once, and not once for each process. All processes must make
            the same call, and wait for each other; what one finds damaged is damaged for all. Of
            `load` alone, and of no effect for a single process.
    """

    max_inflight_bytes: int = 256 * MIB
    threads: int | None = None
    progress: ProgressChoice = "auto"
    timeout_s: float = 45.0
    striped: bool = False

    def __post_init__(self) -> None:
        check_flags(striped=self.striped)
        _check_bounds(self)


_LONGEST_S = 1e9
"""What locks, and the service of JAX, can count; it is 31 years."""
_Options = TypeVar("_Options", SaveOptions, LoadOptions)


def given_or_default(options: object, kind: type[_Options]) -> _Options:
    """The options that a caller gave, or the defaults for None.

    Raises:
        TypeError: They are of another class.
    """
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise TypeError(f"options must be {kind.__name__}(...) or None, not {options!r}")
    return options


MAX_PROCESSES = 99_999
"""The name of a table has five digits."""


def check_count(name: str, value: object, *, most: float = math.inf) -> None:
    """Refuse a setting that is no int from 1 to `most`.

    Raises:
        ValueError: With the name and the value.
    """
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or not 1 <= value <= most:  # type: ignore[operator]
        limits = "of at least 1" if most == math.inf else f"from 1 to {most}"
        raise ValueError(f"{name} must be an int {limits}, not {value!r}")


def check_flags(**flags: object) -> None:
    """Refuse settings that are neither True nor False: the text "no" would count as True.

    Raises:
        ValueError: With the name and the value.
    """
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False, not {value!r}")


def check_seconds(name: str, value: object) -> None:
    """Refuse a time that is no number above 0.

    Raises:
        ValueError: With the name and the value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")


def _check_bounds(options: SaveOptions | LoadOptions) -> None:
    check_count("max_inflight_bytes", options.max_inflight_bytes)
    if options.threads is not None:
        check_count("threads", options.threads)
    progress = options.progress
    if not (isinstance(progress, bool) or progress == "auto" or callable(progress)):
        raise ValueError(f"progress must be True, False, 'auto' or a function, not {progress!r}")
    check_seconds("timeout_s", options.timeout_s)
    if options.timeout_s > _LONGEST_S:
        raise ValueError(f"timeout_s must be at most {_LONGEST_S:.0e}, not {options.timeout_s!r}")
