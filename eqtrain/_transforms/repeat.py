"""`repeat`: several steps in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .._core.order import require_once
from .._core.step import Step, StepAround, as_step
from .._util.text import call


def repeat(num_steps: int) -> Callable[[Any], Step]:
    """Takes `num_steps` steps a call, in a `lax.scan`, so that Python is met once for all of them.

    The batch is `num_steps` batches stacked along a new leading dim (`et.data.stack`); the metrics
    come back stacked the same way, one entry a step. The steps are those that as many calls take.

    **Returns:** a Step.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] - model) ** 2), state, {}
    >>> step = et.pipe(loss, et.update(optax.sgd(0.5)), et.repeat(3))
    >>> ts = step.init(lambda key: jnp.array(0.0), key=jax.random.key(0))
    >>> ts, metrics = step(ts, {"x": jnp.array([[1.0], [2.0], [3.0]])})
    >>> float(ts.model), metrics["loss"].value.tolist()
    (3.0, [1.0, 1.0, 1.0])

    ```
    """
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(
            "`repeat` takes a positive number of steps. "
            f"Got {num_steps!r}. Write `et.repeat(10)` after `et.update(optimizer)`."
        )
    return lambda given: Repeat(given, num_steps)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Repeat(StepAround):
    """Several steps in one."""

    times: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", as_step(self.inner, self.source))
        require_once(self)

    @property
    def source(self) -> str:
        return call("repeat", self.times)

    @property
    def num_steps(self) -> int:
        return self.times
