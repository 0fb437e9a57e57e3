"""Real power cuts: file systems in images, shut down at each operation without a flush."""

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults import children, kill
from tests.faults.judge import Judge, Tally
from tests.faults.kill import Weaken
from tests.faults.scenarios import Scenario
from tests.faults.shim import Fault

SHUTDOWN = 0x8004587D
LOSES_LOG, FLUSHES_LOG = 2, 1
"""What the cut does to the log of the file system: it is lost, or was just written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A file system to pull the plug of."""

    name: str
    kind: str
    nbytes: int
    flag: int
    options: str = "loop"

    @property
    def make(self) -> list[str]:
        quiet = ["-q", "-F"] if self.kind == "ext4" else ["-q", "-f"]
        return [f"mkfs.{self.kind}", *quiet]


MIB = 1 << 20
ALL = (
    Storage(name="ext4, ordered", kind="ext4", nbytes=32 * MIB, flag=LOSES_LOG),
    Storage(name="ext4, log flushed", kind="ext4", nbytes=32 * MIB, flag=FLUSHES_LOG),
    Storage(
        name="ext4, data in the journal",
        kind="ext4",
        nbytes=32 * MIB,
        flag=LOSES_LOG,
        options="loop,data=journal",
    ),
    Storage(name="xfs", kind="xfs", nbytes=320 * MIB, flag=LOSES_LOG),
)


def why_not(storage: Storage) -> str | None:
    """Why the plug cannot be pulled here, None if it can."""
    if os.geteuid() != 0:
        return "mounting an image needs root"
    for tool in ("mount", "losetup", f"mkfs.{storage.kind}"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}`"
    folder = children.scratch()
    try:
        image = _new_image(storage, folder)
        with _mounted(storage, image, folder):
            pass
    except subprocess.CalledProcessError as error:
        return f"{storage.name} cannot be mounted: {error.stderr.decode().strip()}"
    finally:
        shutil.rmtree(folder)
    return None


def _new_image(storage: Storage, folder: Path) -> Path:
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(storage.nbytes)
    subprocess.run([*storage.make, str(image)], check=True, capture_output=True)
    return image


@contextmanager
def _mounted(storage: Storage, image: Path, folder: Path) -> Iterator[Path]:
    place = folder / "mounted"
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", storage.kind, "-o", storage.options, str(image), str(place)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True, capture_output=True)


def campaign(
    judge: Judge,
    scenario: Scenario,
    storage: Storage,
    *,
    stride: int = 1,
    weaken: Weaken | None = None,
    stop_early: bool = False,
) -> Tally:
    """Cut the power at each operation of a scenario."""
    total = Tally()
    folder = children.scratch()
    try:
        image = _new_image(storage, folder)
        with _mounted(storage, image, folder) as place:
            ended = children.run(lambda root, _: scenario.prepare(root), place / "root")
            if ended.error:
                raise RuntimeError(f"cannot prepare {scenario.name}: {ended}")
        operations = _count(scenario, folder)
        for at in sorted({*range(1, operations + 2, stride), operations + 1}):
            found = _cut(judge, scenario, storage, folder, at, weaken)
            total.add(found, where=f"{scenario.name} on {storage.name}, cut at operation {at}")
            if stop_early and not total.is_clean:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return total


def _count(scenario: Scenario, folder: Path) -> int:
    template = kill.prepared(scenario, folder)
    return kill.count(scenario, template, folder, Fault())


def _cut(
    judge: Judge,
    scenario: Scenario,
    storage: Storage,
    folder: Path,
    at: int,
    weaken: Weaken | None,
) -> Tally:
    image = folder / "cut"
    command = ["cp", "--sparse=always", str(folder / "image"), str(image)]
    subprocess.run(command, check=True)
    fault = Fault(action="shutdown", at=at, argument=storage.flag)
    with _mounted(storage, image, folder) as place:
        plug = os.open(place, os.O_RDONLY)
        act = kill.acting(scenario, weaken)
        ended = children.run(act, place / "root", below=place, fault=fault, plug_fd=plug)
        if not ended.killed:
            fcntl.ioctl(plug, SHUTDOWN, struct.pack("I", storage.flag))
        os.close(plug)
    with _mounted(storage, image, folder) as place:
        (place / "root").mkdir(exist_ok=True)
        found = judge.ask(place / "root", scenario, scenario.expect(ended.acks), bound=False)
    if ended.error or ended.hung:
        found.wrong("failed", str(ended))
    return found
