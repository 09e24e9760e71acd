"""A TrainState is a flat tuple of arrays with one structure, and the trees it was made of."""

import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

BATCH = {"x": np.ones((4, 3), np.float32)}


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    values = jax.vmap(model)(batch["x"])
    return et.mean(values), {"calls": state["calls"] + 1, "scale": state["scale"]}, {}


def make(key: Any) -> Any:
    state = {"calls": 0, "scale": np.float32(2)}
    return eqx.nn.MLP(3, "scalar", width_size=4, depth=1, key=key), state


def step_of(*chain: Any, optimizer: Any = None) -> Any:
    return et.pipe(loss, *chain, et.update(optimizer or optax.adam(0.1)))


def start(*chain: Any, after: Any = ()) -> et.TrainState:
    return et.pipe(step_of(*chain), *after).init(make, key=jax.random.key(0))


def test_fields_are_what_init_made():
    ts = start(after=(et.ema(0.9), et.guard))
    model, _ = make(jax.random.split(jax.random.key(0))[0])
    assert jax.tree.structure(ts.model) == jax.tree.structure(model)
    for a, b in zip(jax.tree.leaves(ts.model), jax.tree.leaves(model), strict=True):
        assert a is b or np.allclose(a, b, rtol=1e-6)  # one jit against many small ones
    assert ts.model.activation is model.activation
    assert int(ts.step) == 0 and ts.step.dtype == jnp.int32
    assert jnp.issubdtype(ts.key.dtype, jax.dtypes.prng_key) and ts.key.shape == ()
    assert set(ts.extra) == {"ema", "guard"}
    assert ts.opt_state[0].count == 0


def test_key_of_the_model_is_not_that_of_the_steps():
    seen = []

    def peek(key: Any) -> Any:
        seen.append(key)
        return make(key)

    ts = step_of().init(peek, key=jax.random.key(0))
    assert seen[0].shape == ()
    # One half of the key that was given, and the model is of the other.
    for_make, for_steps = jax.random.split(jax.random.key(0))
    assert ts.key == for_steps
    got, expected = (eqx.filter(t, eqx.is_array) for t in (ts.model, make(for_make)[0]))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_python_numbers_and_numpy_become_arrays_without_weak_types():
    ts = start()
    assert ts.state["calls"].dtype == jnp.int32 and ts.state["scale"].dtype == jnp.float32
    for leaf in jax.tree.leaves(ts):
        assert isinstance(leaf, jax.Array) and not leaf.aval.weak_type


def test_numpy_model_becomes_arrays_and_settings_stay():
    def numpy_model(key: Any) -> Any:
        return {"w": np.ones(3, np.float32), "depth": 2, "name": "net"}

    step = et.update(optax.sgd(0.1))(lambda m, s, b, k: (et.mean(b["x"] @ m["w"]), s, {}))
    ts = step.init(numpy_model, key=jax.random.key(0))
    assert isinstance(ts.model["w"], jax.Array)
    assert ts.model["depth"] == 2 and ts.model["name"] == "net"
    ts, _ = step(ts, BATCH)
    assert ts.model["depth"] == 2 and type(ts.model["depth"]) is int


def test_flattening_gives_names_and_one_structure():
    ts = start()
    paths = jax.tree_util.tree_leaves_with_path(ts)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    assert ".model.layers.0.weight" in names and ".state.calls" in names and ".step" in names
    assert ".opt_state.0.mu.layers.0.weight" in names and len(set(names)) == len(names)
    leaves, treedef = jax.tree.flatten(ts)
    assert all(a is b for a, b in zip(leaves, ts.leaves, strict=True))
    again = jax.tree.unflatten(treedef, leaves)
    assert isinstance(again, et.TrainState) and again.structure is ts.structure
    assert [leaf for _, leaf in paths] == list(leaves)


def test_structures_are_equal_by_identity_alone():
    ts, other = start(), start()
    assert jax.tree.structure(ts) == jax.tree.structure(jax.tree.map(jnp.copy, ts))
    assert ts.structure is not other.structure
    assert jax.tree.structure(ts) != jax.tree.structure(other)


def test_one_program_shares_the_structure_of_all_it_makes():
    program = et.pipe(step_of(), et.jit)
    one, two = (program.init(make, key=jax.random.key(seed)) for seed in range(2))
    assert one.structure is two.structure
    one, _ = program(one, BATCH)
    two, _ = program(two, BATCH)
    assert one.structure is two.structure and program.compilations == 1
    other = et.pipe(step_of(), et.jit).init(make, key=jax.random.key(2))
    program(other, BATCH)  # equal, and so no second compilation
    assert program.compilations == 1


def test_pack_undoes_unpack():
    ts = start(after=(et.ema(0.9),))
    leaves = ts.structure.pack(ts.parts)
    assert all(a is b for a, b in zip(leaves, ts.leaves, strict=True))


def test_map_keeps_a_train_state_that_can_be_trained():
    program = et.pipe(step_of(), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    copy = jax.tree.map(jnp.copy, ts)
    one, _ = program(ts, BATCH)
    two, _ = program(copy, BATCH)
    for a, b in zip(one.leaves, two.leaves, strict=True):
        assert a == b if jnp.issubdtype(a.dtype, jax.dtypes.extended) else np.array_equal(a, b)
    assert program.compilations == 1


def test_train_state_passes_through_jit_and_grad_free_functions():
    ts = start()

    @jax.jit
    def halve(ts: et.TrainState) -> et.TrainState:
        params, rest = eqx.partition(ts.model, eqx.is_inexact_array)
        return ts.replace(model=eqx.combine(jax.tree.map(lambda p: p / 2, params), rest))

    half = halve(ts)
    assert isinstance(half, et.TrainState)
    assert np.array_equal(half.model.layers[0].weight * 2, ts.model.layers[0].weight)


# `replace`


def test_replace_changes_what_is_named_and_nothing_else():
    ts = start()
    model = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, ts.model)
    other = ts.replace(model=model, state={"calls": np.int32(7), "scale": np.float32(1)})
    assert np.array_equal(other.model.layers[0].weight, ts.model.layers[0].weight + 1)
    assert other.state["calls"] == 7 and isinstance(other.state["calls"], jax.Array)
    assert other.structure is ts.structure
    assert other.key == ts.key and other.step == ts.step
    assert ts.state["calls"] == 0


def test_replace_puts_arrays_where_the_old_ones_were():
    shard = et.shard(et.mesh(data=4), batch=P("data"), model=et.rules({"0.weight": P("data")}))
    program = et.pipe(step_of(shard), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    ts, _ = program(ts, BATCH)
    on_host = jax.tree.map(lambda x: np.array(x) if eqx.is_array(x) else x, ts.model)
    other = ts.replace(model=on_host)
    assert other.model.layers[0].weight.sharding.spec == P("data")
    for old, new in zip(ts.leaves, other.leaves, strict=True):
        assert old.sharding == new.sharding
    program(other, BATCH)
    assert program.compilations == 1


@pytest.mark.parametrize("chain", [(), (et.shard(et.mesh(data=2), batch=P("data")),)])
def test_replaced_state_can_be_donated(chain):
    program = et.pipe(step_of(*chain), et.ema(0.5), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    ts, _ = program(ts, BATCH)
    average = np.array(ts.ema.layers[0].weight)
    ts = ts.replace(model=ts.ema)
    assert np.array_equal(ts.model.layers[0].weight, average)
    # A buffer that is there twice cannot be donated; on a mesh, JAX 0.10 crashes over it.
    assert len({id(leaf) for leaf in ts.leaves}) == len(ts.leaves)
    ts, _ = program(ts, BATCH)
    assert np.isfinite(ts.model.layers[0].weight).all()
    assert program.compilations == 1


def test_replace_by_a_weak_type_does_not_compile_again():
    program = et.pipe(step_of(), et.jit(max_compilations=1))
    ts = program.init(make, key=jax.random.key(0))
    program(ts, BATCH)
    program(
        ts.replace(step=jnp.asarray(5), state={"calls": jnp.asarray(1), "scale": jnp.asarray(2.0)}),
        BATCH,
    )


def test_repr_is_short_and_says_what_there_is():
    program = et.pipe(step_of(), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    size = sum(leaf.nbytes for leaf in ts.leaves)
    assert repr(ts) == f"TrainState({len(ts.leaves)} arrays, {size:,} bytes)"
    program(ts, BATCH)
    assert repr(ts).endswith("used up by call 1 of `train_step`)")


def test_arrays_that_make_closed_over_outlive_the_step():
    held = jnp.ones(3)
    step = et.pipe(
        lambda m, s, b, k: (et.mean(b["x"] @ m), s, {}), et.update(optax.sgd(0.1)), et.donate
    )
    ts = step.init(lambda key: held, key=jax.random.key(0))
    step(ts, BATCH)
    assert held.tolist() == [1, 1, 1]


def test_steps_do_not_need_a_compiled_program():
    step = step_of(optimizer=optax.sgd(0.1))
    ts = start_sgd = step.init(make, key=jax.random.key(0))
    ts, metrics = step(ts, BATCH)
    program = et.pipe(step, et.jit)
    compiled, compiled_metrics = program(start_sgd, BATCH)
    assert int(ts.step) == 1 and int(start_sgd.step) == 0
    for a, b in zip(jax.tree.leaves(ts.model), jax.tree.leaves(compiled.model), strict=True):
        assert a is b or np.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(float(compiled_metrics["loss"]), rel=1e-5)


def test_key_never_changes():
    program = et.pipe(step_of(), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    before = np.array(jax.random.key_data(ts.key))
    for _ in range(3):
        ts, _ = program(ts, BATCH)
    assert np.array_equal(jax.random.key_data(ts.key), before) and int(ts.step) == 3


def test_structure_says_no_to_pickle_silently_losing_arrays():
    ts = start()
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(ts)


@pytest.mark.parametrize("look", ["call", "check", "explain", "evaluate"])
def test_a_compiled_step_leaves_the_state_it_is_given_as_it_is(look):
    """Every object in it: the arrays and where they lie, and what it says of its step."""

    def loss(model, state, batch, key):
        return et.mean((batch["x"] - model["w"]) ** 2), state, {}

    program = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard, et.jit)
    evaluate = et.evaluate(loss)
    batch = jax.device_put({"x": jnp.array([1.0, jnp.nan])}, jax.devices()[1])
    first = program.init(lambda key: {"w": jnp.zeros(())}, key=jax.random.key(0))
    second, _ = program(first, batch)
    looks: dict[str, Any] = {
        "call": lambda ts: program(ts, batch),
        "check": program.check,
        "explain": lambda ts: program.explain(ts, batch),
        "evaluate": lambda ts: evaluate(ts, batch),
    }
    for ts in (first, second):
        before = (ts.leaves, [leaf.sharding for leaf in ts.leaves], ts.flag, ts.used, ts.fresh)
        looks[look](ts)
        assert ts.leaves is before[0] and ts.flag is before[2]
        assert [leaf.sharding for leaf in ts.leaves] == before[1]
        assert (ts.used, ts.fresh) == before[3:]


def test_what_is_lowered_first_is_not_traced_again_by_a_call():
    traced = []

    def loss(model, state, batch, key):
        traced.append(1)
        return et.mean((batch["x"] - model["w"]) ** 2), state, {}

    batch = {"x": jnp.array([1.0, 2.0])}
    program = et.pipe(loss, et.update(optax.sgd(0.1)), et.donate(max_compilations=1))
    ts = program.init(lambda key: {"w": jnp.zeros(())}, key=jax.random.key(0))
    text = program.lower(ts, batch).as_text()
    assert "module @jit_train_step" in text
    program.inspect(ts, batch)
    before = len(traced)
    assert program.compilations == 0
    ts, _ = program(ts, batch)
    assert len(traced) == before and program.compilations == 1
    assert "module @jit_evaluate" in et.evaluate(loss).compiled.lower(ts, batch).as_text()
