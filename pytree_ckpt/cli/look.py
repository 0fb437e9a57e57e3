"""Commands that look into a checkpoint."""

import os
from pathlib import Path

import click

from pytree_ckpt.cli.failures import usage_errors
from pytree_ckpt.cli.output import emit, json_option, place
from pytree_ckpt.errors import NotFoundError
from pytree_ckpt.pictures.text import plain


@click.command("tree")
@click.argument("checkpoint", metavar="CK", type=place)
@click.option("--depth", type=click.IntRange(min=1), help="How many levels to show.")
@click.option("--match", metavar="PATTERN", help="Only leaves such as 'params/**/kernel'.")
@json_option
def tree_command(checkpoint: str, depth: int | None, match: str | None) -> None:
    """Draw the tree of CK.

    Shapes, dtypes, shardings, bytes, and the share of all bytes.
    """
    from pytree_ckpt.cli import documents, drawing
    from pytree_ckpt.pictures.outline import matching, outline
    from pytree_ckpt.plan import patterns
    from pytree_ckpt.plan.selecting import must_select
    from pytree_ckpt.verbs.manifest import read_manifest

    manifest = read_manifest(checkpoint)
    root = outline(manifest)
    if match is not None:
        with usage_errors():
            must_select(manifest.leaves, match)
            root = matching(root, patterns.parse(match))
    emit(documents.of_tree(root, depth), lambda: [drawing.of_tree(root, depth)])


@click.command("show")
@click.argument("checkpoint", metavar="CK", type=place)
@click.argument("leaf", required=False)
@click.option("--stats", is_flag=True, help="Read LEAF: least, greatest, mean, and count of NaNs.")
@json_option
def show_command(checkpoint: str, leaf: str | None, stats: bool) -> None:
    """Tell what CK is, or what LEAF in it is.

    Of a leaf: its chunks with digests, and which device held which slice, drawn.
    """
    from pytree_ckpt.cli import documents, drawing
    from pytree_ckpt.verbs.inspect import inspect_leaf
    from pytree_ckpt.verbs.manifest import read_manifest

    if leaf is None and stats:
        raise click.UsageError("--stats needs a LEAF")
    if leaf is None:
        manifest = read_manifest(checkpoint)
        emit(documents.of_manifest(manifest), lambda: drawing.of_manifest(manifest))
        return
    try:
        report = inspect_leaf(checkpoint, leaf, statistics=stats)
    except KeyError as error:
        raise NotFoundError(error.args[0]) from None
    emit(documents.of_leaf(report), lambda: drawing.of_leaf(report))


@click.command("report")
@click.argument("checkpoint", metavar="CK", type=place)
@click.option(
    "--output", "-o", metavar="FILE", type=place, help="Where to; by default NAME.html here."
)
@json_option
def report_command(checkpoint: str, output: str | None) -> None:
    """Write a page of HTML about CK.

    One file that needs nothing else: where the bytes are, which device held what, all leaves, how
    long the save took.
    """
    from pytree_ckpt.pictures.pages import manifest_page
    from pytree_ckpt.store.locations import local_path, locate
    from pytree_ckpt.verbs.manifest import read_manifest

    page = manifest_page(read_manifest(checkpoint), path=checkpoint)
    name = str(locate(checkpoint)).rpartition("/")[2] or "checkpoint"
    target = local_path(output or f"{name}.html")
    _replace(target, page)
    emit({"file": str(target)}, lambda: [plain(f"wrote {target}")])


def _replace(target: Path, text: str) -> None:
    """Write a file whole or not at all; to a pipe or a device write as it is."""
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    part = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
