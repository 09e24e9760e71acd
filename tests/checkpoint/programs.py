"""The program that the tests of checkpoints train: dropout, an average, Adam and its schedule."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import eqtrain as et
from tests.helpers import INPUT, OUTPUT, TOKENS, Batch, loss, make_params

ROWS = 44


def make_source() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "id": np.arange(ROWS, dtype=np.int32),
        "x": rng.normal(size=(ROWS, TOKENS, INPUT)).astype(np.float32),
        "y": rng.normal(size=(ROWS, TOKENS, OUTPUT)).astype(np.float32),
    }


def make_loader(**settings: Any) -> et.data.Loader:
    """Five full batches and one of four rows an epoch."""
    return et.data.Loader(make_source(), **{"batch_size": 8, "seed": 4, **settings})


def weighted_loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    weight = jax.numpy.repeat(batch["weight"][:, None], TOKENS, axis=1)
    return loss(model, state, {**batch, "weight": weight}, key)


def make(key: Any) -> Any:
    """Float32 parameters, and beside them arrays of other dtypes that no step changes."""
    fixed = {
        "table": jax.numpy.arange(24, dtype=jax.numpy.bfloat16).reshape(8, 3) / 7,
        "count": jax.numpy.array(2**30 + 1, jax.numpy.int32),
        "rng": jax.random.key(5, impl="rbg"),
        "empty": jax.numpy.zeros((0, 2)),
    }
    return make_params() | {"fixed": fixed}


def init(program: et.Program) -> et.TrainState:
    return program.init(make, key=jax.random.key(7))


def make_program(
    devices: int | None = None, *, order: str | None = None, lanes: int = 8
) -> et.Program:
    """On a mesh of the first devices, sharded by FSDP; or without a mesh.

    With `order`, so many microbatches are spread over the devices and time, and added as a tree.
    """
    schedule = optax.cosine_decay_schedule(0.05, 40)
    update = et.update(optax.adamw(schedule), trainable=et.matching("weight|bias"))
    if devices is None:
        return et.pipe(weighted_loss, update, et.ema(0.9), et.donate)
    mesh = et.mesh(data=devices, devices=jax.devices()[:devices])
    shard = et.shard(mesh, batch=P("data"), model=et.fsdp("data", min_size=8), order=order)
    accumulate = et.accumulate(lanes // devices if order else 1, order=order)
    return et.pipe(weighted_loss, accumulate, shard, update, et.ema(0.9), et.donate)


@functools.cache
def program(devices: int | None = None, order: str | None = None, lanes: int = 8) -> et.Program:
    return make_program(devices, order=order, lanes=lanes)


def copies(ts: et.TrainState) -> dict[str, np.ndarray]:
    """Every array by its path, copied: a view would turn donation off."""
    return {name: np.array(leaf) for name, leaf in zip(ts.structure.names, ts.leaves, strict=True)}


def different(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """The paths whose bits, dtype or shape differ."""
    assert a.keys() == b.keys()
    return [
        name
        for name in a
        if (a[name].dtype, a[name].shape) != (b[name].dtype, b[name].shape)
        or a[name].tobytes() != b[name].tobytes()
    ]


def run(
    program: et.Program, ts: et.TrainState, loader: Any, steps: int
) -> tuple[et.TrainState, list[tuple[str, list[int]]]]:
    """Takes steps: the last TrainState, and the loss and the ids of the rows of each."""
    seen = []
    batches = iter(loader)
    for _ in range(steps):
        batch: Batch = next(batches)
        ids = np.array(batch["id"])[np.array(batch["weight"]) > 0].tolist()
        ts, metrics = program(ts, batch)
        seen.append((et.fetch(metrics)["loss"].hex(), ids))
    return ts, seen
