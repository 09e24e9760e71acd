"""`evaluate` measures a whole data set alike, however it is cut into batches and devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

ROWS, WIDTH = 22, 3
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "label": RNG.integers(0, 2, size=ROWS),
    "length": RNG.integers(1, WIDTH + 1, size=ROWS),
}


def f32(x: Any) -> Any:
    return np.asarray(x, np.float32)


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    scores = batch["x"] * model[None]
    hit = (scores.sum(1) > 0).astype(jnp.int32) == batch["label"]
    tokens = jnp.arange(WIDTH)[None] < batch["length"][:, None]
    weight = batch["weight"][:, None] * tokens.astype(jnp.float32)
    metrics = {
        "accuracy": et.mean(hit, where=batch["weight"]),
        "rows": et.Sum(batch["weight"].sum()),
        "largest": et.Max(jnp.where(weight > 0, scores, -jnp.inf).max()),
    }
    return et.mean(scores**2, where=weight), state, metrics


MODEL = f32([1.0, -2.0, 0.5])


def right() -> dict[str, float]:
    scores = DATA["x"].astype(np.float64) * MODEL
    tokens = np.arange(WIDTH) < DATA["length"][:, None]
    return {
        "loss": (scores**2)[tokens].mean(),
        "accuracy": ((scores.sum(1) > 0) == DATA["label"]).mean(),
        "rows": ROWS,
        "largest": scores[tokens].max(),
    }


def state_of(*chain: Any) -> et.TrainState:
    step = et.pipe(loss, *chain, et.update(optax.adam(0.1)))
    return step.init(lambda key: jnp.asarray(MODEL), key=jax.random.key(0))


def measure(batch_size: int, *chain: Any) -> dict[str, float]:
    evaluation = et.pipe(loss, *chain, et.evaluate)
    ts = state_of(*chain)
    loader = et.data.Loader(DATA, batch_size=batch_size, shuffle=False, epochs=1)
    read = et.fetch(et.merge(*(evaluation(ts, batch) for batch in loader)))
    assert evaluation.compilations == 1
    return read


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 22, 23])
def test_result_does_not_depend_on_the_batch_size(batch_size):
    read = measure(batch_size)
    assert read == pytest.approx(right(), rel=1e-6)  # float32 sums within a batch


@pytest.mark.parametrize(("devices", "batch_size"), [(1, 7), (2, 6), (4, 8), (8, 16)])
@pytest.mark.parametrize("parts", [1, 2])
def test_result_does_not_depend_on_the_devices(devices, batch_size, parts):
    shard = et.shard(et.mesh(data=devices), batch=P("data"))
    if batch_size % (devices * parts):
        batch_size *= parts
    read = measure(batch_size, et.accumulate(parts), shard)
    assert read == pytest.approx(right(), rel=1e-6)


def test_mean_of_batch_means_is_told_apart():
    ts, evaluation = state_of(), et.evaluate(loss)
    loader = et.data.Loader(DATA, batch_size=10, shuffle=False, epochs=1)
    means = [et.fetch(evaluation(ts, batch))["accuracy"] for batch in loader]
    assert np.mean(means) != pytest.approx(right()["accuracy"], rel=1e-3)


BATCH = {**DATA, "weight": np.ones(ROWS, np.float32)}


@pytest.mark.parametrize("chain", [(), (et.shard(et.mesh(data=2), batch=P("data")),)])
def test_train_state_is_left_alone(chain):
    program = et.pipe(loss, *chain, et.update(optax.adam(0.1)), et.donate)
    ts = program.init(lambda key: jnp.asarray(MODEL), key=jax.random.key(0))
    ts, _ = program(ts, BATCH)
    evaluation = et.pipe(loss, *chain, et.evaluate)
    before = [np.array(leaf) for leaf in jax.tree.leaves((ts.model, ts.opt_state, ts.step))]
    once, again = (et.fetch(evaluation(ts, BATCH)) for _ in range(2))
    assert once == again
    after = [np.array(leaf) for leaf in jax.tree.leaves((ts.model, ts.opt_state, ts.step))]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True))
    ts, metrics = program(ts, BATCH)
    assert et.fetch(metrics)["loss"] == pytest.approx(once["loss"], rel=1e-6)


def test_state_that_the_loss_returns_is_dropped():
    def counted(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(model * batch["x"].sum(1) * state["n"]), {"n": state["n"] + 1}, {}

    step = et.update(optax.sgd(0.1))(counted)
    ts = step.init(lambda key: (jnp.float32(1), {"n": 1.0}), key=jax.random.key(0))
    evaluation = et.evaluate(counted)
    one, two = (et.fetch(evaluation(ts, BATCH))["loss"] for _ in range(2))
    assert one == two and float(ts.state["n"]) == 1


def test_nothing_is_differentiated():
    text = str(jax.make_jaxpr(lambda ts, b: et.evaluate(loss)(ts, b))(state_of(), BATCH))
    step = et.update(optax.sgd(0.1))(loss)
    trained = str(jax.make_jaxpr(lambda ts, b: step(ts, b)[0].model)(state_of(), BATCH))
    assert "transpose" not in text and text.count(" = mul ") < trained.count(" = mul ")


def test_terms_of_a_loss_keep_their_denominators():
    def two_terms(model: Any, state: Any, batch: Any, key: Any) -> Any:
        scores = batch["x"] * model[None]
        return et.mean(scores**2, where=batch["weight"]) + 3.0 * et.mean(scores[:2]), state, {}

    ts, evaluation = state_of(), et.evaluate(two_terms)
    halves = [jax.tree.map(lambda x, cut=cut: x[cut], BATCH) for cut in (slice(11), slice(11, 22))]
    read = et.fetch(et.merge(*(evaluation(ts, half) for half in halves)))
    scores = DATA["x"].astype(np.float64) * MODEL
    auxiliary = scores[[0, 1, 11, 12]].mean()
    assert read["loss"] == pytest.approx((scores**2).mean() + 3 * auxiliary, rel=1e-6)


def test_two_train_states_of_one_program_share_a_compilation():
    program = et.pipe(loss, et.update(optax.adam(0.1)), et.jit)
    evaluation = et.evaluate(loss)
    for seed in range(2):
        ts = program.init(lambda key: jax.random.normal(key, (WIDTH,)), key=jax.random.key(seed))
        evaluation(ts, BATCH)
        ts, _ = program(ts, BATCH)
        evaluation(ts, BATCH)
    assert evaluation.compilations == 1
