"""Train an equinox model, stop it, go on, and see that it is as if it had never stopped.

python examples/with_equinox.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import pytree_ckpt as pc

OPTIMIZER = optax.adam(1e-2)


def first_state() -> dict[str, Any]:
    """Return everything that a run needs to go on: model, optimizer state, step."""
    model = eqx.nn.MLP(in_size=8, out_size=1, width_size=32, depth=1, key=jax.random.key(0))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    return {"model": model, "opt_state": opt_state, "step": 0}


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Make the data of one step."""
    x = jax.random.normal(jax.random.key(100 + step), (16, 8))
    return x, jnp.sin(x.sum(axis=1, keepdims=True))


@eqx.filter_jit
def train_step(model: eqx.Module, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
    """Take one step."""

    def loss(model: Any) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    updates, opt_state = OPTIMIZER.update(eqx.filter_grad(loss)(model), opt_state)
    return eqx.apply_updates(model, updates), opt_state


def run(root: Path, steps: int) -> dict[str, Any]:
    """Train up to `steps`, from the newest checkpoint in `root` if there is one."""
    state = first_state()
    with pc.CheckpointManager(root, keep=pc.Keep(last=2), save_every=2) as manager:
        if manager.latest_step() is not None:
            # A model is arrays and code, such as its activation: only arrays are in a checkpoint.
            data, code = eqx.partition(state, is_data)
            state = eqx.combine(manager.restore(data), code)
        for step in range(state["step"], steps):
            model, opt_state = train_step(state["model"], state["opt_state"], *batch(step))
            state = {"model": model, "opt_state": opt_state, "step": step + 1}
            manager.save(step + 1, eqx.filter(state, is_data))
    return state


def is_data(leaf: Any) -> bool:
    """Tell what belongs in a checkpoint."""
    return eqx.is_array(leaf) or isinstance(leaf, int)


def main() -> None:
    """Compare a run that was stopped with one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        whole = run(Path(folder) / "whole", steps=6)
        run(Path(folder) / "stopped", steps=3)  # step 2 is its newest checkpoint
        resumed = run(Path(folder) / "stopped", steps=6)
    resumed, whole = (eqx.filter(state, is_data) for state in (resumed, whole))
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    print("the resumed run has the state of the other, bit for bit")


if __name__ == "__main__":
    main()
