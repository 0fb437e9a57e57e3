"""Every campaign, and a table of what it found."""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults import shim


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of each campaign is tried: every `stride`-th operation, `most` states, and so on."""

    kill_stride: int
    torn_stride: int
    replay_most: int | None
    restart_stride: int
    restart_most: int
    disk_stride: int
    power_stride: int
    mutant_stride: int
    mutant_most: int
    mutant_all: bool
    race_steps: int
    store_steps: int
    readers_s: float
    flips: int
    damage_stride: int
    mutated: int
    phases: int
    examples: int
    steps: int
    soak_minutes: float
    train_kills: int


TINY = Size(
    kill_stride=29, torn_stride=61, replay_most=15, restart_stride=20, restart_most=4,
    disk_stride=67,
    power_stride=150, mutant_stride=5, mutant_most=150, mutant_all=False, race_steps=5,
    store_steps=2, readers_s=2,
    flips=20, damage_stride=7, mutated=200, phases=1,
    examples=1, steps=10, soak_minutes=0.1, train_kills=1,
)  # fmt: skip
SHORT = Size(
    kill_stride=6, torn_stride=11, replay_most=90, restart_stride=5, restart_most=8, disk_stride=17,
    power_stride=23, mutant_stride=3, mutant_most=250, mutant_all=False, race_steps=40,
    store_steps=20, readers_s=8,
    flips=150, damage_stride=1, mutated=10_000, phases=3,
    examples=10, steps=20, soak_minutes=0.4, train_kills=4,
)  # fmt: skip
FULL = Size(
    kill_stride=1, torn_stride=1, replay_most=1500, restart_stride=2, restart_most=15,
    disk_stride=1,
    power_stride=1, mutant_stride=6, mutant_most=1000, mutant_all=True, race_steps=500,
    store_steps=100,
    readers_s=60, flips=1000, damage_stride=1, mutated=20_000, examples=500, steps=50,
    soak_minutes=2, phases=8, train_kills=50,
)  # fmt: skip
SIZES = {"tiny": TINY, "short": SHORT, "full": FULL}
CAMPAIGNS = (
    "kill", "torn", "replay", "restart", "disk", "tmpfs", "power", "damage", "hostile", "race",
    "stores", "readers", "cluster", "machine", "soak", "train-kill", "mutants",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="short")
    parser.add_argument("--only", action="append", choices=CAMPAIGNS, help="again for more")
    parser.add_argument("--minutes", type=float, help="of the soak")
    asked = parser.parse_args()
    if (missing := shim.why_missing()) is not None:
        print(f"nothing is tried: {missing}")
        return 0
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    if not shim.is_loaded():
        shim.restart_with_shim("tests.faults", sys.argv[1:])
    return _run(SIZES[asked.size], asked.only or list(CAMPAIGNS), asked.minutes)


def _run(size: Size, wanted: list[str], minutes: float | None) -> int:
    _import_before_forks()
    from tests.faults import scenarios
    from tests.faults.judge import Judge

    scenarios.small_files()
    with Judge() as judge:
        table = Table()
        for name in CAMPAIGNS:
            if name in wanted and name != "mutants":
                for row, campaign in _campaigns(name, judge, size, minutes):
                    table.add(row, campaign)
        if "mutants" in wanted:
            table.add_mutants(judge, size)
    return table.finish()


def _import_before_forks() -> None:
    """What the children need; it must start no threads, and JAX must find no devices."""
    import pytree_ckpt as pc
    from pytree_ckpt.store import converting, linking, reading, resuming, writing
    from pytree_ckpt.verbs import load, manager, save

    for loaded in (converting, linking, reading, resuming, writing, load, manager, save):
        logging.getLogger("pytree_ckpt").debug("%s", loaded.__name__)
    logging.getLogger("pytree_ckpt").setLevel(logging.CRITICAL)
    for name in pc.__all__:
        getattr(pc, name)


def _campaigns(
    name: str, judge, size: Size, minutes: float | None
) -> Iterator[tuple[str, Callable | str]]:
    """Rows of the table: what is tried, and the campaign, or why it is skipped."""
    from tests.faults import (
        damage,
        disks,
        hostile,
        kill,
        machine,
        power,
        replay,
        soak,
        train,
        writers,
    )
    from tests.faults.scenarios import all_scenarios

    scenarios = all_scenarios()
    if name == "kill":
        for s in scenarios:
            yield f"kill: {s.name}", lambda s=s: kill.campaign(judge, s, stride=size.kill_stride)
    elif name == "torn":
        for s in scenarios:
            yield (
                f"kill in a write: {s.name}",
                lambda s=s: kill.campaign(judge, s, stride=size.torn_stride, torn=True),
            )
    elif name == "replay":
        for s in scenarios:
            yield (
                f"crash states: {s.name}",
                lambda s=s: replay.campaign(judge, s, most=size.replay_most),
            )
    elif name == "restart":
        for s in scenarios:
            if s.is_ordered:
                yield (
                    f"kill, go on, crash states: {s.name}",
                    lambda s=s: replay.restart_campaign(
                        judge, s, stride=size.restart_stride, most=size.restart_most
                    ),
                )
    elif name == "disk":
        for title, faults in disks.ALL.items():
            yield title, lambda faults=faults: disks.all_scenarios(judge, faults, size.disk_stride)
    elif name == "tmpfs":
        yield "a full tmpfs of 20 MB", disks.why_no_tmpfs() or disks.tmpfs
    elif name == "power":
        for storage in power.ALL:
            missing = power.why_not(storage)
            for s in scenarios:
                if s.is_ordered and s.name != "leftovers":
                    yield (
                        f"power cut, {storage.name}: {s.name}",
                        missing
                        or (
                            lambda s=s, storage=storage: power.campaign(
                                judge, s, storage, stride=size.power_stride
                            )
                        ),
                    )
    elif name == "damage":
        for kind in damage.KINDS:
            yield (
                f"damage: {kind}",
                lambda kind=kind: damage.campaign(
                    judge, kind, flips=size.flips, stride=size.damage_stride
                ),
            )
        yield (
            "damage: verify names the leaf of a flip",
            lambda: damage.verify_campaign(judge, flips=size.flips),
        )
    elif name == "hostile":
        yield "hostile: mutated metadata", lambda: hostile.campaign(mutated=size.mutated)
    elif name == "race":
        yield (
            "3 writers on one root",
            lambda: writers.race(judge, processes=3, steps=size.race_steps),
        )
        yield "2 managers on one root", lambda: writers.managers(judge, steps=size.race_steps)
    elif name == "stores":
        yield (
            "8 writers in an object store",
            lambda: writers.race_in_a_store(processes=8, steps=size.store_steps),
        )
    elif name == "readers":
        yield "loads meanwhile", lambda: writers.readers(seconds=size.readers_s)
    elif name == "cluster":
        yield from _cluster_campaigns(size)
    elif name == "machine":
        yield (
            "state machine",
            lambda: machine.campaign(judge, examples=size.examples, steps=size.steps),
        )
    elif name == "soak":
        yield "soak", lambda: soak.campaign(minutes=minutes or size.soak_minutes)
    elif name == "train-kill":
        missing = train.why_not()
        yield "examples/train.py", missing or (lambda: train.campaign(kills=size.train_kills))


def _cluster_campaigns(size: Size) -> Iterator[tuple[str, Callable]]:
    """Every fault of each of two processes; the phases that are tried are spread over the save."""
    from tests.faults import cluster

    clusters = cluster.Clusters()
    with tempfile.TemporaryDirectory() as folder:
        for fault in cluster.FAULTS:
            for victim, who in enumerate(("process 0", "process 1")):
                phases = [p for p in cluster.PHASES if not (victim and p in cluster.OF_PROCESS_0)]
                stride = -(-len(phases) // size.phases)
                yield (
                    f"cluster: {fault} in {who}",
                    lambda fault=fault, victim=victim, phases=phases[stride // 2 :: stride]: (
                        cluster.campaign(clusters, Path(folder), fault, victim, phases)
                    ),
                )
        clusters.close()


class Table:
    """Prints a row for each campaign as soon as it has ended."""

    COLUMNS = ("points", "lost", "silent", "broken", "leftovers", "failed")
    HEADS = ("tried", "lost", "silent", "listed but broken", "leftovers", "other", "s")

    def __init__(self) -> None:
        from tests.faults.judge import Tally

        self._total = Tally()
        self._uncaught: list[str] = []
        self._started = time.monotonic()
        self._line("campaign", list(self.HEADS))

    @staticmethod
    def _line(name: str, cells: list[str]) -> None:
        widths = [7, 5, 7, 18, 10, 6, 6]
        row = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        print(f"{name:<62}{row}", flush=True)

    def add(self, name: str, campaign) -> None:
        from tests.faults.judge import Tally

        if isinstance(campaign, str):
            print(f"{name:<62}  skipped: {campaign}", flush=True)
            return
        started = time.monotonic()
        try:
            found = campaign()
        except Exception as error:  # noqa: BLE001 - a finding; the others are still tried
            found = Tally()
            found.wrong("failed", f"{type(error).__name__}: {error}")
        self._total.add(found, where=name)
        self._show(name, found, time.monotonic() - started)
        for note in list(dict.fromkeys(found.notes))[:5]:
            print(f"    {note}", flush=True)

    def _show(self, name: str, found, seconds: float) -> None:
        self._line(name, [*(str(getattr(found, c)) for c in self.COLUMNS), f"{seconds:.0f}"])

    def add_mutants(self, judge, size: Size) -> None:
        from tests.faults import mutants

        print("\nmutant, and who caught it", flush=True)
        for mutant in mutants.ALL:
            caught = mutants.catch(
                judge,
                mutant,
                stride=size.mutant_stride,
                most=size.mutant_most,
                all_campaigns=size.mutant_all,
            )
            by = [name for name, text in caught.items() if text]
            if not by:
                self._uncaught.append(mutant.name)
            print(f"  {mutant.name:<60}{', '.join(by) or 'NOBODY'}", flush=True)

    def finish(self) -> int:
        print()
        self._show("all", self._total, time.monotonic() - self._started)
        for name in self._uncaught:
            print(f"nobody caught the mutant: {name}")
        return 0 if self._total.is_clean and not self._uncaught else 1


if __name__ == "__main__":
    sys.exit(main())
