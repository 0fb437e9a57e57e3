"""How planning and a round trip scale with the number of leaves.

Prints seconds of the pure plans (no array data) for trees of up to 100,000 leaves over 8 devices,
and of a save and a load of 10,000 leaves of 4 KiB. Linear means: seconds per leaf stay the same.
`run.py` takes the plans from here, as JSON.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.format.boxes import Grid
from pytree_ckpt.format.paths import Key
from pytree_ckpt.format.shardings import Mesh as PlainMesh
from pytree_ckpt.format.shardings import Named, cell_of
from pytree_ckpt.plan.loading import plan_reads
from pytree_ckpt.plan.saving import ArrayForm, plan_save
from pytree_ckpt.sweeps import no_sweeps

DEVICES = 8


def seconds(work: Callable[[], Any], rounds: int = 3) -> float:
    """Least seconds of a few rounds."""
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


@no_sweeps()  # as a save and a load do
def plan_both(leaves: int) -> None:
    """Plan a save and a load of `leaves` arrays of 4 KiB, in as many shapes as a model has."""
    mesh = PlainMesh(
        axis_names=("data",),
        axis_sizes=(DEVICES,),
        axis_types=("Auto",),
        device_ids=tuple(range(DEVICES)),
    )
    sharding = Named(mesh=mesh, spec=(("data",),))
    forms = [
        ArrayForm(kind="jax", dtype="float32", shape=(64 * (n + 1), 16), sharding=sharding)
        for n in range(16)
    ]
    paths = [(Key("str", "layer"), Key("int", number)) for number in range(leaves)]
    codes = [number % len(forms) for number in range(leaves)]
    process_of = dict.fromkeys(range(DEVICES), 0)
    plan = plan_save(paths, forms, codes, process=0, process_of=process_of, codec="raw")
    cells = {code: Grid(f.shape, cell_of(f.sharding, f.shape)) for code, f in enumerate(forms)}
    reads = {code: plan_reads(plan.specs[code], list(cells[code].boxes())) for code in cells}
    assert sum(len(reads[code].units) for code in codes) == len(plan.packed_leaf)


def round_trip(leaves: int, folder: str) -> tuple[float, float]:
    """Seconds of a save and of a load."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    tree = {
        f"leaf_{number}": jax.device_put(np.full(1024, number, np.float32), sharding)
        for number in range(leaves)
    }
    save = seconds(lambda: pc.save(folder, tree, overwrite=True))
    load = seconds(lambda: pc.load(folder, tree))
    return save, load


def plans(scale: float) -> dict[int, float]:
    """Seconds of the plans by number of leaves."""
    counts = [round(leaves * scale) for leaves in (10_000, 25_000, 50_000, 100_000)]
    return {leaves: seconds(lambda leaves=leaves: plan_both(leaves)) for leaves in counts}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: a trial run")
    parser.add_argument("--plans", action="store_true", help="only the plans, as JSON")
    arguments = parser.parse_args()
    planned = plans(arguments.scale)
    if arguments.plans:
        print(json.dumps(planned))
        return
    print(f"{'leaves':>8}  {'plan s':>8}  {'µs/leaf':>8}")
    for leaves, taken in planned.items():
        print(f"{leaves:>8}  {taken:>8.3f}  {taken / leaves * 1e6:>8.2f}")
    print(f"{'leaves':>8}  {'save s':>8}  {'load s':>8}   of 4 KiB over {DEVICES} devices")
    for leaves in (round(1_000 * arguments.scale), round(10_000 * arguments.scale)):
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            save, load = round_trip(leaves, folder)
        print(f"{leaves:>8}  {save:>8.3f}  {load:>8.3f}")


if __name__ == "__main__":
    main()
