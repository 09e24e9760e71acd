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

from .._core.contribution import Contribution, Objective
from .._core.level import written
from .._core.levels import Contribute, as_contribute, require_order
from .._core.loss import batch_size, is_example_array
from .._metrics import Max, accumulator_dtype, collapse, integer_dtype, is_metric
from .._sharding.ordered import add_lanes, require_power_of_two
from .._sharding.placement import Layout
from .._util.paths import path_name
from .._util.text import call


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
    require_order(order, call("accumulate", num_microbatches, order=order))
    if order == "tree":
        require_power_of_two(num_microbatches, "microbatches")
    return lambda given: Accumulate(given, num_microbatches, order)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Accumulate(Contribute):
    """A contribution, microbatch by microbatch."""

    num_microbatches: int
    sum_order: str | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", as_contribute(self.inner, self.source))
        if self._in_tree_order:
            _refuse_outside(self)

    @property
    def source(self) -> str:
        return call("accumulate", self.num_microbatches, order=self.sum_order)

    @property
    def order(self) -> str | None:
        return "tree" if self._in_tree_order else self.inner.order

    @property
    def _in_tree_order(self) -> bool:
        ordered_inside = self.inner.order == "tree" and self.num_microbatches > 1
        return self.sum_order == "tree" or ordered_inside

    def contribute(
        self, model: PyTree, state: PyTree, batch: PyTree, key: Any, objective: Objective
    ) -> Contribution:
        arrays, static = eqx.partition(state, eqx.is_array)

        def run(arrays: PyTree, part: PyTree) -> Contribution:
            whole_state = eqx.combine(arrays, static)
            added = self.inner.contribute(model, whole_state, *join(part), objective)
            return dataclasses.replace(added, state=eqx.filter(added.state, eqx.is_array))

        if self._in_tree_order:
            parts, join = _cut(batch, key, self.num_microbatches, 1)
            total = _add_as_tree(run, arrays, parts)
        elif self.num_microbatches == 1:
            return self.inner.contribute(model, state, batch, key, objective)
        else:
            shards = self.layout.batch_shards if self.layout else 1
            parts, join = _cut(batch, key, self.num_microbatches, shards)
            zeros = _zero_grads(self.layout, model, objective)
            total = _add_in_turn(run, arrays, parts, zeros)
        return dataclasses.replace(total, state=eqx.combine(total.state, static))


# The contribution of a microbatch, from the arrays of the state before it.
Run = Callable[[PyTree, PyTree], Contribution]


def _add_in_turn(run: Run, arrays: PyTree, parts: PyTree, zeros: PyTree) -> Contribution:
    """Adds microbatches one after the other, each from the state that the one before left."""

    def body(carry: tuple[PyTree, PyTree], part: PyTree) -> Any:
        grads, arrays = carry
        added = run(arrays, part)
        grads = jax.tree.map(jnp.add, grads, added.grads)
        return (grads, added.state), (added.loss, added.metrics, added.findings)

    (grads, arrays), (loss, metrics, findings) = lax.scan(body, (zeros, arrays), parts)
    findings = None if findings is None else findings.join()
    return Contribution(grads, collapse(loss), arrays, collapse(metrics), findings)


def _add_as_tree(run: Run, arrays: PyTree, parts: PyTree) -> Contribution:
    """Adds microbatches as a balanced tree, each from the step's state."""
    num_lanes = len(parts[1])

    def lane(part: PyTree) -> Contribution:
        added = run(arrays, part)
        return dataclasses.replace(added, state=_as_lane(added.state, num_lanes))

    total = add_lanes(lane, parts, jax.random.key_data(parts[1]))
    return dataclasses.replace(total, state=_from_lanes(total.state, arrays))


def _refuse_outside(level: Accumulate) -> None:
    """Refuses sums over microbatches of what was summed over devices, or over others, before."""
    inner = level.inner
    if inner.layout is not None or inner.order is not None:
        ordered = call("accumulate", level.num_microbatches, order="tree")
        raise ValueError(
            f"In tree order, `{level.source}` adds the rows of one device, and stands once, inside "
            f"`et.shard`. Got it after {written(inner.chain)}. "
            f"Write `et.pipe(loss, {ordered}, et.shard(..., order='tree'), ...)`."
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
