"""`jit` and `donate`: compile a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from .._core.step import Step, as_step
from .._guard.replicas import checksums, differ, holders
from .._guard.trips import Alarm, raise_flag
from .._state.train_state import Structure
from .._util.text import call
from .dispatch import Compiled
from .program import Program


def jit(given: Any = None, *, max_compilations: int | None = None) -> Any:
    """Compiles a Step. The TrainState it is given stays valid, so two are held in memory.

    **Arguments:**

    - `max_compilations`: how many are meant, one for each shape of a batch; one more raises
      `RecompilationError`. Without it each after the first is a `RecompilationWarning`. Both name
      the argument that changed.

    **Returns:** a Program. Used bare (`@et.jit`) or with arguments.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] - model) ** 2), state, {}
    >>> step = et.pipe(loss, et.update(optax.sgd(0.25)), et.jit)
    >>> ts = step.init(lambda key: jnp.array(0.0), key=jax.random.key(0))
    >>> later, metrics = step(ts, {"x": jnp.array([2.0])})
    >>> float(ts.model), float(later.model)
    (0.0, 1.0)

    ```
    """
    return _compile(given, False, max_compilations)


def donate(given: Any = None, *, max_compilations: int | None = None) -> Any:
    """Compiles a Step that reuses the buffers of the TrainState it is given.

    That TrainState is used up: whoever reads it gets a `UsedStateError`. Whether every buffer was
    taken is checked after the first call, and after each TrainState that comes from elsewhere; a
    `DonationWarning` names those that were not.

    **Arguments:**

    - `max_compilations`: as for `jit`.

    **Returns:** a Program. Used bare (`@et.donate`) or with arguments.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] - model) ** 2), state, {}
    >>> step = et.pipe(loss, et.update(optax.sgd(0.25)), et.donate)
    >>> ts = step.init(lambda key: jnp.array(0.0), key=jax.random.key(0))
    >>> ts, metrics = step(ts, {"x": jnp.array([2.0])})
    >>> float(ts.model)
    1.0

    ```
    """
    return _compile(given, True, max_compilations)


def _compile(given: Any, donates: bool, max_compilations: int | None) -> Any:
    source = call("donate" if donates else "jit", max_compilations=max_compilations)

    def transform(given: Any) -> Program:
        step = as_step(given, source)

        def out_shardings(structure: Structure) -> Any:
            return None if step.layout is None else (structure.shardings, None, None)

        build = functools.partial(_step_of_leaves, step)
        compiled = Compiled("train_step", build, out_shardings, donates, max_compilations)
        return Program(step, donates, compiled)

    return transform if given is None else transform(given)


def _step_of_leaves(
    step: Step, structure: Structure
) -> Callable[[tuple[Any, ...], PyTree], tuple[tuple[Any, ...], dict[str, PyTree], Any]]:
    """The step as a function of a TrainState's leaves, which is what is compiled."""

    def run(leaves: tuple[Any, ...], batch: PyTree) -> Any:
        if step.bundles is not None:
            from ..bundles.files import encode_batch, require_names  # imports `explain`

            # When the first step trips, its state is donated already.
            require_names(structure.names)
            encode_batch(batch)
        before = structure.unpack(leaves)
        parts, metrics, alarm = step.run(before, batch)
        packed = structure.pack(parts)
        if step.replicas_every is not None and alarm is not None:
            due = parts.step // step.replicas_every != before.step // step.replicas_every
            alarm = _compare_replicas(step, structure, packed, due, alarm)
        return packed, metrics, alarm

    return run


def _compare_replicas(
    step: Step, structure: Structure, leaves: tuple[Array, ...], due: Array, alarm: Alarm
) -> Alarm:
    """Sets off the alarm if copies differ, where they are due to be compared."""
    assert step.layout is not None
    mesh = step.layout.mesh
    specs = [sharding.spec for sharding in structure.shardings]
    shape = (mesh.size, len(leaves))
    sums = lax.cond(
        due,
        lambda leaves: checksums(mesh, leaves, specs),
        lambda leaves: jnp.zeros(shape, jnp.uint32),
        list(leaves),
    )
    code = raise_flag(alarm.code, "replicas", differ(sums, holders(mesh, specs)))
    return dataclasses.replace(alarm, code=code, checksums=sums)
