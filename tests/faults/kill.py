"""Kill at every operation, before it and in the middle of a write."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults import children
from tests.faults.children import Ended
from tests.faults.judge import Judge, Tally
from tests.faults.scenarios import Scenario
from tests.faults.shim import WRITE, Fault

Weaken = Callable[[], None]


def prepared(scenario: Scenario, folder: Path) -> Path:
    """What is there before the attack, in `folder`; it is copied for each try."""
    template = folder / "template"
    (template / "root").mkdir(parents=True)
    ended = children.run(lambda root, _: scenario.prepare(root), template / "root")
    if ended.error or ended.killed or ended.hung:
        raise RuntimeError(f"cannot prepare {scenario.name}: {ended}")
    if not any((template / "root").iterdir()):
        (template / "root").rmdir()
    return template


def acting(scenario: Scenario, weaken: Weaken | None) -> children.Action:
    """The scenario's action, with the code weakened in the child that runs it."""

    def act(root: Path, acknowledge: children.Acknowledge) -> None:
        if weaken is not None:
            weaken()
        scenario.act(root, acknowledge)

    return act


def count(scenario: Scenario, template: Path, folder: Path, fault: Fault) -> int:
    """Operations of the kinds of `fault` if nothing goes wrong."""
    work = folder / "count"
    shutil.copytree(template, work)
    counting = Fault(kinds=fault.kinds)
    ended = children.run(scenario.act, work / "root", below=work, fault=counting)
    shutil.rmtree(work)
    if ended.error:
        raise RuntimeError(f"{scenario.name} fails without a fault: {ended}")
    return ended.operations


def tries(
    scenario: Scenario,
    folder: Path,
    faults: Callable[[int], Fault],
    *,
    stride: int = 1,
    weaken: Weaken | None = None,
    backwards: bool = False,
) -> Iterator[tuple[str, Path, Ended]]:
    """Attack a copy at each operation; name of the try, the folder of the copy, how it ended."""
    template = prepared(scenario, folder)
    operations = count(scenario, template, folder, faults(0))
    last = operations + 1
    places = sorted({*range(1, last + 1, stride), last}, reverse=backwards)
    for at in places if operations else []:
        work = folder / f"try-{at}"
        shutil.copytree(template, work)
        fault = faults(at)
        ended = children.run(acting(scenario, weaken), work / "root", below=work, fault=fault)
        yield f"{scenario.name}, {fault.action} at operation {at} of {last}", work, ended
        shutil.rmtree(work, ignore_errors=True)


def campaign(
    judge: Judge,
    scenario: Scenario,
    *,
    stride: int = 1,
    torn: bool = False,
    weaken: Weaken | None = None,
    stop_early: bool = False,
) -> Tally:
    """Kill at each operation of a scenario, or in the middle of each write."""
    total = Tally()
    folder = children.scratch()

    def faults(at: int) -> Fault:
        return Fault(action="torn", at=at, kinds=WRITE) if torn else Fault(action="kill", at=at)

    try:
        for where, work, ended in tries(scenario, folder, faults, stride=stride, weaken=weaken):
            found = judge.ask(work / "root", scenario, scenario.expect(ended.acks))
            if ended.hung or ended.error:
                found.wrong("failed", str(ended))
            total.add(found, where=where)
            if stop_early and not total.is_clean:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return total
