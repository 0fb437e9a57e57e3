"""The demo of `multihost.py`: processes on this machine in the place of hosts."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytree_ckpt as pc

DEVICES = 2  # of each process: as a host has them, so that fewer hosts are fewer devices
STEPS, LOSE_AT = 16, 6  # there is a save every 4 steps
RESTARTS = ((2, 8), (1, 12), (4, STEPS))  # processes, and the step to stop at
TOLERANCE = 1e-5  # of a loss on more or fewer devices: the same sums, in another order
STEP_LINE = re.compile(r"^step (\d+) loss \S+ (\S+)$", re.MULTILINE)

Losses = dict[int, float]


def demo(run_dir: Path) -> None:
    """Lose a process, go on with as many, with one and with four; compare with a calm run."""
    for name in ("calm", "lost"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    calm, statuses = run(2, run_dir / "calm", f"--steps={STEPS}")
    check(statuses == [0, 0] and list(calm) == list(range(1, STEPS + 1)), "a run of two processes")

    lost, statuses = run(2, run_dir / "lost", f"--steps={STEPS}", f"--lose-at={LOSE_AT}")
    newest = pc.latest_step(run_dir / "lost" / "checkpoints")
    check(
        statuses[1] == -signal.SIGKILL and newest == 4, f"process 1 is lost, step {newest} is not"
    )
    check(lost.items() <= calm.items(), "until then the losses are those of the calm run")

    before = 2
    for count, steps in RESTARTS:
        reshard = ["--reshard"] if count != before else []
        losses, statuses = run(count, run_dir / "lost", f"--steps={steps}", *reshard)
        whole = list(losses) == list(range(newest + 1, steps + 1)) and set(statuses) == {0}
        check(whole, f"from step {newest} to {steps} with {count}")
        worst = max(abs(losses[step] / calm[step] - 1) for step in losses)
        if count == 2:
            check(worst == 0, "the losses are those of the calm run, bit for bit")
        else:
            check(worst < TOLERANCE, f"the losses are within {TOLERANCE:g} of it: {worst:.1e}")
        before, newest = count, steps


def run(count: int, run_dir: Path, *arguments: str) -> tuple[Losses, list[int]]:
    """Start `count` processes, as a scheduler does; the losses by step, and the exit statuses.

    The first that fails ends the others, as with `srun --kill-on-bad-exit` or a JobSet.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    print(f"\n{count} x python examples/multihost.py --run-dir={run_dir}", *arguments, flush=True)
    script = Path(__file__).with_name("multihost.py")
    options = [f"--run-dir={run_dir}", f"--cpu-devices={DEVICES}", *arguments]
    options += [f"--coordinator={address}", f"--processes={count}"]
    run_dir.mkdir(parents=True, exist_ok=True)
    logs = [run_dir / f"process-{index}.log" for index in range(count)]
    members: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(count) as pool:
        try:
            for index, log in enumerate(logs):
                command = [sys.executable, str(script), *options, f"--process={index}"]
                with log.open("wb") as out:
                    members.append(subprocess.Popen(command, stdout=out, stderr=out))
            for ended in as_completed([pool.submit(member.wait) for member in members]):
                if ended.result():
                    break
        finally:
            for member in members:
                member.kill()
    found = STEP_LINE.findall(logs[0].read_text())
    return {int(n): float.fromhex(loss) for n, loss in found}, [m.wait() for m in members]


def check(holds: bool, what: str) -> None:
    """Show what holds, or end."""
    if not holds:
        raise SystemExit(f"multihost.py: this does not hold: {what}")
    print(f"  {what}", flush=True)
