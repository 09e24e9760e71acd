"""A step is compiled once; where it is not, the report names the argument that changed."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et

MESH = et.mesh(data=2)
CHAINS: dict[str, tuple[Any, ...]] = {
    "alone": (),
    "mesh": (et.shard(MESH, batch=P("data")),),
    "split": (et.accumulate(2), et.shard(MESH, batch=P("data"), model=et.fsdp("data", min_size=1))),
}


class Counted:
    """A loss that knows how often it was traced, since tracing calls it and running does not."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
        self.calls += 1
        error = (batch["x"] @ model["w"] - 1.0) ** 2
        scale = batch["scale"] if "scale" in batch else 1.0
        where = batch["weight"] if "weight" in batch else None
        return et.mean(error * scale, where=where), state, {"error": et.mean(error, where=where)}


def make(key: Any) -> Any:
    return {"w": np.linspace(-1, 1, 4, dtype=np.float32)}


def program_of(*chain: Any, loss: Any = None, **settings: Any) -> et.Program:
    transforms = (*chain, et.update(optax.sgd(0.1)), et.donate(**settings))
    return et.pipe(loss or Counted(), *transforms)


def started(program: et.Program) -> et.TrainState:
    return program.init(make, key=jax.random.key(0))


def rows(count: int, dtype: Any = np.float32) -> dict[str, Any]:
    return {"x": np.arange(count * 4).reshape(count, 4).astype(dtype) / dtype(count * 4)}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_two_epochs_with_a_padded_last_batch_compile_once(chain: Any):
    source = {"x": rows(10)["x"], "id": np.arange(10)}
    loader = et.data.Loader(source, batch_size=4, seed=0, epochs=2)
    loss = Counted()
    program = program_of(*chain, loss=loss)
    ts = started(program)
    losses, ids = [], []
    traced = None
    for batch in loader:
        expected = ((batch["x"] @ np.array(ts.model["w"]) - 1) ** 2 * batch["weight"]).sum()
        ts, metrics = program(ts, {"x": batch["x"], "weight": batch["weight"]})
        losses.append((et.fetch(metrics["loss"]), expected / batch["weight"].sum()))
        ids += batch["id"][batch["weight"] > 0].tolist()
        traced = traced or loss.calls
    assert program.compilations == 1 and loss.calls == traced
    assert sorted(ids) == sorted([*range(10)] * 2) and len(losses) == 6
    assert np.allclose(*zip(*losses, strict=True), rtol=1e-5)


# What a program sees first, what it sees then, and what the report has to name.
CHANGES = {
    "shape": (rows(8), rows(4), r"`batch\.x` changed from float32\[8,4\] to float32\[4,4\]"),
    "dtype": (
        rows(8) | {"weight": np.ones(8, np.float32)},
        rows(8) | {"weight": np.ones(8, np.int32)},
        r"`batch\.weight` changed from float32\[8\] to int32\[8\]",
    ),
    "weak type": (
        rows(8) | {"scale": np.float32(2)},
        rows(8) | {"scale": 2.0},
        r"`batch\.scale` changed from float32\[\] to float32\[\] \(weak\)",
    ),
    "structure": (
        rows(8),
        rows(8) | {"scale": np.float32(2)},
        r"`batch\.scale` changed from nothing to float32\[\]",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_second_compilation_is_reported_by_argument(change: str):
    first, second, named = CHANGES[change]
    program = program_of()
    ts, _ = program(started(program), first)
    with pytest.warns(et.RecompilationWarning, match=f"compilation 2, since {named}"):
        ts, _ = program(ts, second)
    assert program.compilations == 2
    ts, _ = program(ts, second)
    ts, _ = program(ts, first)
    assert program.compilations == 2


@pytest.mark.parametrize("change", CHANGES)
def test_one_compilation_too_many_is_an_error_and_runs_nothing(change: str):
    first, second, named = CHANGES[change]
    program = program_of(max_compilations=1)
    ts, _ = program(started(program), first)
    with pytest.raises(et.RecompilationError, match=named):
        program(ts, second)
    # The TrainState was not used up.
    ts, _ = program(ts, first)
    assert program.compilations == 1 and int(ts.step) == 2


def test_as_many_compilations_as_allowed_are_warned_of():
    program = program_of(max_compilations=2)
    ts, _ = program(started(program), rows(8))
    with pytest.warns(et.RecompilationWarning):
        ts, _ = program(ts, rows(4))
    with pytest.raises(et.RecompilationError, match="compilation 3"):
        program(ts, rows(2))


SPLIT, WHOLE = NamedSharding(MESH, P("data")), NamedSharding(MESH, P())


@pytest.mark.parametrize(
    "places",
    [
        pytest.param((SPLIT, WHOLE), id="split-whole"),
        pytest.param((WHOLE, SPLIT), id="whole-split"),
        pytest.param((None, SPLIT), id="host-split"),
        pytest.param((SPLIT, None), id="split-host"),
    ],
)
def test_a_batch_that_lies_elsewhere_is_reported_by_argument(places: Any):
    first, second = (rows(8) if p is None else jax.device_put(rows(8), p) for p in places)
    program = program_of(*CHAINS["mesh"])
    ts, _ = program(started(program), first)
    with pytest.warns(et.RecompilationWarning, match=r"`batch\.x`"):
        ts, _ = program(ts, second)
    assert program.compilations == 2


def test_a_batch_that_lies_elsewhere_is_an_error_if_it_is_one_too_many():
    program = program_of(*CHAINS["mesh"], max_compilations=1)
    ts, _ = program(started(program), jax.device_put(rows(8), SPLIT))
    with pytest.raises(et.RecompilationError, match=r"`batch\.x`"):
        program(ts, jax.device_put(rows(8), WHOLE))


def test_a_setting_in_the_model_that_changes_is_reported():
    program = program_of(loss=lambda model, state, batch, key: (model["w"].sum(), state, {}))
    first, second = (
        program.init(lambda key, rate=rate: make(key) | {"rate": rate}, key=jax.random.key(0))
        for rate in (0.1, 0.2)
    )
    program(first, rows(8))
    with pytest.warns(et.RecompilationWarning, match="no array: a Python number"):
        program(second, rows(8))


def test_python_numbers_in_a_batch_compile_once():
    loss = Counted()
    program = program_of(loss=loss)
    ts = started(program)
    for step in range(5):
        ts, metrics = program(ts, rows(8) | {"scale": 0.5 * step})
        ratio = float(metrics["loss"]) / float(metrics["error"])
        assert np.isclose(ratio, 0.5 * step)  # and each number is used, not the first
    assert program.compilations == 1


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_python_numbers_in_a_state_become_arrays(chain: Any):
    def loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
        state = {"count": state["count"] + 1, "mean": 0.5 * state["mean"] + 1.0, "on": state["on"]}
        return et.mean(batch["x"] @ model["w"]), state, {}

    program = program_of(*chain, loss=loss)
    state = {"count": 0, "mean": 0.0, "on": True}
    ts = program.init(lambda key: (make(key), state), key=jax.random.key(0))
    kinds = {name: (leaf.dtype, leaf.weak_type) for name, leaf in ts.state.items()}
    assert kinds == {
        "count": (jnp.dtype("int32"), False),
        "mean": (jnp.dtype("float32"), False),
        "on": (jnp.dtype("bool"), False),
    }
    for _ in range(5):
        ts, _ = program(ts, rows(8))
    assert program.compilations == 1
    turns = 10 if len(chain) == 2 else 5  # once a microbatch
    assert {name: leaf.item() for name, leaf in ts.state.items()} == {
        "count": turns,
        "mean": 2 - 2 * 0.5**turns,
        "on": True,
    }


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_two_inits_of_a_program_share_the_compilation(chain: Any):
    loss = Counted()
    program = program_of(
        *chain, loss=lambda model, *rest: loss({"w": jax.vmap(model)(jnp.eye(4))[:, 0]}, *rest)
    )

    def make_mlp(key: Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(4, 2, 8, 1, key=key)

    first, second = (program.init(make_mlp, key=jax.random.key(seed)) for seed in (0, 1))
    later = [program(ts, rows(8))[0] for ts in (first, second)]
    assert program.compilations == 1
    weights = [np.array(ts.model.layers[0].weight) for ts in later]
    assert not np.array_equal(weights[0], weights[1])


def test_evaluation_compiles_once_and_reports_a_second_time():
    program, measure = program_of(), et.evaluate(Counted())
    ts = started(program)
    for _ in range(3):
        measure(ts, rows(8))
        ts, _ = program(ts, rows(8))
    assert measure.compilations == 1
    with pytest.warns(et.RecompilationWarning, match=r"`evaluate`.*`batch\.x`"):
        measure(ts, rows(4))
