"""The collectives of a step, all in one place and all placed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from ..metrics import AbstractMetric, Max, Min, accumulator_dtype
from ..varying import vary, varying
from .placement import Axes, entry_axes


def gather(x: Array, spec: P, axes: Axes, dtype: Any) -> Array:
    """Makes a leaf whole along the batch axes that split it; once a call of the shard.

    It travels in `dtype`, the compute dtype, since that is what the loss would cast it to.
    """
    for dim, entry in enumerate(spec):
        split = tuple(axis for axis in entry_axes(entry) if axis in axes)
        if split:
            if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
                x = x.astype(dtype)
            x = lax.all_gather(x, split, axis=dim, tiled=True)
    return x


def scatter(grad: Array, spec: P, axes: Axes) -> tuple[Array, Axes]:
    """Sums a gradient over the batch axes that split its leaf, keeping this device's shard.

    What comes back is still to be summed over the axes beside it.
    """
    done: Axes = ()
    for dim, entry in enumerate(spec):
        split = tuple(axis for axis in entry_axes(entry) if axis in axes)
        if split:
            grad = lax.psum_scatter(grad, split, scatter_dimension=dim, tiled=True)
            done += split
    return grad, tuple(axis for axis in axes if axis not in done)


class Sums:
    """Collects what is to be summed, so that all that is summed over the same axes shares a psum.

    One psum of many leaves is one all-reduce in the compiled program. `add` gives a function that
    returns the leaf's sum once `run` was called.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Array, Axes]] = []
        self._sums: dict[int, Array] = {}

    def add(self, x: Array, axes: Axes) -> Callable[[], Array]:
        index = len(self._waiting)
        self._waiting.append((x, axes))
        return lambda: self._sums[index]

    def run(self) -> None:
        for axes in dict.fromkeys(axes for _, axes in self._waiting):
            indices = [i for i, (_, wanted) in enumerate(self._waiting) if wanted == axes]
            leaves = [vary(self._waiting[i][0], axes) for i in indices]
            # Varies over `axes` before, equal there afterwards; runs once a call of the shard.
            sums = lax.psum(leaves, axes) if axes else leaves
            self._sums.update(zip(indices, sums, strict=True))


def reduce_metric(metric: AbstractMetric, axes: Axes, sums: Sums) -> Callable[[], AbstractMetric]:
    """Merges a metric over the devices along `axes`."""
    leaves, treedef = jax.tree.flatten(metric)
    if isinstance(metric, Max | Min) and axes:
        extreme = lax.pmax if isinstance(metric, Max) else lax.pmin
        merged = treedef.unflatten([extreme(vary(leaf, axes), axes) for leaf in leaves])
        return lambda: merged
    later = [sums.add(leaf, axes) for leaf in leaves]
    return lambda: treedef.unflatten([leaf() for leaf in later])


def reduce_state(name: str, leaf: Array, axes: Axes, size: int, sums: Sums) -> Callable[[], Array]:
    """Makes a leaf of the state equal over `axes`, along which there are `size` devices.

    A leaf that does not vary there, such as statistics that a psum made, costs nothing. Floating
    leaves are averaged, as running statistics are; integers and booleans take the largest.

    **Raises:** `ValueError` for a PRNG key that differs from device to device.
    """
    if not varying(leaf) & set(axes):
        return lambda: leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(
            "The state must come out equal on every device. "
            f"Got a PRNG key at `state.{name}` that differs along {axes}. "
            "Derive what you need from the `key` that the loss is given, and keep keys out of it."
        )
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        wide = leaf.astype(accumulator_dtype(leaf.dtype))
        total = sums.add(wide / size, axes)
        return lambda: total().astype(leaf.dtype)
    largest = lax.pmax(vary(leaf.astype(jnp.int32), axes), axes).astype(leaf.dtype)
    return lambda: largest
