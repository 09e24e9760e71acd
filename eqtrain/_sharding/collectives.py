"""The collectives of a step, all in one place and all placed by hand."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .._metrics import AbstractMetric, Max, Min, accumulator_dtype, integer_dtype
from .placement import Axes, entry_axes

# Which dims of a leaf are split over which batch axes. Dims count from the last, so that a leaf of
# stacked blocks and the slice of it that a scan takes are split alike.
Splits = tuple[tuple[int, Axes], ...]


def splits_of(spec: P, ndim: int, axes: Axes) -> Splits:
    """The dims of a leaf with `spec` that are split over some of `axes`."""
    found = [
        (dim - ndim, tuple(axis for axis in entry_axes(entry) if axis in axes))
        for dim, entry in enumerate(spec)
    ]
    return tuple((dim, split) for dim, split in found if split)


def gather_splits(x: Array, splits: Splits, dtype: Any) -> Array:
    """Makes a leaf whole along the batch axes that split it.

    It travels in `dtype`, the compute dtype, since that is what the loss would cast it to.
    """
    if splits and dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(dtype)
    for dim, axes in splits:
        # Varies over `axes` before and after; once a call of the shard, or once a block if lazy.
        x = lax.all_gather(x, axes, axis=x.ndim + dim, tiled=True)
    return x


def scatter_splits(grad: Array, splits: Splits) -> Array:
    """Sums a gradient over the batch axes that split its leaf, keeping this device's shard."""
    for dim, axes in splits:
        grad = lax.psum_scatter(grad, axes, scatter_dimension=grad.ndim + dim, tiled=True)
    return grad


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_in_loss(x: Array, splits: Splits, dtype: Any, stored: Any) -> Array:
    """`gather_splits` for use inside a loss: its gradient is scattered, summed in float32.

    JAX's own transpose would sum in the compute dtype. `stored` is the dtype of `x`.
    """
    return gather_splits(x, splits, dtype)


def _gather_forward(x: Array, splits: Splits, dtype: Any, stored: Any) -> tuple[Array, None]:
    return gather_splits(x, splits, dtype), None


def _scatter_backward(
    splits: Splits, dtype: Any, stored: Any, _: None, grad: Array
) -> tuple[Array]:
    wide = grad.astype(accumulator_dtype(grad.dtype))
    return (scatter_splits(wide, splits).astype(stored),)


gather_in_loss.defvjp(_gather_forward, _scatter_backward)


class AbstractSums(abc.ABC):
    """Collects what is to be summed over the batch axes, so that arrays can travel together."""

    @abc.abstractmethod
    def add(
        self, x: Array, splits: Splits = (), done: Splits = (), beside: Axes = ()
    ) -> Callable[[], Array]:
        """Adds `x`, and gives a function that returns its sum once `run` was called.

        The sum is over the batch axes, and over the axes `beside` them. Along `splits` this device
        keeps its part alone, and has no more than that where `done`.
        """

    @abc.abstractmethod
    def run(self) -> None:
        """Sums all that was added."""


class Sums(AbstractSums):
    """Sums in whichever order is fastest: one psum of many leaves is one all-reduce."""

    def __init__(self, axes: Axes):
        self._axes = axes
        self._waiting: list[tuple[Array, Axes]] = []
        self._sums: dict[int, Array] = {}

    def add(
        self, x: Array, splits: Splits = (), done: Splits = (), beside: Axes = ()
    ) -> Callable[[], Array]:
        x = scatter_splits(x, tuple(split for split in splits if split not in done))
        scattered = {axis for _, axes in splits for axis in axes}
        left = tuple(axis for axis in self._axes if axis not in scattered)
        index = len(self._waiting)
        self._waiting.append((x, left + beside))
        return lambda: self._sums[index]

    def run(self) -> None:
        for axes in dict.fromkeys(axes for _, axes in self._waiting):
            indices = [i for i, (_, wanted) in enumerate(self._waiting) if wanted == axes]
            leaves = [self._waiting[i][0] for i in indices]
            # Differs along `axes` before, equal there afterwards; runs once a call of the shard.
            sums = lax.psum(leaves, axes) if axes else leaves
            self._sums.update(zip(indices, sums, strict=True))


def reduce_metric(
    metric: AbstractMetric, axes: Axes, sums: AbstractSums
) -> Callable[[], AbstractMetric]:
    """Merges a metric over the devices along `axes`."""
    leaves, treedef = jax.tree.flatten(metric)
    if isinstance(metric, Max | Min) and axes:
        extreme = lax.pmax if isinstance(metric, Max) else lax.pmin
        merged = [_with_nans(extreme(leaf, axes), leaf, sums) for leaf in leaves]
        return lambda: treedef.unflatten([leaf() for leaf in merged])
    later = [sums.add(leaf) for leaf in leaves]
    return lambda: treedef.unflatten([leaf() for leaf in later])


def _with_nans(extreme: Array, leaf: Array, sums: AbstractSums) -> Callable[[], Array]:
    """The extreme over devices, NaN if any device's is: backends' own collectives lose a NaN."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return lambda: extreme
    nans = sums.add(jnp.isnan(leaf).astype(jnp.float32))
    return lambda: jnp.where(nans() > 0, jnp.nan, extreme).astype(extreme.dtype)


def reduce_state(leaf: Array, axes: Axes, size: int, sums: AbstractSums) -> Callable[[], Array]:
    """Makes a leaf of the state equal over `axes`, along which there are `size` devices.

    Floating leaves are averaged, as running statistics are, which leaves those alone that are
    equal; integers and booleans take the largest. A PRNG key is taken as it is.
    """
    if not axes or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return lambda: leaf
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        wide = leaf.astype(accumulator_dtype(leaf.dtype))
        total = sums.add(wide / size)
        return lambda: total().astype(leaf.dtype)
    largest = lax.pmax(leaf.astype(integer_dtype(leaf.dtype)), axes).astype(leaf.dtype)
    return lambda: largest
