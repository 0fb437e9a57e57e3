"""`examples/train.py`, run as its users run it: in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import pytree_ckpt as pc

pytestmark = pytest.mark.skipif(
    not all(find_spec(name) for name in ("flax", "matplotlib", "optax", "rich")),
    reason="the dependencies of the examples are not installed",
)

TRAIN = Path(__file__).parents[1] / "examples" / "train.py"


def train(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A process of its own does not see how pytest found the library.
    library = str(Path(pc.__file__).parents[1])
    paths = [library, *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # a few steps do not repay a slow compilation
    }
    return subprocess.run(
        [sys.executable, TRAIN, f"--run-dir={run_dir}", "--batch=8", *arguments],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=240,
    )


def losses(run: subprocess.CompletedProcess[str]) -> dict[int, str]:
    """The steps that a run printed, and every bit of their losses."""
    found = re.findall(r"^step (\d+)/\d+ .* (0x\S+)$", run.stdout, flags=re.MULTILINE)
    return {int(step): loss for step, loss in found}


def test_a_killed_run_loses_nothing_and_goes_on_elsewhere_only_when_asked(tmp_path: Path) -> None:
    """One test, because each run takes seconds to start, and goes on from the one before."""
    calm, run_dir = tmp_path / "calm", tmp_path / "killed"
    whole = train(calm, "--steps=9", "--save-every=3")
    assert whole.returncode == 0, whole.stderr
    assert list(losses(whole)) == list(range(1, 10))
    assert len(set(losses(whole).values())) == 9

    # A killed run goes on from its checkpoint, with the losses of one that was never stopped.
    killed = train(run_dir, "--steps=7", "--save-every=3", "--kill-at=5")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert pc.steps(run_dir / "checkpoints") == [3]
    resumed = train(run_dir, "--steps=7", "--save-every=3")
    assert resumed.returncode == 0, resumed.stderr
    assert list(losses(killed)) == [1, 2, 3, 4, 5]
    assert list(losses(resumed)) == [4, 5, 6, 7]
    assert losses(killed).items() <= losses(whole).items()
    assert losses(resumed).items() <= losses(whole).items()
    assert pc.steps(run_dir / "checkpoints") == [6, 7]

    # Another mesh is refused, in the library's words.
    refused = train(run_dir, "--steps=9", "--mesh=2x4")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("MismatchError: ")
    assert "mesh(data=4, model=2)" in refused.stderr
    assert "mesh(data=2, model=4)" in refused.stderr
    assert "reshard=True" in refused.stderr
    assert "Traceback" not in refused.stderr

    # It is used when it is asked for. The sums are the same, in another order.
    moved = train(run_dir, "--steps=9", "--mesh=2x4", "--reshard")
    assert moved.returncode == 0, moved.stderr
    assert list(losses(moved)) == [8, 9]
    for step, loss in losses(moved).items():
        expected = float.fromhex(losses(whole)[step])
        assert float.fromhex(loss) == pytest.approx(expected, rel=1e-3)

    # The history that the curve is drawn from is whole, and knows where the run was resumed.
    history = [json.loads(line) for line in (run_dir / "losses.jsonl").read_text().splitlines()]
    kept = {item["step"]: item["loss"].hex() for item in history if "loss" in item}
    assert kept == {**losses(killed), **losses(resumed), **losses(moved)}
    assert [item["step"] for item in history if "resumed" in item] == [3, 7]
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
