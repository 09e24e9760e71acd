"""Meshes of two axes: an idle one, one that splits the model, and two that split the batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et
from tests.helpers import (
    HIDDEN,
    RATE,
    ROWS,
    TOKENS,
    Training,
    distance,
    dropout_scales,
    error_of,
    loss,
    make_batches,
    masks_of,
    metrics_of,
    network,
    run_key,
    train,
    train_by_hand,
)
from tests.tiers import pairwise

# As in the grid over one axis: ten steps in float32 against float64.
TOLERANCE = 3e-6
WRONG = 1e-3

MICROBATCHES = [1, 2, 4]
ORDERS = ["accumulate inside shard", "accumulate outside shard"]


def one_microbatch_has_no_order(microbatches: int, order: str, **others: Any) -> bool:
    return microbatches == 1 and order != ORDERS[0]


def over_microbatches(**options: Any) -> Any:
    cases = {"microbatches": MICROBATCHES, "order": ORDERS, **options}
    return pairwise(
        cases,
        same=one_microbatch_has_no_order,
        beyond=lambda microbatches, **others: microbatches == 2,
    )


def train_on(
    loss: Any,
    mesh: jax.sharding.Mesh,
    batch: Any,
    model: Any,
    microbatches: int,
    order: str,
    check: Callable[[et.TrainState], None] | None = None,
) -> Training:
    transforms = [et.accumulate(microbatches), et.shard(mesh, batch=batch, model=model)]
    if order == "accumulate outside shard":
        transforms.reverse()
    return train(et.pipe(loss, *transforms), make_batches(), check)


@functools.cache
def by_hand() -> Training:
    return train_by_hand(make_batches())


@over_microbatches(placement=[et.replicate(), et.fsdp("data", min_size=1)])
def test_an_idle_model_axis_changes_nothing(microbatches: int, placement: Any, order: str):
    mesh = et.mesh(data=4, model=2)
    training = train_on(loss, mesh, P("data"), placement, microbatches, order)
    assert distance(training, by_hand()) < TOLERANCE


@over_microbatches(
    placement=[et.replicate(), et.fsdp("data", min_size=1), et.fsdp("model", min_size=1)]
)
def test_a_batch_may_be_split_over_two_axes(microbatches: int, placement: Any, order: str):
    mesh = et.mesh(data=4, model=2)
    training = train_on(loss, mesh, P(("data", "model")), placement, microbatches, order)
    assert distance(training, by_hand()) < TOLERANCE


def test_a_leaf_may_be_split_over_both_batch_axes():
    placement = et.rules(
        {"first.weight": P(("data", "model")), "second.weight": P("data", "model")},
        otherwise=et.fsdp("model", min_size=1),
    )
    training = train_on(
        loss, et.mesh(data=4, model=2), P(("data", "model")), placement, 2, ORDERS[0]
    )
    assert distance(training, by_hand()) < TOLERANCE


def hidden_shard(model: PyTree, x: Array, key: Array) -> Array:
    """The part of the hidden units that this device of the model axis computes."""
    first = model["first"]
    hidden = jnp.tanh(x @ first["weight"] + first["bias"][None, None])
    # The mask counts elements, so that it is drawn whole and cut as the hidden units are.
    mask = et.dropout(jnp.ones((*x.shape[:2], HIDDEN)), RATE, key=key)
    width = hidden.shape[-1]
    start = jax.lax.axis_index("model") * width
    return hidden * jax.lax.dynamic_slice_in_dim(mask, start, width, axis=-1)


def tensor_parallel_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    """First layer split by columns, second by rows: the model's own psum joins them."""
    partial = hidden_shard(model, batch["x"], key) @ model["second"]["weight"]
    out = jax.lax.psum(partial, "model") + model["second"]["bias"][None, None]
    error = error_of(out, batch)
    return et.mean(error, where=batch["weight"]), state, metrics_of(error, batch["weight"])


TENSOR_PARALLEL = {
    "first.weight": P(None, "model"),
    "first.bias": P("model"),
    "second.weight": P("model"),
}


def split_over_model(ts: et.TrainState) -> None:
    for name, leaf in [
        ("weight", ts.model["first"]["weight"]),
        ("bias", ts.model["first"]["bias"]),
    ]:
        assert leaf.addressable_shards[0].data.shape[-1] == HIDDEN // 2, name


@over_microbatches()
def test_tensor_parallel_leaves_equal_whole_ones(microbatches: int, order: str):
    mesh, placement = et.mesh(data=4, model=2), et.rules(TENSOR_PARALLEL)
    training = train_on(
        tensor_parallel_loss, mesh, P("data"), placement, microbatches, order, split_over_model
    )
    assert distance(training, by_hand()) < TOLERANCE


@over_microbatches()
def test_tensor_parallel_leaves_may_be_split_over_data_too(microbatches: int, order: str):
    placement = et.rules(
        TENSOR_PARALLEL | {"first.weight": P("data", "model"), "second.weight": P("model", "data")},
        otherwise=et.fsdp("data", min_size=1),
    )
    mesh = et.mesh(data=4, model=2)
    training = train_on(
        tensor_parallel_loss, mesh, P("data"), placement, microbatches, order, split_over_model
    )
    assert distance(training, by_hand()) < TOLERANCE


def row_parallel_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    """Only the second layer is split: the replicated first has to get gradients from all shards."""
    first, second = model["first"], model["second"]
    hidden = jnp.tanh(batch["x"] @ first["weight"] + first["bias"][None, None])
    kept = et.dropout(hidden, RATE, key=key)
    width = second["weight"].shape[0]
    start = jax.lax.axis_index("model") * width
    partial = jax.lax.dynamic_slice_in_dim(kept, start, width, axis=-1) @ second["weight"]
    out = jax.lax.psum(partial, "model") + second["bias"][None, None]
    error = error_of(out, batch)
    return et.mean(error, where=batch["weight"]), state, metrics_of(error, batch["weight"])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rest", [et.replicate(), et.fsdp("data", min_size=1)])
def test_a_row_parallel_leaf_beside_replicated_ones(rest: Any, order: str):
    placement = et.rules({"second.weight": P("model")}, otherwise=rest)
    training = train_on(row_parallel_loss, et.mesh(data=4, model=2), P("data"), placement, 2, order)
    assert distance(training, by_hand()) < TOLERANCE


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_psum_is_an_error(order: str):
    def without(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
        out = hidden_shard(model, batch["x"], key) @ model["second"]["weight"]
        error = error_of(out, batch)
        return et.mean(error, where=batch["weight"]), state, {}

    mesh, placement = et.mesh(data=4, model=2), et.rules(TENSOR_PARALLEL)
    with pytest.raises(ValueError, match=r"varies over `model`.*psum\(..., 'model'\)"):
        train_on(without, mesh, P("data"), placement, 2, order)


def sequence_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    """Each device has some tokens of its examples: their masks differ by `fold_axis` alone."""
    error = error_of(network(model, batch["x"], et.fold_axis(key, "seq")), batch)
    return et.mean(error, where=batch["weight"]), state, metrics_of(error, batch["weight"])


def sequence_scales(step: int) -> np.ndarray:
    """What dropout multiplies with where token t lies on device t of the sequence axis."""
    keys = et.example_keys(run_key(), step, jnp.arange(ROWS))
    parts = [
        np.asarray(masks_of(jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, part)))[:, :1]
        for part in range(TOKENS)
    ]
    return np.concatenate(parts, axis=1).astype(np.float64)


@over_microbatches(
    placement=[et.replicate(), et.fsdp("data", min_size=1), et.fsdp("seq", min_size=1)]
)
def test_a_batch_split_by_sequence(microbatches: int, placement: Any, order: str):
    mesh = et.mesh(data=4, seq=TOKENS)
    training = train_on(sequence_loss, mesh, P("data", "seq"), placement, microbatches, order)
    assert distance(training, train_by_hand(make_batches(), scales=sequence_scales)) < TOLERANCE


def test_one_mask_for_all_parts_of_a_sequence_is_told_apart():
    def unfolded(step: int) -> np.ndarray:
        return np.concatenate([sequence_scales(step)[:, :1]] * TOKENS, axis=1)

    expected = train_by_hand(make_batches(), scales=sequence_scales)
    assert distance(train_by_hand(make_batches(), scales=unfolded), expected) > WRONG
    assert distance(train_by_hand(make_batches(), scales=dropout_scales), expected) > WRONG
