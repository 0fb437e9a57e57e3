"""The states that are saved and loaded: plain descriptions, and their arrays.

The driver reads descriptions only; JAX is imported where arrays are made. The contents are
normal numbers from the number of the leaf, as weights are: the same in each process, hardly
compressible. Random bits would do a compressor an undue favour, because it gives up on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax

Axes = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh."""
Spec = tuple[str | None, ...]
Array = np.ndarray[Any, np.dtype[Any]]

MIB = 1 << 20
DEVICES = 8
FOUR_BY_TWO: Axes = (("data", 4), ("model", 2))
TWO_BY_FOUR: Axes = (("data", 2), ("model", 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array: where it is in the tree, and how it is sharded when saved and when loaded."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    spec: Spec = ()
    target_spec: Spec | None = None
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A state. `systems` names those that are measured unless others are asked for; () is all.

    `verbs` is what is measured of it, and `processes` how many share the devices.
    """

    key: str
    title: str
    leaves: tuple[Leaf, ...]
    mesh: Axes = FOUR_BY_TWO
    target_mesh: Axes | None = None
    systems: tuple[str, ...] = field(default=())
    verbs: tuple[str, ...] = field(default=("save", "load"))
    processes: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the state, each counted once however many devices hold it."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def is_reshard(self) -> bool:
        return self.target_mesh is not None


def workloads(scale: float = 1.0) -> dict[str, Workload]:
    """All workloads by key; `scale` below 1 makes smaller states for a trial run."""
    found = (
        _equal_leaves(scale),
        _gpt2(scale),
        _small_leaves("c1k", 1_000, scale),
        _small_leaves("c10k", 10_000, scale, ("ours-sha256", "ours-xxh3", *LIMITS)),
        _reshard_mesh(scale),
        _reshard_fewer(scale),
        _reshard_columns(scale),
        _lora(scale),
        _one_array(scale),
        _in_the_background(scale),
        _by_two_processes(scale),
    )
    return {workload.key: workload for workload in found}


LIMITS = ("limit-sha256", "limit-xxh3")
RESHARDERS = (
    "ours-sha256",
    "ours-xxh3",
    "orbax-v0",
    "orbax-v0-raw",
    "orbax-v1",
    "orbax-v1-raw",
    *LIMITS,
)


def _line(devices: int) -> Axes:
    return (("data", devices),)


def _multiple(full: int, scale: float, of: int) -> int:
    return max(of, round(full * scale / of) * of)


def _equal_leaves(scale: float) -> Workload:
    shape = (_multiple(8192, scale, 8), 4096)
    leaves = [Leaf(path=(f"w{n}",), shape=shape, spec=("data", "model")) for n in range(8)]
    return Workload(key="a", title="1 GiB in 8 leaves over 4×2", leaves=tuple(leaves))


def _gpt2(scale: float) -> Workload:
    """GPT-2 small and its Adam moments: 3 × 148 arrays and a count."""
    layers, vocabulary, context = 12, 50257, 1024
    width = _multiple(768, math.sqrt(scale), 8)
    if scale < 1:
        vocabulary = round(vocabulary * math.sqrt(scale))
    kernel: Spec = ("data", "model")

    def norm(*path: str) -> Iterator[Leaf]:
        yield Leaf(path=(*path, "scale"), shape=(width,))
        yield Leaf(path=(*path, "bias"), shape=(width,))

    def linear(inputs: int, outputs: int, *path: str) -> Iterator[Leaf]:
        yield Leaf(path=(*path, "kernel"), shape=(inputs, outputs), spec=kernel)
        yield Leaf(path=(*path, "bias"), shape=(outputs,))

    def model(*top: str) -> Iterator[Leaf]:
        yield Leaf(path=(*top, "wte", "embedding"), shape=(vocabulary, width))
        yield Leaf(path=(*top, "wpe", "embedding"), shape=(context, width))
        for number in range(layers):
            block = (*top, f"h_{number}")
            yield from norm(*block, "ln_1")
            yield from linear(width, 3 * width, *block, "attn", "qkv")
            yield from linear(width, width, *block, "attn", "proj")
            yield from norm(*block, "ln_2")
            yield from linear(width, 4 * width, *block, "mlp", "fc")
            yield from linear(4 * width, width, *block, "mlp", "proj")
        yield from norm(*top, "ln_f")

    leaves = [*model("params"), *model("opt_state", "mu"), *model("opt_state", "nu")]
    leaves.append(Leaf(path=("opt_state", "count"), shape=(), dtype="int32"))
    return Workload(key="b", title="GPT-2 small with Adam, 445 leaves", leaves=tuple(leaves))


def _small_leaves(key: str, count: int, scale: float, systems: tuple[str, ...] = ()) -> Workload:
    leaves = [
        Leaf(path=(f"leaf_{n:05d}",), shape=(1024,), spec=("data",))
        for n in range(_multiple(count, scale, 8))
    ]
    title = f"{count:,} leaves of 4 KiB over 8 devices"
    return Workload(key=key, title=title, leaves=tuple(leaves), mesh=_line(8), systems=systems)


def _reshard_mesh(scale: float) -> Workload:
    leaf = _matrix(_multiple(8192, scale, 8), 4096, ("data", "model"))
    title = "reshard 4×2 → 2×4, 1 GiB"
    return _reshard("d-2x4", title, leaf, FOUR_BY_TWO, TWO_BY_FOUR)


def _reshard_fewer(scale: float) -> Workload:
    leaf = _matrix(_multiple(6144, scale, 24), 5461, ("data",))
    return _reshard("d-8to6", "reshard 8 → 6 devices, 1 GiB", leaf, _line(8), _line(6))


def _reshard_columns(scale: float) -> Workload:
    leaf = _matrix(_multiple(8192, scale, 8), 4096, ("data",), (None, "data"))
    return _reshard("d-cols", "reshard rows → columns, 1 GiB", leaf, _line(8), _line(8))


def _matrix(rows: int, columns: int, spec: Spec, target_spec: Spec | None = None) -> Leaf:
    return Leaf(path=("w",), shape=(rows, columns), spec=spec, target_spec=target_spec)


def _reshard(key: str, title: str, leaf: Leaf, mesh: Axes, target_mesh: Axes) -> Workload:
    leaves = tuple(replace(leaf, path=(f"w{n}",)) for n in range(8))
    return Workload(
        key=key,
        title=title,
        leaves=leaves,
        mesh=mesh,
        target_mesh=target_mesh,
        systems=RESHARDERS,
    )


def _lora(scale: float) -> Workload:
    """64 frozen matrices of 16 MiB, each with a trained pair of 160 KiB."""
    leaves = []
    for number in range(_multiple(64, scale, 1)):
        frozen = ("frozen", f"layer_{number}")
        trained = ("trained", f"layer_{number}")
        leaves.append(Leaf(path=frozen, shape=(2048, 2048), spec=("data", "model")))
        leaves.append(Leaf(path=(*trained, "a"), shape=(2048, 10)))
        leaves.append(Leaf(path=(*trained, "b"), shape=(10, 2048)))
    title = "LoRA: 1 GiB frozen, 10 MiB trained"
    return Workload(key="e", title=title, leaves=tuple(leaves))


def _one_array(scale: float) -> Workload:
    leaf = Leaf(path=("w",), shape=(_multiple(32768, scale, 8), 32768), spec=("data", "model"))
    return Workload(key="f", title="one array of 4 GiB", leaves=(leaf,))


def _in_the_background(scale: float) -> Workload:
    """The state of (b), saved while a loop goes on."""
    return replace(
        _gpt2(scale),
        key="async",
        title="GPT-2 small with Adam, saved in the background",
        systems=("ours-sha256", "ours-xxh3", "orbax-v0", "orbax-v1"),
        verbs=("background",),
    )


def _by_two_processes(scale: float) -> Workload:
    """The state of (b), of which each process has the devices of half the mesh."""
    return replace(
        _gpt2(scale),
        key="processes",
        title="GPT-2 small with Adam, by 2 processes with 4 devices each",
        systems=("ours-sha256", "ours-xxh3", "orbax-v0", "orbax-v1"),
        processes=2,
    )


# --- arrays ---------------------------------------------------------------------------------


def contents(leaf: Leaf, number: int) -> Array:
    """The elements of leaf `number`, in memory that JAX's CPU backend can share among replicas."""
    memory = np.empty(leaf.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    memory = memory[start : start + leaf.nbytes]
    random = np.random.Generator(np.random.SFC64(number))
    for at in range(0, leaf.nbytes, MIB):
        part = memory[at : at + MIB]
        values = random.standard_normal(-(-part.size // 4), np.float32)
        part[:] = values.view(np.uint8)[: part.size]
    return memory.view(leaf.dtype).reshape(leaf.shape)


def build(workload: Workload) -> dict[str, Any]:
    """The state, on its devices."""
    import jax

    mesh = _mesh(workload.mesh)
    tree: dict[str, Any] = {}
    batch: list[tuple[Leaf, Array]] = []
    for number, leaf in enumerate(workload.leaves):
        batch.append((leaf, contents(leaf, number)))
        last = number + 1 == len(workload.leaves)
        if last or sum(array.nbytes for _, array in batch) >= 256 * MIB:
            shardings = [_sharding(mesh, leaf.spec) for leaf, _ in batch]
            if workload.processes > 1:  # device_put would compare the arrays of all processes
                placed = [
                    jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
                    for (_, array), sharding in zip(batch, shardings, strict=True)
                ]
            else:
                placed = jax.device_put([array for _, array in batch], shardings)
            jax.block_until_ready(placed)
            for (owner, _), array in zip(batch, placed, strict=True):
                _put(tree, owner.path, array)
            batch = []
    return tree


def target(workload: Workload) -> dict[str, Any]:
    """Shapes, dtypes and shardings to load into."""
    import jax

    mesh = _mesh(workload.target_mesh or workload.mesh)
    tree: dict[str, Any] = {}
    for leaf in workload.leaves:
        spec = leaf.spec if leaf.target_spec is None else leaf.target_spec
        sharding = _sharding(mesh, spec)
        _put(tree, leaf.path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
    return tree


def check(workload: Workload, loaded: dict[str, Any]) -> None:
    """Compare a loaded state with what was saved, bit for bit, and its shardings with the target.

    Raises:
        ValueError: It is not the same.
    """
    wanted = target(workload)
    for number, leaf in enumerate(workload.leaves):
        array, want = _get(loaded, leaf.path), _get(wanted, leaf.path)
        name = "/".join(leaf.path)
        if (array.shape, array.dtype) != (want.shape, want.dtype):
            raise ValueError(f"{name} is {array.shape} {array.dtype}")
        if not array.sharding.is_equivalent_to(want.sharding, len(leaf.shape)):
            raise ValueError(f"{name} has {array.sharding}, not {want.sharding}")
        expected = contents(leaf, number)
        for shard in array.addressable_shards:
            same = np.asarray(shard.data).tobytes() == expected[shard.index].tobytes()
            if not same:
                raise ValueError(f"{name} differs from what was saved on {shard.device}")


def _mesh(axes: Axes) -> jax.sharding.Mesh:
    import jax

    shape = [size for _, size in axes]
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, [name for name, _ in axes])


def _sharding(mesh: jax.sharding.Mesh, spec: Spec) -> jax.sharding.NamedSharding:
    import jax

    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _get(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
