"""Write the frozen checkpoints of format version 1. Run once; what is committed is never redone.

    python tests/data/make_v1.py tests/data

`expected()` is the state that both hold; `tests/test_frozen.py` compares what is read with it.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pytree_ckpt as pc

Pair = namedtuple("Pair", "mu nu")


def expected() -> dict[str, Any]:
    """A state with every kind of leaf, container, key and sharding; the same at every call."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def put(array: Any, *spec: Any, memory_kind: str | None = None) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory_kind)
        return jax.device_put(array, sharding)

    ramp = np.arange(1 << 21, dtype=np.uint32) % 509
    return {
        "large": put(ramp.reshape(2048, 1024).view(np.float32), "data"),
        "params": {
            "dense/0": {
                "kernel": put(np.arange(64, dtype=np.float32).reshape(8, 8), "data", "model")
            },
            "": put(np.arange(16, dtype=np.int8), ("model", "data")),
            "é 空": put(np.arange(8, dtype=ml_dtypes.bfloat16), None),
        },
        "opt": (Pair(mu=put(np.float32([1, 2]), "model"), nu=jnp.float32(0.5)), (), [], None, {}),
        "layers": {0: jnp.arange(3), 7: np.float64([1e-8, np.inf]), -1: np.zeros((0, 4), np.int16)},
        "keys": {
            "one": jax.random.key(7),
            "many": put(jax.random.split(jax.random.key(8, impl="rbg"), 8), "data"),
        },
        "quantized": jnp.asarray(np.arange(-8, 8), jnp.int4),
        "complex": jax.device_put(np.complex64([1 + 2j, -0.0]), jax.devices()[3]),
        "values": [True, 3, -(2**70), 0.1, 1 - 2j, "text", b"\x00\xff", np.int64(2**40)],
        "loader": pc.PerProcess({"shard": 3, "seen": [1, 2]}),
    }


def main() -> None:
    """Write both."""
    folder = Path(sys.argv[1])
    state = expected()
    small = {name: leaf for name, leaf in state.items() if name != "large"}
    pc.save(folder / "v1_raw", small, metadata={"note": "frozen", "n": [1, None, 2.5]})
    options = pc.SaveOptions(compress="zstd", digest="xxh3_128")
    pc.save(folder / "v1_zstd", state, options=options)


if __name__ == "__main__":
    main()
