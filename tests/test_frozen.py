"""Checkpoints of format version 1 that were written once stay readable for good."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import pytree_ckpt as pc
from tests import stranger

DATA = Path(__file__).parent / "data"
FROZEN = ["v1_raw", "v1_zstd"]


def expected(name: str) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("make_v1", DATA / "make_v1.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    state = module.expected()
    return state if name == "v1_zstd" else {k: v for k, v in state.items() if k != "large"}


def as_bytes(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return ("key", str(jax.random.key_impl(leaf)), as_bytes(jax.random.key_data(leaf)))
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        array = np.asarray(leaf)
        return (str(array.dtype), array.shape, array.tobytes())
    return (type(leaf).__name__, repr(leaf))


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_checkpoint_loads_into_its_state(name: str) -> None:
    state = expected(name)
    loaded = pc.load(DATA / name, state)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for (path, want), got in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(loaded), strict=True
    ):
        assert as_bytes(got) == as_bytes(want), path
        if isinstance(want, jax.Array):
            assert got.sharding == want.sharding, path


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_checkpoint_loads_without_a_target(name: str) -> None:
    state, loaded = expected(name), pc.load(DATA / name)
    assert loaded["opt"][0] == {"mu": loaded["opt"][0]["mu"], "nu": loaded["opt"][0]["nu"]}
    assert loaded["opt"][1:] == ((), [], None, {})
    assert list(loaded["layers"]) == [-1, 0, 7]
    for want, got in zip(jax.tree.leaves(state), jax.tree.leaves(loaded), strict=True):
        assert as_bytes(got) == as_bytes(want)


@pytest.mark.parametrize("name", FROZEN)
def test_a_reader_written_from_the_format_page_reads_the_same(name: str) -> None:
    """`stranger.py` knows docs/format.md and nothing of this package."""
    if name == "v1_zstd":
        pytest.importorskip("xxhash")
    found = stranger.read(DATA / name)
    with pc.open(DATA / name) as checkpoint:
        assert len(found) == len(checkpoint.keys())
        for (path, got), key in zip(found, checkpoint.keys(), strict=True):
            want = checkpoint[key]
            if isinstance(want, pc.StoredArray):
                want = np.asarray(want)
                assert got.dtype.itemsize == want.dtype.itemsize, path
                assert (got.shape, got.tobytes()) == (want.shape, want.tobytes()), path
            else:
                assert (type(got), repr(got)) == (type(want), repr(want)), path
