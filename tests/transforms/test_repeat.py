"""`repeat` takes the steps that as many calls take."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

STEPS, ROWS = 3, 4
RNG = np.random.default_rng(0)
BATCHES = [{"x": RNG.normal(size=(ROWS, 5)).astype(np.float32)} for _ in range(STEPS)]
STACKED = jax.tree.map(lambda *rows: np.stack(rows), *BATCHES)


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    values = et.dropout(batch["x"] * model[None], 0.5, key=key)
    new_state = {"seen": state["seen"] + 1}
    return et.mean(values**2 + values), new_state, {"top": et.Max(values.max())}


def make(key: Any) -> Any:
    return jnp.ones(5), {"seen": 0}


CHAINS = {
    "alone": (),
    "accumulate": (et.accumulate(2),),
    "mesh": (et.accumulate(2), et.shard(et.mesh(data=2), batch=P("data"))),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("compile", [et.jit, et.donate])
def test_repeat_equals_that_many_calls(chain, compile):
    step = et.pipe(loss, *chain, et.update(optax.adam(0.1)), et.ema(0.5), et.guard)
    one, many = et.pipe(step, compile), et.pipe(step, et.repeat(STEPS), compile)
    ts = one.init(make, key=jax.random.key(0))
    alone = []
    for batch in BATCHES:
        ts, metrics = one(ts, batch)
        alone.append(et.fetch(metrics))
    together = many.init(make, key=jax.random.key(0))
    together, metrics = many(together, STACKED)
    read = et.fetch(metrics)
    for index, expected in enumerate(alone):
        got = jax.tree.map(lambda values, index=index: values[index], read)
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-7)  # compiled in another context
    for a, b in zip(jax.tree.leaves(ts), jax.tree.leaves(together), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(a, b)  # counts, the key, the step
    assert int(together.step) == STEPS and together.state["seen"] == STEPS * (2 if chain else 1)


def test_steps_draw_different_masks():
    step = et.pipe(loss, et.update(optax.sgd(0.0)), et.repeat(STEPS), et.jit)
    ts = step.init(make, key=jax.random.key(0))
    same = {"x": np.stack([BATCHES[0]["x"]] * STEPS)}
    _, metrics = step(ts, same)
    assert len(set(metrics["loss"].value.tolist())) == STEPS


def test_collapse_merges_the_steps_of_a_call():
    step = et.pipe(loss, et.update(optax.sgd(0.0)), et.repeat(STEPS), et.jit)
    ts = step.init(make, key=jax.random.key(0))
    _, metrics = step(ts, STACKED)
    read, each = et.fetch(et.collapse(metrics)), et.fetch(metrics)
    assert read["loss"] == pytest.approx(each["loss"].mean(), rel=1e-6)
    assert read["top"] == each["top"].max()


def test_one_call_is_one_compilation_and_one_flag():
    step = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard, et.repeat(STEPS), et.donate)
    ts = step.init(make, key=jax.random.key(0))
    for _ in range(2):
        ts, _ = step(ts, STACKED)
    step.check(ts)
    assert step.compilations == 1 and int(ts.step) == 2 * STEPS


def test_model_with_functions_and_settings_passes_through():
    def settings(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(model["activation"](batch["x"] * model["w"][None])), state, {}

    def make_settings(key: Any) -> Any:
        return {"w": jnp.ones(5), "activation": jnp.tanh, "depth": 2, "none": None}

    step = et.pipe(settings, et.update(optax.adam(0.1)), et.repeat(STEPS), et.donate)
    ts = step.init(make_settings, key=jax.random.key(0))
    ts, _ = step(ts, STACKED)
    assert ts.model["activation"] is jnp.tanh and ts.model["depth"] == 2


def test_repeat_once_still_takes_a_stack():
    step = et.pipe(loss, et.update(optax.sgd(0.1)), et.repeat(1), et.jit)
    ts = step.init(make, key=jax.random.key(0))
    ts, metrics = step(ts, jax.tree.map(lambda x: x[None], BATCHES[0]))
    assert metrics["loss"].value.shape == (1,) and int(ts.step) == 1


def test_repeat_twice_is_refused():
    with pytest.raises(et.OrderError, match="`et.repeat` may occur once"):
        et.pipe(loss, et.update(optax.sgd(0.1)), et.repeat(2), et.repeat(3))
