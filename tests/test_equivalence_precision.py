"""Narrow computing: as a plain JAX loop in that dtype, and equal on any mesh to float32 rounding.

What a narrow dtype rounds depends on which rows share a matrix product. So all cells cut the batch
into the same eight lanes (devices times microbatches), and what is left to differ is the order in
which the lanes are summed, in float32.
"""

import functools
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
    LEARNING_RATE,
    ROWS,
    Batch,
    Training,
    dropout_scales,
    loss,
    make_batches,
    make_params,
    train,
    train_by_hand,
)
from tests.tiers import pairwise

pytestmark = pytest.mark.codegen

LANES = 8
# Gradients of the first step, from equal parameters: eight float32 numbers summed in another order.
ROUNDING = 1e-6
# Later on a rounding in float32 may tip a parameter over to the next number of the narrow dtype.
NARROW = {"bfloat16": 2**-8, "float16": 2**-11}
# Each scale is a power of two, so that it changes no bit of what neither over- nor underflows.
SCALE = {"bfloat16": None, "float16": et.LossScaling(initial=4.0)}


def largest_difference(actual: PyTree, expected: PyTree) -> float:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(a - e)) / np.max(np.abs(e))) for a, e in pairs)


def cast(tree: PyTree, dtype: str) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


@functools.partial(jax.jit, static_argnames="dtype")
def plain_grad(params: PyTree, batch: Batch, scales: Array, dtype: str) -> tuple[Array, PyTree]:
    """The total error of some rows and its gradient, in plain JAX."""

    def total(params: PyTree) -> Array:
        first, second = cast(params["first"], dtype), cast(params["second"], dtype)
        hidden = jnp.tanh(cast(batch["x"], dtype) @ first["weight"] + first["bias"][None, None])
        kept = (hidden.astype(jnp.float32) * scales).astype(dtype)
        out = kept @ second["weight"] + second["bias"][None, None]
        error = ((out - cast(batch["y"], dtype)) ** 2).mean(-1)
        scaling = SCALE[dtype]
        scale = 1.0 if scaling is None else scaling.initial
        return (error.astype(jnp.float32) * batch["weight"]).sum() * scale

    value, grads = jax.value_and_grad(total)(params)
    scaling = SCALE[dtype]
    scale = 1.0 if scaling is None else scaling.initial
    return value / scale, jax.tree.map(lambda g: g / scale, grads)


@functools.cache
def plain_training(dtype: str, lanes: int = LANES, sum_dtype: str = "float32") -> Training:
    """A loop without the kit; gradients of the lanes are added in `sum_dtype`."""
    params: Any = make_params()
    metrics, all_grads = [], []
    for step, batch in enumerate(make_batches()):
        scales = dropout_scales(step).astype(np.float32)
        total, grads = 0.0, cast(jax.tree.map(jnp.zeros_like, params), sum_dtype)
        for start in range(0, ROWS, ROWS // lanes):
            rows = slice(start, start + ROWS // lanes)
            lane = jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)
            value, lane_grads = plain_grad(params, lane, scales[rows], dtype)
            total += float(value)
            grads = jax.tree.map(jnp.add, grads, cast(lane_grads, sum_dtype))
        count = batch["weight"].sum()
        grads = jax.tree.map(lambda g, n=count: np.asarray(g, np.float32) / n, grads)
        metrics.append({"loss": total / count})
        all_grads.append(grads)
        params = jax.tree.map(lambda p, g: p - np.float32(LEARNING_RATE) * g, params, grads)
    return Training(metrics, all_grads, params)


@pairwise(
    {
        "dtype": ["bfloat16", "float16"],
        "devices": [1, 2, 4, 8],
        "placement": [et.replicate(), et.fsdp("data", min_size=1)],
        "order": ["accumulate inside shard", "accumulate outside shard"],
    },
    beyond=lambda devices, **others: devices == 2,
)
def test_narrow_training_equals_a_plain_loop(dtype: str, devices: int, placement: Any, order: str):
    shard = et.shard(et.mesh(data=devices), batch=P("data"), model=placement)
    transforms = [et.accumulate(LANES // devices), shard]
    if order == "accumulate outside shard":
        transforms.reverse()
    narrow = et.precision(dtype, loss_scaling=SCALE[dtype])
    training = train(et.pipe(loss, narrow, *transforms), make_batches())

    expected = plain_training(dtype)
    assert largest_difference(training.grads[0], expected.grads[0]) < ROUNDING
    losses = [[step["loss"] for step in found.metrics] for found in (training, expected)]
    assert abs(losses[0][0] / losses[1][0] - 1) < ROUNDING
    assert np.allclose(losses[0], losses[1], rtol=NARROW[dtype], atol=0)
    assert largest_difference(training.params, expected.params) < NARROW[dtype]
    assert {leaf.dtype for leaf in jax.tree.leaves(training.params)} == {np.dtype(np.float32)}


def test_the_loss_scale_is_that_of_a_mean_however_many_terms_a_loss_has():
    rows, scale = 1024, et.LossScaling().initial
    met: list[float] = []

    @jax.custom_vjp
    def probe(x: Array) -> Array:
        return x

    def backward(_: None, grad: Array) -> tuple[Array]:
        jax.debug.callback(lambda g: met.append(float(g)), jnp.abs(grad).max())
        return (grad,)

    probe.defvjp(lambda x: (x, None), backward)

    def step(loss: Any) -> None:
        program = et.pipe(loss, et.precision("float16"), et.update(optax.sgd(0.1)), et.jit)
        ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
        jax.block_until_ready(program(ts, {"x": np.ones(rows, np.float32)}))
        jax.effects_barrier()

    def first(model: Any, batch: Any) -> Any:
        return et.mean(probe(batch["x"] * model))

    step(lambda model, state, batch, key: (first(model, batch), state, {}))
    step(lambda model, state, batch, key: (first(model, batch) + et.mean(batch["x"]), state, {}))
    assert met == [scale / rows, scale / rows]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_roundings_are_told_apart(dtype: str):
    right = plain_training(dtype).grads[0]
    # One lane, sums kept in the narrow dtype, and no narrow dtype at all.
    assert largest_difference(plain_training(dtype, lanes=1).grads[0], right) > 100 * ROUNDING
    narrow_sums = plain_training(dtype, sum_dtype=dtype).grads[0]
    assert largest_difference(narrow_sums, right) > 100 * ROUNDING
    assert largest_difference(train_by_hand(make_batches()).grads[0], right) > 100 * ROUNDING
