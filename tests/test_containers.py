"""The structure around the leaves: kinds of container, empty ones, and what a target may be."""

import dataclasses
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pytree_ckpt as pc
from tests.bitwise import assert_same, struct_of


class Point(NamedTuple):
    x: Any
    y: Any


class Nothing(NamedTuple):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    step: Any
    name: str = dataclasses.field(default="state", metadata={"static": True})


class Pair:
    """A node that names neither of its children."""

    def __init__(self, left: Any, right: Any, note: str = "") -> None:
        self.left, self.right, self.note = left, right, note


jax.tree_util.register_pytree_node(
    Pair, lambda p: ((p.left, p.right), p.note), lambda note, c: Pair(*c, note)
)


class Table(dict):  # type: ignore[type-arg]
    """A node that names its children as a dict does."""


jax.tree_util.register_pytree_with_keys(
    Table,
    lambda t: ([(jax.tree_util.DictKey(k), t[k]) for k in sorted(t)], tuple(sorted(t))),
    lambda keys, values: Table(zip(keys, values, strict=True)),
)


class Stack:
    """A node that names its children as a list does."""

    def __init__(self, *items: Any) -> None:
        self.items = items


jax.tree_util.register_pytree_with_keys(
    Stack,
    lambda s: ([(jax.tree_util.SequenceKey(i), v) for i, v in enumerate(s.items)], None),
    lambda _, values: Stack(*values),
)


class Labelled(NamedTuple):
    """A NamedTuple with a rule of its own: only `value` is a child."""

    value: Any
    label: str


jax.tree_util.register_pytree_with_keys(
    Labelled,
    lambda x: (((jax.tree_util.GetAttrKey("value"), x.value),), x.label),
    lambda label, children: Labelled(*children, label),
)


class Hollow:
    """A node without children."""


jax.tree_util.register_pytree_node(Hollow, lambda h: ((), None), lambda _, c: Hollow())


class Twin:
    """A node that gives both of its children one name."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


SAME = jax.tree_util.GetAttrKey("child")
jax.tree_util.register_pytree_with_keys(
    Twin, lambda t: (((SAME, t.first), (SAME, t.second)), None), lambda _, c: Twin(*c)
)


class Fickle:
    """A node that is another at each look."""

    def __init__(self) -> None:
        self.looks = 0


def _look(fickle: Fickle) -> tuple[tuple[np.ndarray[Any, Any]], None]:
    fickle.looks += 1
    return (np.full(1, fickle.looks),), None


jax.tree_util.register_pytree_node(Fickle, _look, lambda _, c: Fickle())


def leaf(number: int) -> np.ndarray[Any, Any]:
    return np.full(2, number, np.float32)


TREES: dict[str, tuple[Any, Any]] = {
    "dict": ({"b": leaf(1), "a": leaf(2)}, {"a": leaf(2), "b": leaf(1)}),
    "list": ([leaf(1), leaf(2)], [leaf(1), leaf(2)]),
    "tuple": ((leaf(1), leaf(2)), (leaf(1), leaf(2))),
    "OrderedDict": (
        OrderedDict([("b", leaf(1)), ("a", leaf(2))]),
        OrderedDict([("b", leaf(1)), ("a", leaf(2))]),
    ),
    "defaultdict": (defaultdict(list, {"w": leaf(1)}), {"w": leaf(1)}),
    "NamedTuple": (Point(leaf(1), leaf(2)), {"x": leaf(1), "y": leaf(2)}),
    "dataclass": (State({"w": leaf(1)}, 7, "run"), {"params": {"w": leaf(1)}, "step": 7}),
    "node without names": (Pair(leaf(1), [leaf(2)], "n"), {0: leaf(1), 1: [leaf(2)]}),
    "node like a dict": (Table(b=leaf(1), a=leaf(2)), {"a": leaf(2), "b": leaf(1)}),
    "node like a list": (Stack(leaf(1), leaf(2)), {0: leaf(1), 1: leaf(2)}),
    "NamedTuple with a rule": (Labelled(leaf(1), "l"), {"value": leaf(1)}),
    "empty dict": ({}, {}),
    "empty list": ([], []),
    "empty tuple": ((), ()),
    "empty OrderedDict": (OrderedDict(), OrderedDict()),
    "empty defaultdict": (defaultdict(int), {}),
    "empty NamedTuple": (Nothing(), {}),
    "empty node": (Hollow(), {}),
    "None": (None, None),
    "array": (leaf(1), leaf(1)),
    "int": (3, 3),
}


def check(path: Path, tree: Any, builtin: Any) -> None:
    """With a target the tree comes back in its classes, without one in builtin containers."""
    pc.save(path, tree)
    assert_same(pc.load(path, tree), tree)
    assert_same(pc.load(path), builtin)
    with pc.open(path) as ckpt:
        assert_same(ckpt.to_numpy(), builtin)


@pytest.mark.parametrize("name", TREES)
def test_a_container_comes_back_at_the_root_and_below_it(tmp_path: Path, name: str) -> None:
    tree, builtin = TREES[name]
    check(tmp_path / "root", tree, builtin)
    check(tmp_path / "below", {"a": (tree, {"sib": leaf(9)})}, {"a": (builtin, {"sib": leaf(9)})})


def test_all_containers_at_once_keep_their_places(tmp_path: Path) -> None:
    check(
        tmp_path / "ckpt",
        {name: [tree, tree] for name, (tree, _) in TREES.items()},
        {name: [builtin, builtin] for name, (_, builtin) in TREES.items()},
    )


def test_static_fields_are_the_targets(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {"s": State(leaf(1), 7, "saved"), "p": Pair(1, 2, "saved")})
    target = {"s": State(leaf(0), 0, "target"), "p": Pair(0, 0, "target")}
    loaded = pc.load(tmp_path / "ckpt", target)
    assert (loaded["s"].name, loaded["p"].note) == ("target", "target")
    assert (loaded["s"].step, loaded["p"].left, loaded["p"].right) == (7, 1, 2)


def test_the_order_of_the_targets_keys_is_kept(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", OrderedDict([("b", 1), ("a", 2), ("c", 3)]))
    assert list(pc.load(tmp_path / "ckpt")) == ["b", "a", "c"]
    target = OrderedDict([("c", 0), ("b", 0), ("a", 0)])
    assert list(pc.load(tmp_path / "ckpt", target).items()) == [("c", 3), ("b", 1), ("a", 2)]
    assert pc.load(tmp_path / "ckpt", {"a": 0, "b": 0, "c": 0}) == {"a": 2, "b": 1, "c": 3}


def test_mappings_of_all_kinds_load_into_each_other(tmp_path: Path) -> None:
    """Their leaves have equal paths; what differs is the class, and that is the target's."""
    items = {"a": leaf(1), "b": {"c": leaf(2)}}
    kinds = [dict(items), OrderedDict(items), defaultdict(list, items), Table(items)]
    for number, saved in enumerate(kinds):
        pc.save(tmp_path / str(number), saved)
        for target in kinds:
            assert_same(pc.load(tmp_path / str(number), target), target)


def test_empty_mappings_of_all_kinds_load_into_each_other(tmp_path: Path) -> None:
    """As do mappings with keys; that one lost its last key is no reason to refuse it."""
    kinds = [{}, OrderedDict(), defaultdict(list), Table()]
    for number, saved in enumerate(kinds):
        pc.save(tmp_path / str(number), {"x": saved, "w": leaf(1)})
        for target in kinds:
            wanted = {"x": target, "w": leaf(1)}
            assert_same(pc.load(tmp_path / str(number), wanted), wanted)


def test_a_class_with_the_fields_of_another_is_a_good_target(tmp_path: Path) -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Position:
        x: Any
        y: Any

    pc.save(tmp_path / "ckpt", {"at": Point(leaf(1), leaf(2))})
    loaded = pc.load(tmp_path / "ckpt", {"at": Position(leaf(0), leaf(0))})
    assert isinstance(loaded["at"], Position)
    assert_same((loaded["at"].x, loaded["at"].y), (leaf(1), leaf(2)))


OTHER_STRUCTURE: dict[str, tuple[Any, Any]] = {
    "list for tuple": ((1, 2), [1, 2]),
    "tuple for list": ([1, 2], (1, 2)),
    "dict for NamedTuple": (Point(1, 2), {"x": 1, "y": 2}),
    "NamedTuple for dict": ({"x": 1, "y": 2}, Point(1, 2)),
    "tuple for NamedTuple": (Point(1, 2), (1, 2)),
    "dict for list": ([1, 2], {0: 1, 1: 2}),
    "dict for node without names": (Pair(1, 2), {0: 1, 1: 2}),
    "leaf for container": ([1], 1),
    "container for leaf": (1, [1]),
    "empty list for empty tuple": ((), []),
    "empty dict for empty tuple": ((), {}),
    "empty dict for None": (None, {}),
    "None for empty tuple": ((), None),
    "None for leaf": (1, None),
    "leaf for None": (None, 1),
    "empty NamedTuple for empty tuple": ((), Nothing()),
    "empty list for list": ([1], []),
    "list for empty list": ([], [1]),
    "empty container that is missing": ({"a": 1}, {"a": 1, "b": {}}),
    "empty container too many": ({"a": 1, "b": {}}, {"a": 1}),
    "None too many": ({"a": 1, "b": None}, {"a": 1}),
    "longer list": ([1, 2], [1, 2, 3]),
    "shorter list": ([1, 2, 3], [1, 2]),
    "one level more": ((1, 2), ((1, 2),)),
    "one level less": ({"a": {"a": 1}}, {"a": 1}),
}


@pytest.mark.parametrize("name", OTHER_STRUCTURE)
@pytest.mark.parametrize("depth", [0, 2], ids=["root", "below"])
def test_another_structure_is_refused(tmp_path: Path, name: str, depth: int) -> None:
    saved, target = OTHER_STRUCTURE[name]
    if target is None and depth == 0:
        target, saved = [None], [saved]  # None itself stands for no target.
    where = ""
    for _ in range(depth):
        saved, target, where = {"k": saved, "w": 1}, {"k": target, "w": 1}, f"k/{where}"
    pc.save(tmp_path / "ckpt", saved)
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "ckpt", target, reshard=True, cast=True)
    found = error.value.mismatches
    assert {m.kind for m in found} <= {"missing", "extra", "structure"}
    assert all(f"{m.path}/".startswith(where) for m in found)
    assert_same(pc.load(tmp_path / "ckpt", saved), saved)


def test_every_leaf_that_has_no_partner_is_named_at_once(tmp_path: Path) -> None:
    saved = {"params": {"w": leaf(1), "b": leaf(2)}, "opt": (leaf(3), (leaf(4), ())), "step": 1}
    target = {
        "params": {"w": leaf(0), "bias": leaf(0)},
        "opt": ((leaf(0), ()), [leaf(0)]),
        "steps": 0,
        "none": None,
    }
    pc.save(tmp_path / "ckpt", saved)
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "ckpt", target)
    found = {(m.kind, m.path) for m in error.value.mismatches}
    assert found == {
        ("missing", "params/bias"),
        ("missing", "opt/0/0"),
        ("missing", "opt/1/0"),
        ("missing", "steps"),
        ("extra", "params/b"),
        ("extra", "opt/0"),
        ("extra", "opt/1/0"),
        ("extra", "step"),
        ("structure", "opt/0/1"),
        ("structure", "opt/1/1"),
        ("structure", "none"),
    }
    lines = str(error.value).splitlines()
    for kind, path in found:
        if kind != "extra":
            assert any(line.startswith(f"  {path}  ") for line in lines), path
    # The four that nobody asked for have one reason, and share a line.
    assert any(line.startswith("  4 leaves  not in the target: opt/0 (saved as ") for line in lines)


def test_a_subset_of_the_containers_can_be_asked_for(tmp_path: Path) -> None:
    saved = {"params": {"w": leaf(1)}, "opt": (leaf(3), ()), "empty": {}, "none": None}
    pc.save(tmp_path / "ckpt", saved)
    target = {"params": {"w": leaf(0)}}
    with pytest.raises(pc.MismatchError, match="partial=True"):
        pc.load(tmp_path / "ckpt", target)
    assert_same(pc.load(tmp_path / "ckpt", target, partial=True), {"params": {"w": leaf(1)}})
    with pytest.raises(pc.MismatchError, match="missing in the checkpoint"):
        pc.load(tmp_path / "ckpt", {"params": {"w": leaf(0), "b": leaf(0)}}, partial=True)


def test_a_target_may_be_structs_in_any_container(tmp_path: Path) -> None:
    tree = {
        "point": Point(jnp.ones(2), (jnp.zeros(3), None)),
        "state": State(Table(w=jnp.arange(4)), jnp.int32(3)),
        "pair": Pair(OrderedDict(b=jnp.ones(1), a=jnp.zeros(1)), Nothing()),
    }
    pc.save(tmp_path / "ckpt", tree)
    assert_same(pc.load(tmp_path / "ckpt", struct_of(tree)), tree)
    assert_same(pc.load(tmp_path / "ckpt", jax.eval_shape(lambda: tree)), tree)


def test_the_tree_that_was_saved_is_not_changed(tmp_path: Path) -> None:
    tree = {"d": defaultdict(list, a=[leaf(1)]), "o": OrderedDict(b=1, a=2), "l": [1, [2]]}
    parts = {id(x) for x in (tree["d"], tree["o"], tree["l"], tree["l"][1], tree["d"]["a"])}
    pc.save(tmp_path / "ckpt", tree)
    assert {id(x) for x in (tree["d"], tree["o"], tree["l"], tree["l"][1], tree["d"]["a"])} == parts
    assert list(tree["o"]) == ["b", "a"]
    assert set(tree["d"]) == {"a"}


def test_two_children_of_one_name_are_refused_by_path(tmp_path: Path) -> None:
    """No path could tell the two from each other."""
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", {"model": [Twin(leaf(1), leaf(2))], "w": 1})
    assert error.value.leaves[0][0].startswith("model/0")
    assert "child" in str(error.value)
    assert not (tmp_path / "ckpt").exists()


def test_a_node_that_changes_while_it_is_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pc.CheckpointError, match="flattens differently") as error:
        pc.save(tmp_path / "ckpt", {"x": Fickle(), "y": [1, Fickle()]})
    assert [path for path, _ in error.value.leaves] == ["x/0", "y/1/0"]
    assert not (tmp_path / "ckpt").exists()


def test_paths_that_no_reader_takes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(pc.CheckpointError, match="paths of a tree have more than 134217728"):
        pc.save(tmp_path / "ckpt", {"k" * (1 << 20): dict.fromkeys(range(200), 1)})
    assert not (tmp_path / "ckpt").exists()


def test_a_node_that_contains_itself_is_refused(tmp_path: Path) -> None:
    tree: list[Any] = [leaf(1)]
    tree += [tree, tree]
    with pytest.raises(pc.UnsupportedLeafError, match="deeper than"):
        pc.save(tmp_path / "ckpt", {"w": tree})


def test_keys_of_a_node_that_cannot_be_saved_are_named_each_once(tmp_path: Path) -> None:
    """Neither has a name that the other could have as well."""
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", {"t": Table({(0,): 1, (1,): 2})})
    assert [text.split(" of ")[0] for _, text in error.value.leaves] == [
        "has the key (0,)",
        "has the key (1,)",
    ]


def test_subclasses_that_jax_does_not_know_are_leaves_and_are_refused(tmp_path: Path) -> None:
    class Config(dict):  # type: ignore[type-arg]
        pass

    class Layers(list):  # type: ignore[type-arg]
        pass

    class Shape(tuple):  # type: ignore[type-arg]
        __slots__ = ()

    tree = {"a": Config(w=1), "b": Layers([1]), "c": Shape((1,)), "d": OrderedDict(x=1)}
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", tree)
    assert [path for path, _ in error.value.leaves] == ["a", "b", "c"]
    assert "register the class as a pytree" in str(error.value)
