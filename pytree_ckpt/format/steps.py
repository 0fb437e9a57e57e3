"""Names of the numbered checkpoints in a root."""

import re

PREFIX = "step_"
WIDTH = 8
_NAME = re.compile(rf"{PREFIX}(\d+)", re.ASCII)


def step_name(step: int) -> str:
    """The folder of a step.

    Raises:
        ValueError: A negative step, or something that is not an integer.

    Example:
        >>> step_name(1000), step_name(10**10)
        ('step_00001000', 'step_10000000000')
    """
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise ValueError(f"a step is an int, not {step!r}")
    number = step.__index__()
    if number < 0:
        raise ValueError(f"a step is not negative: {number}")
    return f"{PREFIX}{number:0{WIDTH}d}"


def step_of(name: str) -> int | None:
    """The step that a folder's name means; only the exact name counts."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return int(found[1]) if step_name(int(found[1])) == name else None
