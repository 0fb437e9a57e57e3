"""Commands that move checkpoints: to other layouts, and from and to other formats."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from pytree_ckpt.cli.failures import usage_errors
from pytree_ckpt.cli.output import emit, json_option, place


def _pairs(ctx: click.Context, option: click.Parameter, texts: Iterable[str]) -> dict[str, str]:
    """What was given as KEY=VALUE, again and again; the value is what follows the last `=`."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.rpartition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is not PATTERN=VALUE", ctx, option)
        if found.setdefault(key, value) != value:
            raise click.BadParameter(f"{key!r} is both {found[key]!r} and {value!r}", ctx, option)
    return found


def _mesh(ctx: click.Context, option: click.Parameter, text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = map(str.strip, part.rpartition("="))
        if axis in sizes or not (axis and size.isdecimal() and int(size) > 0):
            raise click.BadParameter(f"{text!r} is not like data=16,model=2", ctx, option)
        sizes[axis] = int(size)
    return sizes


def _share(ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise click.BadParameter(f"{text!r} is not like 0/4, the first of four", ctx, option)
    return int(number), int(count)


overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what is at DST.")
select_option = click.option(
    "--select", multiple=True, metavar="PATTERN", help="Take these leaves; again for more."
)


@click.command("convert")
@click.argument("src", type=place)
@click.argument("dst", type=place)
@click.option("--mesh", callback=_mesh, metavar="AXIS=SIZE,...", help="Mesh axes, slowest first.")
@click.option(
    "--spec",
    "specs",
    multiple=True,
    callback=_pairs,
    metavar="PATTERN=SPEC",
    help="Partition spec of leaves: 'params/**/kernel=model,None'. The first that fits counts.",
)
@click.option("--like", metavar="CK", type=place, help="Take the layout of this checkpoint.")
@click.option("--processes", type=int, help="Processes of the job that will load DST.")
@click.option(
    "--dtype", multiple=True, callback=_pairs, metavar="PATTERN=DTYPE", help="Dtype of leaves."
)
@select_option
@click.option("--codec", type=click.Choice(["raw", "zstd"]), default="raw", show_default=True)
@click.option(
    "--digest", type=click.Choice(["sha256", "xxh3_128"]), default="sha256", show_default=True
)
@click.option("--chunk-bytes", type=int, help="About how large chunks are.")
@click.option("--workers", default=1, show_default=True, help="Processes to do it with.")
@click.option("--process", callback=_share, metavar="I/N", help="Be one of N that a launcher runs.")
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@overwrite_option
@json_option
def convert_command(
    src: str,
    dst: str,
    mesh: dict[str, int] | None,
    specs: dict[str, str],
    like: str | None,
    processes: int | None,
    codec: str,
    digest: Any,
    chunk_bytes: int | None,
    **settings: Any,
) -> None:
    """Write the checkpoint SRC to DST in another layout, dtype or selection.

    In bounded memory, verified as it is read. After an interruption the same command goes on where
    it was.
    """
    from pytree_ckpt.cli import documents
    from pytree_ckpt.options import SaveOptions
    from pytree_ckpt.plan.layouts import Layout
    from pytree_ckpt.verbs.convert import convert

    if like and (mesh or specs or processes):
        raise click.UsageError("--like is instead of --mesh, --spec and --processes")
    with usage_errors():
        layout = Layout(mesh=mesh, specs=specs, process_count=processes)
        report = convert(
            src,
            dst,
            layout=like or layout,
            max_chunk_nbytes=chunk_bytes,
            options=SaveOptions(digest=digest, compress="zstd" if codec == "zstd" else None),
            **settings,
        )
    emit(documents.of_convert(report), lambda: str(report).splitlines())


@click.command("export")
@click.argument("src", type=place)
@click.argument("dst", type=place)
@select_option
@click.option("--separator", help="Between the keys of a name; '.' in safetensors, '/' in npz.")
@click.option("--max-file-bytes", type=int, default=5_000_000_000, show_default=True)
@overwrite_option
@json_option
def export_command(
    src: str, dst: str, separator: str | None, max_file_bytes: int, **settings: Any
) -> None:
    """Write arrays of the checkpoint SRC as DST.

    DST is an .npz, a .safetensors, or a folder for safetensors with their index.
    """
    from pytree_ckpt.cli import documents
    from pytree_ckpt.interop.npz import export_npz
    from pytree_ckpt.interop.safetensors import export_safetensors

    settings |= {} if separator is None else {"separator": separator}
    with usage_errors():
        if Path(dst).suffix == ".npz":
            report = export_npz(src, dst, **settings)
        else:
            report = export_safetensors(src, dst, max_file_nbytes=max_file_bytes, **settings)
    emit(documents.of_export(report), lambda: str(report).splitlines())


@click.command("import")
@click.argument("src", type=place)
@click.argument("dst", type=place)
@click.option(
    "--from",
    "kind",
    type=click.Choice(["orbax", "safetensors", "npz"]),
    help="The format of SRC; by default told by its names.",
)
@click.option("--item", help="Which item of an orbax checkpoint.")
@click.option("--separator", help="What names are split at; '' keeps them as they are.")
@overwrite_option
@json_option
def import_command(
    src: str, dst: str, kind: str | None, item: str | None, separator: str | None, overwrite: bool
) -> None:
    """Make the checkpoint DST of SRC: safetensors, an .npz, or a checkpoint of orbax."""
    from pytree_ckpt.cli import documents
    from pytree_ckpt.interop.npz import import_npz
    from pytree_ckpt.interop.orbax import import_orbax
    from pytree_ckpt.interop.safetensors import import_safetensors

    kind = kind or _kind_of(src)
    for name, value, has_it in (
        ("--item", item, kind == "orbax"),
        ("--separator", separator, kind != "orbax"),
    ):
        if value is not None and not has_it:
            raise click.UsageError(f"{name} says nothing about {kind}, which {src!r} is")
    if kind == "orbax":
        report = import_orbax(src, dst, item=item, overwrite=overwrite)
    else:
        act = import_npz if kind == "npz" else import_safetensors
        given: dict[str, Any] = {} if separator is None else {"separator": separator or None}
        report = act(src, dst, overwrite=overwrite, **given)
    emit(documents.of_import(report), lambda: str(report).splitlines())


def _kind_of(src: str) -> str:
    """The format of what is at a path, by its names."""
    from pytree_ckpt.store.locations import local_path

    path = local_path(src)
    if path.suffix == ".npz":
        return "npz"
    is_flat = path.suffix == ".safetensors" or any(path.glob("*.safetensors*"))
    return "safetensors" if is_flat or not path.is_dir() else "orbax"
