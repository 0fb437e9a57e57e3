"""`assert_resumes` passes for a run that resumes, and says what is wrong with one that does not."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pytree_ckpt as pc
from pytree_ckpt.testing import assert_resumes

P = PartitionSpec
OPTIMIZER = optax.adam(1e-2)


def start(mesh: Mesh) -> dict[str, Any]:
    kernel = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    params = {"w": jax.device_put(kernel, NamedSharding(mesh, P("data", "model")))}
    return {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "rng": jax.device_put(jax.random.key(1), NamedSharding(mesh, P())),
        "step": 0,
        "data": pc.PerProcess({"position": 0}),
    }


def batches(count: int = 5) -> Iterator[np.ndarray]:
    for seed in range(count):
        yield np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32)


def loss_of(params: Any, batch: jax.Array, rng: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(rng, 0.9, batch.shape)
    return jnp.mean(jnp.where(kept, batch, 0) @ params["w"]) ** 2


@jax.jit
def update(params: Any, opt_state: Any, rng: jax.Array, batch: jax.Array) -> Any:
    rng, sub = jax.random.split(rng)
    loss, grads = jax.value_and_grad(loss_of)(params, batch, sub)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, rng, loss


donating = jax.jit(update, donate_argnums=(0, 1, 2))


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    params, opt_state, rng, loss = donating(
        state["params"], state["opt_state"], state["rng"], batch
    )
    position = state["data"].value["position"] + 1
    new = {"params": params, "opt_state": opt_state, "rng": rng, "step": state["step"] + 1}
    return {**new, "data": pc.PerProcess({"position": position})}, {"loss": loss}


def failure(*args: Any, **options: Any) -> list[str]:
    with pytest.raises(AssertionError) as error:
        assert_resumes(*args, **options)
    return str(error.value).splitlines()


def count(state: Any, batch: Any) -> Any:
    return {"x": state["x"] + batch}


def test_a_whole_training_state_resumes_to_the_bit(tmp_path: Path, mesh_4x2: Mesh) -> None:
    assert_resumes(train_step, start(mesh_4x2), batches(), tmp_path / "c", has_aux=True)
    assert pc.load(tmp_path / "c", partial=True)["step"] == 2


@pytest.mark.parametrize("save_after", [0, 4])
def test_it_resumes_from_any_step(tmp_path: Path, mesh_4x2: Mesh, save_after: int) -> None:
    assert_resumes(
        train_step,
        start(mesh_4x2),
        batches(),
        tmp_path / "c",
        has_aux=True,
        save_after=save_after,
    )


def test_it_resumes_on_another_mesh_within_a_tolerance(
    tmp_path: Path, mesh_4x2: Mesh, mesh_2x4: Mesh, mesh_8: Mesh
) -> None:
    assert_resumes(
        train_step, start(mesh_4x2), batches(), tmp_path / "a", mesh=mesh_2x4, has_aux=True,
        rtol=1e-4, atol=1e-6,
    )  # fmt: skip
    everywhere = NamedSharding(mesh_8, P())
    target = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
            if isinstance(x, jax.Array)
            else x
        ),
        start(mesh_4x2),
    )
    assert_resumes(
        train_step, start(mesh_4x2), batches(), tmp_path / "b", target=target, has_aux=True,
        rtol=1e-4, atol=1e-6,
    )  # fmt: skip


def test_what_a_mesh_changes_is_named_with_how_to_allow_it(
    tmp_path: Path, mesh_4x2: Mesh, mesh_2x4: Mesh
) -> None:
    def step_fn(state: Any, batch: Any) -> Any:
        rows = state["w"].sharding.mesh.shape["data"]
        return {"w": state["w"] + np.float32(rows * 2.0**-20)}

    state = {"w": jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh_4x2, P("data")))}
    found = failure(step_fn, state, [0, 0], tmp_path / "a", mesh=mesh_2x4)
    assert found[0] == ("the resumed run drifts in step 2 of 2, saved after step 1: 1 of 1 leaves")
    assert found[1].startswith("  w  16 of 16 elements differ, by up to 1.91e-06 (1.91e-06 of")
    assert "say with rtol= or atol= what is good enough" in found[2]
    assert_resumes(step_fn, state, [0, 0], tmp_path / "b", mesh=mesh_2x4, rtol=1e-5)
    found = failure(step_fn, state, [0, 0], tmp_path / "c", mesh=mesh_2x4, rtol=1e-7)
    assert "belongs in the state" in found[2]


def test_a_counter_outside_of_the_state_is_found(tmp_path: Path) -> None:
    calls = 0

    def step_fn(state: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        lr = 0.5**calls
        return {"a": state["a"] + 1, "w": state["w"].at[2].add(-lr * batch)}

    state = {"a": jnp.zeros(2), "w": jnp.ones(4)}
    found = failure(step_fn, state, [1.0, 1.0, 1.0, 1.0], tmp_path / "c")
    assert found[0] == "the resumed run drifts in step 3 of 4, saved after step 2: 1 of 2 leaves"
    assert found[1] == (
        "  w  1 of 4 elements differ, by up to 0.0625 (0.5 of the value): "
        "0.125 became 0.1875 at [2]"
    )
    assert "takes something from outside of its state and its batch (a counter," in found[2]


def test_random_numbers_from_outside_of_the_state_are_found_in_what_is_beside_it(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)

    def step_fn(state: Any, batch: Any) -> Any:
        return {"step": state["step"] + 1}, {"loss": rng.normal()}

    found = failure(step_fn, {"step": 0}, [0, 0], tmp_path / "c", has_aux=True)
    assert found[1].startswith("  aux/loss  1 of 1 elements differ, by up to")


def test_many_leaves_that_drift_are_counted(tmp_path: Path) -> None:
    calls = iter(range(100))

    def step_fn(state: Any, batch: Any) -> Any:
        return dict.fromkeys(state, next(calls))

    found = failure(step_fn, {f"n{at}": 0 for at in range(9)}, [0, 0], tmp_path / "c")
    assert found[0].endswith("9 of 9 leaves")
    assert found[1:7] == [*(f"  n{at}  1 became 2" for at in range(5)), "  and 4 more"]


def test_a_state_that_does_not_survive_being_rebuilt_is_found_at_the_load(tmp_path: Path) -> None:
    @jax.tree_util.register_pytree_node_class
    @dataclasses.dataclass
    class Rounded:
        w: Any

        def tree_flatten(self) -> Any:
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, aux: None, children: Any) -> "Rounded":
            (w,) = children
            return cls(w.round() if isinstance(w, np.ndarray) else w)

    state = Rounded(np.array([0.25, 3.0]))
    found = failure(lambda state, batch: state, state, [0], tmp_path / "c")
    assert found[0].startswith("what was loaded is not what was saved after step 0: 1 of 1 leaves")
    assert "0.25 became 0.0 at [0]" in found[1]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.float32([0.0]), np.float32([-0.0])),
        (float("nan"), 1.0),
        ("a", "b"),
        (1, True),
        (jax.random.key(0), jax.random.key(1)),
        (jnp.ones(2), jnp.ones(3)),
        (np.ones(2, np.float32), np.ones(2)),
        (pc.PerProcess(1), pc.PerProcess(2)),
        (np.int64(2**60), np.int64(2**60 + 1)),
        (jnp.ones(2, jnp.bfloat16), jnp.full(2, 1.0078125, jnp.bfloat16)),
    ],
    ids=["zeros", "nan", "str", "types", "keys", "shapes", "dtypes", "own", "int64", "bfloat16"],
)
def test_leaves_are_compared_to_the_bit(tmp_path: Path, before: Any, after: Any) -> None:
    runs = iter([before, after])
    found = failure(lambda state, batch: {"x": next(runs)}, {"x": 0}, [0], tmp_path / "c")
    assert found[1].startswith("  x  ")
    same = iter([before, before])
    assert_resumes(lambda state, batch: {"x": next(same)}, {"x": 0}, [0], tmp_path / "d")


def test_leaves_that_only_one_run_has_are_named(tmp_path: Path) -> None:
    runs = iter([{"x": 0, "y": 1}, {"x": 0}])
    found = failure(lambda state, batch: next(runs), {"x": 0}, [0], tmp_path / "c")
    assert found[0].endswith("only one of them has state/y")


def test_what_step_fn_returns_is_said_and_not_guessed(tmp_path: Path) -> None:
    def pair(state: Any, batch: Any) -> Any:
        return state, 1.0

    with pytest.raises(TypeError, match="pass has_aux=True"):
        assert_resumes(pair, {"x": 0}, [0], tmp_path / "a")
    with pytest.raises(TypeError, match="returned a dict, not"):
        assert_resumes(count, {"x": 0}, [0], tmp_path / "b", has_aux=True)

    with pytest.raises(TypeError, match="returned None for the state"):
        assert_resumes(lambda *_: None, {"x": 0}, [0], tmp_path / "d")
    with pytest.raises(TypeError, match="returned None for the state"):
        assert_resumes(lambda *_: (None, 1.0), {"x": 0}, [0], tmp_path / "e", has_aux=True)

    def swap(state: Any, batch: Any) -> Any:
        return state[1], state[0]

    assert_resumes(swap, (1, 2), [0, 0], tmp_path / "c")


@pytest.mark.parametrize(("number", "save_after"), [(0, None), (2, 2), (2, -1)])
def test_a_step_must_follow_the_save(tmp_path: Path, number: int, save_after: int | None) -> None:
    with pytest.raises(ValueError, match="no step after a save"):
        assert_resumes(count, {"x": 0}, [1] * number, tmp_path / "c", save_after=save_after)
    assert not (tmp_path / "c").exists()
