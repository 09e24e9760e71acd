"""State, such as BatchNorm's: equal on any mesh if the model joins it; threaded in order.

A model that takes statistics over its batch has another answer for each way to cut the batch into
microbatches. That is no rounding, and the numbers below say what the answer is.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et
from models.layers import BatchNorm
from tests.helpers import HIDDEN, INPUT, OUTPUT, make_params
from tests.tiers import grid, pairwise

ORDERS = ["accumulate inside shard", "accumulate outside shard"]
PLACEMENTS = {"replicate": et.replicate(), "fsdp": et.fsdp("data", min_size=1)}
# A few steps in float32, summed in another order; the variance cancels some of the digits.
TOLERANCE = 1e-5
WRONG = 1e-3


def chain(loss: Any, devices: int, microbatches: int, order: str, placement: str) -> Any:
    shard = et.shard(et.mesh(data=devices), batch=P("data"), model=PLACEMENTS[placement])
    transforms = [et.accumulate(microbatches), shard]
    if order == "accumulate outside shard":
        transforms.reverse()
    return et.pipe(loss, *transforms)


def run(contribute: Any, make: Any, batches: list[Any]) -> et.TrainState:
    program = et.pipe(contribute, et.update(optax.sgd(0.5)), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    for batch in batches:
        ts, _ = program(ts, batch)
    return ts


def same_everywhere(tree: PyTree) -> bool:
    return all(
        np.array_equal(shard.data, leaf.addressable_shards[0].data)
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    )


def make_batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    return [
        {
            "x": rng.normal(size=(16, INPUT), loc=1.0).astype(np.float32)
            * np.linspace(0.5, 3, 16, dtype=np.float32)[:, None],
            "y": rng.normal(size=(16, OUTPUT)).astype(np.float32),
            "weight": rng.choice([0.0, 1.0, 3.0], size=16).astype(np.float32),
        }
        for _ in range(4)
    ]


def make_normalised(key: Array) -> tuple[PyTree, eqx.nn.State]:
    norm, state = eqx.nn.make_with_state(BatchNorm)(HIDDEN)
    return make_params() | {"norm": norm}, state


def normalised_loss(model: PyTree, state: eqx.nn.State, batch: PyTree, key: Array) -> Any:
    hidden = batch["x"] @ model["first"]["weight"]
    hidden, state = model["norm"](hidden, state, where=batch["weight"])
    out = jnp.tanh(hidden) @ model["second"]["weight"]
    error = ((out - batch["y"]) ** 2).mean(-1)
    return et.mean(error, where=batch["weight"]), state, {}


def train_plainly(groups: list[list[list[int]]]) -> dict[str, Any]:
    """The same in plain JAX on one device; each step's rows in `groups`, one statistic a group."""
    params: Any = make_params()
    params = {
        "first": params["first"]["weight"],
        "second": params["second"]["weight"],
        "scale": np.ones(HIDDEN, np.float32),
        "shift": np.zeros(HIDDEN, np.float32),
    }
    running = np.zeros(HIDDEN), np.ones(HIDDEN)

    @jax.jit
    def total(params: PyTree, batch: PyTree) -> Any:
        hidden, weight = batch["x"] @ params["first"], batch["weight"]
        share = (weight / weight.sum())[:, None]
        mean = (share * hidden).sum(0, keepdims=True)
        variance = (share * (hidden - mean) ** 2).sum(0, keepdims=True)
        hidden = (hidden - mean) / jnp.sqrt(variance + 1e-5)
        hidden = hidden * params["scale"][None] + params["shift"][None]
        error = ((jnp.tanh(hidden) @ params["second"] - batch["y"]) ** 2).mean(-1)
        return (error * weight).sum(), (mean[0], variance[0])

    for batch, rows in zip(make_batches(), groups, strict=True):
        grads = []
        for group in rows:
            part = jax.tree.map(lambda leaf, group=group: leaf[np.array(group)], batch)
            grad, statistics = jax.grad(total, has_aux=True)(params, part)
            grads.append(grad)
            running = tuple(0.9 * r + 0.1 * s for r, s in zip(running, statistics, strict=True))
        count = batch["weight"].sum()
        summed = jax.tree.map(lambda *g, n=count: sum(g) / n, *grads)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, summed)
    return {"params": params, "running": running}


def distance(ts: et.TrainState, expected: dict[str, Any]) -> float:
    norm = ts.model["norm"]
    found = {
        "params": {
            "first": ts.model["first"]["weight"],
            "second": ts.model["second"]["weight"],
            "scale": norm.weight,
            "shift": norm.bias,
        },
        "running": ts.state.get(norm.running),
    }
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(a - e)) / np.max(np.abs(e))) for a, e in pairs)


def whole_on_one(devices: int, placement: str) -> bool:
    return devices == 1 and placement != "replicate"


@pairwise({"devices": [1, 2, 4, 8], "placement": list(PLACEMENTS)[::-1]}, same=whole_on_one)
def test_joined_statistics_are_equal_on_any_mesh(devices: int, placement: str):
    contribute = chain(normalised_loss, devices, 1, ORDERS[0], placement)
    ts = run(contribute, make_normalised, make_batches())
    assert distance(ts, train_plainly([[list(range(16))]] * 4)) < TOLERANCE
    assert same_everywhere(ts.state)


@pairwise({"devices": [4, 2, 1], "order": ORDERS})
def test_statistics_of_microbatches_are_their_own(devices: int, order: str):
    """Microbatch m is the m-th half of each device's rows, so it depends on the mesh, too."""
    rows = np.arange(16).reshape(devices, 2, -1)
    groups = [[rows[:, m].ravel().tolist() for m in range(2)]] * 4
    ts = run(chain(normalised_loss, devices, 2, order, "fsdp"), make_normalised, make_batches())
    assert distance(ts, train_plainly(groups)) < TOLERANCE
    assert same_everywhere(ts.state)
    # Not what the full batch gives, nor the same microbatches in the other order.
    assert distance(ts, train_plainly([[list(range(16))]] * 4)) > WRONG
    assert distance(ts, train_plainly([groups[0][::-1]] * 4)) > WRONG


def statistics_of(rows: list[float], devices: int, microbatches: int, order: str) -> list[float]:
    """Running mean and variance after one step from 0 and 1, with momentum 0.9."""

    def loss(model: PyTree, state: eqx.nn.State, batch: PyTree, key: Array) -> Any:
        y, state = model(batch["x"][:, None], state)
        return et.mean(y), state, {}

    contribute = chain(loss, devices, microbatches, order, "replicate")
    make = eqx.nn.make_with_state(BatchNorm)
    ts = run(contribute, lambda key: make(1), [{"x": np.array(rows, np.float32)}])
    assert same_everywhere(ts.state)
    return [float(leaf[0]) for leaf in ts.state.get(ts.model.running)]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.grid), 4, 8])
def test_running_statistics_of_eight_rows(devices: int):
    # Mean 2.5 and biased variance 9.25.
    found = statistics_of([0, 2, 4, 10, 1, 1, 1, 1], devices, 1, ORDERS[0])
    assert np.allclose(found, [0.25, 0.9 * 1 + 0.1 * 9.25], rtol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_running_statistics_with_accumulation_are_not_those_of_the_batch(order: str):
    # Microbatches {0, 2} and {4, 10}: means 1 and 7, variances 1 and 9. Full: 4 and 14.
    assert np.allclose(statistics_of([0, 2, 4, 10], 1, 1, order), [0.4, 2.3], rtol=1e-6)
    assert np.allclose(statistics_of([0, 2, 4, 10], 1, 2, order), [0.79, 1.8], rtol=1e-6)
    # The same two microbatches, each spread over two devices.
    assert np.allclose(statistics_of([0, 4, 2, 10], 2, 2, order), [0.79, 1.8], rtol=1e-6)


def counting_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    """A state that each device makes from its own rows, and integers and booleans beside it."""
    state = {
        "largest": jnp.maximum(state["largest"], batch["x"].max()),
        "calls": state["calls"] + 1,
        "rows": state["rows"] + (batch["x"] > 3).sum().astype(jnp.int32),
        "seen": state["seen"] | (batch["x"] > 3).any(),
    }
    return et.mean((batch["x"] - model["w"]) ** 2), state, {}


def make_counting(key: Array) -> Any:
    state = {"largest": 0.0, "calls": 0, "rows": 0, "seen": False}
    return {"w": jnp.zeros(())}, state


@pytest.mark.parametrize(
    ("order", "largest"),
    [
        # Device 0 has 1, 0, 2, 1 and device 1 has 0, 5, 6, 3: the average of 2 and 6.
        (ORDERS[0], 4.0),
        # Averaged after 1, 0 | 0, 5, as 3, and again after 2, 1 | 6, 3: of 3 and 6.
        (ORDERS[1], 4.5),
    ],
)
def test_state_that_is_not_joined_comes_out_as_the_average(order: str, largest: float):
    batch = {"x": np.array([1, 0, 2, 1, 0, 5, 6, 3], np.float32)}
    ts = run(chain(counting_loss, 2, 2, order, "replicate"), make_counting, [batch])
    assert same_everywhere(ts.state)
    assert float(ts.state["largest"]) == largest
    # Counts are not averaged: the largest of them is right on every device that counts the same.
    assert int(ts.state["calls"]) == 2 and int(ts.state["rows"]) == 2
    assert bool(ts.state["seen"])


INTEGERS = [
    ("uint32", 3_000_000_000, 5),
    ("int32", 2**31 - 1, -(2**31)),
    ("uint8", 250, 3),
    ("int8", -100, -128),
    ("bool", True, False),
    ("int64", 2**40 + 1, 2**40),
    ("int64", -(2**40), -(2**63)),
    ("uint64", 2**63 + 1, 2**63),
]


@pytest.mark.parametrize(
    ("integers", "order"),
    # By turns: an integer takes one way for all dtypes in each order of sums.
    [
        ((one, order) if (place + (order == "tree")) % 2 == 0 else grid(one, order))
        for place, one in enumerate(INTEGERS)
        for order in (None, "tree")
    ],
)
def test_integers_of_a_state_keep_every_bit(integers: Any, order: str | None):
    dtype, largest, other = integers

    def loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
        return et.mean(model["w"] * batch["x"]), batch["seen"].max(), {}

    def make(key: Array) -> Any:
        return {"w": jnp.zeros((), jnp.float32)}, jnp.zeros((), dtype)

    batch = {"x": np.ones(4, np.float32), "seen": np.array([other, largest, other, other], dtype)}
    with jax.enable_x64(dtype.endswith("64")):
        shard = et.shard(et.mesh(data=2), batch=P("data"), order=order)
        cut = et.accumulate(2 if order == "tree" else 1, order=order)
        ts = run(et.pipe(loss, cut, shard), make, [batch])
    assert same_everywhere(ts.state)
    assert ts.state.dtype == dtype and int(ts.state) == largest


def alternating_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    """Counts depend on the state: a row of the second microbatch counts twice."""
    weight = jnp.ones_like(batch["x"]) * (state["calls"] + 1)
    loss = et.mean(model["w"] * batch["x"], where=weight) + 0.5 * et.mean(model["w"] * batch["x"])
    return loss, {"calls": state["calls"] + 1}, {}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("devices", [1, 2])
def test_counts_may_depend_on_the_state(devices: int, order: str):
    # Microbatches {1, 2} and {3, 4}, as two devices cut the rows below.
    rows = [1, 2, 3, 4] if devices == 1 else [1, 3, 2, 4]
    ts = run(
        chain(alternating_loss, devices, 2, order, "replicate"),
        lambda key: ({"w": jnp.zeros(())}, {"calls": 0.0}),
        [{"x": np.array(rows, np.float32)}],
    )
    gradient = (1 + 2 + 2 * 3 + 2 * 4) / (1 + 1 + 2 + 2) + 0.5 * 2.5
    assert np.isclose(float(ts.model["w"]), -0.5 * gradient, rtol=1e-6)
    # The pass that counts first leaves no trace.
    assert float(ts.state["calls"]) == 2


@pytest.mark.parametrize("devices", [None, 1, 2])
def test_a_state_of_equinox_may_be_set_by_the_loss_itself(devices: int | None):
    class Counter(eqx.Module):
        weight: Array
        index: eqx.nn.StateIndex

        def __init__(self) -> None:
            self.weight, self.index = jnp.zeros(()), eqx.nn.StateIndex(jnp.zeros(()))

    def loss(model: Counter, state: eqx.nn.State, batch: PyTree, key: Array) -> Any:
        state = state.set(model.index, state.get(model.index) + 1)
        return et.mean((model.weight - batch["x"]) ** 2), state, {}

    contribute = loss if devices is None else chain(loss, devices, 2, ORDERS[0], "replicate")
    make = eqx.nn.make_with_state(Counter)
    ts = run(contribute, lambda key: make(), [{"x": np.arange(4, dtype=np.float32)}] * 3)
    assert float(ts.state.get(ts.model.index)) == (3 if devices is None else 6)
