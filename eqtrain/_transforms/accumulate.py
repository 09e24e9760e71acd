"""`accumulate`: the global batch in several microbatches, one after the other, with one answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import einops
import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from .._core.contribution import Contribution, Objective, batch_size, is_example_array
from .._core.levels import Contribute, Link, as_contribute, require_order, written
from .._metrics import Max, accumulator_dtype, collapse, integer_dtype, is_metric
from .._sharding.ordered import add_lanes, require_power_of_two
from .._sharding.placement import Layout
from .._util.paths import path_name


def accumulate(num_microbatches: int, *, order: str | None = None) -> Callable[[Any], Contribute]:
    """Cuts the batch into microbatches, runs them in a `lax.scan`, and adds their contributions.

    Exact for every loss that is a mean over examples or tokens, whatever the counts in each
    microbatch. Statistics that a model takes over its batch, such as BatchNorm's, are those of a
    microbatch; its running statistics advance once a microbatch, in order.

    Inside `shard` each device cuts its own rows and gradients are reduced once a step. Outside,
    every microbatch is sharded and reduced by itself, and gradients are kept sharded in between.

    **Arguments:**

    - `num_microbatches`: must divide the rows of a batch (on each device, with `shard`).
    - `order`: `"tree"` adds microbatches as a balanced binary tree, as `et.shard` around it does
      with the same argument: 8 microbatches on one device, 4 on two, 2 on four and 1 on eight then
      give the same bits. Both numbers are powers of two, and two gradients are kept for each level
      of the tree. The state is not threaded: every microbatch starts from the step's, and what
      comes out is averaged.

    **Returns:** a Contribute.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] * model) ** 2), state, {}
    >>> keys = et.example_keys(jax.random.key(0), 0, jnp.arange(4))
    >>> batch = {"x": jnp.arange(4.0)}
    >>> contribution = et.accumulate(2)(loss)(jnp.array(2.0), None, batch, keys)
    >>> float(contribution.loss.value), float(contribution.grads)
    (14.0, 56.0)

    ```
    """
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int):
        raise TypeError(
            "`accumulate` takes the number of microbatches. "
            f"Got {type(num_microbatches).__name__}. Write `et.accumulate(4)`, above the loss."
        )
    if num_microbatches < 1:
        raise ValueError(
            f"The number of microbatches must be positive. Got {num_microbatches}. "
            "1 runs the batch as a whole."
        )
    source = f"et.accumulate({num_microbatches}{f', order={order!r}' if order else ''})"
    require_order(order, source)
    if order == "tree":
        require_power_of_two(num_microbatches, "microbatches")

    def transform(given: Any) -> Contribute:
        inner = as_contribute(given, source)
        if order == "tree" or inner.order == "tree" and num_microbatches > 1:
            _refuse_outside(inner, num_microbatches, source)
            return _in_tree_order(inner, num_microbatches, source, given)
        shards = inner.layout.batch_shards if inner.layout else 1

        def contribute(
            model: PyTree, state: PyTree, batch: PyTree, key: Any, objective: Objective
        ) -> Contribution:
            if num_microbatches == 1:
                return inner.contribute(model, state, batch, key, objective)
            parts, join = _cut(batch, key, num_microbatches, shards)
            arrays, static = eqx.partition(state, eqx.is_array)

            def body(carry: tuple[PyTree, PyTree], part: PyTree) -> Any:
                grads, arrays = carry
                part_batch, part_key = join(part)
                added = inner.contribute(
                    model, eqx.combine(arrays, static), part_batch, part_key, objective
                )
                grads = jax.tree.map(jnp.add, grads, added.grads)
                of_part = (added.loss, added.metrics, added.findings)
                return (grads, eqx.filter(added.state, eqx.is_array)), of_part

            zeros = _zero_grads(inner.layout, model, objective)
            (grads, arrays), (loss, metrics, findings) = lax.scan(body, (zeros, arrays), parts)
            return Contribution(
                grads,
                collapse(loss),
                eqx.combine(arrays, static),
                collapse(metrics),
                None if findings is None else findings.join(),
            )

        def count(model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
            if num_microbatches == 1:
                return inner.count(model, state, batch, key)
            parts, join = _cut(batch, key, num_microbatches, shards)
            arrays, static = eqx.partition(state, eqx.is_array)

            def body(arrays: PyTree, part: PyTree) -> Any:
                counts, new_state = inner.count(model, eqx.combine(arrays, static), *join(part))
                return eqx.filter(new_state, eqx.is_array), counts

            arrays, counts = lax.scan(body, arrays, parts)
            return tuple(count.sum(0) for count in counts), eqx.combine(arrays, static)

        return dataclasses.replace(
            inner,
            chain=(*inner.chain, Link(source, Contribute)),
            wrapped=given,
            contribute=contribute,
            count=count,
        )

    return transform


def _refuse_outside(inner: Contribute, num_microbatches: int, source: str) -> None:
    """Refuses sums over microbatches of what was summed over devices, or over others, before."""
    if inner.layout is not None or inner.order is not None:
        ordered = f"et.accumulate({num_microbatches}, order='tree')"
        raise ValueError(
            f"In tree order, `{source}` adds the rows of one device, and stands once, inside "
            f"`et.shard`. Got it after {written(inner.chain)}. "
            f"Write `et.pipe(loss, {ordered}, et.shard(..., order='tree'), ...)`."
        )


def _in_tree_order(inner: Contribute, num_microbatches: int, source: str, given: Any) -> Contribute:
    def add(
        run: Callable[[PyTree, PyTree, Any], PyTree], state: PyTree, batch: PyTree, key: Any
    ) -> PyTree:
        parts, join = _cut(batch, key, num_microbatches, 1)
        arrays, static = eqx.partition(state, eqx.is_array)

        def lane(part: PyTree) -> PyTree:
            sums, after = run(eqx.combine(arrays, static), *join(part))
            return sums, _as_lane(eqx.filter(after, eqx.is_array), num_microbatches)

        sums, after = add_lanes(lane, parts, jax.random.key_data(parts[1]))
        return sums, eqx.combine(_from_lanes(after, arrays), static)

    def contribute(
        model: PyTree, state: PyTree, batch: PyTree, key: Any, objective: Objective
    ) -> Contribution:
        def run(state: PyTree, batch: PyTree, key: Any) -> PyTree:
            added = inner.contribute(model, state, batch, key, objective)
            return (added.grads, added.loss, added.metrics, added.findings), added.state

        (grads, loss, metrics, findings), after = add(run, state, batch, key)
        return Contribution(grads, loss, after, metrics, findings)

    def count(model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
        return add(lambda *part: inner.count(model, *part), state, batch, key)

    return dataclasses.replace(
        inner,
        chain=(*inner.chain, Link(source, Contribute)),
        wrapped=given,
        contribute=contribute,
        count=count,
        order="tree",
    )


def _as_lane(arrays: PyTree, num_lanes: int) -> PyTree:
    """A state as what is added over lanes: its share of their mean, or of their maximum.

    Dividing by a power of two is exact, before the sum as after it.
    """

    def share(path: tuple[Any, ...], leaf: Array) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf.astype(accumulator_dtype(leaf.dtype)) / num_lanes
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                '`order="tree"` averages the state over lanes. '
                f"Got a PRNG key at `state.{path_name(path)}`. "
                "Derive what you need from the `key` that the loss is given."
            )
        return Max(leaf.astype(integer_dtype(leaf.dtype)))

    return jax.tree_util.tree_map_with_path(share, arrays)


def _from_lanes(total: PyTree, arrays: PyTree) -> PyTree:
    values = [
        leaf.maximum if isinstance(leaf, Max) else leaf
        for leaf in jax.tree.leaves(total, is_leaf=is_metric)
    ]
    before, treedef = jax.tree.flatten(arrays)
    return treedef.unflatten(
        [new.astype(old.dtype) for old, new in zip(before, values, strict=True)]
    )


def _cut(
    batch: PyTree, key: Any, parts: int, shards: int
) -> tuple[tuple[PyTree, Array], Callable[[Any], tuple[PyTree, Array]]]:
    """Stacks the microbatches, and gives the function that makes a batch of one of them.

    Where the batch is split over devices, microbatch m is the union of each device's m-th part: a
    contiguous cut would move rows between devices.
    """
    rows = batch_size(batch)
    if rows % (parts * shards):
        fitting = [n for n in range(1, rows // shards + 1) if rows % (n * shards) == 0]
        where = f" split over {shards} devices" if shards > 1 else ""
        advice = (
            f"Use one of {fitting}, or another batch size."
            if fitting
            else "No number does where the devices do not divide the rows. "
            f"Use a multiple of {parts * shards} rows, or pad the last batch with rows of weight 0."
        )
        raise ValueError(
            "`num_microbatches` must divide the rows that each device has of a batch. "
            f"Got num_microbatches={parts} and a batch of {rows} rows{where}. {advice}"
        )
    arrays, whole = eqx.partition(jax.tree.map(jnp.asarray, batch), is_example_array)

    def stack(x: Array) -> Array:
        cut = "(shards parts rows) ... -> parts (shards rows) ..."
        return einops.rearrange(x, cut, shards=shards, parts=parts)

    def join(part: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        return eqx.combine(part[0], whole), part[1]

    return jax.tree.map(stack, (arrays, key)), join


def _zero_grads(layout: Layout | None, model: PyTree, objective: Objective) -> PyTree:
    if objective.trainable is None:
        return None
    params = eqx.filter(model, objective.trainable)
    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=accumulator_dtype(p.dtype)), params)
    if layout is None or objective.grad_specs is None:
        return zeros
    # Outside `shard` the carry lies as each microbatch's gradient does, which holds less (ZeRO-2).
    return layout.constrain(zeros, objective.grad_specs)
