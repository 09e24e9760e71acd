"""Wrong arguments of transforms, of `init` and of the compiled step."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqtrain as et
from tests.refusals import BATCH, loss, make, refused

# Without its annotations, as wrong calls are the point.
kit: Any = et


# Arguments of transforms


@pytest.mark.parametrize(
    ("make_it", "kind", "rule", "got", "advice"),
    [
        (lambda: kit.accumulate(loss), TypeError, "number of microbatches", "function", "(4)"),
        (lambda: kit.accumulate(2.0), TypeError, "number of microbatches", "float", "(4)"),
        (lambda: kit.accumulate(True), TypeError, "number of microbatches", "bool", "(4)"),
        (lambda: kit.accumulate(0), ValueError, "must be positive", "0", "1 runs"),
        (lambda: kit.repeat(0), ValueError, "positive number", "0", "et.repeat(10)"),
        (lambda: kit.repeat(loss), ValueError, "positive number", "function", "et.repeat(10)"),
        (lambda: kit.update(optax.adam), TypeError, "an optimizer", "function", "adamw(3e-4)"),
        (lambda: kit.update(3e-4), TypeError, "an optimizer", "float", "optax.adamw(3e-4)"),
        (lambda: kit.ema(1.0), ValueError, "in [0, 1)", "1.0", "0.999"),
        (lambda: kit.ema(-0.1), ValueError, "in [0, 1)", "-0.1", "0.999"),
        (lambda: kit.ema(loss), ValueError, "in [0, 1)", "function", "0.999"),
        (lambda: kit.guard(nonfinite="x"), ValueError, "'skip', 'raise' or", "'x'", "Choose"),
        (lambda: kit.guard(max_consecutive=0), ValueError, "must be positive", "0", "25"),
        (lambda: kit.precision("int8"), ValueError, "must be floating", "int8", "'bfloat16'"),
        (lambda: kit.LossScaling(0.5), ValueError, "1 or more", "initial=0.5", "`LossScaling()`"),
        (lambda: kit.LossScaling(factor=1), ValueError, "above 1", "factor=1", "`LossScaling()`"),
        (lambda: kit.LossScaling(period=0), ValueError, "every `period`", "period=0", "`Loss"),
        (lambda: kit.LossScaling(np.nan), ValueError, "1 or more", "initial=nan", "LossScaling()"),
        (lambda: kit.LossScaling(np.inf), ValueError, "1 or more", "initial=inf", "LossScaling()"),
        (lambda: kit.merge(), ValueError, "one step at least", "none", ""),
    ],
)  # fmt: skip
def test_arguments(make_it, kind, rule, got, advice):
    with refused(kind, rule, got, advice):
        made = make_it()
        pytest.fail(f"Nothing was refused; got {made}.")


def test_accumulate_written_bare():
    with refused(TypeError, "takes the number of microbatches", "function", "et.accumulate(4)"):

        @kit.accumulate
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
        lambda ts: ts.replace(model=None),
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


def test_shapes_in_place_of_a_train_state():
    program, _, _ = trained()
    for called in (program, et.evaluate(loss)):
        with refused(TypeError, "must have arrays", "of shapes", "program.init("):
            called(program.init_shapes(make), BATCH)


def test_model_in_place_of_a_train_state():
    program, _, later = trained()
    wrong: Any
    for wrong in (later.model, None, (later, BATCH)):
        name = type(wrong).__name__
        with refused(TypeError, "takes a TrainState and a batch", name, "train_step.init("):
            program(wrong, BATCH)
        with refused(TypeError, "takes a TrainState and a batch", name, ".init("):
            et.evaluate(loss)(wrong, BATCH)
        with refused(TypeError, "takes a TrainState and a batch", name, ".init("):
            et.update(optax.sgd(0.1))(loss)(wrong, BATCH)


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
    with refused(
        ValueError, "must keep its structure", "arrays that are missing: ['model.w']", "make"
    ):
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
        et.RecompilationError,
        "compiled once",
        "(8, 4)",
        "pad the last",
    ):
        program(ts, longer)
    assert ts.used is None
    program(ts, BATCH)


def test_step_that_is_none():
    with refused(
        et.OrderError, "`et.update(optimizer)` takes", "dict, which is no", "et.pipe(loss"
    ):
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
