"""The paths of leaves as text and as file names: never one name for two leaves, never a way out."""

import enum
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pytree_ckpt as pc
from pytree_ckpt.format import paths
from pytree_ckpt.format.paths import Key, is_safe_file_name, to_file_names, to_text
from pytree_ckpt.format.trees import MAX_DEPTH
from pytree_ckpt.jaxio import trees
from tests.bitwise import assert_same

MIB = 1 << 20

HOSTILE_KEYS = [
    *("", "'", "''", "'1'", "%", "%_", "%2F", "%252F", "%25", "%root", "%-", "x%2Fy", "x/y"),
    *(".", "..", "...", "../..", "/", "//", "/etc/passwd", "~", "~root", "-", "--", "-0", "+1"),
    *(".zarray", "zarr.json", "c", "c.0", "c/0", "manifest.msgpack", "data-0", "mlp/~/linear_0"),
    *("a", "A", "a.b", "a/b", "a b", " ", "  ", "a ", " a", "\t", "\n", "a\n", "\0", "\x7f", "\\"),
    *("0", "1", "-1", "01", "1.0", "1e3", "٣", "²", "1_0", "0x1", "None", "True", "(root)"),
    *(
        "é",
        "e\u0301",
        "É",
        "ß",
        "ss",
        "\u0131",
        "\u0130",
        "\u017f",
        "K",
        "\u212a",
        "空",
        "🦆",
        "\u202e",
        "\u200b",
    ),
    *("\ufeff", "\ufffd", "\uffff", "\U0010ffff", "CON", "nul", "a:b", "a*b?", 'a"b', "a|b", "<>"),
    *("w" * 159, "w" * 160, "w" * 161, "w" * 300, "W" * 300, "w" * 299 + "W", "é" * 100, "." * 300),
]

small_text = st.text(st.sampled_from("aA0-%/.'~_ \n\0éE25F"), max_size=5)
text_keys = st.one_of(
    small_text,
    st.sampled_from(HOSTILE_KEYS),
    st.text(),
    st.builds(lambda text, count: text * count, small_text, st.integers(30, 120)),
)
int_keys = st.one_of(st.integers(-12, 12), st.integers())


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(text_keys, children, max_size=6),
        st.dictionaries(int_keys, children, max_size=4),
        # JAX sorts the keys of no OrderedDict, so text and numbers can be beside each other.
        st.dictionaries(st.one_of(text_keys, int_keys), children, max_size=6).map(OrderedDict),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
    )


any_tree = st.recursive(st.integers(0, 9), containers, max_leaves=24)


def leaf_paths(tree: Any) -> list[paths.Path]:
    return trees.flatten(tree).tree.leaf_paths()


@given(any_tree)
@example({"a/b": 1, "a": {"b": 2, "": 3}, "a.b": 4, "a%2Fb": 5, "a/": {"": 6}})
@example(OrderedDict([(key, number) for number, key in enumerate([*HOSTILE_KEYS, *range(-2, 3)])]))
@settings(max_examples=300)
def test_no_two_leaves_of_a_tree_have_one_text_or_one_file_name(tree: Any) -> None:
    found = leaf_paths(tree)
    assert len(found) == len(set(found)) == len(jax.tree.leaves(tree))
    texts = [to_text(path) for path in found]
    assert len(set(texts)) == len(texts)
    names = to_file_names(found)
    assert len({name.casefold() for name in names}) == len(names)


@given(any_tree)
@example(dict(enumerate(HOSTILE_KEYS)))
def test_file_names_cannot_leave_their_folder(tree: Any) -> None:
    for name in to_file_names(leaf_paths(tree)):
        assert is_safe_file_name(name)
        assert name.isascii()
        assert len(name) <= paths.MAX_FILE_NAME
        assert Path(name).name == name
        assert name not in (".", "..")
        assert not name.startswith((".", "~"))


@given(any_tree)
def test_the_text_of_a_path_is_printable_and_has_no_slash_too_many(tree: Any) -> None:
    texts = [to_text(path) for path in leaf_paths(tree)]
    for text in texts:
        assert text.isprintable()
        assert "//" not in text
        assert text.strip("/") == text


@given(any_tree)
def test_names_depend_on_the_tree_alone(tree: Any) -> None:
    """Each process of a job works out the names for itself."""
    found = leaf_paths(tree)
    assert to_file_names(found) == to_file_names(list(found))
    backwards = to_file_names(found[::-1])
    assert backwards[::-1] == to_file_names(found)


@given(st.text(max_size=8))
def test_a_name_from_a_file_is_safe_or_is_refused(name: str) -> None:
    if is_safe_file_name(name):
        assert Path("/root", name).resolve() == Path("/root") / name
        assert Path(name).parts == (name,)
        assert "\0" not in name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/a", ".hidden", "a\0", "a\n", "a\\b", "é", "a:b", "a" * 256],
)
def test_unsafe_names_are_known(name: str) -> None:
    assert not is_safe_file_name(name)


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ((), "", "%root"),
        ((Key("str", "params"), Key("str", "w")), "params/w", "params.w"),
        ((Key("list", 0), Key("tuple", 12), Key("flat", 3)), "0/12/3", "0.12.3"),
        ((Key("attr", "count"),), "count", "count"),
        ((Key("int", -1),), "-1", "-1"),
        ((Key("str", "-1"),), "'-1'", "%2D1"),
        ((Key("str", "0"),), "'0'", "%30"),
        ((Key("str", ""),), "''", "%_"),
        ((Key("str", "a/b"),), "a%2Fb", "a%2Fb"),
        ((Key("str", "a%2Fb"),), "a%252Fb", "a%252Fb"),
        ((Key("str", "a.b"),), "a.b", "a%2Eb"),
        ((Key("str", ".."),), "..", "%2E%2E"),
        ((Key("str", "~"),), "~", "%7E"),
        ((Key("str", "'1'"),), "%271'", "%271%27"),
        ((Key("str", "é 空"),), "é 空", "%C3%A9%20%E7%A9%BA"),
        ((Key("str", "a\nb"),), "a%0Ab", "a%0Ab"),
    ],
)
def test_a_path_is_written_so(path: paths.Path, text: str, name: str) -> None:
    assert to_text(path) == text
    assert to_file_names([path]) == [name]


def test_names_that_differ_only_by_case_end_in_a_digest() -> None:
    lower, upper, other = to_file_names([(Key("str", key),) for key in ("w", "W", "x")])
    assert other == "x"
    assert lower.startswith("w%-")
    assert upper.startswith("W%-")


# --- through a save and a load --------------------------------------------------------------


@given(any_tree)
@settings(max_examples=40)
def test_any_keys_survive_a_save_and_a_load(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pc.save(folder, tree)
        assert_same(pc.load(folder), tree)
        assert_same(pc.load(folder, tree), tree)
        with pc.open(folder) as ckpt:
            assert [ckpt[text] for text in ckpt] == jax.tree.leaves(tree)
            assert_same(ckpt.to_numpy(), tree)


def everything_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def test_hostile_keys_of_large_arrays_stay_inside_the_checkpoint(tmp_path: Path) -> None:
    outside = tmp_path / "runs"
    outside.mkdir()
    (outside / "neighbour").write_text("mine")
    before = everything_below(tmp_path)
    keys = ["..", "../../neighbour", "/etc/passwd", "", ".zarray", "~", "zarr.json", "w", "W"]
    keys += ["w" * 300, "w" * 299 + "W", "x%2Fy", "x/y", "é 空", "mlp/~/linear_0", "c.0", "0", "-1"]
    tree: dict[str, Any] = {
        key: np.full(MIB, number, np.uint8) for number, key in enumerate(keys)
    } | {"x": {"y": np.full(MIB, 99, np.uint8)}}
    manifest = pc.save(outside / "ckpt", tree)
    assert {leaf.spec.storage for leaf in manifest.leaves} == {"array"}
    assert_same(pc.load(outside / "ckpt"), tree)
    assert_same(pc.load(outside / "ckpt", tree), tree)

    new = everything_below(tmp_path) - before
    assert all(path.parts[:2] == ("runs", "ckpt") for path in new)
    assert not any(path.is_symlink() for path in (tmp_path / p for p in new))
    assert (outside / "neighbour").read_text() == "mine"
    folders = [p.name for p in (outside / "ckpt" / manifest.data_dir / "arrays").iterdir()]
    assert sorted(folders) == sorted(manifest.names)
    assert len({name.casefold() for name in folders}) == len(tree)


def test_flat_and_nested_keys_are_different_leaves(tmp_path: Path) -> None:
    tree = {
        "a/b": np.float32([1, 1]),
        "a": {"b": np.float32([2, 2]), "b/c": np.float32([7]), "b.c": np.float32([8])},
        "a.b": np.float32([3, 3]),
        "c": {"d": np.float32([4, 4])},
        "c/d": np.float32([5, 5]),
        "c.d": {"": np.float32([6])},
    }
    pc.save(tmp_path / "ckpt", tree)
    assert_same(pc.load(tmp_path / "ckpt"), tree)
    assert_same(pc.load(tmp_path / "ckpt", tree), tree)
    for wrong in ({"a/b": tree["a/b"]}, {"a": {"b": tree["a"]["b"]}}):
        pc.save(tmp_path / "one", wrong, overwrite=True)
        other = (
            {"a": {"b": np.zeros(2, np.float32)}} if "a/b" in wrong else {"a/b": np.zeros(2, "f4")}
        )
        with pytest.raises(pc.MismatchError) as error:
            pc.load(tmp_path / "one", other)
        assert {m.kind for m in error.value.mismatches} == {"missing", "extra"}


def test_a_number_and_its_digits_are_different_keys(tmp_path: Path) -> None:
    numbers, digits = {"x": {0: 1, -1: 2, 10: 3}}, {"x": {"0": 1, "-1": 2, "10": 3}}
    for name, tree in (("numbers", numbers), ("digits", digits)):
        pc.save(tmp_path / name, tree)
        assert pc.load(tmp_path / name) == tree
        assert pc.load(tmp_path / name, tree) == tree
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "numbers", digits)
    assert {m.path for m in error.value.mismatches if m.kind == "missing"} == {
        "x/'0'",
        "x/'-1'",
        "x/'10'",
    }
    assert {m.path for m in error.value.mismatches if m.kind == "extra"} == {"x/0", "x/-1", "x/10"}
    with pc.open(tmp_path / "digits") as ckpt:
        assert ckpt["x/'10'"] == 3
        assert "x/10" not in ckpt


def test_an_index_of_a_list_is_no_key_of_a_dict(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {"x": [1, 2]})
    with pytest.raises(pc.MismatchError, match="saved under a key of another kind"):
        pc.load(tmp_path / "ckpt", {"x": {0: 1, 1: 2}})


@pytest.mark.parametrize("exponent", [63, 64, 200, 1000])
def test_an_int_key_beyond_64_bits_survives(tmp_path: Path, exponent: int) -> None:
    tree = {2**exponent: 1, -(2**exponent): 2, 0: 3}
    pc.save(tmp_path / "ckpt", tree)
    assert pc.load(tmp_path / "ckpt") == tree
    assert pc.load(tmp_path / "ckpt", tree) == tree


@pytest.mark.parametrize("digits", [300, 398, 399, 400, 401, 500, 4000, 5000, 100_000])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_int_key_that_is_saved_can_be_read_back(tmp_path: Path, digits: int, sign: int) -> None:
    """A key may be too long to be saved, but never too long for what was saved to be read."""
    tree = {"a": {sign * 10**digits: 1}}
    try:
        pc.save(tmp_path / "ckpt", tree)
    except pc.UnsupportedLeafError as error:
        assert [path for path, _ in error.leaves] == ["a"]  # noqa: PT017
        assert not (tmp_path / "ckpt").exists()
    else:
        assert pc.load(tmp_path / "ckpt") == tree


def test_keys_that_equal_text_or_numbers_come_back_as_plain_ones(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {"s": {np.str_("w"): 1}, "i": {np.int64(3): 2}})
    loaded = pc.load(tmp_path / "ckpt")
    assert loaded == {"s": {"w": 1}, "i": {3: 2}}
    assert [type(key) for part in loaded.values() for key in part] == [int, str]


class Split(enum.Enum):
    TRAIN = 1
    TEST = 2


REFUSED_KEYS: dict[str, tuple[dict[Any, Any], str]] = {
    "tuple": ({(1, 2): 0}, "tuple"),
    "bool": ({True: 0}, "bool"),
    "numpy bool": ({np.True_: 0}, "bool"),
    "float": ({1.5: 0}, "float"),
    "None": ({None: 0}, "NoneType"),
    "bytes": ({b"a": 0}, "bytes"),
    "frozenset": ({frozenset("a"): 0}, "frozenset"),
    "complex": ({1j: 0}, "complex"),
    "str beside int": ({1: 0, "1": 0}, "sort (int beside str)"),
    "str beside None": ({None: 0, "1": 0}, "sort (NoneType beside str)"),
    "members of an enum": ({Split.TRAIN: 0, Split.TEST: 0}, "sort (Split)"),
    "surrogate": ({"\ud800": 0}, "UTF-8"),
}


@pytest.mark.parametrize("name", REFUSED_KEYS)
def test_a_key_that_is_neither_text_nor_a_number_is_refused(tmp_path: Path, name: str) -> None:
    tree, reason = REFUSED_KEYS[name]
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", {"params": [{"fine": 1}, tree]})
    assert {path for path, _ in error.value.leaves} == {"params/1"}
    assert reason in str(error.value)
    assert not (tmp_path / "ckpt").exists()


def test_every_key_that_cannot_be_saved_is_named_at_once(tmp_path: Path) -> None:
    tree = {name: tree for name, (tree, _) in REFUSED_KEYS.items()}
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", tree)
    assert {path for path, _ in error.value.leaves} == set(tree)


def test_a_target_with_such_a_key_is_refused_too(tmp_path: Path) -> None:
    pc.save(tmp_path / "ckpt", {"a": 1})
    with pytest.raises(pc.UnsupportedLeafError):
        pc.load(tmp_path / "ckpt", {("a",): 1})


# --- depth ----------------------------------------------------------------------------------


def nested(depth: int, kind: str) -> Any:
    tree: Any = {"dict": 1, "list": 2, "tuple": 3}[kind]
    for _ in range(depth):
        tree = {"dict": {"k": tree}, "list": [tree], "tuple": (tree,)}[kind]
    return tree


@pytest.mark.parametrize("kind", ["dict", "list", "tuple"])
def test_deep_trees_survive(tmp_path: Path, kind: str) -> None:
    # A leaf counts as a level.
    for depth in (200, MAX_DEPTH - 1):
        tree = nested(depth, kind)
        pc.save(tmp_path / str(depth), tree)
        assert_same(pc.load(tmp_path / str(depth)), tree)
        assert_same(pc.load(tmp_path / str(depth), tree), tree)
        with pc.open(tmp_path / str(depth)) as ckpt:
            assert_same(ckpt.to_numpy(), tree)


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 5000])
def test_a_deeper_tree_is_refused_with_its_limit(tmp_path: Path, depth: int) -> None:
    tree = {"ok": 1, "deep": nested(depth - 1, "dict")}
    with pytest.raises(pc.UnsupportedLeafError, match=f"deeper than {MAX_DEPTH}") as error:
        pc.save(tmp_path / "ckpt", tree)
    ((path, _),) = error.value.leaves
    assert path.startswith("deep/k/k")
    assert not (tmp_path / "ckpt").exists()
    pc.save(tmp_path / "ckpt", {"ok": 1})
    with pytest.raises(pc.UnsupportedLeafError, match=f"deeper than {MAX_DEPTH}"):
        pc.load(tmp_path / "ckpt", tree)


def test_deep_leaves_have_distinct_short_names(tmp_path: Path) -> None:
    deep = [(*[Key("str", "layer")] * 200, Key("int", number)) for number in range(50)]
    names = to_file_names(deep)
    assert len({name.casefold() for name in names}) == 50
    assert max(map(len, names)) <= paths.MAX_FILE_NAME
