"""Any pytree is a model: Haiku's and Flax's parameters, and Equinox modules with state.

What they come to is compared with plain loops on one device that share no code with `eqtrain` but
the dropout masks: keys are folded by hand, and the frameworks draw from them.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from tests.tiers import grid

ROWS, STEPS = 8, 3
RNG = np.random.default_rng(0)
BATCHES = [
    {
        "x": RNG.normal(size=(ROWS, 5)).astype(np.float32),
        "y": RNG.normal(size=(ROWS, 2)).astype(np.float32),
    }
    for _ in range(STEPS)
]


@pytest.fixture(autouse=True)
def as_frameworks_promote() -> Iterator[None]:
    """Both frameworks multiply floats by integers and booleans."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# (params, state, x, keys of the examples, mesh axis or None) -> (out, state)
Apply = Callable[[Any, Any, Any, Any, str | None], tuple[Any, Any]]


def haiku_model(batch_norm: bool) -> tuple[Callable[[Any], Any], Apply]:
    hk = pytest.importorskip("haiku")

    def network(x: Any, keys: Any, axis: str | None) -> Any:
        x = hk.Linear(6)(x)
        if batch_norm:
            x = hk.BatchNorm(True, True, decay_rate=0.9, cross_replica_axis=axis)(x, True)
        # A dropout of Haiku's own for each example, by the example's key.
        x = jax.vmap(lambda key, row: hk.dropout(key, 0.25, row))(keys, jnp.tanh(x))
        return hk.Linear(2)(x)

    transformed = hk.transform_with_state(network)

    def init(key: Any) -> Any:
        keys = jax.random.split(key, ROWS)
        return transformed.init(key, jnp.zeros((ROWS, 5)), keys, None)

    def apply(params: Any, state: Any, x: Any, keys: Any, axis: str | None) -> Any:
        return transformed.apply(params, state, None, x, keys, axis)

    return init, apply


def flax_model(batch_norm: bool) -> tuple[Callable[[Any], Any], Apply]:
    nn = pytest.importorskip("flax.linen")

    class Network(nn.Module):
        axis: str | None

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(6)(x)
            if batch_norm:
                x = nn.BatchNorm(False, momentum=0.9, axis_name=self.axis)(x)
            x = nn.Dropout(0.25, deterministic=False)(jnp.tanh(x))
            return nn.Dense(2)(x)

    def init(key: Any) -> Any:
        first, second = jax.random.split(key)
        rngs = {"params": first, "dropout": second}
        variables = Network(None).init(rngs, jnp.zeros((ROWS, 5)))
        return variables["params"], variables.get("batch_stats", {})

    def apply(params: Any, state: Any, x: Any, keys: Any, axis: str | None) -> Any:
        variables = {"params": params, "batch_stats": state}
        out, new = Network(axis).apply(
            variables, x, rngs={"dropout": keys[0]}, mutable=["batch_stats"]
        )
        return out, new.get("batch_stats", {})

    return init, apply


def flax_rowwise(batch_norm: bool) -> tuple[Callable[[Any], Any], Apply]:
    """Flax draws one mask a call, so that a call an example makes it the example's own."""
    init, apply = flax_model(False)

    def one_by_one(params: Any, state: Any, x: Any, keys: Any, axis: str | None) -> Any:
        out, _ = jax.vmap(lambda row, key: apply(params, state, row[None], key[None], axis))(
            x, keys
        )
        return out[:, 0], state

    return init, one_by_one


MODELS = {"haiku": haiku_model, "flax": flax_rowwise}


def loss_of(apply: Apply, axis: str | None) -> Any:
    def loss(params: Any, state: Any, batch: Any, key: Any) -> Any:
        out, state = apply(params, state, batch["x"], key, axis)
        return et.mean((out - batch["y"]) ** 2), state, {"out": et.mean(out)}

    return loss


def train(init: Any, loss: Any, *chain: Any) -> tuple[et.TrainState, et.TrainState, list[float]]:
    program = et.pipe(loss, *chain, et.update(optax.sgd(0.1, momentum=0.9)), et.guard, et.donate)
    ts = program.init(init, key=jax.random.key(0))
    first, losses = jax.tree.map(jnp.copy, ts), []
    for batch in BATCHES:
        ts, metrics = program(ts, batch)
        losses.append(et.fetch(metrics)["loss"])
    program.check(ts)
    assert program.compilations == 1
    return first, ts, losses


def train_plainly(first: et.TrainState, apply: Apply) -> tuple[Any, Any, list[float]]:
    """One device, no microbatch, no eqtrain."""
    params, state = first.model, first.state
    optimizer = optax.sgd(0.1, momentum=0.9)
    opt_state, losses = optimizer.init(params), []

    def loss(params: Any, state: Any, batch: Any, keys: Any) -> Any:
        out, state = apply(params, state, batch["x"], keys, None)
        return ((out - batch["y"]) ** 2).mean(), state

    @jax.jit
    def step(params: Any, state: Any, opt_state: Any, batch: Any, keys: Any) -> Any:
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, batch, keys)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, value

    for number, batch in enumerate(BATCHES):
        at_step = jax.random.fold_in(first.key, number)
        keys = jnp.stack([jax.random.fold_in(at_step, row) for row in range(ROWS)])
        params, state, opt_state, value = step(params, state, opt_state, batch, keys)
        losses.append(float(value))
    return params, state, losses


def distance(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max((float(np.max(np.abs(np.array(x) - np.array(y)))) for x, y in pairs), default=0.0)


def on_mesh(size: int = 4) -> Any:
    return et.shard(et.mesh(data=size), batch=P("data"))


# No Adam: a bias before BatchNorm has a gradient of 0, whose roundings it would blow up to steps.
# What is left are roundings of 1e-7 in a few dozen sums.
CLOSE, FAR = 5e-6, 1e-3


@pytest.mark.parametrize("model", MODELS)
def test_dropout_models_equal_a_plain_loop(model):
    init, apply = MODELS[model](False)
    first, ts, losses = train(init, loss_of(apply, None), et.accumulate(2), on_mesh())
    params, _, right = train_plainly(first, apply)
    np.testing.assert_allclose(losses, right, rtol=1e-5)
    assert distance(ts.model, params) < CLOSE
    assert distance(ts.model, first.model) > FAR  # it did train
    assert jax.tree.structure(ts.model) == jax.tree.structure(params)

    def without(params: Any, state: Any, x: Any, keys: Any, axis: str | None) -> Any:
        return apply(params, state, x, jnp.roll(keys, 1), axis)

    other, _, _ = train_plainly(first, without)
    assert distance(ts.model, other) > FAR  # negative control: masks of other examples


@pytest.mark.parametrize("where", ["mesh", grid("alone")])
def test_haiku_batch_norm_equals_a_plain_loop(where):
    init, apply = haiku_model(True)
    axis, chain = ("data", (on_mesh(),)) if where == "mesh" else (None, ())
    first, ts, losses = train(init, loss_of(apply, axis), et.accumulate(1), *chain)
    params, state, right = train_plainly(first, apply)
    np.testing.assert_allclose(losses, right, rtol=1e-5)
    assert distance(ts.model, params) < CLOSE
    assert distance(ts.state, state) < CLOSE
    assert distance(ts.state, first.state) > FAR


class _NoDropout:
    """Flax's dropout draws one mask a batch, which a mesh changes: off, to compare the rest."""

    def __enter__(self) -> None:
        self.nn = importlib.import_module("flax.linen")
        self.call = self.nn.Dropout.__call__
        self.nn.Dropout.__call__ = lambda dropout, x, *args, **kwargs: x

    def __exit__(self, *_: Any) -> None:
        self.nn.Dropout.__call__ = self.call


@pytest.mark.parametrize("where", ["mesh", grid("alone")])
def test_flax_batch_norm_equals_a_plain_loop(where):
    init, apply = flax_model(True)
    axis, chain = ("data", (on_mesh(),)) if where == "mesh" else (None, ())
    with _NoDropout():
        first, ts, losses = train(init, loss_of(apply, axis), et.accumulate(1), *chain)
        params, state, right = train_plainly(first, apply)
    np.testing.assert_allclose(losses, right, rtol=1e-5)
    assert distance(ts.model, params) < CLOSE
    assert distance(ts.state, state) < CLOSE
    assert distance(ts.state, first.state) > FAR


@pytest.mark.parametrize("model", [haiku_model, grid(flax_model)])
def test_batch_norm_without_an_axis_is_told_apart(model):
    """Statistics of each device's own rows run, and are those of a smaller batch."""
    init, apply = model(True)
    first, ts, _ = train(init, loss_of(apply, None), et.accumulate(1), on_mesh())
    params, _, _ = train_plainly(first, apply)
    assert distance(ts.model, params) > FAR
    # Whatever was computed, the state came out the same on every device.
    for leaf in jax.tree.leaves(ts.state):
        copies = {np.array(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(copies) == 1


# Equinox modules with state.


class Tracked(eqx.Module):
    """Keeps a running mean and a count in `eqx.nn.State`; takes a batch, not a row."""

    linear: eqx.nn.Linear
    index: eqx.nn.StateIndex
    synced: bool = eqx.field(static=True)

    def __init__(self, key: Any, synced: bool = False):
        self.linear = eqx.nn.Linear(5, 2, key=key)
        self.index = eqx.nn.StateIndex((jnp.zeros(()), jnp.asarray(0)))
        self.synced = synced

    def __call__(self, x: Any, state: eqx.nn.State) -> tuple[Any, eqx.nn.State]:
        out = jax.vmap(self.linear)(x)
        mean, count = state.get(self.index)
        now = jax.lax.pmean(out.mean(), "data") if self.synced else out.mean()
        return out, state.set(self.index, (0.5 * mean + 0.5 * now, count + 1))


def tracked_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    out, state = model(batch["x"], state)
    return et.mean((out - batch["y"]) ** 2), state, {}


def make_tracked(key: Any, synced: bool = False) -> Any:
    return eqx.nn.make_with_state(Tracked)(key, synced)


def running_mean(first: et.TrainState, x: np.ndarray, cut: int) -> float:
    """The running mean after a step of rate 0, by hand."""
    mean = 0.0
    for part in np.split(x, cut):
        out = part @ np.array(first.model.linear.weight).T + np.array(first.model.linear.bias)
        mean = 0.5 * mean + 0.5 * out.mean()
    return float(mean)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("where", ["alone", "mesh"])
def test_state_of_equinox_goes_through_once_a_microbatch(parts, where):
    chain = (et.accumulate(parts), *((on_mesh(2),) if where == "mesh" else ()))
    program = et.pipe(tracked_loss, *chain, et.update(optax.sgd(0.0)), et.guard, et.donate)
    ts = program.init(make_tracked, key=jax.random.key(0))
    first = jax.tree.map(jnp.copy, ts)
    ts, _ = program(ts, BATCHES[0])
    mean, count = ts.state.get(ts.model.index)
    assert count == parts
    x = BATCHES[0]["x"]
    if where == "mesh":  # microbatch m is the union of each device's m-th part
        x = x.reshape(2, parts, -1, 5).swapaxes(0, 1).reshape(-1, 5)
    assert float(mean) == pytest.approx(running_mean(first, x, parts), rel=1e-5)


def test_state_of_equinox_that_a_psum_made_equal():
    program = et.pipe(tracked_loss, on_mesh(), et.update(optax.sgd(0.0)), et.donate)
    ts = program.init(lambda key: make_tracked(key, synced=True), key=jax.random.key(0))
    first = jax.tree.map(jnp.copy, ts)
    ts, _ = program(ts, BATCHES[0])
    mean, count = ts.state.get(ts.model.index)
    right = running_mean(first, BATCHES[0]["x"], 1)
    assert count == 1 and float(mean) == pytest.approx(right, rel=1e-5)


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key: Any, axis: Any, mode: Any):
        self.linear = eqx.nn.Linear(5, 2, key=key)
        self.norm = eqx.nn.BatchNorm(2, axis, mode=mode)

    def __call__(self, x: Any, state: Any) -> Any:
        return self.norm(self.linear(x), state)


def normed_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    out, state = apply(batch["x"], state)
    return et.mean((out - batch["y"]) ** 2), state, {}


def make_normed(axis: Any, mode: str) -> Callable[[Any], Any]:
    return lambda key: eqx.nn.make_with_state(Normed)(key, axis, mode)


@pytest.mark.parametrize("mode", ["batch", "ema"])
@pytest.mark.parametrize("parts", [1, 2])
def test_batch_norm_of_equinox_runs_on_one_device(mode, parts):
    _, ts, losses = train(make_normed("batch", mode), normed_loss, et.accumulate(parts))
    assert np.isfinite(losses).all()
    if mode == "batch":
        assert ts.state.get(ts.model.norm.batch_counter) == STEPS * parts


def normalised(axis: Any, mode: Any, *transforms: Any) -> tuple[float, Any]:
    """The loss of a step of rate 0 and the running mean after it."""
    program = et.pipe(normed_loss, *transforms, et.update(optax.sgd(0.0)), et.jit)
    ts = program.init(make_normed(axis, mode), key=jax.random.key(0))
    ts, metrics = program(ts, BATCHES[0])
    index = ts.model.norm.batch_state_index if mode == "batch" else ts.model.norm.ema_state_index
    return float(metrics["loss"]), np.array(ts.state.get(index)[0])


@pytest.mark.filterwarnings("ignore:.*BatchNorm:UserWarning")
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_batch_norm_of_equinox_over_all_rows_is_that_of_one_device(mode):
    loss, running = normalised("batch", mode)
    for devices in (2, 4):
        on_devices = normalised(("batch", "data"), mode, on_mesh(devices))
        assert on_devices[0] == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(on_devices[1], running, rtol=1e-5, atol=1e-7)


def test_batch_norm_of_equinox_over_own_rows_is_that_of_microbatches():
    """Over `"batch"` alone each device normalises by its own rows, as PyTorch's DDP does."""
    own = normalised("batch", "batch", on_mesh(2))[0]
    by_hand = np.mean([batch_loss(rows) for rows in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS))])
    assert own == pytest.approx(by_hand, rel=1e-5)
    # Negative control: over all rows it is another number.
    assert abs(own - normalised("batch", "batch")[0]) > 1e-3 * own


def batch_loss(rows: slice) -> float:
    """The loss of some rows alone, with the parameters that all of the above begin with."""
    ts = et.update(optax.sgd(0.0))(normed_loss).init(
        make_normed("batch", "batch"), key=jax.random.key(0)
    )
    batch = {name: jnp.asarray(leaf[rows]) for name, leaf in BATCHES[0].items()}
    return float(normed_loss(ts.model, ts.state, batch, None)[0].value)
