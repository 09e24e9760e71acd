"""One bad example, on one device, in one microbatch, with everything on that a step can carry.

Afterwards every bit of the TrainState on every device is what it was before, and the run goes on as
one that never met that batch.
"""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from models.layers import BatchNorm, Linear

ROWS, INPUT = 16, 8


class Network(eqx.Module):
    first: Linear
    norm: BatchNorm
    second: Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key)
        self.first = Linear(INPUT, 16, key=keys[0])
        self.norm = BatchNorm(16)
        self.second = Linear(16, 4, key=keys[1])


def loss(model: Network, state: Any, batch: Any, key: Any) -> Any:
    hidden, state = model.norm(model.first(batch["x"]), state)
    hidden = et.dropout(jax.nn.relu(hidden), 0.1, key=key)
    logits = model.second(hidden).astype("float32")
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return et.mean(nll), state, {"largest": et.Max(nll.max())}


def batches(n: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(ROWS, INPUT)).astype(np.float32),
            "y": rng.integers(0, 4, ROWS).astype(np.int32),
        }
        for _ in range(n)
    ]


def with_bad_row(batch: dict[str, np.ndarray], value: float) -> dict[str, np.ndarray]:
    """Row 13: the last but one device along `data`, its second microbatch."""
    x = batch["x"].copy()
    x[13, 2] = value
    return {**batch, "x": x}


def on_every_device(ts: et.TrainState) -> dict[str, list[bytes]]:
    """The bits that each device holds, but of the step and of the guard's own counts."""
    return {
        name: [np.array(shard.data).tobytes() for shard in leaf.addressable_shards]
        for name, leaf in zip(ts.structure.names, ts.leaves, strict=True)
        if name != "step" and not name.startswith("extra.guard")
    }


@pytest.fixture(scope="module")
def program() -> Any:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.add_decayed_weights(0.1),
        optax.sgd(schedule, momentum=0.9, nesterov=True),
    )
    return et.pipe(
        loss,
        et.precision("float16", loss_scaling=et.LossScaling(initial=1024.0, period=2)),
        et.accumulate(2),
        et.shard(et.mesh(data=4, model=2), batch=P("data"), model=et.fsdp("data", min_size=1)),
        et.update(optimizer),
        et.ema(0.9),
        et.guard(nonfinite="skip", spike=et.Spike(window=4), replicas_every=3),
        et.donate,
    )


def start(program: Any) -> et.TrainState:
    return program.init(eqx.nn.make_with_state(Network), key=jax.random.key(0))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nothing_moves_on_any_device_and_the_run_goes_on_as_if_it_had_not_been(program, value):
    good = batches(4)
    ts = start(program)
    for batch in good[:2]:
        ts, _ = program(ts, batch)
    before = on_every_device(ts)
    ts, metrics = program(ts, with_bad_row(good[2], value))
    assert on_every_device(ts) == before
    assert (float(metrics["skipped"]), int(ts.step)) == (1, 3)

    never = start(program)
    for batch in good[:2]:
        never, _ = program(never, batch)
    never = never.replace(step=never.step + 1)  # a skipped step has its number, and so its keys
    for batch in good[2:]:
        ts, seen = program(ts, batch)
        never, expected = program(never, batch)
        assert seen["loss"].value == expected["loss"].value
    assert on_every_device(ts) == on_every_device(never) != before
    program.check(ts)
    assert program.compilations == 1


def test_a_learning_rate_that_ruins_the_parameters_is_held_back_too():
    """Loss and gradients are finite, and what becomes of the parameters is not."""

    def rates(count: Any) -> Any:
        return jax.numpy.where(count < 2, 0.1, np.inf)

    def plain(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(w * batch["x"].mean(1)), state, {}

    guard = et.guard(nonfinite="skip", max_consecutive=2)
    program = et.pipe(plain, et.update(optax.sgd(rates)), guard, et.donate)
    ts = program.init(lambda key: jax.numpy.float32(1), key=jax.random.key(0))
    (batch,) = batches(1)
    for _ in range(4):
        ts, _ = program(ts, batch)
    with pytest.raises(et.NonFiniteError, match="the new parameters were not finite") as caught:
        program.check(ts)
    assert caught.value.state is not None and np.isfinite(float(caught.value.state.model))
    assert [trip.causes for trip in program.trips] == [("update",), ("update",)]
    assert [trip.step for trip in program.trips] == [2, 3]
