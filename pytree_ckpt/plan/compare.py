"""Does a request fit a checkpoint? Every reason why not, from plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytree_ckpt.errors import Mismatch, MismatchKind
from pytree_ckpt.format import dtypes
from pytree_ckpt.format.arrays import ArraySpec
from pytree_ckpt.format.boxes import Shape
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.paths import Path, nearest, to_text
from pytree_ckpt.format.shardings import Sharding, cell_of, same_layout
from pytree_ckpt.format.trees import Tree
from pytree_ckpt.plan.restructure import Restructured, Source

WantKind = Literal[
    "jax", "key", "numpy", "scalar", "bool", "int", "float", "complex", "str", "bytes", "process"
]
MAX_SUGGESTIONS = 20
"""Missing leaves for which the nearest saved name is looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a target asks of one leaf.

    `sharding` is None for a `ShapeDtypeStruct` without one, and for all that is not on devices.
    """

    kind: WantKind
    shape: Shape = ()
    dtype: str | None = None
    key_impl: str | None = None
    sharding: Sharding | None = None

    @property
    def dtype_text(self) -> str:
        return f"key<{self.key_impl}>" if self.key_impl else self.dtype or self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Leaves of the target paired with leaves of the checkpoint, and what found no partner."""

    pairs: tuple[tuple[int, Source], ...]
    skipped: tuple[Leaf, ...]
    mismatches: tuple[Mismatch, ...]


def match_leaves(have: Restructured, tree: Tree, *, partial: bool) -> Match:
    """Pair leaves by path; leaves and empty containers on one side only are mismatches.

    With `partial` the target may ask for less than there is.
    """
    sources = {source.leaf.path: source for source in have.sources}
    saved = {path: source.leaf for path, source in sources.items()}
    wanted = tree.leaf_paths()
    pairs = [(at, sources[path]) for at, path in enumerate(wanted) if path in sources]
    missing = [path for path in wanted if path not in saved]
    asked = set(wanted)
    extra = [leaf for path, leaf in saved.items() if path not in asked]
    found = _missing(missing, saved, [leaf.text for leaf in extra])
    if not partial:
        found += [
            Mismatch(
                path=leaf.text,
                kind="extra",
                text=f"not in the target (saved as {leaf.describe()})",
                saved=leaf.describe(),
                reason="not in the target",
            )
            for leaf in extra
        ]
    found += _containers(have, tree, partial=partial)
    return Match(pairs=tuple(pairs), skipped=tuple(extra), mismatches=tuple(found))


def _missing(
    missing: Sequence[Path], saved: Mapping[Path, Leaf], candidates: Sequence[str]
) -> list[Mismatch]:
    found = []
    texts = {leaf.text: leaf for leaf in saved.values()}
    inner = {path[:n] for path in saved for n in range(len(path))} if missing else set()
    for at, path in enumerate(missing):
        text = to_text(path)
        if path in inner:
            reason = "one leaf in the target, a container in the checkpoint"
            found.append(Mismatch(path=text, kind="structure", text=reason))
            continue
        reason, note, have, want = "missing in the checkpoint", "", None, None
        if text in texts:
            have, want = _kinds(texts[text].path), _kinds(path)
            reason += f" (saved under a key of another kind: {have}, wanted {want})"
        elif at < MAX_SUGGESTIONS:
            note = nearest(text, candidates)
        found.append(
            Mismatch(
                path=text,
                kind="missing",
                text=f"{reason}{note}",
                saved=have,
                wanted=want,
                reason=reason,
            )
        )
    return found


def _kinds(path: Path) -> str:
    return "/".join(key.kind for key in path) or "root"


def _containers(saved: Restructured, wanted: Tree, *, partial: bool) -> list[Mismatch]:
    """Empty containers and Nones, which no leaf path shows."""
    if partial or saved.containers == wanted:
        return []
    have = saved.containers.empties() if isinstance(saved.containers, Tree) else saved.containers
    want = wanted.empties()
    found = []
    for path in {**want, **have}:
        was, kind = have.get(path), want.get(path)
        if was != kind:
            text = f"{_empty(kind)} in the target, {_empty(was)} in the checkpoint"
            if kind is None:
                text = f"{_empty(was)} in the checkpoint, not in the target"
            found.append(
                Mismatch(path=to_text(path), kind="structure", text=text, saved=was, wanted=kind)
            )
    return found


def _empty(kind: str | None) -> str:
    if kind is None:
        return "not"
    return "None" if kind == "none" else f"an empty {kind} node"


def compare_leaf(leaf: Leaf, want: Want, *, cast: bool) -> list[Mismatch]:
    """What of kind, shape and dtype does not fit. Shapes are never changed."""
    spec = leaf.spec
    if spec is None:
        return _compare_value(leaf, want, cast=cast)
    if want.kind in ("str", "bytes", "process"):
        return [_kind(leaf, want)]
    found = []
    if (want.kind == "key") != (spec.kind == "key"):
        return [_kind(leaf, want)]
    if want.kind == "key" and want.key_impl != spec.key_impl:
        found.append(_differ(leaf, "key impl", spec.logical_dtype, want.dtype_text))
    if tuple(want.shape) != spec.logical_shape:
        found.append(_differ(leaf, "shape", str(spec.logical_shape), str(tuple(want.shape))))
    if want.kind != "key":
        found += _compare_dtype(leaf, spec.dtype, want, cast=cast)
    return found


def _compare_dtype(leaf: Leaf, saved: str, want: Want, *, cast: bool) -> list[Mismatch]:
    if want.dtype == saved:
        return []
    have = dtypes.kind_of(saved)
    if want.dtype is None:
        order = ("bool", "int", "float", "complex")
        same = have == want.kind
        allowed = same or (cast and want.kind in order and have != "complex")
        return [] if allowed else [_differ(leaf, "dtype", saved, f"a Python {want.kind}")]
    if cast and not (have == "complex" and dtypes.kind_of(want.dtype) != "complex"):
        return []
    return [_differ(leaf, "dtype", saved, want.dtype)]


def _compare_value(leaf: Leaf, want: Want, *, cast: bool) -> list[Mismatch]:
    """A saved Python value against a target; exact in type unless the numbers are equal."""
    if leaf.per_process or want.kind == "process":
        return [] if leaf.per_process and want.kind == "process" else [_kind(leaf, want)]
    value = leaf.value
    kind = type(value).__name__
    if want.kind == kind:
        return []
    numeric = ("bool", "int", "float", "complex")
    if want.kind in numeric and kind in numeric:
        if cast and _converts(value, want.kind, None):
            return []
        return [_differ(leaf, "dtype", _number_text(value), f"a Python {want.kind}")]
    if want.dtype is None or kind not in numeric or want.kind == "key":
        return [_kind(leaf, want)]
    if tuple(want.shape) != ():
        return [_differ(leaf, "shape", "()", str(tuple(want.shape)))]
    if cast and _converts(value, dtypes.kind_of(want.dtype), want.dtype):
        return []
    if dtypes.kind_of(want.dtype) == kind and _holds(want.dtype, value):
        return []
    return [_differ(leaf, "dtype", _number_text(value), want.dtype)]


def _number_text(value: object) -> str:
    """A number as a person can read it: Python itself refuses to print very long integers."""
    kind = type(value).__name__
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a Python int of {value.bit_length()} bits"
    return f"the Python {kind} {value!r}"


def _converts(value: Any, kind: str, dtype: str | None) -> bool:
    """Whether a cast of a Python number gives a number that stands for it."""
    if isinstance(value, complex):
        return kind == "complex"
    try:
        if kind == "int":
            whole = int(value)
            return dtype is None or _holds(dtype, whole)
        if kind != "bool":
            float(value)
        return True
    except (ValueError, OverflowError):
        # NaN or infinity as an int, or an int beyond every float.
        return False


def _holds(dtype: str, value: object) -> bool:
    """Whether an element of this dtype can be exactly this Python number."""
    if isinstance(value, bool):
        return True
    if isinstance(value, int):
        low, high = dtypes.int_limits(dtype)
        return low <= value <= high
    return dtype in ("float64", "complex128")


def _differ(leaf: Leaf, kind: MismatchKind, saved: str, wanted: str) -> Mismatch:
    text = f"{kind}: saved {saved}, wanted {wanted}"
    return Mismatch(path=leaf.text, kind=kind, text=text, saved=saved, wanted=wanted)


def _kind(leaf: Leaf, want: Want) -> Mismatch:
    names = {"process": "a value per process", "int": "an int"}
    wanted = want.dtype_text if want.key_impl else names.get(want.kind, f"a {want.kind}")
    if want.dtype and not want.key_impl:
        wanted = f"{want.dtype}{list(want.shape)}"
    return _differ(leaf, "kind", leaf.describe(), wanted)


def compare_layout(leaf: Leaf, sharding: Sharding) -> list[Mismatch]:
    """What of mesh, partition spec and memory kind differs from the saved layout."""
    spec = leaf.spec
    if spec is None or spec.sharding is None:
        return []
    found = []
    saved = spec.sharding
    if not same_layout(saved, sharding):
        found.append(_differ(leaf, "sharding", str(saved), str(sharding)))
    if saved.memory_kind != sharding.memory_kind:
        was, now = saved.memory_kind or "the default", sharding.memory_kind or "the default"
        found.append(_differ(leaf, "memory kind", was, now))
    return found


def check_divisible(leaf: Leaf, shape: Shape, sharding: Sharding) -> list[Mismatch]:
    """A dimension that the mesh axes of the target cannot cut into equal parts."""
    try:
        cell_of(sharding, shape)
    except ValueError as error:
        return [
            Mismatch(
                path=leaf.text,
                kind="divisibility",
                text=f"cannot be laid out as {sharding}: {error}",
                wanted=str(sharding),
            )
        ]
    return []


def compare_processes(manifest: Manifest, process_count: int) -> list[Mismatch]:
    """Another number of processes is another layout."""
    if manifest.process_count == process_count:
        return []
    saved, wanted = str(manifest.process_count), str(process_count)
    text = f"process count: saved by {saved}, loading on {wanted}"
    return [Mismatch(path="", kind="process count", text=text, saved=saved, wanted=wanted)]


def compare_owners(leaf: Leaf, manifest: Manifest, process_count: int) -> list[Mismatch]:
    """A value per process has no meaning for another number of processes."""
    if not leaf.per_process or manifest.process_count == process_count:
        return []
    saved, wanted = str(manifest.process_count), str(process_count)
    text = f"process count: one value for each of {saved} processes, loading on {wanted}"
    return [Mismatch(path=leaf.text, kind="per process", text=text, saved=saved, wanted=wanted)]


def remedy(mismatches: Sequence[Mismatch]) -> str:
    """How to go on, for the kinds of mismatch there are."""
    kinds = {m.kind for m in mismatches}
    advice = []
    if kinds & {"sharding", "memory kind", "process count"}:
        advice.append("Pass reshard=True to load onto the target's shardings.")
    if "mesh" in kinds:
        advice.append("An abstract mesh gets its devices from mesh= or from jax.set_mesh.")
    if "devices" in kinds:
        advice.append(
            "Pass a mesh= that has the saved axes, of the devices at hand, and reshard=True, or a "
            "target with shardings."
        )
    if any(m.kind == "dtype" and m.wanted is not None for m in mismatches):
        advice.append("Pass cast=True to convert dtypes where no imaginary part is lost.")
    if kinds & {"extra"}:
        advice.append("Pass partial=True to load only the leaves of the target.")
    if any(m.kind == "missing" and m.saved is not None for m in mismatches):
        advice.append('rename={"**": "**"} takes leaves to keys of another kind.')
    if any(m.kind == "missing" and m.saved is None for m in mismatches):
        advice.append("A missing leaf must be left out of the target, or come from elsewhere.")
    if "per process" in kinds:
        advice.append(
            "Values per process are not resharded: leave them out with partial=True, "
            "and read all of them with pytree_ckpt.open(path)[leaf]."
        )
    if kinds & {"shape", "divisibility"}:
        advice.append("Shapes are never changed.")
    if kinds & {"kind", "key impl", "structure"}:
        advice.append("Ask for the kind of leaf and container that was saved.")
    if any(m.kind == "structure" and (m.saved or m.wanted) for m in mismatches):
        advice.append("With partial=True containers without leaves may differ.")
    return " ".join(advice)


def is_same_bytes(spec: ArraySpec, want: Want) -> bool:
    """Whether the stored bytes are the wanted bytes, without a cast."""
    return want.kind == "key" or want.dtype in (None, spec.dtype)
