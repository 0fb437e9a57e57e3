"""Train a small transformer on Python's standard library, and lose nothing when it is killed.

    python examples/train.py --kill-at 35             # dies hard, between two saves
    python examples/train.py                          # goes on from the newest checkpoint
    python examples/train.py --mesh 2x4               # refused: saved on another mesh
    python examples/train.py --mesh 2x4 --reshard     # goes on, on that mesh
    python examples/train.py --demo                   # all of it, checked: about a minute

It runs on 8 CPU devices unless `--devices 0` asks for the accelerators at hand. A resumed run
prints the very losses, bit for bit, of a run that was never stopped. SIGTERM, as a scheduler sends
it, makes it save once more and exit with code 143.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train_report import History, plot_losses, reporter

import pytree_ckpt as pc

Tree = Any  # a pytree
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY = 128, 4, 2, 64, 256

# Nothing here depends on --steps: a longer run repeats a shorter one, and then goes on.
SCHEDULE = optax.warmup_exponential_decay_schedule(
    init_value=0.0, peak_value=3e-3, warmup_steps=10, transition_steps=500, decay_rate=0.5
)
OPTIMIZER = optax.adamw(SCHEDULE, weight_decay=0.01)


# --- the data ---------------------------------------------------------------------------------


def standard_library_text() -> Bytes:
    """Return the top-level modules of the standard library that runs this, as one byte array."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    if len(text) < 100_000:
        raise SystemExit(f"train.py: found no source text of the standard library in {folder}")
    return np.frombuffer(text, np.uint8)


def read_batch(text: Bytes, position: int, rows: int) -> Bytes:
    """Return `rows` windows of the text; each row reads on through a stretch of its own."""
    starts = position + np.arange(rows) * (len(text) // rows)
    return text[(starts[:, None] + np.arange(CONTEXT + 1)) % len(text)]


# --- the model --------------------------------------------------------------------------------


class Block(nnx.Module):
    """Causal attention and an MLP, each behind a norm and followed by dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.query_key_value = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.project = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = jnp.split(self.query_key_value(self.attention_norm(x)), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(
            q.reshape(heads), k.reshape(heads), v.reshape(heads), is_causal=True
        )
        x = x + self.dropout(self.project(mixed.reshape(x.shape)), rngs=rngs)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.mlp_norm(x)))), rngs=rngs)


class Transformer(nnx.Module):
    """A byte-level language model: (batch, time) bytes to (batch, time, 256) logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.place = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.Sequential(*(Block(rngs) for _ in range(LAYERS)))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks.layers:
            x = block(x, rngs)
        return self.head(self.norm(x))


# --- the state and the step -------------------------------------------------------------------


class Training(NamedTuple):
    """Two compiled functions, and the description of the arrays that pass between them."""

    init: Callable[[], Tree]
    step: Callable[[Tree, Bytes], tuple[Tree, jax.Array]]
    arrays: Tree  # jax.ShapeDtypeStructs with shardings: what a checkpoint is loaded into


def shard(mesh: Mesh, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Kernels over both axes, vectors over `model`, scalars (counts, keys) everywhere."""
    spec = P(*("data", "model")[2 - leaf.ndim :])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def make_training(mesh: Mesh, seed: int) -> Training:
    """Describe the training on `mesh`; no array is made yet."""

    def make_model() -> Transformer:
        return Transformer(nnx.Rngs(params=seed))

    def init() -> Tree:
        params = nnx.state(make_model())
        key = jax.random.key(seed + 1)
        return {"params": params, "opt_state": OPTIMIZER.init(params), "dropout_key": key}

    def loss_of(params: Tree, key: jax.Array, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        logits = model(tokens[:, :-1], nnx.Rngs(dropout=key))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(arrays: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
        params, opt_state, tokens = arrays["params"], arrays["opt_state"], batch.astype(jnp.int32)
        key, now = jax.random.split(arrays["dropout_key"])
        loss, gradients = jax.value_and_grad(loss_of)(params, now, tokens)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state, "dropout_key": key}, loss

    graphdef = nnx.graphdef(nnx.eval_shape(make_model))
    arrays = jax.tree.map(lambda leaf: shard(mesh, leaf), jax.eval_shape(init))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, arrays)
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    return Training(
        init=jax.jit(init, out_shardings=shardings),
        step=jax.jit(
            step,
            in_shardings=(shardings, rows),
            out_shardings=(shardings, whole),
            donate_argnums=0,
        ),
        arrays=arrays,
    )


def first_state(training: Training, text: Bytes) -> Tree:
    """Return the state before the first step: arrays on the mesh, and where the data stands."""
    digest = hashlib.sha256(text.tobytes()).hexdigest()
    return {**training.init(), "step": 0, "data": {"position": 0, "text_sha256": digest}}


def load_state(
    manager: pc.CheckpointManager, training: Training, text: Bytes, *, reshard: bool
) -> Tree:
    """Load the newest step onto the mesh of `training`; another mesh's only with `reshard`."""
    target = {**training.arrays, "step": 0, "data": {"position": 0, "text_sha256": ""}}
    state = manager.restore(target, reshard=reshard)
    if state["data"]["text_sha256"] != hashlib.sha256(text.tobytes()).hexdigest():
        raise SystemExit("train.py: this checkpoint was trained on another Python's source text")
    return state


def advance(training: Training, state: Tree, text: Bytes, rows: int) -> tuple[Tree, float]:
    """Take one step. The arrays of `state` are donated: use only the state that is returned."""
    arrays = {key: state[key] for key in training.arrays}
    data = state["data"]
    arrays, loss = training.step(arrays, read_batch(text, data["position"], rows))
    position = (data["position"] + CONTEXT) % len(text)
    state = {**arrays, "step": state["step"] + 1, "data": {**data, "position": position}}
    return state, float(loss)


# --- the loop ---------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Train up to `--steps`, from the newest checkpoint if there is one."""
    text = standard_library_text()
    training = make_training(make_mesh(options.mesh), options.seed)
    manager = pc.CheckpointManager(
        options.run_dir / "checkpoints",
        keep=pc.Keep(last=2),
        save_every=options.save_every,
        on_sigterm=True,
    )
    newest = manager.latest_step()
    if newest is None:
        state = first_state(training, text)
    else:
        state = load_state(manager, training, text, reshard=options.reshard)

    history = History(options.run_dir / "losses.jsonl")
    history.rewind(state["step"])
    with manager, reporter(options.steps, done=state["step"]) as report:
        report.say("starting at step 0" if newest is None else f"resumed from step {newest}")
        while state["step"] < options.steps:
            state, loss = advance(training, state, text, options.batch)
            step = state["step"]
            history.append(step, loss)
            report.step(step, loss)
            if step == options.kill_at:
                manager.wait()  # so that this run dies in the same state each time
                die()
            # It is written while the next steps are taken; the manager knows whether it is time.
            last = step == options.steps
            metadata = {"loss": loss, "batch": options.batch}
            if manager.save(step, state, metadata=metadata, force=last) is not None:
                report.say(f"saving step {step}")
    plot_losses(options.plot, {"loss": history})
    print(f"loss curve: {options.plot}")


def die() -> None:
    """End this process as the out-of-memory killer would: no `finally`, no `atexit`."""
    os.kill(os.getpid(), signal.SIGKILL)


# --- the command line -------------------------------------------------------------------------


def make_mesh(shape: tuple[int, int]) -> Mesh:
    """Return a mesh of the first devices, with the axes `data` and `model`."""
    count = shape[0] * shape[1]
    if count > jax.device_count():
        raise SystemExit(f"train.py: --mesh needs {count} devices, have {jax.device_count()}")
    devices = jax.devices()[:count]
    axis_types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("data", "model"), axis_types=axis_types, devices=devices)


def mesh_shape(text: str) -> tuple[int, int]:
    """Parse "4x2"."""
    data, model = text.split("x")
    return int(data), int(model)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run-dir", type=Path, help="checkpoints and losses (default: train-out, or demo-out)")
    add("--steps", type=int, default=60, help="the step to stop at (default: 60)")
    add("--save-every", type=int, default=10, metavar="N", help="(default: 10)")
    add("--kill-at", type=int, metavar="STEP", help="die hard right after this step")
    add("--mesh", type=mesh_shape, default=(4, 2), metavar="DxM", help="data x model (4x2)")
    add("--reshard", action="store_true", help="go on from a checkpoint of another mesh")
    add("--batch", type=int, default=16, help="rows per step (default: 16)")
    add("--seed", type=int, default=0)
    add("--devices", type=int, default=8, help="CPU devices to make; 0: accelerators at hand")
    add("--plot", type=Path, help="where the loss curve goes (default: loss.png in --run-dir)")
    add("--demo", action="store_true", help="be killed, resume and reshard, and check it all")
    options = parser.parse_args()
    if min(options.steps, options.save_every, options.batch, *options.mesh) < 1:
        parser.error("--steps, --save-every, --batch and both sides of --mesh must be positive")
    if options.batch % options.mesh[0]:
        parser.error(f"--batch {options.batch} does not divide over {options.mesh[0]} data rows")
    options.run_dir = options.run_dir or Path("demo-out" if options.demo else "train-out")
    options.plot = options.plot or options.run_dir / "loss.png"
    return options


def main() -> None:
    """Train, or show the demo."""
    options = parse_options()
    if options.demo:
        from train_demo import demo

        return demo(options.run_dir, options.plot)
    if options.devices:  # must be said before JAX first looks for devices
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    try:
        train(options)
    except pc.MismatchError as error:
        sys.exit(f"MismatchError: {error}\n(With train.py, reshard=True is --reshard.)")
    except pc.CheckpointError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
