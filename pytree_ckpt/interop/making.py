"""Make a checkpoint of what another format holds."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pytree_ckpt.clock import StageClock
from pytree_ckpt.errors import FormatError
from pytree_ckpt.format import dtypes, manifest_file, tables, values, wire
from pytree_ckpt.format.manifest import VALUE, Manifest, TableRef, data_dir
from pytree_ckpt.format.parse import Reader
from pytree_ckpt.format.trees import Tree
from pytree_ckpt.format.values import Value
from pytree_ckpt.options import SaveOptions, check_flags
from pytree_ckpt.plan.saving import ArrayForm, SavePlan, plan_save
from pytree_ckpt.store.locations import PathLike, locate
from pytree_ckpt.verbs.origin import completed, versions

_SHARD_NBYTES = 32 << 20
"""Largest file of an array, about: what is written is in memory twice."""
_INFLIGHT_NBYTES = 64 << 20
_MAX_NBYTES = wire.MAX_FILE_BYTES // tables.ROW_NBYTES * _SHARD_NBYTES
"""What one table can list. A header may claim anything, and a plan has an entry for each shard."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What an import made, and what it could not carry over: each with its place and why."""

    manifest: Manifest
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"not carried over: {what}" for what in self.left_out]
        return "\n".join([repr(self.manifest), *lines])


def make_checkpoint(
    dst: PathLike,
    tree: Tree,
    leaves: Sequence[ArrayForm | Value],
    view: Any,
    *,
    source: Mapping[str, str],
    metadata: Any,
    overwrite: bool,
    options: SaveOptions | None,
    left_out: Sequence[str] = (),
) -> ImportReport:
    """Write a checkpoint without JAX: arrays by `view(leaf, box)`, in bounded memory.

    Raises:
        FormatError: What was found cannot be a checkpoint.
        ExistsError: There is a checkpoint at `dst` and `overwrite` is False.
        OSError: The storage refused or failed.
    """
    from pytree_ckpt.store.writing import Writer

    check_flags(overwrite=overwrite)
    options = dataclasses.replace(options or SaveOptions(), max_inflight_bytes=_INFLIGHT_NBYTES)
    with Reader.errors(source["path"]):
        plan, draft = _planned(tree, leaves, source, metadata, options)
    clock = StageClock()
    location = locate(dst)
    with location.attempt(overwrite=overwrite, needed_nbytes=plan.nbytes) as attempt:
        folder = location / data_dir(attempt.nonce)
        # An order keeps few of them in memory at once: a source may be decoded whole.
        order = list(zip(plan.array_leaf.tolist(), plan.array_shard.tolist(), strict=True))
        writer = Writer(folder, plan, view, process=0, options=options, clock=clock, order=order)
        table = writer.write({})
        manifest, data = completed(draft, nonce=attempt.nonce, tables=[table], clock=clock)
        attempt.commit(data)
    return ImportReport(manifest=manifest, left_out=tuple(left_out))


def _planned(
    tree: Tree,
    leaves: Sequence[ArrayForm | Value],
    source: Mapping[str, str],
    metadata: Any,
    options: SaveOptions,
) -> tuple[SavePlan, Manifest]:
    """The plan, and the manifest but for what is known only at the end."""
    forms = [
        dataclasses.replace(leaf, max_shard_nbytes=_SHARD_NBYTES)
        for leaf in leaves
        if isinstance(leaf, ArrayForm)
    ]
    nbytes = sum(math.prod(f.shape) * dtypes.dtype_of(f.dtype).itemsize for f in forms)
    if nbytes > _MAX_NBYTES:
        raise FormatError(f"{source['path']} claims {nbytes} bytes, more than {_MAX_NBYTES}")
    distinct = {form: at for at, form in enumerate(dict.fromkeys(forms))}
    numbers = iter(forms)
    codes = [distinct[next(numbers)] if isinstance(leaf, ArrayForm) else VALUE for leaf in leaves]
    plan = plan_save(
        tree.leaf_paths(),
        list(distinct),
        codes,
        process=0,
        process_of=defaultdict(int),
        codec=options.codec,
    )
    draft = Manifest(
        nonce="0" * 32,
        digest=options.digest,
        tree=tree,
        specs=plan.specs,
        leaf_codes=plan.codes,
        values=tuple(leaf for leaf in leaves if not isinstance(leaf, ArrayForm)),
        names=tuple(plan.names.values()),
        process_count=1,
        device_count=1,
        platform="cpu",
        tables=(TableRef(nbytes=wire.MAX_FILE_BYTES, id=bytes(32)),),
        metadata=values.check_metadata(metadata),
        metrics={},
        versions=versions(),
        created=0.0,
        seconds={},
        source=source,
    )
    manifest_file.to_bytes(draft)
    return plan, draft
