"""Train a flax nnx model, stop it, go on, and see that it is as if it had never stopped.

python examples/with_nnx.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import pytree_ckpt as pc


class Model(nnx.Module):
    """Two layers, and dropout between them, so that a run needs its random stream to go on."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(8, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Make the data of one step."""
    x = jax.random.normal(jax.random.key(100 + step), (16, 8))
    return x, jnp.sin(x.sum(axis=1, keepdims=True))


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> None:
    """Take one step; nnx changes model and optimizer in place."""

    def loss(model: Model) -> jax.Array:
        return jnp.mean((model(x) - y) ** 2)

    optimizer.update(model, nnx.grad(loss)(model))


def run(root: Path, steps: int) -> Any:
    """Train up to `steps`, from the newest checkpoint in `root` if there is one."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    with pc.CheckpointManager(root, keep=pc.Keep(last=2), save_every=2) as manager:
        first = manager.latest_step() or 0
        if first:
            # The state is a pytree of arrays: parameters, moments, random streams.
            nnx.update((model, optimizer), manager.restore(nnx.state((model, optimizer))))
        for step in range(first, steps):
            train_step(model, optimizer, *batch(step))
            manager.save(step + 1, nnx.state((model, optimizer)))
    return nnx.state((model, optimizer))


def main() -> None:
    """Compare a run that was stopped with one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        whole = run(Path(folder) / "whole", steps=6)
        run(Path(folder) / "stopped", steps=3)  # step 2 is its newest checkpoint
        resumed = run(Path(folder) / "stopped", steps=6)
    plain = [jax.tree.map(as_numpy, jax.tree.leaves(state)) for state in (resumed, whole)]
    jax.tree.map(np.testing.assert_array_equal, *plain)
    print("the resumed run has the state of the other, bit for bit")


def as_numpy(leaf: jax.Array) -> Any:
    """Return an array, of random keys their data."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


if __name__ == "__main__":
    main()
