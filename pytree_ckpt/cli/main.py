"""The command `pytree-ckpt`: its commands, and what becomes of errors.

Only click is imported here, so that `--help` and completion are quick: a command imports what it
needs when it runs.
"""

import contextlib
import io
import sys
from typing import Any

import click

from pytree_ckpt import __version__
from pytree_ckpt.cli.check import diff_command, verify_command
from pytree_ckpt.cli.failures import BROKEN_PIPE, INTERRUPTED, any_streams, exit_code, fault
from pytree_ckpt.cli.look import report_command, show_command, tree_command
from pytree_ckpt.cli.move import convert_command, export_command, import_command
from pytree_ckpt.cli.output import emit_error
from pytree_ckpt.cli.root import ls_command, pin_command, prune_command, unpin_command
from pytree_ckpt.errors import CheckpointError


class Commands(click.Group):
    """A group whose commands may raise what the library raises, and print to anything."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with any_streams():
            try:
                return super().main(*args, **kwargs)
            except OSError as error:  # of what click itself prints
                sys.exit(exit_code(error))
            except Exception:
                if kwargs.get("standalone_mode") is False:
                    raise
                sys.exit(fault())

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:  # of `--help`; click would end with 1, which is damage
            sys.exit(BROKEN_PIPE)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):
                click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            ctx.exit(BROKEN_PIPE)
        except (CheckpointError, OSError, ImportError) as error:
            with contextlib.suppress(OSError):
                emit_error(ctx, error)
            ctx.exit(exit_code(error))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pytree-ckpt")
def main() -> None:
    """Look into, prove and compare checkpoints; no accelerator and no JAX is needed."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escaped as on stderr: what the locale cannot show is no failure of the command.
        sys.stdout.reconfigure(errors="backslashreplace")


for command in (
    *(ls_command, tree_command, show_command, report_command),
    *(verify_command, diff_command, prune_command),
    *(convert_command, export_command, import_command),
):
    main.add_command(command)
main.add_command(pin_command, "pin")
main.add_command(unpin_command, "unpin")
