"""Losses that return what they should not: an error while the step is traced, and nothing lost."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqtrain as et
from tests.refusals import BATCH, call, refused, returning, shard


def keep(values: Any, state: Any) -> Any:
    return state


def mean(values: Any, state: Any) -> Any:
    return et.mean(values)


CHAINS = [(), (et.accumulate(2), shard(data=2))]


@pytest.mark.parametrize("chain", CHAINS, ids=["alone", "mesh"])
@pytest.mark.parametrize(
    ("first", "kind", "rule", "got", "advice"),
    [
        (lambda v: v, ValueError, "scalar or a mean", "of shape (", "`et.mean(values)`"),
        (lambda v: et.Mean(v, v), ValueError, "scalar or a mean", "of shape (", "`et.mean("),
        (lambda v: et.Sum(v.sum()), TypeError, "must be `et.mean", "Sum", "`et.mean("),
        (lambda v: "low", TypeError, "must be `et.mean", "str", "`et.mean("),
        (lambda v: None, TypeError, "must be `et.mean", "NoneType", "`et.mean("),
        (lambda v: (v > 0).sum(), TypeError, "real-valued", "int32", "Cast"),
        (lambda v: v.sum().astype(jnp.complex64), TypeError, "real-valued", "complex64", "Cast"),
    ],
)
def test_losses_that_are_none(chain, first, kind, rule, got, advice):
    with refused(kind, rule, got, advice):
        call(returning(lambda v, s: first(v), keep, {}), BATCH, *chain)


@pytest.mark.parametrize("chain", CHAINS, ids=["alone", "mesh"])
@pytest.mark.parametrize(
    ("out", "got"),
    [((mean,), "Mean"), ((mean, keep), "a tuple of 2"), ((mean, keep, {}, 1), "a tuple of 4")],
)
def test_what_is_no_triple(chain, out, got):
    with refused(TypeError, "the triple `(loss, state, metrics)`", got, "None for no state"):
        call(returning(*out), BATCH, *chain)


@pytest.mark.parametrize("chain", CHAINS, ids=["alone", "mesh"])
@pytest.mark.parametrize(
    ("metrics", "kind", "rule", "got", "advice"),
    [
        (lambda v: [et.mean(v)], TypeError, "must be a dict", "list", "et.mean(values)"),
        (lambda v: et.mean(v), TypeError, "must be a dict", "Mean", "et.mean(values)"),
        (lambda v: {"a": v}, TypeError, "how it is merged", "`metrics.a`", "`et.mean("),
        (lambda v: {"a": {"b": 1.0}}, TypeError, "how it is merged", "`metrics.a.b`", "`et.mean("),
        (lambda v: {"loss": et.mean(v)}, ValueError, "must differ", "['loss']", "Rename"),
        (lambda v: {"skipped": et.mean(v)}, ValueError, "must differ", "['skipped']", "Rename"),
    ],
)
def test_metrics_that_are_none(chain, metrics, kind, rule, got, advice):
    with refused(kind, rule, got, advice):
        call(returning(mean, keep, lambda v, s: metrics(v)), BATCH, *chain)


def test_products_and_other_terms_in_a_loss():
    with refused(TypeError, "linear combination", "a Mean times a Mean", "inside `et.mean`"):
        _ = et.mean(jnp.ones(2)) * et.mean(jnp.ones(2))
    with refused(TypeError, "linear combination", "a Sum as a term", "among the metrics"):
        _ = et.mean(jnp.ones(2)) + et.Sum(jnp.ones(()))
    with refused(ValueError, "must be a scalar", "shape (2,)", "et.mean(values)"):
        _ = et.mean(jnp.ones(2)) + jnp.ones(2)


def test_mask_that_is_no_prefix():
    with refused(ValueError, "leading dims", "(4, 3) and where of shape (3,)", "Index or reshape"):
        et.mean(jnp.ones((4, 3)), where=jnp.ones(3))


# States


@pytest.mark.parametrize("chain", CHAINS, ids=["alone", "mesh"])
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (
            lambda v, s: {"n": s["n"].astype(jnp.float32)},
            "`state.n`: int32[] before, float32[] after",
        ),
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
        call(returning(*out), BATCH, *chain, shard(data=2, model=2), state={"n": jnp.zeros(())})
