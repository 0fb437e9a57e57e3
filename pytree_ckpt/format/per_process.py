"""Values that belong to one process."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PerProcess:
    """A leaf that every process has its own value of, such as the state of a data iterator.

    Attributes:
        value: Anything JSON-like: None, bool, int, float, str, bytes, lists, and dicts with
            `str` keys. Tuples come back as lists.

    Example:
        >>> PerProcess({"shard": 3, "position": 12_000}).value["position"]
        12000
    """

    value: Any
