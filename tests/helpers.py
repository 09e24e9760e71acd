"""One small network that several test files train, and the same training by hand in numpy.

What `train_by_hand` does shares nothing with `eqtrain` but the dropout masks: forward, backward,
means and updates are written out, in float64, on one device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

import eqtrain as et

# 32 rows: 8 devices times 4 microbatches, one row each. All dims divide by 8, for FSDP.
ROWS, TOKENS, INPUT, HIDDEN, OUTPUT = 32, 2, 8, 16, 8
STEPS = 10
RATE = 0.25
LEARNING_RATE = 0.5
AUXILIARY = 0.1

Batch = dict[str, np.ndarray]
Params = dict[str, dict[str, np.ndarray]]


def make_params() -> Params:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape, scale=0.4).astype(np.float32)

    return {
        "first": {"weight": draw(INPUT, HIDDEN), "bias": draw(HIDDEN)},
        "second": {"weight": draw(HIDDEN, OUTPUT), "bias": draw(OUTPUT)},
    }


def make_batches(steps: int = STEPS) -> list[Batch]:
    """Batches whose weights are ragged: unequal and some 0 in every part; the last is padded."""
    rng = np.random.default_rng(1)
    batches = []
    for step in range(steps):
        weight = rng.choice([0.0, 0.25, 1.0, 3.0], size=(ROWS, TOKENS)).astype(np.float32)
        weight[step % ROWS :: 5] = 0
        weight[: ROWS // 4] *= 2
        if step == steps - 1:
            weight[ROWS // 2 - 3 :] = 0
        batches.append(
            {
                # Rows further back have larger errors, so that how parts are weighed matters.
                "x": rng.normal(size=(ROWS, TOKENS, INPUT)).astype(np.float32),
                "y": (
                    rng.normal(size=(ROWS, TOKENS, OUTPUT)) + np.linspace(0, 2, ROWS)[:, None, None]
                ).astype(np.float32),
                "weight": weight,
            }
        )
    return batches


def network(model: PyTree, x: Array, key: Array | None) -> Array:
    first, second = model["first"], model["second"]
    hidden = jnp.tanh(x @ first["weight"] + first["bias"][None, None])
    kept = et.dropout(hidden, RATE, key=key)
    return kept @ second["weight"] + second["bias"][None, None]


def error_of(out: Array, batch: PyTree) -> Array:
    return ((out - batch["y"]) ** 2).mean(-1)


def loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    error = error_of(network(model, batch["x"], key), batch)
    return et.mean(error, where=batch["weight"]), state, metrics_of(error, batch["weight"])


def combined_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    """A mean over weighted tokens, plus a mean over rows: two terms with their own counts."""
    out = network(model, batch["x"], key)
    error = error_of(out, batch)
    size = (out**2).mean((1, 2))
    total = et.mean(error, where=batch["weight"]) + AUXILIARY * et.mean(size)
    return total, state, metrics_of(error, batch["weight"])


def metrics_of(error: Array, weight: Array) -> dict[str, Any]:
    return {
        "error": et.mean(error, where=weight),
        "seen": et.Sum((weight > 0).sum()),
        "largest": et.Max(jnp.where(weight > 0, error, -jnp.inf).max()),
        "smallest": et.Min(jnp.where(weight > 0, error, jnp.inf).min()),
    }


@dataclasses.dataclass
class Training:
    """Ten steps: metrics and gradients of each, and the parameters after the last."""

    metrics: list[dict[str, float]]
    grads: list[Params]
    params: Params


def sgd() -> optax.GradientTransformation:
    """SGD with no momentum that keeps each step's gradient in its state, to be looked at."""
    return optax.chain(optax.trace(decay=0.0), optax.scale(-LEARNING_RATE))


def train(
    contribute: Any, batches: list[Batch], check: Callable[[et.TrainState], None] | None = None
) -> Training:
    """Trains by `eqtrain`; `check` looks at the first TrainState."""
    program = et.pipe(contribute, et.update(sgd()), et.donate)
    ts = program.init(lambda key: make_params(), key=jax.random.key(0))
    if check is not None:
        check(ts)
    metrics, grads = [], []
    for batch in batches:
        ts, step_metrics = program(ts, batch)
        metrics.append(et.fetch(step_metrics))
        grads.append(jax.tree.map(np.array, ts.opt_state[0].trace))
    assert program.compilations == 1
    return Training(metrics, grads, jax.tree.map(np.array, ts.model))


@functools.cache
def run_key() -> Array:
    """The key of the TrainStates that `train` makes."""
    step = et.update(optax.sgd(0.0))(loss)
    return step.init(lambda key: make_params(), key=jax.random.key(0)).key


@jax.jit
def masks_of(keys: Array) -> Array:
    return et.dropout(jnp.ones((*keys.shape, TOKENS, HIDDEN)), RATE, key=keys)


@functools.cache
def dropout_scales(step: int) -> np.ndarray:
    """What dropout multiplies the hidden units of a step with, by global example: 0 or 4/3."""
    keys = et.example_keys(run_key(), step, jnp.arange(ROWS))
    return np.asarray(masks_of(keys), np.float64)


@dataclasses.dataclass
class Totals:
    """Sums over some rows of one batch, not divided: of the error, and of the auxiliary term."""

    error: float
    weight: float
    error_grads: Params
    size: float
    rows: float
    size_grads: Params
    errors: np.ndarray
    weights: np.ndarray


def totals(params: Params, batch: Batch, scales: np.ndarray, rows: slice = slice(None)) -> Totals:
    """Forward and backward by hand."""
    x, y, weight = (batch[name][rows].astype(np.float64) for name in ("x", "y", "weight"))
    first, second = params["first"], params["second"]
    hidden = np.tanh(x @ first["weight"] + first["bias"])
    kept = hidden * scales[rows]
    out = kept @ second["weight"] + second["bias"]
    error = ((out - y) ** 2).mean(-1)
    size = (out**2).mean((1, 2))

    def backward(d_out: np.ndarray) -> Params:
        d_hidden = d_out @ second["weight"].T * scales[rows] * (1 - hidden**2)
        return {
            "first": {
                "weight": np.einsum("rti,rth->ih", x, d_hidden),
                "bias": d_hidden.sum((0, 1)),
            },
            "second": {"weight": np.einsum("rth,rto->ho", kept, d_out), "bias": d_out.sum((0, 1))},
        }

    return Totals(
        error=(weight * error).sum(),
        weight=weight.sum(),
        error_grads=backward(weight[..., None] * 2 * (out - y) / OUTPUT),
        size=size.sum(),
        rows=len(x),
        size_grads=backward(2 * out / (TOKENS * OUTPUT)),
        errors=error[weight > 0],
        weights=weight,
    )


# (params, batch, scales) -> (loss, gradient)
Gradient = Callable[[Params, Batch, np.ndarray], tuple[float, Params]]


def weighted_mean(params: Params, batch: Batch, scales: np.ndarray) -> tuple[float, Params]:
    """The right answer for `loss`: the mean over all weighted tokens of the batch."""
    sums = totals(params, batch, scales)
    return sums.error / sums.weight, jax.tree.map(lambda g: g / sums.weight, sums.error_grads)


def combined_mean(params: Params, batch: Batch, scales: np.ndarray) -> tuple[float, Params]:
    """The right answer for `combined_loss`: each term divided by its own count."""
    sums = totals(params, batch, scales)
    grads = jax.tree.map(
        lambda g, h: g / sums.weight + AUXILIARY * h / sums.rows, sums.error_grads, sums.size_grads
    )
    return sums.error / sums.weight + AUXILIARY * sums.size / sums.rows, grads


def train_by_hand(
    batches: list[Batch],
    gradient: Gradient = weighted_mean,
    scales: Callable[[int], np.ndarray] = dropout_scales,
) -> Training:
    params: Params = jax.tree.map(lambda p: p.astype(np.float64), make_params())
    metrics, grads = [], []
    for step, batch in enumerate(batches):
        sums = totals(params, batch, scales(step))
        value, grad = gradient(params, batch, scales(step))
        metrics.append(
            {
                "loss": value,
                "grad_norm": np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grad))),
                "error": sums.error / sums.weight,
                "seen": (sums.weights > 0).sum(),
                "largest": sums.errors.max(),
                "smallest": sums.errors.min(),
            }
        )
        grads.append(grad)
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grad)
    return Training(metrics, grads, params)


def distance(actual: Training, expected: Training) -> float:
    """The largest difference anywhere, relative to the largest number of the leaf it is in.

    A leaf and not a number, since single elements of a gradient may cancel out to almost nothing.
    """
    pairs = list(
        zip(
            jax.tree.leaves((actual.metrics, actual.grads, actual.params)),
            jax.tree.leaves((expected.metrics, expected.grads, expected.params)),
            strict=True,
        )
    )
    return max(float(np.max(np.abs(a - e)) / np.max(np.abs(e))) for a, e in pairs)
