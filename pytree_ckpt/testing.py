"""Proof that a run resumes: what users put into their own tests."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from pytree_ckpt.format.paths import to_text
from pytree_ckpt.jaxio import keys, trees
from pytree_ckpt.store.locations import PathLike
from pytree_ckpt.verbs.load import load
from pytree_ckpt.verbs.save import save

_LINES = 5
"""Leaves that drift and have a line in the message."""


def assert_resumes(
    step_fn: Callable[[Any, Any], Any],
    state: Any,
    batches: Iterable[Any],
    path: PathLike,
    *,
    mesh: jax.sharding.Mesh | None = None,
    target: Any = None,
    has_aux: bool = False,
    save_after: int | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Check that a run that was saved and loaded goes on as one that was not interrupted.

    After some steps the state is saved and loaded. What was loaded must be what was saved, to the
    bit. Then both take the remaining steps side by side, and are compared after each.

    What a process sets once and keeps outside of the state stays the same for both and is not
    found; a test that ends the process finds that too.

    Args:
        step_fn: `step_fn(state, batch)` returns the next state. It may donate the state; the one
            that is passed here is then gone.
        state: Any state that `save` takes.
        batches: One for each step, at least one after the save. Each is used twice, so that
            `step_fn` must not donate it.
        path: Where the checkpoint goes; it stays there.
        mesh: Load onto this mesh, with the saved partition specs.
        target: Load what this asks for, on any layout, in place of the state as it is.
        has_aux: Whether `step_fn` returns `(state, aux)`; `aux`, such as a loss, is compared too.
        save_after: Steps before the save, by default half of them.
        rtol, atol: How far numbers may be apart, as `numpy.allclose` has it. By default not at
            all, which a run on the same mesh can hold; on another mesh sums are taken in another
            order, so state what is good enough.

    Raises:
        AssertionError: The runs differ: at which step, in which leaves, by how much.
        TypeError: `step_fn` does not return what `has_aux` says, or None for a state.
        ValueError: There is no batch after the save.
        CheckpointError: The state cannot be saved, or not be loaded so.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> def step_fn(state, batch):
        ...     return {"w": state["w"] - 0.1 * batch, "step": state["step"] + 1}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     start = {"w": jnp.ones(3), "step": 0}
        ...     assert_resumes(step_fn, start, [1.0, 2.0, 3.0], folder + "/ckpt")
    """
    steps = list(batches)
    cut = len(steps) // 2 if save_after is None else save_after
    if not 0 <= cut < len(steps):
        raise ValueError(f"{len(steps)} batches leave no step after a save at step {cut}")
    for batch in steps[:cut]:
        state, _ = _advance(step_fn, state, batch, has_aux)
    save(path, state)
    moved = mesh is not None or target is not None
    wanted = _on(mesh, state) if target is None else target
    resumed = load(path, wanted, mesh=mesh, reshard=moved)
    _check(state, resumed, f"what was loaded is not what was saved after step {cut}", "")
    for at, batch in enumerate(steps[cut:], cut + 1):
        state, aux = _advance(step_fn, state, batch, has_aux)
        resumed, resumed_aux = _advance(step_fn, resumed, batch, has_aux)
        what = f"the resumed run drifts in step {at} of {len(steps)}, saved after step {cut}"
        exact = not (rtol or atol)
        why = _ANOTHER_MESH if moved and exact else _HIDDEN
        both = {"state": state, "aux": aux}, {"state": resumed, "aux": resumed_aux}
        _check(*both, what, why, rtol=rtol, atol=atol)


_HIDDEN = (
    "What was loaded is what was saved, to the bit. So step_fn takes something from outside of "
    "its state and its batch (a counter, a generator of random numbers, an iterator), or is not "
    "deterministic. What it needs belongs in the state."
)
_ANOTHER_MESH = (
    "What was loaded is what was saved, to the bit. On another mesh sums are taken in another "
    "order; if that is all, say with rtol= or atol= what is good enough."
)


def _advance(
    step_fn: Callable[[Any, Any], Any], state: Any, batch: Any, has_aux: bool
) -> tuple[Any, Any]:
    """The next state, and what else the step returned."""
    before: Any = jax.tree.structure(state)
    result: Any = step_fn(state, batch)
    is_pair = isinstance(result, tuple) and len(result) == 2
    if has_aux and not is_pair:
        raise TypeError(f"step_fn returned a {type(result).__name__}, not (state, aux)")
    following = result[0] if has_aux else result
    if following is None and state is not None:
        # Nothing equals nothing: the check would pass, whatever the steps do.
        raise TypeError("step_fn returned None for the state: it must return the next one")
    if has_aux:
        return following, result[1]
    if is_pair and jax.tree.structure(result) != before == jax.tree.structure(result[0]):
        raise TypeError("step_fn returned (state, something): pass has_aux=True")
    return result, None


def _on(mesh: jax.sharding.Mesh | None, state: Any) -> Any:
    """The state as a target; what lies on a mesh leaves open on which."""

    def opened(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if mesh is None or not isinstance(sharding, jax.sharding.NamedSharding):
            return leaf
        struct: Any = jax.ShapeDtypeStruct
        return struct(leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))

    return jax.tree.map(opened, state)


def _check(
    straight: Any, resumed: Any, what: str, why: str, *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Raise an `AssertionError` that names the leaves that differ."""
    one, other = trees.flatten(straight), trees.flatten(resumed)
    paths, found = [to_text(path) for path in one.paths], [to_text(path) for path in other.paths]
    if paths != found:
        odd = sorted(set(paths) ^ set(found))
        raise AssertionError(f"{what}: only one of them has {', '.join(odd[:_LINES])}")
    differ = [
        f"  {path.removeprefix('state/')}  {text}"
        for path, a, b in zip(paths, one.leaves, other.leaves, strict=True)
        if (text := _difference(a, b, rtol=rtol, atol=atol))
    ]
    if differ:
        more = [f"  and {len(differ) - _LINES} more"] if len(differ) > _LINES else []
        count = f"{len(differ)} of {len(paths)} leaves"
        raise AssertionError("\n".join([f"{what}: {count}", *differ[:_LINES], *more, why]))


def _difference(straight: Any, resumed: Any, *, rtol: float, atol: float) -> str | None:
    """How two leaves differ, None if they do not."""
    if type(straight) is not type(resumed) and not isinstance(straight, jax.Array):
        return f"is a {type(resumed).__name__}, was a {type(straight).__name__}"
    a, b = _numbers(straight), _numbers(resumed)
    if a is None or b is None:
        return None if straight == resumed else f"{straight!r} became {resumed!r}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"is {b.dtype}{list(b.shape)}, was {a.dtype}{list(a.shape)}"
    if a.tobytes() == b.tobytes():
        return None
    differ = _differ(a, b, rtol=rtol, atol=atol)
    return _summary(a[differ], b[differ], np.argwhere(differ), a.size) if differ.any() else None


def _numbers(leaf: Any) -> npt.NDArray[Any] | None:
    """The numbers of a leaf that this process holds; None for a leaf that is not made of any."""
    if isinstance(leaf, (float, complex, np.ndarray, np.generic)):
        return np.asarray(leaf)
    if not isinstance(leaf, jax.Array):
        return None
    data = jax.random.key_data(leaf) if keys.is_key_dtype(leaf.dtype) else leaf
    if data.is_fully_addressable:
        return np.asarray(data)
    shards = sorted(data.addressable_shards, key=lambda shard: shard.device.id)
    return np.concatenate([np.asarray(shard.data).reshape(-1) for shard in shards])


def _differ(
    a: npt.NDArray[Any], b: npt.NDArray[Any], *, rtol: float, atol: float
) -> npt.NDArray[np.bool_]:
    """Where two arrays differ: by a bit, or beyond a tolerance if there is one."""
    if (rtol or atol) and a.dtype.kind not in "biu":
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        close = np.isclose(b.astype(wide), a.astype(wide), rtol=rtol, atol=atol, equal_nan=True)
        return ~close
    bits = np.ascontiguousarray(a).reshape(-1).view(np.uint8) != (
        np.ascontiguousarray(b).reshape(-1).view(np.uint8)
    )
    found: npt.NDArray[np.bool_] = bits.reshape(*a.shape, -1).any(axis=-1)
    return found


def _summary(a: npt.NDArray[Any], b: npt.NDArray[Any], where: npt.NDArray[Any], size: int) -> str:
    """How many elements differ, and the one that does most."""
    with np.errstate(all="ignore"):
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        apart = np.abs(b.astype(wide) - a.astype(wide))
        most = int(np.argmax(np.nan_to_num(apart, nan=np.inf)))
        relative = apart[most] / np.abs(a.astype(wide)[most])
    at = f" at {where[most].tolist()}" if where.shape[1] else ""
    return (
        f"{len(a)} of {size} elements differ, by up to {apart[most]:.3g} "
        f"({relative:.3g} of the value): {a[most]} became {b[most]}{at}"
    )
