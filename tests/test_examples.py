"""Each small example runs, and its resumed run is the one that was never stopped."""

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import pytree_ckpt as pc

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "with_nnx": ("flax", "optax"),
    "with_linen": ("flax", "optax"),
    "with_equinox": ("equinox", "optax"),
    "with_grain": ("grain", "optax"),
}


def test_every_small_example_is_here() -> None:
    assert sorted(NEEDS) == sorted(path.stem for path in EXAMPLES.glob("with_*.py"))


# The oldest flax and equinox that are supported use what JAX 0.8 deprecates.
@pytest.mark.filterwarnings("ignore:jax\\.(array_ref|ArrayRef) is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:jax.interpreters.batching.NotMapped:DeprecationWarning")
@pytest.mark.parametrize("name", NEEDS)
def test_a_resumed_run_of_an_example_equals_one_that_was_never_stopped(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in NEEDS[name]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert capsys.readouterr().out.endswith("bit for bit\n")


def test_a_cluster_that_loses_a_process_goes_on_with_as_many_with_one_and_with_four(
    tmp_path: Path,
) -> None:
    """The demo holds its losses against those of a run that loses nothing."""
    if find_spec("optax") is None:
        pytest.skip("optax is not installed")
    # Processes of its own do not see how pytest found the library.
    paths = [str(Path(pc.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "multihost.py", "--demo", f"--run-dir={tmp_path}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    logs = [log.read_text() for log in tmp_path.glob("*/process-*.log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    assert done.stdout.count("bit for bit") == 1
    assert done.stdout.count("within 1e-05 of it") == 2
