"""Any sharding loads into any other; JAX's own `device_put` of the original is the oracle."""

import itertools
import math
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import pytree_ckpt as pc
from pytree_ckpt.plan import chunking
from pytree_ckpt.store.reading import CheckpointReader

P = PartitionSpec
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where hundreds of small checkpoints cost no disk its syncs."""
DTYPES = [
    np.dtype(dtype)
    for dtype in (
        np.float32,
        np.int8,
        np.bool_,
        np.complex64,
        np.uint16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.int4,
    )
]


def memory_kinds() -> list[str]:
    return [memory.kind for memory in jax.devices()[0].addressable_memories()]


def other_memory_kind() -> str:
    if "pinned_host" not in memory_kinds():
        pytest.skip("this backend has no pinned_host memory")
    return "pinned_host"


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...], order: Any = None) -> Mesh:
    """A mesh of the first devices, or of those at the places in `order`."""
    count = math.prod(sizes)
    devices = [jax.devices()[at] for at in (range(count) if order is None else order)]
    return Mesh(np.array(devices).reshape(sizes), names)


def numbered(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """An array in which a misplaced element shows."""
    bits = np.random.default_rng(math.prod(shape)).integers(0, 127, shape)
    if np.dtype(dtype).itemsize > 1:
        bits = np.arange(math.prod(shape)).reshape(shape) + 1
    return bits.astype(dtype)


@contextmanager
def readers() -> Iterator[list[CheckpointReader]]:
    """The readers that are made inside the block."""
    found: list[CheckpointReader] = []
    make = CheckpointReader.__init__

    def noting(self: CheckpointReader, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        found.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointReader, "__init__", noting)
        yield found


def check_array(found: Any, original: np.ndarray, sharding: Any) -> None:
    """Every shard on every device is what `device_put` would have put there."""
    assert isinstance(found, jax.Array)
    assert found.dtype == original.dtype
    assert found.shape == original.shape
    if sharding is None:
        assert not found.committed
        assert found.sharding.device_set == {jax.devices()[0]}
        sharding = found.sharding
    assert found.sharding == sharding
    assert found.sharding.memory_kind == sharding.memory_kind
    expected = jax.device_put(original, sharding)
    for have, want in zip(found.addressable_shards, expected.addressable_shards, strict=True):
        assert (have.device, have.index) == (want.device, want.index)
        assert have.data.sharding.memory_kind == want.data.sharding.memory_kind
        assert np.asarray(have.data).tobytes() == np.asarray(want.data).tobytes()
    assert np.asarray(found).tobytes() == original.tobytes()


def chunks_in(manifest: pc.Manifest) -> int:
    return sum(s.num_shards * s.chunks.size for s in manifest.leaf_specs if s is not None)


def moved(
    folder: Path, original: np.ndarray, source: Any, wanted: Any, **options: Any
) -> jax.Array:
    """Save an array in one sharding, load it in another, check all of it and the reads."""
    manifest = pc.save(folder, {"w": jax.device_put(original, source)}, **options)
    target = {"w": jax.ShapeDtypeStruct(original.shape, original.dtype, sharding=wanted)}
    with readers() as used:
        found = pc.load(folder, target, reshard=True)["w"]
    check_array(found, original, wanted)
    (reader,) = used
    assert reader.stats.chunks == chunks_in(manifest)
    assert reader.stats.nbytes == original.nbytes
    return found


# --- anything into anything -------------------------------------------------------------------

MESH_SIZES = [
    sizes
    for ndim in (1, 2, 3)
    for sizes in itertools.product((1, 2, 3, 4, 5, 6, 7, 8), repeat=ndim)
    if math.prod(sizes) <= 8
]


def placement(rng: random.Random, shape: tuple[int, ...]) -> Any:
    """Where an array may be: "numpy", None (JAX's default device) or a sharding."""
    kind = rng.choice(["numpy", "default", "single"] + ["mesh"] * 7)
    if kind == "numpy":
        return "numpy"
    if kind == "default":
        return None
    memory_kind = rng.choice([None, None, *memory_kinds()])
    if kind == "single":
        return SingleDeviceSharding(rng.choice(jax.devices()), memory_kind=memory_kind)
    sizes = rng.choice(MESH_SIZES)
    names = tuple(rng.sample(["x", "y", "z"], len(sizes)))
    mesh = mesh_of(sizes, names, rng.sample(range(8), math.prod(sizes)))
    size_of = dict(zip(names, sizes, strict=True))
    entries: list[list[str]] = [[] for _ in shape]
    for axis in rng.sample(names, len(names)):
        fitting = [
            entry
            for entry, extent in zip(entries, shape, strict=True)
            if extent % math.prod(size_of[name] for name in [*entry, axis]) == 0
        ]
        if fitting and rng.random() < 0.8:
            rng.choice(fitting).append(axis)
    spec = P(
        *(tuple(entry) if len(entry) > 1 else entry[0] if entry else None for entry in entries)
    )
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


RANDOMS = st.randoms(use_true_random=True)
"""Choices of their own for each example: those of Hypothesis are variations of few."""


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[np.ndarray, Any, Any]]:
    """Some small arrays, each with the place it is saved from and the place it is loaded to."""
    rng, found = draw(RANDOMS), []
    for _ in range(rng.randint(1, 3)):
        extents = [*range(9), *(2, 4, 6, 8) * 3]
        shape = tuple(rng.choices(extents, k=rng.randint(0, 4)))
        original = numbered(shape, rng.choice(DTYPES))
        found.append((original, placement(rng, shape), placement(rng, shape)))
    return found


def placed(original: np.ndarray, place: Any) -> Any:
    if isinstance(place, str):
        return original
    return jnp.asarray(original) if place is None else jax.device_put(original, place)


def asked(original: np.ndarray, place: Any) -> Any:
    if isinstance(place, str):
        return np.zeros_like(original)
    if place is None:
        return jnp.zeros_like(original)
    return jax.ShapeDtypeStruct(original.shape, original.dtype, sharding=place)


def check_leaf(leaf: Any, original: np.ndarray, wanted: Any) -> None:
    """A leaf is the array that was asked for."""
    if not isinstance(wanted, str):
        check_array(leaf, original, wanted)
        return
    assert type(leaf) is np.ndarray
    assert (leaf.dtype, leaf.shape) == (original.dtype, original.shape)
    assert leaf.tobytes() == original.tobytes()


def check_moves(
    cases: list[tuple[np.ndarray, Any, Any]], **options: Any
) -> tuple[pc.Manifest, CheckpointReader]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        manifest = pc.save(
            Path(folder) / "ckpt",
            [placed(original, source) for original, source, _ in cases],
            options=pc.SaveOptions(**options),
        )
        with readers() as used:
            found = pc.load(
                Path(folder) / "ckpt",
                [asked(original, wanted) for original, _, wanted in cases],
                reshard=True,
            )
    for leaf, (original, _, wanted) in zip(found, cases, strict=True):
        check_leaf(leaf, original, wanted)
    (reader,) = used
    assert reader.stats.nbytes == sum(original.nbytes for original, _, _ in cases)
    assert reader.stats.chunks == chunks_in(manifest)
    return manifest, reader


@given(moves())
@settings(max_examples=160)
def test_any_sharding_loads_into_any_sharding(cases: list[tuple[np.ndarray, Any, Any]]) -> None:
    check_moves(cases)


@contextmanager
def small_files() -> Iterator[None]:
    """Limits at which an array of a few elements is treated as a large one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "MAX_SHARD_NBYTES", 128)
        patch.setattr(chunking, "MAX_CHUNK_NBYTES", 24)
        patch.setattr(chunking, "PACK_BELOW_NBYTES", 16)
        patch.setattr(chunking, "MIN_SLICE_NBYTES", 32)
        patch.setattr("pytree_ckpt.verbs.assembly._PLACE_WHOLE_NBYTES", 64)
        patch.setattr("pytree_ckpt.plan.converting.BATCH_NBYTES", 96)
        yield


@given(moves(), st.sampled_from([None, "zstd"]), st.sampled_from(["sha256", "xxh3_128"]))
@settings(max_examples=80)
def test_any_sharding_loads_into_any_sharding_from_files_of_many_chunks(
    cases: list[tuple[np.ndarray, Any, Any]], compress: Any, digest: str
) -> None:
    with small_files():
        check_moves(cases, compress=compress, digest=digest)


@given(moves(), st.sampled_from([None, "zstd"]))
@settings(max_examples=60)
def test_any_layout_converts_into_any_other_and_loads_as_it(
    cases: list[tuple[np.ndarray, Any, Any]], compress: Any
) -> None:
    with small_files(), tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        src, like, dst = (Path(folder) / name for name in ("src", "like", "dst"))
        pc.save(src, [placed(original, source) for original, source, _ in cases])
        pc.save(like, [placed(original, wanted) for original, _, wanted in cases])
        pc.convert(src, dst, layout=like, options=pc.SaveOptions(compress=compress))
        found = pc.load(dst, [asked(original, wanted) for original, _, wanted in cases])
        for leaf, (original, _, wanted) in zip(found, cases, strict=True):
            check_leaf(leaf, original, wanted)
        assert "values" not in {difference.kind for difference in pc.diff(src, dst).differences}


@st.composite
def stacks(draw: st.DrawFn) -> tuple[np.ndarray, list[Any], Any]:
    """A stack of small arrays, where each of them is, and where the stack is."""
    rng = draw(RANDOMS)
    shape = tuple(rng.choices([0, 1, 2, 4, 6, 8], [1, 2, 4, 4, 4, 4], k=rng.randint(0, 3)))
    stack = numbered((rng.choice([1, 2, 3, 4, 8]), *shape), rng.choice(DTYPES))
    places = [placement(rng, shape) for _ in stack]
    if "numpy" in places:  # of which no stack is beside arrays on devices
        places = ["numpy"] * len(stack)
    return stack, places, placement(rng, stack.shape)


@given(stacks())
@settings(max_examples=60)
def test_arrays_in_any_layouts_stack_into_any_other_and_come_apart_again(
    case: tuple[np.ndarray, list[Any], Any],
) -> None:
    stack, places, place = case
    layers = {
        f"layer_{n}": (stack[n : n + 1].reshape(stack.shape[1:]), own)
        for n, own in enumerate(places)
    }
    with small_files(), tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        apart, together = Path(folder) / "apart", Path(folder) / "together"
        pc.save(apart, {name: placed(*layer) for name, layer in layers.items()})
        target: Any = {"stack": asked(stack, place)}
        found = pc.load(apart, target, stack={"layer_{}": "stack"}, reshard=True)
        check_leaf(found["stack"], stack, place)
        pc.save(together, {"stack": placed(stack, place)})
        target = {name: asked(*layer) for name, layer in layers.items()}
        found = pc.load(together, target, unstack={"stack": "layer_{}"}, reshard=True)
    for name, layer in layers.items():
        check_leaf(found[name], *layer)


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_small_limits_do_make_files_of_many_chunks(
    tmp_path: Path, mesh_4x2: Mesh, compress: Any
) -> None:
    original = numbered((16, 16))
    source = NamedSharding(mesh_4x2, P("data"))
    wanted = NamedSharding(mesh_4x2, P(None, ("model", "data")))
    with small_files():
        moved(tmp_path, original, source, wanted, options=pc.SaveOptions(compress=compress))
    (spec,) = pc.read_manifest(tmp_path).leaf_specs
    assert spec is not None
    assert spec.storage == "array"
    assert spec.num_shards > 4
    assert spec.chunks.size > 1


# --- the moves that people make ---------------------------------------------------------------


def test_from_eight_devices_to_six_of_them(tmp_path: Path, mesh_8: Mesh) -> None:
    six = mesh_of((6,), ("data",), [1, 2, 4, 5, 6, 7])
    moved(
        tmp_path,
        numbered((24, 5)),
        NamedSharding(mesh_8, P("data")),
        NamedSharding(six, P("data")),
    )


def test_from_eight_devices_to_one_and_back(tmp_path: Path, mesh_8: Mesh) -> None:
    rows = NamedSharding(mesh_8, P("data"))
    single = SingleDeviceSharding(jax.devices()[7])
    one = NamedSharding(mesh_of((1,), ("data",)), P("data"))
    for number, (source, wanted) in enumerate(
        [(rows, single), (rows, one), (single, rows), (one, rows)]
    ):
        moved(tmp_path / str(number), numbered((16, 3)), source, wanted)


def test_from_four_by_two_to_two_by_four(tmp_path: Path, mesh_4x2: Mesh, mesh_2x4: Mesh) -> None:
    spec = P("data", "model")
    moved(tmp_path, numbered((8, 8)), NamedSharding(mesh_4x2, spec), NamedSharding(mesh_2x4, spec))


def test_from_rows_to_columns(tmp_path: Path, mesh_8: Mesh) -> None:
    moved(
        tmp_path,
        numbered((16, 16)),
        NamedSharding(mesh_8, P("data")),
        NamedSharding(mesh_8, P(None, "data")),
    )


def test_to_other_names_of_the_same_axes(tmp_path: Path, mesh_4x2: Mesh) -> None:
    renamed = mesh_of((4, 2), ("replica", "shard"))
    source = NamedSharding(mesh_4x2, P("data", "model"))
    wanted = NamedSharding(renamed, P("replica", "shard"))
    pc.save(tmp_path / "a", {"w": jax.device_put(numbered((8, 8)), source)})
    target = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=wanted)}
    with pytest.raises(pc.MismatchError, match=r"mesh\(replica=4, shard=2\)"):
        pc.load(tmp_path / "a", target)
    moved(tmp_path / "b", numbered((8, 8)), source, wanted)


def test_another_order_of_devices_is_no_other_layout_and_each_gets_its_own_rows(
    tmp_path: Path, mesh_8: Mesh
) -> None:
    original = numbered((8, 4))
    shuffled = mesh_of((8,), ("data",), [3, 1, 0, 2, 7, 5, 6, 4])
    pc.save(tmp_path, {"w": jax.device_put(original, NamedSharding(shuffled, P("data")))})
    (spec,) = pc.read_manifest(tmp_path).leaf_specs
    assert spec is not None
    assert spec.sharding.mesh.device_ids == (3, 1, 0, 2, 7, 5, 6, 4)  # type: ignore[union-attr]
    natural = NamedSharding(mesh_8, P("data"))
    target = {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=natural)}
    check_array(pc.load(tmp_path, target)["w"], original, natural)
    as_saved = pc.load(tmp_path)["w"]
    check_array(as_saved, original, NamedSharding(shuffled, P("data")))


def test_a_transposed_grid_of_devices(tmp_path: Path, mesh_4x2: Mesh) -> None:
    transposed = Mesh(mesh_4x2.devices.reshape(2, 4).T, mesh_4x2.axis_names)
    spec = P("data", "model")
    moved(
        tmp_path, numbered((8, 8)), NamedSharding(mesh_4x2, spec), NamedSharding(transposed, spec)
    )


def test_between_the_two_orders_of_axes_in_one_entry(tmp_path: Path, mesh_2x4: Mesh) -> None:
    first = NamedSharding(mesh_2x4, P(("data", "model")))
    second = NamedSharding(mesh_2x4, P(("model", "data")))
    original = numbered((16,))
    pc.save(tmp_path / "a", {"w": jax.device_put(original, first)})
    target = {"w": jax.ShapeDtypeStruct((16,), np.float32, sharding=second)}
    with pytest.raises(pc.MismatchError, match=r"P\(\('model', 'data'\)\)"):
        pc.load(tmp_path / "a", target)
    moved(tmp_path / "b", original, first, second)
    moved(tmp_path / "c", original, second, first)


def test_between_device_memory_and_pinned_host_memory(tmp_path: Path, mesh_4x2: Mesh) -> None:
    kind = other_memory_kind()
    on_device = NamedSharding(mesh_4x2, P("data"))
    on_host = NamedSharding(mesh_4x2, P("data"), memory_kind=kind)
    original = numbered((8, 2))
    moved(tmp_path / "a", original, on_device, on_host)
    moved(tmp_path / "b", original, on_host, on_device)
    # Without a target each array comes back to the kind of memory that it was saved from.
    check_array(pc.load(tmp_path / "b")["w"], original, on_host)
    target = {"w": jax.ShapeDtypeStruct(original.shape, original.dtype, sharding=on_device)}
    with pytest.raises(pc.MismatchError, match="memory kind: saved pinned_host"):
        pc.load(tmp_path / "b", target)


def test_placements_of_every_kind_in_one_tree_each_come_back(
    tmp_path: Path, mesh_2x4: Mesh
) -> None:
    originals = {
        "sharded": numbered((4, 4), np.int32),
        "replicated": numbered((3,), np.int32),
        "partly": numbered((8, 8)),
        "one": numbered((5,)),
        "empty": numbered((0, 8), ml_dtypes.bfloat16),
        "scalar": numbered(()),
    }
    shardings = {
        "sharded": NamedSharding(mesh_2x4, P("data", "model")),
        "replicated": NamedSharding(mesh_2x4, P()),
        "partly": NamedSharding(mesh_2x4, P("data")),
        "one": SingleDeviceSharding(jax.devices()[3]),
        "empty": NamedSharding(mesh_2x4, P(None, "model")),
        "scalar": NamedSharding(mesh_2x4, P()),
    }
    state = {name: jax.device_put(originals[name], shardings[name]) for name in originals}
    state["host"] = numbered((5,))
    manifest = pc.save(tmp_path, state)
    replicated = manifest.by_text["replicated"].spec
    assert replicated is not None
    assert replicated.num_shards == 1  # the replicas are written once
    for found in (pc.load(tmp_path), pc.load(tmp_path, state)):
        for name, original in originals.items():
            check_array(found[name], original, shardings[name])
        assert type(found["host"]) is np.ndarray
        np.testing.assert_array_equal(found["host"], state["host"])


def test_a_sharded_array_of_keys_moves_with_its_key_data(tmp_path: Path, mesh_8: Mesh) -> None:
    for number, impl in enumerate(("threefry2x32", "rbg", "unsafe_rbg")):
        keys = jax.random.split(jax.random.key(7, impl=impl), 8)
        pc.save(
            tmp_path / str(number), {"k": jax.device_put(keys, NamedSharding(mesh_8, P("data")))}
        )
        wanted = NamedSharding(mesh_of((2, 2), ("a", "b"), [6, 4, 2, 0]), P(("b", "a")))
        target = {"k": jax.ShapeDtypeStruct((8,), keys.dtype, sharding=wanted)}
        found = pc.load(tmp_path / str(number), target, reshard=True)["k"]
        assert found.dtype == keys.dtype
        assert found.sharding == wanted
        assert str(jax.random.key_impl(found)) == impl
        np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


def test_complex_numbers_keep_every_bit_on_the_way(
    tmp_path: Path, mesh_2x4: Mesh, mesh_4x2: Mesh
) -> None:
    original = numbered((8, 4), np.complex64)
    original[0] = [complex(-0.0, np.inf), complex(np.nan, -0.0), 0j, complex(0.0, -0.0)]
    spec = P("data", "model")
    moved(tmp_path, original, NamedSharding(mesh_2x4, spec), NamedSharding(mesh_4x2, spec))


def test_all_zeros_and_all_negative_zeros_stay_what_they_are(tmp_path: Path, mesh_8: Mesh) -> None:
    rows, all_of_it = NamedSharding(mesh_8, P("data")), NamedSharding(mesh_8, P())
    with small_files():
        for number, value in enumerate((0.0, -0.0)):
            original = np.full((16, 4), value, np.float32)
            found = moved(tmp_path / str(number), original, rows, all_of_it)
            assert np.signbit(np.asarray(found)).all() == bool(number)


# --- only what is needed ----------------------------------------------------------------------


def test_rows_to_columns_reads_no_more_bytes_than_the_array_has(
    tmp_path: Path, mesh_8: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "PACK_BELOW_NBYTES", 1 << 14)
    monkeypatch.setattr(chunking, "MAX_CHUNK_NBYTES", 1 << 14)
    moved(
        tmp_path,
        numbered((512, 1024)),
        NamedSharding(mesh_8, P("data")),
        NamedSharding(mesh_8, P(None, "data")),
    )


def test_replicas_are_read_once_for_all_devices(tmp_path: Path, mesh_8: Mesh) -> None:
    moved(
        tmp_path,
        numbered((1024, 512)),
        SingleDeviceSharding(jax.devices()[0]),
        NamedSharding(mesh_8, P()),
    )


# --- what cannot be ---------------------------------------------------------------------------


def test_an_indivisible_target_names_leaf_dimension_and_axis_before_anything_is_read(
    tmp_path: Path,
) -> None:
    two, four, three = (mesh_of((n,), ("x",)) for n in (2, 4, 3))
    original = numbered((6, 17))
    source = NamedSharding(two, P("x"))
    pc.save(tmp_path / "a", {"deep": {"w": jax.device_put(original, source)}, "one": 1})
    wanted = NamedSharding(four, P("x"))
    struct = jax.ShapeDtypeStruct((6, 17), np.float32, sharding=wanted)
    with readers() as used, pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "a", {"deep": {"w": struct}, "one": 0}, reshard=True)
    assert used == []
    (mismatch,) = error.value.mismatches
    assert (mismatch.path, mismatch.kind) == ("deep/w", "divisibility")
    assert "dimension 0 has 6 elements, not divisible by 4 (axes x); 6 % 4 = 2" in mismatch.text
    moved(tmp_path / "b", original, source, NamedSharding(four, P()))
    moved(tmp_path / "c", original, source, NamedSharding(three, P("x")))


def other_shardings() -> Iterator[Any]:
    """Shardings of classes without a mesh, those that this JAX still has."""
    from jax._src import sharding_impls

    grid = NamedSharding(mesh_of((4, 2), ("a", "b"), [5, 1, 0, 2, 7, 3, 6, 4]), P("a", "b"))
    rows = NamedSharding(mesh_of((4, 2), ("a", "b")), P("a"))
    if hasattr(sharding_impls, "GSPMDSharding"):
        for named in (grid, rows):
            yield sharding_impls.GSPMDSharding(
                tuple(named.mesh.devices.flat), named._to_xla_hlo_sharding(2)
            )
    if hasattr(jax.sharding, "PmapSharding"):
        yield jax.sharding.PmapSharding.default((8, 4), 0)
    if hasattr(sharding_impls, "PositionalSharding"):
        yield sharding_impls.PositionalSharding(jax.devices()).reshape(4, 2)


def test_shardings_without_a_mesh_are_saved_by_the_boxes_they_make(
    tmp_path: Path, mesh_2x4: Mesh
) -> None:
    original = numbered((8, 4))
    for number, sharding in enumerate(other_shardings()):
        folder = tmp_path / str(number)
        name = type(sharding).__name__
        array = jax.device_put(original, sharding)
        assert type(array.sharding).__name__ == name
        manifest = pc.save(folder, {"w": array})
        assert name in str(manifest.leaves[0])
        check_array(pc.load(folder, {"w": array})["w"], original, sharding)
        named = NamedSharding(mesh_2x4, P("data", "model"))
        target = {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=named)}
        with pytest.raises(pc.MismatchError, match=name):
            pc.load(folder, target)
        check_array(pc.load(folder, target, reshard=True)["w"], original, named)
        # There is no rule by which it could be made again on other devices.
        with pytest.raises(pc.MismatchError, match=f"{name}.*no rule to rebuild it"):
            pc.load(folder)
        assert np.array_equal(pc.load(folder, reshard=True)["w"], original)
        pc.save(folder, {"w": jax.device_put(original, named)}, overwrite=True)
        check_array(pc.load(folder, {"w": array}, reshard=True)["w"], original, sharding)


def test_a_sharding_without_a_mesh_that_cannot_cut_a_leaf_is_refused_by_path(
    tmp_path: Path,
) -> None:
    pc.save(tmp_path, {"w": numbered((6, 4))})
    for sharding in other_shardings():
        target = {"w": jax.ShapeDtypeStruct((6, 4), np.float32, sharding=sharding)}
        with pytest.raises(pc.UnsupportedLeafError, match=r"w  .*6") as error:
            pc.load(tmp_path, target, reshard=True)
        assert [path for path, _ in error.value.leaves] == ["w"]


def test_this_jax_has_a_sharding_without_a_mesh() -> None:
    assert list(other_shardings())
