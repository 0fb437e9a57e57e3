"""The tree of a manifest with what lies below each node: leaves and bytes."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.paths import to_text
from pytree_ckpt.format.trees import NodeKind
from pytree_ckpt.plan.patterns import Pattern


@dataclass(slots=True, kw_only=True)
class Branch:
    """A node of the tree, and all below it.

    Attributes:
        label: The last key of its path, as text; empty for the root.
        path: Text of the whole path.
        leaf: The leaf, None for a container.
        nbytes, leaves: Of all that is below.
    """

    label: str
    path: str
    kind: NodeKind
    leaf: Leaf | None
    children: "list[Branch]"
    nbytes: int = 0
    leaves: int = 0

    def walk(self) -> "Iterator[tuple[int, Branch]]":
        """This branch and all below it in preorder, each with its depth."""
        stack = [(0, self)]
        while stack:
            depth, branch = stack.pop()
            yield depth, branch
            stack += [(depth + 1, child) for child in reversed(branch.children)]


def outline(manifest: Manifest) -> Branch:
    """The tree of a manifest.

    Example:
        >>> import tempfile, pytree_ckpt as pc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pc.save(folder, {"a": {"b": 1, "c": 2}, "d": 3})
        ...     [(b.path, b.leaves) for _, b in outline(pc.read_manifest(folder)).walk()]
        [('', 3), ('a', 2), ('a/b', 1), ('a/c', 1), ('d', 1)]
    """
    leaves = iter(manifest.leaves)
    above: list[Branch] = []
    found: list[Branch] = []
    for path, kind in manifest.tree.walk():
        del above[len(path) :]
        branch = Branch(
            label=str(path[-1]) if path else "",
            path=to_text(path),
            kind=kind,
            leaf=next(leaves) if kind == "leaf" else None,
            children=[],
        )
        found.append(branch)
        if above:
            above[-1].children.append(branch)
        above.append(branch)
        if branch.leaf is not None:
            for ancestor in above:
                ancestor.leaves += 1
                ancestor.nbytes += branch.leaf.spec.nbytes if branch.leaf.spec else 0
    return found[0]


def by_size(branch: Branch) -> list[Branch]:
    """The children that have bytes, the largest first."""
    return sorted((c for c in branch.children if c.nbytes), key=lambda child: -child.nbytes)


def matching(branch: Branch, pattern: Pattern) -> Branch:
    """Only the leaves whose path matches, and the containers that lead to them."""
    children = [matching(child, pattern) for child in branch.children]
    if branch.leaf is not None and pattern.match(branch.path) is None:
        return dataclasses.replace(branch, leaves=0, nbytes=0)
    if branch.leaf is not None:
        return branch
    kept = [child for child in children if child.leaves]
    leaves, nbytes = sum(c.leaves for c in kept), sum(c.nbytes for c in kept)
    return dataclasses.replace(branch, children=kept, leaves=leaves, nbytes=nbytes)
