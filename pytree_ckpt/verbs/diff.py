"""Compare two checkpoints, without devices and in bounded memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytree_ckpt.format import values, wire
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.values import count_text
from pytree_ckpt.options import LoadOptions, Progress, given_or_default
from pytree_ckpt.pictures.pages import differences_html
from pytree_ckpt.plan import diffing
from pytree_ckpt.plan.diffing import Difference, Pair, ValueDifference
from pytree_ckpt.progress import showing
from pytree_ckpt.store.locations import PathLike, locate
from pytree_ckpt.verbs.checkpoint import Checkpoint, batches

Region = tuple[Pair, Box]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """What `diff` found.

    Attributes:
        a, b: The checkpoints.
        differences: All of them, leaf by leaf in the order of `a`.
        leaves: Arrays whose elements were compared.
        equal_chunks: Chunks that were not read, because both have the same digest of them.
        nbytes_read: Bytes of the elements that were read, of both.
    """

    a: str
    b: str
    differences: tuple[Difference, ...]
    leaves: int
    equal_chunks: int
    nbytes_read: int

    @property
    def same(self) -> bool:
        """Whether both hold the same state in the same layout, with the same metadata."""
        return not self.differences

    def _repr_html_(self) -> str:
        """The picture in a notebook."""
        compared = f"{count_text(self.leaves, 'array')} compared"
        return differences_html(self.a, self.b, self.differences, compared=compared)

    def __str__(self) -> str:
        count = len(self.differences)
        state = "the same" if self.same else f"{count} difference{'s' if count > 1 else ''}"
        lines = [f"{self.a} → {self.b}: {state}", *(f"  {d}" for d in self.differences)]
        return "\n".join(lines)


def diff(
    a: PathLike,
    b: PathLike,
    *,
    options: LoadOptions | None = None,
) -> DiffReport:
    """Say all that differs between two checkpoints: structure, types, layout, values, metadata.

    Chunks with equal digests are not read. Arrays of one shape are compared element by element,
    also across dtypes and chunkings. When and by whom they were saved, and how they are stored,
    does not count.

    Args:
        a, b: The checkpoints.
        options: Memory bound, threads and progress.

    Raises:
        NotFoundError, FormatError: One is no checkpoint.
        IntegrityError: Chunks that have to be read are damaged.

    Example:
        >>> import tempfile, numpy as np, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pc.save(f"{folder}/a", {"w": np.arange(6.0), "step": 1})
        ...     _ = pc.save(f"{folder}/b", {"w": np.arange(6.0) ** 2, "step": 1})
        ...     print(*diff(f"{folder}/a", f"{folder}/b").differences)
        w  values: 4 elements differ, by at most 20 at [5]
    """
    settings = given_or_default(options, LoadOptions)
    with (
        Checkpoint(a, verify=True, options=settings) as one,
        Checkpoint(b, verify=True, options=settings) as other,
    ):
        differences, pairs = diffing.compare_manifests(one.manifest, other.manifest)
        differences += _per_process(one, other)
        unlike, equal = _unlike(one, other, pairs)
        with showing("comparing", settings.progress) as progress:
            found = _read(one, other, unlike, settings, progress)
    differences += [
        Difference(path=path, kind="values", a=None, b=None, values=value)
        for path, value in found.items()
    ]
    order = {text: at for at, text in enumerate(one.keys())}
    return DiffReport(
        a=str(locate(a)),
        b=str(locate(b)),
        differences=tuple(sorted(differences, key=lambda d: order.get(d.path, len(order)))),
        leaves=len(pairs),
        equal_chunks=equal,
        nbytes_read=sum(map(_nbytes, unlike)),
    )


def _per_process(one: Checkpoint, other: Checkpoint) -> Iterator[Difference]:
    for leaf in one.manifest.leaves:
        twin = other.manifest.by_text.get(leaf.text)
        if leaf.per_process and twin is not None and twin.per_process:
            a, b = one[leaf.text], other[leaf.text]
            if wire.encode(a) != wire.encode(b):
                have, want = map(values.to_text, (a, b))
                yield Difference(path=leaf.text, kind="values", a=have, b=want)


def _unlike(one: Checkpoint, other: Checkpoint, pairs: Sequence[Pair]) -> tuple[list[Region], int]:
    """The regions whose digests do not prove them equal, and the number of those that do."""
    found, equal = [], 0
    comparable = one.manifest.digest == other.manifest.digest
    for pair in pairs:
        alike = comparable and pair.has_same_chunks
        for box in diffing.regions(pair).boxes() if pair.specs[0].nbytes else ():
            if alike and _digest(one, pair.a, box) == _digest(other, pair.b, box):
                equal += 1
            else:
                found.append((pair, box))
    return found, equal


def _digest(checkpoint: Checkpoint, leaf: Leaf, box: Box) -> bytes:
    return checkpoint.index.chunk_digest(leaf.index, leaf.array, box.start)


def _read(
    one: Checkpoint,
    other: Checkpoint,
    regions: Sequence[Region],
    settings: LoadOptions,
    progress: Progress | None,
) -> dict[str, ValueDifference]:
    """What differs in regions, by leaf."""
    found: dict[str, ValueDifference] = {}
    done, total = 0, sum(map(_nbytes, regions))
    for batch in batches(regions, _nbytes, limit=settings.max_inflight_bytes // 2):
        ours = one.read_boxes([(pair.a, box) for pair, box in batch])
        theirs = other.read_boxes([(pair.b, box) for pair, box in batch])
        for (pair, box), a, b in zip(batch, ours, theirs, strict=True):
            is_key = pair.specs[0].kind == "key"
            part = diffing.compare_elements(a, b, start=box.start, are_numbers=not is_key)
            whole = diffing.join(found.get(pair.a.text), part)
            if whole is not None:
                found[pair.a.text] = whole
        done += sum(map(_nbytes, batch))
        if progress is not None:
            progress(done, total)
    return found


def _nbytes(region: Region) -> int:
    """Bytes of a region in both."""
    pair, box = region
    return box.size * (pair.specs[0].itemsize + pair.specs[1].itemsize)
