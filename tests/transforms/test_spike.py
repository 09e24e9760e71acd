"""Spikes: the limit is a formula in numpy, and what is beyond it is recorded or skipped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

WINDOW, THRESHOLD = 8, 5.0


def loss(w: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(w * batch["x"]), state, {}


def program_of(spike: et.Spike, *chain: Any, rate: float = 0.0, **options: Any) -> Any:
    update = et.update(optax.sgd(rate))
    return et.pipe(loss, *chain, update, et.guard(spike=spike, **options), et.donate)


def run(program: Any, losses: Any) -> tuple[et.TrainState, list[dict[str, Any]]]:
    """Steps whose losses, and gradients, are these, while the one parameter is 1."""
    ts = program.init(lambda key: jnp.float32(1), key=jax.random.key(0))
    seen = []
    for value in losses:
        ts, metrics = program(ts, {"x": np.full(4, value, np.float32)})
        seen.append(metrics)
    program.check(ts)
    return ts, seen


def limit(values: Any) -> float:
    window = np.array(values[-WINDOW:], np.float64)
    median = np.median(window)
    deviation = 1.4826 * np.median(np.abs(window - median))
    return float(median + THRESHOLD * max(deviation, 1e-3 * abs(median)))


def numbers(seed: int = 0, n: int = 40) -> Any:
    return np.random.default_rng(seed).normal(3.0, 0.5, n).astype(np.float32)


def test_the_limit_is_the_formula():
    values = numbers()
    values[20:30:3] = [9.0, 60.0, 5.9, 6.1]
    program = program_of(et.Spike(THRESHOLD, WINDOW))
    _, seen = run(program, values)
    expected = [i for i in range(WINDOW, len(values)) if values[i] > limit(values[:i])]
    assert expected and len(expected) < 6
    assert [i for i, metrics in enumerate(seen) if float(metrics["spike"])] == expected
    assert [trip.step for trip in program.trips] == expected
    for trip in program.trips:
        assert trip.causes == ("spike",)
        np.testing.assert_allclose(trip.loss_limit, limit(values[: trip.step]), rtol=1e-5)
        np.testing.assert_allclose(trip.loss, values[trip.step])
        assert f"the loss was {trip.loss:g}, beyond {trip.loss_limit:g}" in str(trip)


def test_nan_never_enters_the_window_and_a_spike_does():
    values = [*numbers(1, WINDOW), np.nan, 100.0, np.nan]
    program = program_of(et.Spike(THRESHOLD, WINDOW))
    ts, _ = run(program, values)
    kept = ts.extra["guard"]["spike"]
    assert int(kept["count"]) == WINDOW + 1
    finite = [value for value in values if np.isfinite(value)]
    assert sorted(kept["loss"].tolist()) == sorted(finite[-WINDOW:])
    assert [trip.causes for trip in program.trips] == [("loss",), ("spike",), ("loss",)]


def test_outliers_move_the_limit_less_than_half_of_the_window():
    values = [*([1.0, 1.1, 1.2, 1.3] * 2), 1e6, 1e6, 1e6, 5.0]
    program = program_of(et.Spike(THRESHOLD, WINDOW))
    run(program, values)
    assert [trip.step for trip in program.trips] == [8, 9, 10, 11]


@pytest.mark.parametrize("skip", [False, True])
def test_a_spike_is_recorded_or_skipped(skip):
    shard = et.shard(et.mesh(data=4), batch=P("data"))
    spike = et.Spike(THRESHOLD, WINDOW, skip=skip)
    program = program_of(spike, et.accumulate(1), shard, rate=1e-3)
    ts, seen = run(program, [*[1.0] * WINDOW, 500.0])
    moved = 1 - 1e-3 * (WINDOW + (0 if skip else 500))
    np.testing.assert_allclose(float(ts.model), moved, rtol=1e-5)
    assert float(seen[-1]["spike"]) == 1 and float(seen[-1]["skipped"]) == skip


def test_spikes_in_a_row_stop_the_run_where_they_are_skipped():
    program = program_of(et.Spike(THRESHOLD, WINDOW, skip=True), max_consecutive=2)
    with pytest.raises(et.NonFiniteError, match="Got 2 steps.*beyond"):
        run(program, [*[1.0] * WINDOW, 500.0, 500.0])


def test_a_run_goes_on_at_another_level():
    """A lasting change is a spike until it is half of the window, and then no more."""
    program = program_of(et.Spike(THRESHOLD, WINDOW, skip=True))
    _, seen = run(program, [*[1.0] * WINDOW, *[3.0] * WINDOW])
    assert float(seen[-1]["spike"]) == 0 and 4 <= len(program.trips) <= 5


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: et.Spike(threshold=0.0), "threshold of a spike must be positive"),
        (lambda: et.Spike(window=3), "window of a spike must hold some steps"),
        (lambda: et.guard(nonfinite="raise", spike=et.Spike(skip=True)), "skipped where bad steps"),
    ],
)
def test_what_cannot_be_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
