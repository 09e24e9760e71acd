"""Recipes from public reports: `checkify.check` under every transform, each failure named.

The right answer is arithmetic: which rows of the global batch fail, which device and microbatch has
them, and on which line of this file the check stands.
"""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import eqtrain as et
from eqtrain._transforms import guard as guard_module
from eqtrain.explain.record import CLASSES

ROWS = 16
BAD = {3: -1.0, 12: -2.0}
GOOD_BATCH = {"x": np.arange(1, ROWS + 1, dtype=np.float32)}
BATCH = {"x": GOOD_BATCH["x"].copy()}
for row, number in BAD.items():
    BATCH["x"][row] = number


def checked_log(x: Any) -> Any:
    checkify.check(x > 0, "want x > 0, got {x}", x=x)  # planted
    return jnp.log(jnp.abs(x))


def loss(w: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(w * jax.vmap(checked_log)(batch["x"])), state, {}


def line_of(function: Callable[..., Any], mark: str = "# planted") -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if mark in line)


def program_of(*chain: Any, loss: Any = loss, guard: Any = et.guard, compile: Any = et.jit) -> Any:
    return et.pipe(loss, *chain, et.update(optax.sgd(0.1)), guard, compile)


def start(program: Any) -> et.TrainState:
    return program.init(lambda key: jnp.float32(1), key=jax.random.key(0))


def trips_of(program: Any, batch: Any = BATCH) -> tuple[et.Trip, ...]:
    ts, _ = program(start(program), batch)
    program.check(ts)
    return program.trips


def mesh_shard(**options: Any) -> Any:
    return et.shard(et.mesh(data=4, model=2), batch=P("data"), **options)


# The chain, on how many devices the rows are split, and in how many microbatches there.
CHAINS = {
    "alone": ((), 1, 1),
    "remat": ((et.remat,), 1, 1),
    "accumulate": ((et.accumulate(4),), 1, 4),
    "accumulate_twice": ((et.accumulate(2), et.accumulate(4)), 1, 8),
    "shard": ((mesh_shard(),), 4, 1),
    "shard_outside": ((et.accumulate(2), mesh_shard()), 4, 2),
    "shard_between": ((et.accumulate(2), mesh_shard(), et.accumulate(2)), 4, 4),
    "tree": ((et.accumulate(2, order="tree"), mesh_shard(order="tree")), 4, 2),
    "all": (
        (et.precision("bfloat16"), et.remat, et.accumulate(2), mesh_shard(), et.accumulate(2)),
        4,
        4,
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_every_device_microbatch_and_example_is_named(chain):
    transforms, devices, microbatches = CHAINS[chain]
    (trip,) = trips_of(program_of(*transforms))
    local = ROWS // devices
    expected = {
        (row, row // local if devices > 1 else None, row % local * microbatches // local)
        for row in BAD
    }
    found = {
        (failure.example, failure.device.get("data"), failure.microbatch)
        for failure in trip.failures
    }
    assert found == expected
    # Each of the model's axis has the same rows, and says so.
    assert len(trip.failures) == len(BAD) * (2 if devices > 1 else 1)
    assert trip.causes == ("check",) and trip.step == 0


@pytest.mark.parametrize("chain", ["alone", "all"])
def test_the_text_and_the_line_are_the_users_own(chain):
    (trip,) = trips_of(program_of(*CHAINS[chain][0]))
    for failure in trip.failures:
        assert failure.example is not None
        assert f"want x > 0, got {BAD[failure.example]}" in failure.message
        frame = failure.frames[0]
        assert (frame.file, frame.line) == (__file__, line_of(checked_log))
        assert frame.code.startswith('checkify.check(x > 0, "want x > 0')
        assert str(failure) in str(trip)
    assert "example 12 of the global batch" in str(trip)


def test_each_step_of_repeat_says_its_own():
    program = et.pipe(
        loss, et.accumulate(2), et.update(optax.sgd(0.1)), et.guard, et.repeat(3), et.jit
    )
    stacked = {"x": np.stack([GOOD_BATCH["x"], BATCH["x"], BATCH["x"]])}
    trips = trips_of(program, stacked)
    assert [trip.step for trip in trips] == [1, 2]
    for trip in trips:
        assert {failure.example for failure in trip.failures} == set(BAD)
    assert [trip.in_a_row for trip in trips] == [1, 2]


# Where in a loss a check may stand.


def in_jit(w: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(w * jax.jit(jax.vmap(checked_log))(batch["x"])), state, {}


def in_checkpoint(w: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(w * jax.vmap(jax.checkpoint(checked_log))(batch["x"])), state, {}


def in_filtered_checkpoint(w: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(w * eqx.filter_checkpoint(jax.vmap(checked_log))(batch["x"])), state, {}


def in_cond(w: Any, state: Any, batch: Any, key: Any) -> Any:
    x = batch["x"]
    values = lax.cond(x.sum() > -1e9, jax.vmap(checked_log), lambda x: x * 0, x)
    return et.mean(w * values), state, {}


@pytest.mark.parametrize("stands", [in_jit, in_checkpoint, in_filtered_checkpoint, in_cond])
@pytest.mark.parametrize("chain", ["alone", "shard_outside"])
def test_a_check_may_stand_anywhere(stands, chain):
    (trip,) = trips_of(program_of(*CHAINS[chain][0], loss=stands))
    assert {failure.example for failure in trip.failures} == set(BAD)
    assert {failure.frames[0].line for failure in trip.failures} == {line_of(checked_log)}


@pytest.mark.parametrize("chain", ["alone", "shard_outside"])
def test_a_check_in_a_loop_says_which_turn(chain):
    def layered(w: Any, state: Any, batch: Any, key: Any) -> Any:
        def layer(x: Any, limit: Any) -> tuple[Any, None]:
            jax.vmap(lambda x: checkify.check(x < limit, "{x} >= {limit}", x=x, limit=limit))(x)
            return x + 1, None

        limits = jnp.array([100.0, 16.5, 100.0])
        x, _ = lax.scan(jax.checkpoint(layer), w * batch["x"], limits)
        return et.mean(x), state, {}

    (trip,) = trips_of(program_of(*CHAINS[chain][0], loss=layered), GOOD_BATCH)
    # In turn 1 the last row is 17.
    assert {(failure.example, failure.index) for failure in trip.failures} == {(15, (1,))}
    assert "17.0 >= 16.5" in trip.failures[0].message


def test_a_check_in_a_while_loop_keeps_the_first_that_failed():
    def looped(w: Any, state: Any, batch: Any, key: Any) -> Any:
        def turn(carry: Any) -> Any:
            i, total = carry
            checkify.check(batch["x"][i] > 0, "row {i}", i=i)
            return i + 1, total + batch["x"][i]

        _, total = lax.while_loop(lambda carry: carry[0] < ROWS, turn, (0, 0.0))
        return w * lax.stop_gradient(total), state, {}

    (trip,) = trips_of(program_of(loss=looped))
    assert [failure.message for failure in trip.failures] == ["row 3 (`check` failed)"]


def test_a_check_of_the_whole_microbatch_names_no_example():
    def whole(w: Any, state: Any, batch: Any, key: Any) -> Any:
        checkify.check(jnp.all(batch["x"] > 0), "smallest is {least}", least=batch["x"].min())
        return et.mean(w * batch["x"]), state, {}

    (trip,) = trips_of(program_of(et.accumulate(4), loss=whole))
    found = [(failure.microbatch, failure.example) for failure in trip.failures]
    assert found == [(0, None), (3, None)]
    assert "smallest is -2.0" in trip.failures[1].message


# Case 39: a check in a loop inside shard_map.


def test_a_check_in_a_scan_inside_shard_map_names_devices_and_turns():
    def looped(w: Any, state: Any, batch: Any, key: Any) -> Any:
        def turn(x: Any, _: None) -> tuple[Any, None]:
            checkify.check(jnp.all(x < 3), "{x} is not below 3", x=x[0])
            return x + 1, None

        x, _ = lax.scan(turn, batch["x"], length=4)
        return et.mean(w * x), state, {}

    shard = et.shard(et.mesh(data=4), batch=P("data"))
    program = program_of(shard, loss=looped, guard=et.guard(nonfinite="ignore"))
    ts, metrics = program(start(program), {"x": np.array([1, 2, -1, -3], np.float32)})
    assert float(metrics["loss"]) == np.mean([5, 6, 3, 1])
    assert float(metrics["nonfinite"]) == 1
    skipping = program_of(shard, loss=looped)
    (trip,) = trips_of(skipping, {"x": np.array([1, 2, -1, -3], np.float32)})
    first = {}
    for failure in trip.failures:
        first.setdefault(failure.device["data"], failure.index[0])
    assert first == {0: 2, 1: 1}


# Case 40: checks before and after what joins the devices; every device's is told.


@pytest.mark.parametrize("with_value", [True, False])
def test_checks_inside_and_after_a_collective_are_one_report(with_value):
    def joined(w: Any, state: Any, batch: Any, key: Any) -> Any:
        x = batch["x"]
        text = "inside: {x}" if with_value else "inside"
        checkify.check(x[0] > 0, text, **({"x": x[0]} if with_value else {}))
        total = lax.psum(x.sum(), "data")
        text = "after: {total}" if with_value else "after"
        checkify.check(total > 0, text, **({"total": total} if with_value else {}))
        return et.mean(w * x), state, {}

    shard = et.shard(et.mesh(data=4), batch=P("data"))
    (trip,) = trips_of(program_of(shard, loss=joined), {"x": np.array([1, 2, -1, -3], np.float32)})
    said = [(failure.device["data"], failure.message) for failure in trip.failures]
    inside = ["inside: -1.0", "inside: -3.0"] if with_value else ["inside"] * 2
    after = "after: -1.0" if with_value else "after"
    expected = [(2, inside[0]), (3, inside[1]), *((device, after) for device in range(4))]
    assert said == [(device, f"{text} (`check` failed)") for device, text in expected]


# What a failed check does.


def test_a_failed_check_skips_as_a_nan_does():
    program = program_of(et.accumulate(2))
    before = start(program)
    ts, metrics = program(before, BATCH)
    assert float(metrics["skipped"]) == 1 and float(ts.model) == float(before.model)
    ts, metrics = program(ts, GOOD_BATCH)
    assert float(metrics["skipped"]) == 0
    np.testing.assert_allclose(float(ts.model), 1 - 0.1 * np.log(GOOD_BATCH["x"]).mean(), rtol=1e-6)


def test_raise_gives_an_error_with_the_report_and_the_state_from_before():
    program = program_of(mesh_shard(), guard=et.guard(nonfinite="raise"), compile=et.donate)
    ts, _ = program(start(program), GOOD_BATCH)
    before = float(ts.model)
    ts, _ = program(ts, BATCH)
    with pytest.raises(et.CheckError, match="want x > 0, got -2.0") as caught:
        program(ts, GOOD_BATCH)
    assert caught.value.state is not None and float(caught.value.state.model) == before
    assert caught.value.trip is not None and caught.value.trip.step == 1
    assert "It was call 2 of `train_step`." in caught.value.__notes__


@pytest.mark.parametrize("guard", [et.guard(checks=()), et.guard(nonfinite="ignore")])
def test_checks_may_be_left_out_or_only_counted(guard):
    program = program_of(et.accumulate(2), guard=guard)
    ts, metrics = program(start(program), BATCH)
    program.check(ts)
    assert float(ts.model) != 1 and program.trips == ()
    assert float(metrics.get("nonfinite", 0)) == (1 if "nonfinite" in metrics else 0)


def test_checks_that_hold_set_nothing_off():
    program = program_of(*CHAINS["shard_outside"][0])
    assert trips_of(program, GOOD_BATCH) == ()


def test_a_loss_without_checks_compiles_to_the_same_program():
    def plain(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(jnp.tanh(w * batch["x"])), state, {}

    texts = []
    for guard in (et.guard, et.guard(checks=())):
        program = program_of(et.accumulate(2), loss=plain, guard=guard)
        texts.append(program.lower(start(program), GOOD_BATCH).as_text())
    assert texts[0] == texts[1]


def test_an_evaluation_counts_the_batches_in_which_a_check_failed():
    ts = start(program_of())
    measure = et.evaluate(loss)
    parts = [measure(ts, batch) for batch in (BATCH, GOOD_BATCH, BATCH)]
    assert et.fetch(et.merge(*parts))["failed_checks"] == 2


def test_a_check_that_nobody_looks_at_is_refused():
    program = et.pipe(loss, et.accumulate(2), et.update(optax.sgd(0.1)), et.jit)
    with pytest.raises(ValueError, match="needs somebody who looks at it.*Add `et.guard`"):
        program(start(program), BATCH)


def test_a_check_in_a_function_with_its_own_derivative_is_refused_by_name():
    @jax.custom_jvp
    def own(x: Any) -> Any:
        checkify.check(jnp.all(x > 0), "no")
        return x

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0]))

    def custom(w: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(w * own(batch["x"])), state, {}

    program = program_of(loss=custom)
    with pytest.raises(ValueError, match="inside `custom_jvp_call`.*Move the check out"):
        program(start(program), BATCH)


def test_unknown_checks_are_refused():
    with pytest.raises(ValueError, match="`checks` must be of"):
        et.guard(checks="nans")


def test_jax_itself_checks_as_before():
    """The rule that keeps every example of a `vmap` is there only while a loss is traced."""
    start(program_of())
    trips_of(program_of())
    error, _ = jax.jit(checkify.checkify(jax.vmap(checked_log)))(BATCH["x"])
    text = error.get()
    assert text is not None and text.count("want x > 0") == 1


# The other classes watch every primitive.


@pytest.mark.parametrize("chain", ["alone", "all"])
@pytest.mark.parametrize("name", ["float", "index", "division"])
def test_each_class_names_the_primitive_and_the_line(name, chain):
    def planted(w: Any, state: Any, batch: Any, key: Any) -> Any:
        x = batch["x"]
        masked = jnp.where(x > 0, jnp.log(x), 0)  # float
        table = jnp.take(jnp.arange(20.0), batch["index"], mode="clip")  # index
        cut = (60 // batch["divisor"]).astype("float32")  # division
        return et.mean(w * (masked + table.astype(x.dtype) + cut.astype(x.dtype))), state, {}

    fine = {
        "x": GOOD_BATCH["x"],
        "index": np.arange(ROWS, dtype=np.int32),
        "divisor": np.ones(ROWS, np.int32),
    }
    bad = {"float": ("x", -1), "index": ("index", 99), "division": ("divisor", 0)}
    entry, value = bad[name]
    batch = {**fine, entry: np.where(np.arange(ROWS) == 12, value, fine[entry])}
    batch[entry] = batch[entry].astype(fine[entry].dtype)
    transforms, devices, microbatches = CHAINS[chain]
    program = program_of(*transforms, loss=planted, guard=et.guard(checks=["user", name]))
    ts, metrics = program(start(program), fine)
    assert float(metrics["skipped"]) == 0
    ts, metrics = program(ts, batch)
    program.check(ts)
    assert float(metrics["skipped"]) == 1
    (trip,) = program.trips
    assert {failure.frames[0].line for failure in trip.failures} == {line_of(planted, f"# {name}")}
    local = ROWS // devices
    for failure in trip.failures:
        assert failure.microbatch == 12 % local * microbatches // local
        assert failure.device.get("data") == (12 // local if devices > 1 else None)


def test_a_nan_that_nothing_comes_of_is_none_for_the_user_checks_alone():
    def masked(w: Any, state: Any, batch: Any, key: Any) -> Any:
        safe = jnp.where(batch["x"] > 0, jnp.log(lax.stop_gradient(batch["x"])), 0)
        return et.mean(w * safe), state, {}

    assert trips_of(program_of(loss=masked)) == ()
    (trip,) = trips_of(program_of(loss=masked, guard=et.guard(checks="float")))
    assert [failure.message for failure in trip.failures] == ["a NaN was made by `log`"]


def test_a_zero_among_float_divisors_is_no_division_by_zero():
    def masked(w: Any, state: Any, batch: Any, key: Any) -> Any:
        x = batch["x"]
        return et.mean(w * jnp.where(x > 0, 1 / x + 1 % x, 0)), state, {}

    def in_a_loop(w: Any, state: Any, batch: Any, key: Any) -> Any:
        def turn(carry: Any) -> Any:
            number, total = carry
            total = total + jnp.where(number > 0, 1 / number.astype("float32"), 0)
            return number + 1, total + (6 // (number - 1)).astype("float32")

        total = lax.while_loop(lambda carry: carry[0] < 3, turn, (0, jnp.float32(0)))[1]
        return et.mean(w * batch["x"] * 0 + total * 0), state, {}

    program = program_of(loss=masked, guard=et.guard(checks="division"))
    batch = {"x": np.array([1, 2, 0, 4], np.float32)}
    ts, metrics = program(start(program), batch)
    program.check(ts)
    assert float(metrics["skipped"]) == 0 and program.trips == ()
    # It is one to `explain`, if something comes of it.
    assert program.explain(ts, batch).kind == "nothing"
    # A turn before, with such a divisor, does not hide the one that counts.
    (trip,) = trips_of(program_of(loss=in_a_loop, guard=et.guard(checks="division")))
    found = {failure.message for failure in trip.failures}
    assert found == {"a divisor of `div` was zero", "a divisor of `rem` was zero"}


def test_the_guard_names_the_classes_that_there_are():
    assert guard_module.CHECKS == ("user", *CLASSES)


def new_function() -> Callable[[Any], Any]:
    """Called by a user's own checkify and by a loss: what JAX keeps of it is met by both."""

    @jax.jit
    def positive(x):
        checkify.check(x > 0, "x is {x}", x=x)
        return 2 * x

    return positive


def names_of_rows(positive: Callable[[Any], Any]) -> list[int | None]:
    def loss(model, state, batch, key):
        return et.mean(jax.vmap(positive)(batch["x"]) * model), state, {}

    program = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard, et.jit)
    ts = program.init(lambda key: jnp.array(1.0), key=jax.random.key(0))
    ts, _ = program(ts, {"x": NEGATIVE})
    program.check(ts)
    return [failure.example for failure in program.trips[0].failures]


def message_of_checkify(positive: Callable[[Any], Any]) -> str:
    error, _ = checkify.checkify(jax.vmap(positive))(jnp.asarray(NEGATIVE))
    return str(error.get())


NEGATIVE = np.array([1, 2, -1, 4, 5, 6, -2, 8], np.float32)
LOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "guard": (names_of_rows, "[2, 6]"),
    "checkify": (message_of_checkify, "x is -2.0 (`check` failed)"),
}


@pytest.mark.parametrize("order", [["guard", "checkify"], ["checkify", "guard"]])
def test_the_guard_and_a_checkify_of_the_users_do_not_meet(order: list[str]):
    function = new_function()
    for name in order * 2:
        look, right = LOOKS[name]
        assert str(look(function)) == right


def test_the_guard_and_a_checkify_in_another_thread_do_not_meet():
    functions = [new_function() for _ in range(4)]
    found: dict[str, list[str]] = {name: [] for name in LOOKS}

    def look_at_all(name: str) -> None:
        for function in functions:
            found[name].append(str(LOOKS[name][0](function)))

    threads = [threading.Thread(target=look_at_all, args=(name,)) for name in LOOKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [right] * len(functions) for name, (_, right) in LOOKS.items()}


@pytest.mark.parametrize("devices", [1, 4])
def test_a_check_in_a_while_loop_on_a_mesh_names_the_row(devices: int):
    def loss(model, state, batch, key):
        def one(x):
            def body(carry):
                i, s = carry
                checkify.check(s < 90, "s {s}", s=s)
                return i + 1, s + jnp.abs(x[i])

            return jax.lax.while_loop(lambda carry: carry[0] < 8, body, (0, jnp.zeros(())))[1]

        return et.mean(jax.lax.stop_gradient(jax.vmap(one)(batch["x"])) * model), state, {}

    x = np.ones((4, 8), np.float32)
    x[2] = 30
    shard = et.shard(et.mesh(data=devices), batch=P("data"))
    program = et.pipe(loss, shard, et.update(optax.sgd(0.1)), et.guard, et.jit)
    ts = program.init(lambda key: jnp.array(1.0), key=jax.random.key(0))
    ts, _ = program(ts, {"x": x})
    program.check(ts)
    [failure] = program.trips[0].failures
    assert (failure.message.split(" (")[0], failure.example) == ("s 90.0", 2)
    assert failure.device == {"data": 2 * devices // 4}


def test_a_text_whose_braces_are_no_fields_is_shown_as_it_is():
    texts = ["set {1,2} is bad", "{name} is bad", "100% } done"]

    def loss(model, state, batch, key):
        for text in texts:
            checkify.check(jnp.all(batch["x"] < 0), text)
        return et.mean(batch["x"] * model), state, {}

    program = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard, et.jit)
    ts = program.init(lambda key: jnp.array(1.0), key=jax.random.key(0))
    ts, metrics = program(ts, {"x": np.ones(2, np.float32)})
    program.check(ts)
    assert [failure.message for failure in program.trips[0].failures] == texts
    assert float(metrics["skipped"]) == 1
