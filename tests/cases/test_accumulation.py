"""Recipes from public reports: what accumulation divides by, and what runs once a window.

The right answers are worked out by hand. The wrong ones are those that were reported; they are
computed here by the wrong method, so that each recipe is known to tell the two apart.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et


def f32(x: Any) -> Any:
    return np.asarray(x, np.float32)


def per_token(w: Any, state: Any, batch: Any, key: Any) -> Any:
    """Loss `w * x` at each token that counts, so that the gradient is the mean of x."""
    values = w * batch["x"].astype(w.dtype)
    return et.mean(values, where=batch["mask"]), state, {"x": et.mean(batch["x"], batch["mask"])}


def per_row(w: Any, state: Any, batch: Any, key: Any) -> Any:
    """Loss `w . x` a row, so that row i alone has the gradient x[i]."""
    return et.mean((batch["x"] * w[None]).reshape(len(batch["x"]), -1).sum(1)), state, {}


def train(
    loss: Callable[..., Any],
    start: Any,
    batches: list[Any],
    *transforms: Any,
    optimizer: Any = None,
    after: tuple[Any, ...] = (),
) -> tuple[et.TrainState, list[dict[str, float]]]:
    """Takes a step a batch, by plain SGD at rate 1 unless told otherwise."""
    optimizer = optax.sgd(1.0) if optimizer is None else optimizer
    step = et.pipe(loss, *transforms, et.update(optimizer), *after, et.jit)
    ts = step.init(lambda key: jnp.asarray(start, jnp.float32), key=jax.random.key(0))
    read = []
    for batch in batches:
        ts, metrics = step(ts, batch)
        read.append(et.fetch(metrics))
    return ts, read


def shard(**axes: Any) -> Any:
    return et.shard(et.mesh(**axes), batch=P(tuple(axes)))


def tokens(x: Any, counts: Any, width: int = 4) -> dict[str, np.ndarray]:
    """One row a microbatch: its first `counts` tokens are `x`, the padding is something else."""
    mask = np.arange(width) < np.asarray(counts)[:, None]
    return {"x": np.where(mask, np.asarray(x)[:, None], 99.0).astype(np.float32), "mask": mask}


# Case 1: the mean of microbatch means.

UNEQUAL = tokens([4.0, 0.0], [1, 3], width=3)


@pytest.mark.parametrize(
    "transforms",
    [
        (et.accumulate(2),),
        (shard(data=2),),
        (et.precision("bfloat16"), et.accumulate(2)),
        (et.precision("float16", loss_scaling=et.LossScaling(1024.0)), shard(data=2)),
    ],
    ids=["accumulate", "shard", "bfloat16", "float16"],
)
def test_every_token_counts_the_same(transforms):
    ts, [metrics] = train(per_token, 2.0, [UNEQUAL], *transforms)
    assert (metrics["loss"], metrics["grad_norm"], float(ts.model)) == (2.0, 1.0, 1.0)
    assert metrics["x"] == 1.0

    together = tokens([4.0], [1])
    together["x"], together["mask"] = f32([[4, 0, 0, 0]]), np.full((1, 4), True)
    whole, [whole_metrics] = train(per_token, 2.0, [together])
    assert (float(whole.model), whole_metrics["loss"]) == (1.0, 2.0)  # bit-equal: both exact


def test_mean_of_microbatch_means_is_told_apart():
    parts = [{name: array[i : i + 1] for name, array in UNEQUAL.items()} for i in range(2)]
    alone = [train(per_token, 2.0, [part])[1][0] for part in parts]
    assert np.mean([metrics["loss"] for metrics in alone]) == 4.0
    assert np.mean([metrics["grad_norm"] for metrics in alone]) == 2.0


@pytest.mark.parametrize("make", [optax.adam, lambda rate: optax.sgd(rate, momentum=0.9)])
def test_other_optimizers_see_the_same_gradients(make):
    batches = [UNEQUAL, tokens([1.0, 5.0], [3, 1], width=3)]
    cut, _ = train(per_token, 2.0, batches, et.accumulate(2), optimizer=make(0.5))
    whole, _ = train(per_token, 2.0, batches, optimizer=make(0.5))
    # The mean gradients, 1 and 2, are exact in both, and all after them is the same arithmetic.
    for a, b in zip(jax.tree.leaves(cut.opt_state), jax.tree.leaves(whole.opt_state), strict=True):
        assert np.array_equal(a, b)
    assert float(cut.model) == float(whole.model)


# Case 2: unequal counts over devices and microbatches.

COUNTS = np.array([[1, 3], [2, 0], [4, 4], [0, 1]])  # [device, microbatch]
VALUES = np.arange(1.0, 9.0).reshape(4, 2)
GRID = tokens(VALUES.ravel(), COUNTS.ravel())


@pytest.mark.parametrize(
    "transforms",
    [
        (et.accumulate(2), shard(data=4)),
        (shard(data=4), et.accumulate(2)),
        (et.accumulate(4), shard(data=2)),
        (et.accumulate(2), shard(a=2, b=2)),
        (et.accumulate(2), et.shard(et.mesh(data=2, seq=2), batch=P("data", "seq"))),
        (et.accumulate(8),),
        (),
    ],
    ids=[
        "microbatches_inside",
        "outside",
        "2_devices",
        "two_axes",
        "sequence",
        "1_device",
        "whole",
    ],
)
def test_count_is_summed_before_it_divides(transforms):
    ts, [metrics] = train(per_token, 0.0, [GRID], *transforms)
    right = np.float32(65 / 15)  # sums of integers are exact, so one rounding is left
    assert right == np.float32(4.3333333)
    assert -float(ts.model) == pytest.approx(right, rel=1e-7)
    assert metrics["x"] == pytest.approx(right, rel=1e-7)

    means = (COUNTS * VALUES).sum(1) / COUNTS.sum(1)
    assert means.mean() == 4.5625  # the mean of the devices' token means
    assert (np.sign(COUNTS) * VALUES).mean() == 3.125  # the mean of all microbatch means


# Case 4: leftovers. Microbatches are cut from a global batch, so that none is ever left over: a
# batch that does not divide is refused, and the end of the data is up to the loader.

ROWS = {"x": np.arange(1.0, 8.0, dtype=np.float32)}


def weighted(w: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(w * batch["x"], where=batch.get("weight")), state, {}


@pytest.mark.parametrize(("rows", "parts"), [(7, 4), (2, 3)])
@pytest.mark.parametrize("transforms", [(), (shard(data=1),)], ids=["alone", "in_shard"])
def test_leftover_microbatches_are_refused(rows, parts, transforms):
    batch = {"x": ROWS["x"][:rows]}
    with pytest.raises(ValueError, match=rf"num_microbatches={parts} and a batch of {rows} rows"):
        train(weighted, 0.0, [batch], et.accumulate(parts), *transforms)


@pytest.mark.parametrize(
    ("remainder", "epochs", "end", "count", "dropped"),
    [("pad", 1, -8.5, 2, 0), ("pad", 2, -17.0, 4, 0), ("drop", 1, -2.5, 1, 3)],
)
def test_loader_pads_or_drops_the_last_window(remainder, epochs, end, count, dropped):
    loader = et.data.Loader(
        ROWS, batch_size=4, shuffle=False, epochs=epochs, remainder=remainder, seed=0
    )
    schedule = optax.sgd(optax.constant_schedule(1.0))  # one that counts its updates
    ts, _ = train(weighted, 0.0, list(loader), et.accumulate(4), optimizer=schedule)
    assert float(ts.model) == end  # -7.0: the last window divided by 4
    assert optax.tree_utils.tree_get(ts.opt_state, "count") == count
    assert loader.dropped_per_epoch == dropped


def test_padding_counted_as_rows_is_told_apart():
    loader = et.data.Loader(ROWS, batch_size=4, shuffle=False, epochs=1)
    without_weight = [{"x": batch["x"] * batch["weight"].astype(np.float32)} for batch in loader]
    ts, _ = train(weighted, 0.0, without_weight, et.accumulate(4))
    assert float(ts.model) == -7.0


# Case 5: clipping before the microbatches are averaged.

CORNER = {"x": f32([[6, 0], [0, 8]])}


@pytest.mark.parametrize(
    "transforms", [(et.accumulate(2),), (shard(data=2),)], ids=["time", "mesh"]
)
def test_optimizer_runs_once_on_the_mean(transforms):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    ts, [metrics] = train(per_row, [0.0, 0.0], [CORNER], *transforms, optimizer=clipped)
    np.testing.assert_allclose(ts.model, [-0.6, -0.8], rtol=1e-6)  # 3/5 and 4/5, each rounded
    assert metrics["grad_norm"] == 5.0

    clip: Any = optax.clip_by_global_norm(1.0)
    each = [clip.update(jnp.asarray(row), optax.EmptyState())[0] for row in CORNER["x"]]
    np.testing.assert_allclose(-np.mean(each, axis=0), [-0.5, -0.5], rtol=1e-6)


@pytest.mark.parametrize(
    "transforms", [(et.accumulate(2),), (shard(data=2),)], ids=["time", "mesh"]
)
def test_elementwise_clip_and_moments_see_the_mean(transforms):
    optimizer = optax.chain(optax.clip(3.5), optax.adam(1.0, b1=0.5, b2=0.5))
    ts, _ = train(per_row, [0.0, 0.0], [CORNER], *transforms, optimizer=optimizer)
    adam = ts.opt_state[1][0]
    assert adam.mu.tolist() == [1.5, 1.75]  # half of (3, 3.5)
    assert adam.nu.tolist() == [4.5, 6.125]
    assert adam.count == 1


# Case 6: one microbatch that is not finite. The window is skipped as a whole.


@pytest.mark.parametrize(("bad", "place"), [(np.nan, 0), (np.nan, 1), (np.inf, 0), (-np.inf, 1)])
@pytest.mark.parametrize(
    "transforms", [(et.accumulate(2),), (shard(data=2),)], ids=["time", "mesh"]
)
def test_bad_microbatch_leaves_nothing_behind(bad, place, transforms):
    first = f32([1, 1])
    first[place] = bad
    windows = [{"x": first}, {"x": f32([1, 1])}]
    ts, [bad_metrics, good] = train(per_row, 0.0, windows, *transforms, after=(et.guard,))
    assert float(ts.model) == -1.0
    assert (bad_metrics["skipped"], good["skipped"]) == (1, 0)
    assert np.isnan(bad_metrics["loss"]) and good["loss"] == 0.0  # the mean of nothing; clean


def test_accumulator_that_keeps_nan_is_told_apart():
    optimizer: Any = optax.MultiSteps(optax.sgd(1.0), 2)
    w, state = jnp.zeros(()), optimizer.init(jnp.zeros(()))
    for grad in [jnp.nan, 1.0, 1.0, 1.0]:
        with jax.numpy_dtype_promotion("standard"):
            update, state = optimizer.update(jnp.asarray(grad, jnp.float32), state, w)
        w = w + update
    assert np.isnan(w) and np.isnan(state.acc_grads)


# Case 7: the loss that is reported.


@pytest.mark.parametrize(
    ("counts", "right"), [([1, 1, 1, 1], 3.0), ([1, 1, 1, 5], 4.5)], ids=["equal", "unequal"]
)
@pytest.mark.parametrize(
    "transforms",
    [(), (et.accumulate(4),), (et.accumulate(2), shard(data=2)), (shard(data=4),)],
    ids=["whole", "4_parts", "2x2", "4_devices"],
)
def test_reported_loss_is_that_of_the_global_batch(counts, right, transforms):
    losses = [1.0, 2.0, 3.0, 6.0]
    _, [metrics] = train(per_token, 1.0, [tokens(losses, counts, width=5)], *transforms)
    assert metrics["loss"] == metrics["x"] == metrics["grad_norm"] == right
    # The last microbatch; that divided by 4; a mean divided again; no mean at all.
    wrong = [losses[-1], losses[-1] / 4, np.mean(losses) / 4, np.sum(losses)]
    assert wrong == [6.0, 1.5, 0.75, 12.0]
    assert right not in wrong


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_reported_loss_of_a_scalar_and_of_two_terms(parts):
    def scalar(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return (w * batch["x"]).mean(), state, {}

    def two_terms(w: Any, state: Any, batch: Any, key: Any) -> Any:
        token_loss = et.mean(w * batch["x"], where=batch["mask"])
        return token_loss + 10.0 * et.mean(w * batch["x"][:, 0]), state, {}

    losses = [1.0, 2.0, 3.0, 6.0]
    ts, [metrics] = train(scalar, 1.0, [{"x": f32(losses)}], et.accumulate(parts))
    assert (metrics["loss"], float(ts.model)) == (3.0, -2.0)
    ragged = tokens(losses, [1, 1, 1, 5], width=5)
    ts, [metrics] = train(two_terms, 1.0, [ragged], et.accumulate(parts))
    assert (metrics["loss"], float(ts.model)) == (34.5, -33.5)  # 4.5 + 10 * 3


# Case 9: an average of the weights moves once an update.

AVERAGE, FOUR_TIMES = 9.994661745741283, 9.98069853025424  # in float64


def average_of(weights: np.ndarray, times: int) -> float:
    average = 10.0
    for weight in weights:
        for _ in range(times):
            average = 0.99 * average + 0.01 * weight
    return average


@pytest.mark.parametrize("parts", [1, 4])
def test_average_of_weights_moves_once_an_update(parts):
    weights = 10 - 0.01 * np.arange(1, 11)
    assert average_of(weights, 1) == pytest.approx(AVERAGE, rel=1e-15)
    assert average_of(weights, 4) == pytest.approx(FOUR_TIMES, rel=1e-15)
    batches = [{"x": np.ones(4, np.float32)}] * 10
    after = (et.ema(0.99),)
    ts, _ = train(
        per_row, 10.0, batches, et.accumulate(parts), optimizer=optax.sgd(0.01), after=after
    )
    # Ten roundings of float32 at 10, half an ulp (4.8e-7) each; the wrong answer is 1.4e-2 away.
    assert float(ts.ema) == pytest.approx(AVERAGE, abs=5e-6)


def to_host(ts: et.TrainState) -> list[np.ndarray]:
    return [
        np.array(jax.random.key_data(leaf) if leaf.dtype == ts.key.dtype else leaf)
        for leaf in jax.tree.leaves(ts)
    ]


def from_host(arrays: list[np.ndarray], like: et.TrainState) -> et.TrainState:
    leaves, structure = jax.tree.flatten(like)
    loaded = [
        jax.random.wrap_key_data(jnp.array(x)) if leaf.dtype == like.key.dtype else jnp.array(x)
        for leaf, x in zip(leaves, arrays, strict=True)
    ]
    return jax.tree.unflatten(structure, loaded)


def test_average_goes_on_from_a_saved_state_to_the_bit():
    batch = {"x": np.ones(4, np.float32)}
    step = et.pipe(
        per_row, et.accumulate(4), et.update(optax.adam(0.01)), et.ema(0.99), et.guard, et.donate
    )

    def five_steps(ts: et.TrainState) -> et.TrainState:
        for _ in range(5):
            ts, _ = step(ts, batch)
        return ts

    def start(seed: int) -> et.TrainState:
        return step.init(lambda key: jnp.float32(10), key=jax.random.key(seed))

    ts = five_steps(start(0))
    saved = to_host(ts)
    ts = five_steps(ts)
    other = five_steps(from_host(saved, start(1)))
    assert [x.tobytes() for x in to_host(other)] == [x.tobytes() for x in to_host(ts)]
    assert int(other.step) == 10 and float(other.ema) != float(other.model)
