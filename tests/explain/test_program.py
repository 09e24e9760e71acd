"""`program.explain` on the step that tripped: donated, sharded, in microbatches.

One loss has all the faults, each on a marked line, and a batch sets off one of them. So the program
is compiled once, under watch too.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import eqtrain as et

ROWS, DIM, VOCABULARY = 16, 4, 8
BAD = 13  # the last but one row of device 3 of 4, in its first of two microbatches of two rows


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    h = jnp.take(model["table"], batch["token"], axis=0, mode="clip")  # index
    h = (h * batch["scale"][:, None]) @ model["w"]  # product
    norm = jnp.sqrt((h * h).sum(-1, keepdims=True))
    h = h / norm  # normalise
    narrow = batch["x"].astype("bfloat16") @ model["w"].astype("bfloat16")  # narrow
    narrow = narrow - lax.stop_gradient(narrow.max(-1, keepdims=True))
    logarithm = jnp.log(batch["z"])  # logarithm
    positive = batch["r"] * model["gain"] ** 2
    root = jnp.where(positive > 0, jnp.sqrt(positive), 0.0)  # root
    shard = lax.axis_index("model").astype("float32")
    on_shard = lax.psum(jnp.log(1.0 + batch["q"] * (1.0 - 2.0 * shard)), "model")  # shard
    jax.vmap(lambda x: checkify.check(x < 100, "x is {x}", x=x))(batch["c"])  # check
    total = h.sum(-1) + narrow.sum(-1).astype("float32") + logarithm + root + on_shard
    return et.mean(total), state, {}


def line_of(mark: str) -> int:
    lines, first = inspect.getsourcelines(loss)
    [offset] = [i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
    return first + offset


def make(key: Any) -> Any:
    return {
        "table": 1 + jax.random.uniform(key, (VOCABULARY, DIM)),
        "w": jnp.eye(DIM) + 0.5,
        "gain": jnp.ones(()),
    }


def batch_with(**bad: float) -> dict[str, np.ndarray]:
    ones = np.ones(ROWS, np.float32)
    batch = {
        "token": np.arange(ROWS, dtype=np.int32) % VOCABULARY,
        "scale": ones,
        "x": np.ones((ROWS, DIM), np.float32),
        "z": 2 * ones,
        "r": 3 * ones,
        "q": 0.5 * ones,
        "c": ones,
    }
    for name, value in bad.items():
        batch[name] = batch[name].copy()
        batch[name][BAD] = value
    return batch


@pytest.fixture(scope="module")
def program() -> Any:
    shard = et.shard(et.mesh(data=4, model=2), batch=P("data"), model=et.fsdp("data", min_size=2))
    return et.pipe(loss, et.accumulate(2), shard, et.update(optax.adam(0.1)), et.guard, et.donate)


@pytest.fixture(scope="module")
def started(program: Any) -> et.TrainState:
    """A TrainState that no test gives away."""
    return program.init(make, key=jax.random.key(0))


def tripped(program: Any, started: et.TrainState, batch: Any) -> et.TrainState:
    """What a donating step that was skipped gives back."""
    ts, metrics = program(jax.tree.map(jnp.copy, started), batch)
    assert float(metrics["skipped"]) == 1
    return ts


# What sets it off, and what is to be said: the kind, the primitive, where, and which leaf went in.
PLANTS = {
    "logarithm": ({"z": -1.0}, "nan", "log", "forward", ("batch.z",)),
    "normalise": ({"scale": 0.0}, "division", "div", "forward", ()),
    "narrow": ({"x": 3e38}, "inf", "dot_general", "forward", ("batch.x", "model.w")),
    "root": ({"r": 0.0}, "division", "div", "backward", ()),
    "shard": ({"q": 2.0}, "nan", "log", "forward", ()),
}


@pytest.mark.parametrize("mark", PLANTS)
def test_the_line_the_device_the_microbatch_and_the_row_are_named(program, started, mark):
    bad, kind, primitive, direction, leaves = PLANTS[mark]
    batch = batch_with(**bad)
    found = program.explain(tripped(program, started, batch), batch)
    assert (found.kind, found.direction) == (kind, direction)
    assert (found.file, found.line) == (__file__, line_of(mark))
    assert found.primitive == primitive
    assert set(leaves) <= set(found.leaves)
    assert found.microbatch == 0 and found.device["data"] == BAD * 4 // ROWS
    assert found.rows is not None and found.rows.rows == (BAD,)
    # A fault of the data is the same along `model`, and that of one shard is not.
    assert found.num_devices == (1 if mark == "shard" else 2)
    if mark == "shard":
        assert found.device["model"] == 1
    assert str(line_of(mark)) in str(found)


def test_an_index_out_of_range_is_found_though_nothing_is_nan(program, started):
    """JAX clips it, so the step goes well, and the embedding is that of another token."""
    batch = batch_with(token=VOCABULARY + 3)
    found = program.explain(started, batch)
    assert (found.kind, found.line) == ("index", line_of("index"))
    assert found.rows is not None and found.rows.rows == (BAD,)
    [indices] = found.indices
    assert (indices.maximum, indices.largest) == (VOCABULARY + 3, VOCABULARY - 1)


def test_parameters_that_a_learning_rate_ruined_are_no_fault_of_a_row(program, started):
    model = {**started.model, "w": started.model["w"] * 2e38}
    batch = batch_with()
    ts = tripped(program, started.replace(model=model), batch)
    found = program.explain(ts, batch)
    assert (found.kind, found.line) == ("inf", line_of("product"))
    assert found.rows is not None and found.rows.rows == ()
    assert "no rows" in str(found)


def test_parameters_that_are_nan_already_are_passed_in(program, started):
    model = {**started.model, "gain": jnp.float32(np.nan)}
    found = program.explain(started.replace(model=model), batch_with())
    assert found.primitive == "input" and found.leaves == ("model.gain",)
    assert "from before the first bad step" in str(found)


def test_a_failed_check_is_explained_where_nothing_else_is_wrong(program, started):
    batch = batch_with(c=1000.0)
    found = program.explain(tripped(program, started, batch), batch)
    assert (found.kind, found.line) == ("check", line_of("check"))
    assert found.rows is not None and found.rows.rows == (BAD,)
    assert "x is 1000.0" in str(found)


def test_a_step_that_went_well_is_said_to(program, started):
    found = program.explain(started, batch_with())
    assert found.kind == "nothing" and str(found).startswith("Nothing went wrong")


def test_the_optimizer_is_named_where_the_gradients_are_finite():
    def linear(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(w["a"] * batch["z"]), state, {}

    step = et.pipe(linear, et.update(optax.sgd(float("inf"))), et.guard, et.donate)
    ts = step.init(lambda key: {"a": jnp.ones(())}, key=jax.random.key(0))
    batch = batch_with()
    ts, metrics = step(ts, batch)
    assert float(metrics["skipped"]) == 1
    found = step.explain(ts, batch)
    assert found.kind == "update" and "`model.a` is not finite after the update" in str(found)


def test_the_step_is_that_which_failed_and_so_are_its_keys():
    """The fault depends on the noise, and so on the number of the step."""

    def noisy(w: Any, state: Any, batch: Any, key: Any) -> Any:
        noise = jax.vmap(jax.random.uniform)(key)
        return et.mean(jnp.log(noise - batch["limit"]) * w), state, {}

    key = jax.random.key(0)
    step = et.pipe(noisy, et.update(optax.sgd(0.0)), et.guard, et.donate)
    ts = step.init(lambda key: jnp.ones(()), key=key)
    draws = [
        np.array(jax.vmap(jax.random.uniform)(et.example_keys(ts.key, step, jnp.arange(4))))
        for step in range(4)
    ]
    worst = [int(draw.argmin()) for draw in draws]
    bad = next(i for i in range(1, 4) if worst[i] != worst[i - 1] and i < 3)
    metrics, batch = {}, {}
    for i in range(bad + 1):
        # Just one row is below the limit, and only in this step.
        limit = np.sort(draws[i])[:2].mean() if i == bad else -1.0
        batch = {"limit": np.full(4, limit, np.float32)}
        ts, metrics = step(ts, batch)
    assert float(metrics["skipped"]) == 1
    found = step.explain(ts, batch)
    assert found.rows is not None and found.rows.rows == (worst[bad],)
    assert step.explain(ts, batch, step=bad).rows == found.rows


def test_a_step_that_was_taken_again_is_behind_the_state():
    def loss(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(jnp.log(batch["x"]) * w), state, {}

    step = et.pipe(loss, et.update(optax.sgd(0.0)), et.guard(nonfinite="raise"), et.donate)
    ts = step.init(lambda key: jnp.ones(()), key=jax.random.key(0))
    good, bad = ({"x": np.full(4, x, np.float32)} for x in (1.0, np.nan))
    ts, _ = step(ts, bad)
    with pytest.raises(et.NonFiniteError) as error:
        step.check(ts)
    ts, _ = step(error.value.state, good)
    assert int(ts.step) == 1 and "in step 1 the loss" in str(step.explain(ts, good))


def test_a_state_that_no_step_made_is_explained_with_the_keys_of_step_0():
    def noisy(w: Any, state: Any, batch: Any, key: Any) -> Any:
        noise = jax.vmap(jax.random.uniform)(key)
        return et.mean(jnp.log(noise - batch["limit"]) * w), state, {}

    step = et.pipe(noisy, et.update(optax.sgd(0.0)), et.guard, et.donate)
    ts = step.init(lambda key: jnp.ones(()), key=jax.random.key(0))
    keys = et.example_keys(ts.key, 0, jnp.arange(4))
    draw = np.array(jax.vmap(jax.random.uniform)(keys))
    # Just one row is below the limit.
    found = step.explain(ts, {"limit": np.full(4, np.sort(draw)[:2].mean(), np.float32)})
    assert found.rows is not None and found.rows.rows == (int(draw.argmin()),)
    fine = step.explain(ts, {"limit": np.full(4, -1, np.float32)})
    assert "in step 0 the loss" in str(fine)
