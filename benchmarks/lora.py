"""The second save of a LoRA run, 1 GiB frozen and 10 MiB trained: bytes and time, beside orbax."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"


def main() -> None:
    """Save twice with each, and print what the second one cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    import jax
    import orbax.checkpoint as ocp
    import workloads

    import pytree_ckpt as pc

    state = workloads.build(workloads.workloads(arguments.scale)["e"])
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(f"{nbytes / 1e6:.0f} MB in all; the second save:")
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="pytree_ckpt-lora-") as name:
        folder = Path(name)
        with ocp.StandardCheckpointer() as checkpointer:
            for number in range(2):
                seconds = _timed(lambda n=number: _orbax(checkpointer, folder / f"orbax{n}", state))
                state["trained"] = jax.tree.map(lambda x: x + 1, state["trained"])
        _show("orbax", _nbytes(folder / "orbax1"), seconds)
        pc.save(folder / "1", state)
        state["trained"] = jax.tree.map(lambda x: x + 1, state["trained"])
        seconds = _timed(lambda: pc.save(folder / "2", state))
        _show("ours, whole", _nbytes(folder / "2"), seconds)
        seconds = _timed(lambda: pc.save(folder / "3", state, base=folder / "1"))
        linked = pc.read_manifest(folder / "3").linked_nbytes
        _show("ours, with a base", _nbytes(folder / "3") - linked, seconds)


def _orbax(checkpointer: Any, path: Path, state: Any) -> None:
    checkpointer.save(path, state)
    checkpointer.wait_until_finished()


def _timed(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _show(name: str, nbytes: int, seconds: float) -> None:
    print(f"{name:<20}{nbytes / 1e6:8.1f} MB written {seconds:7.2f} s", flush=True)


if __name__ == "__main__":
    main()
