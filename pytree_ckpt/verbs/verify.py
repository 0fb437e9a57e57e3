"""Check a checkpoint against itself, without devices and without loading it."""

from dataclasses import dataclass

from pytree_ckpt.errors import Damage, FormatError, IntegrityError, NewerFormatError
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.values import count_text
from pytree_ckpt.options import LoadOptions, check_flags, given_or_default
from pytree_ckpt.pictures.pages import damage_html
from pytree_ckpt.pictures.text import size_text
from pytree_ckpt.plan.loading import ReadPlan, plan_reads
from pytree_ckpt.progress import showing
from pytree_ckpt.store import contents
from pytree_ckpt.store.locations import Location, PathLike, locate


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: The checkpoint.
        damage: Every place that is not as it was saved.
        chunks: Chunks whose digest was checked.
        nbytes: Bytes of these chunks.
        unchecked: What was not looked at.
    """

    path: str
    damage: tuple[Damage, ...]
    chunks: int
    nbytes: int
    unchecked: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing that was checked is damaged."""
        return not self.damage

    def _repr_html_(self) -> str:
        """The picture in a notebook."""
        checked = f"{count_text(self.chunks, 'chunk')}, {size_text(self.nbytes)} checked"
        return damage_html(self.path, self.damage, checked=checked, unchecked=self.unchecked)

    def __str__(self) -> str:
        whole = "no damage seen" if self.unchecked else "whole"
        state = whole if self.ok else f"damaged in {count_text(len(self.damage), 'place')}"
        chunks = count_text(self.chunks, "chunk")
        lines = [f"{self.path}: {state}; {chunks}, {self.nbytes:,} bytes checked"]
        lines += [f"  {damage}" for damage in self.damage]
        return "\n".join([*lines, *(f"  not checked: {what}" for what in self.unchecked)])


def verify(
    path: PathLike,
    *,
    quick: bool = False,
    options: LoadOptions | None = None,
) -> VerifyReport:
    """Check every digest of a checkpoint, in bounded memory.

    Args:
        path: The checkpoint.
        quick: Look only at the manifest, the tables, and which files are there with what size.
        options: Memory bound, threads and progress.

    Raises:
        NotFoundError: No committed checkpoint is there.
        NewerFormatError: A newer release wrote it: this one cannot tell whether it is whole.
        OSError: The storage failed.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pc.save(folder, {"w": np.arange(6)})
        ...     report = verify(folder)
        >>> report.ok, report.chunks, report.nbytes
        (True, 1, 48)
    """
    check_flags(quick=quick)
    location, settings = locate(path), given_or_default(options, LoadOptions)
    try:
        manifest, held = location.open_to_read()
    except NewerFormatError:
        raise
    except FormatError as error:
        return _unreadable(location, str(error))
    with held:
        return verify_data(location, manifest, settings, quick=quick)


def _unreadable(location: Location, text: str) -> VerifyReport:
    damage = Damage(path=None, kind="metadata", text=text, file=str(location))
    return VerifyReport(
        path=str(location),
        damage=(damage,),
        chunks=0,
        nbytes=0,
        unchecked=("everything behind the manifest",),
    )


def verify_data(
    location: Location, manifest: Manifest, options: LoadOptions, *, quick: bool = False
) -> VerifyReport:
    """As `verify`, of data that belongs to a manifest, be that there or not.

    Raises:
        OSError: The storage failed.
    """
    # TensorStore takes a third of a second to import, which a damaged manifest does not need.
    from pytree_ckpt.store.reading import CheckpointReader
    from pytree_ckpt.store.requests import Request

    data = location / manifest.data_dir
    damage = contents.wrong_metadata(data, manifest)
    unchecked: tuple[str, ...] = ()
    chunks = nbytes = 0
    try:
        with showing(f"verifying {location}", options.progress) as progress:
            reader = CheckpointReader(
                location,
                manifest,
                verify=True,
                options=options,
                on_read=progress and (lambda nbytes: progress(nbytes, manifest.nbytes)),
            )
            _ = reader.index
            if quick:
                damage += contents.missing_files(data, manifest, data.sizes())
                chunks_left = count_text(manifest.num_chunks, "chunk")
                unchecked = (f"the digests of {chunks_left}, {manifest.nbytes:,} bytes",)
            else:
                requests = [Request(parts=(leaf,), plan=plan) for leaf, plan in _plans(manifest)]
                try:
                    for _group in reader.read(requests):
                        pass
                finally:
                    chunks, nbytes = reader.stats.chunks, reader.stats.nbytes
    except IntegrityError as error:
        damage += error.damage
    except FormatError as error:
        damage.append(Damage(path=None, kind="metadata", text=str(error)))
    return VerifyReport(
        path=str(location),
        damage=tuple(damage),
        chunks=chunks,
        nbytes=nbytes,
        unchecked=unchecked,
    )


def _plans(manifest: Manifest) -> list[tuple[Leaf, ReadPlan]]:
    """For each array the reads of all its shards, each on its own, so that memory is bounded."""
    plans = {
        id(spec): plan_reads(spec, list(spec.shards.boxes()))
        for spec in manifest.specs
        if spec.storage != "empty"
    }
    return [
        (leaf, plans[id(leaf.spec)])
        for leaf in manifest.leaves
        if leaf.spec is not None and id(leaf.spec) in plans
    ]
