"""Train a flax linen model, stop it, go on, and see that it is as if it had never stopped.

python examples/with_linen.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import pytree_ckpt as pc


class Model(nn.Module):
    """Two layers, and dropout between them, so that a run needs its random key to go on."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=not train)(x))


def first_state() -> dict[str, Any]:
    """Return everything that a run needs to go on: parameters, optimizer, random key, step."""
    model = Model()
    params = model.init(jax.random.key(0), jnp.zeros((1, 8)), train=False)
    train_state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
    return {"train": train_state, "key": jax.random.key(1)}


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Make the data of one step."""
    x = jax.random.normal(jax.random.key(100 + step), (16, 8))
    return x, jnp.sin(x.sum(axis=1, keepdims=True))


@jax.jit
def train_step(state: dict[str, Any], x: jax.Array, y: jax.Array) -> dict[str, Any]:
    """Take one step."""
    key, dropout = jax.random.split(state["key"])
    train = state["train"]

    def loss(params: Any) -> jax.Array:
        guess = train.apply_fn(params, x, train=True, rngs={"dropout": dropout})
        return jnp.mean((guess - y) ** 2)

    return {"train": train.apply_gradients(grads=jax.grad(loss)(train.params)), "key": key}


def run(root: Path, steps: int) -> dict[str, Any]:
    """Train up to `steps`, from the newest checkpoint in `root` if there is one."""
    with pc.CheckpointManager(root, keep=pc.Keep(last=2), save_every=2) as manager:
        state = first_state()
        if manager.latest_step() is not None:
            state = manager.restore(state)
        for step in range(int(state["train"].step), steps):
            state = train_step(state, *batch(step))
            manager.save(step + 1, state)
    return state


def main() -> None:
    """Compare a run that was stopped with one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        whole = run(Path(folder) / "whole", steps=6)
        run(Path(folder) / "stopped", steps=3)  # step 2 is its newest checkpoint
        resumed = run(Path(folder) / "stopped", steps=6)
    jax.tree.map(np.testing.assert_array_equal, resumed["train"].params, whole["train"].params)
    jax.tree.map(
        np.testing.assert_array_equal, resumed["train"].opt_state, whole["train"].opt_state
    )
    print("the resumed run has the parameters of the other, bit for bit")


if __name__ == "__main__":
    main()
