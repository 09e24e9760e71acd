"""A step is compiled once; where it is not, the report names the argument that changed."""

from __future__ import annotations

import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
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


class Settings(eqx.Module):
    """A model with what is no array: values that are leaves, and one that is none."""

    w: Any
    rate: float = 0.1
    shape: Any = make
    name: str = eqx.field(static=True, default="small")
    more: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def settings(**fields: Any) -> Any:
    return lambda key: Settings(np.linspace(-1, 1, 4, dtype=np.float32), **fields)


# What a program sees first, what it sees then (a batch, and how the model is made), the lines of
# the table, and what is to be done.
X = rows(8)
PLAIN = settings()
CHANGES: dict[str, tuple[Any, Any, list[str], str]] = {
    "shape": (X, rows(4), ["batch.x shape (8, 4) (4, 4)"], "pad the last batch"),
    "dtype": (
        X | {"weight": np.ones(8, np.float32)},
        X | {"weight": np.ones(8, np.int32)},
        ["batch.weight dtype float32 int32"],
        "Cast to one dtype",
    ),
    "weak type": (
        X | {"scale": np.float32(2)},
        X | {"scale": 2.0},
        ["batch.scale weak type False True"],
        "`np.float32(x)`",
    ),
    "sharding": (
        jax.device_put(X, NamedSharding(MESH, P())),
        jax.device_put(X, NamedSharding(MESH, P("data"))),
        ["batch.x sharding P() on data=2 P('data') on data=2"],
        "`et.data.prefetch(loader, program.batch_sharding)`",
    ),
    "structure": (
        X,
        X | {"scale": np.float32(2)},
        ["batch.scale structure absent float32[]"],
        "the same keys",
    ),
    "containers": (
        X | {"more": [X["x"], None]},
        X | {"more": (X["x"],), "none": None},
        ["batch.more structure list tuple", "batch.none structure absent None"],
        "the same keys",
    ),
    "two kinds": (
        X | {"weight": np.ones(8, np.float32)},
        rows(4) | {"weight": np.ones(4, np.int32), "scale": 2.0},
        [
            "batch.weight shape (8,) (4,)",
            "batch.weight dtype float32 int32",
            "batch.x shape (8, 4) (4, 4)",
            "batch.scale structure absent float32[] weak",
        ],
        "Keep shapes the same: pad the last batch, as `et.data.Loader` does. Cast",
    ),
    "many": (
        X,
        X | {f"n{i}": np.float32(i) for i in range(12)},
        [
            *(f"batch.n{i} structure absent float32[]" for i in (0, 1, 10, 11, *range(2, 8))),
            "and 2 more",
        ],
        "the same keys",
    ),
}
# The same for what the model is made of.
MODELS: dict[str, tuple[Any, Any, list[str], str]] = {
    "a number": (
        PLAIN,
        settings(rate=0.2),
        ["model.rate static value 0.1 0.2"],
        "compiled into the program",
    ),
    "a function": (
        PLAIN,
        settings(shape=rows),
        [f"model.shape static value {__name__}.make {__name__}.rows"],
        "compiled into the program",
    ),
    "a field": (
        PLAIN,
        settings(name="large"),
        ["model.name static value 'small' 'large'"],
        "compiled into the program",
    ),
    "an array": (
        PLAIN,
        settings(more=jnp.zeros(3)),
        ["model.more structure absent float32[3]"],
        "from one `make`",
    ),
    "a shape": (
        settings(more=jnp.zeros(2, jnp.int32)),
        settings(more=jnp.zeros(3, jnp.int8)),
        ["model.more shape (2,) (3,)", "model.more dtype int32 int8"],
        "Keep shapes the same",
    ),
}


def placed(ts: et.TrainState, change: str) -> et.TrainState:
    """The TrainState where the batches are, for a chain that does not place it."""
    return jax.device_put(ts, NamedSharding(MESH, P())) if change == "sharding" else ts


def lines_of(report: str) -> list[str]:
    """The lines of a report's table, columns apart by one space."""
    head, *lines = (" ".join(line.split()) for line in report.splitlines() if line[:2] == "  ")
    assert head == "leaf what before after"
    return lines


def columns_of(report: str) -> set[tuple[int, ...]]:
    """Where the columns begin, for each line of a report's table with all four of them."""
    found = set()
    for line in report.splitlines():
        places = [match.start() for match in re.finditer(r"(?<=  )\S", line)]
        if line.startswith("  ") and len(places) == 4:
            found.add(tuple(places))
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_a_second_compilation_is_reported_by_argument(change: str):
    first, second, lines, advice = CHANGES[change]
    program = program_of()
    ts, _ = program(placed(started(program), change), first)
    with pytest.warns(et.RecompilationWarning) as caught:
        ts, _ = program(ts, second)
    report = str(caught[0].message)
    assert "`train_step` should be compiled once. Got compilation 2, for arguments that " in report
    assert lines_of(report) == lines and advice in report.splitlines()[-1]
    assert len(columns_of(report)) == 1
    assert program.compilations == 2
    ts, _ = program(ts, second)
    ts, _ = program(ts, first)
    assert program.compilations == 2


@pytest.mark.parametrize("change", CHANGES)
def test_one_compilation_too_many_is_an_error_and_runs_nothing(change: str):
    first, second, lines, _ = CHANGES[change]
    program = program_of(max_compilations=1)
    ts, _ = program(placed(started(program), change), first)
    with pytest.raises(et.RecompilationError) as caught:
        program(ts, second)
    assert lines_of(str(caught.value)) == lines
    # The TrainState was not used up.
    ts, _ = program(ts, first)
    assert program.compilations == 1 and int(ts.step) == 2


@pytest.mark.parametrize("change", MODELS)
def test_a_model_that_changes_is_reported_by_what_changed(change: str):
    *makes, lines, advice = MODELS[change]
    program, limited = program_of(), program_of(max_compilations=1)
    for some in (program, limited):
        some(some.init(makes[0], key=jax.random.key(0)), X)
    with pytest.warns(et.RecompilationWarning) as caught:
        program(program.init(makes[1], key=jax.random.key(0)), X)
    report = str(caught[0].message)
    assert lines_of(report) == lines and advice in report.splitlines()[-1]
    with pytest.raises(et.RecompilationError) as error:
        limited(limited.init(makes[1], key=jax.random.key(0)), X)
    assert lines_of(str(error.value)) == lines


def test_as_many_compilations_as_are_meant_are_not_warned_of():
    # Warnings are errors here.
    program = program_of(max_compilations=2)
    ts, _ = program(started(program), rows(8))
    ts, _ = program(ts, rows(4))
    assert program.compilations == 2
    with pytest.raises(et.RecompilationError, match="compilation 3"):
        program(ts, rows(2))


SPLIT, WHOLE = NamedSharding(MESH, P("data")), NamedSharding(MESH, P())
ONE, OTHER = jax.devices()[:2]
COMPILED: list[str] = []


def _note_compilation(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event.endswith("backend_compile_duration") and kwargs.get("fun_name") == "jit(train_step)":
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_note_compilation)


@pytest.mark.parametrize(
    "chain, first, second, compiled",
    [
        pytest.param("mesh", SPLIT, WHOLE, 2, id="split-whole"),
        pytest.param("mesh", WHOLE, SPLIT, 2, id="whole-split"),
        pytest.param("mesh", None, SPLIT, 2, id="host-split"),
        pytest.param("mesh", SPLIT, None, 2, id="split-host"),
        # Of the same meaning, though not equal to one another.
        pytest.param("mesh", SPLIT, NamedSharding(MESH, P("data", None)), 1, id="split-split"),
        # Without a mesh JAX traces nothing anew for these, and the state comes along a call later.
        pytest.param("alone", None, ONE, 4, id="host-device"),
        pytest.param("alone", ONE, None, 2, id="device-host"),
        pytest.param("alone", OTHER, OTHER, 1, id="device-device"),
        pytest.param("alone", WHOLE, WHOLE, 2, id="whole-whole"),
    ],
)
def test_each_compilation_is_reported_by_argument(
    chain: str, first: Any, second: Any, compiled: int
):
    batches = [rows(8) if p is None else jax.device_put(rows(8), p) for p in (first, second)]
    program = program_of(*CHAINS[chain])
    ts = started(program)
    reports: list[str] = []
    for turn in (0, 0, 1, 1, 0):
        COMPILED.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ts, _ = program(ts, batches[turn])
        # JAX's own count: no report too many, and none too few.
        assert len(COMPILED) == len(caught) + int(ts.step == 1)
        reports += [str(warning.message) for warning in caught]
    assert program.compilations == compiled == len(reports) + 1
    assert all("sharding" in line for report in reports for line in lines_of(report))
    if first is not second:
        assert all(lines_of(report)[-1].startswith("batch.x ") for report in reports[:1])


@pytest.mark.parametrize(
    "chain, first, second",
    [
        pytest.param("mesh", SPLIT, WHOLE, id="split-whole"),
        pytest.param("mesh", None, SPLIT, id="host-split"),
        pytest.param("alone", None, ONE, id="host-device"),
        pytest.param("alone", ONE, None, id="device-host"),
    ],
)
def test_a_batch_that_lies_elsewhere_is_an_error_if_it_is_one_too_many(
    chain: str, first: Any, second: Any
):
    batches = [rows(8) if p is None else jax.device_put(rows(8), p) for p in (first, second)]
    program = program_of(*CHAINS[chain], max_compilations=1)
    ts, _ = program(started(program), batches[0])
    COMPILED.clear()
    with pytest.raises(et.RecompilationError) as caught:
        program(ts, batches[1])
    [line] = lines_of(str(caught.value))
    assert line.startswith("batch.x sharding ")
    ts, _ = program(ts, batches[0])
    assert not COMPILED and program.compilations == 1 and int(ts.step) == 2


def test_a_state_that_lies_elsewhere_is_an_error_if_it_is_one_too_many():
    program = program_of(*CHAINS["mesh"], max_compilations=1)
    ts, _ = program(started(program), rows(8))
    moved = jax.device_put(
        ts, jax.tree.map(lambda leaf: SPLIT if leaf.shape == (4,) else WHOLE, ts)
    )
    with pytest.raises(et.RecompilationError) as caught:
        program(moved, rows(8))
    assert lines_of(str(caught.value)) == ["model.w sharding P() on data=2 P('data') on data=2"]


def test_a_state_follows_the_batch_to_its_device():
    program = program_of()
    ts, _ = program(started(program), jax.device_put(rows(8), OTHER))
    assert all(leaf.devices() == {OTHER} for leaf in ts.leaves)
    expected, _ = program_of()(started(program_of()), rows(8))
    assert np.array_equal(ts.model["w"], expected.model["w"])


def test_threads_that_call_first_share_one_compilation():
    start = threading.Barrier(4)

    def call(evaluation: Any, ts: et.TrainState) -> float:
        start.wait(60)
        return et.fetch(evaluation(ts, rows(8)))["loss"]

    ts = started(program_of())
    for _ in range(8):
        evaluation = et.evaluate(Counted(), max_compilations=1)
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(call, evaluation, ts) for _ in range(4)]
            assert len({done.result() for done in calls}) == 1
        assert evaluation.compilations == 1


@pytest.mark.parametrize("number", [0, -1, True])
@pytest.mark.parametrize("form", [et.jit, et.donate, et.evaluate])
def test_a_number_of_compilations_that_is_none_is_refused(form, number):
    with pytest.raises(ValueError, match="`max_compilations` must be positive"):
        et.pipe(
            Counted(),
            *([] if form is et.evaluate else [et.update(optax.sgd(0.1))]),
            lambda given: form(given, max_compilations=number),
        )


def test_a_setting_of_jax_that_changes_is_reported_as_such():
    program, limited = program_of(), program_of(max_compilations=1)
    (ts, _), (other, _) = (some(started(some), rows(8)) for some in (program, limited))
    with jax.default_matmul_precision("highest"):
        with pytest.warns(
            et.RecompilationWarning, match="equal to those of compilation 1: a setting"
        ):
            program(ts, rows(8))
        with pytest.raises(et.RecompilationError, match="Got compilation 2, .* a setting of JAX"):
            limited(other, rows(8))


def test_the_nearest_compilation_is_the_one_that_is_compared():
    program = program_of()
    ts, _ = program(started(program), rows(8))
    with pytest.warns(et.RecompilationWarning):
        ts, _ = program(ts, rows(4) | {"weight": np.ones(4, np.float32)})
    with pytest.warns(et.RecompilationWarning, match="differ from compilation 1:") as caught:
        program(ts, rows(2))
    assert lines_of(str(caught[0].message)) == ["batch.x shape (8, 4) (2, 4)"]


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
    with pytest.warns(et.RecompilationWarning, match=r"`evaluate`(.|\n)*batch\.x +shape"):
        measure(ts, rows(4))

    limited = et.pipe(Counted(), et.evaluate(max_compilations=2))
    for count in (8, 4):
        limited(ts, rows(count))
    with pytest.raises(et.RecompilationError, match=r"`evaluate`(.|\n)*2 times(.|\n)*batch\.x"):
        limited(ts, rows(2))


@jax.tree_util.register_pytree_node_class
class Slow:
    """A batch that one thread is still taking apart when another calls."""

    reached, go_on = threading.Event(), threading.Event()

    def __init__(self, x: Any):
        self.x = x

    def tree_flatten(self) -> Any:
        self.reached.set()
        assert self.go_on.wait(60)
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "Slow":
        return cls(*children)


def test_two_threads_may_call_while_it_is_traced():
    def total(w: Any, state: Any, batch: Any, key: Any) -> Any:
        (x,) = jax.tree.leaves(batch)
        return et.mean(w * x), state, {}

    evaluation = et.evaluate(total, max_compilations=2)
    step = et.pipe(total, et.update(optax.sgd(0.0)), et.jit)
    ts = step.init(lambda key: jnp.float32(2), key=jax.random.key(0))
    ts, _ = step(ts, np.ones(4, np.float32))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(evaluation, ts, Slow(np.ones(3, np.float32)))
        try:
            assert Slow.reached.wait(60)
            assert float(evaluation(ts, np.ones(4, np.float32))["loss"]) == 2
        finally:
            Slow.go_on.set()
        assert float(slow.result()["loss"]) == 2
    assert evaluation.compilations == 2
