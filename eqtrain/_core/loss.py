"""What a loss returns: how it is called, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

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
from .._util.text import kind_text
from .equinox_state import as_mesh_state, as_plain_state, convert


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
    return Mean(total.astype(dtype), count.astype(dtype))


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
    given = convert(treedef.unflatten(leaves), as_mesh_state)
    returned = loss_fn(model, given, batch, key)
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
    new_state = convert(new_state, as_plain_state)
    _check_state(before, _kinds(new_state))
    return loss_terms(loss, batch), new_state, _check_metrics(metrics)


def _kinds(state: PyTree) -> dict[str, str]:
    return {
        name: kind_text(jnp.result_type(leaf), jnp.shape(leaf))
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
