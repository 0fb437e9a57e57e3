"""The layout that a conversion writes, as a person says it: mesh axes, and specs by pattern."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytree_ckpt.errors import Mismatch
from pytree_ckpt.format.manifest import Leaf, Manifest
from pytree_ckpt.format.shardings import Mesh, Named, Sharding, Spec, Tiled, cell_of
from pytree_ckpt.options import MAX_PROCESSES, check_count
from pytree_ckpt.plan import patterns

SpecLike = str | Sequence[str | Sequence[str] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout to convert to; what it does not say stays as it was saved.

    Attributes:
        mesh: Names and sizes of the mesh axes, slowest first. Without it the saved mesh stays.
        specs: Partition specs by pattern of leaf paths; the first that matches counts. A spec is
            an entry for each dimension: an axis, None, or several axes; or all of that as text,
            `"data+model,None"`. Leaves that none matches keep their spec, on the new mesh. A
            host array that one matches becomes an array on devices.
        process_count: Processes of the job that will load the checkpoint.

    Raises:
        ValueError: A mesh that is none, or a pattern that is none.

    Example:
        >>> layout = Layout(mesh={"data": 16, "model": 2}, specs={"params/**/kernel": "model,None"})
        >>> layout.mesh_of_devices()
        Mesh(axis_names=('data', 'model'), axis_sizes=(16, 2), ...)
    """

    mesh: Mapping[str, int] | None = None
    specs: Mapping[str, SpecLike] = field(default_factory=dict)
    process_count: int | None = None

    def __post_init__(self) -> None:
        if self.process_count is not None:
            check_count("process_count", self.process_count, most=MAX_PROCESSES)
        if self.mesh is not None:
            _check_mapping("mesh", self.mesh, "{'data': 4, 'model': 2}")
            for axis, size in self.mesh.items():
                _check_axis(axis)
                check_count(f"mesh axis {axis!r}", size)
        self.mesh_of_devices()
        _check_mapping("specs", self.specs, "{'params/**/kernel': 'model,None'}")
        for pattern, spec in self.specs.items():
            patterns.parse(pattern)
            parse_spec(spec)

    def mesh_of_devices(self) -> Mesh | None:
        """The mesh, on as many devices as it needs."""
        if self.mesh is None:
            return None
        sizes = tuple(map(int, self.mesh.values()))
        return Mesh(
            axis_names=tuple(self.mesh),
            axis_sizes=sizes,
            axis_types=("Auto",) * len(self.mesh),
            device_ids=Mesh.first_ids(sizes),
        )


def _check_axis(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"a mesh axis is named by a str such as 'data', not {name!r}")


def _check_mapping(name: str, value: object, example: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict such as {example}, not {value!r}")


def parse_spec(spec: SpecLike) -> Spec:
    """A partition spec from what a person writes.

    Example:
        >>> parse_spec("data+model,None"), parse_spec([None, "model"])
        ((('data', 'model'), ()), ((), ('model',)))

    Raises:
        ValueError: Neither text nor a sequence of axis names.
    """
    if isinstance(spec, str):
        parts = [part.strip() for part in spec.split(",")] if spec.strip() else []
        return tuple(() if part in ("None", "") else tuple(part.split("+")) for part in parts)
    try:
        return tuple(
            () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            for entry in spec
        )
    except TypeError:
        raise ValueError(f"a spec is text such as 'data,None' or P('data'), not {spec!r}") from None


class Shardings:
    """Finds the new sharding of each leaf; `finish` has every reason why one cannot be."""

    def __init__(self, manifest: Manifest, layout: Layout) -> None:
        self._wrong: list[Mismatch] = []
        self._mesh = layout.mesh_of_devices()
        self._saved = manifest.meshes
        self._rules = [(patterns.parse(p), parse_spec(s)) for p, s in layout.specs.items()]
        self._unused = dict.fromkeys(layout.specs)

    def of(self, leaf: Leaf) -> Sharding | None:
        """The sharding of a leaf, None for a host array."""
        saved = leaf.array.sharding
        found = self._wanted(leaf, saved)
        if isinstance(found, str):
            self._refuse(leaf.text, found)
            return saved
        try:
            cell_of(found, leaf.array.shape)
        except ValueError as error:
            self._refuse(leaf.text, f"cannot be laid out as {found}: {error}")
            return saved
        return found

    def _wanted(self, leaf: Leaf, saved: Sharding | None) -> Sharding | str | None:
        """The sharding, or why there is none."""
        spec = self._spec_of(leaf.text)
        kind = saved.memory_kind if saved is not None else None
        if spec is not None:
            mesh = self._mesh or (self._saved[0] if len(self._saved) == 1 else None)
            if mesh is None:
                return f"a spec needs a mesh, and the checkpoint has {len(self._saved)}"
            ndim = len(leaf.array.logical_shape)
            if len(spec) > ndim:
                return f"a spec of {len(spec)} entries for {ndim} dimensions"
            return _named(mesh, spec, kind)
        if self._mesh is None or saved is None:
            return saved
        if isinstance(saved, Named):
            return _named(self._mesh, saved.spec, kind)
        if isinstance(saved, Tiled):
            return f"is laid out as {saved}, which no mesh replaces; give it a spec"
        return saved

    def _spec_of(self, text: str) -> Spec | None:
        for pattern, spec in self._rules:
            if pattern.match(text) is not None:
                self._unused.pop(pattern.text, None)
                return spec
        return None

    def finish(self) -> list[Mismatch]:
        """Every reason, also for patterns that no leaf needed."""
        for pattern in self._unused:
            self._refuse(pattern, "no array has its spec by this pattern")
        return self._wrong

    def _refuse(self, path: str, text: str) -> None:
        self._wrong.append(Mismatch(path=path, kind="sharding", text=f"sharding: {text}"))


def _named(mesh: Mesh, spec: Spec, memory_kind: str | None) -> Sharding | str:
    try:
        return Named(mesh=mesh, spec=spec, memory_kind=memory_kind)
    except ValueError as error:
        return str(error)
