"""Flat names for the leaves of a tree, and a tree from flat names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytree_ckpt.errors import FormatError, UnsupportedLeafError
from pytree_ckpt.format import values
from pytree_ckpt.format.arrays import ARRAY_KINDS
from pytree_ckpt.format.manifest import Leaf
from pytree_ckpt.format.paths import KEY_KINDS, Key, Path, to_text
from pytree_ckpt.format.shardings import Single
from pytree_ckpt.format.trees import NODE_KINDS, Tree, from_ends
from pytree_ckpt.format.values import Value
from pytree_ckpt.plan.saving import ArrayForm

TREE_KEY = "pytree_ckpt.tree"
"""Where a file of another format has the tree of the checkpoint it was made from, as JSON."""


def flat_names(leaves: Sequence[Leaf], separator: str) -> list[str]:
    """The keys of each path, joined.

    Raises:
        UnsupportedLeafError: Two leaves would have one name, or one has none; all of them.

    Example:
        >>> from types import SimpleNamespace as Leaf
        >>> flat_names([Leaf(text="a/0", path=(Key("str", "a"), Key("list", 0)))], ".")
        ['a.0']
    """
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
    if wrong:
        raise UnsupportedLeafError(wrong)
    return names


def tree_of_names(names: Sequence[str], separator: str | None) -> tuple[Tree, list[str]]:
    """Nested dicts of `str` keys, and the names in the order of their leaves.

    Raises:
        FormatError: A name is also the beginning of another, so that it is leaf and container.

    Example:
        >>> tree_of_names(["b", "a.w"], ".")[0].build([1, 2])
        {'b': 1, 'a': {'w': 2}}
    """
    paths: dict[Path, str] = {}
    for name in names:
        parts = name.split(separator) if separator else [name]
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
    return tree, [paths[path] for path in tree.leaf_paths()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A tree as a file records it: for each leaf the name of its array, or its value."""

    tree: Tree
    names: tuple[str | None, ...]
    values: tuple[Value | None, ...]
    kinds: tuple[str | None, ...]
    key_impls: tuple[tuple[str, int] | None, ...]


def record(tree: Tree, leaves: Sequence[Leaf], names: Mapping[int, str]) -> str:
    """The tree of a checkpoint, and what names cannot say of its leaves, as text."""
    nodes = [
        [
            NODE_KINDS.index(kind),
            count,
            None if key is None else [KEY_KINDS.index(key.kind), key.value],
        ]
        for kind, count, key in zip(tree.kinds, tree.counts, tree.keys, strict=True)
    ]
    found: list[Any] = []
    for at, leaf in enumerate(leaves):
        if leaf.spec is None:
            tag, payload = values.to_wire(leaf.value)  # type: ignore[arg-type]
            is_bytes = isinstance(payload, bytes)
            found.append([tag, payload.hex() if is_bytes else payload, is_bytes])
        else:
            found.append([names[at], leaf.spec.kind, leaf.spec.key_impl, leaf.spec.key_ndim])
    return json.dumps([nodes, found], separators=(",", ":"))


def recorded(text: str, *, what: str) -> Recorded:
    """The tree that `record` wrote.

    Raises:
        FormatError: It is not of this form.
    """
    try:
        nodes, found = json.loads(text)
        tree = Tree(
            tuple(NODE_KINDS[kind] for kind, _, _ in nodes),
            tuple(count for _, count, _ in nodes),
            tuple(None if key is None else Key(KEY_KINDS[key[0]], key[1]) for _, _, key in nodes),
        )
        if tree.num_leaves != len(found):
            raise ValueError(f"{len(found)} leaves in a tree of {tree.num_leaves}")
        names: list[str | None] = []
        python: list[Value | None] = []
        kinds: list[str | None] = []
        impls: list[tuple[str, int] | None] = []
        for item in found:
            if len(item) == 3:
                tag, payload, is_bytes = item
                python.append(
                    values.from_wire([tag, bytes.fromhex(payload) if is_bytes else payload])
                )
                names.append(None)
                kinds.append(None)
                impls.append(None)
                continue
            name, kind, impl, ndim = item
            if not isinstance(name, str) or kind not in ARRAY_KINDS:
                raise ValueError(f"a leaf of kind {kind!r}")
            names.append(name)
            python.append(None)
            kinds.append(kind)
            impls.append((str(impl), int(ndim)) if impl is not None else None)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise FormatError(f"{what} has a tree that is none: {error}") from None
    return Recorded(
        tree=tree,
        names=tuple(names),
        values=tuple(python),
        kinds=tuple(kinds),
        key_impls=tuple(impls),
    )


def form_of(
    dtype: str, shape: tuple[int, ...], kind: str | None, impl: tuple[str, int] | None
) -> ArrayForm:
    """An array of the host; keys, which live on devices, are put on one."""
    if kind == "key" and impl is not None:
        return ArrayForm(
            kind="key",
            dtype=dtype,
            shape=shape,
            sharding=Single(device_id=0),
            committed=False,
            key_impl=impl[0],
            key_ndim=impl[1],
        )
    return ArrayForm(
        kind="scalar" if kind == "scalar" and not shape else "numpy",
        dtype=dtype,
        shape=shape,
        sharding=None,
    )


def refuse_values(leaves: Sequence[Leaf]) -> None:
    """Raise an `UnsupportedLeafError` that names every value that each process has its own of."""
    wrong = [
        (to_text(leaf.path), "belongs to one process: leave it out with select")
        for leaf in leaves
        if leaf.per_process
    ]
    if wrong:
        raise UnsupportedLeafError(wrong)
