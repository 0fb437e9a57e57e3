"""Names of the numbered checkpoints in a root."""

import operator
import re
import reprlib
from dataclasses import dataclass
from typing import Any

_DIGITS = re.compile(r"\d+", re.ASCII)


def checked_step(step: Any) -> int:
    """A step as an int.

    Raises:
        ValueError: Negative, or not an integer (a bool and a float are not).
    """
    if isinstance(step, bool) or type(step).__name__ in ("bool_", "bool"):
        raise ValueError(f"a step is an int, not {step!r}")
    try:
        number = operator.index(step)
    except TypeError:
        raise ValueError(f"a step is an int, not {reprlib.repr(step)}") from None
    if number < 0:
        raise ValueError(f"a step is not negative: {number}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNames:
    """How steps are named: `prefix` and at least `width` digits.

    Example:
        >>> StepNames().name(1000), StepNames().step("step_00001000")
        ('step_00001000', 1000)
        >>> StepNames(prefix="ppo_networks_", width=1).step("ppo_networks_0.backup") is None
        True
    """

    prefix: str = "step_"
    width: int = 8

    def __post_init__(self) -> None:
        prefix = str(self.prefix)
        if prefix != self.prefix or any(c in prefix for c in "/\\\0") or prefix.startswith("."):
            raise ValueError(f"a step prefix cannot be {self.prefix!r}")
        if self.width not in range(65):
            raise ValueError(f"a step has 0 to 64 digits, not {self.width!r}")

    def name(self, step: Any) -> str:
        """The folder of a step.

        Raises:
            ValueError: A negative step, or something that is not an integer.
        """
        return f"{self.prefix}{checked_step(step):0{self.width}d}"

    def step(self, name: str) -> int | None:
        """The step that a folder's name means; only the exact name counts."""
        digits = name.removeprefix(self.prefix)
        if not name.startswith(self.prefix) or not _DIGITS.fullmatch(digits):
            return None
        if len(digits) > 400:
            return None
        return int(digits) if self.name(int(digits)) == name else None
