"""`shard`: runs a contribution on every device of a mesh, and sums what comes out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from .._core.contribution import COUNTING, Contribution, Objective
from .._core.levels import Contribute, as_contribute, innermost_loss, require_order
from .._core.loss import batch_size, run_loss
from .._core.order import require_once
from .._guard.findings import Findings
from .._metrics import map_metrics
from .._sharding.collectives import (
    AbstractSums,
    Sums,
    gather_splits,
    reduce_metric,
    reduce_state,
    splits_of,
)
from .._sharding.here import inside
from .._sharding.lazy import Shard as LazyShard
from .._sharding.ordered import OrderedSums, refuse_collectives, require_power_of_two
from .._sharding.placement import (
    Layout,
    Placement,
    make_layout,
    replicate,
    spec_axes,
    text_of_specs,
)
from .._util.paths import named_leaves
from .._util.text import Code, call
from .accumulate import Accumulate
from .equality import has_keys, require_equal


def shard(
    mesh: Mesh,
    *,
    batch: PyTree,
    model: Placement | PyTree | Callable[..., Any] | None = None,
    order: str | None = None,
) -> Callable[[Any], Contribute]:
    """Runs a Loss or Contribute on every device of `mesh`, each on its rows of the batch.

    Each device computes the total of its own rows, and what the loss does inside is what it does on
    one device: derivatives, loops, branches. The objective is the sum of all devices' totals, each
    divided by the number of devices that have the same rows. JAX's own transposes of collectives
    are right for that, and the gradient of a leaf is one psum, over the axes along which it is
    whole.

    Gradients, losses and metrics are summed by one psum for each set of axes, in float32. A leaf
    that is split over a batch axis is gathered before (`all_gather` in the compute dtype) and its
    gradient scattered after (`psum_scatter` in float32). Over the axes that do not split the batch
    a loss must come out equal on every device, by the model's own psum.

    **Arguments:**

    - `mesh`: from `et.mesh`.
    - `batch`: how the batch is split: `P("data")`, or a tree of specs that is a prefix of it.
    - `model`: how the model lies: `et.replicate()` (unless given), `et.fsdp`, `et.rules`, a tree of
      specs, or a function `(path, leaf) -> P`.
    - `order`: `"tree"` adds what the devices contribute as a balanced binary tree, by `all_to_all`
      and local sums. With `et.accumulate(n, order="tree")` inside, the same number of microbatches
      times devices gives the same bits on any power of two of devices.

    **Returns:** a Contribute.

    **Raises:** `ValueError` for unknown axes at once; when traced, for dims that do not divide, and
    for a loss that differs along an axis that does not split the batch.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] @ model) ** 2), state, {}
    >>> mesh = et.mesh(data=-1)
    >>> contribute = et.pipe(loss, et.shard(mesh, batch=P("data"), model=et.fsdp("data")))

    ```
    """
    layout = make_layout(mesh, batch, replicate() if model is None else model)
    require_order(order, "et.shard(mesh, ...)")
    if order == "tree":
        layout = _ordered(layout)
    return lambda given: Shard(given, layout)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Shard(Contribute):
    """A contribution, on every device of a mesh."""

    where: Layout

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", as_contribute(self.inner, self.source))
        require_once(self)
        _require_same_order(self.inner, self.order)

    @property
    def source(self) -> str:
        return call(
            "shard",
            Code(_text_of_mesh(self.where.mesh)),
            batch=Code(text_of_specs(self.where.batch)),
            model=_text_of_placement(self.where.placement),
            order=self.order,
        )

    @property
    def layout(self) -> Layout:
        return self.where

    @property
    def order(self) -> str | None:
        return "tree" if self.where.ordered else None

    @property
    def _one_device(self) -> Contribute:
        """What runs on each device: one lane of the tree, at the least."""
        if self.order == "tree" and self.inner.order is None:
            return Accumulate(self.inner, 1, "tree")
        return self.inner

    def contribute(
        self, model: PyTree, state: PyTree, batch: PyTree, key: Any, objective: Objective
    ) -> Contribution:
        return _contribute(self.where, self._one_device, model, state, batch, key, objective)


def _text_of_mesh(mesh: Mesh) -> str:
    return call("mesh", **dict(mesh.shape))


def _text_of_placement(placement: Placement) -> Code | None:
    return None if placement.text == replicate().text else Code(placement.text)


def _ordered(layout: Layout) -> Layout:
    """The same layout for sums in the order of the tree, which only rows can be split for."""
    if set(layout.batch_axes) != set(layout.example_axes):
        raise ValueError(
            '`order="tree"` adds runs of whole examples. '
            f"Got a batch whose examples are split too: {layout.batch}. "
            "Split dim 0 alone, or leave out `order`."
        )
    require_power_of_two(layout.batch_shards, "devices along the batch axes")
    return dataclasses.replace(layout, batch_axes=layout.example_axes, ordered=True)


def _require_same_order(inner: Contribute, order: str | None) -> None:
    several = [
        level
        for level in inner.chain
        if isinstance(level, Accumulate) and level.num_microbatches > 1
    ]
    if several and inner.order != order:
        raise ValueError(
            "`accumulate` and `shard` must add in the same order, or the bits depend on the mesh. "
            f"Got `{several[0].source}` inside `et.shard(..., order={order!r})`. "
            'Give both `order="tree"`, or neither.'
        )


def _sums(layout: Layout) -> AbstractSums:
    if layout.ordered:
        return OrderedSums(layout.batch_axes, dict(layout.mesh.shape))
    return Sums(layout.batch_axes)


def _contribute(
    layout: Layout,
    inner: Contribute,
    model: PyTree,
    state: PyTree,
    batch: PyTree,
    key: Any,
    objective: Objective,
) -> Contribution:
    arrays = eqx.filter(model, eqx.is_array)
    specs = layout.model_specs(arrays)
    trainable = _trainable_indices(arrays, objective.trainable)
    grad_specs = objective.grad_specs or tuple(specs[index] for index in trainable)
    outer_state, static_state = eqx.partition(state, eqx.is_array)
    if objective.metrics:  # not in the pass that only counts, which another follows
        _require_equal(layout, inner, model, specs, outer_state, static_state, batch, key)

    def local(
        leaves: list[Array], state: PyTree, batch: PyTree, key: Array, weights: Any, scale: Any
    ) -> tuple[list[Array], tuple[PyTree, PyTree, PyTree], Findings | None]:
        seen = _as_seen(layout, inner, model, leaves, specs)
        whole_state = eqx.combine(state, static_state)
        if layout.ordered:
            _refuse_order(layout, inner, seen, whole_state, batch, key)
        here = dataclasses.replace(
            objective, weights=weights, scale=scale, grad_specs=None, copies=layout.copies
        )
        with inside(layout):
            contribution = inner.contribute(seen, whole_state, batch, key, here)
        sums = _sums(layout)
        lazy = [isinstance(leaf, LazyShard) for leaf in _array_nodes(seen)]
        grads = []
        for index, grad, spec in zip(
            trainable, jax.tree.leaves(contribution.grads), grad_specs, strict=True
        ):
            splits = splits_of(spec, grad.ndim, layout.batch_axes)
            done = splits_of(specs[index], grad.ndim, layout.batch_axes) if lazy[index] else ()
            whole = tuple(axis for axis in layout.model_axes if axis not in spec_axes(spec))
            grads.append(sums.add(grad, splits, done, whole))
        loss = _reduce_metrics(layout, contribution.loss, sums)
        metrics = _reduce_metrics(layout, contribution.metrics, sums)
        new_state = _reduce_state(layout, contribution.state, sums)
        sums.run()
        reduced = jax.tree.map(lambda x: x(), (loss, new_state, metrics))
        return [grad() for grad in grads], reduced, contribution.findings

    grads, (loss, new_state, metrics), findings = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(specs, P(), *_data_specs(layout, batch), P(), P()),
        out_specs=(list(grad_specs), P(), P(layout.mesh.axis_names)),
        check_vma=False,
    )(jax.tree.leaves(arrays), outer_state, batch, key, objective.weights, objective.scale)
    return Contribution(
        _unflatten_grads(arrays, trainable, grads, objective),
        loss,
        eqx.combine(new_state, static_state),
        metrics,
        findings,
    )


def _require_equal(
    layout: Layout,
    inner: Contribute,
    model: PyTree,
    specs: list[P],
    state: PyTree,
    static_state: PyTree,
    batch: PyTree,
    key: Any,
) -> None:
    """Looks at the loss under JAX's types, where something could come out unequal."""
    if not layout.model_axes and not has_keys(state):
        return
    loss = innermost_loss(inner)

    def run(leaves: list[Array], state: PyTree, batch: PyTree, key: Array) -> dict[str, PyTree]:
        seen = _as_seen(layout, inner, model, leaves, specs)
        with inside(layout):
            whole = eqx.combine(state, static_state)
            value, state, metrics = run_loss(loss, seen, whole, batch, key)
        return {"loss": value, "metrics": metrics, "state": state}

    in_specs = (specs, P(), *_data_specs(layout, batch))
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    require_equal(layout, run, in_specs, (leaves, state, batch, key))


def _as_seen(
    layout: Layout,
    inner: Contribute,
    model: PyTree,
    leaves: list[Array],
    specs: list[P],
) -> PyTree:
    """The model as the loss sees it on this device, from this device's shards of its arrays."""
    flat, treedef = jax.tree.flatten(model)
    names = [name for name, leaf in named_leaves(model) if eqx.is_array(leaf)]
    seen = []
    for name, leaf, spec in zip(names, leaves, specs, strict=True):
        splits = splits_of(spec, leaf.ndim, layout.batch_axes)
        lazy = bool(splits) and layout.placement.lazy(name)
        if lazy and layout.ordered:
            raise ValueError(
                '`order="tree"` adds whole microbatches, and a lazy gather adds over devices first.'
                f" Got `model.{name}`, placed by `et.fsdp(..., lazy=...)`. "
                "Leave out `lazy`, or `order`."
            )
        if not lazy:
            leaf = gather_splits(leaf, splits, inner.compute_dtype)
        seen.append(LazyShard(leaf, f"model.{name}", splits) if lazy else leaf)
    arrays = iter(seen)
    return treedef.unflatten([next(arrays) if eqx.is_array(leaf) else leaf for leaf in flat])


def _array_nodes(model: PyTree) -> list[Any]:
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, LazyShard))
    return [node for node in nodes if isinstance(node, LazyShard) or eqx.is_array(node)]


def _refuse_order(
    layout: Layout, inner: Contribute, seen: PyTree, state: PyTree, batch: PyTree, key: Array
) -> None:
    """Refuses a loss that communicates by itself over the batch axes."""
    arrays, static = eqx.partition((seen, state), eqx.is_array)

    def run(arrays: PyTree, batch: PyTree, key: Array) -> Any:
        model, state = eqx.combine(arrays, static)
        with inside(layout):
            counted = inner.contribute(model, state, batch, key, COUNTING)
        return eqx.filter((counted.loss, counted.state), eqx.is_array)

    refuse_collectives(run, (arrays, batch, key), layout.batch_axes)


def _data_specs(layout: Layout, batch: PyTree) -> tuple[PyTree, P]:
    batch_size(batch)
    arrays = jax.tree.map(jnp.asarray, batch)
    specs = jax.tree.unflatten(jax.tree.structure(arrays), layout.batch_specs(arrays))
    return specs, P(layout.example_axes)


def _trainable_indices(arrays: PyTree, trainable: PyTree | None) -> list[int]:
    """Which of the leaves of `arrays` are to be differentiated."""
    if trainable is None:
        return []
    leaves, treedef = jax.tree.flatten(arrays)
    return jax.tree.leaves(eqx.filter(treedef.unflatten(range(len(leaves))), trainable))


def _unflatten_grads(
    arrays: PyTree, trainable: list[int], grads: list[Array], objective: Objective
) -> PyTree:
    if objective.trainable is None:
        return None
    leaves: list[Array | None] = [None] * len(jax.tree.leaves(arrays))
    for index, grad in zip(trainable, grads, strict=True):
        leaves[index] = grad
    return jax.tree.unflatten(jax.tree.structure(arrays), leaves)


def _reduce_metrics(layout: Layout, metrics: PyTree, sums: AbstractSums) -> PyTree:
    return map_metrics(lambda metric: reduce_metric(metric, layout.batch_axes, sums), metrics)


def _reduce_state(layout: Layout, state: PyTree, sums: AbstractSums) -> PyTree:
    size = math.prod(layout.mesh.shape[axis] for axis in layout.batch_axes)
    arrays = eqx.filter(state, eqx.is_array)
    return jax.tree.map(lambda leaf: reduce_state(leaf, layout.batch_axes, size, sums), arrays)
