"""Kill a conversion at random operations, and let the same call go on."""

import random
import shutil
from pathlib import Path

import numpy as np

import pytree_ckpt as pc
from tests.faults import children
from tests.faults.children import Acknowledge
from tests.faults.judge import Tally
from tests.faults.scenarios import content
from tests.faults.shim import Fault


def _save(root: Path, _: Acknowledge) -> None:
    pc.save(root / "src", content(3))


def _convert(root: Path, _: Acknowledge) -> None:
    layout = pc.Layout(mesh={"data": 4}, specs={"large": "None,data", "host": "data"})
    pc.convert(root / "src", root / "dst", layout=layout)


def _go_on(root: Path, acknowledge: Acknowledge) -> None:
    """Convert again, and compare; what is not as it must be is acknowledged."""
    _convert(root, acknowledge)
    with pc.open(root / "src") as old, pc.open(root / "dst") as new:
        was, now = old.to_numpy(), new.to_numpy()
    for key, value in was.items():
        if not np.array_equal(now[key], value):
            acknowledge(f"silent: {key} is not what it was")
    if not pc.verify(root / "dst").ok:
        acknowledge("broken: the new checkpoint is damaged")
    entries = {file.name for file in (root / "dst").iterdir()}
    if entries != {"manifest.msgpack", pc.read_manifest(root / "dst").data_dir}:
        acknowledge(f"leftovers: {sorted(entries)}")


def campaign(*, kills: int) -> Tally:
    """Kill at so many operations, the same ones each time."""
    total = Tally()
    folder = children.scratch()
    try:
        template = folder / "template"
        template.mkdir()
        children.run(_save, template)
        shutil.copytree(template, folder / "count")
        operations = children.run(_convert, folder / "count", fault=Fault()).operations
        if not operations:
            raise RuntimeError("the conversion fails without a fault")
        places = range(1, operations + 1)
        for at in sorted(random.Random(0).sample(places, min(kills, operations))):
            work = folder / f"kill-{at}"
            shutil.copytree(template, work)
            killed = children.run(_convert, work, fault=Fault(action="kill", at=at))
            found = Tally(points=1)
            if not killed.killed:
                found.wrong("failed", str(killed))
            ended = children.run(_go_on, work)
            if ended.error or ended.hung:
                found.wrong("failed", str(ended))
            for ack in ended.acks:
                found.wrong(*ack.split(": ", 1))
            total.add(found, where=f"killed at operation {at} of {operations}")
            shutil.rmtree(work)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return total
