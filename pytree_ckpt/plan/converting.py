"""The plan of a conversion: what each leaf becomes, and in which order its bytes move.

A zarr shard is written in one piece, and a chunk is read in one piece. Shards that need the same
chunks are made in one batch, so that a chunk is read once; a batch is as large as memory allows.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pytree_ckpt.errors import Mismatch, MismatchError
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.format.manifest import PER_PROCESS, VALUE, Leaf, Manifest
from pytree_ckpt.format.paths import Path
from pytree_ckpt.format.shardings import Sharding
from pytree_ckpt.format.tables import Ints
from pytree_ckpt.format.trees import NodeKind, Tree, from_ends
from pytree_ckpt.format.values import count_text
from pytree_ckpt.options import check_count
from pytree_ckpt.plan import chunking, patterns, saving
from pytree_ckpt.plan.layouts import Layout, Shardings
from pytree_ckpt.plan.loading import plan_reads
from pytree_ckpt.plan.saving import ArrayForm, SavePlan
from pytree_ckpt.plan.selecting import selected

BATCH_NBYTES = 64 << 20
"""Bytes of source elements that a batch holds; two batches may be in memory."""
_SHARD_FRACTIONS = (2, 4, 8)
"""Parts of the usual size of a shard that are tried, until each chunk is read about once."""
_ENOUGH = 1.1
"""Bytes read over bytes needed that no smaller shards are tried for."""

Row = tuple[int, int]
"""A leaf of the new checkpoint, and the number of a shard of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one process of a conversion writes, and the rows that it reads together."""

    plan: SavePlan
    batches: tuple[tuple[Row, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertPlan:
    """What a conversion does.

    Attributes:
        tree: The containers that are left.
        leaves: The saved leaf of each leaf.
        codes: For each leaf an index into `specs`, or the code of a value.
        specs: How arrays are stored; many leaves share one.
        passed_over: Leaves that a dtype by pattern does not fit, and that stay as they are.
        nbytes_read, nbytes_written: Bytes of the chunks read, and of the arrays written.
        parts: One for each process.
    """

    tree: Tree
    leaves: tuple[Leaf, ...]
    codes: tuple[int, ...]
    specs: tuple[ArraySpec, ...]
    passed_over: tuple[str, ...]
    nbytes_read: int
    nbytes_written: int
    process_count: int
    parts: tuple[Part, ...]

    def spec(self, leaf: int) -> ArraySpec:
        return self.specs[self.codes[leaf]]

    def describe(self, leaf: int) -> str:
        """What a leaf becomes, in a few words."""
        if self.codes[leaf] < 0:
            return self.leaves[leaf].describe()
        spec = self.spec(leaf)
        files = count_text(spec.num_shards, "file")
        stored = spec.storage if spec.storage != "array" else files
        return f"{spec.describe()}, {stored}"

    def __str__(self) -> str:
        lines = [
            f"{leaf.text or '(root)'}  {leaf.describe()} -> {self.describe(at)}"
            for at, leaf in enumerate(self.leaves)
            if self.codes[at] >= 0
        ]
        lines += [f"{text}  stays as it is: no dtype of its kind" for text in self.passed_over]
        return "\n".join([*lines, self._total()])

    def __repr__(self) -> str:
        return f"ConvertPlan({count_text(len(self.leaves), 'leaf', 'leaves')}; {self._total()})"

    def _total(self) -> str:
        total = f"{self.nbytes_read} bytes to read, {self.nbytes_written} to write"
        return total + (f", in {len(self.parts)} processes" if len(self.parts) > 1 else "")


def plan_convert(
    manifest: Manifest,
    *,
    layout: Layout | None = None,
    like: Manifest | None = None,
    dtype: Mapping[str, str] | None = None,
    select: str | Sequence[str] = (),
    codec: str = "raw",
    max_chunk_nbytes: int | None = None,
    processes: int = 1,
) -> ConvertPlan:
    """Plan a conversion; every process comes to the same plan.

    Raises:
        ValueError: A pattern that is none, or an unknown dtype.
        MismatchError: What is asked for does not fit the checkpoint, with every reason.
    """
    if max_chunk_nbytes is not None:
        check_count("max_chunk_nbytes", max_chunk_nbytes)
    layout = layout or Layout()
    leaves, tree, wrong = _selected(manifest, select)
    shardings = Shardings(manifest, layout)
    casts = _Casts(dtype or {})
    process_count = int(layout.process_count or (like or manifest).process_count)
    forms: dict[tuple[object, ...], int] = {}
    made: list[ArrayForm] = []
    codes: list[int] = []
    for leaf in leaves:
        spec = leaf.spec
        if spec is None:
            codes.append(PER_PROCESS if leaf.per_process else VALUE)
            if leaf.per_process and process_count != manifest.process_count:
                wrong.append(_per_process(leaf, manifest.process_count, process_count))
            continue
        sharding = shardings.of(leaf) if like is None else _sharding_like(like, leaf, wrong)
        name = casts.of(leaf)
        key = (id(spec), sharding, name)
        if key not in forms:
            forms[key] = len(made)
            made.append(
                ArrayForm(
                    kind="jax" if sharding is not None and spec.kind != "key" else spec.kind,
                    dtype=name,
                    shape=spec.shape,
                    sharding=sharding,
                    weak_type=spec.weak_type and name == spec.dtype,
                    committed=spec.committed or sharding != spec.sharding,
                    key_impl=spec.key_impl,
                    key_ndim=spec.key_ndim,
                    max_chunk_nbytes=max_chunk_nbytes,
                )
            )
        codes.append(forms[key])
    wrong += [*shardings.finish(), *casts.finish()]
    if wrong:
        remedy = "A pattern must match, and what it asks for must fit every leaf it matches."
        raise MismatchError(wrong, leaves=len(manifest.leaves), remedy=remedy)
    return _planned(tree, leaves, made, codes, casts, codec, processes, process_count)


def _selected(
    manifest: Manifest, select: str | Sequence[str]
) -> tuple[list[Leaf], Tree, list[Mismatch]]:
    """The leaves that any pattern matches, in the tree that is left of them."""
    leaves, wrong = selected(manifest.leaves, select)
    if wrong or not select:
        return leaves, manifest.tree, wrong
    ends: dict[Path, NodeKind] = {leaf.path: "leaf" for leaf in leaves}
    return leaves, from_ends(ends, known=manifest.tree), wrong


def _per_process(leaf: Leaf, saved: int, wanted: int) -> Mismatch:
    text = f"one value for each of {saved} processes, converting for {wanted}: leave it out"
    return Mismatch(path=leaf.text, kind="per process", text=f"process count: {text}")


def _sharding_like(like: Manifest, leaf: Leaf, wrong: list[Mismatch]) -> Sharding | None:
    """The sharding that the leaf of the same path and shape has in another checkpoint."""
    other, spec = like.by_text.get(leaf.text), leaf.array
    if other is None or other.spec is None:
        text = "sharding: the checkpoint whose layout is wanted has no such array"
    elif other.spec.shape != spec.shape or (other.spec.kind == "key") != (spec.kind == "key"):
        text = f"shape: saved {leaf.describe()}, in the checkpoint whose layout is wanted "
        text += other.describe()
    else:
        return other.spec.sharding
    wrong.append(Mismatch(path=leaf.text, kind="sharding", text=text))
    return None


class _Casts:
    """Finds the new dtype of each leaf.

    A pattern with wildcards changes leaves of the kind of its dtype only, floats to floats: the
    counters among the weights stay counters. A whole path changes what it names, by the rules of
    a load with `cast=True`.
    """

    def __init__(self, dtype: Mapping[str, str]) -> None:
        self.passed_over: list[str] = []
        self._wrong: list[Mismatch] = []
        if not isinstance(dtype, Mapping):
            raise ValueError(
                f"dtype must be a dict such as {{'params/**': 'bfloat16'}}, not {dtype!r}"
            )
        self._rules = [(patterns.parse(text), name) for text, name in dtype.items()]
        self._unused = dict.fromkeys(dtype)
        for name in dtype.values():
            if not dtypes.is_known(name):
                raise ValueError(f"a dtype is given by its name, such as 'bfloat16', not {name!r}")

    def of(self, leaf: Leaf) -> str:
        """The dtype to store a leaf in."""
        spec, saved = leaf.array, leaf.array.dtype
        for pattern, name in self._rules:
            if pattern.match(leaf.text) is None:
                continue
            same_kind = dtypes.kind_of(name) == dtypes.kind_of(saved)
            if spec.kind != "key" and (same_kind or not pattern.wildcards):
                self._unused.pop(pattern.text, None)
                if dtypes.kind_of(saved) == "complex" != dtypes.kind_of(name):
                    self._refuse(leaf.text, f"{saved} to {name} would drop imaginary parts")
                return name
            if not pattern.wildcards:
                self._unused.pop(pattern.text, None)
                self._refuse(leaf.text, f"PRNG keys are no numbers, they cannot become {name}")
            elif leaf.text not in self.passed_over:
                self.passed_over.append(leaf.text)
        return saved

    def finish(self) -> list[Mismatch]:
        """Every reason, also for patterns that changed nothing."""
        for text in self._unused:
            self._refuse(text, "no array is converted by this pattern")
        return self._wrong

    def _refuse(self, path: str, text: str) -> None:
        self._wrong.append(Mismatch(path=path, kind="dtype", text=f"dtype: {text}"))


def _planned(
    tree: Tree,
    leaves: Sequence[Leaf],
    forms: Sequence[ArrayForm],
    codes: Sequence[int],
    casts: _Casts,
    codec: str,
    processes: int,
    process_count: int,
) -> ConvertPlan:
    source_of = {code: leaf.array for leaf, code in zip(leaves, codes, strict=True) if code >= 0}
    fitted = [_fit(source_of[code], form, codec) for code, form in enumerate(forms)]
    specs = tuple(cut.spec for cut in fitted)
    moves: dict[str, list[_Batch]] = {"array": [], "packed": []}
    for at, code in enumerate(codes):
        if code < 0 or specs[code].storage == "empty":
            continue
        for shards, nbytes in fitted[code].batches:
            batch = _Batch(tuple((at, shard) for shard in shards), nbytes)
            moves[specs[code].storage].append(batch)
    dealt = _dealt(moves, processes)
    paths = [leaf.path for leaf in leaves]
    parts = tuple(
        Part(
            plan=saving.assemble(paths, specs, tuple(codes), _shards_of(mine, len(codes))),
            batches=tuple(batch.rows for batch in mine),
        )
        for mine in dealt
    )
    counts = [list(codes).count(code) for code in range(len(specs))]
    return ConvertPlan(
        tree=tree,
        leaves=tuple(leaves),
        codes=tuple(codes),
        specs=specs,
        passed_over=tuple(casts.passed_over),
        nbytes_read=sum(n * cut.nbytes_read for n, cut in zip(counts, fitted, strict=True)),
        nbytes_written=sum(n * spec.nbytes for n, spec in zip(counts, specs, strict=True)),
        process_count=process_count,
        parts=parts,
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows that are read together, and the bytes that this takes."""

    rows: tuple[Row, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How a form is stored, and its shards in batches, each with its bytes in the source."""

    spec: ArraySpec
    batches: tuple[tuple[tuple[int, ...], int], ...]
    nbytes_read: int


def _fit(source: ArraySpec, form: ArrayForm, codec: str) -> _Cut:
    """Cut a form into the largest shards for which each chunk of the source is read about once."""
    tried = []
    for fraction in _SHARD_FRACTIONS:
        bounded = dataclasses.replace(
            form, max_shard_nbytes=max(chunking.MAX_SHARD_NBYTES // fraction, 1)
        )
        cut = _cut(source, bounded, codec)
        tried.append(cut)
        if cut.nbytes_read <= _ENOUGH * source.nbytes:
            return cut
    return min(tried, key=lambda cut: cut.nbytes_read)


def _cut(source: ArraySpec, form: ArrayForm, codec: str) -> _Cut:
    spec, _ = saving.store(form, defaultdict(int), codec)
    if spec.storage == "empty":
        return _Cut(spec=spec, batches=(), nbytes_read=0)
    boxes = list(spec.shards.boxes())
    sizes = [box.size * source.itemsize for box in boxes]
    batches = _batched(source, boxes, sizes)
    return _Cut(
        spec=spec,
        batches=tuple((shards, sum(sizes[shard] for shard in shards)) for shards in batches),
        nbytes_read=sum(
            plan_reads(source, [boxes[shard] for shard in shards]).nbytes_read for shards in batches
        ),
    )


def _batched(
    source: ArraySpec, boxes: Sequence[Box], sizes: Sequence[int]
) -> list[tuple[int, ...]]:
    """Shards in batches of at most `BATCH_NBYTES`, or one: those that share chunks together."""
    found: list[list[int]] = []
    used = 0
    for unit in plan_reads(source, boxes).units:
        fits = used + sum(sizes[shard] for shard in unit.boxes) <= BATCH_NBYTES
        if not fits:
            used = BATCH_NBYTES  # A unit that does not fit begins a batch of its own.
        for shard in unit.boxes:
            if not found or used + sizes[shard] > BATCH_NBYTES:
                found.append([])
                used = 0
            found[-1].append(shard)
            used += sizes[shard]
    return [tuple(batch) for batch in found]


def _dealt(moves: Mapping[str, list[_Batch]], processes: int) -> list[list[_Batch]]:
    """Each process gets a run of the batches, of about equal bytes; small ones are joined."""
    total = max(sum(batch.nbytes for batches in moves.values() for batch in batches), 1)
    dealt: list[list[_Batch]] = [[] for _ in range(processes)]
    done = 0
    for batches in moves.values():
        for number, batch in enumerate(batches):
            mine = dealt[min(done * processes // total, processes - 1)]
            done += batch.nbytes
            last = mine[-1] if mine and number else None
            if last is not None and last.nbytes + batch.nbytes <= BATCH_NBYTES:
                mine[-1] = _Batch(last.rows + batch.rows, last.nbytes + batch.nbytes)
            else:
                mine.append(batch)
    return dealt


def _shards_of(batches: Sequence[_Batch], leaves: int) -> list[Ints]:
    found: list[list[int]] = [[] for _ in range(leaves)]
    for batch in batches:
        for leaf, shard in batch.rows:
            found[leaf].append(shard)
    return [np.asarray(sorted(shards), np.int64) for shards in found]
