"""Flat names for the leaves of a tree, and a tree from flat names."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytree_ckpt.errors import FormatError, UnsupportedLeafError
from pytree_ckpt.format import values, wire
from pytree_ckpt.format.arrays import ARRAY_KINDS, ArrayKind
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.manifest_file import tree_from_wire, tree_to_wire
from pytree_ckpt.format.parse import Reader
from pytree_ckpt.format.paths import Key, Path
from pytree_ckpt.format.shardings import Single
from pytree_ckpt.format.trees import MAX_DEPTH, Tree, from_ends
from pytree_ckpt.format.values import Value
from pytree_ckpt.plan.saving import ArrayForm

TREE_KEY = "pytree_ckpt.tree"
"""Where a file of another format has the tree of the checkpoint that it was made from."""
_VALUE = 0
"""Code of a Python value; arrays have those of their kinds above it."""


def flat_names(
    leaves: Sequence[Leaf], separator: str, *, forbids: Callable[[str], str | None]
) -> list[str]:
    """The keys of each path, joined.

    Args:
        leaves: All that is to be exported.
        separator: Between two keys.
        forbids: Why the format cannot have a name; None for one that it can.

    Raises:
        UnsupportedLeafError: Two leaves would have one name, or one has none, or one that the
            format cannot have; all of them.
        ValueError: The separator is no str.

    Example:
        >>> from types import SimpleNamespace as Leaf
        >>> leaf = Leaf(text="a/0", path=(Key("str", "a"), Key("list", 0)))
        >>> flat_names([leaf], ".", forbids=lambda name: None)
        ['a.0']
    """
    _check_separator(separator)
    names = [separator.join(str(key.value) for key in leaf.path) for leaf in leaves]
    of: dict[str, list[str]] = {}
    for name, leaf in zip(names, leaves, strict=True):
        of.setdefault(name, []).append(leaf.text)
    wrong = [
        (text, f"would have the name {name!r}, as {', '.join(t for t in texts if t != text)}")
        for name, texts in of.items()
        if len(texts) > 1
        for text in texts
    ]
    wrong += [("", "a leaf at the root has no name")] if "" in of else []
    wrong += [(texts[0], why) for name, texts in of.items() if (why := forbids(name))]
    if wrong:
        raise UnsupportedLeafError(wrong)
    return names


def _check_separator(separator: object) -> None:
    if not isinstance(separator, str):
        raise ValueError(f"separator must be a str such as '/', not {separator!r}")


def refuse(leaves: Sequence[Leaf], lacks: Mapping[str, str]) -> None:
    """Raise an `UnsupportedLeafError` that names every leaf that cannot be exported.

    Args:
        leaves: All that is to be exported.
        lacks: For each dtype that the format lacks the reason to give.
    """
    wrong = [
        (leaf.text, "belongs to one process: leave it out with select")
        if leaf.spec is None
        else (leaf.text, lacks[leaf.spec.dtype])
        for leaf in leaves
        if leaf.per_process or (leaf.spec is not None and leaf.spec.dtype in lacks)
    ]
    if wrong:
        raise UnsupportedLeafError(wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedArray:
    """A leaf that is an array of a file: its name there, and what it was in the checkpoint."""

    name: str
    kind: ArrayKind = "numpy"
    key_impl: str | None = None
    key_ndim: int = 0

    def form(self, dtype: str, shape: tuple[int, ...]) -> ArrayForm:
        """An array of the host; keys, which live on devices, are put on one."""
        if self.key_impl is None:
            kind: ArrayKind = "scalar" if self.kind == "scalar" and not shape else "numpy"
            return ArrayForm(kind=kind, dtype=dtype, shape=shape, sharding=None)
        return ArrayForm(
            kind="key",
            dtype=dtype,
            shape=shape,
            sharding=Single(device_id=0),
            committed=False,
            key_impl=self.key_impl,
            key_ndim=self.key_ndim,
        )


def tree_of_names(
    names: Sequence[str], separator: str | None
) -> tuple[Tree, tuple[NamedArray, ...]]:
    """Nested dicts of `str` keys, and the names in the order of their leaves.

    Raises:
        FormatError: A name is also the beginning of another, so that it is leaf and container, or
            names nest deeper than a tree.
        ValueError: The separator is no str.

    Example:
        >>> tree_of_names(["b", "a.w"], ".")[0].build([1, 2])
        {'b': 1, 'a': {'w': 2}}
    """
    if separator is not None:
        _check_separator(separator)
    paths: dict[Path, str] = {}
    for name in names:
        parts = name.split(separator) if separator else [name]
        if len(parts) >= MAX_DEPTH:
            raise FormatError(f"the name {name[:80]!r}… has {len(parts)} parts")
        paths[tuple(Key("str", part) for part in parts)] = name
    inner = {path[:depth] for path in paths for depth in range(len(path))}
    both = [name for path, name in paths.items() if path in inner]
    if both:
        raise FormatError(
            f"{both[0]!r} is a tensor, and the beginning of other names; "
            "separator=None keeps names as they are"
        )
    empty = Tree(("dict",), (0,), (None,))
    tree = from_ends(dict.fromkeys(paths, "leaf"), known=empty) if paths else empty
    return tree, tuple(NamedArray(name=paths[path]) for path in tree.leaf_paths())


def record(tree: Tree, leaves: Sequence[Leaf], names: Mapping[Leaf, str]) -> str:
    """The tree of a checkpoint, and what names cannot say of its leaves, as text."""
    specs = [leaf.spec for leaf in leaves]
    content = {
        "tree": tree_to_wire(tree),
        "codes": bytes(_VALUE if s is None else 1 + ARRAY_KINDS.index(s.kind) for s in specs),
        "names": [names[leaf] for leaf in leaves if leaf.spec is not None],
        "values": [values.to_wire(leaf.value) for leaf in leaves if leaf.value is not None],
        "keys": [[s.key_impl, s.key_ndim] for s in specs if s is not None and s.key_impl],
    }
    return base64.b64encode(wire.encode(content)).decode()


def recorded(text: str, *, what: str) -> tuple[Tree, tuple[NamedArray | Value, ...]]:
    """The tree that `record` wrote, and its leaves.

    Raises:
        FormatError: It is not of this form.
    """
    with Reader.errors(f"the tree in {what}"):
        reader = Reader(wire.decode(base64.b64decode(text, validate=True), what=what), what)
        tree = tree_from_wire(Reader(reader.mapping("tree"), what))
        codes, names = reader.binary("codes"), list(reader.texts("names"))
        python = list(map(values.from_wire, reader.list("values")))
        keys = [(str(impl), int(ndim)) for impl, ndim in reader.list("keys")]
        kinds = [None if code == _VALUE else ARRAY_KINDS[code - 1] for code in codes]
        wanted = (tree.num_leaves, len(kinds) - kinds.count(None), kinds.count(None))
        if (len(kinds), len(names), len(python)) != wanted or len(keys) != kinds.count("key"):
            raise ValueError("the columns of the leaves differ in length")
    for column in (names, python, keys):
        column.reverse()  # to be taken from the end
    leaves: list[NamedArray | Value] = []
    for kind in kinds:
        if kind is None:
            leaves.append(python.pop())
            continue
        impl, ndim = keys.pop() if kind == "key" else (None, 0)
        leaves.append(NamedArray(name=names.pop(), kind=kind, key_impl=impl, key_ndim=ndim))
    return tree, tuple(leaves)
