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

from .._guard.checks import with_checks, without_checks
from .._guard.findings import Findings, Watch, of_one_microbatch
from .._metrics import (
    Combination,
    Max,
    Mean,
    Min,
    PerBatch,
    Sum,
    accumulator_dtype,
    integer_dtype,
    is_metric,
    map_metrics,
)
from .._util.paths import named_leaves, path_name


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
    axes of a mesh: each stands for that share of it.
    """

    trainable: PyTree | None = None
    weights: Float[Array, " terms"] | None = None
    scale: Float[Array, ""] | None = None
    grad_specs: tuple[P, ...] | None = None
    checks: bool | None = None
    watch: Watch | None = None
    copies: int = 1


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


def is_example_array(leaf: Any) -> bool:
    """Whether a batch leaf holds one row an example; a scalar belongs to the batch as a whole."""
    return jnp.ndim(leaf) > 0


def batch_size(batch: PyTree) -> int:
    """The leading dim that the arrays of a batch share.

    **Raises:** `ValueError` if they differ, or if there is no array; `TypeError` for a leaf that is
    no array or number.
    """
    sizes = {}
    for name, leaf in named_leaves(batch):
        if not eqx.is_array_like(leaf):
            raise TypeError(
                "A batch must hold arrays and numbers alone. "
                f"Got {type(leaf).__name__} at `batch.{name}`. "
                "Leave it out of the batch, or encode it as an array."
            )
        if is_example_array(leaf):
            sizes[name] = jnp.shape(leaf)[0]
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"`batch.{name}` with {size}" for name, size in sizes.items())
        raise ValueError(
            "The arrays of a batch must share their leading dim, the examples. "
            f"Got {found or 'no array'}. "
            "Give every array one row an example; what belongs to the whole batch is a scalar."
        )
    rows = next(iter(sizes.values()))
    if rows == 0:
        raise ValueError(
            "A batch must have a row. Got none. Drop empty batches where they are made."
        )
    return rows


def loss_terms(loss: Any, batch: PyTree) -> Combination:
    """The loss that a function returned, as a combination of means.

    **Raises:** `TypeError` for what is no loss; `ValueError` for an array that is no scalar, and
    for a scalar where the batch carries weights that it cannot have used exactly.
    """
    if isinstance(loss, Mean | Combination):
        terms = loss.terms if isinstance(loss, Combination) else (loss,)
    elif is_metric(loss) or not eqx.is_array_like(loss):
        raise TypeError(
            "A loss must be `et.mean(values)`, a linear combination of those, or a scalar. "
            f"Got {type(loss).__name__}. Return `et.mean(values, where=mask)` as the first of "
            "the three."
        )
    else:
        if isinstance(batch, dict) and "weight" in batch and jnp.ndim(loss) == 0:
            raise ValueError(
                "A scalar loss counts every row alike, and this batch has a `weight`, which is 0 on"
                " padding. Got a scalar. "
                "Return `et.mean(values, where=batch['weight'])`, which carries its count."
            )
        terms = (PerBatch(jnp.asarray(loss)),)
    for term in terms:
        number = term.total if isinstance(term, Mean) else term.scalar
        if jnp.shape(number) != ():
            raise ValueError(
                f"A loss must be a scalar or a mean. Got an array of shape {jnp.shape(number)}. "
                "Return `et.mean(values)`, or `et.mean(values, where=mask)` if some do not count."
            )
        if not jnp.issubdtype(number.dtype, jnp.floating):
            raise TypeError(
                f"A loss must be real-valued. Got dtype {number.dtype}. "
                "Cast it to a floating dtype before it is averaged."
            )
    rows = batch_size(batch)
    return Combination(
        tuple(term.of(rows) if isinstance(term, PerBatch) else _wide(term) for term in terms)
    )


def _wide(term: Mean) -> Mean:
    """A Mean that a user built by hand may be narrower than what sums are kept in."""
    total, count = jnp.asarray(term.total), jnp.asarray(term.count)
    dtype = accumulator_dtype(total.dtype)
    return Mean(total.astype(dtype), jax.lax.stop_gradient(count.astype(dtype)))


def run_loss(
    loss_fn: Callable[..., Any],
    model: PyTree,
    state: PyTree,
    batch: PyTree,
    key: Shaped[Any, "..."],
) -> tuple[Combination, PyTree, dict[str, PyTree]]:
    """Calls a loss and checks what it returns.

    **Raises:** `TypeError` or `ValueError` that says what a loss returns and what came instead.
    """
    before = _kinds(state)
    # A copy, since an `eqx.nn.State` refuses to be used twice.
    leaves, treedef = jax.tree.flatten(state)
    returned = loss_fn(model, treedef.unflatten(leaves), batch, key)
    if not (isinstance(returned, tuple) and len(returned) == 3):
        got = (
            f"a tuple of {len(returned)}"
            if isinstance(returned, tuple)
            else type(returned).__name__
        )
        raise TypeError(
            "A loss must return the triple `(loss, state, metrics)`. "
            f"Got {got}. "
            "Return `loss, state, {}` where there are no metrics, and None for no state."
        )
    loss, new_state, metrics = returned
    _check_state(before, _kinds(new_state))
    return loss_terms(loss, batch), new_state, _check_metrics(metrics)


def _kinds(state: PyTree) -> dict[str, str]:
    return {
        name: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        for name, leaf in named_leaves(state)
        if eqx.is_array_like(leaf)
    }


def _check_state(before: dict[str, str], after: dict[str, str]) -> None:
    for name in sorted(before.keys() | after.keys()):
        kinds = [tree.get(name, "nothing") for tree in (before, after)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                "A loss must return the state with the structure, shapes and dtypes it was given. "
                f"Got `state.{name}`: {kinds[0]} before, {kinds[1]} after. "
                "Return the new state as the second of the three, each leaf cast to its old dtype."
            )


_OWN_METRICS = frozenset(
    ("loss", "grad_norm", "loss_scale", "skipped", "nonfinite", "spike", "failed_checks")
)


def _check_metrics(metrics: Any) -> dict[str, PyTree]:
    if metrics is None:
        return {}
    if not isinstance(metrics, dict):
        raise TypeError(
            "The metrics of a loss must be a dict. "
            f"Got {type(metrics).__name__}. Return `{{'name': et.mean(values)}}`."
        )
    taken = _OWN_METRICS & metrics.keys()
    if taken:
        raise ValueError(
            "The kit adds metrics of its own, and names must differ. "
            f"Got {sorted(taken)} from the loss. Rename yours."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics, is_leaf=is_metric):
        if not is_metric(leaf):
            raise TypeError(
                "A metric must say how it is merged: `et.mean(values)`, `et.Sum`, `et.Max` or "
                f"`et.Min`. Got {type(leaf).__name__} at `metrics.{path_name(path)}`. "
                "For an average over examples return `et.mean(values)`."
            )
    return map_metrics(_summable, metrics)


def _summable(metric: Any) -> Any:
    """A metric of arrays, in 32 bits at least where narrower sums would round or wrap around.

    Booleans are 0 and 1 from here on, which can be counted and have an extreme that is neutral.
    """
    if isinstance(metric, Mean):
        return _wide(metric)

    def wide(x: Any) -> Array:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x.astype(integer_dtype(x.dtype))
        return x.astype(accumulator_dtype(x.dtype) if isinstance(metric, Sum) else x.dtype)

    return jax.tree.map(wide, metric) if isinstance(metric, Sum | Max | Min) else metric


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


def count_terms(
    loss_fn: Callable[..., Any],
    model: PyTree,
    state: PyTree,
    batch: PyTree,
    key: Shaped[Any, "..."],
) -> tuple[tuple[Array, ...], PyTree]:
    """The count of each term of a loss, and the state after it, with no gradient.

    What the counts do not depend on is dead code in the compiled program.
    """
    run = functools.partial(run_loss, loss_fn)
    loss, state, _ = without_checks(run, model, state, batch, key)
    return tuple(term.count for term in loss.terms), state
