"""How much would be read if each device were a process of its own, from the plan alone.

One process that wants a whole state reads each chunk once, however the chunks lie. It is when many
processes load, each its part, that the shape of the chunks decides how much is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

import pytree_ckpt as pc
from pytree_ckpt.format.boxes import Box
from pytree_ckpt.plan.loading import plan_reads


def by_device(path: Path, target: Any) -> float:
    """Bytes that all devices read on their own, over the bytes that they need."""
    specs = {leaf.text: leaf.spec for leaf in pc.read_manifest(path).leaves}
    read = needed = 0
    for keys, leaf in jax.tree_util.tree_leaves_with_path(target):
        spec = specs["/".join(str(key.key) for key in keys)]
        for index in leaf.sharding.devices_indices_map(leaf.shape).values():
            ranges = [s.indices(n) for s, n in zip(index, leaf.shape, strict=True)]
            plan = plan_reads(spec, [Box(tuple(r[0] for r in ranges), tuple(r[1] for r in ranges))])
            read += plan.nbytes_read
            needed += plan.nbytes_needed
    return read / needed
