"""`evaluate`: the loss and the metrics of a batch, with no gradient and no change."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import PyTree

from .._core.contribution import Objective
from .._core.level import Level
from .._core.levels import Contribute, as_contribute
from .._core.loss import batch_size
from .._metrics import Sum
from .._state.train_state import Structure, TrainState
from .._util.text import call
from ..random import example_keys
from .dispatch import Compiled, follow


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Level):
    """`(TrainState, batch) -> metrics`, compiled. Leaves the TrainState as it is."""

    name: ClassVar[str] = "Evaluation"
    rank: ClassVar[int] = 3

    inner: Contribute
    compiled: Compiled

    @property
    def source(self) -> str:
        return call("evaluate", max_compilations=self.compiled.max_compilations)

    def __call__(self, ts: TrainState, batch: PyTree) -> dict[str, PyTree]:
        return self.compiled(follow(ts, batch), batch)

    @property
    def compilations(self) -> int:
        """How often it was compiled; once, if all is well."""
        return self.compiled.compilations


def evaluate(given: Any = None, *, max_compilations: int | None = None) -> Any:
    """Compiles a Loss or Contribute to one that only measures.

    Takes the TrainState of a training step whose model and state it reads; the state that the loss
    returns is dropped. Write a loss of its own where the model behaves differently in evaluation:
    `eqx.nn.inference_mode(model)` in it, and no key. For averaged parameters pass
    `ts.replace(model=ts.ema)`. Merge the batches' metrics by `et.merge`: their counts weigh them.

    **Arguments:**

    - `max_compilations`: as for `jit`.

    **Returns:** an Evaluation, whose metrics are the loss's with `loss` beside them, and where the
    loss has checks `failed_checks`: in how many batches one failed. Used bare (`@et.evaluate`) or
    with arguments.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] - model) ** 2), state, {}
    >>> ts = et.update(optax.sgd(0.1))(loss).init(lambda key: jnp.array(0.0), key=jax.random.key(0))
    >>> parts = [et.evaluate(loss)(ts, {"x": jnp.array(x)}) for x in ([1.0, 1.0, 1.0], [5.0])]
    >>> et.fetch(et.merge(*parts))
    {'loss': 7.0}

    ```
    """

    source = call("evaluate", max_compilations=max_compilations)

    def transform(given: Any) -> Evaluation:
        inner = as_contribute(given, source)
        build = functools.partial(_metrics_of_leaves, inner)
        compiled = Compiled("evaluate", build, lambda structure: None, False, max_compilations)
        return Evaluation(inner, compiled)

    return transform if given is None else transform(given)


def _metrics_of_leaves(
    inner: Contribute, structure: Structure
) -> Callable[[tuple[Any, ...], PyTree], dict[str, PyTree]]:
    """The evaluation as a function of a TrainState's leaves, which is what is compiled."""

    def run(leaves: tuple[Any, ...], batch: PyTree) -> dict[str, PyTree]:
        parts = structure.unpack(leaves)
        index = jnp.arange(batch_size(batch), dtype=jnp.int32)
        keys = example_keys(parts.key, parts.step, index)
        objective = Objective(checks=True)
        total = inner.contribute(parts.model, parts.state, batch, keys, objective)
        loss = total.loss
        metrics = {"loss": loss.terms[0] if len(loss.terms) == 1 else loss, **total.metrics}
        if total.findings is not None:
            metrics["failed_checks"] = Sum(total.findings.failed().astype(jnp.int32))
        return metrics

    return run
