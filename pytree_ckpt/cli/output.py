"""What a command prints: one JSON object on stdout with `--json`, else text for people.

Names and metadata come from files that anybody may have written: whatever a terminal would obey
is escaped, and rich's markup in them is not interpreted.
"""

import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from pytree_ckpt.pictures.text import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

_AS_JSON = f"{__name__}.as_json"
_PIPE_WIDTH = 1000
"""Columns where there is no terminal: nothing is folded."""


def _keep_choice(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[_AS_JSON] = value


json_option = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=_keep_choice,
    help="Print one JSON object; text goes to stderr.",
)


place = click.Path(readable=False)
"""A path or a URL, for completion alone: whether it is there is for the library to say."""


def emit(document: Mapping[str, Any], draw: "Callable[[], Iterable[RenderableType]]") -> None:
    """Print a result: `document` with `--json`, else what `draw` makes."""
    if click.get_current_context().meta[_AS_JSON]:
        _print_json(document)
        return
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    out = Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)
    with out.capture() as text:  # rich ends the process by itself where it meets a closed pipe
        for part in draw():
            out.print(part)
    sys.stdout.write(re.sub(r" +$", "", text.get(), flags=re.MULTILINE))
    sys.stdout.flush()


def emit_error(ctx: click.Context, error: Exception) -> None:
    """Say what went wrong, and with `--json` in an object on stdout too."""
    say(error)
    if ctx.meta.get(_AS_JSON):
        _print_json({"error": error_document(error)})


def say(error: Exception) -> None:
    """An error, and what was noted with it, on stderr, if that takes anything."""
    with contextlib.suppress(OSError):
        for line in "\n".join([str(error), *getattr(error, "__notes__", [])]).split("\n"):
            click.echo(plain(line), err=True)


def error_document(error: Exception) -> dict[str, str]:
    """An error as JSON has it."""
    return {"kind": type(error).__name__, "text": str(error)}


def _print_json(document: Mapping[str, Any]) -> None:
    click.echo(json.dumps(jsonable(document), indent=2, allow_nan=False))


_INT_BITS = 14_000
"""Python neither writes nor reads more than 4,300 digits of an int."""


def jsonable(value: Any) -> Any:
    r"""What JSON cannot say, as text: bytes and very large ints in hex, and numbers that are none.

    Example:
        >>> jsonable({"id": b"\x0f", "loss": float("nan"), "shape": (2, 3)})
        {'id': '0f', 'loss': 'nan', 'shape': [2, 3]}
    """
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int) and value.bit_length() > _INT_BITS:
        return hex(value)
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
