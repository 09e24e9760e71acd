"""Recipes from public reports: leaves that are not trained, and numbers that are too narrow."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

import eqtrain as et

ONES = {"x": np.ones(4, np.float32)}


def make_program(loss: Any, optimizer: Any, *before: Any, after: Any = (), **options: Any) -> Any:
    return et.pipe(loss, *before, et.update(optimizer, **options), *after, et.donate)


def run(program: Any, model: Any, steps: int, batch: Any = ONES) -> tuple[et.TrainState, Any]:
    ts = program.init(lambda key: jax.tree.map(jnp.asarray, model), key=jax.random.key(0))
    metrics = None
    for _ in range(steps):
        ts, metrics = program(ts, batch)
    return ts, et.fetch(metrics)


def on_mesh() -> Any:
    return et.shard(et.mesh(data=2), batch=P("data"))


# Case 30: functions, integers, keys and None among the leaves.


class Mixed(eqx.Module):
    mlp: eqx.nn.MLP  # whose activation is a leaf that is a function
    count: Int[Array, ""]
    key: Shaped[Array, ""]
    nothing: None
    flags: Shaped[Array, "2"]

    def __init__(self, key: Any):
        self.mlp = eqx.nn.MLP(3, 2, width_size=4, depth=1, key=key)
        self.count = jnp.asarray(7)
        self.key = jax.random.key(3)
        self.nothing = None
        self.flags = jnp.array([True, False])


def regress(model: Mixed, state: Any, batch: Any, key: Any) -> Any:
    out = jax.vmap(model.mlp)(batch["x"]) * model.count.astype(jnp.float32)
    return et.mean((out - batch["y"]) ** 2), state, {}


@pytest.mark.parametrize("name", ["adam", "adamw", "adafactor"])
@pytest.mark.parametrize(
    "before", [(), (et.accumulate(2),), (et.accumulate(2), on_mesh())], ids=["plain", "cut", "mesh"]
)
def test_leaves_of_any_kind_are_carried_along(name, before, getkey):
    batch = {"x": np.asarray(jax.random.normal(getkey(), (4, 3))), "y": np.ones((4, 2), np.float32)}
    program = make_program(
        regress, getattr(optax, name)(0.1), *before, after=(et.ema(0.5), et.guard)
    )
    first = Mixed(jax.random.key(1))
    ts = program.init(lambda key: Mixed(jax.random.key(1)), key=jax.random.key(0))
    for _ in range(3):
        ts, _ = program(ts, batch)
    model = ts.model
    assert isinstance(model, Mixed)
    assert model.count == 7 and model.count.dtype == jnp.int32
    assert model.key == first.key and model.key.dtype == first.key.dtype
    assert model.nothing is None and model.flags.tolist() == [True, False]
    assert model.mlp.activation is first.mlp.activation
    for new, old in zip(model.mlp.layers, first.mlp.layers, strict=True):
        assert not np.array_equal(new.weight, old.weight)
    assert isinstance(ts.ema, Mixed) and ts.ema.count == 7 and ts.ema.key == first.key
    assert ts.ema.mlp.activation is first.mlp.activation
    # Moments belong to the four floating leaves. Nothing in the optimizer holds a key.
    leaves = jax.tree.leaves(ts.opt_state)
    assert not any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves)
    if name != "adafactor":
        assert len(jax.tree.leaves(optax.tree_utils.tree_get(ts.opt_state, "mu"))) == 4


def test_moments_of_every_array_are_told_apart():
    arrays = eqx.filter(Mixed(jax.random.key(1)), eqx.is_array)
    optimizer: Any = optax.adam(0.1)
    assert len(jax.tree.leaves(optimizer.init(arrays)[0].mu)) == 7


# Case 32: what is frozen.


def two_leaves(model: Any, state: Any, batch: Any, key: Any) -> Any:
    """Gradients `slope`: 1 and 1, or 3 and 4."""
    return et.mean((3 * model["a"] + 4 * model["b"]) * batch["x"]), state, {}


def even(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean((model["a"] + model["b"]) * batch["x"]), state, {}


@pytest.mark.parametrize(
    "trainable",
    [et.matching("a"), {"a": True, "b": False}, lambda model: {"a": True, "b": False}],
    ids=["matching", "tree", "function"],
)
@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), optax.adamw(0.1, weight_decay=0.5), optax.lion(0.1, weight_decay=0.5)],
    ids=["sgd", "adamw", "lion"],
)
def test_frozen_leaf_is_left_to_the_bit(trainable, optimizer):
    model = {"a": 0.1, "b": 0.7}
    program = make_program(
        even, optimizer, et.accumulate(2), after=(et.ema(0.5),), trainable=trainable
    )
    ts, _ = run(program, model, 3)
    assert ts.model["b"] == np.float32(0.7)
    assert ts.model["a"] < 0.1
    # No moments, no average: nothing of the optimizer belongs to `b`.
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(ts)]
    assert [name for name in names if "b" in name.split(".")[-1]] == [".model.b"]


@pytest.mark.parametrize("before", [(), (on_mesh(),)], ids=["alone", "mesh"])
def test_frozen_gradient_is_not_in_the_norm(before):
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    model = {"a": 0.0, "b": 0.5}
    program = make_program(two_leaves, clip, *before, trainable=et.matching("a"))
    ts, metrics = run(program, model, 1)
    assert ts.model["a"] == -1.0 and ts.model["b"] == 0.5
    assert metrics["grad_norm"] == 3.0


def test_masked_and_zeroed_gradients_are_told_apart():
    grads, params = {"a": jnp.float32(3), "b": jnp.float32(4)}, {"a": 0.0, "b": 0.0}
    masked: Any = optax.masked(optax.sgd(0.1), {"a": True, "b": False})
    updates, _ = masked.update({"a": 1.0, "b": 1.0}, masked.init(params))
    assert updates["b"] == 1.0  # the raw gradient, which is then added
    clip: Any = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.sgd(1.0),
        optax.masked(optax.set_to_zero(), {"a": False, "b": True}),
    )
    updates, _ = clip.update(grads, clip.init(params))
    assert float(updates["a"]) == pytest.approx(-0.6, rel=1e-6)


# Case 33: what decays.


class Scaled(eqx.Module):
    """A layer with norm scales stacked for three layers; callable, as layers are."""

    weight: Float[Array, "2 2"]
    bias: Float[Array, "2"]
    norm_weight: Float[Array, "3 2"]

    def __init__(self):
        self.weight, self.bias = jnp.ones((2, 2)), jnp.ones(2)
        self.norm_weight = jnp.ones((3, 2))

    def __call__(self, x: Any) -> Any:
        raise AssertionError("A pytree of booleans was called as if it were a function.")


DECAYS = et.matching("weight", but="norm")


def nothing(model: Scaled, state: Any, batch: Any, key: Any) -> Any:
    """Gradients of exactly zero."""
    zero = sum((0 * leaf).sum() for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    return et.mean(zero * batch["x"]), state, {}


def decayed(mask: Any) -> Any:
    return optax.chain(optax.add_decayed_weights(0.1, mask), optax.sgd(0.1))


def init_scaled(key: Any) -> Scaled:
    return Scaled()


@pytest.mark.parametrize(
    "make", [decayed, lambda mask: optax.adamw(0.1, weight_decay=0.1, mask=mask)]
)
@pytest.mark.parametrize("mask", [DECAYS, DECAYS(Scaled())], ids=["function", "callable_module"])
def test_only_what_is_named_decays(make, mask):
    program = make_program(nothing, make(mask))
    ts = program.init(init_scaled, key=jax.random.key(0))
    ts, _ = program(ts, ONES)
    np.testing.assert_allclose(ts.model.weight, np.full((2, 2), 0.99), rtol=1e-7)
    assert ts.model.bias.tolist() == [1, 1]
    assert ts.model.norm_weight.tolist() == [[1, 1]] * 3


def test_decay_by_number_of_dims_is_told_apart():
    program = make_program(
        nothing, decayed(lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    )
    ts = program.init(init_scaled, key=jax.random.key(0))
    ts, _ = program(ts, ONES)
    np.testing.assert_allclose(ts.model.norm_weight, np.full((3, 2), 0.99), rtol=1e-7)


def test_trainable_may_be_a_module_that_is_callable():
    def pull(model: Scaled, state: Any, batch: Any, key: Any) -> Any:
        total = sum(leaf.sum() for leaf in jax.tree.leaves(model))
        return et.mean(total * batch["x"]), state, {}

    program = make_program(pull, optax.sgd(1.0), trainable=DECAYS(Scaled()))
    ts = program.init(init_scaled, key=jax.random.key(0))
    ts, _ = program(ts, ONES)
    assert ts.model.weight.tolist() == [[0, 0], [0, 0]]
    assert ts.model.bias.tolist() == [1, 1]


def test_placement_may_be_a_module_that_is_callable():
    specs = eqx.tree_at(
        lambda m: (m.weight, m.bias, m.norm_weight), Scaled(), (P("data"), P(), P(None, "data"))
    )
    shard = et.shard(et.mesh(data=2), batch=P("data"), model=specs)
    program = make_program(nothing, decayed(DECAYS), shard)
    ts = program.init(init_scaled, key=jax.random.key(0))
    assert ts.model.weight.sharding.spec == P("data")
    assert ts.model.norm_weight.sharding.spec == P(None, "data")
    ts, _ = program(ts, ONES)
    np.testing.assert_allclose(ts.model.weight, np.full((2, 2), 0.99), rtol=1e-7)


def test_labels_as_a_function_choose_an_optimizer_a_leaf():
    def labels(params: Any) -> Any:
        return jax.tree.map(lambda chosen: "slow" if chosen else "fast", DECAYS(params))

    def pull(model: Scaled, state: Any, batch: Any, key: Any) -> Any:
        total = sum(leaf.sum() for leaf in jax.tree.leaves(model))
        return et.mean(total * batch["x"]), state, {}

    parts = optax.multi_transform({"slow": optax.sgd(0.5), "fast": optax.sgd(1.0)}, labels)
    program = make_program(pull, parts)
    ts = program.init(init_scaled, key=jax.random.key(0))
    ts, _ = program(ts, ONES)
    assert ts.model.weight.tolist() == [[0.5, 0.5]] * 2
    assert ts.model.bias.tolist() == [0, 0]


# Case 35: numbers too narrow for small updates. `precision` keeps float32 copies and moments.


def falling(w: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(-w * batch["x"].astype(w.dtype)), state, {}  # gradient -1


def repeated(loss: Any, optimizer: Any, start: Any, times: int, dtype: str) -> et.TrainState:
    step = et.pipe(loss, et.precision(dtype), et.update(optimizer), et.repeat(times), et.jit)
    ts = step.init(lambda key: start, key=jax.random.key(0))
    ts, _ = step(ts, {"x": np.ones((times, 2), np.float32)})
    return ts


def test_small_updates_are_not_lost():
    ts = repeated(falling, optax.sgd(1e-3), jnp.asarray(1, jnp.bfloat16), 1000, "bfloat16")
    assert ts.model.dtype == jnp.float32
    assert float(ts.model) == pytest.approx(2.0, abs=1e-4)
    narrow = jnp.asarray(1, jnp.bfloat16)
    assert narrow + jnp.asarray(1e-3, jnp.bfloat16) == 1.0  # negative control, at every step


def test_second_moment_and_count_are_wide():
    ts = repeated(falling, optax.adam(1e-3), jnp.asarray(1, jnp.bfloat16), 2000, "bfloat16")
    adam = ts.opt_state[0]
    assert adam.nu.dtype == adam.mu.dtype == jnp.float32
    assert float(adam.nu) == pytest.approx(1 - 0.999**2000, abs=1e-5)
    assert 1 - 0.999**2000 == pytest.approx(0.8648, abs=1e-5)
    assert adam.count.dtype == jnp.int32 and adam.count == 2000
    moment = jnp.bfloat16(0.5)  # negative control: where it stops in bfloat16
    assert jnp.bfloat16(0.999) * moment + jnp.bfloat16(0.001) * jnp.bfloat16(1) == moment


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [optax.adam, optax.rmsprop, optax.adamax])
def test_zero_gradient_gives_an_update_of_exactly_zero(dtype, make):
    def flat(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(0 * w * batch["x"]), state, {}

    ts = repeated(flat, make(0.1), jnp.asarray(1, dtype), 3, dtype)
    assert float(ts.model) == 1.0 and ts.model.dtype == jnp.float32


def test_adam_in_float16_is_told_apart():
    optimizer: Any = optax.adam(0.1)
    w = jnp.asarray(1, jnp.float16)
    update, _ = optimizer.update(jnp.zeros_like(w), optimizer.init(w), w)
    assert np.isnan(update)


def test_narrow_parameters_without_precision_are_warned_of():
    program = make_program(falling, optax.adam(1e-3))
    with pytest.warns(UserWarning, match="lose small updates.*`et.precision|et.precision"):
        ts = program.init(lambda key: {"w": jnp.ones(2, jnp.bfloat16)}, key=jax.random.key(0))
    assert ts.model["w"].dtype == jnp.bfloat16  # the user's choice is kept
