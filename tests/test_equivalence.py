"""Training is the same on any mesh, under any accumulation: as by hand, in numpy, on one device."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et
from tests.helpers import (
    ROWS,
    STEPS,
    Batch,
    Params,
    Training,
    combined_loss,
    combined_mean,
    distance,
    dropout_scales,
    error_of,
    loss,
    make_batches,
    metrics_of,
    network,
    totals,
    train,
    train_by_hand,
    weighted_mean,
)
from tests.tiers import pairwise

# Ten steps in float32 against float64, each number a sum of a hundred: seen are 3e-7 to 7e-7.
TOLERANCE = 3e-6
# The least by which a wrong answer must differ: far beyond what rounding could explain.
WRONG = 1e-3

DEVICES = [1, 2, 4, 8]
MICROBATCHES = [1, 2, 4]
PLACEMENTS = {"replicate": et.replicate(), "fsdp": et.fsdp("data", min_size=1)}
ORDERS = ["accumulate inside shard", "accumulate outside shard"]


def chain(loss: Any, devices: int, microbatches: int, placement: str, order: str) -> Any:
    shard = et.shard(et.mesh(data=devices), batch=P("data"), model=PLACEMENTS[placement])
    transforms = [et.accumulate(microbatches), shard]
    if order == "accumulate outside shard":
        transforms.reverse()
    return et.pipe(loss, *transforms)


def placed(devices: int, placement: str) -> Callable[[et.TrainState], None]:
    """A check that a mesh and a placement are what they say, and not all one device."""

    def check(ts: et.TrainState) -> None:
        for leaf in jax.tree.leaves((ts.model, ts.opt_state)):
            shards = leaf.addressable_shards
            split = placement == "fsdp"
            assert len(shards) == devices
            assert all(s.data.size * (devices if split else 1) == leaf.size for s in shards)

    return check


@functools.cache
def by_hand() -> Training:
    return train_by_hand(make_batches())


@functools.cache
def combined_by_hand() -> Training:
    return train_by_hand(make_batches(), combined_mean)


def same_program(devices: int, microbatches: int, placement: str, order: str) -> bool:
    """On one device nothing is split, and one microbatch has no order."""
    return (devices == 1 and placement == "fsdp") or (microbatches == 1 and order != ORDERS[0])


@pairwise(
    {
        "devices": DEVICES,
        "microbatches": MICROBATCHES,
        "placement": list(PLACEMENTS),
        "order": ORDERS,
    },
    same=same_program,
    beyond=lambda devices, microbatches, **others: devices == 2 or microbatches == 2,
)
def test_training_equals_a_loop_by_hand(
    devices: int, microbatches: int, placement: str, order: str
):
    contribute = chain(loss, devices, microbatches, placement, order)
    training = train(contribute, make_batches(), placed(devices, placement))
    assert distance(training, by_hand()) < TOLERANCE


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.grid), 4])
def test_training_without_a_mesh_equals_a_loop_by_hand(microbatches: int):
    training = train(et.accumulate(microbatches)(loss), make_batches())
    assert distance(training, by_hand()) < TOLERANCE


@pairwise(
    {
        "devices": [1, 4],
        "microbatches": MICROBATCHES,
        "placement": list(PLACEMENTS),
        "order": ORDERS,
    },
    same=same_program,
    beyond=lambda microbatches, **others: microbatches == 2,
)
def test_terms_are_divided_by_their_own_counts(
    devices: int, microbatches: int, placement: str, order: str
):
    contribute = chain(combined_loss, devices, microbatches, placement, order)
    training = train(contribute, make_batches())
    assert distance(training, combined_by_hand()) < TOLERANCE


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("further", [0.0, 1.0], ids=["one term", "two terms"])
def test_count_that_depends_on_parameters_has_no_gradient(microbatches: int, further: float):
    x = np.arange(8, dtype=np.float32)

    def loss(w: Any, state: Any, batch: Any, key: Any) -> Any:
        value = et.Mean(
            jnp.sum(batch["x"] * w), jnp.sum(jax.nn.sigmoid(w) * jnp.ones_like(batch["x"]))
        )
        if further:
            value = value + further * et.mean((batch["x"] - w) ** 2)
        return value, state, {}

    step = et.pipe(loss, et.accumulate(microbatches), et.update(optax.sgd(1.0)), et.jit)
    ts = step.init(lambda key: jnp.ones(()), key=jax.random.key(0))
    ts, _ = step(ts, {"x": x})
    count = 8 / (1 + np.exp(-1.0))
    gradient = x.sum() / count + further * 2 * np.mean(1 - x)
    np.testing.assert_allclose(ts.model, 1 - gradient, rtol=1e-6)


def plain_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    """A loss that is a scalar, as one writes it without the kit."""
    error = error_of(network(model, batch["x"], key), batch)
    return error.mean(), state, metrics_of(error, batch["ones"])


@pairwise(
    {"devices": [1, 4], "microbatches": [1, 4], "order": ORDERS},
    same=lambda devices, microbatches, order: microbatches == 1 and order != ORDERS[0],
)
def test_a_scalar_loss_is_the_mean_over_rows(devices: int, microbatches: int, order: str):
    full = [batch | {"weight": np.ones_like(batch["weight"])} for batch in make_batches()]
    named = [{"x": b["x"], "y": b["y"], "ones": b["weight"]} for b in full]
    training = train(chain(plain_loss, devices, microbatches, "fsdp", order), named)
    assert distance(training, train_by_hand(full)) < TOLERANCE


def parts(rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, ROWS, rows))


def mean_of_means(params: Params, batch: Batch, scales: np.ndarray) -> tuple[float, Params]:
    """Wrong: the mean of what four microbatches, or four devices, have as their means."""
    sums = [totals(params, batch, scales, rows) for rows in parts(ROWS // 4)]
    counts = [max(part.weight, 1.0) for part in sums]  # some parts are all padding
    grads = [
        jax.tree.map(lambda g, n=n: g / n / 4, part.error_grads)
        for part, n in zip(sums, counts, strict=True)
    ]
    value = np.mean([part.error / n for part, n in zip(sums, counts, strict=True)])
    return float(value), jax.tree.map(lambda *g: sum(g), *grads)


def summed_twice(params: Params, batch: Batch, scales: np.ndarray) -> tuple[float, Params]:
    """Wrong: the gradient of a replicated parameter, summed over two devices once more."""
    value, grads = weighted_mean(params, batch, scales)
    return value, jax.tree.map(lambda g: 2 * g, grads)


def one_count(params: Params, batch: Batch, scales: np.ndarray) -> tuple[float, Params]:
    """Wrong: both terms of the combined loss divided by the count of the first."""
    right = totals(params, batch, scales)
    wrong = batch | {"weight": batch["weight"] * np.float32(right.rows / right.weight)}
    value, grads = combined_mean(params, wrong, scales)
    factor = right.rows / right.weight
    value = right.error / right.weight + (value - right.error / right.weight) * factor
    return value, jax.tree.map(
        lambda g, e: e / right.weight + (g - e / right.weight) * factor, grads, right.error_grads
    )


def padding_counted(params: Params, batch: Batch, scales: np.ndarray) -> tuple[float, Params]:
    """Wrong: the totals divided by the number of tokens, padding and all."""
    sums = totals(params, batch, scales)
    return sums.error / sums.weights.size, jax.tree.map(
        lambda g: g / sums.weights.size, sums.error_grads
    )


@pytest.mark.parametrize("wrong", [mean_of_means, summed_twice, padding_counted])
def test_wrong_means_are_told_apart(wrong: Any):
    assert distance(train_by_hand(make_batches(), wrong), by_hand()) > WRONG


def test_one_count_for_two_terms_is_told_apart():
    assert distance(train_by_hand(make_batches(), one_count), combined_by_hand()) > WRONG


def test_wrong_masks_are_told_apart():
    def same_each_step(step: int) -> np.ndarray:
        return dropout_scales(0)

    def same_each_part(step: int) -> np.ndarray:
        return np.concatenate([dropout_scales(step)[: ROWS // 2]] * 2)

    masks = np.stack([dropout_scales(step) for step in range(STEPS)])
    assert len(np.unique(masks.reshape(STEPS * ROWS, -1), axis=0)) == STEPS * ROWS
    for scales in (same_each_step, same_each_part):
        assert distance(train_by_hand(make_batches(), scales=scales), by_hand()) > WRONG


def test_every_part_of_the_batches_weighs_differently():
    """What the answers above rest on: equal parts would hide a mean of means."""
    for batch in make_batches():
        for rows in (1, 2, 4, 8):
            weights = [batch["weight"][part].sum() for part in parts(rows)]
            assert len(set(weights)) > 2
        assert (batch["weight"].sum(1) == 0).any()
    padded = make_batches()[-1]["weight"]
    assert (padded.sum(1)[ROWS // 2 :] == 0).all()
