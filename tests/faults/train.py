"""`examples/train.py`, killed at random moments again and again, and held to a run that was not."""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytree_ckpt as pc
from tests.faults import children
from tests.faults.judge import Tally

TRAIN = Path(__file__).parents[2] / "examples" / "train.py"
KEEP = 2
STARTS_S = 120.0
"""Longer than a run takes to say that it has begun."""
LIVES_S = 1.5
"""A run is killed at most so long after it has begun."""
STEP = re.compile(r"^step (\d+)/\d+ .* (-?0x\S+)\n", re.MULTILINE)
BEGAN = re.compile(r"^(?:starting at|resumed from) step (\d+)\n", re.MULTILINE)


def why_not() -> str | None:
    """Why it cannot be tried here."""
    missing = [n for n in ("flax", "matplotlib", "optax", "rich") if find_spec(n) is None]
    return f"{', '.join(missing)} not installed" if missing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What a run printed: the step it began with, None if it did not come so far; the losses."""

    began: int | None
    losses: dict[int, str]
    errors: str


def campaign(*, kills: int, seed: int = 0) -> Tally:
    """Kill the run, look, start it again; then let it end, and compare every loss."""
    tally = Tally(points=kills)
    rng = random.Random(seed)
    folder = children.scratch()
    try:
        lives = [_killed(folder / "killed", rng, tally) for _ in range(kills)]
        last = max([1, *(step for life in lives for step in life.losses)])
        lives.append(_ended(folder / "killed", last, tally))
        whole = _ended(folder / "calm", last, tally)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if list(whole.losses) != list(range(1, last + 1)):
        tally.wrong("failed", f"the run that was not killed: {whole.errors or whole.losses}")
    for number, life in enumerate(lives):
        for step, loss in life.losses.items():
            if loss != whole.losses.get(step):
                tally.wrong("silent", f"run {number}, step {step}: {loss}")
    return tally


def _killed(run_dir: Path, rng: random.Random, tally: Tally) -> Life:
    """Start a run, and kill it at any moment after it began, or one time in ten before."""
    root = run_dir / "checkpoints"
    before = pc.steps(root)
    early = rng.random() < 0.1
    with _start(run_dir, 1_000_000) as process:
        if not early:
            _wait_until_it_began(process, run_dir / "stdout")
        time.sleep(rng.uniform(0, LIVES_S))
        process.kill()
        process.wait()
    life = _life(run_dir)
    if process.returncode != -9:
        tally.wrong("failed", f"ended by itself: {life.errors}")
    if life.began is not None and life.began != max(before, default=0):
        tally.wrong("lost", f"began at step {life.began}; {before} were there")
    after = pc.steps(root)
    if before and (not after or after[-1] < before[-1]):
        tally.wrong("lost", f"{before} were there, then {after}")
    if (held := len(list(root.glob("step_*/data-*")))) > KEEP:
        tally.wrong("failed", f"{held} data folders, at most {KEEP}")
    return life


def _ended(run_dir: Path, steps: int, tally: Tally) -> Life:
    """A run that is left to end."""
    with _start(run_dir, steps) as process:
        if process.wait() != 0:
            tally.wrong("failed", f"exit code {process.returncode}")
    return _life(run_dir)


def _start(run_dir: Path, steps: int) -> subprocess.Popen[bytes]:
    """A run as a user starts it, without the shim of the other campaigns."""
    run_dir.mkdir(exist_ok=True)
    paths = [str(Path(pc.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    kept = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "XLA_FLAGS")}
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # so that it begins sooner
    }
    arguments = [f"--run-dir={run_dir}", f"--steps={steps}", "--batch=8", "--save-every=2"]
    with open(run_dir / "stdout", "wb") as out, open(run_dir / "stderr", "wb") as err:
        return subprocess.Popen(
            [sys.executable, str(TRAIN), *arguments], env=kept | settings, stdout=out, stderr=err
        )


def _wait_until_it_began(process: subprocess.Popen[bytes], stdout: Path) -> None:
    until = time.monotonic() + STARTS_S
    while not BEGAN.search(stdout.read_text()) and time.monotonic() < until:
        if process.poll() is not None:
            return
        time.sleep(0.02)


def _life(run_dir: Path) -> Life:
    text = (run_dir / "stdout").read_text()
    began = BEGAN.search(text)
    return Life(
        began=int(began[1]) if began else None,
        losses={int(step): loss for step, loss in STEP.findall(text)},
        errors=(run_dir / "stderr").read_text()[-500:],
    )
