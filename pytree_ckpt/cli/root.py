"""Commands on a root of numbered checkpoints."""

from collections.abc import Callable
from typing import Any

import click

from pytree_ckpt.cli.failures import usage_errors
from pytree_ckpt.cli.output import emit, json_option, place
from pytree_ckpt.format.steps import StepNames


def names_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How the steps of the root are named."""
    command = click.option("--width", default=8, show_default=True, help="Digits of a step.")(
        command
    )
    return click.option(
        "--prefix", default="step_", show_default=True, help="What a step's name begins with."
    )(command)


def _names(prefix: str, width: int) -> StepNames:
    with usage_errors():
        return StepNames(prefix=prefix, width=width)


@click.command("ls")
@click.argument("root", type=place)
@names_options
@json_option
def ls_command(root: str, prefix: str, width: int) -> None:
    """List the steps of ROOT.

    Age, bytes, leaves, mesh, who wrote them, whether they are committed, damaged (as far as the
    presence and the sizes of files tell), being written, or left unfinished, and whether they are
    pinned.
    """
    from pytree_ckpt.cli import documents, drawing
    from pytree_ckpt.verbs.survey import survey

    names = _names(prefix, width)
    found = survey(root, names=names)
    emit(documents.of_survey(found), lambda: drawing.of_survey(found, names))


def _command_to(word: str, *, pinned: bool, text: str) -> click.Command:
    """The command that makes checkpoints `word`."""

    @click.command(help=text)
    @click.argument("checkpoints", metavar="CK...", type=place, nargs=-1, required=True)
    @json_option
    def command(checkpoints: tuple[str, ...]) -> None:
        from pytree_ckpt.pictures.text import plain
        from pytree_ckpt.verbs.manifest import read_manifest
        from pytree_ckpt.verbs.survey import pin

        for path in checkpoints:
            read_manifest(path)  # All of them or none.
        for path in checkpoints:
            pin(path, pinned=pinned)
        emit({word: checkpoints}, lambda: [plain(f"{word} {path}") for path in checkpoints])

    return command


pin_command = _command_to(
    "pinned", pinned=True, text="Keep CK from every policy, that of a running job too."
)
unpin_command = _command_to("unpinned", pinned=False, text="Let policies have CK again.")


@click.command("prune")
@click.argument("root", type=place)
@click.option("--last", type=int, help="Keep the newest so many.")
@click.option("--every", type=int, help="Keep each step that is a multiple of this.")
@click.option(
    "--best",
    type=(str, click.Choice(["min", "max"]), int),
    metavar="METRIC min|max COUNT",
    help="Keep the best so many by a metric.",
)
@click.option("--pin", "pinned", type=int, multiple=True, metavar="STEP", help="Keep this step.")
@click.option("--newer-than", type=float, metavar="SECONDS", help="Keep what is younger.")
@click.option("--yes", is_flag=True, help="Delete; without it nothing is touched.")
@names_options
@json_option
def prune_command(root: str, yes: bool, prefix: str, width: int, **rules: Any) -> None:
    """Delete the steps of ROOT that no rule keeps.

    Without --yes it says what would go and what would stay, and why. The newest good step always
    stays, and what is damaged is left alone.
    """
    from pytree_ckpt.cli import documents, drawing
    from pytree_ckpt.plan.retention import Keep
    from pytree_ckpt.verbs.survey import prune

    with usage_errors():
        keep = Keep(**rules)
    report = prune(root, keep, names=_names(prefix, width), delete=yes)
    emit(documents.of_prune(report), lambda: drawing.of_prune(report))
