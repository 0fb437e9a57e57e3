"""The structure of a pytree without its leaves, as data.

Nodes are listed in preorder, so that a tree of any depth is three flat columns.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytree_ckpt.format.paths import Key, Path

NodeKind = Literal["leaf", "none", "dict", "ordereddict", "list", "tuple", "namedtuple", "custom"]
NODE_KINDS: tuple[NodeKind, ...] = (
    "leaf",
    "none",
    "dict",
    "ordereddict",
    "list",
    "tuple",
    "namedtuple",
    "custom",
)
MAX_DEPTH = 256
"""Deepest nesting of containers that is saved or read."""
MAX_PATH_CHARS = 1 << 27
"""Most characters of the keys in the paths of all nodes: a long key is in each path below it."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Preorder columns: the kind of each node, its number of children, its key in its parent.

    The root's key is None.

    Example:
        >>> Tree(("dict", "leaf"), (1, 0), (None, Key("str", "w"))).leaf_paths()
        [(Key(kind='str', value='w'),)]
    """

    kinds: tuple[NodeKind, ...]
    counts: tuple[int, ...]
    keys: tuple[Key | None, ...]

    def __post_init__(self) -> None:
        if not self.kinds or not len(self.kinds) == len(self.counts) == len(self.keys):
            raise ValueError("the columns of a tree differ in length")
        open_nodes: list[tuple[int, set[tuple[bool, str | int]], int]] = []
        total = 0
        for at, (kind, count, key) in enumerate(
            zip(self.kinds, self.counts, self.keys, strict=True)
        ):
            if (key is None) != (at == 0) or (at > 0 and not open_nodes):
                raise ValueError("a tree has one root")
            if count < 0 or (count and kind in ("leaf", "none")):
                raise ValueError(f"a {kind} has {count} children")
            chars = 0
            if key is not None:
                left, seen, above = open_nodes[-1]
                mark = (isinstance(key.value, str), key.value)
                if mark in seen:
                    raise ValueError(f"a container has the key {key.value!r} twice")
                seen.add(mark)
                open_nodes[-1] = (left - 1, seen, above)
                chars = above + 1 + len(str(key.value))
            total += chars
            if total > MAX_PATH_CHARS:
                raise ValueError(f"the paths of a tree have more than {MAX_PATH_CHARS} characters")
            open_nodes.append((count, set(), chars))
            if len(open_nodes) > MAX_DEPTH:
                raise ValueError(f"containers are nested deeper than {MAX_DEPTH}")
            while open_nodes and open_nodes[-1][0] == 0:
                open_nodes.pop()
        if open_nodes:
            raise ValueError("a tree ends before its last container is full")

    @property
    def num_leaves(self) -> int:
        return self.kinds.count("leaf")

    def walk(self) -> Iterator[tuple[Path, NodeKind]]:
        """Every node with its path, in preorder."""
        stack: list[tuple[Path, int]] = []
        for kind, count, key in zip(self.kinds, self.counts, self.keys, strict=True):
            path: Path = () if key is None else (*stack[-1][0], key)
            if key is not None:
                stack[-1] = (stack[-1][0], stack[-1][1] - 1)
            yield path, kind
            stack.append((path, count))
            while stack and stack[-1][1] == 0:
                stack.pop()

    def leaf_paths(self) -> list[Path]:
        """The paths of the leaves, in order."""
        return [path for path, kind in self.walk() if kind == "leaf"]

    def empties(self) -> dict[Path, NodeKind]:
        """Nodes that hold nothing: None, and containers without children, by path."""
        return {
            path: _empty_family(kind)
            for (path, kind), count in zip(self.walk(), self.counts, strict=True)
            if kind != "leaf" and count == 0
        }

    def build(self, leaves: Sequence[Any]) -> Any:
        """The tree in builtin containers; nodes of classes become dicts of their fields."""
        nodes = iter(zip(self.kinds, self.counts, self.keys, strict=True))
        values = iter(leaves)

        def node() -> tuple[Key | None, Any]:
            kind, count, key = next(nodes)
            if kind == "leaf":
                return key, next(values)
            if kind == "none":
                return key, None
            children = [node() for _ in range(count)]
            if kind in ("list", "tuple"):
                items = [child for _, child in children]
                return key, items if kind == "list" else tuple(items)
            pairs = [(k.value, child) for k, child in children if k is not None]
            return key, OrderedDict(pairs) if kind == "ordereddict" else dict(pairs)

        return node()[1]


def from_ends(ends: Mapping[Path, NodeKind], *, known: Tree) -> Tree:
    """The tree with these leaves and empty nodes; other nodes are as `known` has them.

    Nodes that it does not have, and lists and tuples that have lost an element, are lists or
    tuples where their keys allow it, else dicts.

    Example:
        >>> tree = Tree(("list", "leaf"), (1, 0), (None, Key("list", 0)))
        >>> from_ends({(Key("str", "a"), Key("list", 0)): "leaf"}, known=tree).kinds
        ('dict', 'list', 'leaf')
    """
    children: dict[Path, dict[Key, None]] = {}
    for path in ends:
        for depth in range(len(path)):
            children.setdefault(path[:depth], {})[path[depth]] = None
    known_kinds = dict(known.walk())
    kinds: list[NodeKind] = []
    counts: list[int] = []
    keys: list[Key | None] = []

    def enter(path: Path) -> None:
        below = list(children.get(path, ()))
        if all(isinstance(key.value, int) for key in below):
            below.sort(key=lambda key: key.value)
        kind = ends.get(path) or _container_kind(known_kinds.get(path), below)
        kinds.append(kind)
        counts.append(len(below))
        keys.append(path[-1] if path else None)
        for key in below:
            enter((*path, key))

    enter(())
    return Tree(tuple(kinds), tuple(counts), tuple(keys))


def _container_kind(known: NodeKind | None, keys: Sequence[Key]) -> NodeKind:
    if known not in ("leaf", "none", "list", "tuple", None):
        return known
    if [key.value for key in keys] == list(range(len(keys))):
        for kind in ("list", "tuple"):
            if keys and all(key.kind == kind for key in keys):
                return kind
    return "dict"


def _empty_family(kind: NodeKind) -> NodeKind:
    """Empty nodes that a load takes for one another have one name.

    A class may be a mapping, such as flax's FrozenDict; when it is empty nothing tells.
    """
    return "dict" if kind in ("ordereddict", "namedtuple", "custom") else kind
