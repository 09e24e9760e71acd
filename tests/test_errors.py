"""What a user gets wrong: an error as soon as it is known, in three parts, and nothing is lost.

The parts are the rule, what was got instead, and what to write. Each test names a piece of each.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et


@pytest.fixture(autouse=True)
def as_users_run_it() -> Iterator[None]:
    """Turns the checks of annotations off, which would speak first, and to nobody but us."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@contextlib.contextmanager
def refused(kind: type[Exception], rule: str, got: str, advice: str) -> Iterator[None]:
    """Expects an error of exactly this type, whose message has the parts in this order."""
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind, repr(caught.value)
    message, place = str(caught.value), 0
    for part in (rule, "Got ", got, advice):
        found = message.find(part, place)
        assert found >= 0, f"{part!r} is not in {message[place:]!r}, the rest of {message!r}"
        place = found + len(part)


BATCH = {"x": np.ones((8, 4), np.float32), "y": np.ones(8, np.float32)}


def make(key: Any) -> Any:
    return {"w": jax.random.normal(key, (4,)), "b": jnp.zeros(())}


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    out = batch["x"] @ model["w"] + model["b"]
    return et.mean((out - batch["y"]) ** 2), state, {}


def returning(*out: Any) -> Any:
    """A loss that returns something else than a loss should; functions are called with its own."""

    def wrong(model: Any, state: Any, batch: Any, key: Any) -> Any:
        values = (batch["x"] @ model["w"] + model["b"] - batch["y"]) ** 2
        made = tuple(part(values, state) if callable(part) else part for part in out)
        return made if len(made) > 1 else made[0]

    return wrong


def call(loss: Any, batch: Any, *chain: Any, make: Any = make, state: Any = None) -> None:
    """Takes a donated step that must fail as it is traced, and shows that nothing was lost."""
    program = et.pipe(loss, *chain, et.update(optax.sgd(0.1)), et.donate)
    made = make if state is None else lambda key: (make(key), state)
    ts = program.init(made, key=jax.random.key(0))
    before = [np.array(leaf) for leaf in jax.tree.leaves((ts.model, ts.opt_state))]
    try:
        program(ts, batch)
    finally:
        assert ts.used is None
        after = [np.array(leaf) for leaf in jax.tree.leaves((ts.model, ts.opt_state))]
        for a, b in zip(before, after, strict=True):
            assert a.tobytes() == b.tobytes()
        good = et.pipe(lambda m, s, b, k: loss_of(m, s, b), et.update(optax.sgd(0.1)), et.jit)
        good(ts, BATCH)  # it still trains


def loss_of(model: Any, state: Any, batch: Any) -> Any:
    return loss(model, state, batch, None)


def shard(placement: Any = None, batch: Any = P("data"), **axes: int) -> Any:
    return et.shard(et.mesh(**(axes or {"data": 4})), batch=batch, model=placement)


# Batches


def test_batch_that_the_devices_do_not_divide():
    batch = {"x": np.ones((6, 4), np.float32), "y": np.ones(6, np.float32)}
    with refused(
        ValueError, "must divide", "`batch.x` of shape (6, 4), whose rows (6) 4 devices", "pad"
    ):
        call(loss, batch, shard())


@pytest.mark.parametrize("inside", [True, False])
def test_batch_that_devices_times_microbatches_do_not_divide(inside):
    batch = {"x": np.ones((12, 4), np.float32), "y": np.ones(12, np.float32)}
    chain = [et.accumulate(2), shard()]
    # Inside `shard` a device has 3 of the 12 rows; outside all 12 are cut over 4 devices.
    got, advice = ("a batch of 3 rows", "[1, 3]") if inside else ("12 rows split over 4", "[1, 3]")
    with refused(ValueError, "`num_microbatches` must divide", got, advice):
        call(loss, batch, *(chain if inside else reversed(chain)))


def test_batch_that_microbatches_do_not_divide():
    with refused(ValueError, "must divide", "num_microbatches=3 and a batch of 8", "[1, 2, 4, 8]"):
        call(loss, BATCH, et.accumulate(3))


@pytest.mark.parametrize("chain", [(), (et.accumulate(2),), (shard(data=2),)])
def test_batch_leaves_of_unequal_length(chain):
    batch = {"x": np.ones((8, 4), np.float32), "y": np.ones(6, np.float32)}
    with refused(
        ValueError, "share their leading dim", "`batch.x` with 8, `batch.y` with 6", "one row"
    ):
        call(loss, batch, *chain)


@pytest.mark.parametrize("value", ["a name", {"deep": "text"}, object()], ids=["str", "deep", "any"])
@pytest.mark.parametrize("chain", [(), (et.accumulate(2),), (shard(data=2),)])
def test_batch_with_what_is_no_array(value, chain):
    name = "batch.z.deep" if isinstance(value, dict) else "batch.z"
    with refused(TypeError, "arrays and numbers alone", f"at `{name}`", "Leave it out"):
        call(loss, {**BATCH, "z": value}, *chain)


def test_batch_without_an_array():
    def constant(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(model["w"]), state, {}

    with refused(ValueError, "share their leading dim", "no array", "one row an example"):
        call(constant, {"z": 3.0})


def test_batch_on_other_devices():
    elsewhere = jax.device_put(BATCH, jax.devices()[7])
    with refused(ValueError, "on the devices of the mesh", "`batch.x` on", "numpy arrays"):
        call(loss, elsewhere, shard(data=2))
    on_two = et.mesh(devices=jax.devices()[6:], data=2)
    split = jax.device_put(BATCH, jax.sharding.NamedSharding(on_two, P("data")))
    with refused(ValueError, "on the devices of the mesh", "`batch.x` on", "numpy arrays"):
        call(loss, split, shard(data=2))


def test_scalar_loss_of_a_batch_with_weights():
    batch = {**BATCH, "weight": np.ones(8, np.float32)}
    with refused(ValueError, "counts every row alike", "a scalar", "where=batch['weight']"):
        call(returning(lambda v, s: v.mean(), lambda v, s: s, {}), batch)


# Meshes


@pytest.mark.parametrize(
    ("axes", "rule", "got", "advice"),
    [
        ({"data": 0}, "must be positive, or -1", "data=0", "Correct"),
        ({"data": 2, "model": -2}, "must be positive, or -1", "model=-2", "Correct"),
        ({"data": -1, "model": -1}, "One axis may be -1", "['data', 'model']", "all but one"),
        ({"data": -1, "model": 3}, "must divide the number of devices, 8", "model=3", "`devices=`"),
        ({}, "needs an axis", "none", "et.mesh(data=-1)"),
        ({"data": 4, "model": 4}, "more devices than there are", "= 16 devices, and 8 exist", "16"),
    ],
)
def test_meshes(axes, rule, got, advice):
    with refused(ValueError, rule, got, advice):
        et.mesh(**axes)


# `shard`


@pytest.mark.parametrize("batch", [P("dta"), {"x": P("data"), "y": P("dta")}, P(("data", "dta"))])
def test_unknown_axis_in_batch(batch):
    with refused(ValueError, "axes of the mesh alone, which has {'data': 4}", "`dta`", "Correct"):
        shard(batch=batch)


@pytest.mark.parametrize(
    "placement", [et.fsdp("dta"), et.rules({"w": P("dta")}), P("dta"), lambda path, leaf: P("dta")]
)
def test_unknown_axis_in_model(placement):
    with refused(ValueError, "axes of the mesh alone, which has {'data': 4}", "`dta`", "Correct"):
        call(loss, BATCH, shard(placement))


@pytest.mark.parametrize("batch", ["data", None, {"x": "data"}, ("data",)])
def test_batch_that_is_no_spec(batch):
    with refused(TypeError, "PartitionSpec or a tree of them", repr(batch)[:6], "P('data')"):
        shard(batch=batch)


def test_batch_specs_that_split_examples_differently():
    with refused(ValueError, "dim 0, over the same axes", "PartitionSpec", "same first entry"):
        shard(batch={"x": P("data"), "y": P(None)})


def test_batch_specs_that_are_no_prefix():
    with refused(ValueError, "prefix of the batch", "x, y", "Give every entry"):
        call(loss, BATCH, shard(batch={"x": P("data")}))


def test_rule_that_matches_nothing():
    placement = et.rules({"w": P("data"), "wieght": P()})
    with refused(ValueError, "must match a leaf", "'wieght', which matches none of: b, w", "leave"):
        call(loss, BATCH, shard(placement))


def test_spec_with_too_many_entries():
    placement = et.rules({"^w": P("data", None)})
    with refused(ValueError, "more entries than the leaf", "`model.w` of shape (4,)", "Remove"):
        call(loss, BATCH, shard(placement))


def test_spec_that_uses_an_axis_twice():
    def matrix(key: Any) -> Any:
        return {"w": jnp.ones((4, 4)), "b": jnp.zeros(())}

    with refused(ValueError, "may split one dim", "`model.w`", "Remove one"):
        call(loss, BATCH, shard(et.rules({"w": P("data", "data")})), make=matrix)


def test_dim_that_does_not_divide():
    def odd(key: Any) -> Any:
        return {"w": jnp.ones(6), "b": jnp.zeros(())}

    with refused(ValueError, "must divide the dim", "`model.w` of shape (6,), whose dim 0 (6)", "rule"):
        call(loss, BATCH, shard(et.rules({"w": P("data")})), make=odd)
    with refused(ValueError, "must find a dim", "`w` of shape (6,)", "`min_size` above 6"):
        call(loss, BATCH, shard(et.fsdp("data", min_size=4)), make=odd)


def test_tree_placement_that_lacks_a_leaf():
    with refused(ValueError, "a spec for every array", "none for `b` of shape ()", "`P()` replicates"):
        call(loss, BATCH, shard({"w": P("data")}))


@pytest.mark.parametrize("placement", ["fsdp", 3, {"w": "data"}])
def test_placement_that_is_none(placement):
    with refused(TypeError, "must be a placement", type(placement).__name__, "et.replicate()"):
        shard(placement)


def test_function_that_gives_no_spec():
    with refused(TypeError, "PartitionSpec for every leaf", "'data' for `model.", "`P()`"):
        call(loss, BATCH, shard(lambda path, leaf: "data"))


# Losses


def keep(values: Any, state: Any) -> Any:
    return state


def mean(values: Any, state: Any) -> Any:
    return et.mean(values)


CHAINS = [(), (et.accumulate(2), shard(data=2))]


@pytest.mark.parametrize("chain", CHAINS, ids=["alone", "mesh"])
@pytest.mark.parametrize(
    ("out", "kind", "rule", "got", "advice"),
    [
        ((lambda v, s: v, keep, {}), ValueError, "scalar or a mean", "shape (", "`et.mean(values)`"),
        ((lambda v, s: et.Mean(v, v), keep, {}), ValueError, "scalar or a mean", "shape (", "`et.mean"),
        ((lambda v, s: et.Sum(v.sum()), keep, {}), TypeError, "must be `et.mean", "Sum", "`et.mean"),
        ((lambda v, s: "low", keep, {}), TypeError, "must be `et.mean", "str", "`et.mean"),
        ((lambda v, s: None, keep, {}), TypeError, "must be `et.mean", "NoneType", "`et.mean"),
        ((lambda v, s: (v > 0).sum(), keep, {}), TypeError, "real-valued", "int32", "Cast"),
        ((lambda v, s: v.mean().astype(jnp.complex64), keep, {}), TypeError, "real-valued", "complex64", "Cast"),
        ((mean,), TypeError, "the triple `(loss, state, metrics)`", "Mean", "{}"),
        ((mean, keep), TypeError, "the triple", "a tuple of 2", "None for no state"),
        ((mean, keep, {}, 1), TypeError, "the triple", "a tuple of 4", "None for no state"),
        ((mean, keep, lambda v, s: [et.mean(v)]), TypeError, "must be a dict", "list", "et.mean"),
        ((mean, keep, lambda v, s: {"a": v}), TypeError, "how it is merged", "at `metrics.a`", "`et.m"),
        ((mean, keep, lambda v, s: {"a": {"b": 1.0}}), TypeError, "how", "`metrics.a.b`", "`et.mean"),
        ((mean, keep, lambda v, s: {"loss": et.mean(v)}), ValueError, "differ", "['loss']", "Rename"),
        ((mean, keep, lambda v, s: {"grad_norm": et.mean(v)}), ValueError, "differ", "_norm", "Ren"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_losses_that_return_something_else(chain, out, kind, rule, got, advice):
    with refused(kind, rule, got, advice):
        call(returning(*out), BATCH, *chain)


def test_products_and_other_terms_in_a_loss():
    with refused(TypeError, "linear combination", "a Mean times a Mean", "inside `et.mean`"):
        et.mean(jnp.ones(2)) * et.mean(jnp.ones(2))
    with refused(TypeError, "linear combination", "a Sum as a term", "among the metrics"):
        et.mean(jnp.ones(2)) + et.Sum(jnp.ones(()))
    with refused(ValueError, "must be a scalar", "shape (2,)", "et.mean(values)"):
        et.mean(jnp.ones(2)) + jnp.ones(2)


def test_mask_that_is_no_prefix():
    with refused(ValueError, "leading dims", "(4, 3) and where of shape (3,)", "Index or reshape"):
        et.mean(jnp.ones((4, 3)), where=jnp.ones(3))


# States


@pytest.mark.parametrize("chain", CHAINS, ids=["alone", "mesh"])
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda v, s: {"n": s["n"].astype(jnp.float32)}, "`state.n`: int32[] before, float32[] after"),
        (lambda v, s: {"n": s["n"][None]}, "`state.n`: int32[] before, int32[1] after"),
        (lambda v, s: {"n": s["n"], "m": v.sum()}, "`state.m`: nothing before, float32[] after"),
        (lambda v, s: {}, "`state.n`: int32[] before, nothing after"),
        (lambda v, s: None, "`state.n`: int32[] before, nothing after"),
    ],
    ids=["dtype", "shape", "more", "fewer", "none"],
)
def test_states_that_change(chain, change, got):
    with refused(ValueError, "structure, shapes and dtypes", got, "cast to its old dtype"):
        call(returning(mean, change, {}), BATCH, *chain, state={"n": jnp.asarray(1)})


def test_key_in_the_state_that_differs_from_device_to_device():
    def folded(values: Any, state: Any) -> Any:
        index = jax.lax.axis_index("data")
        return {"key": jax.random.fold_in(state["key"], index)}

    with refused(ValueError, "equal on every device", "PRNG key at `state.key`", "keep keys out"):
        call(returning(mean, folded, {}), BATCH, shard(), state={"key": jax.random.key(1)})


# What varies over an axis that does not split the batch.


def over_model(values: Any) -> Any:
    return values + jax.lax.axis_index("model").astype(values.dtype)


@pytest.mark.parametrize("chain", [(), (et.accumulate(2),)], ids=["whole", "accumulate"])
@pytest.mark.parametrize(
    ("out", "name"),
    [
        ((lambda v, s: et.mean(over_model(v)), keep, {}), "`loss"),
        ((lambda v, s: over_model(v.mean()), keep, {}), "`loss"),
        ((mean, keep, lambda v, s: {"a": et.mean(over_model(v))}), "`metrics.a.total`"),
        ((mean, keep, lambda v, s: {"a": et.Max(over_model(v.max()))}), "`metrics.a.maximum`"),
        ((mean, lambda v, s: {"n": over_model(s["n"])}, {}), "`state.n`"),
    ],
    ids=["loss", "scalar", "mean", "max", "state"],
)
def test_what_varies_over_a_model_axis(chain, out, name):
    with refused(ValueError, "equal along the mesh axes", f"{name}", "jax.lax.psum(..., 'model')"):
        call(
            returning(*out), BATCH, *chain, shard(data=2, model=2), state={"n": jnp.zeros(())}
        )


# Arguments of transforms


@pytest.mark.parametrize(
    ("make_it", "kind", "rule", "got", "advice"),
    [
        (lambda: et.accumulate(loss), TypeError, "number of microbatches", "function", "(4)"),
        (lambda: et.accumulate(2.0), TypeError, "number of microbatches", "float", "(4)"),
        (lambda: et.accumulate(True), TypeError, "number of microbatches", "bool", "(4)"),
        (lambda: et.accumulate(0), ValueError, "must be positive", "0", "1 runs"),
        (lambda: et.repeat(0), ValueError, "positive number", "0", "et.repeat(10)"),
        (lambda: et.repeat(loss), ValueError, "positive number", "function", "et.repeat(10)"),
        (lambda: et.update(optax.adam), TypeError, "an optimizer", "function", "optax.adamw(3e-4)"),
        (lambda: et.update(3e-4), TypeError, "an optimizer", "float", "optax.adamw(3e-4)"),
        (lambda: et.ema(1.0), ValueError, "in [0, 1)", "1.0", "0.999"),
        (lambda: et.ema(-0.1), ValueError, "in [0, 1)", "-0.1", "0.999"),
        (lambda: et.ema(loss), ValueError, "in [0, 1)", "function", "0.999"),
        (lambda: et.guard(nonfinite="x"), ValueError, "'skip', 'raise' or", "'x'", "Choose"),
        (lambda: et.guard(max_consecutive=0), ValueError, "must be positive", "0", "25"),
        (lambda: et.precision("int8"), ValueError, "must be floating", "int8", "'bfloat16'"),
        (lambda: et.LossScaling(0.5), ValueError, "1 or more", "initial=0.5", "`LossScaling()`"),
        (lambda: et.LossScaling(factor=1), ValueError, "above 1", "factor=1", "`LossScaling()`"),
        (lambda: et.LossScaling(period=0), ValueError, "every `period`", "period=0", "LossScaling()"),
        (lambda: et.LossScaling(np.nan), ValueError, "1 or more", "initial=nan", "LossScaling()"),
        (lambda: et.LossScaling(np.inf), ValueError, "1 or more", "initial=inf", "LossScaling()"),
        (lambda: et.merge(), ValueError, "one step at least", "none", ""),
    ],
    ids=str,
)  # fmt: skip
def test_arguments(make_it, kind, rule, got, advice):
    with refused(kind, rule, got, advice):
        made = make_it()
        pytest.fail(f"Nothing was refused; got {made}.")


def test_accumulate_written_bare():
    with refused(TypeError, "takes the number of microbatches", "function", "et.accumulate(4)"):

        @et.accumulate
        def bare(model: Any, state: Any, batch: Any, key: Any) -> Any:
            return loss(model, state, batch, key)


def test_repeat_of_a_batch_that_is_not_stacked():
    step = et.pipe(loss, et.update(optax.sgd(0.1)), et.repeat(3), et.donate)
    ts = step.init(make, key=jax.random.key(0))
    with refused(ValueError, "3 batches stacked", "`batch.x` of shape (8, 4)", "Stack them"):
        step(ts, BATCH)
    assert ts.used is None and np.isfinite(ts.model["w"]).all()


def test_pattern_of_matching_that_matches_nothing():
    with refused(ValueError, "must match a leaf", "'wieght', which matches none of: b, w", "leave"):
        et.update(optax.sgd(0.1), trainable=et.matching("wieght"))(loss).init(
            make, key=jax.random.key(0)
        )
    with refused(ValueError, "must match a leaf", "'norm', which", "leave it out"):
        et.matching("w", but="norm")({"w": 1.0})


# `init`


def init(made: Any, key: Any = None, **options: Any) -> Any:
    step = et.update(optax.sgd(0.1), **options)(loss)
    return step.init(lambda key: made, key=jax.random.key(0) if key is None else key)


def test_raw_key():
    with refused(TypeError, "takes a typed key", "uint32", "jax.random.key(0)"):
        init({"w": jnp.ones(4), "b": jnp.zeros(())}, key=jax.random.PRNGKey(0))
    with refused(TypeError, "takes a typed key", "int", "jax.random.key(0)"):
        init({"w": jnp.ones(4), "b": jnp.zeros(())}, key=0)


def test_several_keys():
    with refused(TypeError, "takes a typed key", "(2,)", "jax.random.key(0)"):
        init({"w": jnp.ones(4)}, key=jax.random.split(jax.random.key(0)))


@pytest.mark.parametrize("made", [jnp.ones(4), np.ones(4, np.float32)], ids=["jax", "numpy"])
def test_tied_leaves(made):
    with refused(ValueError, "may occur once", "`model.a` and `model.b.c`", "in one place"):
        init({"a": made, "b": {"c": made}})


def test_tied_leaves_of_the_state_and_between_model_and_state():
    shared = jnp.ones(4)
    with refused(ValueError, "may occur once", "`state.a` and `state.b`", "in one place"):
        init(({"w": jnp.ones(4)}, {"a": shared, "b": shared}))


@pytest.mark.parametrize(
    ("made", "options"),
    [
        ({"n": jnp.asarray(1), "k": jax.random.key(1)}, {}),
        ({"w": jnp.ones(4)}, {"trainable": lambda model: {"w": False}}),
        ({"w": jnp.ones(4)}, {"trainable": {"w": False}}),
    ],
    ids=["no_float", "function", "tree"],
)
def test_nothing_trainable(made, options):
    with refused(ValueError, "Something must be trainable", next(iter(made)), "`trainable=`"):
        init(made, **options)


# Calls


def trained() -> tuple[Any, et.TrainState, et.TrainState]:
    program = et.pipe(loss, et.update(optax.sgd(0.1)), et.donate)
    first = program.init(make, key=jax.random.key(0))
    later, _ = program(first, BATCH)
    return program, first, later


def read_replaced(ts: Any) -> Any:
    return ts.replace(model=None)


@pytest.mark.parametrize(
    "use",
    [
        lambda ts: ts.model,
        lambda ts: ts.state,
        lambda ts: ts.opt_state,
        lambda ts: ts.key,
        lambda ts: ts.step,
        lambda ts: ts.extra,
        lambda ts: ts.ema,
        read_replaced,
        lambda ts: et.pipe(loss, et.update(optax.sgd(0.1)))(ts, BATCH),
        lambda ts: et.pipe(loss, et.update(optax.sgd(0.1)), et.jit)(ts, BATCH),
        lambda ts: et.evaluate(loss)(ts, BATCH),
        lambda ts: jax.tree.map(jnp.copy, ts),
        lambda ts: jax.tree.leaves(ts),
        lambda ts: jax.tree_util.tree_leaves_with_path(ts),
        lambda ts: jax.jit(lambda ts: ts)(ts),
        lambda ts: jax.block_until_ready(ts),
    ],
    ids="model state opt_state key step extra ema replace uncompiled program evaluation map leaves "
    "paths jit block".split(),
)
def test_train_state_that_was_used_up(use):
    program, first, later = trained()
    with refused(
        et.UsedStateError, "cannot be used again", "call 1 of `train_step` took", "ts, metrics ="
    ):
        use(first)
    with refused(et.UsedStateError, "cannot be used again", "call 1 of `train_step`", "returned"):
        program(first, BATCH)
    assert "used up by call 1" in repr(first)  # which must not raise
    program(later, BATCH)


def test_model_in_place_of_a_train_state():
    program, _, later = trained()
    for given in (later.model, None, (later, BATCH)):
        name = type(given).__name__
        with refused(TypeError, "takes a TrainState and a batch", name, "train_step.init("):
            program(given, BATCH)
        with refused(TypeError, "takes a TrainState and a batch", name, ".init("):
            et.evaluate(loss)(given, BATCH)
        with refused(TypeError, "takes a TrainState and a batch", name, ".init("):
            et.update(optax.sgd(0.1))(loss)(given, BATCH)


def test_average_where_none_is_kept():
    _, _, later = trained()
    with refused(AttributeError, "kept by `et.ema(decay)`", "without", "after `et.update`"):
        _ = later.ema


def test_replace_with_another_shape_dtype_or_structure():
    _, _, later = trained()
    model = later.model
    with refused(ValueError, "shape and dtype of every leaf", "`model.w` as float32[3]", "Cast"):
        later.replace(model={**model, "w": jnp.ones(3)})
    with refused(ValueError, "shape and dtype of every leaf", "`model.w` as bfloat16[4]", "Cast"):
        later.replace(model={**model, "w": jnp.ones(4, jnp.bfloat16)})
    with refused(ValueError, "must keep its structure", "arrays that are missing: ['model.w']", "make"):
        later.replace(model={"b": model["b"]})
    with refused(ValueError, "must keep its structure", "arrays that are new: ['model.c']", "make"):
        later.replace(model={**model, "c": jnp.ones(2)})


def test_optimizer_whose_state_changes_its_dtype():
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state.astype(jnp.bfloat16)

    optimizer = optax.GradientTransformation(lambda params: jnp.zeros(()), update)
    program = et.pipe(loss, et.update(optimizer), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    with refused(ValueError, "shape and dtype of every leaf", "`opt_state` as bfloat16[]", "Cast"):
        program(ts, BATCH)
    assert ts.used is None


def test_one_compilation_too_many():
    program = et.pipe(loss, et.update(optax.sgd(0.1)), et.donate(max_compilations=1))
    ts = program.init(make, key=jax.random.key(0))
    ts, _ = program(ts, BATCH)
    longer = jax.tree.map(lambda x: np.concatenate([x, x]), BATCH)
    with refused(
        et.RecompilationError, "compiled once", "`batch.x` changed from float32[8,4]", "pad the last"
    ):
        program(ts, longer)
    assert ts.used is None
    program(ts, BATCH)


def test_step_that_is_none():
    with refused(et.OrderError, "`et.update(optimizer)` takes", "dict, which is no", "et.pipe(loss"):
        et.update(optax.sgd(0.1))({"w": 1})


class Tied(eqx.Module):
    embed: Any
    shared: Any

    def __init__(self):
        self.embed = eqx.nn.Embedding(4, 2, key=jax.random.key(0))
        self.shared = self.embed


def test_tied_layers_of_a_module():
    with refused(ValueError, "may occur once", "`model.embed.weight` and", "eqx.nn.Shared"):
        init(Tied())
