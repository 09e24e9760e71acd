"""Metrics are commutative monoids, divided once, and read off the devices in one transfer."""

import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from eqtrain._metrics import Combination

# `mean`


@pytest.mark.parametrize(
    ("values", "where", "total", "count"),
    [
        ([[1, 2], [3, 4]], None, 10, 4),
        ([[1, 2], [3, 4]], [True, False], 3, 2),  # a row counts for all its tokens
        ([[1, 2], [3, 4]], [[True, False], [True, True]], 8, 3),
        ([[1, 2], [3, 4]], [0.5, 2], 1.5 + 14, 5),
        ([[1, 2], [3, 4]], 3, 30, 12),  # no dims are a prefix as well
        ([True, False, True], None, 2, 3),
        (3.0, None, 3, 1),
        ([5.0, 6.0], [0, 0], 0, 0),
        ([], None, 0, 0),
    ],
)
def test_mean_is_weighted_by_a_prefix(values, where, total, count):
    mean = et.mean(jnp.asarray(values), where=None if where is None else jnp.asarray(where))
    assert (float(mean.total), float(mean.count)) == (total, count)
    right = total / count if count else math.nan
    assert float(mean) == pytest.approx(right, rel=1e-7, nan_ok=True)  # one division in float32


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [[True, False, True], [1, 0, 1], [0.5, 0.0, 0.5]])
def test_masked_value_has_no_part_and_a_gradient_of_zero(bad, where):
    values, weight = jnp.asarray([1.0, bad, 3.0]), jnp.asarray(where)
    assert float(et.mean(values, where=weight)) == 2

    grad = jax.grad(lambda values: et.mean(values, where=weight).value)(values)
    assert grad.tolist() == [0.5, 0, 0.5]
    # Negative control: multiplied before it is selected, the mask gives NaN.
    assert np.isnan((values * weight.astype(jnp.float32)).sum())


def test_mean_of_nothing_adds_nothing_to_a_loss():
    empty, full = et.mean(jnp.ones(2), where=jnp.zeros(2)), et.mean(jnp.full(2, 3.0))
    assert np.isnan(float(empty))
    assert float(full + 10 * empty) == 3
    grad = jax.grad(lambda x: (et.mean(x) + et.mean(x, where=jnp.zeros(2))).value)(jnp.ones(2))
    assert grad.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8, jnp.bool_])
def test_sums_are_kept_in_float32(dtype):
    mean = et.mean(jnp.ones(3001, dtype), where=jnp.ones(3001, dtype))
    assert mean.total.dtype == mean.count.dtype == jnp.float32
    assert (float(mean.total), float(mean.count)) == (3001, 3001)


def test_float64_stays():
    with jax.enable_x64(True):
        mean = et.mean(jnp.asarray([1.0, 2.0]))
        assert mean.total.dtype == mean.count.dtype == jnp.float64


LOSSES: dict[str, tuple[Any, float, float]] = {  # with its value and its gradient at 0.1
    "scalar": (lambda m, x: (m * x).mean(), 0.1 * 7 / 3, 7 / 3),
    "mean": (lambda m, x: et.mean(m * x), 0.1 * 7 / 3, 7 / 3),
    "mean and scalar": (lambda m, x: et.mean(m * x) + m**3 / 3, 0.7 / 3 + 1e-3 / 3, 7 / 3 + 1e-2),
    "scaled": (
        lambda m, x: (0.3 * (et.mean(m * x) + m**2) + 0.1) / 3,
        0.1 * (0.7 / 3 + 0.01) + 0.1 / 3,
        0.1 * (7 / 3 + 0.2),
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("chain", [(), (et.accumulate(3),)], ids=["alone", "accumulate"])
def test_float64_stays_in_a_loss_and_its_gradient(loss, chain):
    function, right_value, right_grad = loss
    with jax.enable_x64(True):
        differentiated = et.value_and_grad(lambda m, batch: function(m, batch["x"]), *chain)
        value, grad = differentiated(jnp.float64(0.1), {"x": jnp.array([1.0, 2.0, 4.0])})
        assert value.dtype == grad.dtype == jnp.float64
        np.testing.assert_allclose([value, grad], [right_value, right_grad], rtol=1e-15)


def test_float32_stays_where_float64_is_allowed():
    with jax.enable_x64(True):
        loss = 0.1 * et.mean(f32([1, 2])) + 0.3
        assert {leaf.dtype for leaf in jax.tree.leaves(loss)} == {jnp.dtype(jnp.float32)}


# The laws. Small integers are exact in float32, so all of this is equality.

TOTALS, COUNTS = [3.0, -1.0, 0.0], [2.0, 5.0, 0.0]


def f32(x: Any) -> Any:
    return jnp.asarray(x, jnp.float32)


KINDS = {
    "mean": [et.Mean(f32(total), f32(count)) for total, count in zip(TOTALS, COUNTS, strict=True)],
    "sum": [et.Sum(jnp.asarray(total)) for total in (3, -1, 0)],
    "max": [et.Max(f32(total)) for total in TOTALS],
    "min": [et.Min(f32(total)) for total in TOTALS],
    "integer_max": [et.Max(jnp.asarray(total)) for total in (3, -1, 0)],
    "integer_min": [et.Min(jnp.asarray(total, jnp.uint8)) for total in (3, 1, 0)],
    "vector": [et.Sum(f32([total, 1])) for total in TOTALS],
    "combination": [
        2.0 * et.Mean(f32(total), f32(count)) + et.Mean(f32(count), f32(7))
        for total, count in zip(TOTALS, COUNTS, strict=True)
    ],
}


def equal(a: Any, b: Any) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(
        x.dtype == y.dtype and np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("parts", KINDS.values(), ids=KINDS.keys())
def test_metrics_are_commutative_monoids(parts):
    for a, b, c in itertools.product(parts, repeat=3):
        assert equal(a.merge(b), b.merge(a))
        assert equal(a.merge(b).merge(c), a.merge(b.merge(c)))
    for a in parts:
        assert equal(a.merge(a.neutral()), a) and equal(a.neutral().merge(a), a)


@pytest.mark.parametrize("parts", KINDS.values(), ids=KINDS.keys())
def test_collapse_merges_what_is_stacked(parts):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    merged = functools.reduce(lambda a, b: a.merge(b), parts)
    assert equal(stacked.collapse(), merged)
    assert equal(et.collapse({"a": {"b": stacked}})["a"]["b"], merged)
    on_host = et.merge(*({"a": part} for part in parts))["a"]
    for a, b in zip(jax.tree.leaves(on_host), jax.tree.leaves(merged), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("parts", KINDS.values(), ids=KINDS.keys())
def test_metrics_are_pytrees_under_jit_and_scan(parts):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    merged = functools.reduce(lambda a, b: a.merge(b), parts)
    last, _ = jax.lax.scan(lambda a, b: (a.merge(b), None), parts[0].neutral(), stacked)
    assert equal(last, merged)
    assert equal(jax.jit(lambda a, b, c: a.merge(b).merge(c))(*parts), merged)


# The algebra of losses.

A, B = et.Mean(f32(6), f32(4)), et.Mean(f32(5), f32(2))  # 1.5 and 2.5


@pytest.mark.parametrize(
    ("loss", "value"),
    [
        (A + B, 4.0),
        (B - A, 1.0),
        (-A, -1.5),
        (2 * A, 3.0),
        (A * 2.0, 3.0),
        (A / 4, 0.375),
        (A + 1, 2.5),
        (1 + A, 2.5),
        (A - 1, 0.5),
        (1 - A, -0.5),
        (A + jnp.asarray(1.0), 2.5),
        (jnp.asarray(2.0) * A, 3.0),
        (jnp.asarray(1.0) + A, 2.5),
        (jnp.asarray(1.0) - A, -0.5),
        (np.float32(2) * A, 3.0),
        (A * np.float32(2), 3.0),
        (np.float64(2) * A, 3.0),
        (np.array(2, np.float32) * A, 3.0),
        (np.int64(2) * A, 3.0),
        (np.float64(1) + A, 2.5),
        (A + np.float64(1), 2.5),
        (np.float32(1) - A, -0.5),
        (A / np.float64(4), 0.375),
        (np.float64(2) * (A + B), 8.0),
        (np.float32(1) + (A + np.float32(1)), 3.5),
        (np.float64(1) - (A + B), -3.0),
        ((A + B) * 2, 8.0),
        ((A + B) / 2, 2.0),
        (-(A + B), -4.0),
        ((A + 1) - (B + 1), -1.0),
        (1 - (A + B), -3.0),
        ((A + 3) * 2, 9.0),
        (sum([A, B]), 4.0),
        (A + (B + 1), 5.0),
    ],
)
def test_losses_form_linear_combinations(loss, value):
    assert isinstance(loss, et.Mean | Combination)
    assert float(loss) == value


def test_numbers_of_numpy_may_stand_in_a_loss():
    def loss(m: Any, batch: Any) -> Any:
        values = m * batch["x"]
        return np.float64(1) + np.float32(0.5) * et.mean(values) + et.mean(values**2) * np.int64(2)

    value, grad = et.value_and_grad(loss)(f32(2), {"x": np.array([1, 3], np.float32)})
    assert float(value) == 1 + 0.5 * 4 + 2 * 20 and float(grad) == 0.5 * 2 + 2 * 2 * 2 * 5


@pytest.mark.parametrize(
    "metric", [et.mean(f32([2, 4])), et.Sum(f32(3)), et.Max(f32(3)), A * 2 + 0]
)
def test_numpy_compares_and_computes_with_metrics_as_with_numbers(metric):
    three = np.float64(3)
    for operate in (operator.lt, operator.le, operator.eq, operator.ge, operator.truediv):
        for other in (np.float64(2), np.array([2.0, 3.0])):
            for a, b, x, y in ((other, metric, other, three), (metric, other, three, other)):
                if operate is operator.truediv and a is metric:
                    continue  # a metric's own, or none
                found, right = operate(a, b), operate(x, y)
                assert type(found) is type(right)
                np.testing.assert_array_equal(found, right)
    np.testing.assert_array_equal(np.array([2.0, 3.0]) + metric, [5, 6])
    total = np.float64(1)
    total += metric
    assert float(total) == 4
    merged = et.merge({"it": metric})["it"]
    assert type(np.float64(2) * merged) is np.float64 and np.float64(2) * merged == 6
    assert np.maximum(metric, 5) == 5 and np.isfinite(metric)


def test_an_array_of_numpy_is_no_term_of_a_loss():
    def loss(m: Any, batch: Any) -> Any:
        return np.array([1.0, 2.0]) + et.mean(m * batch["x"])

    with pytest.raises(ValueError, match="A term added to a mean must be a scalar"):
        et.value_and_grad(loss)(f32(2), {"x": np.array([1, 3], np.float32)})


def test_what_numpy_cannot_make_of_a_loss_is_refused_by_name():
    def loss(m: Any, batch: Any) -> Any:
        one: Any = np.float32(1)
        return one / et.mean(m * batch["x"])

    with pytest.raises(TypeError, match="'divide'.*'Mean'"):
        et.value_and_grad(loss)(f32(2), {"x": np.array([1, 3], np.float32)})


def test_terms_keep_their_own_denominators():
    one = 2.0 * et.Mean(f32(1), f32(1)) + et.Mean(f32(4), f32(2))
    other = 2.0 * et.Mean(f32(9), f32(4)) + et.Mean(f32(0), f32(6))
    assert float(one.merge(other)) == 2 * 10 / 5 + 4 / 8
    assert (float(one) + float(other)) / 2 != float(one.merge(other))  # negative control


# Reading.


def test_fetch_is_one_transfer(monkeypatch):
    calls = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: calls.append(x) or device_get(x))
    metrics = {"a": A, "b": {"c": et.Max(f32([1, 2])), "d": A + B}, "e": et.Sum(jnp.asarray(3))}
    read = et.fetch(metrics)
    assert len(calls) == 1
    assert read["a"] == 1.5 and type(read["a"]) is float
    assert read["b"]["c"].tolist() == [1, 2] and isinstance(read["b"]["c"], np.ndarray)
    assert read["b"]["d"] == 4 and read["e"] == 3
    assert et.fetch(A) == 1.5


def test_merge_is_one_transfer(monkeypatch):
    calls = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: calls.append(x) or device_get(x))
    merged = et.merge(*[{"a": A, "b": et.Max(f32(i))} for i in range(10)])
    assert len(calls) == 1
    assert et.fetch(merged) == {"a": 1.5, "b": 9}


def test_metric_as_a_number():
    assert f"{A:.2f}" == "1.50" and float(B) == 2.5
    assert np.asarray(A) == 1.5 and np.asarray(et.Max(f32([1, 2]))).tolist() == [1, 2]
    assert np.asarray(A, dtype=np.float16).dtype == np.float16


# Case 54 and counts that float32 cannot hold.


def test_short_last_batch_counts_for_what_it_holds():
    batches = [(0.7, 256), (0.8, 256), (0.9, 10)]
    parts = [et.Mean(f32(accuracy * rows), f32(rows)) for accuracy, rows in batches]
    # The totals are rounded to float32 before they are merged.
    assert et.fetch(et.merge(*parts)) == pytest.approx(393 / 522, rel=1e-7)
    assert 393 / 522 == pytest.approx(0.7528735632, rel=1e-9)
    assert np.mean([accuracy for accuracy, _ in batches]) == pytest.approx(0.8)


def test_merge_counts_beyond_what_float32_holds():
    big, one = et.Mean(f32(2**24), f32(2**24)), et.Mean(f32(1), f32(1))
    merged = et.merge(big, one, one, one)
    assert merged.count == 2**24 + 3 and merged.total.dtype == np.float64
    on_device: Any = functools.reduce(lambda a, b: a.merge(b), [big, one, one, one])
    assert float(on_device.count) == 2**24  # negative control


def test_merged_loss_of_two_terms_stays_on_the_host_in_float64():
    # Thirds and tenths of float32: the sums below are exact in float64, and rounded in float32.
    parts = [(np.float32(1) / 3, 2.0), (np.float32(0.1), 3.0), (np.float32(7), 0.0)]
    losses = [et.Mean(f32(total), f32(count)) + et.Mean(f32(1), f32(8)) for total, count in parts]
    merged: Any = et.merge(*losses)
    assert isinstance(merged.value, np.ndarray | np.float64) and merged.value.dtype == np.float64
    right = sum(float(total) for total, _ in parts) / 5 + 3 / 24
    assert et.fetch(merged) == right != float(np.float32(right))
    empty = et.Mean(f32(0), f32(0)) + et.Mean(f32(3), f32(2))
    assert et.fetch(et.merge(empty, empty)) == 1.5


def test_merge_of_integers_does_not_wrap_around():
    tokens = et.Sum(jnp.asarray(2**30))
    assert et.fetch(et.merge(tokens, tokens, tokens)) == 3 * 2**30
    seen = et.Sum(jnp.asarray([2**30, 1]))
    assert et.fetch(et.merge(seen, seen, seen)).tolist() == [3 * 2**30, 3]
    small = et.Sum(jnp.asarray(200, jnp.uint8))
    assert et.fetch(et.merge(small, small)) == 400


CHAINS = {
    "alone": (),
    "accumulate": (et.accumulate(2),),
    "shard": (et.accumulate(2), et.shard(et.mesh(data=2), batch=P("data"))),
    "tree order": (
        et.accumulate(2, order="tree"),
        et.shard(et.mesh(data=2), batch=P("data"), order="tree"),
    ),
}


def metrics_of_steps(measure: Any, *chain: Any, steps: int = 2) -> list[Any]:
    """What `measure` says of the rows 1, 2, 3, 4, in each of some steps."""

    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(model * batch["x"]), state, measure(batch["x"])

    program = et.pipe(loss, *chain, et.jit)
    ts, found = program.init(lambda key: f32(0), key=jax.random.key(0)), []
    for _ in range(steps):
        ts, metrics = program(ts, {"x": np.array([1, 2, 3, 4], np.float32)})
        found.append(metrics)
    return found


@pytest.mark.parametrize(
    ("name", "parts"), [("alone", 1), ("accumulate", 2), ("shard", 4), ("tree order", 4)]
)
def test_sum_counts_booleans_and_narrow_integers(name, parts):
    """One of each part that a loss is run on, of each of two steps."""

    def measure(x: Any) -> Any:
        return {
            "any": et.Sum((x > 0).any()),
            "small": et.Sum(jnp.asarray(100, jnp.uint8)),
            "negative": et.Sum(jnp.asarray(-100, jnp.int8)),
        }

    first, second = metrics_of_steps(measure, *CHAINS[name], et.update(optax.sgd(0.1)))
    right = {"any": parts, "small": 100 * parts, "negative": -100 * parts}
    read = et.fetch([first, et.merge(first, second)])
    assert {key: read[0][key] for key in right} == right
    assert {key: read[1][key] for key in right} == {key: 2 * n for key, n in right.items()}


@pytest.mark.parametrize("true", [jnp.asarray(True), np.bool_(True), True])
def test_sums_of_booleans_that_are_merged_by_hand_are_counts(true):
    three = et.Sum(true).merge(et.Sum(true)).merge(et.Sum(true))
    assert et.fetch(three) == 3
    assert et.fetch(et.merge(*3 * [et.Sum(true)])) == 3
    assert et.fetch(et.merge(et.Sum(true))) == 1 and et.fetch(et.merge(et.Max(true))) is True


def test_sums_of_narrow_integers_that_are_merged_by_hand_do_not_wrap():
    many = et.Sum(jnp.asarray(200, jnp.uint8))
    assert et.fetch(many.merge(many)) == et.fetch(et.merge(many, many)) == 400


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_extremes_of_booleans_and_of_numbers_of_python(chain):
    """Under a guard too, which puts what is neutral in the place of a bad step's."""

    def measure(x: Any) -> Any:
        return {
            "any": et.Max(x == 3),
            "all": et.Min((x < 3).all()),
            "top": et.Max(2.5),
            "low": et.Min(3),
            "narrow": et.Max(jnp.asarray(-7, jnp.int8)),
            "half": et.Min(jnp.asarray(0.5, jnp.bfloat16)),
        }

    [metrics] = metrics_of_steps(measure, *chain, et.update(optax.sgd(0.1)), et.guard, steps=1)
    assert metrics["half"].minimum.dtype == jnp.bfloat16
    read = jax.tree.map(lambda x: np.asarray(x).tolist(), et.fetch(metrics))
    right = {"all": False, "top": 2.5, "low": 3, "narrow": -7, "half": 0.5}
    assert {key: read[key] for key in right} == right
    assert np.max(read["any"]) == 1


def test_extremes_of_a_skipped_step_are_neutral():
    def measure(x: Any) -> Any:
        return {"any": et.Max((x > 0).any()), "low": et.Min(3)}

    diverged = et.update(optax.sgd(jnp.nan))
    [metrics] = metrics_of_steps(measure, diverged, et.guard, steps=1)
    kept = {"any": et.Max(np.int32(1)), "low": et.Min(np.int32(7))}
    skipped = {name: metrics[name] for name in kept}
    assert et.fetch(metrics)["skipped"] == 1
    assert et.fetch(et.merge(skipped, kept)) == {"any": 1, "low": 7}


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_extremes_of_nothing_are_beyond_every_number(dtype: Any):
    info: Any = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else np.finfo(dtype)
    for extreme, number in ((et.Max, info.min), (et.Min, info.max)):
        one = extreme(jnp.asarray(number, dtype))
        assert et.fetch(et.merge(one.neutral(), one)) == number


def test_merge_keeps_extremes_exact():
    top = et.Max(jnp.asarray(2**31 - 1))
    assert et.fetch(et.merge(top, et.Max(jnp.asarray(5)))) == 2**31 - 1
    assert et.fetch(et.merge(et.Min(f32(1)), et.Min(f32(-np.inf)))) == -np.inf


def test_merge_of_different_metrics_is_refused():
    with pytest.raises(ValueError):
        et.merge({"a": A}, {"b": A})
