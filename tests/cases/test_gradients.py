"""Recipes from public reports: gradients and their norm over devices.

Plain SGD at rate 1 throughout: Adam divides a wrong scale out again.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqtrain as et

MESHES = [1, 2, 4, 8]


def f32(x: Any) -> Any:
    return np.asarray(x, np.float32)


def keys(rows: int) -> Any:
    return et.example_keys(jax.random.key(0), 0, jnp.arange(rows))


def contribution(loss: Any, model: Any, batch: Any, *transforms: Any) -> et.Contribution:
    """What a chain adds up, before anything divides it."""
    contribute = et.pipe(loss, *transforms)
    return jax.jit(lambda m, b, k: contribute(m, None, b, k))(model, batch, keys(len(batch["d"])))


def step(loss: Any, model: Any, batch: Any, *transforms: Any, optimizer: Any = None) -> Any:
    """Takes one step: the new model as numpy, and the metrics."""
    program = et.pipe(loss, *transforms, et.update(optimizer or optax.sgd(1.0)), et.jit)
    ts = program.init(lambda key: jax.tree.map(jnp.float32, model), key=jax.random.key(0))
    ts, metrics = program(ts, batch)
    return jax.tree.map(np.asarray, ts.model), et.fetch(metrics)


def shard(placement: Any = None, **axes: Any) -> Any:
    return et.shard(et.mesh(**axes), batch=P(next(iter(axes))), model=placement)


# Cases 10 and 11: a replicated and a sharded leaf in one tree. Loss per row of d:
# (w^2 + 1) d + sum(W^2) d, so that the gradients of the sum are 2 w sum(d) and 2 W sum(d).

MODEL = {"replicated": 1.0, "split": np.arange(1.0, 9.0)}
PLACEMENT = et.rules({"split": P("data")})
DATA = {"d": f32([0, 1, 2, 3] * 2)}  # the mean of d is 1.5 on all meshes, its sum 12


def rowwise(model: Any, batch: Any) -> Any:
    return (model["replicated"] ** 2 + 1 + (model["split"] ** 2).sum()) * batch["d"]


def mean_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(rowwise(model, batch)), state, {}


def scalar_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return rowwise(model, batch).mean(), state, {}


def two_terms(model: Any, state: Any, batch: Any, key: Any) -> Any:
    values = rowwise(model, batch)
    return 0.5 * et.mean(values) + 0.5 * et.mean(values[:, None]), state, {}


@pytest.mark.parametrize("size", MESHES)
@pytest.mark.parametrize("loss", [mean_loss, scalar_loss, two_terms])
def test_replicated_and_sharded_leaves_get_one_scale(size, loss):
    model, metrics = step(loss, MODEL, DATA, shard(PLACEMENT, data=size))
    # mean loss: 3 and 3 W; all sums are of small integers, hence exact
    assert model["replicated"] == 1 - 3
    assert model["split"].tolist() == (-2 * MODEL["split"]).tolist()
    assert metrics["loss"] == 1.5 * (2 + 204)
    assert metrics["grad_norm"] == pytest.approx(3 * np.sqrt(1 + 204), rel=1e-6)  # a root


@pytest.mark.parametrize("size", MESHES)
def test_contribution_holds_the_gradient_of_the_sum(size):
    model = jax.tree.map(jnp.float32, MODEL)
    total = contribution(mean_loss, model, DATA, shard(PLACEMENT, data=size))
    assert total.grads["replicated"] == 24  # twice 12: the four rows of the report occur twice
    assert total.grads["split"].tolist() == (24 * MODEL["split"]).tolist()
    assert total.loss.terms[0].count == 8


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"data": 4, "model": 2}])
@pytest.mark.parametrize("transforms", [(), (et.accumulate(2),)], ids=["whole", "accumulate"])
def test_leaf_split_over_a_model_axis_gets_the_same_scale(axes, transforms):
    """Over a model axis the shards are parts of one loss, which the model's own psum joins."""

    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        squares = lax.psum((model["split"] ** 2).sum(), "model")
        return et.mean((model["replicated"] ** 2 + 1 + squares) * batch["d"]), state, {}

    placement = et.rules({"split": P("model")})
    model, metrics = step(loss, MODEL, DATA, *transforms, shard(placement, **axes))
    assert model["replicated"] == 1 - 3
    assert model["split"].tolist() == (-2 * MODEL["split"]).tolist()
    assert metrics["loss"] == 1.5 * (2 + 204)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.lion(0.1)])
def test_sharded_steps_equal_one_device(optimizer):
    alone, _ = step(mean_loss, MODEL, DATA, optimizer=optimizer)
    many, _ = step(mean_loss, MODEL, DATA, shard(PLACEMENT, data=8), optimizer=optimizer)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("idiom", "right"),
    [("psum_of_grad", False), ("pmean_of_grad", False), ("vary_grad_psum", True)],
)
def test_hand_written_idioms_are_told_apart(idiom, right):
    """What is reported to go wrong inside `shard_map` does so here, by a factor of 4."""

    def local(w: Any, d: Any) -> Any:
        if idiom == "vary_grad_psum":
            w = lax.pcast(w, "data", to="varying")
        grad = jax.grad(lambda w: ((w**2 + 1) * d).sum())(w)
        return (lax.pmean if idiom == "pmean_of_grad" else lax.psum)(grad, "data")

    mesh = et.mesh(data=4)
    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    grad = float(jax.jit(run)(jnp.float32(1), jnp.arange(4.0)))
    expected = 3.0 if idiom == "pmean_of_grad" else 12.0
    assert grad == (expected if right else 4 * expected)


# Case 12: the global norm.


def gradient_is_x(model: Any, state: Any, batch: Any, key: Any) -> Any:
    """A loss whose mean gradient is, for each leaf, what the batch holds under its name."""
    parts = [(model[name] * batch[name][0]).sum() for name in model]
    return et.mean(sum(parts) * batch["d"]), state, {}


CLIP = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))


def gradient(size: int, **grads: Any) -> tuple[Any, Any]:
    """A model of zeros and the batch that gives it these gradients, on `size` devices."""
    rows = {name: f32([grad] * size) for name, grad in grads.items()}
    model = {name: np.zeros_like(array[0]) for name, array in rows.items()}
    return model, {**rows, "d": np.ones(size, np.float32)}


@pytest.mark.parametrize("size", MESHES)
def test_clip_sees_the_norm_of_a_whole_sharded_gradient(size):
    model, batch = gradient(size, split=[3, 4, 0, 0, 0, 0, 0, 0])
    new, metrics = step(gradient_is_x, model, batch, shard(PLACEMENT, data=size), optimizer=CLIP)
    assert metrics["grad_norm"] == 5.0
    np.testing.assert_allclose(new["split"], [-0.6, -0.8, 0, 0, 0, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("size", MESHES)
def test_clip_counts_a_replicated_gradient_once(size):
    model, batch = gradient(size, split=[3, 0, 4, 0, 0, 0, 0, 0], replicated=12.0)
    new, metrics = step(gradient_is_x, model, batch, shard(PLACEMENT, data=size), optimizer=CLIP)
    assert metrics["grad_norm"] == 13.0
    np.testing.assert_allclose(new["split"][[0, 2]], [-3 / 13, -4 / 13], rtol=1e-6)
    np.testing.assert_allclose(new["replicated"], -12 / 13, rtol=1e-6)


def test_norms_taken_per_device_are_told_apart():
    def clipped(grad: Any) -> Any:
        return optax.clip_by_global_norm(1.0).update(grad, optax.EmptyState())[0]

    split = P("data")
    run = jax.shard_map(clipped, mesh=et.mesh(data=4), in_specs=split, out_specs=split)
    np.testing.assert_allclose(run(jnp.float32([3, 4, 0, 0])), [1, 1, 0, 0], rtol=1e-6)
    assert np.sqrt(3**2 + 4**2 + 4 * 12**2) == pytest.approx(24.5153, rel=1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_clip_by_value_needs_no_collective_and_does_not_change(size):
    model, batch = gradient(size, split=[3, -4, 0.5, 0, 0, 0, 0, 0], replicated=12.0)
    clip = optax.chain(optax.clip(1.0), optax.sgd(1.0))
    new, _ = step(gradient_is_x, model, batch, shard(PLACEMENT, data=size), optimizer=clip)
    assert new["split"].tolist() == [-1, 1, -0.5, 0, 0, 0, 0, 0]
    assert new["replicated"] == -1


@pytest.mark.parametrize("size", [1, 4])
def test_clip_by_block_and_adaptive_clip_see_whole_leaves(size):
    """Neighbours: optimizers that take a norm a leaf, and one of the parameters too."""
    model, batch = gradient(size, split=[3, 4, 0, 0, 0, 0, 0, 0], replicated=12.0)
    model = {"split": np.ones(8), "replicated": np.float32(2)}
    blocks = optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(1.0))
    new, _ = step(gradient_is_x, model, batch, shard(PLACEMENT, data=size), optimizer=blocks)
    rms = np.sqrt(25 / 8)
    np.testing.assert_allclose(new["split"][:2], [1 - 3 / rms, 1 - 4 / rms], rtol=1e-6)
    ratio = optax.chain(optax.scale_by_trust_ratio(), optax.scale(-1.0))
    new, _ = step(gradient_is_x, model, batch, shard(PLACEMENT, data=size), optimizer=ratio)
    trust = np.sqrt(8) / 5
    np.testing.assert_allclose(new["split"][:2], [1 - 3 * trust, 1 - 4 * trust], rtol=1e-6)


# Case 13: what dtype sums are taken in.


def product(w: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(w * batch["d"]), state, {}


def running_sum(values: np.ndarray, dtype: Any) -> float:
    return float(functools.reduce(lambda a, b: a + b, values.astype(dtype)))


FINE = 1 + 2**-8  # float32 holds it, bfloat16 does not


def test_gradients_are_reduced_in_float32():
    batch = {"d": np.full(4, FINE, np.float32)}
    total = contribution(product, jnp.float32(0), batch, shard(data=4))
    assert total.grads.dtype == jnp.float32 and total.grads == 4.015625
    rounded = jnp.sum(jnp.float32([FINE] * 4).astype(jnp.bfloat16), dtype=jnp.bfloat16)
    assert rounded == 4.0  # negative control


@pytest.mark.parametrize("inside", [True, False], ids=["inside_shard", "outside_shard"])
def test_narrow_gradients_are_summed_in_float32(inside):
    """Gradients 256, 1, 1, ..., each exact in bfloat16, whose running sum there stays at 256."""
    batch = {"d": f32([256] + 255 * [1])}
    chain = (et.precision("bfloat16"), et.accumulate(64), shard(data=4))
    chain = chain if inside else (chain[0], chain[2], chain[1])
    new, metrics = step(product, 0.0, batch, *chain)
    assert -new == metrics["grad_norm"] == 1.99609375
    assert new.dtype == np.float32


def test_accumulator_of_narrow_gradients_is_float32():
    batch = {"d": f32([256] + 255 * [1])}
    new, _ = step(product, 0.0, batch, et.precision("bfloat16"), et.accumulate(256))
    assert -new == 1.99609375
    assert running_sum(batch["d"], jnp.bfloat16) / 256 == 1.0  # negative control


@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float16])
def test_gradients_of_narrow_params_are_summed_in_float32(stored):
    """Without `precision` the params themselves are narrow; the sums are not."""
    values = f32([2048] + 255 * [1])  # float16 stops counting at 2048, bfloat16 at 256

    def loss(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(w * batch["d"].astype(w.dtype)), state, {}

    chain = (et.accumulate(64), shard(data=4))
    total = contribution(loss, jnp.asarray(0, stored), {"d": values}, *chain)
    assert total.grads.dtype == jnp.float32 and total.grads == 2303
    assert running_sum(values, stored) != 2303  # negative control


def collectives(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """The collectives of a jaxpr and all inside it, with the dtype of each operand."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.startswith(("psum", "reduce_scatter", "all_gather", "all_to_all", "pmax")):
            yield from ((name, var.aval.dtype) for var in eqn.invars)
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from collectives(sub)


LINEAR = {"weight": np.ones((8, 8), np.float32), "bias": np.zeros(8, np.float32)}


def linear(model: Any, state: Any, batch: Any, key: Any) -> Any:
    out = batch["d"][:, None] * model["weight"].sum(0)[None] + model["bias"][None]
    return et.mean(out**2), state, {"out": et.mean(out)}


def traced(*transforms: Any) -> list[tuple[str, Any]]:
    contribute = et.pipe(linear, *transforms)
    model = jax.tree.map(jnp.asarray, LINEAR)
    jaxpr = jax.make_jaxpr(lambda m, b, k: contribute(m, None, b, k))(
        model, {"d": jnp.ones(16)}, keys(16)
    )
    return list(collectives(jaxpr.jaxpr))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "arrange", [lambda *chain: chain, lambda a, b, c: (a, c, b)], ids=["inside", "outside"]
)
def test_every_reduction_is_in_float32(dtype, arrange: Callable[..., Any]):
    chain = (et.precision(dtype), et.accumulate(2), shard(et.fsdp("data", min_size=16), data=4))
    found = traced(*arrange(*chain))
    sums = {(name, dtype) for name, dtype in found if not name.startswith("all_gather")}
    assert {name.split("_")[0] for name, _ in sums} == {"psum", "reduce"}  # both kinds occur
    assert {dtype for _, dtype in sums} == {jnp.dtype(jnp.float32)}
    # A leaf is gathered in the dtype that the loss would cast it to.
    gathered = {dtype for name, dtype in found if name.startswith("all_gather")}
    assert gathered == {jnp.dtype(dtype)}


@pytest.mark.parametrize("chain", [(et.accumulate(75),), (shard(data=4),)], ids=["time", "mesh"])
def test_metrics_that_the_loss_computes_narrow_are_summed_wide(chain):
    """A count in bfloat16, as `precision` casts the batch, skips numbers from 256 on."""

    def counts(w: Any, state: Any, batch: Any, key: Any) -> Any:
        assert batch["d"].dtype == jnp.bfloat16
        sums = batch["d"].sum()
        return et.mean(w * batch["d"]), state, {"sum": et.Sum(sums), "mean": et.Mean(sums, sums)}

    rows = np.ones(300, np.float32)
    rows[0] = 2
    program = et.pipe(counts, et.precision("bfloat16"), *chain, et.update(optax.sgd(1.0)), et.jit)
    ts = program.init(lambda key: jnp.float32(0), key=jax.random.key(0))
    _, metrics = program(ts, {"d": rows})
    assert float(metrics["sum"].total) == 301  # 300 and 302 are bfloat16, 301 is not
    assert float(metrics["mean"].count) == 301
