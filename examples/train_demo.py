"""The demo of `train.py`: kill a run, resume it, and hold it against one that was never killed."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from train_report import History, plot_losses

STEPS, SAVE_EVERY, KILL_AT, RESHARDED_STEPS = 60, 10, 35, 10
SHOWN_LEAVES = 3  # of those that an error names, each on an indented line
STEP_LINE = re.compile(r"step (\d+)/\d+ .* (-?0x\S+)")


class Run(NamedTuple):
    """How one run of `train.py` went."""

    returncode: int
    losses: dict[int, str]  # the step and the loss, as `float.hex` shows it
    output: str


def run_training(run_dir: Path, *arguments: str) -> Run:
    """Run `train.py` in a process of its own; show what it prints, but not every step or leaf."""
    options = [f"--run-dir={run_dir}", f"--save-every={SAVE_EVERY}", *arguments]
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *options]
    print("\n$ python examples/train.py", *options, flush=True)
    losses, lines, leaves = {}, [], 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            found = STEP_LINE.match(line)
            if found:
                losses[int(found[1])] = found[2]
            leaves = leaves + 1 if line.startswith("  ") else 0
            if leaves == SHOWN_LEAVES + 1:
                print("      ... and so on, for every leaf")
            elif leaves <= SHOWN_LEAVES and (not found or int(found[1]) % 5 == 0):
                print("   ", line.rstrip(), flush=True)
    return Run(process.returncode, losses, "".join(lines))


def expect(met: bool, text: str) -> None:
    """Say that an expectation was met, or end the demo."""
    if not met:
        sys.exit(f"FAILED: {text}")
    print(f"OK: {text}", flush=True)


def demo(folder: Path, plot: Path) -> None:
    """Show that a kill costs nothing, and that another mesh is refused until it is asked for.

    Raises:
        SystemExit: something was not as it should be.
    """
    started = time.monotonic()
    calm, killed = folder / "uninterrupted", folder / "killed"
    for run_dir in (calm, killed):
        shutil.rmtree(run_dir, ignore_errors=True)

    whole = run_training(calm, f"--steps={STEPS}")
    expect(whole.returncode == 0, "a run that nothing disturbs")
    first, last = (float.fromhex(whole.losses[step]) for step in (1, STEPS))
    expect(last < 0.75 * first, f"it learns: the loss goes from {first:.2f} to {last:.2f}")

    before = run_training(killed, f"--steps={STEPS}", f"--kill-at={KILL_AT}")
    expect(before.returncode == -signal.SIGKILL, f"a run that is killed hard after step {KILL_AT}")
    after = run_training(killed, f"--steps={STEPS}")
    saved = KILL_AT - KILL_AT % SAVE_EVERY
    expect(after.returncode == 0, "the same command resumes it")
    expect(min(after.losses) == saved + 1, f"it goes on from step {saved}, the newest saved")
    expect(
        whole.losses == {**before.losses, **after.losses}
        and before.losses == {step: whole.losses[step] for step in before.losses},
        f"all {STEPS} losses are those of the undisturbed run, bit for bit",
    )

    refused = run_training(killed, f"--steps={STEPS + RESHARDED_STEPS}", "--mesh=2x4")
    expect(
        refused.returncode == 1 and "MismatchError" in refused.output and not refused.losses,
        "another mesh than the saved one is refused",
    )
    moved = run_training(killed, f"--steps={STEPS + RESHARDED_STEPS}", "--mesh=2x4", "--reshard")
    expect(
        moved.returncode == 0 and min(moved.losses) == STEPS + 1,
        f"with --reshard the run goes on, on that mesh, for {RESHARDED_STEPS} steps",
    )

    runs = {"never stopped": calm, "killed, resumed, then on another mesh": killed}
    plot_losses(plot, {name: History(run / "losses.jsonl") for name, run in runs.items()})
    print(f"\nAll as it should be, in {time.monotonic() - started:.0f} s. Both losses: {plot}")
