"""`examples/train.py`, run as its users run it: in processes of its own."""

from __future__ import annotations

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
    return subprocess.run(
        [sys.executable, TRAIN, f"--run-dir={run_dir}", "--batch=8", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def losses(run: subprocess.CompletedProcess[str]) -> dict[int, str]:
    """The steps that a run printed, and every bit of their losses."""
    found = re.findall(r"^step (\d+)/\d+ .* (0x\S+)$", run.stdout, flags=re.MULTILINE)
    return {int(step): loss for step, loss in found}


def test_a_killed_run_resumes_with_the_losses_of_one_that_was_never_stopped(
    tmp_path: Path,
) -> None:
    whole = train(tmp_path / "whole", "--steps=8", "--save-every=3")
    assert whole.returncode == 0, whole.stderr
    assert list(losses(whole)) == list(range(1, 9))
    assert len(set(losses(whole).values())) == 8

    killed = train(tmp_path / "killed", "--steps=8", "--save-every=3", "--kill-at=5")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert pc.steps(tmp_path / "killed" / "checkpoints") == [3]
    resumed = train(tmp_path / "killed", "--steps=8", "--save-every=3")
    assert resumed.returncode == 0, resumed.stderr

    assert list(losses(killed)) == [1, 2, 3, 4, 5]
    assert list(losses(resumed)) == [4, 5, 6, 7, 8]
    assert losses(killed).items() <= losses(whole).items()
    assert losses(resumed).items() <= losses(whole).items()

    kept = (tmp_path / "killed" / "losses.jsonl").read_text().splitlines()
    undisturbed = (tmp_path / "whole" / "losses.jsonl").read_text().splitlines()
    assert [line for line in kept if "resumed" not in line] == undisturbed
    assert kept.index('{"step": 3, "resumed": true}') == 3
    assert (tmp_path / "killed" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_another_mesh_is_refused_until_resharding_is_asked_for(tmp_path: Path) -> None:
    killed = train(tmp_path, "--save-every=1", "--kill-at=2")
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    refused = train(tmp_path, "--steps=4", "--mesh=2x4")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("MismatchError: ")
    assert "mesh(data=4, model=2)" in refused.stderr
    assert "mesh(data=2, model=4)" in refused.stderr
    assert "reshard=True" in refused.stderr
    assert "Traceback" not in refused.stderr

    moved = train(tmp_path, "--steps=4", "--mesh=2x4", "--reshard")
    assert moved.returncode == 0, moved.stderr
    assert "resumed from step 1" in moved.stdout
    assert list(losses(moved)) == [2, 3, 4]
    # The same sums in another order: close, and no more than that is promised.
    before, after = (float.fromhex(losses(run)[2]) for run in (killed, moved))
    assert after == pytest.approx(before, rel=1e-3)
