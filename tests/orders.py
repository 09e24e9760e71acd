"""Which orders of transforms are right, said by a table and not by the code, and chains of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et

# What each transform takes, and what it gives.
LEVELS: dict[str, tuple[tuple[str, ...], str]] = {
    "precision": (("Loss",), "Loss"),
    "remat": (("Loss",), "Loss"),
    "accumulate": (("Loss", "Contribute"), "Contribute"),
    "shard": (("Loss", "Contribute"), "Contribute"),
    "update": (("Loss", "Contribute"), "Step"),
    "ema": (("Step",), "Step"),
    "guard": (("Step",), "Step"),
    "repeat": (("Step",), "Step"),
    "donate": (("Step",), "Program"),
    "jit": (("Step",), "Program"),
    "evaluate": (("Loss", "Contribute"), "Evaluation"),
}
# These may stand in a chain twice.
REPEATABLE = ("accumulate", "remat")
# `jit` differs from `donate`, and `evaluate` from both, in how a chain ends, not in what it does.
NINE = tuple(name for name in LEVELS if name not in ("jit", "evaluate"))

RATE, DECAY, LEARNING_RATE = 0.25, 0.5, 0.125

# The transforms as they are written, and as error messages and `repr` write them.
WRITTEN: dict[str, tuple[str, Any]] = {
    "precision": ("et.precision('bfloat16')", et.precision("bfloat16")),
    "remat": ("et.remat", et.remat),
    "accumulate": ("et.accumulate(2)", et.accumulate(2)),
    "shard": (
        "et.shard(et.mesh(data=2), batch=P('data'))",
        et.shard(et.mesh(data=2), batch=P("data")),
    ),
    "update": ("et.update(optimizer)", et.update(optax.sgd(LEARNING_RATE))),
    "ema": (f"et.ema({DECAY})", et.ema(DECAY)),
    "guard": ("et.guard", et.guard(nonfinite="skip")),
    "repeat": ("et.repeat(2)", et.repeat(2)),
    "donate": ("et.donate", et.donate),
    "jit": ("et.jit", et.jit),
    "evaluate": ("et.evaluate", et.evaluate),
}

Chain = tuple[str, ...]


def level_of(chain: Chain) -> str | None:
    """The level that a chain gives by the table, or None if it is not right."""
    level = "Loss"
    for index, name in enumerate(chain):
        takes, gives = LEVELS[name]
        if level not in takes or (name in chain[:index] and name not in REPEATABLE):
            return None
        level = gives
    return level


def right_chains(names: tuple[str, ...]) -> Iterator[Chain]:
    """Every order of every subset of `names` that the table allows."""

    def extend(chain: Chain) -> Iterator[Chain]:
        yield chain
        for name in names:
            if name not in chain and level_of((*chain, name)) is not None:
                yield from extend((*chain, name))

    return extend(())


@functools.cache
def build(chain: Chain) -> Any:
    """What `pipe` makes of a chain, with the beginnings that chains share built once."""
    return WRITTEN[chain[-1]][1](build(chain[:-1])) if chain else loss


def loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    """A linear model with dropout: as little as can tell orders apart, since many are compiled."""
    kept = et.dropout(batch["x"], RATE, key=key)
    error = (kept @ model["w"] - batch["y"]) ** 2
    return et.mean(error, where=batch["weight"]), state, {"largest": et.Max(error.max())}


def make_batch(step: int) -> dict[str, np.ndarray]:
    """Eight rows of which every quarter weighs differently, and one nothing."""
    rng = np.random.default_rng(step)
    return {
        "x": rng.normal(size=(8, 4)).astype(np.float32),
        "y": np.linspace(1, 4, 8, dtype=np.float32),
        "weight": np.array([1, 3, 0, 0.5, 0, 0, 2, 7], np.float32),
    }
