"""Sums in one fixed order, so that their bits do not depend on how many devices take part.

A step has a fixed number of *lanes*, microbatches times devices, each a run of the batch's rows.
The lanes are added as one balanced binary tree. A device adds its own lanes, a whole subtree, in a
scan; what follows is added over devices by `all_to_all` and local sums, whose order is ours, where
that of an all-reduce is the backend's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxprs_in_params
from jaxtyping import Array, Int, PyTree, Shaped

from .._metrics import Max, Min, is_metric
from .collectives import AbstractSums, Splits
from .placement import Axes

# These name a mesh axis, and nothing of one device comes to another.
_LOCAL = frozenset("axis_index pcast pvary sharding_constraint".split())


class AbstractStacked(ABC):
    """A pytree that is not summed over lanes, and says itself how two of them become one."""

    @abstractmethod
    def join(self) -> Any:
        """One of several that are stacked along dim 0."""


def require_power_of_two(number: int, what: str) -> None:
    if number & (number - 1):
        raise ValueError(
            '`order="tree"` adds lanes in pairs, and pairs of pairs. '
            f"Got {number} {what}, which is no power of two. Use 1, 2, 4, 8, ..."
        )


def tree_sum(lanes: Array) -> Array:
    """The sum over dim 0, whose length is a power of two, as a balanced binary tree."""
    while len(lanes) > 1:
        lanes = lanes[0::2] + lanes[1::2]
    return lanes[0]


def add_lanes(
    run: Callable[[PyTree], PyTree], parts: PyTree, words: Shaped[Array, "lanes ..."]
) -> PyTree:
    """Runs each of the parts stacked along dim 0, and adds what comes out as a tree.

    `run` gives arrays, and metrics which say themselves how they are merged. Two results are kept
    for each level of the tree. `words` are any numbers of each part that only show at run time.
    """
    if len(words) == 1:
        part, word = jax.tree.map(lambda x: x[0], (parts, words))
        return _sealed(run, part, word)

    def half(_: None, parts: PyTree) -> tuple[None, PyTree]:
        return None, add_lanes(run, *parts)

    halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), (parts, words))
    _, pair = lax.scan(half, None, halves)
    return jax.tree.map(_add_pair, pair, is_leaf=_joins_itself)


def _sealed(run: Callable[[PyTree], PyTree], part: PyTree, words: Array) -> PyTree:
    """Runs a lane where it is compiled alike, in a loop or not: in a branch of its own.

    What XLA fuses, and so where it rounds, ends at the branch. That the branch is always taken, no
    compiler knows.
    """

    def nothing(part: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, part))

    return lax.cond((words.reshape(-1)[0] | 1) != 0, run, nothing, part)


def _joins_itself(node: Any) -> bool:
    return is_metric(node) or isinstance(node, AbstractStacked)


def _add_pair(pair: Any) -> Any:
    if isinstance(pair, AbstractStacked):
        return pair.join()
    if isinstance(pair, Max | Min):
        return pair.collapse()
    return jax.tree.map(lambda x: x[0] + x[1], pair)


def fence(tree: PyTree, step: Int[Array, ""]) -> PyTree:
    """The same floats, which no compiler may fuse with what made them into one rounding.

    Whether a product and a sum become one operation, rounded once, depends on what else stands in
    a loop, and so on the mesh. An exclusive or of the bits with a 0 that only we know to be one
    keeps both apart, at no cost in memory.
    """
    zero = step >> 31  # of a step, which is never negative

    def apart(x: Array) -> Array:
        if jnp.iscomplexobj(x):
            return lax.complex(apart(x.real), apart(x.imag))
        bits = jnp.uint64 if x.dtype.itemsize == 8 else jnp.uint32
        return lax.bitcast_convert_type(
            lax.bitcast_convert_type(x, bits) ^ zero.astype(bits), x.dtype
        )

    return jax.tree.map(apart, tree)


class OrderedSums(AbstractSums):
    """Sums over `axes` in the order of the tree.

    Arrays that no axis splits travel together, in one `all_to_all` and one `all_gather` a dtype,
    which move no more bytes than the all-reduce of a ring.
    """

    def __init__(self, axes: Axes, sizes: dict[str, int]):
        self._axes = axes
        self._sizes = sizes
        self._waiting: list[Array] = []
        self._sums: list[Array] = []

    def add(
        self, x: Array, splits: Splits = (), done: Splits = (), beside: Axes = ()
    ) -> Callable[[], Array]:
        if beside:
            # Along these axes nothing is split into lanes, so their order is the backend's.
            x = lax.psum(x, beside)
        if not splits:
            index = len(self._waiting)
            self._waiting.append(x)
            return lambda: self._sums[index]
        dims = {axis: dim for dim, axes in splits for axis in axes}
        for dim, axes in splits:
            x = self._in_order_of_scatters(x, x.ndim + dim, axes)
        # The lanes lie in the order of the axes, so that the last axis joins the lowest subtrees.
        for axis in reversed(self._axes):
            if axis in dims:
                x = self._scatter(x, dims[axis], axis)
            else:
                (x,) = self._everywhere([x], (axis,))
        return lambda: x

    def run(self) -> None:
        sums: dict[int, Array] = {}
        for dtype in dict.fromkeys(x.dtype for x in self._waiting):
            indices = [i for i, x in enumerate(self._waiting) if x.dtype == dtype]
            added = self._everywhere([self._waiting[i] for i in indices], self._axes)
            sums.update(zip(indices, added, strict=True))
        self._sums = [sums[index] for index in range(len(self._waiting))]

    def _in_order_of_scatters(self, x: Array, dim: int, axes: Axes) -> Array:
        """Moves the blocks of a dim to where the scatters, last axis first, take them from.

        Where several axes split the dim, its blocks lie in the order that the spec names these in.
        """
        scattered = [axis for axis in reversed(self._axes) if axis in axes]
        if scattered == list(axes):
            return x
        sizes = [self._sizes[axis] for axis in axes]
        blocks = x.reshape(
            *x.shape[:dim], *sizes, x.shape[dim] // math.prod(sizes), *x.shape[dim + 1 :]
        )
        order = [dim + axes.index(axis) for axis in scattered]
        rest = range(dim + len(axes), blocks.ndim)
        return blocks.transpose([*range(dim), *order, *rest]).reshape(x.shape)

    def _scatter(self, x: Array, dim: int, axis: str) -> Array:
        dim, size = x.ndim + dim, self._sizes[axis]
        x = x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
        # Varies over the axis before and after: each device sends every other its part.
        return tree_sum(lax.all_to_all(jnp.moveaxis(x, dim, 0), axis, 0, 0, tiled=True))

    def _everywhere(self, arrays: list[Array], axes: Axes) -> list[Array]:
        """The sums of arrays of one dtype over `axes`, on every device along them."""
        size = math.prod(self._sizes[axis] for axis in axes)
        flat = jnp.concatenate([x.reshape(-1) for x in arrays])
        length = len(flat)
        flat = jnp.pad(flat, (0, -length % size)).reshape(size, -1)
        part = tree_sum(lax.all_to_all(flat, axes, 0, 0, tiled=True))
        # Comes out the same on all devices along `axes`.
        flat = lax.all_gather(part, axes, tiled=True)[:length]
        sums, start = [], 0
        for x in arrays:
            sums.append(flat[start : start + x.size].reshape(x.shape))
            start += x.size
        return sums


def refuse_collectives(function: Callable[..., Any], args: tuple[Any, ...], axes: Axes) -> None:
    """Refuses a loss that communicates over the batch axes: it is no sum over lanes."""
    for name, over in _collectives(jax.make_jaxpr(function)(*args).jaxpr, axes):
        if over:
            raise ValueError(
                '`order="tree"` adds lanes that know nothing of one another. '
                f"Got a loss with a `{name}` over {over}, which splits the batch. "
                "Remove it: for BatchNorm, `axis_names=()` keeps the statistics of each lane, "
                "whose running ones are averaged over lanes."
            )


def _collectives(jaxpr: Any, axes: Axes) -> list[tuple[str, Axes]]:
    """The primitives that name some of `axes`, whatever they are called, with those axes.

    Not by a list of collectives, which would let a new one pass.
    """
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name not in _LOCAL:
            # The `name` of a call is its function's.
            named = [value for key, value in equation.params.items() if key != "name"]
            over = tuple(axis for axis in axes if axis in set(_strings(named)))
            if over:
                found.append((equation.primitive.name, over))
        for inner in jaxprs_in_params(equation.params):
            found += _collectives(inner, axes)
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list | set | frozenset):
        for one in value:
            yield from _strings(one)
