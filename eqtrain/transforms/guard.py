"""`guard`: a step that is not finite changes nothing, on any device."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..levels import Link, once
from ..metrics import Sum, map_metrics
from ..state import Parts
from ..step import Advance, Layer, NonFiniteError, Outcome, Step, as_step, keep


def guard(
    given: Any = None,
    *,
    nonfinite: Literal["skip", "raise", "ignore"] = "skip",
    max_consecutive: int = 25,
) -> Any:
    """Looks at the loss and at the norm of the gradients before a step is taken.

    Both are those of the global batch, so every device decides alike. A bad step keeps the whole
    old TrainState bit for bit: parameters, optimizer and its schedule, averages, BatchNorm
    statistics. Only `step` (and with it the keys) and the counts of skipped steps go on, and so
    does the data. A window of microbatches is skipped as a whole. Its metrics are left out of sums.

    **Arguments:**

    - `nonfinite`: `"skip"` goes on with the next batch; `"raise"` raises, with the TrainState from
      before the failure as `error.state`; `"ignore"` only counts.
    - `max_consecutive`: so many skipped steps in a row raise.

    **Returns:** a Step with `skipped` among its metrics (`nonfinite` where it only counts). Used
    bare (`@et.guard`) or with arguments.

    **Raises:** `NonFiniteError`, when the step is compiled, at the call after the bad one or in
    `program.check(ts)`: flags are read one step late, so that the device never waits for Python.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean(jnp.log(batch["x"]) * model), state, {}
    >>> step = et.pipe(loss, et.update(optax.sgd(0.1)), et.guard(nonfinite="skip"))
    >>> ts = step.init(lambda key: jnp.array(1.0), key=jax.random.key(0))
    >>> ts, metrics = step(ts, {"x": jnp.array([1.0, -1.0])})
    >>> float(ts.model), float(metrics["skipped"])
    (1.0, 1.0)

    ```
    """
    if nonfinite not in ("skip", "raise", "ignore"):
        raise ValueError(
            f"`nonfinite` must be 'skip', 'raise' or 'ignore'. Got {nonfinite!r}. Choose one."
        )
    if max_consecutive < 1:
        raise ValueError(f"`max_consecutive` must be positive. Got {max_consecutive}. 25 is usual.")
    source = f'et.guard(nonfinite="{nonfinite}")'

    def transform(given: Any) -> Step:
        step = as_step(given, source)
        once(step, source)

        def begin(parts: Parts) -> Parts:
            counts = {name: jnp.zeros((), jnp.int32) for name in ("skipped", "in_a_row")}
            return dataclasses.replace(parts, extra={**parts.extra, "guard": counts})

        def wrap(advance: Advance) -> Advance:
            def guarded(parts: Parts, batch: PyTree) -> tuple[Parts, Outcome]:
                return _guarded(advance, parts, batch, nonfinite)

            return guarded

        def judge(alarm: int) -> Exception | None:
            return _judge(alarm, nonfinite, max_consecutive)

        return dataclasses.replace(
            step,
            chain=(*step.chain, Link(source, Step)),
            wrapped=given,
            layers=(*step.layers, Layer(1, begin, wrap, judge, _recover)),
        )

    return transform if given is None else transform(given)


def _guarded(
    advance: Advance, parts: Parts, batch: PyTree, nonfinite: str
) -> tuple[Parts, Outcome]:
    new, outcome = advance(parts, batch)
    bad = ~(jnp.isfinite(outcome.loss) & jnp.isfinite(outcome.grad_norm))
    # Loss scaling meets overflow on its own, and kept the old parts already.
    scaled = jnp.zeros((), bool) if outcome.overflow is None else outcome.overflow
    failed = bad & ~(scaled & jnp.isfinite(outcome.loss))
    counts = parts.extra["guard"]
    if nonfinite == "raise":
        # What was dispatched before the host saw the flag must not move on from the failure.
        failed = failed | (counts["in_a_row"] > 0)
    in_a_row = jnp.where(failed, counts["in_a_row"] + 1, 0)
    counts = {"skipped": counts["skipped"] + bad.astype(jnp.int32), "in_a_row": in_a_row}
    if nonfinite == "ignore":
        extra = {**new.extra, "guard": counts}
        metrics = {**outcome.metrics, "nonfinite": Sum(bad.astype(jnp.int32))}
        new = dataclasses.replace(new, extra=extra)
        return new, dataclasses.replace(outcome, metrics=metrics, alarm=jnp.zeros((), jnp.int32))
    kept = keep(~(bad | failed), new, parts)
    if nonfinite == "raise":
        kept = dataclasses.replace(kept, step=jnp.where(failed, parts.step, new.step))
    extra = {**kept.extra, "guard": counts}
    if "loss_scale" in new.extra:
        extra["loss_scale"] = new.extra["loss_scale"]
    metrics = map_metrics(
        lambda metric: jax.tree.map(
            lambda neutral, x: jnp.where(bad, neutral, x), metric.neutral(), metric
        ),
        outcome.metrics,
    )
    metrics["skipped"] = Sum(bad.astype(jnp.int32))
    kept = dataclasses.replace(kept, extra=extra)
    return kept, dataclasses.replace(outcome, metrics=metrics, alarm=in_a_row)


def _recover(parts: Parts) -> Parts:
    """Lets steps be taken again after an error."""
    counts = parts.extra["guard"]
    counts = {**counts, "in_a_row": jnp.zeros_like(counts["in_a_row"])}
    return dataclasses.replace(parts, extra={**parts.extra, "guard": counts})


def _judge(alarm: int, nonfinite: str, max_consecutive: int) -> Exception | None:
    if nonfinite == "raise" and alarm:
        return NonFiniteError(
            "The loss or the gradients of a step were not finite. "
            "`error.state` is the TrainState from before it. "
            'Look at that batch, or go on past single bad ones with `guard(nonfinite="skip")`.'
        )
    if nonfinite == "skip" and alarm >= max_consecutive:
        return NonFiniteError(
            f"So many steps in a row must not fail. Got {alarm} steps whose loss or gradients were "
            "not finite, all skipped; `error.state` is the TrainState from before them. "
            "Lower the learning rate, or look at the data."
        )
    return None
