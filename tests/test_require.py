"""Whether a run can resume from a checkpoint is in its manifest."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytree_ckpt as pc

PARAMS = {"dense": {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}}


def full(optimizer: Any = optax.adam(1e-3)) -> dict[str, Any]:  # noqa: B008 - never changed
    return {
        "params": PARAMS,
        "opt_state": optimizer.init(PARAMS),
        "rng": jax.random.key(0),
        "step": 7,
        "data": pc.PerProcess({"position": 3}),
    }


RESUME: dict[str, Any] = dict.fromkeys(("params", "opt_state", "rng", "step", "data"), True)


def lines_of(checkpoint: Any, **parts: Any) -> list[str]:
    with pytest.raises(pc.MismatchError) as error:
        pc.require(checkpoint, **parts)
    assert all(mismatch.kind == "missing" for mismatch in error.value.mismatches)
    return str(error.value).splitlines()


def test_a_whole_state_can_resume(tmp_path: Path) -> None:
    manifest = pc.save(tmp_path / "c", full())
    assert pc.require(tmp_path / "c", **RESUME) == manifest
    assert pc.require(manifest, **RESUME) is manifest


def test_weights_alone_say_that_no_run_can_resume_from_them(tmp_path: Path) -> None:
    pc.save(tmp_path / "c", {"params": PARAMS})
    pc.require(tmp_path / "c", params=True)
    assert lines_of(tmp_path / "c", **RESUME) == [
        f"{tmp_path / 'c'} lacks 4 of 5 required parts",
        "  opt_state  nothing matches 'opt_state'",
        "  rng  nothing matches 'rng'",
        "  step  nothing matches 'step'",
        "  data  nothing matches 'data'",
        "It holds nothing but params: load with partial=True takes that, for inference or to "
        "start from, but no run can resume from it.",
    ]


def test_what_is_missing_comes_with_what_is_nearest(tmp_path: Path) -> None:
    state = full()
    manifest = pc.save(
        tmp_path / "c",
        {"train": {"opt_state": state["opt_state"]}, "params": PARAMS, "rngs": state["rng"]},
    )
    assert lines_of(manifest, params=True, opt_state=True, rng=True)[1:] == [
        "  opt_state  nothing matches 'opt_state' (nearest: train/opt_state)",
        "  rng  nothing matches 'rng' (nearest: rngs)",
        "It has params; load with partial=True takes what a target asks for.",
    ]


def test_parts_may_lie_anywhere(tmp_path: Path) -> None:
    manifest = pc.save(tmp_path / "c", {"a/b": {"1": 5}, "model": [PARAMS, PARAMS]})
    pc.require(manifest, ema="model/1", params="model/0/**", step="a%2Fb/'1'")
    pc.require(manifest, params=["model/*/dense/w", "model/*/dense/b"])
    found = lines_of(manifest, params=["model/*/dense/w", "model/*/dense/c"], step="a/b/1")
    assert found[0] == "the checkpoint lacks 2 of 2 required parts"
    assert found[1].startswith("  params  nothing matches 'model/*/dense/c' (nearest: model/")
    assert found[2].startswith("  step  nothing matches 'a/b/1'")


def test_an_optimizer_without_leaves_is_there_and_none_is_not(tmp_path: Path) -> None:
    manifest = pc.save(tmp_path / "c", {**full(optax.sgd(0.1)), "rng": None})
    pc.require(manifest, opt_state=True, rng=False)
    assert lines_of(manifest, rng=True)[1] == "  rng  nothing matches 'rng': rng is None"


@pytest.mark.parametrize("parts", [{}, {"rng": False}, {"rng": 3}, {"rng": []}, {"rng": "a//b"}])
def test_a_request_that_asks_for_nothing_is_refused(tmp_path: Path, parts: Any) -> None:
    manifest = pc.save(tmp_path / "c", {"w": np.ones(2)})
    with pytest.raises(ValueError, match=r"required|rng|pattern") as error:
        pc.require(manifest, **parts)
    assert not isinstance(error.value, pc.CheckpointError)


def test_neither_jax_nor_tensorstore_is_needed(tmp_path: Path) -> None:
    pc.save(tmp_path / "c", full())
    code = """
import sys, pytree_ckpt as pc
pc.require(sys.argv[1], params=True, opt_state=True)
assert not {"jax", "tensorstore"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
