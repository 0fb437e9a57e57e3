"""Train in several processes, lose one, and go on with as many, with one, or with four.

    python examples/multihost.py --demo      # all of it on this machine, checked: half a minute

On a pod or a cluster start it once on every host, with a `--run-dir` that all of them share:

    python multihost.py --run-dir /shared/run                  # TPU, Slurm: JAX finds the others
    python multihost.py --run-dir /shared/run \\
        --coordinator host-0:1234 --processes 2 --process 1    # where it does not

Started again, on as many hosts, it goes on from the newest step with the losses, bit for bit, of a
run that was never stopped; on more or fewer hosts it does so with `--reshard`, up to rounding.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pytree_ckpt as pc

Tree = Any  # a pytree

ROWS, WIDTH, LAYERS = 32, 64, 3
OPTIMIZER = optax.adam(1e-3)
SPECS = {"up": P("data", "model"), "down": P("model", "data"), "bias": P()}


def init() -> Tree:
    """Make the state before the first step."""
    params = {}
    for number, key in enumerate(jax.random.split(jax.random.key(0), LAYERS)):
        up, down = jax.random.normal(key, (2, WIDTH, WIDTH)) / WIDTH**0.5
        params[f"layer_{number}"] = {"up": up, "down": down, "bias": jnp.zeros(WIDTH)}
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def loss_of(params: Tree, x: jax.Array) -> jax.Array:
    """Compare what the layers make of each row with the row backwards."""
    y = x
    for layer in params.values():
        y = y + jax.nn.gelu(y @ layer["up"] + layer["bias"]) @ layer["down"]
    return jnp.mean((y - x[:, ::-1]) ** 2)


def train_step(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
    """Take one step; the gradients are summed over all devices of all processes."""
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], x)
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def batch(step: int, sharding: NamedSharding) -> jax.Array:
    """Make the rows of one step. They do not depend on who makes them, so any cluster can go on."""
    rows = np.random.default_rng(step).standard_normal((ROWS, WIDTH), np.float32)
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def train(options: argparse.Namespace) -> None:
    """Train up to `--steps`, from the newest step if there is one. Every process does the same."""
    shape = (jax.device_count() // 2, 2)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def sharding_of(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, SPECS[path[-1].key] if leaf.ndim else P())

    shapes = jax.eval_shape(init)
    shardings = jax.tree.map_with_path(sharding_of, shapes)
    # Said, not left to the compiler: a state whose layout drifts is not what a restart asks for.
    next_state = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))

    root = options.run_dir / "checkpoints"
    with pc.CheckpointManager(root, keep=pc.Keep(last=2), save_every=4, on_sigterm=True) as manager:
        first = manager.latest_step() or 0
        if first:
            target = jax.tree.map(
                lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
                shapes,
                shardings,
            )
            state = manager.restore(target, reshard=options.reshard)
        else:
            state = jax.jit(init, out_shardings=shardings)()
        for step in range(first + 1, options.steps + 1):
            state, loss = next_state(state, batch(step, NamedSharding(mesh, P("data"))))
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.4f} {float(loss).hex()}", flush=True)
            manager.save(step, state)
            if step == options.lose_at and jax.process_index() == jax.process_count() - 1:
                manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)  # as a host that is gone


def main() -> None:
    """Join the other processes and train, or show the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("multihost-out"), help="a folder that all share")
    add("--steps", type=int, default=16, help="the step to stop at")
    add("--reshard", action="store_true", help="go on from the checkpoint of another cluster")
    add("--coordinator", metavar="HOST:PORT", help="of process 0, where JAX does not find it")
    add("--processes", type=int, help="how many there are")
    add("--process", type=int, help="which of them this is")
    add("--cpu-devices", type=int, help="make so many devices instead of using accelerators")
    add("--lose-at", type=int, metavar="STEP", help="lose the last process after this step")
    add("--demo", action="store_true", help="start processes here, lose one, and check it all")
    options = parser.parse_args()
    if options.demo:
        from multihost_demo import demo

        return demo(options.run_dir)
    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    jax.distributed.initialize(options.coordinator, options.processes, options.process)
    return train(options)


if __name__ == "__main__":
    main()
