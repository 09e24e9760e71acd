"""Losses with a fault planted in one line, marked by a comment, and data that sets it off.

Each loss takes `(params, batch)`, with one row of the batch an example, and gives a scalar.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

ROWS, DIM = 16, 4
BAD_ROW = 11


@dataclasses.dataclass(frozen=True)
class Plant:
    """A loss, what it is given when all is well, and what is given to set off its fault.

    `row` is that of the global batch to blame, None if the parameters are.
    """

    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any
    bad_params: Any
    bad_batch: Any
    kind: str
    primitive: str
    direction: str = "forward"
    iterations: tuple[int, ...] = ()
    row: int | None = BAD_ROW
    leaves: tuple[str, ...] = ()


def planted_line(function: Callable[..., Any]) -> int:
    """The number of the line of `function` that a comment marks."""
    lines, first = inspect.getsourcelines(function)
    [offset] = [number for number, line in enumerate(lines) if "# planted" in line]
    return first + offset


def rows(value: float, bad: float | None = None, dtype: Any = np.float32) -> np.ndarray:
    """A batch of one value, but for a row."""
    x = np.full((ROWS, DIM), value, dtype)
    if bad is not None:
        x[BAD_ROW] = bad
    return x


def logarithm(params, batch):
    h = batch @ params
    return jnp.log(h).sum()  # planted


def overflow(params, batch):
    h = batch @ params  # planted
    h = h - lax.stop_gradient(h.max(-1, keepdims=True))
    return h.astype(jnp.float32).sum()


def normalise(params, batch):
    h = batch * params
    h = h / jnp.sqrt((h * h).sum(-1, keepdims=True))  # planted
    return (h * params).sum()


def embed(params, batch):
    h = jnp.take(params, batch, axis=0)  # planted
    return (h**2).sum()


def network(params, batch):
    h = jnp.tanh(batch @ params["first"])
    h = jax.nn.gelu(h @ params["second"])
    h = h @ params["third"]  # planted
    return (jax.nn.logsumexp(h, -1) - h[:, 0]).sum()


def root(params, batch):
    h = batch * params
    h = jnp.where(h > 0, jnp.sqrt(h), 0.0)  # planted
    return h.sum()


@jax.checkpoint
def block(h, weight):
    h = jax.nn.relu(h @ weight)
    h = h / h.sum(-1, keepdims=True)  # planted
    return h, None


def layers(params, batch):
    h, _ = lax.scan(block, batch, params)
    return optax.l2_loss(h).sum()


def attend(params, batch):
    x, lengths = batch["x"], batch["length"]
    scores = jnp.einsum("bqd,bkd->bqk", x * params, x)
    seen = jnp.arange(x.shape[1])[None, None] < lengths[:, None, None]
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    scores = jnp.where(seen & causal[None], scores, -jnp.inf)
    shares = jax.nn.softmax(scores, -1)  # planted
    return jnp.einsum("bqk,bkd->bqd", shares, x).sum()


def branch(params, batch):
    def shrink(state):
        turn, h = state
        return turn + 1, h / 2

    _, steady = lax.while_loop(lambda state: state[0] < 2, shrink, (0, lax.stop_gradient(batch)))
    h = lax.cond(
        steady.min() < 0,
        lambda h: jnp.power(h, 0.5),  # planted
        lambda h: h * 2,
        steady @ params,
    )
    return h.sum()


def classify(params, batch):
    logits = jax.nn.relu(batch["x"] @ params)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])  # planted
    return nll.sum()


def sequence(bad: bool) -> Any:
    lengths = np.full(ROWS, 3)
    lengths[BAD_ROW] = 0 if bad else 1
    x = np.random.default_rng(0).normal(size=(ROWS, 3, DIM)).astype(np.float32)
    return {"x": x, "length": lengths}


def labelled(bad: bool) -> Any:
    label = np.arange(ROWS) % DIM
    label[BAD_ROW] = DIM if bad else 0
    return {"x": rows(0.5), "label": label}


def tokens(bad: bool) -> np.ndarray:
    found = np.arange(ROWS) % 5 - 1  # negative ones count from the end, which is no fault
    found[BAD_ROW] = 5 if bad else 4
    return found


ONES = np.ones((DIM, DIM), np.float32)
WIDE = ONES[None, :1]
WEIGHTS = {"first": 0.1 * ONES, "second": 0.2 * ONES, "third": 0.3 * ONES}
SPIKED = {"first": 1e30 * ONES, "second": 1e30 * ONES, "third": 1e30 * ONES}
DEEP = np.stack([ONES, ONES, ONES])
DEAD = np.stack([ONES, 0 * ONES, ONES])


def narrow(dtype: Any, large: float) -> Plant:
    weight = np.full((DIM, DIM), large, dtype)
    one, bad = rows(1, dtype=dtype), rows(1, large, dtype=dtype)
    # What overflowed is infinite. Only the subtraction behind it makes a NaN.
    return Plant(
        overflow, weight, one, weight, bad, "inf", "dot_general", leaves=("batch", "params")
    )


PLANTS = {
    "log of a negative": Plant(logarithm, ONES, rows(1), ONES, rows(1, -1), "nan", "log"),
    "bfloat16 overflow": narrow(jnp.bfloat16, 1e30),
    "float16 overflow": narrow(np.float16, 1e3),
    "0 / 0": Plant(normalise, ONES[:1], rows(1), ONES[:1], rows(1, 0), "division", "div"),
    "embedding": Plant(
        embed,
        np.arange(20, dtype=np.float32).reshape(5, 4),
        tokens(False),
        np.arange(20, dtype=np.float32).reshape(5, 4),
        tokens(True),
        "index",
        "gather",
        leaves=("params", "batch"),
    ),
    "learning rate spike": Plant(
        network,
        WEIGHTS,
        rows(1),
        SPIKED,
        rows(1),
        "inf",
        "dot_general",
        row=None,
        leaves=("params.third",),
    ),
    "backward of a root": Plant(
        root, ONES[:1], rows(1), ONES[:1], rows(1, 0), "division", "div", "backward"
    ),
    "layer": Plant(
        layers, DEEP, rows(1), DEAD, rows(1), "division", "div", iterations=(1,), row=None
    ),
    "attention": Plant(attend, WIDE, sequence(False), WIDE, sequence(True), "nan", "sub"),
    "branch": Plant(branch, ONES, rows(1), ONES, rows(1, -1), "nan", "pow"),
    "label": Plant(
        classify,
        ONES,
        labelled(False),
        ONES,
        labelled(True),
        "index",
        "gather",
        leaves=("batch.label",),
    ),
}
