"""Tables: where every shard is and what its chunks hash to, each of them exactly once."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import hypothesis
import jax
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.format import tables
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Grid, Shape
from pytree_ckpt.format.tables import Packed, Rows, ShardIndex, Table
from pytree_ckpt.plan import chunking
from tests.conftest import make_mesh

NBYTES = {"sha256": 32, "xxh3_128": 16}


def ints(*numbers: int) -> Any:
    return np.asarray(numbers, np.int64)


def rows(**fields: Any) -> Rows:
    return Rows(**{"leaf": ints(0, 0, 2), "shard": ints(0, 1, 0), "digests": b"d" * 96} | fields)


def table(**fields: Any) -> Table:
    """A table with two leaves in arrays of their own, and one packed."""
    return Table(
        **{
            "process": 0,
            "arrays": rows(),
            "packed_rows": rows(leaf=ints(1), shard=ints(0), offset=ints(64), digests=b"p" * 32),
            "packed": Packed(nbytes=128, shard_nbytes=128, chunk_nbytes=64),
            "per_process": {(3, 0): {"position": 1}},
        }
        | fields
    )


def plain(made: Table) -> Any:
    """A table without numpy, to compare."""

    def columns(part: Rows) -> Any:
        return part.leaf.tolist(), part.shard.tolist(), part.offset.tolist(), part.digests

    return (
        made.process,
        columns(made.arrays),
        columns(made.packed_rows),
        made.packed,
        dict(made.per_process),
    )


# --- the file -----------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text("abé", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=2),
    max_leaves=6,
)


@st.composite
def any_rows(draw: st.DrawFn, *, packed: bool) -> Rows:
    pairs = sorted(
        draw(
            st.sets(
                st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)),
                min_size=int(packed),
                max_size=6,
            )
        )
    )
    offsets = st.integers(0, 2**63 - 1)
    return Rows(
        leaf=ints(*(leaf for leaf, _ in pairs)),
        shard=ints(*(shard for _, shard in pairs)),
        offset=ints(*(draw(offsets) for _ in pairs)) if packed else ints(),
        digests=draw(st.binary(max_size=64)),
    )


@st.composite
def any_tables(draw: st.DrawFn) -> Table:
    has_packed = draw(st.booleans())
    chunk, shards = draw(st.integers(1, 2**20)), draw(st.integers(1, 2**20))
    chunks = draw(st.integers(1, tables.MAX_PACKED_SHARD_NBYTES // chunk))
    return Table(
        process=draw(st.integers(0, 10**6)),
        arrays=draw(any_rows(packed=False)),
        packed_rows=draw(any_rows(packed=True)) if has_packed else Rows(),
        packed=Packed(nbytes=chunk * shards, shard_nbytes=chunk * chunks, chunk_nbytes=chunk)
        if has_packed
        else None,
        per_process=draw(
            st.dictionaries(st.tuples(st.integers(0, 99), st.integers(0, 9)), JSON, max_size=3)
        ),
    )


@hypothesis.settings(max_examples=150)
@given(made=any_tables())
def test_every_table_reads_back_as_it_was_written(made: Table) -> None:
    data, digest = tables.to_bytes(made)
    found, its_digest = tables.from_bytes(data, what="it")
    assert its_digest == digest == hashlib.sha256(msgpack.unpackb(data)["body"]).digest()
    assert plain(found) == plain(made)
    assert tables.to_bytes(found) == (data, digest)


def test_equal_tables_give_equal_bytes() -> None:
    one = table(per_process={(3, 0): 1, (4, 0): 2})
    two = table(per_process={(4, 0): 2, (3, 0): 1})
    assert tables.to_bytes(one) == tables.to_bytes(two)
    assert tables.to_bytes(one) != tables.to_bytes(table())


# --- what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"shard": ints(0, 1)}, "differ in length"),
        ({"offset": ints(0, 64)}, "differ in length"),
        ({"leaf": ints(-1, 0, 2)}, "negative index"),
        ({"shard": ints(-1, 1, 0)}, "negative index"),
        ({"leaf": ints(0, 2, 0)}, "not in order"),
        ({"shard": ints(1, 0, 0)}, "not in order"),
        ({"shard": ints(1, 1, 0)}, "not in order"),
        ({"leaf": ints(0, 0, 0), "shard": ints(0, 1, 1)}, "not in order"),
    ],
)
def test_rows_that_cannot_be_are_not_made(fields: dict[str, Any], text: str) -> None:
    assert rows()
    with pytest.raises(ValueError, match=text):
        rows(**fields)


@pytest.mark.parametrize(
    ("extent", "text"),
    [
        ((0, 64, 64), "bad extent"),
        ((-64, 64, 64), "bad extent"),
        ((64, 64, 0), "bad extent"),
        ((64, 64, -64), "bad extent"),
        ((128, 64, 128), "bad extent"),
        ((128, 96, 64), "do not divide"),
        ((96, 128, 64), "do not divide"),
        ((2**30, 2**30, 2**30), "beyond any limit"),
        ((2**61, 64, 64), "beyond any limit"),
        ((64, 2**61, 64), "beyond any limit"),
    ],
)
def test_a_packed_array_that_cannot_be_is_not_made(extent: tuple[int, int, int], text: str) -> None:
    nbytes, shard_nbytes, chunk_nbytes = extent
    with pytest.raises(ValueError, match=text):
        Packed(nbytes=nbytes, shard_nbytes=shard_nbytes, chunk_nbytes=chunk_nbytes)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"process": -1}, "negative process"),
        ({"packed": None}, "without a packed array"),
        ({"packed_rows": Rows()}, "without a packed array"),
        ({"packed_rows": rows(leaf=ints(1), shard=ints(0))}, "without offsets"),
        ({"arrays": rows(offset=ints(0, 1, 2))}, "not packed"),
    ],
)
def test_a_table_that_cannot_be_is_not_made(fields: dict[str, Any], text: str) -> None:
    assert table()
    with pytest.raises(ValueError, match=text):
        table(**fields)


# --- coverage -----------------------------------------------------------------------------------


def spec(shape: Shape, shard: Shape, chunk: Shape, storage: Any = "array") -> ArraySpec:
    return ArraySpec(
        kind="numpy",
        dtype="int16",
        shape=shape,
        sharding=None,
        storage=storage,
        shard_shape=shard,
        chunk_shape=chunk,
    )


SPECS = [
    spec((4, 6), (2, 6), (1, 3)),
    None,
    spec((5, 4), (2, 2), (2, 1)),  # the last shards are cut off
    spec((8,), (4,), (4,), "packed"),
    spec((7,), (4,), (4,), "packed"),  # and so is this one
    spec((0, 3), (1, 3), (1, 3), "empty"),
    spec((), (), (), "packed"),
    spec((4, 6), (4, 6), (1, 3)),
]
"""None stands for a leaf that is a Python value."""


def digest_of(leaf: int, shard: int, chunk: int, nbytes: int) -> bytes:
    return hashlib.sha256(f"{leaf} {shard} {chunk}".encode()).digest()[:nbytes]


def chunks_of(leaf: int, shard: int) -> int:
    found = SPECS[leaf]
    assert found is not None
    box = found.shards.box(shard)
    return Grid(box.shape, found.chunk_shape).size


def all_shards(storage: str) -> list[tuple[int, int]]:
    return [
        (leaf, shard)
        for leaf, found in enumerate(SPECS)
        if found is not None and found.storage == storage
        for shard in range(found.num_shards)
    ]


def table_of(process: int, wanted: list[tuple[int, int]], digest: str = "sha256") -> Table:
    """A right table of these shards."""
    parts = {}
    for storage in ("array", "packed"):
        pairs = [pair for pair in all_shards(storage) if pair in wanted]
        digests = [
            digest_of(*pair, chunk, NBYTES[digest])
            for pair in pairs
            for chunk in range(chunks_of(*pair))
        ]
        parts[storage] = Rows(
            leaf=ints(*(leaf for leaf, _ in pairs)),
            shard=ints(*(shard for _, shard in pairs)),
            offset=ints(*range(0, 64 * len(pairs), 64)) if storage == "packed" else ints(),
            digests=b"".join(digests),
        )
    count = len(parts["packed"].leaf)
    return Table(
        process=process,
        arrays=parts["array"],
        packed_rows=parts["packed"],
        packed=Packed(nbytes=64 * count, shard_nbytes=64 * count, chunk_nbytes=64)
        if count
        else None,
        per_process={},
    )


EVERY = all_shards("array") + all_shards("packed")


@pytest.mark.parametrize("digest", ["sha256", "xxh3_128"])
@given(owners=st.lists(st.integers(0, 2), min_size=len(EVERY), max_size=len(EVERY)))
def test_every_shard_is_found_with_its_own_digests_whoever_wrote_it(
    digest: str, owners: list[int]
) -> None:
    found = [
        table_of(p, [pair for pair, owner in zip(EVERY, owners, strict=True) if owner == p], digest)
        for p in range(3)
    ]
    index = ShardIndex(SPECS, found, digest=digest)
    for (leaf, shard), owner in zip(EVERY, owners, strict=True):
        at = SPECS[leaf]
        assert at is not None
        entry = index.entry(leaf, shard, at)
        assert entry.process == owner
        wanted = [digest_of(leaf, shard, c, NBYTES[digest]) for c in range(chunks_of(leaf, shard))]
        assert entry.digests == b"".join(wanted)
        if at.storage == "array":
            assert entry.offset is None
        else:
            own = found[owner].packed_rows
            (row,) = np.flatnonzero((own.leaf == leaf) & (own.shard == shard))
            assert entry.offset == own.offset[row]


def test_the_last_shards_of_an_array_may_have_fewer_chunks() -> None:
    assert [chunks_of(2, shard) for shard in range(6)] == [2, 2, 2, 2, 2, 2]
    ragged = spec((5, 4), (4, 4), (2, 4))
    assert [Grid(box.shape, (2, 4)).size for box in ragged.shards.boxes()] == [2, 1]
    right = Rows(leaf=ints(0, 0), shard=ints(0, 1), digests=b"d" * 96)
    index = ShardIndex(
        [ragged], [table(arrays=right, packed_rows=Rows(), packed=None)], digest="sha256"
    )
    assert [len(index.entry(0, shard, ragged).digests) for shard in (0, 1)] == [64, 32]
    wrong = dataclasses.replace(right, digests=b"d" * 128)
    with pytest.raises(pc.FormatError, match="one digest for each chunk"):
        ShardIndex(
            [ragged], [table(arrays=wrong, packed_rows=Rows(), packed=None)], digest="sha256"
        )


@given(
    owners=st.lists(st.integers(0, 1), min_size=len(EVERY), max_size=len(EVERY)),
    lost=st.integers(0, len(EVERY) - 1),
)
def test_a_shard_that_no_table_has_is_missed(owners: list[int], lost: int) -> None:
    parts: list[list[tuple[int, int]]] = [[], []]
    for number, (pair, owner) in enumerate(zip(EVERY, owners, strict=True)):
        if number != lost:
            parts[owner].append(pair)
    with pytest.raises(pc.FormatError, match=f"{len(EVERY) - 1} shards, .* {len(EVERY)}"):
        ShardIndex(SPECS, [table_of(p, part) for p, part in enumerate(parts)], digest="sha256")


@given(
    owners=st.lists(st.integers(0, 1), min_size=len(EVERY), max_size=len(EVERY)),
    twice=st.integers(0, len(EVERY) - 1),
    lost=st.integers(0, len(EVERY) - 1),
)
def test_a_shard_in_two_tables_is_refused_also_if_another_is_missing(
    owners: list[int], twice: int, lost: int
) -> None:
    parts: list[list[tuple[int, int]]] = [[], []]
    for pair, owner in zip(EVERY, owners, strict=True):
        parts[owner].append(pair)
    parts[1 - owners[twice]].append(EVERY[twice])
    if lost != twice:
        parts[owners[lost]].remove(EVERY[lost])
    with pytest.raises(pc.FormatError, match=r"shards|in two tables"):
        ShardIndex(SPECS, [table_of(p, part) for p, part in enumerate(parts)], digest="sha256")


def arrays_of(made: Table, **fields: Any) -> Table:
    return dataclasses.replace(made, arrays=dataclasses.replace(made.arrays, **fields))


def packed_of(made: Table, **fields: Any) -> Table:
    return dataclasses.replace(made, packed_rows=dataclasses.replace(made.packed_rows, **fields))


WHOLE = table_of(0, EVERY)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (arrays_of(WHOLE, digests=WHOLE.arrays.digests[:-32]), "one digest for each chunk"),
        (arrays_of(WHOLE, digests=WHOLE.arrays.digests + b"d" * 32), "one digest for each chunk"),
        (packed_of(WHOLE, digests=WHOLE.packed_rows.digests[:-1]), "one digest for each chunk"),
        (arrays_of(WHOLE, leaf=np.where(WHOLE.arrays.leaf == 7, 8, WHOLE.arrays.leaf)), "leaf"),
        (
            arrays_of(WHOLE, leaf=np.where(WHOLE.arrays.leaf == 7, 2**32 - 1, WHOLE.arrays.leaf)),
            "leaf",
        ),
        (arrays_of(WHOLE, shard=np.where(WHOLE.arrays.leaf == 7, 1, WHOLE.arrays.shard)), "shard"),
        (
            arrays_of(WHOLE, shard=np.where(WHOLE.arrays.leaf == 7, 2**63 - 1, WHOLE.arrays.shard)),
            "shard",
        ),
        (
            packed_of(WHOLE, leaf=np.where(WHOLE.packed_rows.leaf == 6, 5, WHOLE.packed_rows.leaf)),
            "shard",
        ),
        (
            packed_of(
                arrays_of(WHOLE, leaf=np.where(WHOLE.arrays.leaf == 7, 6, WHOLE.arrays.leaf)),
                leaf=np.where(WHOLE.packed_rows.leaf == 6, 7, WHOLE.packed_rows.leaf),
            ),
            "lists leaf 6 as array",
        ),
        (packed_of(WHOLE, offset=WHOLE.packed_rows.offset + 63), "lies outside"),
        (packed_of(WHOLE, offset=WHOLE.packed_rows.offset + 2**62), "lies outside"),
    ],
)
def test_rows_that_do_not_fit_the_manifest_are_refused(made: Table, text: str) -> None:
    assert ShardIndex(SPECS, [WHOLE], digest="sha256")
    with pytest.raises(pc.FormatError, match=text):
        ShardIndex(SPECS, [made], digest="sha256")


def test_a_digest_of_another_length_is_refused() -> None:
    with pytest.raises(pc.FormatError, match="one digest for each chunk"):
        ShardIndex(SPECS, [WHOLE], digest="xxh3_128")


def test_nothing_is_covered_by_nothing() -> None:
    nothing = Table(process=0, arrays=Rows(), packed_rows=Rows(), packed=None, per_process={})
    assert ShardIndex([], [nothing], digest="sha256")
    assert ShardIndex([None, SPECS[5]], [nothing], digest="sha256")
    with pytest.raises(pc.FormatError, match="digests of no shard"):
        ShardIndex(
            [], [dataclasses.replace(nothing, arrays=Rows(digests=b"d" * 32))], digest="sha256"
        )


# --- what a save writes -------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("digest", ["sha256", "xxh3_128"])
def test_a_table_has_the_digests_of_the_elements_that_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: Any, compress: Any
) -> None:
    if digest == "sha256":

        def hashed(data: bytes) -> bytes:
            return hashlib.sha256(data).digest()
    else:
        hashed = pytest.importorskip("xxhash").xxh3_128_digest
    monkeypatch.setattr(chunking, "PACK_BELOW_NBYTES", 128)
    monkeypatch.setattr(chunking, "MAX_CHUNK_NBYTES", 64)
    mesh = make_mesh((4, 2), ("data", "model"))
    rng = np.random.default_rng(0)
    host = {
        "both": rng.normal(size=(32, 16)).astype(np.float32),
        "rows": rng.integers(0, 99, 8, np.int32),
        "numpy": rng.normal(size=(5, 3)),
        "scalar": np.float16(3),
        "zeros": np.zeros((64, 4), np.uint8),
    }
    state = host | {
        "both": jax.device_put(host["both"], NamedSharding(mesh, PartitionSpec("data", "model"))),
        "rows": jax.device_put(host["rows"], NamedSharding(mesh, PartitionSpec("model"))),
    }
    manifest = pc.save(
        tmp_path, state, options=pc.SaveOptions(digest=digest, compress=compress, threads=2)
    )
    data = tmp_path / manifest.data_dir / "tables" / "00000.msgpack"
    found, its_id = tables.from_bytes(data.read_bytes(), what="it")
    assert manifest.tables[0].id == its_id
    assert manifest.tables[0].nbytes == data.stat().st_size
    index = ShardIndex(manifest.leaf_specs, [found], digest=digest)
    seen = 0
    for leaf in manifest.leaves:
        at = leaf.spec
        assert at is not None
        array = np.asarray(host[leaf.text])
        for shard in range(at.num_shards):
            piece = array[at.shards.box(shard).slices()]
            chunks = Grid(piece.shape, at.chunk_shape)
            wanted = [hashed(piece[box.slices()].tobytes()) for box in chunks.boxes()]
            assert index.entry(leaf.index, shard, at).digests == b"".join(wanted), leaf.text
            seen += len(wanted)
    assert seen == manifest.num_chunks == 4 * 8 + 2 + 1 + 1 + 4


def test_packed_shards_are_aligned_and_apart_and_none_crosses_a_file(tmp_path: Path) -> None:
    sizes = [1, 63, 64, 65, 1000, 1 << 19, (1 << 20) - 1]
    state = {f"w{n}": np.full(sizes[n % len(sizes)], n % 251, np.uint8) for n in range(100)}
    manifest = pc.save(tmp_path, state)
    data = tmp_path / manifest.data_dir
    found, _ = tables.from_bytes((data / "tables/00000.msgpack").read_bytes(), what="it")
    packed, own = found.packed, found.packed_rows
    assert packed is not None
    assert len(own.leaf) == len(state)
    assert (
        len(list((data / "packed/00000").glob("c.*")))
        == -(-packed.nbytes // packed.shard_nbytes)
        > 1
    )
    ends = []
    for leaf, offset in sorted(
        zip(own.leaf.tolist(), own.offset.tolist(), strict=True), key=lambda p: p[1]
    ):
        nbytes = len(state[manifest.leaves[leaf].text])
        assert offset % 64 == 0
        assert not ends or offset >= ends[-1]
        assert offset // packed.shard_nbytes == (offset + nbytes - 1) // packed.shard_nbytes
        ends.append(offset + nbytes)
    assert ends[-1] <= packed.nbytes
