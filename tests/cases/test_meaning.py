"""Recipes from public reports: a loss means the same on a mesh as on one device.

The right values are arithmetic, or of plain JAX on one device.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from tests.tiers import grid

MESHES = {
    "one": {"data": 1},
    "four": {"data": 4},
    "grid": {"data": 2, "model": 2},
    "eight": {"data": 8},
}
ALL = ["one", "four", "grid", grid("eight")]
X = np.arange(1, 9, dtype=np.float32)


def on(mesh: str, **options: Any) -> Any:
    return et.shard(et.mesh(devices=None, **MESHES[mesh]), batch=P("data"), **options)


def step_of(loss: Any, make: Any, batch: Any, *transforms: Any) -> tuple[Any, Any, et.TrainState]:
    """Loss, gradient and the TrainState after one step of SGD at rate 1."""
    program = et.pipe(loss, *transforms, et.update(optax.sgd(1.0)), et.jit)
    ts = program.init(make, key=jax.random.key(0))
    after, metrics = program(ts, batch)
    grads = jax.tree.map(
        lambda a, b: np.asarray(a) - np.asarray(b),
        eqx.filter(ts.model, eqx.is_inexact_array),
        eqx.filter(after.model, eqx.is_inexact_array),
    )
    return et.fetch(metrics), grads, after


def slopes(model: Any, x: Any) -> Any:
    return jax.vmap(lambda x: jax.grad(lambda t: model["w"] * x * t)(0.0))(x)


def derivative_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean((slopes(model, batch["x"]) - 2 * batch["x"]) ** 2), state, {}


@pytest.mark.parametrize("mesh", ALL)
def test_a_derivative_inside_the_loss_is_of_its_row(mesh: str):
    make = lambda key: {"w": jnp.array(3.0)}  # noqa: E731
    metrics, grads, _ = step_of(derivative_loss, make, {"x": X}, on(mesh))
    # The mean of x squared, and twice that.
    assert (metrics["loss"], float(grads["w"])) == (25.5, 51.0)


@pytest.mark.parametrize("mesh", ["four", "grid"])
def test_a_derivative_with_respect_to_the_model_in_evaluation_is_of_its_row(mesh: str):
    """Norms of the gradient of each example: of w, for the loss (w x - 1)^2, |2 (w x - 1) x|."""

    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        grad = jax.grad(lambda model, x: (model["w"] * x - 1) ** 2)
        norms = jax.vmap(lambda x: jnp.abs(grad(model, x)["w"]))(batch["x"])
        return et.mean(norms), state, {}

    ts = et.update(optax.sgd(0.1))(loss).init(
        lambda key: {"w": jnp.array(3.0)}, key=jax.random.key(0)
    )
    found = et.fetch(et.pipe(loss, on(mesh), et.evaluate)(ts, {"x": X}))["loss"]
    assert found == pytest.approx(np.abs(2 * (3 * X - 1) * X).mean(), rel=1e-6)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(3, 8, key=keys[0])
        self.head = eqx.nn.Linear(8, 1, key=keys[1])

    def __call__(self, x: Any) -> Any:
        hidden, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(8), x)
        return self.head(hidden)[0]


def recurrent_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2), state, {}


def poisson_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    counts = jax.vmap(lambda key: jax.random.poisson(key, 3.0))(key)
    return et.mean((model["w"] * counts.astype("float32") - batch["x"]) ** 2), state, {}


def guarded_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    x = eqx.error_if(batch["x"], jnp.any(batch["x"] < 0), "x is negative")
    return et.mean((model["w"] * x - 1) ** 2), state, {}


SEQUENCES = {
    "x": np.random.default_rng(0).normal(size=(8, 4, 3)).astype(np.float32),
    "y": X,
}
LOSSES: dict[str, tuple[Any, Any, Any]] = {
    "a scan from zeros": (recurrent_loss, Recurrent, SEQUENCES),
    "a loop of a sampler": (poisson_loss, lambda key: {"w": jnp.array(1.0)}, {"x": X}),
    "error_if": (guarded_loss, lambda key: {"w": jnp.array(1.0)}, {"x": X}),
}


@pytest.mark.parametrize("mesh", ["four", grid("grid")])
@pytest.mark.parametrize("name", LOSSES)
def test_loops_and_branches_from_constants_are_as_on_one_device(name: str, mesh: str):
    loss, make, batch = LOSSES[name]
    expected = step_of(loss, make, batch)
    fsdp = {"model": et.fsdp("data", min_size=8)} if name == "a scan from zeros" else {}
    found = step_of(loss, make, batch, on(mesh, **fsdp))
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-6)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Tracked(eqx.Module):
    w: Any
    run: eqx.nn.StateIndex
    seen: eqx.nn.StateIndex

    def __init__(self) -> None:
        self.w = jnp.zeros(())
        self.run = eqx.nn.StateIndex(jnp.zeros(()))
        self.seen = eqx.nn.StateIndex(jnp.array(False))


def tracked_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    state = state.set(model.run, batch["x"].mean())
    state = state.set(model.seen, jnp.array(True))
    return et.mean((model.w - batch["x"]) ** 2), state, {}


@pytest.mark.parametrize("mesh", ["one", "four"])
def test_a_state_may_have_a_value_of_the_rows_and_a_constant(mesh: str):
    make = lambda key: eqx.nn.make_with_state(Tracked)()  # noqa: E731
    ts = step_of(tracked_loss, make, {"x": X}, on(mesh))[2]
    assert float(ts.state.get(ts.model.run)) == 4.5
    assert bool(ts.state.get(ts.model.seen))


def test_a_state_of_another_kind_is_refused_by_name():
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(batch["x"] * model.w), state.set(model.run, jnp.zeros(2)), {}

    with pytest.raises(ValueError, match=r"Got float32\[2\] for `state.set`, where there was"):
        step_of(loss, lambda key: eqx.nn.make_with_state(Tracked)(), {"x": X}, on("four"))


@pytest.mark.parametrize("mesh", ["one", "four"])
def test_a_nan_of_one_device_is_the_maximum_of_all(mesh: str):
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        extremes = {"most": et.Max(batch["x"].max()), "least": et.Min(batch["x"].min())}
        return et.mean(batch["x"] * 0 + model["w"], where=batch["x"] > 0), state, extremes

    make = lambda key: {"w": jnp.array(1.0)}  # noqa: E731
    broken = np.where(np.arange(8) == 2, np.nan, X).astype(np.float32)
    metrics = step_of(loss, make, {"x": broken}, on(mesh))[0]
    assert np.isnan(metrics["most"]) and np.isnan(metrics["least"])
    metrics = step_of(loss, make, {"x": X}, on(mesh))[0]
    assert (metrics["most"], metrics["least"]) == (8.0, 1.0)


def balanced_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    """How far each row is from the weighted mean of all, and from the largest."""
    p = batch["x"] * model["w"]
    centre = et.rows.mean(p, where=batch["weight"])
    share = et.rows.sum(batch["weight"][:, None] * p[:, None], where=batch["weight"] > 0)[0]
    return et.mean((p - centre) ** 2 + share * p / 10 + et.rows.max(p)), state, {}


@pytest.mark.parametrize("mesh", ALL)
def test_statistics_over_rows_are_of_the_global_batch(mesh: str):
    weight = np.array([1, 0, 2, 1, 3, 1, 0, 1], np.float32)
    make = lambda key: {"w": jnp.array(2.0)}  # noqa: E731
    metrics, grads, _ = step_of(balanced_loss, make, {"x": X, "weight": weight}, on(mesh))

    def by_hand(w: float) -> float:
        p = w * X.astype(np.float64)
        centre, total = (weight * p).sum() / weight.sum(), (weight * p).sum()
        return float(((p - centre) ** 2 + total * p / 10).mean())

    largest = 2.0 * X.max()
    assert metrics["loss"] == pytest.approx(by_hand(2.0) + largest, rel=1e-6)
    # The maximum has no gradient.
    slope = (by_hand(2.0 + 1e-4) - by_hand(2.0 - 1e-4)) / 2e-4
    assert float(grads["w"]) == pytest.approx(slope, rel=1e-5)


def test_rows_are_refused_in_tree_order():
    shard = et.shard(et.mesh(data=2), batch=P("data"), order="tree")
    batch = {"x": X, "weight": np.ones(8, np.float32)}
    with pytest.raises(ValueError, match="adds lanes that know nothing of one another"):
        step_of(balanced_loss, lambda key: {"w": jnp.array(2.0)}, batch, shard)
