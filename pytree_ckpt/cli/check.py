"""Commands that prove and compare."""

import click

from pytree_ckpt.cli.failures import FOUND, OK, exit_code
from pytree_ckpt.cli.output import emit, json_option, say
from pytree_ckpt.errors import CheckpointError


@click.command("verify")
@click.argument("checkpoints", metavar="CK...", nargs=-1, required=True)
@click.option("--quick", is_flag=True, help="Check structure and sizes, but read no array data.")
@json_option
@click.pass_context
def verify_command(ctx: click.Context, checkpoints: tuple[str, ...], quick: bool) -> None:
    """Check every digest of checkpoints, and list every damage.

    The exit code is 1 if something is damaged.
    """
    from pytree_ckpt.cli import documents, drawing
    from pytree_ckpt.cli.progress import progress
    from pytree_ckpt.verbs.verify import verify

    reports, errors = [], []
    for path in checkpoints:
        try:
            with progress(f"verifying {path}") as advance:
                reports.append(verify(path, quick=quick, progress=advance))
        except (CheckpointError, OSError) as error:
            say(error)
            errors.append(error)
    emit(documents.of_verify(reports, errors), lambda: map(drawing.of_verify, reports))
    if errors:
        ctx.exit(exit_code(errors[0]))
    ctx.exit(OK if all(report.ok for report in reports) else FOUND)
