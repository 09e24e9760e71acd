"""`update` gives any optimizer of optax the mean gradients of the global batch, once a step."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from tests.tiers import pairwise

ROWS, STEPS = 8, 3


def f32(x: Any) -> Any:
    return np.asarray(x, np.float32)


def make(key: Any) -> dict[str, Any]:
    first, second = jax.random.split(key)
    return {
        "hidden": {"weight": 0.4 * jax.random.normal(first, (8, 16)), "bias": jnp.zeros(16)},
        "out": {"weight": 0.4 * jax.random.normal(second, (16, 8)), "bias": jnp.zeros(8)},
    }


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(ROWS, 8)).astype(np.float32),
            "y": rng.normal(size=(ROWS, 8)).astype(np.float32),
            "weight": rng.choice([0.5, 1.0, 2.0], size=ROWS).astype(np.float32),
        }
        for _ in range(STEPS)
    ]


def errors(model: Any, batch: Any) -> Any:
    x = jnp.tanh(batch["x"] @ model["hidden"]["weight"] + model["hidden"]["bias"][None])
    out = x @ model["out"]["weight"] + model["out"]["bias"][None]
    return ((out - batch["y"]) ** 2).mean(1)


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(errors(model, batch), where=batch["weight"]), state, {}


def train_by_optax(optimizer: Any, model: Any) -> tuple[Any, Any, list[float]]:
    """The same on one device, without eqtrain."""

    def plain(model: Any, batch: Any) -> Any:
        return (errors(model, batch) * batch["weight"]).sum() / batch["weight"].sum()

    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def step(model: Any, state: Any, batch: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            value, grads = jax.value_and_grad(plain)(model, batch)
            updates, state = optimizer.update(grads, state, model, value=value)
        return optax.apply_updates(model, updates), state, optax.tree.norm(grads)

    state, norms = optimizer.init(model), []
    for batch in batches():
        model, state, norm = step(model, state, batch)
        norms.append(float(norm))
    return model, state, norms


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1, mask=et.matching("weight")),
    "lamb": lambda: optax.lamb(0.01, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=8),
    "plateau": lambda: optax.chain(
        optax.adam(0.01), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    ),
    "schedule": lambda: optax.sgd(
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10), momentum=0.9
    ),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.rmsprop(0.01)),
}


# On one device there is nothing of the kit's but the division, which is the same for all.
ON_ONE_DEVICE = ["adafactor", "plateau"]


@pairwise(
    {"where": ["alone", "fsdp"], "name": list(OPTIMIZERS)},
    beyond=lambda where, name: where == "alone" and name not in ON_ONE_DEVICE,
)
def test_optimizers_equal_optax_by_hand(name, where):
    chain: tuple[Any, ...] = ()
    if where == "fsdp":
        fsdp = et.fsdp("data", min_size=8)
        chain = (et.accumulate(2), et.shard(et.mesh(data=4), batch=P("data"), model=fsdp))
    program = et.pipe(loss, *chain, et.update(OPTIMIZERS[name]()), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    first = jax.tree.map(np.array, ts.model)
    norms = []
    for batch in batches():
        ts, metrics = program(ts, batch)
        norms.append(et.fetch(metrics)["grad_norm"])
    model, state, right_norms = train_by_optax(OPTIMIZERS[name](), jax.tree.map(jnp.asarray, first))
    # Sums of a few hundred float32 numbers in another order; lamb divides by such sums.
    np.testing.assert_allclose(norms, right_norms, rtol=2e-6)
    for a, b, start in zip(*map(jax.tree.leaves, (ts.model, model, first)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
        assert not np.array_equal(b, start)
    for a, b in zip(jax.tree.leaves(ts.opt_state), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_counts_and_schedules_advance_once_a_step():
    rates = []

    def rate(count: Any) -> Any:
        rates.append(count)
        return 0.5 ** (count + 1.0)

    def slope(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(w * jnp.ones(ROWS)), state, {}

    program = et.pipe(slope, et.accumulate(4), et.update(optax.sgd(rate)), et.donate)
    ts = program.init(lambda key: jnp.float32(0), key=jax.random.key(0))
    for _ in range(3):
        ts, _ = program(ts, batches()[0])
    assert -float(ts.model) == 0.5 + 0.25 + 0.125
    assert optax.tree_utils.tree_get(ts.opt_state, "count") == 3 == int(ts.step)


def test_plateau_sees_the_loss_of_the_global_batch():
    """`value=` is the mean loss: 8 on every step, so the rate halves after each step but one."""

    def flat(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(0 * w + batch["x"], where=batch["weight"]), state, {}

    batch = {"x": f32([6, 20, 8, 8]), "weight": f32([6, 1, 1, 0])}
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    chain = (et.accumulate(2), et.shard(et.mesh(data=2), batch=P("data")))
    program = et.pipe(flat, *chain, et.update(optax.chain(optax.sgd(1.0), plateau)), et.jit)
    ts = program.init(lambda key: jnp.float32(0), key=jax.random.key(0))
    for scale in [1.0, 0.5, 0.25]:
        ts, _ = program(ts, batch)
        assert ts.opt_state[1].scale == scale
    assert ts.opt_state[1].best_value == 8.0


# `trainable`


CHOICES = {
    "matching": et.matching("out"),
    "function": lambda model: {
        "hidden": jax.tree.map(lambda _: False, model["hidden"]),
        "out": jax.tree.map(lambda _: True, model["out"]),
    },
    "prefix": {"hidden": False, "out": True},
}


@pairwise(
    {"name": list(CHOICES), "sharded": [False, True]},
    beyond=lambda name, sharded: not sharded and name != "matching",
)
def test_frozen_leaves_keep_every_bit_and_have_no_part(name, sharded):
    choice = CHOICES[name]
    chain = ()
    if sharded:
        fsdp = et.fsdp("data", min_size=8)
        chain = (et.accumulate(2), et.shard(et.mesh(data=4), batch=P("data"), model=fsdp))
    update = et.update(optax.adamw(0.01, weight_decay=0.5), trainable=choice)
    program = et.pipe(loss, *chain, update, et.donate)
    ts = program.init(make, key=jax.random.key(0))
    first = jax.tree.map(np.array, ts.model)
    batch = batches()[0]
    for batch in batches():
        ts, _ = program(ts, batch)
    for name in ("weight", "bias"):
        assert np.array(ts.model["hidden"][name]).tobytes() == first["hidden"][name].tobytes()
        assert not np.array_equal(ts.model["out"][name], first["out"][name])
    assert len(jax.tree.leaves(ts.opt_state[0].mu)) == 2

    def of_out(out: Any) -> Any:
        model = {"hidden": ts.model["hidden"], "out": out}
        return et.mean(errors(model, batch), where=jnp.asarray(batch["weight"])).value

    # The norm after the step is another one, so take it anew from a step that changes nothing.
    still = et.pipe(loss, *chain, et.update(optax.sgd(0.0), trainable=choice), et.jit)
    at = still.init(lambda key: ts.model, key=jax.random.key(0))
    _, metrics = still(at, batch)
    right = optax.tree.norm(jax.grad(of_out)(ts.model["out"]))
    assert float(metrics["grad_norm"]) == pytest.approx(float(right), rel=1e-5)


def test_gradient_of_a_frozen_leaf_is_not_computed():
    """What it does not need, the backward pass leaves out: one product fewer."""

    def products(**options: Any) -> int:
        step = et.update(optax.sgd(0.1), **options)(loss)
        ts = step.init(make, key=jax.random.key(0))
        text = str(jax.make_jaxpr(lambda ts, batch: step(ts, batch))(ts, batches()[0]))
        return text.count(" = dot_general")

    assert products(trainable=et.matching("out")) < products()


def test_integers_cannot_be_made_trainable():
    def with_count(key: Any) -> Any:
        return {**make(key), "count": jnp.asarray(3)}

    def everything(model: Any) -> Any:
        return jax.tree.map(lambda _: True, model)

    program = et.pipe(loss, et.update(optax.adam(0.1), trainable=everything), et.jit)
    ts = program.init(with_count, key=jax.random.key(0))
    ts, _ = program(ts, batches()[0])
    assert ts.model["count"] == 3 and ts.opt_state[0].mu["count"] is None


def test_optimizers_of_equinox_models_keep_the_model_type():
    def of_mlp(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(jax.vmap(model)(batch["x"]) ** 2), state, {}

    program = et.pipe(of_mlp, et.update(optax.adamw(0.1)), et.donate)
    ts = program.init(
        lambda key: eqx.nn.MLP(8, 2, width_size=4, depth=1, key=key), key=jax.random.key(0)
    )
    ts, _ = program(ts, batches()[0])
    assert isinstance(ts.model, eqx.nn.MLP) and isinstance(ts.opt_state[0].mu, eqx.nn.MLP)


def test_metrics_of_the_loss_stand_beside_those_of_the_kit():
    def with_metrics(model: Any, state: Any, batch: Any, key: Any) -> Any:
        values = errors(model, batch)
        parts = {"deep": {"max": et.Max(values.max())}, "rows": et.Sum(jnp.asarray(len(values)))}
        return et.mean(values) + 0.5 * et.mean(values), state, parts

    ts, read = None, []
    mesh = et.shard(et.mesh(data=2), batch=P("data"))
    for chain in [(), (et.accumulate(2), mesh)]:
        program = et.pipe(with_metrics, *chain, et.update(optax.sgd(0.1)), et.jit)
        ts = program.init(make, key=jax.random.key(0))
        read.append(et.fetch(program(ts, batches()[0])[1]))
    assert ts is not None
    assert read[0].keys() == {"loss", "grad_norm", "deep", "rows"}
    assert read[0]["rows"] == read[1]["rows"] == ROWS
    for a, b in zip(*map(jax.tree.leaves, read), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    values = errors(ts.model, batches()[0])
    assert read[0]["loss"] == pytest.approx(1.5 * float(values.mean()), rel=1e-5)
    assert read[0]["deep"]["max"] == pytest.approx(float(values.max()), rel=1e-5)


def test_updates_do_not_depend_on_how_often_update_is_built():
    """Equal settings, two programs: the same numbers to the bit."""
    results = []
    for _ in range(2):
        program = et.pipe(loss, et.update(optax.adam(0.01)), et.jit)
        ts = program.init(make, key=jax.random.key(0))
        ts, _ = functools.reduce(lambda a, b: program(a[0], b), batches(), (ts, None))
        results.append([np.array(leaf).tobytes() for leaf in jax.tree.leaves(ts.model)])
    assert results[0] == results[1]


# Complex parameters

WAVES = {
    "alone": (),
    "sharded": (et.accumulate(2), et.shard(et.mesh(data=2), batch=P("data"))),
    "split": (et.shard(et.mesh(data=2), batch=P("data"), model=et.fsdp("data", min_size=1)),),
    "tree order": (
        et.accumulate(2, order="tree"),
        et.shard(et.mesh(data=2), batch=P("data"), order="tree"),
    ),
}


@pytest.mark.parametrize("chain", WAVES.values(), ids=WAVES.keys())
@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), optax.contrib.split_real_and_imaginary(optax.sgd(0.1))],
    ids=["sgd", "split_real_and_imaginary"],
)
def test_complex_parameters_go_downhill(chain, optimizer):
    start, goal = np.array([1 + 1j, -2j], np.complex64), np.array([0.5 - 1j, 3], np.complex64)
    scale = f32([0.5, 1.0, 1.5, 1.0])

    def distance(w: Any, state: Any, batch: Any, key: Any) -> Any:
        apart = w - jnp.asarray(goal)
        square = (apart.real**2 + apart.imag**2).sum()
        return et.mean(square * batch["scale"]), state, {}

    program = et.pipe(distance, *chain, et.update(optimizer), et.jit)
    ts = program.init(lambda key: jnp.asarray(start), key=jax.random.key(0))
    for _ in range(5):
        ts, _ = program(ts, {"scale": scale})
    # Along both parts the slope is twice the distance, of which a step takes a tenth.
    np.testing.assert_allclose(ts.model, goal + 0.8**5 * (start - goal), rtol=1e-5)


def test_value_and_grad_of_complex_parameters_is_that_of_jax():
    def square(w: Any, batch: Any) -> Any:
        return ((w * batch["x"]).real ** 2 + (2 * (w * batch["x"]).imag) ** 2).mean()

    w, batch = jnp.complex64(1 + 2j), {"x": np.array([1, 1j, 2 - 1j], np.complex64)}
    value, grad = et.value_and_grad(square)(w, batch)
    right_value, right_grad = jax.value_and_grad(square)(w, batch)
    np.testing.assert_allclose([value, grad], [right_value, right_grad], rtol=1e-6)
