"""`shard`: runs a contribution on every device of a mesh, and sums what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from ..contribution import Contribution, Objective, batch_size
from ..levels import Contribute, Link, as_contribute, once
from ..metrics import map_metrics
from ..paths import named_leaves
from ..sharding.collectives import (
    Sums,
    gather_splits,
    reduce_metric,
    reduce_state,
    scatter_splits,
    splits_of,
)
from ..sharding.lazy import Shard
from ..sharding.placement import Layout, Placement, make_layout, replicate
from ..varying import vary, varying


def shard(
    mesh: Mesh, *, batch: PyTree, model: Placement | PyTree | Callable[..., Any] | None = None
) -> Callable[[Any], Contribute]:
    """Runs a Loss or Contribute on every device of `mesh`, each on its rows of the batch.

    Gradients, losses and metrics are summed over the axes that split the batch by one psum a call,
    in float32. A leaf that is split over one of them is gathered before (`all_gather` in the
    compute dtype) and its gradient scattered after (`psum_scatter` in float32). Over the mesh's
    other axes a loss must come out equal on every device, by the model's own psum.

    **Arguments:**

    - `mesh`: from `et.mesh`.
    - `batch`: how the batch is split: `P("data")`, or a tree of specs that is a prefix of it.
    - `model`: how the model lies: `et.replicate()` (unless given), `et.fsdp`, `et.rules`, a tree of
      specs, or a function `(path, leaf) -> P`.

    **Returns:** a Contribute.

    **Raises:** `ValueError` for unknown axes at once, for dims that do not divide when traced.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] @ model) ** 2), state, {}
    >>> mesh = et.mesh(data=-1)
    >>> contribute = et.pipe(loss, et.shard(mesh, batch=P("data"), model=et.fsdp("data")))

    ```
    """
    layout = make_layout(mesh, batch, replicate() if model is None else model)
    source = "et.shard(mesh, ...)"

    def transform(given: Any) -> Contribute:
        inner = as_contribute(given, source)
        once(inner, source)

        def contribute(
            model: PyTree, state: PyTree, batch: PyTree, key: Any, objective: Objective
        ) -> Contribution:
            return _contribute(layout, inner, model, state, batch, key, objective)

        def count(model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
            return _count(layout, inner, model, state, batch, key)

        return Contribute(
            chain=(*inner.chain, Link(source, Contribute)),
            wrapped=given,
            contribute=contribute,
            count=count,
            compute_dtype=inner.compute_dtype,
            loss_scaling=inner.loss_scaling,
            layout=layout,
        )

    return transform


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

    def local(
        leaves: list[Array], state: PyTree, batch: PyTree, key: Array, weights: Any, scale: Any
    ) -> tuple[list[Array], tuple[PyTree, PyTree, PyTree]]:
        seen = _as_seen(layout, inner, model, leaves, specs, trainable)
        contribution = inner.contribute(
            seen,
            eqx.combine(state, static_state),
            batch,
            key,
            Objective(objective.trainable, weights, scale),
        )
        sums = Sums()
        grads = []
        lazy = [isinstance(leaf, Shard) for leaf in _array_nodes(seen)]
        for index, grad, spec in zip(
            trainable, jax.tree.leaves(contribution.grads), grad_specs, strict=True
        ):
            splits = splits_of(spec, grad.ndim, layout.batch_axes)
            done = splits_of(specs[index], grad.ndim, layout.batch_axes) if lazy[index] else ()
            grad = scatter_splits(grad, tuple(split for split in splits if split not in done))
            summed = {axis for _, axes in splits for axis in axes}
            grads.append(
                sums.add(grad, tuple(axis for axis in layout.batch_axes if axis not in summed))
            )
        loss = _reduce_metrics(layout, "loss", contribution.loss, sums)
        metrics = _reduce_metrics(layout, "metrics", contribution.metrics, sums)
        new_state = _reduce_state(layout, contribution.state, sums)
        sums.run()
        return [grad() for grad in grads], jax.tree.map(lambda x: x(), (loss, new_state, metrics))

    grads, (loss, new_state, metrics) = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(specs, P(), *_data_specs(layout, batch), P(), P()),
        out_specs=(list(grad_specs), P()),
        check_vma=True,
    )(jax.tree.leaves(arrays), outer_state, batch, key, objective.weights, objective.scale)
    return Contribution(
        _unflatten_grads(arrays, trainable, grads, objective),
        loss,
        eqx.combine(new_state, static_state),
        metrics,
    )


def _count(
    layout: Layout, inner: Contribute, model: PyTree, state: PyTree, batch: PyTree, key: Any
) -> tuple[tuple[Array, ...], PyTree]:
    arrays = eqx.filter(model, eqx.is_array)
    specs = layout.model_specs(arrays)
    outer_state, static_state = eqx.partition(state, eqx.is_array)

    def local(leaves: list[Array], state: PyTree, batch: PyTree, key: Array) -> Any:
        seen = _as_seen(layout, inner, model, leaves, specs, [])
        counts, new_state = inner.count(seen, eqx.combine(state, static_state), batch, key)
        sums = Sums()
        later = [sums.add(count, layout.batch_axes) for count in counts]
        reduced = _reduce_state(layout, new_state, sums)
        sums.run()
        return tuple(count() for count in later), jax.tree.map(lambda x: x(), reduced)

    counts, new_state = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(specs, P(), *_data_specs(layout, batch)),
        out_specs=P(),
        check_vma=True,
    )(jax.tree.leaves(arrays), outer_state, batch, key)
    return counts, eqx.combine(new_state, static_state)


def _as_seen(
    layout: Layout,
    inner: Contribute,
    model: PyTree,
    leaves: list[Array],
    specs: list[P],
    trainable: list[int],
) -> PyTree:
    """The model as the loss sees it on this device, from this device's shards of its arrays."""
    flat, treedef = jax.tree.flatten(model)
    names = [name for name, leaf in named_leaves(model) if eqx.is_array(leaf)]
    seen = []
    for index, (name, leaf, spec) in enumerate(zip(names, leaves, specs, strict=True)):
        splits = splits_of(spec, leaf.ndim, layout.batch_axes)
        lazy = bool(splits) and layout.placement.lazy(name)
        if not lazy:
            leaf = gather_splits(leaf, splits, inner.compute_dtype)
        if index in trainable:
            # Else `jax.grad` would sum over the batch axes inside every microbatch.
            leaf = vary(leaf, layout.batch_axes)
        seen.append(Shard(leaf, f"model.{name}", splits) if lazy else leaf)
    arrays = iter(seen)
    return treedef.unflatten([next(arrays) if eqx.is_array(leaf) else leaf for leaf in flat])


def _array_nodes(model: PyTree) -> list[Any]:
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, Shard))
    return [node for node in nodes if isinstance(node, Shard) or eqx.is_array(node)]


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


def _reduce_metrics(layout: Layout, what: str, metrics: PyTree, sums: Sums) -> PyTree:
    for name, leaf in named_leaves(metrics):
        _require_equal_over_model_axes(layout, f"{what}.{name}", leaf)
    return map_metrics(lambda metric: reduce_metric(metric, layout.batch_axes, sums), metrics)


def _reduce_state(layout: Layout, state: PyTree, sums: Sums) -> PyTree:
    size = math.prod(layout.mesh.shape[axis] for axis in layout.batch_axes)
    arrays = eqx.filter(state, eqx.is_array)
    later = []
    for name, leaf in named_leaves(arrays):
        _require_equal_over_model_axes(layout, f"state.{name}", leaf)
        later.append(reduce_state(name, leaf, layout.batch_axes, size, sums))
    return jax.tree.unflatten(jax.tree.structure(arrays), later)


def _require_equal_over_model_axes(layout: Layout, name: str, leaf: Any) -> None:
    extra = varying(leaf) - set(layout.batch_axes)
    if extra:
        axes = ", ".join(f"`{axis}`" for axis in sorted(extra))
        raise ValueError(
            f"A loss must come out equal along the mesh axes that do not split the batch. "
            f"Got `{name}`, which varies over {axes}. "
            f"Add the missing `jax.lax.psum(..., {sorted(extra)[0]!r})` where the model joins what "
            f"its shards computed; or, if {axes} splits the batch, name it in `batch=`."
        )
