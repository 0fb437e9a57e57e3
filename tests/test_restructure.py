"""Leaves that move between the save and the load: renamed, stacked, taken apart."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.format.paths import Key, key_from_text, to_text
from pytree_ckpt.plan import patterns
from pytree_ckpt.plan.loading import plan_reads, plan_stacked_reads
from tests.bitwise import assert_same

P = PartitionSpec
F32 = np.float32
LAYERS = 3


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(F32)


def put(array: Any, mesh: Mesh, *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def struct(shape: Any, sharding: Any = None, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def refusal(path: Path, target: Any = None, **options: Any) -> list[str]:
    with pytest.raises(pc.MismatchError) as error:
        pc.load(path, target, **options)
    return [str(mismatch) for mismatch in error.value.mismatches]


# --- patterns -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("a/b", "a/b", ()),
        ("/a/b/", "a/b", ()),
        ("a/*", "a/b", ("b",)),
        ("a/*", "a/b/c", None),
        ("layer_*/w", "layer_12/w", ("12",)),
        ("**", "", ("",)),
        ("**", "a/b", ("/a/b",)),
        ("a/**", "a", ("",)),
        ("a/**/w", "a/w", ("",)),
        ("a/**/w", "a/b/c/w", ("/b/c",)),
        ("a/**", "ab/c", None),
        ("l_{}/w", "l_12/w", ("12",)),
        ("l_{}/w", "l_x/w", None),
        ("%2A/%7B}", "*/{}", ()),
        ("%2A", "a", None),
        ("a.b", "a.b", ()),
        ("a.b", "aXb", None),
        ("a%2Fb/*", "a%2Fb/c", ("c",)),
        ("'1'", "1", None),
    ],
)
def test_a_pattern_matches_whole_paths(
    pattern: str, text: str, found: tuple[str, ...] | None
) -> None:
    assert patterns.parse(pattern).match(text) == found


@pytest.mark.parametrize("pattern", ["a//b", "a**", "a/**b", "{}/{}"])
def test_a_pattern_that_means_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        patterns.parse(pattern)


@settings(max_examples=50)
@given(st.lists(st.text(max_size=4) | st.integers(), min_size=1, max_size=4))
def test_what_two_stars_found_fills_in_to_the_same_path(values: list[str | int]) -> None:
    text = to_text(tuple(Key("str" if isinstance(v, str) else "int", v) for v in values))
    pattern = patterns.parse("**")
    found = pattern.match(text)
    assert found is not None
    assert pattern.fill(found) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.integers())
def test_the_text_of_a_dict_key_gives_the_key(value: str | int) -> None:
    key = Key("str" if isinstance(value, str) else "int", value)
    assert key_from_text(str(key)) == key


# --- rename -------------------------------------------------------------------------------------


def test_a_field_that_changed_its_name_loads_by_its_old_one(tmp_path: Path, mesh_4x2: Mesh) -> None:
    layers = {str(n): {"kernel": put(numbers(8, 4, seed=n), mesh_4x2, "data")} for n in range(2)}
    pc.save(tmp_path / "c", {"params": layers, "step": 3})
    target = {"params": {n: {"w": layer["kernel"]} for n, layer in layers.items()}, "step": 0}
    loaded = pc.load(tmp_path / "c", target, rename={"params/*/kernel": "params/*/w"})
    assert_same(loaded, {**target, "step": 3})


def test_an_optimizer_that_was_wrapped_takes_its_state_along(tmp_path: Path) -> None:
    params = {"w": jax.numpy.ones((4, 2)), "b": jax.numpy.zeros(2)}
    plain = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    wrapped = optax.chain(plain, optax.identity())
    before = plain.init(params)
    pc.save(tmp_path / "c", {"params": params, "opt": before})
    target = {"params": params, "opt": wrapped.init(params)}
    assert len(refusal(tmp_path / "c", target)) > 2
    # The state of optax.identity is new; it has no leaves, so there is nothing to load for it.
    loaded = pc.load(tmp_path / "c", target, rename={"opt": "opt/0"}, partial=True)
    assert_same(loaded["opt"][0], before)
    assert jax.tree.structure(loaded) == jax.tree.structure(target)


def test_a_renamed_leaf_takes_the_kinds_of_keys_that_the_target_has(tmp_path: Path) -> None:
    class Layer(NamedTuple):
        w: Any
        b: Any

    saved = {"layer": {"w": numbers(3), "b": numbers(2)}}
    pc.save(tmp_path / "c", saved)
    target = {"layer": Layer(np.zeros(3, F32), np.zeros(2, F32))}
    assert "another kind" in refusal(tmp_path / "c", target)[0]
    loaded = pc.load(tmp_path / "c", target, rename={"layer/*": "layer/*"})
    assert_same(loaded, {"layer": Layer(saved["layer"]["w"], saved["layer"]["b"])})


def test_two_paths_can_be_swapped(tmp_path: Path) -> None:
    pc.save(tmp_path / "c", {"a": 1, "b": 2})
    assert pc.load(tmp_path / "c", rename={"a": "b", "b": "a"}) == {"a": 2, "b": 1}


def test_without_a_target_new_paths_are_dicts_and_moved_containers_stay_what_they_are(
    tmp_path: Path,
) -> None:
    pc.save(tmp_path / "c", {"a": [1, (2, 3)], "n": None, "e": {}, "x/y": {5: "s"}})
    loaded = pc.load(
        tmp_path / "c",
        rename={"a/**": "new/7/**", "n": "none/'1'", "e": "%2A", "x%2Fy/**": "z%2F/**"},
    )
    assert loaded == {"new": {7: [1, (2, 3)]}, "none": {"1": None}, "*": {}, "z/": {5: "s"}}


def test_a_list_that_loses_an_element_becomes_a_dict_of_its_indices(tmp_path: Path) -> None:
    pc.save(tmp_path / "c", {"l": [10, 11, 12]})
    assert pc.load(tmp_path / "c", rename={"l/1": "m"}) == {"l": {0: 10, 2: 12}, "m": 11}


def test_values_per_process_and_keys_are_renamed_like_arrays(tmp_path: Path) -> None:
    rng = jax.random.key(3)
    pc.save(tmp_path / "c", {"data": pc.PerProcess({"at": 5}), "rng": rng, "w": numbers(4)})
    target = {"loader": pc.PerProcess(None), "key": rng, "w": np.zeros(4, F32)}
    loaded = pc.load(tmp_path / "c", target, rename={"data": "loader", "rng": "key"})
    assert_same(loaded, {"loader": pc.PerProcess({"at": 5}), "key": rng, "w": numbers(4)})


# --- rules that do not fit ----------------------------------------------------------------------


def test_every_rule_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    pc.save(
        tmp_path / "c",
        {"a": {"w": numbers(3)}, "b": {"w": numbers(3)}, "x_0": numbers(2), "x_2": numbers(2)},
    )
    found = refusal(
        tmp_path / "c",
        rename={"a/v": "a/u", "*/w": "w/*", "b": "q"},
        stack={"x_{}": "x"},
        unstack={"s": "s_{}"},
    )
    assert found == [
        "a/v  rename: matches nothing in the checkpoint (nearest: a/w)",
        "b  rename: all that it matches is taken by rules before it",
        "x  stack: has the indices [0, 2]: 1 is missing",
        "s  unstack: matches nothing in the checkpoint",
    ]


def test_the_first_rule_that_takes_a_leaf_says_where_it_goes(tmp_path: Path) -> None:
    pc.save(tmp_path / "c", {"params": {"a": 1, "b": [2, None]}, "step": 3})
    rules = {"params/a": "model/first", "params": "model"}
    assert pc.load(tmp_path / "c", rename=rules) == {
        "model": {"first": 1, "b": [2, None]},
        "step": 3,
    }


@pytest.mark.parametrize(
    ("rename", "reason"),
    [
        ({"a": "b"}, "b  b and a both come here"),
        ({"a": "c", "b": "c"}, "c  a and b both come here"),
        ({"a": "c/07", "b": "c/7"}, "c/7  a and b both come here"),
        ({"a": "c%d", "b": "c%25d"}, "c%25d  a and b both come here"),
        ({"a": "b/x"}, "b/x  a comes below the leaf b"),
        ({"a": "%62/x"}, "b/x  a comes below the leaf b"),
        ({"a": ""}, "b  b comes below the leaf (root)"),
    ],
    ids=[
        "onto a leaf",
        "two onto one",
        "two onto one number",
        "two onto one key",
        "below a leaf",
        "below a leaf that is written in another way",
        "onto the root",
    ],
)
def test_a_path_gets_one_leaf(tmp_path: Path, rename: dict[str, str], reason: str) -> None:
    pc.save(tmp_path / "c", {"a": 1, "b": 2})
    assert refusal(tmp_path / "c", rename=rename) == [reason]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rename": {"a_{}": "b"}}, "neither side"),
        ({"rename": {"*": "b"}}, "the same"),
        ({"rename": {"a/**": "b"}}, "the same"),
        ({"rename": {"*/**": "**/*"}}, "the same"),
        ({"stack": {"a_*": "b"}}, "the left side has one"),
        ({"stack": {"a_{}": "b_{}"}}, "the right side none"),
        ({"unstack": {"a_{}": "b"}}, "the right side has one"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    manifest = pc.save(tmp_path / "c", {"a_0": 1})
    with pytest.raises(ValueError, match=reason):
        pc.plan_restructure(manifest, **options)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"x_0": 1, "x_1": 2}, "only arrays stack: x_0 is int"),
        ({"x_0": numbers(2), "x_1": numbers(3)}, "x_0 is float32[2] host array, x_1 is float32[3]"),
        ({"x_0": numbers(2), "x_1": 1.0}, "only arrays stack: x_1 is float"),
        ({"x_0": numbers(2), "x_00": numbers(2)}, "the indices [0, 0]: one comes twice"),
        ({"x_0": jax.random.key(0), "x_1": jax.random.key(0, impl="rbg")}, "x_1 is key<rbg>[]"),
    ],
    ids=["values", "shapes", "kinds", "twice", "keys"],
)
def test_only_arrays_of_one_form_stack(tmp_path: Path, tree: Any, reason: str) -> None:
    pc.save(tmp_path / "c", tree)
    (found,) = refusal(tmp_path / "c", stack={"x_{}": "x"})
    assert reason in found


@pytest.mark.parametrize("value", [3, np.float32(1), np.zeros((0, 2)), jax.random.key(0)])
def test_only_arrays_with_a_leading_dimension_are_taken_apart(tmp_path: Path, value: Any) -> None:
    pc.save(tmp_path / "c", {"x": value})
    (found,) = refusal(tmp_path / "c", unstack={"x": "x_{}"})
    assert "has no leading dimension" in found


def test_a_leaf_that_would_become_too_many_is_refused(tmp_path: Path) -> None:
    manifest = pc.save(tmp_path / "c", {"x": np.zeros((2**50, 0))})
    with pytest.raises(pc.MismatchError, match="would become more than 65536 leaves"):
        pc.plan_restructure(manifest, unstack={"x": "x_{}"})


# --- stack and unstack --------------------------------------------------------------------------


def model(mesh: Mesh, wide: int = 8) -> dict[str, Any]:
    """Layers with a leaf of every kind, small enough to be packed unless `wide` is large."""
    return {
        f"layer_{n}": {
            "kernel": put(numbers(wide, 2 * wide, seed=n), mesh, "data", "model"),
            "bias": put(numbers(2 * wide, seed=n), mesh, "model"),
            "scale": put(numbers(seed=n), mesh),
            "host": numbers(5, seed=n),
            "rng": put(jax.random.key(n), mesh),
            "dropout": (),
        }
        for n in range(LAYERS)
    }


def stacked(mesh: Mesh, layers: dict[str, Any], *leading: Any) -> dict[str, Any]:
    """What the stack of the layers should be, by numpy and JAX."""
    first = layers["layer_0"]

    def together(name: str) -> Any:
        parts = [layers[f"layer_{n}"][name] for n in range(LAYERS)]
        if name == "host":
            return np.stack(parts)
        spec = P(*(leading or (None,)), *first[name].sharding.spec)
        if name == "rng":
            data = np.stack([np.asarray(jax.random.key_data(part)) for part in parts])
            return jax.device_put(jax.random.wrap_key_data(data), NamedSharding(mesh, spec))
        return jax.device_put(np.stack([np.asarray(p) for p in parts]), NamedSharding(mesh, spec))

    return {**{name: together(name) for name in first if name != "dropout"}, "dropout": ()}


def likeness(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: struct(x.shape, x.sharding, x.dtype) if isinstance(x, jax.Array) else x, tree
    )


STACK = {"layer_{}": "layers"}
UNSTACK = {"layers/**": "layer_{}/**"}


@pytest.mark.parametrize("wide", [8, 1024], ids=["packed", "arrays"])
def test_layers_load_as_their_stack_and_back(tmp_path: Path, mesh_4x2: Mesh, wide: int) -> None:
    layers = model(mesh_4x2, wide)
    together = {"layers": stacked(mesh_4x2, layers)}
    pc.save(tmp_path / "apart", layers)
    assert_same(pc.load(tmp_path / "apart", likeness(together), stack=STACK), together)
    assert_same(pc.load(tmp_path / "apart", stack=STACK), together)
    pc.save(tmp_path / "together", together)
    assert_same(pc.load(tmp_path / "together", likeness(layers), unstack=UNSTACK), layers)
    assert_same(pc.load(tmp_path / "together", unstack=UNSTACK), layers)


@pytest.mark.parametrize("wide", [8, 1024], ids=["packed", "arrays"])
def test_a_stack_on_another_layout_needs_reshard(
    tmp_path: Path, mesh_4x2: Mesh, mesh_8: Mesh, wide: int
) -> None:
    layers = model(mesh_4x2, wide)
    pc.save(tmp_path / "c", layers)
    kernels = stacked(mesh_4x2, layers)["kernel"]
    other = NamedSharding(mesh_8, P(None, None, "data"))
    target = {"k": struct(kernels.shape, other)}
    options: dict[str, Any] = {"partial": True, "stack": {"layer_{}/kernel": "k"}}
    assert refusal(tmp_path / "c", target, **options) == [
        "k  sharding: saved P(None, 'data', 'model') on mesh(data=4, model=2), "
        "wanted P(None, None, 'data') on mesh(data=8)"
    ]
    loaded = pc.load(tmp_path / "c", target, reshard=True, **options)
    assert_same(loaded, {"k": jax.device_put(np.asarray(kernels), other)})


@pytest.mark.parametrize("wide", [8, 1024], ids=["packed", "arrays"])
def test_a_stack_whose_leading_dimension_is_cut_comes_apart_with_reshard(
    tmp_path: Path, wide: int
) -> None:
    devices = np.array(jax.devices()[:3])
    mesh, other = Mesh(devices, ("pipe",)), Mesh(np.array(jax.devices()[:4]), ("data",))
    whole = numbers(LAYERS, wide, wide)
    pc.save(tmp_path / "c", {"w": put(whole, mesh, "pipe")})
    want = {f"w_{n}": put(whole[n], other, "data") for n in range(LAYERS)}
    (first, *_) = refusal(tmp_path / "c", likeness(want), unstack={"w": "w_{}"})
    assert "w is saved as P('pipe') on mesh(pipe=3), which cuts the leading dimension" in first
    loaded = pc.load(tmp_path / "c", likeness(want), unstack={"w": "w_{}"}, reshard=True)
    assert_same(loaded, want)
    pc.save(tmp_path / "d", want)
    again = pc.load(
        tmp_path / "d",
        {"w": struct(whole.shape, NamedSharding(mesh, P("pipe")))},
        stack={"w_{}": "w"},
        reshard=True,
    )
    assert_same(again, {"w": put(whole, mesh, "pipe")})


def test_parts_of_a_stack_may_be_stored_in_different_ways(tmp_path: Path, mesh_8: Mesh) -> None:
    parts = [numbers(1024, 512, seed=n) for n in range(3)]
    tree = {
        "w_0": put(parts[0], mesh_8),
        "w_1": put(parts[1], mesh_8, "data"),
        "w_2": put(parts[2], mesh_8),
    }
    manifest = pc.save(tmp_path / "c", tree)
    assert {leaf.spec and leaf.spec.storage for leaf in manifest.leaves} == {"array", "packed"}
    want = put(np.stack(parts), mesh_8, None, "data")
    (found,) = refusal(tmp_path / "c", {"w": likeness(want)}, stack={"w_{}": "w"})
    assert "w_0 is saved as P() on mesh(data=8), and w_1 as P('data') on mesh(data=8)" in found
    loaded = pc.load(tmp_path / "c", {"w": likeness(want)}, stack={"w_{}": "w"}, reshard=True)
    assert_same(loaded, {"w": want})


def test_parts_on_devices_of_their_own_stack_as_on_one(tmp_path: Path) -> None:
    devices = jax.devices()
    pc.save(tmp_path / "c", {f"w_{n}": jax.device_put(numbers(4), devices[n]) for n in range(3)})
    want = jax.device_put(np.stack([numbers(4)] * 3), devices[5])
    assert_same(pc.load(tmp_path / "c", {"w": want}, stack={"w_{}": "w"}), {"w": want})


def test_stacks_follow_cast_and_partial(tmp_path: Path) -> None:
    saved = {f"l/{n}": {"w": numbers(4, seed=n), "b": n} for n in range(11)}
    pc.save(tmp_path / "c", saved)
    options: dict[str, Any] = {"stack": {"l%2F{}/w": "l"}, "partial": True}
    assert "dtype: saved float32" in refusal(tmp_path / "c", {"l": np.zeros((11, 4))}, **options)[0]
    loaded = pc.load(tmp_path / "c", {"l": np.zeros((11, 4))}, cast=True, **options)
    whole = np.stack([saved[f"l/{n}"]["w"] for n in range(11)])
    assert_same(loaded, {"l": whole.astype(np.float64)})
    pc.save(tmp_path / "d", {"l": whole})
    options = {"unstack": {"l": "l/{}"}, "partial": True}
    loaded = pc.load(tmp_path / "d", {"l": {10: np.zeros(4, F32), 3: np.zeros(4, F32)}}, **options)
    assert_same(loaded, {"l": {10: whole[10], 3: whole[3]}})
    wrong = refusal(tmp_path / "d", {"l": {11: np.zeros(4, F32)}}, **options)
    assert wrong[0].startswith("l/11  missing in the checkpoint")


def test_a_stack_may_begin_at_any_number_and_hold_one_leaf(tmp_path: Path) -> None:
    pc.save(tmp_path / "c", {"x_9": numbers(2), "x_10": numbers(2, seed=1), "y_4": numbers(3)})
    loaded = pc.load(tmp_path / "c", stack={"x_{}": "x", "y_{}": "y"})
    want = {"x": np.stack([numbers(2), numbers(2, seed=1)]), "y": numbers(3)[None]}
    assert_same(loaded, want)


def test_damage_in_a_stack_is_reported_at_the_stored_leaf(tmp_path: Path, mesh_8: Mesh) -> None:
    pc.save(tmp_path / "c", {f"w_{n}": put(numbers(1024, 1024), mesh_8) for n in range(2)})
    (file,) = (tmp_path / "c").glob("data-*/arrays/w_1/c.0.0")
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(pc.IntegrityError) as error:
        pc.load(tmp_path / "c", stack={"w_{}": "w"})
    assert [damage.path for damage in error.value.damage] == ["w_1"]


# --- plans --------------------------------------------------------------------------------------


def test_a_stack_reads_each_chunk_of_its_parts_once(tmp_path: Path, mesh_4x2: Mesh) -> None:
    manifest = pc.save(tmp_path / "c", model(mesh_4x2, 1024))
    (whole,) = (
        source
        for source in pc.plan_restructure(manifest, stack=STACK).sources
        if source.leaf.text == "layers/kernel"
    )
    parts = [part.spec for part in whole.parts if part.spec]
    assert whole.leaf.spec is not None
    rows = NamedSharding(mesh_4x2, P(None, "data")).devices_indices_map(whole.leaf.spec.shape)
    from pytree_ckpt.jaxio.shardings import box_of

    boxes = sorted({box_of(index, whole.leaf.spec.shape) for index in rows.values()}, key=str)
    plan = plan_stacked_reads(whole.leaf.spec, parts, boxes)
    reads = [read for unit in plan.units for read in unit.reads]
    assert len({(read.part, read.shard, read.chunk) for read in reads}) == len(reads)
    assert plan.nbytes_read == plan.nbytes_needed == whole.leaf.spec.nbytes
    # A shard of the stack is finished by itself: what is held is one of them, not the array.
    assert [unit.boxes for unit in plan.units] == [(n,) for n in range(4)]


def test_leaves_of_a_stack_that_share_a_chunk_share_its_read(tmp_path: Path) -> None:
    (leaf,) = pc.save(tmp_path / "c", {"w": numbers(64, 8)}).leaves
    assert leaf.spec is not None
    assert leaf.spec.num_chunks == 1
    from pytree_ckpt.format.boxes import Box

    plan = plan_reads(leaf.spec, [Box((n, 0), (n + 1, 8)) for n in range(64)])
    assert plan.nbytes_read == leaf.spec.nbytes


def test_rules_can_be_seen_without_jax_or_tensorstore(tmp_path: Path) -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Block:
        w: Any

    pc.save(tmp_path / "c", {"l": [Block(numbers(2)), Block(numbers(2))], "step": 1})
    code = """
import sys, pytree_ckpt as pc
print(pc.plan_restructure(sys.argv[1], stack={"l/{}/*": "l/*"}))
assert not {"jax", "tensorstore"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "l/0/w … l/1/w (stack of 2) -> l/w\n1 other leaf stays where it is\n"
