"""What a load sees of a checkpoint: its leaves, or what rules make of them.

Each rule takes leaves by a pattern of their saved paths, or of a container that they are in, and
says where they go. A leaf goes by the first rule that takes it; all rules are applied at once, so
that two paths can be swapped.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pytree_ckpt.errors import Mismatch, MismatchError
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.paths import Path, key_from_text, nearest, to_text
from pytree_ckpt.format.shardings import place_text, same_place
from pytree_ckpt.format.trees import NodeKind, Tree, from_ends
from pytree_ckpt.format.values import count_text
from pytree_ckpt.plan import patterns, stacking
from pytree_ckpt.plan.patterns import Pattern

Verb = Literal["rename", "stack", "unstack"]
Rules = Mapping[str, str]
MAX_UNSTACKED = 1 << 16
"""Most leaves that one becomes; what a manifest says of an extent costs nothing to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A leaf as a load sees it, and the stored leaves that it is made of.

    Attributes:
        leaf: Its path and its form. A stack has the layout of its parts, with a leading dimension
            that is not cut.
        parts: One stored leaf; for a stack that of each index of the leading dimension.
        is_stack: Whether it is a stack, be it of one part.
        index: The index in the leading dimension of the stored leaf that it is, None for all.
        relayout: Why no sharding counts as the saved one.
    """

    leaf: Leaf
    parts: tuple[Leaf, ...]
    is_stack: bool = False
    index: int | None = None
    relayout: tuple[Mismatch, ...] = ()

    def __str__(self) -> str:
        first, last = self.parts[0].text, self.parts[-1].text
        came = f"{first} … {last} (stack of {len(self.parts)})" if self.is_stack else first
        came += "" if self.index is None else f"[{self.index}]"
        return f"{came} -> {self.leaf.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restructured:
    """What a load sees of a checkpoint; printed, it is a line for each leaf that a rule takes.

    Attributes:
        sources: The leaves.
        containers: The tree; for a target, which has its own, only nodes without leaves, by path.
        moved: What rules made.
    """

    sources: tuple[Source, ...]
    containers: Tree | Mapping[Path, NodeKind]
    moved: tuple[Source, ...] = ()

    def __str__(self) -> str:
        rest = len(self.sources) - len(self.moved)
        stay = "1 other leaf stays where it is"
        if rest != 1:
            stay = f"{rest} other leaves stay where they are"
        return "\n".join([*map(str, self.moved), stay])

    def __repr__(self) -> str:
        moved = count_text(len(self.moved), "leaf", "leaves")
        return f"Restructured({moved} by rules, of {len(self.sources)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    verb: Verb
    left: Pattern
    right: Pattern

    def match(self, text: str) -> tuple[tuple[str, ...], str] | None:
        """What its wildcards stand for in a path, and apart from them the number."""
        found = self.left.match(text)
        if found is None:
            return None
        if "{}" not in self.left.wildcards:
            return found, ""
        at = self.left.wildcards.index("{}")
        return (*found[:at], *found[at + 1 :]), found[at]

    @property
    def name(self) -> str:
        """The left side without what stands for all below it."""
        return self.left.text.removesuffix("/**")

    def wrong(self, text: str, *, path: str | None = None) -> Mismatch:
        where = self.name if path is None else path
        return Mismatch(path=where, kind="rule", text=f"{self.verb}: {text}")


def restructure(
    manifest: Manifest,
    *,
    rename: Rules | None = None,
    stack: Rules | None = None,
    unstack: Rules | None = None,
    like: Tree | None = None,
) -> Restructured:
    """Apply rules to the paths of a checkpoint; see `load` for what they are.

    Keys of new paths have the kinds that they have in `like`, the tree of a target.

    Raises:
        ValueError: A rule is not one.
        MismatchError: Rules that do not fit the checkpoint, with every reason.
    """
    rules = [
        _rule(verb, left, right)
        for verb, given in zip(_NUMBERS, (rename, stack, unstack), strict=True)
        for left, right in _pairs(verb, given)
    ]
    if not rules:
        sources = tuple(Source(leaf=leaf, parts=(leaf,)) for leaf in manifest.leaves)
        return Restructured(sources=sources, containers=manifest.tree)
    return _Restructuring(manifest, rules, like).run()


_NUMBERS: Mapping[Verb, tuple[list[int], str]] = {
    "rename": ([0, 0], "neither side has '{}'"),
    "stack": ([1, 0], "the left side has one '{}', the index, and the right side none"),
    "unstack": ([0, 1], "the right side has one '{}', the index, and the left side none"),
}
"""How often the index is on either side."""


def _pairs(verb: Verb, given: object) -> Iterable[tuple[str, str]]:
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(
        isinstance(side, str) for pair in given.items() for side in pair
    ):
        raise ValueError(f"{verb} must be a dict of saved paths to new paths, not {given!r}")
    return given.items()


def _rule(verb: Verb, left: str, right: str) -> _Rule:
    # What is below a container goes along.
    below = "" if left.endswith("**") or right.endswith("**") else "/**"
    rule = _Rule(verb=verb, left=patterns.parse(left + below), right=patterns.parse(right + below))
    sides = rule.left.wildcards, rule.right.wildcards
    wanted, where = _NUMBERS[verb]
    if [side.count("{}") for side in sides] != wanted:
        raise ValueError(f"{verb} {left!r} -> {right!r}: {where}")
    stars = [[wildcard for wildcard in side if wildcard != "{}"] for side in sides]
    if stars[0] != stars[1]:
        raise ValueError(f"{verb} {left!r} -> {right!r}: both sides have the same '*' and '**'")
    return rule


@dataclass(slots=True)
class _Taken:
    """What one rule takes."""

    renamed: list[tuple[Leaf, str]] = field(default_factory=list)
    unstacked: list[tuple[Leaf, tuple[str, ...]]] = field(default_factory=list)
    stacked: dict[str, list[tuple[int, Leaf]]] = field(default_factory=lambda: defaultdict(list))
    empties: list[tuple[NodeKind, Path, tuple[str, ...]]] = field(default_factory=list)


class _Restructuring:
    """One application of rules."""

    def __init__(self, manifest: Manifest, rules: Sequence[_Rule], like: Tree | None) -> None:
        self._manifest = manifest
        self._rules = rules
        self._has_target = like is not None
        self._wrong: list[Mismatch] = []
        self._keys = _Keys(manifest.tree, like)
        self._moved: list[Source] = []
        self._stay: list[Source] = []
        self._empties: dict[Path, NodeKind] = {}

    def run(self) -> Restructured:
        taken = [_Taken() for _ in self._rules]
        self._take_leaves(taken)
        self._take_empties(taken)
        for rule, what in zip(self._rules, taken, strict=True):
            self._apply(rule, what)
        sources = [*self._stay, *self._moved]
        self._check_distinct(sources)
        if self._wrong:
            raise MismatchError(self._wrong, leaves=len(self._manifest.leaves), remedy=_REMEDY)
        return self._finish(sources)

    def _rule_of(self, text: str) -> tuple[int, tuple[str, ...], str] | None:
        """The rule that takes a path, and what its wildcards stand for there."""
        for at, rule in enumerate(self._rules):
            match = rule.match(text)
            if match is not None:
                return at, *match
        return None

    def _take_leaves(self, taken: Sequence[_Taken]) -> None:
        for leaf in self._manifest.leaves:
            match = self._rule_of(leaf.text)
            if match is None:
                self._stay.append(Source(leaf=leaf, parts=(leaf,)))
                continue
            at, found, number = match
            rule, what = self._rules[at], taken[at]
            if rule.verb == "rename":
                what.renamed.append((leaf, rule.right.fill(found)))
            elif rule.verb == "stack":
                what.stacked[rule.right.fill(found)].append((int(number), leaf))
            else:
                what.unstacked.append((leaf, found))

    def _take_empties(self, taken: Sequence[_Taken]) -> None:
        for path, kind in self._manifest.tree.empties().items():
            match = self._rule_of(to_text(path))
            if match is None:
                self._empties[path] = kind
            else:
                taken[match[0]].empties.append((kind, path, match[1]))

    def _apply(self, rule: _Rule, what: _Taken) -> None:
        if not (what.renamed or what.stacked or what.unstacked or what.empties):
            self._wrong.append(self._takes_nothing(rule))
        for leaf, text in what.renamed:
            self._moved.append(Source(leaf=self._put(leaf, text), parts=(leaf,)))
        for text, parts in what.stacked.items():
            self._stack(rule, text, sorted(parts, key=lambda part: part[0]))
        extent = 0
        for leaf, found in what.unstacked:
            extent = max(extent, self._unstack(rule, leaf, found))
        for kind, path, found in what.empties:
            numbers = range(extent) if rule.verb == "unstack" else [0]
            for number in numbers:
                text = rule.right.fill(found, str(number))
                self._empties[self._keys.path(text, path)] = kind

    def _takes_nothing(self, rule: _Rule) -> Mismatch:
        texts = [leaf.text for leaf in self._manifest.leaves]
        if any(rule.match(text) for text in texts):
            return rule.wrong("all that it matches is taken by rules before it")
        return rule.wrong(f"matches nothing in the checkpoint{nearest(rule.name, texts)}")

    def _stack(self, rule: _Rule, text: str, parts: list[tuple[int, Leaf]]) -> None:
        leaves = tuple(leaf for _, leaf in parts)
        first = leaves[0]
        why_not = _gap([number for number, _ in parts]) or _odd_one(leaves)
        if not why_not:
            try:
                spec = stacking.stacked(first.array, len(leaves))
            except ValueError as error:
                why_not = str(error)
        if why_not:
            self._wrong.append(rule.wrong(why_not, path=text))
            return
        place, moved = first.array.sharding, self._put(first, text, spec=spec, name=None)
        self._moved.append(
            Source(
                leaf=moved,
                parts=leaves,
                is_stack=True,
                relayout=tuple(
                    _relayout(
                        moved.text,
                        f"{first.text} is saved as {place_text(place)}, "
                        f"and {leaf.text} as {place_text(leaf.array.sharding)}",
                    )
                    for leaf in leaves
                    if not same_place(leaf.array.sharding, place)
                )[:1],
            )
        )

    def _unstack(self, rule: _Rule, leaf: Leaf, found: tuple[str, ...]) -> int:
        """One leaf for each index; how many there are."""
        whole = leaf.spec
        if whole is None or not whole.logical_shape or not whole.shape[0]:
            text = f"{leaf.describe()} has no leading dimension to take apart"
            self._wrong.append(rule.wrong(text, path=leaf.text))
            return 0
        if whole.shape[0] > MAX_UNSTACKED:
            text = f"{leaf.describe()} would become more than {MAX_UNSTACKED} leaves"
            self._wrong.append(rule.wrong(text, path=leaf.text))
            return 0
        cut = stacking.cuts_leading(whole)
        place = place_text(whole.sharding)
        why = f"{leaf.text} is saved as {place}, which cuts the leading dimension"
        spec = stacking.index_of(whole)
        for index in range(whole.shape[0]):
            text = rule.right.fill(found, str(index))
            moved = self._put(leaf, text, spec=spec, name=None)
            self._moved.append(
                Source(
                    leaf=moved,
                    parts=(leaf,),
                    index=index,
                    relayout=(_relayout(moved.text, why),) if cut else (),
                )
            )
        return whole.shape[0]

    def _put(self, leaf: Leaf, text: str, **form: Any) -> Leaf:
        """A leaf at the path that a rule says; its text is the one text that the path has."""
        path = self._keys.path(text, leaf.path)
        return dataclasses.replace(leaf, path=path, text=to_text(path), **form)

    def _check_distinct(self, sources: Sequence[Source]) -> None:
        """Two leaves at one path, and leaves below a leaf."""
        at: dict[str, Source] = {}
        for source in sources:
            text = source.leaf.text
            if text in at:
                both = f"{at[text].parts[0].text} and {source.parts[0].text} both come here"
                self._wrong.append(Mismatch(path=text, kind="rule", text=both))
            at[text] = source
        for text, source in at.items():
            above = text
            while above:
                above = above.rpartition("/")[0]
                if above in at:
                    here = f"{source.parts[0].text} comes below the leaf {above or '(root)'}"
                    self._wrong.append(Mismatch(path=text, kind="rule", text=here))
                    break

    def _finish(self, sources: list[Source]) -> Restructured:
        by_path = {source.leaf.path: source for source in sources}
        inner = {path[:depth] for path in [*by_path, *self._empties] for depth in range(len(path))}
        empties = {p: k for p, k in self._empties.items() if p not in inner and p not in by_path}
        moved = tuple(self._moved)
        if self._has_target:
            return Restructured(sources=tuple(sources), containers=empties, moved=moved)
        ends: dict[Path, NodeKind] = {**dict.fromkeys(by_path, _LEAF), **empties}
        tree = from_ends(ends, known=self._manifest.tree)
        ordered = tuple(by_path[path] for path in tree.leaf_paths())
        return Restructured(sources=ordered, containers=tree, moved=moved)


class _Keys:
    """Typed paths of texts: keys of a known node are its own, else as the rule has them."""

    def __init__(self, saved: Tree, like: Tree | None) -> None:
        trees = [saved] if like is None else [saved, like]
        self._known = {to_text(path): path for tree in trees for path, _ in tree.walk()}

    def path(self, text: str, origin: Path) -> Path:
        """The path of a text that was made of `origin`."""
        if text not in self._known:
            above, _, last = text.rpartition("/")
            own = {str(key): key for key in origin}
            self._known[text] = (*self.path(above, origin), own.get(last) or key_from_text(last))
        return self._known[text]


def _gap(numbers: list[int]) -> str | None:
    """Why these sorted numbers are not the indices of a stack."""
    wanted = range(numbers[0], numbers[0] + len(numbers))
    if numbers == list(wanted):
        return None
    twice = len(set(numbers)) < len(numbers)
    why = "one comes twice" if twice else f"{min(set(wanted) - set(numbers))} is missing"
    return f"has the indices {numbers}: {why}"


def _odd_one(leaves: Sequence[Leaf]) -> str | None:
    """Why these leaves do not stack."""
    first = leaves[0]
    for leaf in leaves:
        if first.spec is None or leaf.spec is None:
            return f"only arrays stack: {leaf.text} is {leaf.describe()}"
        if not stacking.stacks_with(first.spec, leaf.spec):
            both = f"{first.text} is {first.describe()}, {leaf.text} is {leaf.describe()}"
            return f"only arrays of one form stack: {both}"
    return None


def _relayout(text: str, why: str) -> Mismatch:
    return Mismatch(path=text, kind="sharding", text=f"sharding: {why}")


_LEAF: NodeKind = "leaf"
_REMEDY = "Each rule must take leaves, and a path gets one leaf."
