"""Train with plain JAX and optax on data from Grain, stop, go on, and see no difference.

    python examples/with_grain.py

The state is sharded over all devices. Where the data stands belongs to each process, so it is
saved as `pc.PerProcess`: the resumed run sees the examples that the other would have seen.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pytree_ckpt as pc

OPTIMIZER = optax.adam(1e-2)


def first_state() -> dict[str, Any]:
    """Return parameters and optimizer state, each array sharded, Adam's count on every device."""
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(AxisType.Auto,))
    width = 8 * jax.device_count()
    hidden = jax.random.normal(jax.random.key(0), (width, 8))
    params = {"hidden": hidden, "out": jnp.ones(width) / width}
    state = {"params": params, "opt_state": OPTIMIZER.init(params)}

    def place(leaf: jax.Array) -> jax.Array:
        spec = PartitionSpec("model") if leaf.ndim else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, state)


def dataset() -> grain.DatasetIterator:
    """Return an iterator over shuffled examples, without an end."""
    examples = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    source = grain.MapDataset.source(list(examples)).shuffle(seed=0).repeat()
    return iter(source.batch(4).to_iter_dataset())


@jax.jit
def train_step(state: dict[str, Any], x: jax.Array) -> dict[str, Any]:
    """Take one step."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        guess = jnp.tanh(x @ params["hidden"].T) @ params["out"]
        return jnp.mean((guess - jnp.sin(x.sum(axis=1))) ** 2)

    updates, opt_state = OPTIMIZER.update(jax.grad(loss)(state["params"]), state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def run(root: Path, steps: int) -> tuple[dict[str, Any], list[Any]]:
    """Train up to `steps`; the state, and the batches that were seen."""
    state, data, seen = first_state(), dataset(), []
    with pc.CheckpointManager(root, keep=pc.Keep(last=2), save_every=2) as manager:
        first = manager.latest_step() or 0
        if first:
            found = manager.restore({**state, "data": pc.PerProcess(data.get_state())})
            data.set_state(found.pop("data").value)
            state = found
        for step in range(first, steps):
            seen.append(next(data))
            state = train_step(state, seen[-1])
            manager.save(step + 1, {**state, "data": pc.PerProcess(data.get_state())})
    return state, seen


def main() -> None:
    """Compare a run that was stopped with one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        whole, all_seen = run(Path(folder) / "whole", steps=6)
        run(Path(folder) / "stopped", steps=3)  # step 2 is its newest checkpoint
        resumed, seen = run(Path(folder) / "stopped", steps=6)
    np.testing.assert_array_equal(seen, all_seen[2:])
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    print("the resumed run saw the same data, and has the state of the other, bit for bit")


if __name__ == "__main__":
    main()
