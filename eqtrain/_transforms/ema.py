"""`ema`: keeps an average of the parameters beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._core.levels import Link, once
from .._core.step import Advance, Layer, Outcome, Step, Take, as_step
from .._metrics import accumulator_dtype
from .._state.train_state import Parts


def ema(decay: float) -> Callable[[Any], Step]:
    """Averages the trainable parameters exponentially, once an update, in float32.

    The average starts as the parameters and is read as a model from `ts.ema`. A step that a guard
    skips leaves it alone.

    **Arguments:**

    - `decay`: what the old average counts for, in [0, 1): `ema = decay * ema + (1 - decay) * p`.

    **Returns:** a Step.

    **Reference:** Polyak and Juditsky 1992, https://doi.org/10.1137/0330046

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] - model) ** 2), state, {}
    >>> step = et.pipe(loss, et.update(optax.sgd(0.1)), et.ema(0.999))

    ```
    """
    if not (isinstance(decay, float | int) and 0 <= decay < 1):
        raise ValueError(
            f"The decay of an average must be in [0, 1). Got {decay!r}. 0.999 is a common choice."
        )
    source = f"et.ema({decay})"

    def transform(given: Any) -> Step:
        step = as_step(given, source)
        once(step, source)

        def begin(parts: Parts) -> Parts:
            average = jax.tree.map(
                lambda p: p.astype(accumulator_dtype(p.dtype)), _params(step, parts.model)
            )
            return dataclasses.replace(parts, extra={**parts.extra, "ema": average})

        def wrap(advance: Advance) -> Advance:
            def averaged(parts: Parts, batch: PyTree) -> tuple[Take, Outcome]:
                take, outcome = advance(parts, batch)

                def blend(average: Any, p: Any) -> Any:
                    return decay * average + (1 - decay) * p.astype(average.dtype)

                def take_averaged() -> Parts:
                    new = take()
                    average = jax.tree.map(blend, parts.extra["ema"], _params(step, new.model))
                    if outcome.overflow is not None:
                        average = jax.tree.map(
                            lambda a, b: jnp.where(jnp.isfinite(outcome.grad_norm), a, b),
                            average,
                            parts.extra["ema"],
                        )
                    return dataclasses.replace(new, extra={**new.extra, "ema": average})

                return take_averaged, outcome

            return averaged

        return dataclasses.replace(
            step,
            chain=(*step.chain, Link(source, Step)),
            wrapped=given,
            layers=(*step.layers, Layer(rank=0, begin=begin, wrap=wrap)),
        )

    return transform


def _params(step: Step, model: PyTree) -> PyTree:
    return eqx.filter(model, step.is_trainable(model))
