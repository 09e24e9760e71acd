"""Recipes from public reports: steps that are not finite.

What the guard promises: a bad step leaves the whole TrainState as it was, on all devices, and only
`step` and the guard's own counts go on; the schedule of the optimizer does not.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from eqtrain._programs import program as program_module

GOOD = {"x": np.ones(8, np.float32)}


def bad_at(*rows: int, value: float = np.nan) -> dict[str, np.ndarray]:
    batch = {"x": GOOD["x"].copy()}
    batch["x"][list(rows)] = value
    return batch


def loss(w: Any, state: Any, batch: Any, key: Any) -> Any:
    """Gradient 1 a good row, and a state such as BatchNorm has."""
    if state is not None:
        seen = batch["x"].mean()
        state = {"mean": 0.9 * state["mean"] + 0.1 * seen, "count": state["count"] + 1}
    values = w * batch["x"]
    return et.mean(values), state, {"mean": et.mean(values), "max": et.Max(values.max())}


def with_state(key: Any) -> Any:
    return jnp.float32(1), {"mean": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)}


def contents(ts: et.TrainState) -> dict[str, np.ndarray]:
    """All leaves by name as copies, but what a skipped step moves on: `step` and the guard's."""
    named = jax.tree_util.tree_leaves_with_path(ts)
    return {
        name: np.array(jax.random.key_data(leaf) if name == ".key" else leaf)
        for name, leaf in ((jax.tree_util.keystr(path), leaf) for path, leaf in named)
        if name != ".step" and ".extra.guard" not in name
    }


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def left(caught: Any) -> et.TrainState:
    """The TrainState that an error hands back."""
    return caught.value.state


def shard(placement: Any = None, **axes: Any) -> Any:
    return et.shard(et.mesh(**axes), batch=P(next(iter(axes))), model=placement)


CHAINS = {
    "alone": (),
    "accumulate": (et.accumulate(4),),
    "mesh": (shard(data=4),),
    "both": (et.accumulate(2), shard(data=4)),
    "both_outside": (shard(data=4), et.accumulate(2)),
}


# Case 37: a skipped step moves nothing.


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_skipped_step_leaves_every_bit(chain):
    program = et.pipe(
        loss,
        *chain,
        et.update(optax.adamw(0.1, weight_decay=0.1)),
        et.ema(0.9),
        et.guard,
        et.donate,
    )
    ts = program.init(with_state, key=jax.random.key(0))
    ts, _ = program(ts, GOOD)
    before = contents(ts)
    assert float(ts.model) == pytest.approx(0.8900006, abs=1e-7)
    ts, metrics = program(ts, bad_at(5))
    assert same(contents(ts), before)
    assert metrics["skipped"].value == 1
    assert ts.opt_state[0].count == 1  # and so does the schedule stand
    assert (int(ts.step), int(ts.extra["guard"]["skipped"])) == (2, 1)
    ts, metrics = program(ts, GOOD)
    assert not same(contents(ts), before)
    assert metrics["skipped"].value == 0 and ts.extra["guard"]["in_a_row"] == 0


def test_zeroed_gradient_is_told_apart():
    optimizer: Any = optax.adamw(0.1, weight_decay=0.1)
    w = jnp.float32(1)
    state = optimizer.init(w)
    for grad in [1.0, 0.0]:
        updates, state = optimizer.update(jnp.float32(grad), state, w)
        w = w + updates
    assert float(w) == pytest.approx(0.8140955, abs=1e-6)
    assert state[0].count == 2 and float(state[0].mu) == pytest.approx(0.09, rel=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adafactor", "lion", "schedule_free"])
def test_other_optimizers_are_held_back_too(name):
    optimizer = {
        "sgd": optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9, nesterov=True),
        "adafactor": optax.adafactor(0.1),
        "lion": optax.lion(0.1, weight_decay=0.1),
        "schedule_free": optax.contrib.schedule_free_sgd(0.1),
    }[name]
    program = et.pipe(loss, et.update(optimizer), et.guard, et.donate)
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    ts, _ = program(ts, GOOD)
    before = contents(ts)
    ts, _ = program(ts, bad_at(0, value=np.inf))
    assert same(contents(ts), before)


def test_gradient_that_alone_is_not_finite_skips():
    def root(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(jnp.sqrt(w) * batch["x"]), state, {}  # loss 0, gradient inf at 0

    program = et.pipe(root, et.update(optax.sgd(1.0)), et.guard, et.jit)
    ts = program.init(lambda key: jnp.float32(0), key=jax.random.key(0))
    ts, metrics = program(ts, GOOD)
    assert float(ts.model) == 0 and metrics["skipped"].value == 1


def test_metrics_of_skipped_steps_are_left_out_of_merges():
    program = et.pipe(loss, et.update(optax.sgd(1.0)), et.guard, et.jit)
    ts = program.init(lambda key: jnp.float32(3), key=jax.random.key(0))
    seen = []
    for batch in [GOOD, bad_at(1), GOOD]:
        ts, metrics = program(ts, batch)
        seen.append(metrics)
    merged = et.fetch(et.merge(*seen))
    assert merged == {"loss": 2.5, "mean": 2.5, "max": 3.0, "grad_norm": 1.0, "skipped": 1}


@pytest.mark.parametrize("placement", [None, et.rules({"split": P("data")})], ids=["copy", "split"])
def test_one_bad_row_skips_on_every_device(placement):
    def two(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean((model["copy"] + model["split"].sum()) * batch["x"]), state, {}

    if placement is None:
        placement = et.replicate()
    program = et.pipe(
        two,
        et.accumulate(2),
        shard(placement, data=4),
        et.update(optax.adam(1.0)),
        et.guard,
        et.jit,
    )
    ts = program.init(
        lambda key: {"copy": jnp.float32(1), "split": jnp.ones(8)}, key=jax.random.key(0)
    )
    after, _ = program(ts, bad_at(5))
    for old, new in zip(jax.tree.leaves(ts.model), jax.tree.leaves(after.model), strict=True):
        copies = [np.array(shard.data) for shard in new.addressable_shards]
        assert len(copies) == 4
        for before, copy in zip(old.addressable_shards, copies, strict=True):
            assert np.array(before.data).tobytes() == copy.tobytes()


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_guard_composes_with_accumulate_shard_and_repeat(order):
    """Case 39, as far as the guard sees it: one row on one device, in one of three steps."""
    chain = CHAINS["both" if order == "inside" else "both_outside"]
    program = et.pipe(loss, *chain, et.update(optax.sgd(1.0)), et.guard, et.repeat(3), et.donate)
    ts = program.init(with_state, key=jax.random.key(0))
    steps = {"x": np.stack([GOOD["x"], bad_at(6)["x"], GOOD["x"]])}
    ts, metrics = program(ts, steps)
    assert float(ts.model) == 1 - 2
    assert metrics["skipped"].value.tolist() == [0, 1, 0]
    # The state moves once a microbatch, in the two good steps alone.
    assert int(ts.state["count"]) == 4
    np.testing.assert_allclose(float(ts.state["mean"]), 1 - 0.9**4, rtol=1e-6)


# So many in a row stop the run, and none gets through.


def test_max_consecutive_stops_with_the_state_from_before():
    program = et.pipe(
        loss, et.update(optax.adam(0.1)), et.guard(nonfinite="skip", max_consecutive=3), et.donate
    )
    ts = program.init(with_state, key=jax.random.key(0))
    ts, _ = program(ts, GOOD)
    before = contents(ts)
    for _ in range(3):
        ts, _ = program(ts, bad_at(0))
    with pytest.raises(et.NonFiniteError, match="Got 3 steps.*error.state") as caught:
        program.check(ts)
    assert "It was call 4 of `train_step`." in caught.value.__notes__
    assert same(contents(left(caught)), before)


def test_max_consecutive_counts_on_whatever_the_loop_does_between_steps():
    program = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard(max_consecutive=3), et.donate)
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    for step in range(3):
        ts, _ = program(ts, bad_at(step))
        if step < 2:
            program.check(ts)
            ts = ts.replace(opt_state=ts.opt_state)
    with pytest.raises(et.NonFiniteError, match="Got 3 steps"):
        program.check(ts)


def test_max_consecutive_counts_only_those_in_a_row():
    program = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard(max_consecutive=2), et.donate)
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    for batch in [bad_at(0), GOOD, bad_at(0), GOOD, bad_at(0), bad_at(0)]:
        ts, _ = program(ts, batch)
    with pytest.raises(et.NonFiniteError, match="Got 2 steps"):
        program(ts, GOOD)  # flags are read one call late


def test_letting_the_third_through_is_told_apart():
    optimizer = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=2)
    w, state = jnp.float32(1), optimizer.init(jnp.float32(1))
    for _ in range(3):
        updates, state = optimizer.update(jnp.float32(np.nan), state, w)
        w = w + updates
    assert np.isnan(w)


def test_max_consecutive_is_seen_inside_repeat():
    program = et.pipe(
        loss, et.update(optax.sgd(0.1)), et.guard(max_consecutive=2), et.repeat(4), et.jit
    )
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    rows = [GOOD["x"], bad_at(0)["x"], bad_at(0)["x"], GOOD["x"]]
    ts, _ = program(ts, {"x": np.stack(rows)})
    with pytest.raises(et.NonFiniteError, match="Got 2 steps"):
        program.check(ts)


# "raise"


def raising(compile: Any = et.donate, after: Any = ()) -> Any:
    return et.pipe(
        loss, et.update(optax.adam(0.1)), et.ema(0.9), et.guard(nonfinite="raise"), *after, compile
    )


@pytest.mark.parametrize("compile", [et.jit, et.donate])
def test_raise_gives_the_state_from_before_the_failure(compile):
    program = raising(compile)
    ts = program.init(with_state, key=jax.random.key(0))
    ts, _ = program(ts, GOOD)
    before = contents(ts)
    ts, _ = program(ts, bad_at(3))
    with pytest.raises(et.NonFiniteError, match="were not finite") as caught:
        program(ts, GOOD)  # was dispatched before the flag was read, and must not move on
    assert same(contents(left(caught)), before)
    assert "It was call 2 of `train_step`." in caught.value.__notes__


def test_raise_inside_repeat_holds_the_later_steps_back():
    program = raising(after=(et.repeat(3),))
    ts = program.init(with_state, key=jax.random.key(0))
    alone = raising()
    one = alone.init(with_state, key=jax.random.key(0))
    one, _ = alone(one, GOOD)
    ts, _ = program(ts, {"x": np.stack([GOOD["x"], bad_at(3)["x"], GOOD["x"]])})
    with pytest.raises(et.NonFiniteError) as caught:
        program.check(ts)
    expected = contents(one)
    for name, leaf in contents(left(caught)).items():  # two programs may round apart
        np.testing.assert_allclose(leaf, expected[name], rtol=2e-7, err_msg=name)


def test_training_goes_on_from_the_state_of_the_error():
    program = raising()
    ts = program.init(with_state, key=jax.random.key(0))
    ts, _ = program(ts, GOOD)
    ts, _ = program(ts, bad_at(3))
    with pytest.raises(et.NonFiniteError) as caught:
        program(ts, GOOD)
    ts = left(caught)
    for _ in range(2):
        ts, _ = program(ts, GOOD)
    program.check(ts)

    right = raising()
    expected = right.init(with_state, key=jax.random.key(0))
    for _ in range(3):
        expected, _ = right(expected, GOOD)
    assert same(contents(ts), contents(expected))


def test_error_state_has_the_step_from_before_the_failure():
    program = raising()
    ts = program.init(with_state, key=jax.random.key(0))
    ts, _ = program(ts, GOOD)
    ts, _ = program(ts, bad_at(3))
    with pytest.raises(et.NonFiniteError) as caught:
        program(ts, GOOD)
    assert int(left(caught).step) == 1  # else the keys are others when it is tried again


def test_training_goes_on_after_max_consecutive():
    program = et.pipe(loss, et.update(optax.sgd(1.0)), et.guard(max_consecutive=1), et.donate)
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    ts, _ = program(ts, bad_at(0))
    with pytest.raises(et.NonFiniteError) as caught:
        program(ts, GOOD)
    ts, _ = program(left(caught), GOOD)
    program.check(ts)


def test_a_state_with_other_contents_still_knows_why_its_step_failed():
    program = raising()
    ts = program.init(with_state, key=jax.random.key(0))
    ts, _ = program(ts, bad_at(3))
    with pytest.raises(et.NonFiniteError, match="the loss was nan"):
        program(ts.replace(model=ts.model * 2), GOOD)


def test_a_state_whose_counts_are_replaced_is_not_asked_about_them():
    program = raising()
    start = program.init(with_state, key=jax.random.key(0))
    counts = jax.tree.map(jnp.copy, start.extra)
    ts, _ = program(start, bad_at(3))
    ts, _ = program(ts.replace(extra=counts), GOOD)
    program.check(ts)
    assert int(ts.step) == 1


@pytest.mark.parametrize("compile", [et.jit, et.donate])
def test_max_consecutive_holds_back_what_was_dispatched_before_it_was_seen(compile):
    program = et.pipe(loss, et.update(optax.sgd(1.0)), et.guard(max_consecutive=2), compile)
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    for batch in [bad_at(0), bad_at(1)]:
        ts, _ = program(ts, batch)
    with pytest.raises(et.NonFiniteError, match="Got 2 steps") as caught:
        program(ts, GOOD)
    ts = left(caught)
    assert (float(ts.model), int(ts.step)) == (1, 2)
    assert [trip.step for trip in program.trips] == [0, 1]
    found = program.explain(ts, bad_at(1))  # in the last step that failed
    assert found.kind == "nan" and found.leaves == ("batch.x",)
    ts, _ = program(ts, GOOD)
    assert (float(ts.model), int(ts.step)) == (0, 3)


def test_nothing_is_held_back_where_no_host_looks():
    # Copied at every call, inside another jit, or in a scan, a state loses what its step said.
    def program(form: Any = et.jit, most: int = 2) -> Any:
        return et.pipe(loss, et.update(optax.sgd(1.0)), et.guard(max_consecutive=most), form)

    compiled, inner, scanned = program(), program(), program()
    again = jax.jit(lambda ts, batch: inner(inner(ts, batch)[0], batch))
    given = [bad_at(n) for n in range(3)] + [GOOD] * 3

    def start(program: Any) -> et.TrainState:
        return program.init(lambda key: jnp.float32(1), key=jax.random.key(0))

    ts, twice = start(compiled), start(inner)
    for batch in given:
        ts, _ = compiled(jax.tree.map(jnp.copy, ts), batch)
        twice, _ = again(twice, batch)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *given)
    in_scan, _ = jax.jit(lambda ts, batches: jax.lax.scan(scanned, ts, batches))(
        start(scanned), stacked
    )
    repeated = et.pipe(
        loss, et.update(optax.sgd(1.0)), et.guard(max_consecutive=2), et.repeat(len(given))
    )
    in_repeat, _ = repeated(start(repeated), stacked)
    for found in (ts, in_scan, in_repeat):
        assert (float(found.model), int(found.step)) == (-2, 6)
        assert int(found.extra["guard"]["skipped"]) == 3
    assert (float(twice.model), int(twice.step)) == (-5, 12)

    # Nor from a checkpoint of a run that may have had more of them.
    patient, strict = program(most=9), program(most=2)
    ts = start(patient)
    for batch in given[:3]:
        ts, _ = patient(ts, batch)
    ts, _ = strict(et.TrainState(ts.leaves, ts.structure, fresh=True), GOOD)
    strict.check(ts)
    assert (float(ts.model), int(ts.step)) == (0, 4)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("chain", [(), (et.shard(et.mesh(data=2), batch=P("data")),)])
def test_a_state_may_come_from_the_host(nonfinite, chain):
    guard = et.guard(nonfinite=nonfinite)
    program = et.pipe(loss, *chain, et.update(optax.sgd(1.0)), guard, et.jit(max_compilations=2))
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    ts, _ = program(jax.device_get(ts), GOOD)
    ts, _ = program(jax.device_get(ts), GOOD)
    program.check(ts)
    assert (float(ts.model), int(ts.step)) == (-1, 2)


def test_what_is_to_be_raised_is_raised_for_copies_too():
    guard = et.guard(nonfinite="raise")
    program = et.pipe(loss, et.update(optax.sgd(1.0)), guard, et.donate)
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    ts, _ = program(ts, bad_at(0))
    with pytest.raises(et.NonFiniteError, match="no longer says what it was") as caught:
        program(jax.tree.map(jnp.copy, ts), GOOD)
    ts, _ = program(left(caught), GOOD)
    program.check(ts)
    assert (float(ts.model), int(ts.step)) == (0, 1)


@pytest.mark.parametrize(
    ("guard", "step_after"),
    [(et.guard(max_consecutive=1), 2), (et.guard(nonfinite="raise"), 1)],
    ids=["skip", "raise"],
)
def test_a_step_that_is_not_compiled_waits_for_nobody(guard, step_after):
    step = et.pipe(loss, et.update(optax.sgd(1.0)), guard)
    ts = step.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    for batch in [bad_at(0), GOOD]:
        ts, _ = step(ts, batch)
    assert (float(ts.model), int(ts.step)) == (0, step_after)


def test_ignore_only_counts():
    program = et.pipe(loss, et.update(optax.sgd(1.0)), et.guard(nonfinite="ignore"), et.jit)
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    for batch, count in [(GOOD, 0), (bad_at(0), 1), (GOOD, 1)]:
        ts, metrics = program(ts, batch)
        assert metrics["nonfinite"].value == count  # the weights are NaN from the second on
    assert np.isnan(float(ts.model)) and ts.extra["guard"]["skipped"] == 2
    program.check(ts)


def test_flags_are_read_one_call_late_and_once_each(monkeypatch):
    reads = []
    read_flag = program_module.read_flag
    monkeypatch.setattr(program_module, "read_flag", lambda x: reads.append(x) or read_flag(x))
    programs = {
        guarded: et.pipe(
            loss, et.update(optax.sgd(0.1)), *((et.guard,) if guarded else ()), et.donate
        )
        for guarded in (True, False)
    }
    for guarded, program in programs.items():
        ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
        reads.clear()
        for call in range(100):
            ts, _ = program(ts, GOOD)
            assert len(reads) == (call if guarded else 0)
        program.check(ts)
        assert len(reads) == (100 if guarded else 0)
        assert all(jnp.size(read) == 2 for read in reads)


@pytest.mark.parametrize("compile", [et.jit, et.donate])
def test_a_step_that_tripped_is_recorded_once_however_often_it_is_looked_at(compile):
    program = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard, compile)
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    ts, _ = program(ts, bad_at(0))
    other = ts.replace(state=None)
    program.check(other)
    program.check(ts)
    program.check(ts)
    if compile is et.jit:
        program(other, GOOD)
        program(ts, GOOD)
    ts, _ = program(ts, bad_at(0))
    ts, _ = program(ts, GOOD)
    assert [(trip.step, trip.call) for trip in program.trips] == (
        [(0, 1), (1, 4)] if compile is et.jit else [(0, 1), (1, 2)]
    )


def test_an_error_is_raised_at_each_look_and_recorded_once():
    program = raising()
    ts = program.init(with_state, key=jax.random.key(0))
    ts, _ = program(ts, bad_at(3))
    for _ in range(2):
        with pytest.raises(et.NonFiniteError, match="the loss was nan"):
            program.check(ts)
    assert len(program.trips) == 1


# What else may be in a TrainState, and more than one of them.


def test_key_in_the_state_is_held_back():
    def draws(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(w * batch["x"]), {"key": jax.random.fold_in(state["key"], 1)}, {}

    program = et.pipe(draws, et.accumulate(2), et.update(optax.sgd(0.1)), et.guard, et.donate)
    ts = program.init(
        lambda key: (jnp.float32(1), {"key": jax.random.key(5)}), key=jax.random.key(0)
    )
    keys = [np.array(jax.random.key_data(ts.state["key"]))]
    for batch in [GOOD, bad_at(2), GOOD]:
        ts, _ = program(ts, batch)
        keys.append(np.array(jax.random.key_data(ts.state["key"])))
    assert np.array_equal(keys[1], keys[2])
    assert not np.array_equal(keys[0], keys[1]) and not np.array_equal(keys[2], keys[3])


def test_two_runs_of_one_program_are_told_apart():
    program = raising()
    one, two = (program.init(with_state, key=jax.random.key(seed)) for seed in range(2))
    one, _ = program(one, bad_at(0))
    two, _ = program(two, GOOD)  # nothing is wrong with this run
    two, _ = program(two, GOOD)
    assert float(two.model) < 1
    with pytest.raises(et.NonFiniteError) as caught:
        program(one, GOOD)
    assert float(left(caught).model) == 1


def test_batch_in_which_nothing_counts_is_no_failure():
    def weighted(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(w * batch["x"], where=batch["weight"]), state, {}

    program = et.pipe(weighted, et.accumulate(2), et.update(optax.sgd(1.0)), et.guard, et.jit)
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    ts, metrics = program(ts, {**GOOD, "weight": np.zeros(8, np.float32)})
    assert float(ts.model) == 1 and metrics["skipped"].value == 0
    assert np.isnan(float(metrics["loss"])) and float(metrics["grad_norm"]) == 0
