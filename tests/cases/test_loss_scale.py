"""Recipes from public reports: the scale that keeps float16 gradients in range."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

# Case 36: loss scales.


def f32(x: Any) -> Any:
    return np.asarray(x, np.float32)


TRUE = {"x": f32([[3, 4]] * 4)}
ONE = {"x": np.ones((4, 1), np.float32)}


def dot(w: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean((batch["x"] * w[None]).sum(1)), state, {}


def scaled(scaling: et.LossScaling, optimizer: Any, *chain: Any, dtype: str = "float16") -> Any:
    precision = et.precision(dtype, loss_scaling=scaling)
    return et.pipe(dot, precision, *chain, et.update(optimizer), et.guard, et.jit)


@pytest.mark.parametrize(
    "chain",
    [(), (et.accumulate(2),), (et.accumulate(2), et.shard(et.mesh(data=2), batch=P("data")))],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_are_unscaled_before_they_are_clipped(chain, dtype):
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    program = scaled(et.LossScaling(1024.0), clip, *chain, dtype=dtype)
    ts = program.init(lambda key: jnp.zeros(2), key=jax.random.key(0))
    ts, metrics = program(ts, TRUE)
    np.testing.assert_allclose(ts.model, [-0.6, -0.8], rtol=1e-6)
    assert et.fetch(metrics) == {"loss": 0, "grad_norm": 5, "loss_scale": 1024, "skipped": 0}


@pytest.mark.parametrize("chain", [(), (et.accumulate(4),)], ids=["whole", "window"])
def test_gradients_are_unscaled_by_the_scale_they_had(chain):
    program = scaled(et.LossScaling(4.0, factor=2.0, period=1), optax.sgd(1.0), *chain)
    ts = program.init(lambda key: jnp.zeros(1), key=jax.random.key(0))
    seen = []
    for _ in range(3):
        ts, metrics = program(ts, ONE)
        seen.append(et.fetch(metrics))
    assert [metrics["grad_norm"] for metrics in seen] == [1, 1, 1]
    assert [metrics["loss_scale"] for metrics in seen] == [4, 8, 16]
    assert float(ts.model[0]) == -3
    used, divisor = np.array([4, 4, 8]), np.array([4, 8, 16])
    assert (used / divisor).tolist() == [1, 0.5, 0.5]  # what the report shows


def held(ts: et.TrainState) -> list[bytes]:
    return [np.array(x).tobytes() for x in jax.tree.leaves((ts.model, ts.opt_state, ts.ema))]


def test_scale_shrinks_at_an_overflow_and_the_step_is_skipped():
    program = et.pipe(
        dot,
        et.precision("float16", loss_scaling=et.LossScaling(2.0**17, period=2)),
        et.update(optax.adam(0.1)),
        et.ema(0.5),
        et.guard(max_consecutive=1),
        et.jit,
    )
    ts = program.init(lambda key: jnp.zeros(1), key=jax.random.key(0))
    before = held(ts)
    scales, skipped = [], []
    for _ in range(6):
        scales.append(float(ts.extra["loss_scale"]["scale"]))
        ts, metrics = program(ts, {"x": ONE["x"][:1]})
        skipped.append(int(metrics["skipped"].value))
        if all(skipped):
            assert held(ts) == before
    program.check(ts)  # an overflow is no failure: the scale meets it
    # float16 ends at 65504: 2^17 and 2^16 are too much. It grows after two good steps.
    assert scales == [2.0**17, 2.0**16, 2.0**15, 2.0**15, 2.0**16, 2.0**15]
    assert skipped == [1, 1, 0, 0, 1, 0]
    assert ts.opt_state[0].count == 3


def test_average_rests_while_the_scale_shrinks():
    precision = et.precision("float16", loss_scaling=et.LossScaling(2.0**14, period=1))
    program = et.pipe(dot, precision, et.update(optax.sgd(1.0)), et.ema(0.5), et.jit)
    ts = program.init(lambda key: jnp.zeros(1), key=jax.random.key(0))
    averages = []
    for _ in range(4):
        ts, _ = program(ts, {"x": ONE["x"][:1]})
        averages.append(float(ts.ema[0]))
    # Parameters are -1, -2, -2, -3, since 2^16 is too much for float16.
    assert averages == [-0.5, -1.25, -1.25, -2.125]


def test_scale_does_not_shrink_below_one():
    def steep(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(batch["x"][:, 0] * jnp.sqrt(w[0])), state, {}

    precision = et.precision("float16", loss_scaling=et.LossScaling(4.0))
    program = et.pipe(steep, precision, et.update(optax.sgd(1.0)), et.jit)
    ts = program.init(lambda key: jnp.zeros(1), key=jax.random.key(0))
    scales = []
    for _ in range(4):
        scales.append(float(ts.extra["loss_scale"]["scale"]))
        ts, _ = program(ts, ONE)  # the loss is 0, and its gradient has no end
    assert scales == [4, 2, 1, 1]


def test_loss_that_is_not_finite_is_a_failure_under_any_scale():
    program = et.pipe(
        dot,
        et.precision("float16", loss_scaling=et.LossScaling(4.0)),
        et.update(optax.sgd(0.1)),
        et.guard(nonfinite="raise"),
        et.jit,
    )
    ts = program.init(lambda key: jnp.zeros(1), key=jax.random.key(0))
    bad = {"x": ONE["x"] * np.float32(np.nan)}
    ts, _ = program(ts, bad)
    with pytest.raises(et.NonFiniteError):
        program.check(ts)


@pytest.mark.parametrize("rows", [2**10, 2**17])
def test_float16_trains_on_batches_of_any_size(rows):
    """The gradient of the mean is 1. That of the total is `rows`, and float16 ends at 65504."""
    program = et.pipe(dot, et.precision("float16"), et.update(optax.sgd(1.0)), et.guard, et.jit)
    ts = program.init(lambda key: jnp.zeros(1), key=jax.random.key(0))
    skipped = []
    for _ in range(20):
        ts, metrics = program(ts, {"x": np.ones((rows, 1), np.float32)})
        skipped.append(int(metrics["skipped"].value))
    assert 0 in skipped
    assert float(ts.model[0]) == -skipped.count(0)


@pytest.mark.parametrize(("initial", "gradient"), [(1.0, 0.0), (2.0**12, 2.0**-26)])
def test_small_gradients_survive_by_their_scale(initial, gradient):
    def small(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean((batch["x"] * (batch["x"] * w[None])).sum(1)), state, {}

    program = et.pipe(
        small,
        et.precision("float16", loss_scaling=et.LossScaling(initial)),
        et.accumulate(4),
        et.update(optax.sgd(1.0)),
        et.jit,
    )
    ts = program.init(lambda key: jnp.zeros(1), key=jax.random.key(0))
    ts, _ = program(ts, {"x": np.full((4, 1), 2.0**-13, np.float32)})
    assert -float(ts.model[0]) == gradient  # float16 ends at 2^-24
