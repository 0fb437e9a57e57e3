"""States of the libraries that people train with: same classes, same treedef, same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pytree_ckpt as pc
from tests.bitwise import assert_same, bits_of, struct_of

P = PartitionSpec


def assert_same_without_target(path: Path, tree: Any) -> None:
    """Builtin containers with the same leaves in the same order."""
    loaded = pc.load(path)
    found, saved = jax.tree.leaves(loaded), jax.tree.leaves(tree)
    assert sorted(map(repr, map(bits_of, found))) == sorted(map(repr, map(bits_of, saved)))


def check(path: Path, tree: Any) -> None:
    """Save, and load into the tree itself, into structs, and without a target."""
    pc.save(path, tree)
    assert_same(pc.load(path, tree), tree)
    assert_same(pc.load(path, struct_of(tree)), tree)
    assert_same_without_target(path, tree)


def shard(tree: Any, mesh: Mesh) -> Any:
    """The arrays of a tree cut along their last dimension where that is possible."""

    def put(leaf: jax.Array) -> jax.Array:
        cut = leaf.ndim > 0 and leaf.shape[-1] % mesh.shape["model"] == 0
        spec = P(*(None,) * (leaf.ndim - 1), "model") if cut else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


PARAMS = {
    "dense": {"kernel": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8), "bias": np.ones(8)},
    "norm": {"scale": np.full(4, 0.5, np.float32)},
}


def params() -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)


def make_step(optimizer: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A step whose gradients depend on the parameters, so that it shows a difference in either."""
    optax = pytest.importorskip("optax")

    @jax.jit
    def step(weights: Any, state: Any) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda p: 2 * p + 1, weights)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return step


# --- optax ----------------------------------------------------------------------------------


def optimizers() -> dict[str, Callable[[], Any]]:
    optax = pytest.importorskip("optax")
    schedule = optax.cosine_decay_schedule(1e-2, 100)

    def labels(tree: Any) -> Any:
        return {k: "fast" if k == "dense" else "slow" for k in tree}

    return {
        "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
        "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
            learning_rate=schedule, weight_decay=1e-4
        ),
        "multi_transform": lambda: optax.multi_transform(
            {"fast": optax.adam(1e-2), "slow": optax.sgd(1e-3, momentum=0.9)}, labels
        ),
        "masked": lambda: optax.masked(optax.adam(1e-2), {"dense": True, "norm": False}),
        "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
        "adafactor": lambda: optax.adafactor(1e-3),
    }


@pytest.mark.parametrize(
    "name",
    ["chain", "inject_hyperparams", "multi_transform", "masked", "MultiSteps", "adafactor"],
)
def test_an_optimizer_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, mesh_4x2: Mesh, name: str
) -> None:
    optimizer = optimizers()[name]()
    init, step = jax.jit(optimizer.init), make_step(optimizer)
    start = shard(params(), mesh_4x2)
    weights, state = step(*step(start, init(start)))
    tree = {"params": weights, "opt": state}
    check(tmp_path / "ckpt", tree)

    abstract = jax.eval_shape(lambda start: {"params": start, "opt": init(start)}, start)
    assert jax.tree.structure(abstract) == jax.tree.structure(tree)
    resumed = pc.load(tmp_path / "ckpt", abstract)
    assert jax.tree.structure(resumed) == jax.tree.structure(tree)
    for now, then in zip(
        jax.tree.leaves(step(resumed["params"], resumed["opt"])),
        jax.tree.leaves(step(weights, state)),
        strict=True,
    ):
        assert np.asarray(now).tobytes() == np.asarray(then).tobytes()


def test_states_of_optax_come_back_in_their_classes(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    state = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params())
    pc.save(tmp_path / "ckpt", {"params": params(), "opt": state})
    loaded = pc.load(tmp_path / "ckpt", {"params": params(), "opt": state})["opt"]
    assert type(loaded) is tuple
    assert type(loaded[0]) is optax.EmptyState
    assert type(loaded[1][0]) is optax.ScaleByAdamState
    # The two can take each other's place in JAX, as the branches of a condition must.
    jax.lax.cond(True, lambda: loaded, lambda: state)

    plain = pc.load(tmp_path / "ckpt")["opt"]
    assert plain[0] == {}
    assert list(plain[1][0]) == ["count", "mu", "nu"]


def test_a_state_of_nothing_but_empty_nodes_survives(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    tree = {
        "opt": (optax.EmptyState(), optax.EmptyState()),
        "t": (),
        "d": {},
        "l": [],
        "block": {"empty": {}, "sib": jnp.ones(2)},
        "n": None,
        "identity": optax.identity().init(params()),
    }
    pc.save(tmp_path / "ckpt", tree)
    assert_same(pc.load(tmp_path / "ckpt", tree), tree)
    builtin = {**tree, "opt": ({}, {}), "identity": {}}
    assert_same(pc.load(tmp_path / "ckpt"), builtin)


def test_another_optimizer_is_refused_with_every_leaf_of_both(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    saved = {"params": params(), "opt": optax.adam(1e-3).init(params())}
    pc.save(tmp_path / "ckpt", saved)
    chained = optax.chain(optax.adam(1e-3), optax.scale(1.0)).init(params())
    with pytest.raises(pc.MismatchError) as error:
        pc.load(tmp_path / "ckpt", {"params": params(), "opt": chained})
    found = error.value.mismatches
    moments = [
        f"{m}/{p}" for m in ("mu", "nu") for p in ("dense/bias", "dense/kernel", "norm/scale")
    ]
    assert [m.path for m in found if m.kind == "missing"] == [
        f"opt/0/0/{leaf}" for leaf in ("count", *moments)
    ]
    assert [m.path for m in found if m.kind == "extra"] == [
        f"opt/0/{leaf}" for leaf in ("count", *moments)
    ]
    only = pc.load(tmp_path / "ckpt", {"params": params()}, partial=True)
    assert_same(only, {"params": saved["params"]})


# --- flax linen -----------------------------------------------------------------------------


def linen_state(seed: int = 0) -> Any:
    """A state whose static fields differ from one call to the next, so that treedefs do too."""
    linen = pytest.importorskip("flax.linen")
    optax = pytest.importorskip("optax")
    from flax.training import train_state

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(2)(linen.relu(linen.Dense(4)(x)))

    net = Net()
    variables = jax.jit(net.init)(jax.random.key(seed), jnp.ones((1, 3)))
    return train_state.TrainState.create(
        apply_fn=lambda *args: net.apply(*args), params=variables["params"], tx=optax.adam(1e-2)
    )


@jax.jit
def train(state: Any) -> Any:
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))


def test_a_train_state_loads_into_an_equal_one_with_another_treedef(tmp_path: Path) -> None:
    saved, target = linen_state(0), linen_state(1)
    saved = train(saved).replace(step=7)
    assert jax.tree.structure(saved) != jax.tree.structure(target)
    pc.save(tmp_path / "ckpt", saved)
    loaded = pc.load(tmp_path / "ckpt", target)
    assert jax.tree.structure(loaded) == jax.tree.structure(target)
    assert loaded.apply_fn is target.apply_fn
    assert loaded.tx is target.tx
    # Only what makes the treedefs differ is taken from the other.
    assert_same(loaded.replace(apply_fn=saved.apply_fn, tx=saved.tx), saved)


def test_the_step_of_a_train_state_may_be_an_int_or_an_array(tmp_path: Path) -> None:
    """It is an int when the state is made, and an array after the first jitted step."""
    fresh = linen_state()
    assert type(fresh.step) is int

    trained = train(fresh)
    assert isinstance(trained.step, jax.Array)

    pc.save(tmp_path / "trained", trained)
    resumed = pc.load(tmp_path / "trained", fresh)
    assert type(resumed.step) is int
    assert resumed.step == 1
    assert_same(resumed.params, trained.params)
    assert_same(pc.load(tmp_path / "trained", trained), trained)

    pc.save(tmp_path / "fresh", fresh.replace(step=5))
    resumed = pc.load(tmp_path / "fresh", trained)
    assert bits_of(resumed.step)[1:3] == bits_of(trained.step)[1:3]
    assert int(resumed.step) == 5
    assert int(train(resumed).step) == 6


def test_a_step_that_was_an_int_does_not_compile_the_step_again(tmp_path: Path) -> None:
    fresh = linen_state()
    compiled = []

    @jax.jit
    def train_and_count(state: Any) -> Any:
        compiled.append(1)
        return train(state)

    trained = train_and_count(train_and_count(fresh))
    before = len(compiled)
    pc.save(tmp_path / "ckpt", fresh)
    train_and_count(pc.load(tmp_path / "ckpt", trained))
    assert len(compiled) == before


def test_a_frozen_dict_and_a_dict_load_into_each_other(tmp_path: Path) -> None:
    frozen_dict = pytest.importorskip("flax.core.frozen_dict")
    plain = {"params": {"w": jnp.ones(2), "b": {"c": jnp.zeros(3)}}}
    frozen = frozen_dict.freeze(plain)
    check(tmp_path / "frozen", frozen)
    pc.save(tmp_path / "plain", plain)
    assert_same(pc.load(tmp_path / "frozen", plain), plain)
    assert_same(pc.load(tmp_path / "plain", frozen), frozen)
    assert_same(pc.load(tmp_path / "frozen"), plain)


def test_a_frozen_dict_without_state_and_a_dict_load_into_each_other(tmp_path: Path) -> None:
    """A module without batch statistics has an empty collection."""
    frozen_dict = pytest.importorskip("flax.core.frozen_dict")
    plain = {"params": {"w": jnp.ones(2)}, "state": {}}
    frozen = {k: frozen_dict.freeze(v) for k, v in plain.items()}
    pc.save(tmp_path / "frozen", frozen)
    pc.save(tmp_path / "plain", plain)
    assert_same(pc.load(tmp_path / "frozen", plain), plain)
    assert_same(pc.load(tmp_path / "plain", frozen), frozen)


def test_a_flax_dataclass_keeps_what_is_no_node(tmp_path: Path) -> None:
    flax = pytest.importorskip("flax")

    @flax.struct.dataclass
    class Metrics:
        loss: Any
        parts: Any
        name: str = flax.struct.field(pytree_node=False, default="")

    tree = Metrics(jnp.float32(0.5), (jnp.ones(2), {"a": 3}), name="train")
    check(tmp_path / "ckpt", tree)
    assert pc.load(tmp_path / "ckpt", tree.replace(name="eval")).name == "eval"


# --- flax nnx -------------------------------------------------------------------------------


def nnx_model(seed: int = 0) -> Any:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.second = nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(self.dropout(jax.nn.relu(self.norm(self.first(x)))))

    return Net(nnx.Rngs(seed))


def test_an_nnx_state_comes_back_through_an_abstract_one(tmp_path: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx_model()
    x = jnp.arange(8.0).reshape(2, 4)
    model(x)  # The counters of the random streams and the running means move on.
    graph, state = nnx.split(model)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
    assert {"key<fry>", "uint32", "float32"} <= kinds
    pc.save(tmp_path / "ckpt", state)
    assert_same(pc.load(tmp_path / "ckpt", state), state)
    assert_same_without_target(tmp_path / "ckpt", state)

    abstract = nnx.eval_shape(lambda: nnx_model(1))
    abstract_graph, abstract_state = nnx.split(abstract)
    loaded = pc.load(tmp_path / "ckpt", abstract_state)
    assert_same(loaded, state)
    masks = [nnx.merge(g, s)(x) for g, s in ((graph, state), (abstract_graph, loaded))]
    np.testing.assert_array_equal(*masks, strict=True)
    # The mask is one that another seed would not have given.
    assert not np.array_equal(masks[0], nnx.merge(*nnx.split(nnx_model(1)))(x))


def test_an_nnx_state_comes_back_as_a_plain_dict_too(tmp_path: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")
    _, state = nnx.split(nnx_model())
    pure = nnx.to_pure_dict(state)
    check(tmp_path / "ckpt", pure)
    nnx.replace_by_pure_dict(state, pc.load(tmp_path / "ckpt", pure))


def test_an_nnx_optimizer_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")
    x = jnp.arange(8.0).reshape(2, 4)

    def make(seed: int) -> tuple[Any, Any]:
        model = nnx_model(seed)
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model: Any, optimizer: Any) -> None:
        grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model)
        optimizer.update(model, grads)

    model, optimizer = make(0)
    train(model, optimizer)
    state = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    check(tmp_path / "ckpt", state)

    other, other_optimizer = make(1)
    target = {"model": nnx.state(other), "optimizer": nnx.state(other_optimizer)}
    loaded = pc.load(tmp_path / "ckpt", target)
    nnx.update(other, loaded["model"])
    nnx.update(other_optimizer, loaded["optimizer"])
    train(model, optimizer)
    train(other, other_optimizer)
    assert_same(nnx.state(other), nnx.state(model))
    assert_same(nnx.state(other_optimizer), nnx.state(optimizer))


# --- equinox --------------------------------------------------------------------------------


def test_an_equinox_module_comes_back_without_its_functions(tmp_path: Path, mesh_4x2: Mesh) -> None:
    eqx = pytest.importorskip("equinox")
    model, other = (
        eqx.nn.MLP(4, 2, width_size=8, depth=2, key=jax.random.key(seed)) for seed in (0, 1)
    )
    with pytest.raises(pc.UnsupportedLeafError, match=r"eqx\.filter\(model, eqx\.is_array\)") as e:
        pc.save(tmp_path / "ckpt", {"model": model})
    assert {path for path, _ in e.value.leaves} == {"model/activation", "model/final_activation"}

    arrays, static = eqx.partition(model, eqx.is_array)
    check(tmp_path / "ckpt", arrays)
    x = jnp.arange(4.0)
    loaded = pc.load(tmp_path / "ckpt", eqx.filter(other, eqx.is_array))
    np.testing.assert_array_equal(eqx.combine(loaded, static)(x), model(x), strict=True)
    assert isinstance(loaded, eqx.nn.MLP)

    sharded = shard(arrays, mesh_4x2)
    check(tmp_path / "sharded", sharded)
    assert_same(
        pc.load(tmp_path / "sharded", arrays, reshard=True),
        arrays,
    )


def test_an_equinox_model_with_state_comes_back_through_an_abstract_one(tmp_path: Path) -> None:
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        norm: Any
        layer: Any
        scale: float
        name: str = eqx.field(static=True)

        def __init__(self, key: jax.Array) -> None:
            self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
            self.layer = eqx.nn.Linear(4, 2, key=key)
            self.scale = 0.5
            self.name = "net"

        def __call__(self, x: jax.Array, state: Any) -> Any:
            x, state = self.norm(x, state)
            return self.scale * self.layer(x), state

    def make(seed: int) -> Any:
        return eqx.nn.make_with_state(Net)(jax.random.key(seed))

    model, state = make(0)
    x = jnp.arange(12.0).reshape(3, 4)
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    _, state = run(x, state)
    tree = eqx.filter((model, state), eqx.is_array)
    check(tmp_path / "ckpt", tree)

    abstract = eqx.filter_eval_shape(make, 1)
    wanted = eqx.filter(abstract, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    loaded = eqx.combine(pc.load(tmp_path / "ckpt", wanted), make(1))
    again = jax.vmap(loaded[0], axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    for now, then in zip(
        jax.tree.leaves(again(x, loaded[1])), jax.tree.leaves(run(x, state)), strict=True
    ):
        assert bits_of(now) == bits_of(then)


# --- penzai ---------------------------------------------------------------------------------


def test_penzai_parameters_come_back_with_their_axes(tmp_path: Path, mesh_4x2: Mesh) -> None:
    pz = pytest.importorskip("penzai.pz")
    mlp = pytest.importorskip("penzai.models.simple_mlp")
    model, other = (
        mlp.MLP.from_config(name="mlp", init_base_rng=jax.random.key(s), feature_sizes=[4, 8, 2])
        for s in (0, 1)
    )
    with pytest.raises(pc.UnsupportedLeafError) as error:
        pc.save(tmp_path / "ckpt", model)
    assert len(error.value.leaves) == 4

    frozen = pz.freeze_params(model)
    sharded = shard(frozen, mesh_4x2)
    for name, tree in (("frozen", frozen), ("sharded", sharded)):
        check(tmp_path / name, tree)
    x = pz.nx.wrap(jnp.arange(4.0), "features")
    loaded = pc.load(tmp_path / "frozen", pz.freeze_params(other))
    assert jax.tree.structure(loaded) == jax.tree.structure(frozen)
    np.testing.assert_array_equal(
        loaded(x).unwrap("features"), frozen(x).unwrap("features"), strict=True
    )

    unbound, values = pz.unbind_params(model, freeze=True)
    check(tmp_path / "values", values)
    loaded_values = pc.load(tmp_path / "values", values)
    rebound = pz.bind_variables(unbound, loaded_values, unfreeze_as_copy=True)
    assert_same(pz.freeze_params(rebound), frozen)
