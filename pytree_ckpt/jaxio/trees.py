"""Pytrees to plain structure, by JAX's own rules of what is a node and what is a leaf."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from pytree_ckpt.errors import CheckpointError
from pytree_ckpt.format import values
from pytree_ckpt.format.paths import MAX_KEY_DIGITS, Key, Path, to_text
from pytree_ckpt.format.trees import MAX_DEPTH, NodeKind, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTree:
    """A pytree taken apart: structure as data, the leaves, and JAX's way back.

    `refused` has the places that have no structure as data, each with the reason. Where there
    are some, `tree` is one leaf.
    """

    tree: Tree
    paths: list[Path]
    leaves: list[Any]
    treedef: Any
    refused: list[tuple[str, str]]


def flatten(tree: Any) -> FlatTree:
    """Take a pytree apart, leaves in JAX's order.

    Keys that are neither `str` nor `int`, keys that JAX cannot sort, two children of one name,
    nesting deeper than `MAX_DEPTH`, and leaves that are made when their node is flattened are
    refused.
    """
    walk = _Walk()
    walk.node(tree, None, ())
    if not walk.refused:
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        walk.compare(leaves)
    if walk.refused:
        one = Tree(("leaf",), (0,), (None,))
        return FlatTree(
            tree=one, paths=walk.paths, leaves=walk.leaves, treedef=None, refused=walk.refused
        )
    try:
        structure = Tree(tuple(walk.kinds), tuple(walk.counts), tuple(walk.keys))
    except ValueError as error:
        raise CheckpointError(f"no checkpoint can hold the tree: {error}") from None
    return FlatTree(tree=structure, paths=walk.paths, leaves=leaves, treedef=treedef, refused=[])


class _Walk:
    """Preorder columns of a tree, filled node by node."""

    def __init__(self) -> None:
        self.kinds: list[NodeKind] = []
        self.counts: list[int] = []
        self.keys: list[Key | None] = []
        self.leaves: list[Any] = []
        self.paths: list[Path] = []
        self.refused: list[tuple[str, str]] = []
        self._is_too_deep = False

    def node(self, node: Any, key: Key | None, path: Path) -> None:
        """Enter a node and all below it, up to the first that is too deep."""
        if self._is_too_deep:  # A node that contains itself twice would have 2 ** MAX_DEPTH.
            return
        if len(path) >= MAX_DEPTH:
            self._is_too_deep = True
            self.refused.append((to_text(path[:4]) + "/…", f"nested deeper than {MAX_DEPTH}"))
            return
        children = self._children(node, path)
        kind, pairs = ("leaf", []) if children is None else children
        self.kinds.append(kind)
        self.counts.append(len(pairs))
        self.keys.append(key)
        if kind == "leaf":
            self.leaves.append(node)
            self.paths.append(path)
        for child_key, child in pairs:
            self.node(child, child_key, (*path, child_key))

    def compare(self, leaves: Sequence[Any]) -> None:
        """Refuse leaves that are not the ones that JAX finds, in its order."""
        if len(leaves) != len(self.leaves):
            raise CheckpointError("a node flattens differently from one time to the next")
        for path, found, leaf in zip(self.paths, self.leaves, leaves, strict=True):
            if found is not leaf:
                text = "is made anew by a node that flattens differently each time; keep it there"
                self.refused.append((to_text(path), text))

    def _children(self, node: Any, path: Path) -> tuple[NodeKind, list[tuple[Key, Any]]] | None:
        """Kind and children of a node, None for a leaf."""
        kind = type(node)
        if kind in _LEAVES or isinstance(node, jax.Array):
            return None
        if node is None:
            return "none", []
        if kind is dict or kind is defaultdict:
            return "dict", self._sorted(node, path)
        if kind is OrderedDict:
            return "ordereddict", [(self._key(k, path), v) for k, v in node.items()]
        if kind is list:
            return "list", [(Key("list", i), v) for i, v in enumerate(node)]
        if kind is tuple:
            return "tuple", [(Key("tuple", i), v) for i, v in enumerate(node)]
        return self._custom(node, path)

    def _sorted(self, node: dict[Any, Any], path: Path) -> list[tuple[Key, Any]]:
        try:
            keys = sorted(node)
        except TypeError:
            kinds = " beside ".join(sorted({type(key).__name__ for key in node}))
            text = f"a dict with keys that JAX cannot sort ({kinds}); all must be str, or all int"
            self.refused.append((to_text(path), text))
            return []
        return [(self._key(key, path), node[key]) for key in keys]

    def _custom(self, node: Any, path: Path) -> tuple[NodeKind, list[tuple[Key, Any]]] | None:
        """A named tuple or a node of a registered class, one level deep."""
        pairs, treedef = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda child: child is not node
        )
        if jax.tree_util.treedef_is_leaf(treedef) and len(pairs) == 1 and not pairs[0][0]:
            return None
        children = [(self._entry(steps[0], path), child) for steps, child in pairs]
        names = [key.value for key, _ in children]
        for name in (name for name, count in Counter(names).items() if count > 1):
            self.refused.append((to_text(path), f"has two children of the name {name!r}"))
        fields = getattr(node, "_fields", None) if isinstance(node, tuple) else None
        return "namedtuple" if fields and list(fields) == names else "custom", children

    def _entry(self, entry: Any, path: Path) -> Key:
        match entry:
            case DictKey():
                return self._key(entry.key, path)
            case GetAttrKey():
                return Key("attr", str(entry.name))
            case SequenceKey():
                return Key("list", entry.idx)
            case FlattenedIndexKey():
                return Key("flat", int(entry.key))
            case _:
                return self._key(getattr(entry, "key", entry), path)

    def _key(self, key: Any, path: Path) -> Key:
        """A key of a mapping, or a refusal."""
        reason = f"has a key of type {type(key).__name__}; keys must be str or int"
        if isinstance(key, str):
            text = str.__str__(key)
            if values.is_utf8(text):
                return Key("str", text)
            reason = f"has the key {key!r}, which is not valid UTF-8"
        elif isinstance(key, (int, np.integer)) and not isinstance(key, bool):
            if abs(int(key)) < 10**MAX_KEY_DIGITS:
                return Key("int", int(key))
            reason = f"has an int key of more than {MAX_KEY_DIGITS} digits"
        elif len(repr(key)) < 200:
            reason = f"has the key {key!r} of type {type(key).__name__}; keys must be str or int"
        self.refused.append((to_text(path), reason))
        return Key("flat", -len(self.refused))  # No two of these are one name.


_LEAVES = frozenset({bool, int, float, complex, str, bytes, np.ndarray, jax.ShapeDtypeStruct})
