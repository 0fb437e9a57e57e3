"""Commands that prove and compare."""

import click

from pytree_ckpt.cli.failures import FOUND, OK, exit_code
from pytree_ckpt.cli.output import emit, json_option, place, say
from pytree_ckpt.errors import CheckpointError


@click.command("verify")
@click.argument("checkpoints", metavar="CK...", type=place, nargs=-1, required=True)
@click.option("--quick", is_flag=True, help="Check structure and sizes, but read no array data.")
@json_option
@click.pass_context
def verify_command(ctx: click.Context, checkpoints: tuple[str, ...], quick: bool) -> None:
    """Check every digest of CK, and list every damage.

    The exit code is 1 if something is damaged.
    """
    from pytree_ckpt.cli import documents, drawing
    from pytree_ckpt.verbs.verify import verify

    reports, errors = [], []
    for path in checkpoints:
        try:
            reports.append(verify(path, quick=quick))
        except (CheckpointError, OSError) as error:
            say(error)
            errors.append(error)
    emit(documents.of_verify(reports, errors), lambda: map(drawing.of_verify, reports))
    if errors:
        ctx.exit(exit_code(errors[0]))
    ctx.exit(OK if all(report.ok for report in reports) else FOUND)


@click.command("diff")
@click.argument("a", type=place)
@click.argument("b", type=place)
@json_option
@click.pass_context
def diff_command(ctx: click.Context, a: str, b: str) -> None:
    """Say all that differs between two checkpoints.

    Structure, kinds, shapes, dtypes, shardings, values (by how much at most, and where) and
    metadata. Chunks that have equal digests are not read. The exit code is 1 if anything differs.
    """
    from pytree_ckpt.cli import documents, drawing
    from pytree_ckpt.verbs.diff import diff

    report = diff(a, b)
    emit(documents.of_diff(report), lambda: drawing.of_diff(report))
    ctx.exit(OK if report.same else FOUND)
