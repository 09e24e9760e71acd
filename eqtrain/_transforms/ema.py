"""`ema`: keeps an average of the parameters beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._core.order import require_once
from .._core.step import AbstractLayer, Advance, Outcome, Step, StepAround, Take, as_step
from .._metrics import accumulator_dtype
from .._state.train_state import Parts
from .._util.text import call


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
    return lambda given: Ema(given, decay)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Ema(StepAround, AbstractLayer):
    """A step that keeps an average of the parameters, in `extra["ema"]`."""

    decay: float

    # Inside a guard, which so holds the average back with the step.
    depth: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", as_step(self.inner, self.source))
        require_once(self)

    @property
    def source(self) -> str:
        return call("ema", self.decay)

    def add_to(self, parts: Parts) -> Parts:
        average = jax.tree.map(
            lambda p: p.astype(accumulator_dtype(p.dtype)), self._params(parts.model)
        )
        return dataclasses.replace(parts, extra={**parts.extra, "ema": average})

    def wrap(self, advance: Advance, *, seen: bool) -> Advance:
        def averaged(parts: Parts, batch: PyTree) -> tuple[Take, Outcome]:
            take, outcome = advance(parts, batch)

            def take_averaged() -> Parts:
                new = take()
                average = self._average(parts.extra["ema"], new.model, outcome)
                return dataclasses.replace(new, extra={**new.extra, "ema": average})

            return take_averaged, outcome

        return averaged

    def _average(self, old: PyTree, model: PyTree, outcome: Outcome) -> PyTree:
        def blend(average: Any, p: Any) -> Any:
            return self.decay * average + (1 - self.decay) * p.astype(average.dtype)

        average = jax.tree.map(blend, old, self._params(model))
        if outcome.overflow is None:
            return average
        # A step that loss scaling skipped left the parameters as they were.
        taken = jnp.isfinite(outcome.grad_norm)
        return jax.tree.map(lambda a, b: jnp.where(taken, a, b), average, old)

    def _params(self, model: PyTree) -> PyTree:
        return eqx.filter(model, self.is_trainable(model))
