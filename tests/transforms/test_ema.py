"""`ema` averages what is trained, in float32, once an update."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

BATCH = {"x": np.ones(4, np.float32)}


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean((model["a"] + model["b"].sum()).astype(jnp.float32) * batch["x"]), state, {}


def make(key: Any) -> Any:
    return {"a": jnp.float32(8), "b": jnp.float32([4, 2]), "n": jnp.asarray(3)}


def run(steps: int, *chain: Any, decay: float = 0.5, make: Any = make, **options: Any) -> Any:
    """Trains by SGD at rate 1: each parameter falls by 1 a step, exactly."""
    program = et.pipe(loss, *chain, et.update(optax.sgd(1.0), **options), et.ema(decay), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    for _ in range(steps):
        ts, _ = program(ts, BATCH)
    return ts


def test_average_starts_as_the_parameters():
    ts = run(0)
    assert float(ts.ema["a"]) == 8 and ts.ema["b"].tolist() == [4, 2]


@pytest.mark.parametrize(
    "chain", [(), (et.accumulate(4),), (et.shard(et.mesh(data=4), batch=P("data")),)]
)
def test_average_by_hand(chain):
    ts = run(3, *chain)
    average = 8.0
    for value in (7, 6, 5):
        average = 0.5 * average + 0.5 * value
    assert float(ts.ema["a"]) == average == 5.875
    assert float(ts.model["a"]) == 5
    assert ts.ema["b"].tolist() == [average - 4, average - 6]


@pytest.mark.parametrize(("decay", "expected"), [(0.0, 5.0), (0.75, 6.734375)])
def test_other_decays(decay, expected):
    assert float(run(3, decay=decay).ema["a"]) == expected


def test_what_is_no_parameter_is_that_of_the_model():
    ts = run(2, trainable=et.matching("a"))
    assert ts.ema["n"] == 3 and ts.ema["b"].tolist() == [4, 2]
    assert len(jax.tree.leaves(ts.extra["ema"])) == 1


def test_average_of_narrow_parameters_is_kept_in_float32():
    def narrow(key: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), {"a": jnp.ones(()), "b": jnp.ones(2)})

    with pytest.warns(UserWarning, match="narrower than float32"):
        ts = run(1, decay=0.999, make=narrow)
    assert ts.extra["ema"]["a"].dtype == jnp.float32
    assert float(ts.extra["ema"]["a"]) == pytest.approx(0.999)  # bfloat16 would keep 1
    assert ts.ema["a"].dtype == jnp.bfloat16  # read as the model that it is


def test_average_is_a_model_that_runs():
    def regress(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(jax.vmap(model)(batch["x"][:, None])), state, {}

    program = et.pipe(regress, et.update(optax.adam(0.1)), et.ema(0.9), et.donate)
    ts = program.init(
        lambda key: eqx.nn.MLP(1, "scalar", width_size=4, depth=1, key=key), key=jax.random.key(0)
    )
    ts, _ = program(ts, BATCH)
    assert isinstance(ts.ema, eqx.nn.MLP) and ts.ema.activation is ts.model.activation
    assert np.isfinite(ts.ema(jnp.ones(1)))
    measured = et.evaluate(regress)
    of_average = et.fetch(measured(ts.replace(model=ts.ema), BATCH))["loss"]
    assert of_average != et.fetch(measured(ts, BATCH))["loss"]
    right = float(jax.vmap(ts.ema)(jnp.ones((4, 1))).mean())
    assert of_average == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize("order", [(et.guard, et.ema(0.5)), (et.ema(0.5), et.guard)])
def test_guard_holds_the_average_back_wherever_it_stands(order):
    program = et.pipe(loss, et.update(optax.sgd(1.0)), *order, et.donate)
    ts = program.init(make, key=jax.random.key(0))
    ts, _ = program(ts, BATCH)
    before = np.array(ts.ema["a"])
    ts, _ = program(ts, {"x": BATCH["x"] * np.float32(np.nan)})
    assert np.array(ts.ema["a"]) == before == 7.5


def test_ema_twice_is_refused():
    with pytest.raises(et.OrderError, match="`et.ema` may occur once"):
        et.pipe(loss, et.update(optax.sgd(1.0)), et.ema(0.5), et.ema(0.9))
