"""What one part of the global batch adds to a step, as sums.

Sums commute and means do not: gradients of the loss's *total* travel beside the count that divides
them, so that adding over microbatches and over devices gives the same whatever the order, and
`update` divides once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree, Shaped

from .._guard.checks import with_checks
from .._guard.findings import Findings, Watch, of_one_microbatch
from .._metrics import Combination, accumulator_dtype
from .loss import batch_size, run_loss


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["grads", "loss", "state", "metrics", "findings"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Contribution:
    """The sums that one part of the global batch adds to a step.

    **Fields:**

    - `grads`: the gradient of the loss's total with respect to each trainable leaf, in float32
      (float64 stays), with None where a leaf is frozen.
    - `loss`: the loss's terms, each a total and a count.
    - `state`: the model's state after this part.
    - `metrics`: a dict of metrics.
    - `findings`: what the checks of the loss were given, where the objective asks for it.
    """

    grads: PyTree
    loss: Combination
    state: PyTree
    metrics: dict[str, PyTree]
    findings: Findings | None = None


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is to be differentiated: `scale * sum_k weights[k] * total[k]`, by which leaves.

    `weights` is None for a loss of one term. `trainable` is a pytree of booleans like the model,
    or None for the loss and metrics alone. `grad_specs` says how `shard` is to leave the gradient
    of each trainable leaf, if not as the leaf lies. `checks` asks for what the loss's checks were
    given, or leaves them out, where None leaves them as they are; `watch` looks on while it is
    differentiated. `copies` is the number of devices that compute the same total, along the model
    axes of a mesh: each stands for that share of it. `metrics` is False where nobody reads them.
    """

    trainable: PyTree | None = None
    weights: Float[Array, " terms"] | None = None
    scale: Float[Array, ""] | None = None
    grad_specs: tuple[P, ...] | None = None
    checks: bool | None = None
    watch: Watch | None = None
    copies: int = 1
    metrics: bool = True


# For the pass that only counts what a loss's terms are divided by. Its checks are made again in the
# pass that follows.
COUNTING = Objective(checks=False, metrics=False)


def mean_grads(contribution: Contribution, objective: Objective) -> PyTree:
    """The gradients of the mean loss of all that was added up. The one place that divides."""
    grads = contribution.grads
    if objective.weights is None:  # else each term was divided before it was differentiated
        share = inverse(contribution.loss.terms[0].count)
        grads = jax.tree.map(lambda g: g * share.astype(g.dtype), grads)
    if objective.scale is not None:
        scale = objective.scale
        grads = jax.tree.map(lambda g: g / scale.astype(g.dtype), grads)
    return grads


def inverse(count: Float[Array, "..."]) -> Float[Array, "..."]:
    """`1 / count`, and 0 where nothing was counted: the mean of nothing pulls at nothing."""
    return jnp.where(count == 0, 0, 1 / jnp.where(count == 0, 1, count))


def differentiate(
    loss_fn: Callable[..., Any],
    model: PyTree,
    state: PyTree,
    batch: PyTree,
    key: Shaped[Any, "..."],
    objective: Objective,
) -> Contribution:
    """Runs a loss on one microbatch and differentiates its weighted total."""

    def checked(model: PyTree, inputs: dict[str, PyTree]) -> tuple[Any, Any]:
        args = (model, inputs["state"], inputs["batch"], inputs["key"])
        if objective.checks is None:
            return run_loss(loss_fn, *args), ((), ())
        out, given, sites = with_checks(functools.partial(run_loss, loss_fn), *args)
        return out, (given, sites) if objective.checks else ((), ())

    def run(inputs: dict[str, PyTree]) -> tuple[Any, Any, Any]:
        model = inputs["model"]
        if objective.trainable is None:
            return None, *checked(model, inputs)
        params, frozen = eqx.partition(model, objective.trainable)

        def total(params: PyTree) -> tuple[Array, Any]:
            out, (given, sites) = checked(eqx.combine(params, frozen), inputs)
            return _weighted(out[0], objective), (out, given, _Static(sites))

        grads, (out, given, sites) = jax.grad(total, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g.astype(accumulator_dtype(g.dtype)), grads)
        return grads, out, (given, sites.value)

    inputs = {"model": model, "state": state, "batch": batch, "key": key}
    out, flags = objective.watch(run, inputs) if objective.watch else (run(inputs), None)
    grads, (loss, state, metrics), (given, sites) = out
    metrics = metrics if objective.metrics else {}
    findings = of_one_microbatch(given, sites, flags, batch_size(batch))
    return Contribution(grads, loss, state, metrics, findings)


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["value"])
@dataclasses.dataclass(frozen=True)
class _Static:
    """What passes through a transform of JAX's as it is."""

    value: Any


def _weighted(loss: Combination, objective: Objective) -> Float[Array, ""]:
    totals = [term.total for term in loss.terms]
    if objective.weights is not None:
        totals = [
            total * weight.astype(total.dtype)
            for total, weight in zip(totals, objective.weights, strict=True)
        ]
    weighted = functools.reduce(lambda a, b: a + b, totals)
    if objective.scale is not None:
        weighted = weighted * objective.scale.astype(weighted.dtype)
    return weighted / objective.copies
