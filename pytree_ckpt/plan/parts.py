"""Which parts of a training state a checkpoint has: its parameters, its optimizer, its place."""

from collections.abc import Mapping, Sequence

from pytree_ckpt.errors import Mismatch, MismatchError
from pytree_ckpt.format.manifest import Manifest
from pytree_ckpt.format.paths import nearest, to_text
from pytree_ckpt.plan import patterns

Part = bool | str | Sequence[str]
"""True for the key that the part is named after, else patterns of the paths of leaves, or of
containers that have some; False for no matter."""


def require_parts(manifest: Manifest, parts: Mapping[str, Part], *, what: str) -> None:
    """Check that each part is there; `what` names the checkpoint in the error.

    Raises:
        ValueError: No part is asked for, or a pattern is not one.
        MismatchError: Parts that are missing, all of them.
    """
    wanted = {name: _patterns(name, part) for name, part in parts.items() if part is not False}
    if not wanted:
        raise ValueError("name what is required, such as params=True, opt_state=True, step=True")
    nodes = {to_text(path): kind for path, kind in manifest.tree.walk()}
    empty = {to_text(path) for path, kind in manifest.tree.empties().items() if kind != "none"}
    ends = [*(leaf.text for leaf in manifest.leaves), *empty]
    found: dict[str, set[str]] = {}
    wrong: list[Mismatch] = []
    for name, texts in wanted.items():
        taken = {t: patterns.parse(t if t.endswith("**") else f"{t}/**") for t in texts}
        hits = {
            text: {end for end in ends if pattern.match(end) is not None}
            for text, pattern in taken.items()
        }
        wrong += [_missing(name, text, nodes) for text, hit in hits.items() if not hit]
        if all(hits.values()):
            found[name] = set().union(*hits.values())
    if wrong:
        lacks = len(wanted) - len(found)
        title = f"{what} lacks {lacks} of {len(wanted)} required parts"
        rest = set(ends) - set().union(*found.values())
        raise MismatchError(
            wrong, leaves=len(ends), remedy=_remedy(found, rest) + _origin(manifest), title=title
        )


def _patterns(name: str, part: Part) -> Sequence[str]:
    if part is True:
        return [name]
    texts = [part] if isinstance(part, str) else part
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"{name} must be True, False, a pattern or a list of them, not {part!r}")
    return texts


def _missing(name: str, pattern: str, nodes: Mapping[str, str]) -> Mismatch:
    asked = pattern.removesuffix("/**")
    if nodes.get(asked) == "none":
        note = f": {asked} is None"
    else:
        # A node of this name somewhere else is nearer than one that is spelled like it.
        namesakes = [node for node in nodes if node.rpartition("/")[2] == asked]
        note = f" (nearest: {namesakes[0]})" if namesakes else nearest(asked, nodes)
    return Mismatch(path=name, kind="missing", text=f"nothing matches {pattern!r}{note}")


def _origin(manifest: Manifest) -> str:
    """What is to be said of a checkpoint that no run saved whole."""
    source = manifest.source
    if source.get("holds") not in ("weights", "part"):
        return ""
    what = "weights alone" if source["holds"] == "weights" else f"a part of a {source['kind']}"
    return f" It was made of {what}: {source.get('path', '')}"


def _remedy(found: Mapping[str, object], rest: set[str]) -> str:
    if not found:
        return "Patterns are matched against the paths of the leaves; read_manifest lists them."
    names = " and ".join(found)
    if rest:
        return f"It has {names}; load with partial=True takes what a target asks for."
    return (
        f"It holds nothing but {names}: load with partial=True takes that, for inference or to "
        "start from, but no run can resume from it."
    )
