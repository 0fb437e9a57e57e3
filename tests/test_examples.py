"""Each small example runs, and its resumed run is the one that was never stopped."""

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

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
