"""Arrays and keys come back as they were: every bit, dtype, shape, placement."""

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import pytree_ckpt as pc
from pytree_ckpt.format import dtypes
from pytree_ckpt.jaxio import targets
from tests.bitwise import assert_same, bits_of, struct_of

P = PartitionSpec
MIB = 1 << 20

MAY_BE_UNKNOWN_TO_JAX = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}
"""JAX has no six-bit floats, and one-bit integers only of late."""


def patterns(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Every bit pattern of a dtype of one or two bytes in turn, random ones of a wider dtype.

    So there are NaNs of all payloads, infinities, subnormals and zeros of both signs, and bools
    such as `numpy.empty` makes them.
    """
    dtype = dtypes.dtype_of(name)
    count = int(np.prod(shape))
    if dtype.itemsize <= 2:
        raw = np.resize(np.arange(1 << 8 * dtype.itemsize), count).astype(f"u{dtype.itemsize}")
    else:
        raw = np.random.default_rng(0).integers(0, 256, count * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)


def jax_holds(name: str) -> bool:
    try:
        held = jax.device_put(np.zeros(2, dtypes.dtype_of(name))).dtype == dtypes.dtype_of(name)
    except (TypeError, jax.errors.JaxRuntimeError):
        held = False
    assert held or name in MAY_BE_UNKNOWN_TO_JAX
    return held


def everywhere(host: np.ndarray[Any, Any], meshes: dict[str, Mesh], *, jax_too: bool) -> Any:
    """One array in every kind of place."""
    tree = {"host": host, "host 0-d": host[-1, -2:-1].reshape(()), "scalar": host[0, 1]}
    if not jax_too:
        return tree
    specs = {
        "replicated": ("4x2", P()),
        "one axis": ("8", P("data")),
        "one axis of two": ("4x2", P(None, "model")),
        "two axes": ("4x2", P("data", "model")),
        "two axes on one dimension": ("4x2", P(("model", "data"))),
    }
    for place, (mesh, spec) in specs.items():
        tree[place] = jax.device_put(host, NamedSharding(meshes[mesh], spec))
    tree["device 3"] = jax.device_put(host, jax.devices()[3])
    tree["uncommitted"] = jax.device_put(host)
    tree["uncommitted 0-d"] = jax.device_put(host[0, 0])
    assert not tree["uncommitted"].committed
    return tree


@pytest.fixture
def meshes(mesh_4x2: Mesh, mesh_2x4: Mesh, mesh_8: Mesh) -> dict[str, Mesh]:
    return {"4x2": mesh_4x2, "2x4": mesh_2x4, "8": mesh_8}


def check_round_trip(path: Path, tree: Any, **options: Any) -> pc.Manifest:
    """Save, then load with the tree, with structs and without a target."""
    manifest = pc.save(path, tree, options=pc.SaveOptions(**options))
    assert_same(pc.load(path, tree), tree)
    assert_same(pc.load(path, struct_of(tree)), tree)
    assert_same(pc.load(path), tree)
    return manifest


# --- every dtype in every place -------------------------------------------------------------


@pytest.mark.parametrize("name", dtypes.names())
def test_every_dtype_comes_back_to_the_last_bit_from_every_place(
    tmp_path: Path, meshes: dict[str, Mesh], name: str
) -> None:
    with jax.enable_x64(True):
        side = 256 if dtypes.dtype_of(name).itemsize == 2 else 16
        tree = everywhere(patterns(name, (side, side)), meshes, jax_too=jax_holds(name))
        manifest = check_round_trip(tmp_path / "ckpt", tree)
    assert {leaf.spec.storage for leaf in manifest.leaves} == {"packed"}
    assert {leaf.spec.dtype for leaf in manifest.leaves} == {name}


@pytest.mark.parametrize("name", dtypes.names())
def test_every_dtype_comes_back_to_the_last_bit_from_a_file_of_its_own(
    tmp_path: Path, meshes: dict[str, Mesh], name: str
) -> None:
    # A fixed number of bytes: a shard of 1 MiB or more is a file.
    itemsize = dtypes.dtype_of(name).itemsize
    with jax.enable_x64(True):
        small, large = (patterns(name, (n, MIB // itemsize // 8)) for n in (8, 32))
        tree = {"host": small, "host in Fortran order": np.asfortranarray(small)}
        if jax_holds(name):
            square = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
            tree |= {
                "replicated": jax.device_put(small, NamedSharding(meshes["4x2"], P())),
                "one axis": jax.device_put(large, NamedSharding(meshes["4x2"], P("data"))),
                "two axes": jax.device_put(large, NamedSharding(square, P("data", "model"))),
                "device 3": jax.device_put(small, jax.devices()[3]),
                "uncommitted": jax.device_put(small),
            }
        manifest = check_round_trip(tmp_path / "ckpt", tree)
    assert {leaf.spec.storage for leaf in manifest.leaves} == {"array"}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4", "bool", "complex64"])
def test_compression_and_the_fast_digest_change_no_bit(
    tmp_path: Path, meshes: dict[str, Mesh], name: str
) -> None:
    tree = everywhere(patterns(name, (16, 16)), meshes, jax_too=True)
    tree["large"] = np.zeros((MIB,), dtypes.dtype_of(name))
    check_round_trip(tmp_path / "ckpt", tree, compress="zstd", digest="xxh3_128")


def test_all_zeros_are_stored_and_negative_zeros_keep_their_sign(
    tmp_path: Path, mesh_8: Mesh
) -> None:
    tree: dict[str, Any] = {"payloads": np.array([0x7FC00001, 0x7FA00001], np.uint32).view("f4")}
    for size, shape in (("small", (16,)), ("large", (8, MIB // 4))):
        for sign, zero in (("+", 0.0), ("-", -0.0)):
            host = np.full(shape, zero, np.float32)
            tree[f"{size} {sign}"] = jax.device_put(host, NamedSharding(mesh_8, P("data")))
            tree[f"{size} {sign} host"] = host.astype(ml_dtypes.bfloat16)
    check_round_trip(tmp_path / "ckpt", tree)
    assert np.signbit(pc.load(tmp_path / "ckpt")["large -"]).all()


# --- shapes ---------------------------------------------------------------------------------

EXACT_SHAPES = [(), (1,), (1, 1), (1, 1, 1, 8), (8,), (0,), (0, 8), (8, 0), (4, 0, 2)]


def test_shapes_are_exact(tmp_path: Path, mesh_4x2: Mesh) -> None:
    tree: dict[str, Any] = {}
    for shape in EXACT_SHAPES:
        host = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        tree[f"{shape} host"] = host
        tree[f"{shape} bool"] = host.astype(bool)
        tree[f"{shape} one"] = jax.device_put(host, jax.devices()[0])
        tree[f"{shape} all"] = jax.device_put(host, NamedSharding(mesh_4x2, P()))
    check_round_trip(tmp_path / "ckpt", tree)


@pytest.mark.parametrize("wanted", EXACT_SHAPES, ids=str)
def test_a_shape_that_would_broadcast_is_another_shape(
    tmp_path: Path, wanted: tuple[int, ...]
) -> None:
    others = {str(shape): np.zeros(shape, np.float32) for shape in EXACT_SHAPES if shape != wanted}
    pc.save(tmp_path / "ckpt", {"np": others, "jax": jax.tree.map(jnp.asarray, others)})
    target = {
        "np": {shape: np.zeros(wanted, np.float32) for shape in others},
        "jax": {shape: jax.ShapeDtypeStruct(wanted, np.float32) for shape in others},
    }
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "ckpt", target, reshard=True, cast=True, partial=True)
    assert [(m.path, m.kind, m.saved, m.wanted) for m in error.value.mismatches] == [
        (f"{side}/{shape}", "shape", shape, str(wanted))
        for side in ("jax", "np")
        for shape in sorted(others)
    ]


def test_arrays_without_elements_keep_dtype_shape_and_sharding(
    tmp_path: Path, mesh_4x2: Mesh
) -> None:
    adapter = np.zeros((0, 8), ml_dtypes.bfloat16)
    tree = {
        "rank 0": jax.device_put(adapter, NamedSharding(mesh_4x2, P(None, "model"))),
        "cut nowhere": jax.device_put(adapter, NamedSharding(mesh_4x2, P("data", "model"))),
        "keys": jax.random.wrap_key_data(np.zeros((0, 2), np.uint32)),
        "host": np.zeros((0,), bool),
        "beside": jnp.arange(3),
    }
    manifest = check_round_trip(tmp_path / "ckpt", tree)
    storage = {leaf.text: leaf.spec.storage for leaf in manifest.leaves}
    assert [storage.pop("beside"), *set(storage.values())] == ["packed", "empty"]


def test_a_tree_of_nothing_but_empty_arrays_is_a_checkpoint(tmp_path: Path) -> None:
    check_round_trip(tmp_path / "ckpt", {"a": np.zeros((0, 3), np.int8), "b": jnp.zeros((0,))})


def test_32_dimensions_are_saved_and_more_are_refused_by_name(tmp_path: Path) -> None:
    check_round_trip(tmp_path / "most", {"a": np.arange(4).reshape((1,) * 30 + (2, 2))})
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "more", {"params": [np.zeros((1,) * 33)], "fine": 1})
    assert [path for path, _ in error.value.leaves] == ["params/0"]
    assert not (tmp_path / "more").exists()


def test_a_large_array_may_have_31_dimensions(tmp_path: Path) -> None:
    large = np.arange(1 << 20, dtype=np.uint8).reshape((1,) * 30 + (1 << 20,))
    check_round_trip(tmp_path / "most", {"a": large})
    with pytest.raises(pc.UnsupportedLeafError, match="31: reshape it"):
        pc.save(tmp_path / "more", {"a": large[None]})
    assert not (tmp_path / "more").exists()


# --- placement ------------------------------------------------------------------------------


def test_leaves_of_one_tree_each_keep_their_own_placement(tmp_path: Path, mesh_2x4: Mesh) -> None:
    def put(shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        host = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        return jax.device_put(host, NamedSharding(mesh_2x4, spec))

    tree = {
        "sharded": put((4, 4), P("data", "model")),
        "replicated": put((3,), P()),
        "partly": put((8, 8), P("data")),
        "one": jax.device_put(np.arange(5), jax.devices()[3]),
        "host": np.arange(5, dtype=np.float32),
        "rng": jax.random.key(0),
    }
    check_round_trip(tmp_path / "ckpt", tree)
    assert pc.load(tmp_path / "ckpt")["one"].devices() == {jax.devices()[3]}


def test_trailing_nones_of_a_spec_are_no_other_layout(tmp_path: Path, mesh_2x4: Mesh) -> None:
    host = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    long, short = (NamedSharding(mesh_2x4, spec) for spec in (P("data", None), P("data")))
    pc.save(tmp_path / "ckpt", {"w": jax.device_put(host, long)})
    for wanted in (long, short):
        target = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=wanted)
        loaded = pc.load(tmp_path / "ckpt", {"w": target})["w"]
        assert bits_of(loaded) == bits_of(jax.device_put(host, wanted))
    assert pc.load(tmp_path / "ckpt")["w"].sharding == long


def test_a_replicated_array_is_written_once(tmp_path: Path, mesh_2x4: Mesh) -> None:
    host = np.ones((2, 3 * MIB), np.uint8)
    tree = {
        "replicated": jax.device_put(host, NamedSharding(mesh_2x4, P())),
        "partly": jax.device_put(host, NamedSharding(mesh_2x4, P("data"))),
        "small": jax.device_put(host[:, :1000], NamedSharding(mesh_2x4, P())),
    }
    pc.save(tmp_path / "ckpt", tree)
    files = [file for file in (tmp_path / "ckpt").rglob("*") if file.is_file()]
    overhead = sum(file.stat().st_size for file in files) - 2 * host.nbytes - 2000
    assert 0 < overhead < 50_000


def test_weak_types_and_commitment_are_kept(tmp_path: Path, mesh_8: Mesh) -> None:
    weak = jnp.asarray(3.0)
    assert weak.weak_type
    tree = {
        "weak": weak,
        "strong": jnp.float32(3),
        "weak int": jax.jit(lambda: 7)(),
        "weak vector": jnp.full((4,), 2.0) if jnp.full((4,), 2.0).weak_type else weak * 2,
        "weak on devices": jax.device_put(weak, NamedSharding(mesh_8, P())),
        "weak on one": jax.device_put(weak, jax.devices()[2]),
    }
    assert tree["weak on devices"].weak_type
    assert tree["weak on one"].weak_type
    check_round_trip(tmp_path / "ckpt", tree)
    # An uncommitted array follows what it is used with, a committed one stays where it is.
    loaded = pc.load(tmp_path / "ckpt")
    other = jax.device_put(np.float32(1), jax.devices()[5])
    assert (loaded["strong"] + other).devices() == {jax.devices()[5]}
    with pytest.raises(ValueError, match=r"[Ii]ncompatible devices"):
        loaded["weak on one"] + other


def test_a_weakly_typed_target_gets_a_weakly_typed_array(tmp_path: Path) -> None:
    """Else the step that was compiled for the target is compiled anew."""
    weak, strong = jnp.asarray(3), jnp.int32(3)
    assert (weak.weak_type, strong.weak_type) == (True, False)
    pc.save(tmp_path / "ckpt", {"a": weak, "b": strong, "c": 3, "d": 3})
    target = {"a": strong, "b": weak, "c": strong, "d": weak}
    assert_same(pc.load(tmp_path / "ckpt", target), target)


# --- 64 bits --------------------------------------------------------------------------------


def test_64_bit_host_arrays_survive_where_jax_would_narrow_them(tmp_path: Path) -> None:
    assert not jax.config.jax_enable_x64
    tree = {
        "f64": np.array([1e-8, 0.1, 1e300]),
        "i64": np.array([2**40, -(2**63)]),
        "u64": np.array([2**63 + 1], np.uint64),
        "c128": np.array([1e-300 + 1e300j]),
        "scalar": np.float64(0.1),
        "count": np.int64(2**53 + 1),
    }
    check_round_trip(tmp_path / "ckpt", tree)


@pytest.mark.parametrize("name", ["float64", "int64", "uint64", "complex128"])
def test_a_64_bit_device_array_is_never_narrowed_without_x64(tmp_path: Path, name: str) -> None:
    host = patterns(name, (16,))
    with jax.enable_x64(True):
        tree = {"w": {"kernel": jax.device_put(host, jax.devices()[1])}, "n": jnp.int32(1)}
        pc.save(tmp_path / "ckpt", tree)
        struct = struct_of(tree)
        assert struct["w"]["kernel"].dtype == host.dtype
    for target in (None, struct):
        with pytest.raises(pc.MismatchError, match=f"w/kernel .*{name}.*jax_enable_x64") as error:
            pc.load(tmp_path / "ckpt", target)
        assert [(m.path, m.kind) for m in error.value.mismatches] == [("w/kernel", "dtype")]
    on_host = {"w": {"kernel": np.empty_like(host)}, "n": jnp.int32(0)}
    assert bits_of(pc.load(tmp_path / "ckpt", on_host)["w"]["kernel"]) == bits_of(host)
    with pc.open(tmp_path / "ckpt") as ckpt:
        assert bits_of(ckpt.to_numpy()["w"]["kernel"]) == bits_of(host)
        assert bits_of(ckpt["w/kernel"][3:5]) == bits_of(host[3:5])
    with jax.enable_x64(True):
        assert_same(pc.load(tmp_path / "ckpt", struct), tree)


def test_a_struct_of_64_bits_is_refused_for_a_host_array_too(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {"w": np.array([2**40])})
    with pytest.raises(pc.MismatchError, match="jax_enable_x64"):
        pc.load(tmp_path / "ckpt", {"w": jax.ShapeDtypeStruct((1,), np.int64)})
    with pytest.raises(pc.MismatchError, match="saved int64, wanted int32"):
        pc.load(tmp_path / "ckpt", {"w": jax.ShapeDtypeStruct((1,), np.int32)})


def test_a_device_without_memory_is_no_dtype_that_jax_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"w": jnp.ones(2)}
    pc.save(tmp_path / "ckpt", tree)
    targets._has_dtype.cache_clear()
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", Mock(side_effect=full))
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            pc.load(tmp_path / "ckpt", tree)
    assert_same(pc.load(tmp_path / "ckpt", tree), tree)


@pytest.mark.parametrize("name", sorted(MAY_BE_UNKNOWN_TO_JAX & set(dtypes.names())))
def test_a_dtype_that_jax_has_not_is_refused_by_name_where_it_is_asked_for(
    tmp_path: Path, name: str
) -> None:
    if jax_holds(name):
        pytest.skip(f"this JAX has arrays of {name}")
    host = patterns(name, (2,))
    pc.save(tmp_path / "ckpt", {"w": host, "n": 1})
    struct = jax.ShapeDtypeStruct((2,), host.dtype)
    with pytest.raises(pc.MismatchError, match=f"w  dtype: .*{name}.*numpy.ndarray") as error:
        pc.load(tmp_path / "ckpt", {"w": struct, "n": 1})
    assert [(m.path, m.kind) for m in error.value.mismatches] == [("w", "dtype")]
    pc.convert(
        tmp_path / "ckpt", tmp_path / "laid out", layout=pc.Layout(mesh={"x": 2}, specs={"w": "x"})
    )
    with pytest.raises(pc.MismatchError, match=f"w  dtype: .*{name}"):
        pc.load(tmp_path / "laid out")
    assert_same(pc.load(tmp_path / "laid out", {"w": host, "n": 1}), {"w": host, "n": 1})


def test_an_imaginary_part_is_never_dropped(tmp_path: Path, mesh_4x2: Mesh) -> None:
    host = patterns("complex64", (8, 4))
    host[0, :3] = [complex(-0.0, 1), complex(np.inf, -np.inf), complex(0.0, -0.0)]
    sharding = NamedSharding(mesh_4x2, P("data", "model"))
    tree = {"c": jax.device_put(host, sharding), "p": jnp.complex64(1 - 2j), "n": host[0]}
    check_round_trip(tmp_path / "ckpt", tree)
    target = {
        "c": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding),
        "p": 0.0,
        "n": np.zeros(4, np.float32),
    }
    for cast in (False, True):
        with pytest.raises(pc.MismatchError) as error:
            pc.load(tmp_path / "ckpt", target, cast=cast)
        assert [(m.path, m.kind) for m in error.value.mismatches] == [
            ("c", "dtype"),
            ("n", "dtype"),
            ("p", "dtype"),
        ]


# --- keys -----------------------------------------------------------------------------------

IMPLS = ("threefry2x32", "rbg", "unsafe_rbg", "threefry4x32", "philox2x32", "philox4x32")


def key_of(impl: str, seed: int = 1) -> jax.Array:
    try:
        return jax.random.key(seed, impl=impl)
    except ValueError:
        pytest.skip(f"this JAX has no {impl} keys")


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_come_back_with_their_implementation(
    tmp_path: Path, mesh_4x2: Mesh, impl: str
) -> None:
    key = key_of(impl)
    data = jax.random.key_data(key)
    batch = jax.random.wrap_key_data(
        np.arange(16 * data.size, dtype=np.uint32).reshape(8, 2, *data.shape), impl=impl
    )
    tree = {
        "one": key,
        "batch": batch,
        "committed": jax.device_put(key, jax.devices()[3]),
        "replicated": jax.device_put(key, NamedSharding(mesh_4x2, P())),
        "sharded": jax.device_put(batch, NamedSharding(mesh_4x2, P("data", "model"))),
        "partly": jax.device_put(batch, NamedSharding(mesh_4x2, P(None, "model"))),
    }
    check_round_trip(tmp_path / "ckpt", tree)
    loaded = pc.load(tmp_path / "ckpt")
    assert loaded["one"].dtype == key.dtype
    np.testing.assert_array_equal(
        jax.random.bits(loaded["one"], (4,)), jax.random.bits(key, (4,)), strict=True
    )


@pytest.mark.parametrize("impl", IMPLS[:3])
def test_loaded_keys_draw_what_the_saved_ones_draw(
    tmp_path: Path, mesh_4x2: Mesh, impl: str
) -> None:
    @jax.jit
    def draw(keys: jax.Array) -> jax.Array:
        return jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (3,))))(keys)

    keys = jax.vmap(lambda key: jax.random.split(key, 2))(jax.random.split(key_of(impl), 8))
    keys = jax.device_put(keys, NamedSharding(mesh_4x2, P("data", "model")))
    pc.save(tmp_path / "ckpt", {"keys": keys})
    before = draw(keys)
    assert bits_of(draw(pc.load(tmp_path / "ckpt")["keys"])) == bits_of(before)


def test_keys_of_one_tree_are_told_apart_though_their_data_are_alike(tmp_path: Path) -> None:
    rbg = jax.random.key(1, impl="rbg")
    tree = {
        "t": jax.random.key(1),
        "r": rbg,
        "u": jax.random.key(1, impl="unsafe_rbg"),
        "raw": jax.random.key_data(rbg),
        "old": jax.random.PRNGKey(0),
    }
    check_round_trip(tmp_path / "ckpt", tree)
    loaded = pc.load(tmp_path / "ckpt")
    assert (loaded["old"].dtype, loaded["old"].shape) == (np.uint32, (2,))
    assert loaded["raw"].dtype == np.uint32


def test_a_key_and_its_raw_data_are_two_kinds_of_leaf(tmp_path: Path) -> None:
    key = jax.random.key(1, impl="rbg")
    data = jax.random.key_data(key)
    pc.save(tmp_path / "ckpt", {"rng": {"key": key, "data": data, "n": 3}})
    wrong = {"rng": {"key": data, "data": key, "n": key}}
    for target in (wrong, struct_of(wrong), {"rng": {**wrong["rng"], "key": np.asarray(data)}}):
        with pytest.raises(pc.MismatchError) as error:
            pc.load(tmp_path / "ckpt", target, reshard=True, cast=True)
        assert {m.path: m.kind for m in error.value.mismatches} == {
            "rng/key": "kind",
            "rng/data": "kind",
            "rng/n": "kind",
        }
        assert "key<rbg>" in str(error.value)
        assert "uint32[4]" in str(error.value)


@pytest.mark.parametrize("wanted", IMPLS[1:])
def test_a_key_of_another_implementation_is_another_key(tmp_path: Path, wanted: str) -> None:
    target = {"rng": key_of(wanted)}
    pc.save(tmp_path / "ckpt", {"rng": jax.random.key(1)})
    for like in (target, struct_of(target)):
        with pytest.raises(pc.MismatchError) as error:
            pc.load(tmp_path / "ckpt", like, cast=True)
        assert [(m.path, m.kind, m.saved, m.wanted) for m in error.value.mismatches] == [
            ("rng", "key impl", "key<threefry2x32>", f"key<{wanted}>")
        ]


def test_a_key_whose_implementation_has_no_name_is_refused_before_it_is_lost(
    tmp_path: Path,
) -> None:
    """An implementation of one's own cannot be found again by name when the key is loaded."""
    random = pytest.importorskip("jax.extend.random")
    impl = random.define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, jnp.uint32) + seed.astype(jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
        random_bits=lambda key, width, shape: jnp.zeros(shape, f"uint{width}"),
        fold_in=lambda key, data: key + data.astype(jnp.uint32),
        name="homemade",
        tag="hm",
    )
    tree = {"rng": {"mine": jax.random.key(0, impl=impl), "theirs": jax.random.key(0)}}
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", tree)
    assert [path for path, _ in error.value.leaves] == ["rng/mine"]
    assert not (tmp_path / "ckpt").exists()


# --- how arrays lie in memory ---------------------------------------------------------------


def memory_forms(size: int, folder: Path) -> dict[str, Any]:
    """Arrays of `size` × `size` that lie in memory in unusual ways."""
    plain = np.random.default_rng(0).integers(-(2**31), 2**31, (size, size), np.int32)
    read_only = plain.copy()
    read_only.flags.writeable = False
    plain.tofile(folder / f"{size}.bin")
    return {
        "transposed": plain.T,
        "Fortran order": np.asfortranarray(plain),
        "every other": np.repeat(plain, 2, axis=1)[:, ::2],
        "reversed": plain[::-1, ::-1],
        "big-endian": plain.astype(">i4"),
        "big-endian and strided": plain.astype(">i4").T[::-1],
        "big-endian 0-d": np.array(258, ">i4"),
        "read-only": read_only,
        "mapped": np.memmap(folder / f"{size}.bin", np.int32, "r", shape=(size, size)),
        "broadcast": np.broadcast_to(plain[:1], (size, size)),
        "one value": np.broadcast_to(np.float16(-0.0), (size, size)),
        "not aligned": np.frombuffer(b"\0" + plain.tobytes(), np.uint8)[1:].view(np.int32),
        "a byte of each": plain.view(np.uint8)[:, ::4],
    }


@pytest.mark.parametrize("size", [17, 600], ids=["small", "large"])
def test_however_an_array_lies_in_memory_its_elements_come_back(tmp_path: Path, size: int) -> None:
    tree = memory_forms(size, tmp_path)
    before = {name: array.tobytes() for name, array in tree.items()}
    pc.save(tmp_path / "ckpt", tree)
    native = {
        name: np.array(array, array.dtype.newbyteorder("="), order="C")
        for name, array in tree.items()
    }
    assert_same(pc.load(tmp_path / "ckpt"), native)
    assert_same(pc.load(tmp_path / "ckpt", tree), native)
    with pc.open(tmp_path / "ckpt") as ckpt:
        assert_same(ckpt.to_numpy(), native)
    assert {name: array.tobytes() for name, array in tree.items()} == before


@pytest.mark.parametrize("side", [12, 1024], ids=["small", "large"])
def test_a_device_layout_does_not_reach_the_bytes(tmp_path: Path, mesh_8: Mesh, side: int) -> None:
    host = np.arange(side * 2 * side, dtype=np.float32).reshape(side * 2, side)
    column_major = Layout((1, 0))
    one, many = SingleDeviceSharding(jax.devices()[0]), NamedSharding(mesh_8, P("data"))
    tree = {
        "one": jax.device_put(host, Format(column_major, one)),
        "many": jax.device_put(host, Format(column_major, many)),
    }
    assert tree["many"].format.layout.major_to_minor == (1, 0)
    check_round_trip(tmp_path / "ckpt", tree)
    with pc.open(tmp_path / "ckpt") as ckpt:
        np.testing.assert_array_equal(ckpt["many"], host, strict=True)


# --- what cannot be saved -------------------------------------------------------------------


def make_matrix() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.matrix([[1.0, 2.0]])


def make_donated() -> jax.Array:
    array = jnp.zeros(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    return array


def make_deleted_key() -> jax.Array:
    key = jax.random.key(0)
    key.delete()
    return key


REFUSED = {
    "function": (lambda: len, "eqx.filter(model, eqx.is_array)"),
    "lambda": (lambda: lambda x: x, "eqx.filter(model, eqx.is_array)"),
    "class": (lambda: jnp.float32, "eqx.filter(model, eqx.is_array)"),
    "object": (object, "builtins.object"),
    "set": (lambda: {1, 2}, "builtins.set"),
    "bytearray": (lambda: bytearray(b"x"), "builtins.bytearray"),
    "path": (lambda: Path("x"), "Path"),
    "object array": (lambda: np.array([object()]), "dtype object"),
    "array of str": (lambda: np.array(["a"]), "dtype <U1"),
    "numpy str": (lambda: np.str_("a"), "dtype <U1"),
    "dates": (lambda: np.zeros(2, "datetime64[s]"), "dtype datetime64[s]"),
    "records": (lambda: np.zeros(2, [("x", "f4")]), "dtype [('x', '<f4')]"),
    "long double": (lambda: np.zeros(2, np.clongdouble), "dtype complex"),
    "float0": (lambda: np.zeros(2, jax.dtypes.float0), "float0"),
    "masked array": (lambda: np.ma.masked_array([1.0], [True]), ".mask"),
    "matrix": (make_matrix, "numpy.asarray"),
    "struct": (lambda: jax.ShapeDtypeStruct((2,), np.float32), "without values"),
    "donated": (make_donated, "deleted"),
    "deleted key": (make_deleted_key, "deleted"),
    "long str": (lambda: "x" * (MIB + 1), "numpy.frombuffer"),
    "long bytes": (lambda: b"x" * (MIB + 1), "numpy.frombuffer"),
    "surrogate": (lambda: "\ud800", "cannot be written"),
    "huge int": (lambda: 1 << (8 * MIB), "cannot be written"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_data_is_refused_with_a_reason_and_nothing_is_written(
    tmp_path: Path, name: str
) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", {"fine": jnp.ones(3), "model": {"x": [1, make()]}})
    ((path, text),) = error.value.leaves
    assert path == "model/x/1"
    assert reason in text
    assert f"model/x/1  {text}" in str(error.value)
    assert isinstance(error.value, TypeError)
    assert not (tmp_path / "ckpt").exists()


def test_every_leaf_that_cannot_be_saved_is_named_at_once(tmp_path: Path) -> None:
    tree = {name: (1, {"leaf": make()}) for name, (make, _) in REFUSED.items()}
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", tree)
    assert [path for path, _ in error.value.leaves] == [f"{n}/1/leaf" for n in sorted(REFUSED)]
    assert f"{len(REFUSED)} leaves cannot be stored" in str(error.value)
    assert not (tmp_path / "ckpt").exists()


def test_keys_and_leaves_that_cannot_be_saved_are_named_together(tmp_path: Path) -> None:
    tree = {"a": {(0,): 1}, "b": object(), "c": {1: 1, "1": 2}, "d": len}
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", tree)
    assert {path for path, _ in error.value.leaves} == {"a", "b", "c", "d"}


def test_a_leaf_at_the_root_is_refused_by_that_name(tmp_path: Path) -> None:
    with pytest.raises(pc.UnsupportedLeafError, match=r"\(root\)  is a builtins.object"):
        pc.save(tmp_path / "ckpt", object())


def test_a_tracer_is_refused_inside_of_jit(tmp_path: Path) -> None:
    @jax.jit
    def step(x: jax.Array, key: jax.Array) -> jax.Array:
        pc.save(tmp_path / "ckpt", {"x": x, "key": key, "constant": 1})
        return x

    with pytest.raises(pc.UnsupportedLeafError, match="outside of jit") as error:
        step(jnp.ones(2), jax.random.key(0))
    assert [path for path, _ in error.value.leaves] == ["key", "x"]
    assert not (tmp_path / "ckpt").exists()


def test_a_refused_save_leaves_an_older_checkpoint_alone(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {"w": 1})
    with pytest.raises(pc.UnsupportedLeafError):
        pc.save(tmp_path / "ckpt", {"w": object()}, overwrite=True)
    assert pc.load(tmp_path / "ckpt") == {"w": 1}


def test_a_target_leaf_that_asks_for_nothing_is_refused_by_name(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {"w": np.ones(2), "f": 1, "g": 2})
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.load(tmp_path / "ckpt", {"w": np.ones(2), "f": len, "g": np.array([object()])})
    assert [path for path, _ in error.value.leaves] == ["f", "g"]


def test_a_donated_array_is_a_good_target(tmp_path: Path, mesh_8: Mesh) -> None:
    """The state that was given to the last step still says what is wanted."""
    array = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh_8, P("data")))
    pc.save(tmp_path / "ckpt", {"w": array})
    before = bits_of(array)
    array.delete()
    assert bits_of(pc.load(tmp_path / "ckpt", {"w": array})["w"]) == before


# --- shared memory --------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [256, MIB], ids=["small", "large"])
def test_one_array_in_two_places_becomes_two_arrays(
    tmp_path: Path, mesh_8: Mesh, nbytes: int
) -> None:
    base = np.arange(8 * nbytes // 4, dtype=np.float32)
    tied = jax.device_put(base, NamedSharding(mesh_8, P("data")))
    tree = {"embed": tied, "head": {"kernel": tied}, "low": base[:4], "high": base[4:]}
    check_round_trip(tmp_path / "ckpt", tree)

    loaded = pc.load(tmp_path / "ckpt", tree)
    jax.jit(lambda x: x + 1, donate_argnums=0)(loaded["embed"]).block_until_ready()
    assert loaded["embed"].is_deleted()
    del loaded["embed"]
    loaded["low"][:] = -1
    assert_same(loaded["head"], tree["head"])
    assert_same(loaded["high"], tree["high"])


@pytest.mark.parametrize("nbytes", [256, 2 * MIB], ids=["small", "large"])
def test_donating_one_loaded_leaf_changes_no_other(
    tmp_path: Path, mesh_8: Mesh, nbytes: int
) -> None:
    """Loaded arrays may share the memory of one read, and replicas one buffer."""
    host = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    places = [NamedSharding(mesh_8, P()), NamedSharding(mesh_8, P("data")), jax.devices()[2], None]
    arrays = [jax.device_put(host, place) for place in places]
    tree = {"jax": arrays, "again": list(arrays), "host": host}
    pc.save(tmp_path / "ckpt", tree)
    loaded = pc.load(tmp_path / "ckpt", tree)
    overwrite = jax.jit(lambda x: x.at[:].set(x ^ 255), donate_argnums=0)
    changed = [jax.block_until_ready(overwrite(x)) for x in loaded["jax"]]
    assert all(x.is_deleted() for x in loaded["jax"])
    assert_same(loaded["again"], tree["again"])
    assert_same(loaded["host"], tree["host"])
    for array in changed:
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), ~host[shard.index])


def memory_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return memory_of(array.base) if isinstance(array.base, np.ndarray) else array


@pytest.mark.parametrize("count", [4, MIB], ids=["small", "large"])
def test_loaded_host_arrays_are_writable_and_belong_to_one_load(tmp_path: Path, count: int) -> None:
    tree = {"a": np.arange(count), "b": np.arange(count, dtype=np.int8), "c": np.float64(1)}
    pc.save(tmp_path / "ckpt", tree)
    with pc.open(tmp_path / "ckpt") as ckpt:
        loads = [pc.load(tmp_path / "ckpt"), pc.load(tmp_path / "ckpt", tree), ckpt.to_numpy()]
        for loaded in loads:
            assert_same(loaded, tree)
            for name in ("a", "b"):
                assert loaded[name].flags.writeable
                assert loaded[name].flags.c_contiguous
                assert loaded[name].flags.aligned
                # It keeps no memory alive that others were read into.
                assert memory_of(loaded[name]).nbytes <= tree[name].nbytes + 64
            loaded["a"][:] = -1
            np.testing.assert_array_equal(loaded["b"], tree["b"])
        part = ckpt["a"][1:3]
        part[:] = -1
        assert_same(ckpt.to_numpy(), tree)


@pytest.mark.parametrize("count", [4, MIB], ids=["small", "large"])
def test_a_source_that_is_changed_after_the_save_does_not_change_the_checkpoint(
    tmp_path: Path, count: int
) -> None:
    host = np.arange(count, dtype=np.float32)
    tree = {"host": host, "device": jax.device_put(np.arange(count, dtype=np.float32))}
    pc.save(tmp_path / "ckpt", tree)
    before = host.copy()
    host[:] = -1
    jax.jit(lambda x: x.at[:].set(0), donate_argnums=0)(tree["device"]).block_until_ready()
    loaded = pc.load(tmp_path / "ckpt")
    np.testing.assert_array_equal(loaded["host"], before, strict=True)
    np.testing.assert_array_equal(loaded["device"], before, strict=True)


def test_thousands_of_small_leaves_are_a_few_files(tmp_path: Path) -> None:
    """A file, and a sync, for each would take many seconds."""
    layer = {"scale": jnp.ones(4), "bias": jnp.zeros(4), "count": jnp.int32(3)}
    state = {f"layer_{number:04d}": layer for number in range(500)}
    pc.save(tmp_path, state)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) <= 4
    assert_same(pc.load(tmp_path, state), state)
