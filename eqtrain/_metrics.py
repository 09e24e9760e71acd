"""Metrics that add up: each knows how to merge with another, and which collective reduces it.

A mean of means is wrong wherever counts differ, so nothing here is divided before it is read:
`Mean` carries its total and its count through microbatches, devices, steps and evaluation batches,
and divides once, in `value`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree, Shaped

_M = TypeVar("_M")


@dataclass_transform(frozen_default=True, eq_default=False)
def _metric(cls: type[_M]) -> type[_M]:
    """Makes `cls` a frozen dataclass and a pytree whose fields are all children."""
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields = [field.name for field in dataclasses.fields(cast(Any, cls))]
    return jax.tree_util.register_dataclass(cls, data_fields=fields, meta_fields=[])


class AbstractMetric(abc.ABC):
    """A commutative monoid: `merge` is its sum, over time, devices and batches alike.

    The fields of a metric are arrays; as a pytree it may hold anything else in their places.
    """

    @property
    @abc.abstractmethod
    def value(self) -> Any:
        """The number to report."""

    @abc.abstractmethod
    def merge(self, other: Any) -> AbstractMetric:
        """Joins what two parts of the data say."""

    @abc.abstractmethod
    def collapse(self) -> AbstractMetric:
        """Merges the parts stacked along the leading dim, one a microbatch or a step."""

    @abc.abstractmethod
    def neutral(self) -> AbstractMetric:
        """The metric that changes nothing when merged."""

    def __float__(self) -> float:
        return float(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        """What numpy makes of the number, which a tracer is not yet."""
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(inputs)):
            return NotImplemented
        numbers = [np.asarray(x) if is_metric(x) else x for x in inputs]
        return getattr(ufunc, method)(*numbers, **settings)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)


class _Added(AbstractMetric):
    """A metric all of whose fields add up, so that one psum reduces it."""

    def merge(self, other: Any) -> AbstractMetric:
        return jax.tree.map(lambda a, b: _countable(a) + _countable(b), self, other)

    def collapse(self) -> AbstractMetric:
        return jax.tree.map(lambda a: a.sum(0), self)

    def neutral(self) -> AbstractMetric:
        return jax.tree.map(jnp.zeros_like, self)


class _Linear(_Added):
    """A metric that may be a loss, and so be scaled and added to others."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        """On the device a number of numpy's is one like Python's; on the host all are numbers."""
        combine = _REFLECTED.get(ufunc) if method == "__call__" and not settings else None
        if combine is not None and inputs[1] is self and _on_device(self, inputs[0]):
            return getattr(self, combine)(inputs[0])
        return super().__array_ufunc__(ufunc, method, *inputs, **settings)


# What an operator calls of the metric on its right, whose left side is numpy's.
_REFLECTED = {np.add: "__radd__", np.subtract: "__rsub__", np.multiply: "__rmul__"}


def _on_device(metric: AbstractMetric, other: Any) -> bool:
    """Whether a metric is still to be computed with, by a scalar or as part of a loss."""
    leaf = jax.tree.leaves(metric)[0]
    return isinstance(leaf, Tracer) or (isinstance(leaf, jax.Array) and np.ndim(other) == 0)


@_metric
class Mean(_Linear):
    """A weighted mean, kept as its total and its count.

    As a loss it may be scaled by a number and added to other means, each of which is divided by its
    own global count: `et.mean(nll, where=mask) + 0.01 * et.mean(balance)`. To join two parts of the
    same mean use `merge`.

    ```python
    >>> a, b = et.Mean(jnp.array(4.0), jnp.array(1.0)), et.Mean(jnp.array(0.0), jnp.array(3.0))
    >>> float(a.merge(b)), float(a + b)
    (1.0, 4.0)

    ```
    """

    total: Any
    count: Any

    @property
    def value(self) -> Any:
        """`total / count`; the mean of nothing is NaN."""
        total, count = self.total, self.count
        if isinstance(total, jax.Array):
            return jnp.where(count == 0, jnp.nan, total / jnp.where(count == 0, 1, count))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(count == 0, np.nan, np.divide(total, count))

    def __add__(self, other: Any) -> Combination:
        return Combination((self,)) + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Combination:
        return self + -1.0 * other

    def __rsub__(self, other: Any) -> Combination:
        return -1.0 * self + other

    def __neg__(self) -> Mean:
        return -1.0 * self

    def __mul__(self, factor: Any) -> Mean:
        if isinstance(factor, AbstractMetric):
            raise TypeError(
                "A loss may be a linear combination of means, and a product of means is not linear."
                f" Got a Mean times a {type(factor).__name__}."
                " Multiply the values inside `et.mean`, or multiply by a number."
            )
        return Mean(self.total * jnp.asarray(factor, self.total.dtype), self.count)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Mean:
        if isinstance(divisor, AbstractMetric):
            return self * divisor  # which says why not
        return self * (1.0 / divisor)


@_metric
class PerBatch(_Added):
    """A scalar in a loss: the mean over the leading dim of whichever batch it was computed from."""

    scalar: Any

    @property
    def value(self) -> Any:
        return self.scalar

    def of(self, batch_size: int) -> Mean:
        """The same as a Mean, now that the size of the batch is known."""
        dtype = accumulator_dtype(self.scalar.dtype)
        count = jnp.asarray(batch_size, dtype)
        return Mean(self.scalar.astype(dtype) * count, count)


@_metric
class Combination(_Linear):
    """A sum of means with different denominators; each is divided by its own count."""

    terms: tuple[Any, ...]

    @property
    def value(self) -> Any:
        """The sum of the terms. A mean of nothing adds nothing here, as in the gradient."""
        parts = [
            _numpy_of(term.count).where(term.count == 0, 0, term.value)
            if isinstance(term, Mean)
            else term.value
            for term in self.terms
        ]
        return functools.reduce(lambda a, b: a + b, parts)

    def __add__(self, other: Any) -> Combination:
        if isinstance(other, Combination):
            return Combination(self.terms + other.terms)
        if isinstance(other, Mean):
            return Combination((*self.terms, other))
        if isinstance(other, AbstractMetric):
            raise TypeError(
                "A loss may be a linear combination of `et.mean(...)` terms and scalars. "
                f"Got a {type(other).__name__} as a term. Return it among the metrics instead."
            )
        if jnp.shape(other) != ():
            raise ValueError(
                "A term added to a mean must be a scalar. "
                f"Got an array of shape {jnp.shape(other)}. Wrap it: `et.mean(values)`."
            )
        # A number of Python has no dtype of its own, and takes that of what it is added to.
        typed = other if hasattr(other, "dtype") else jax.tree.leaves(self)[0]
        dtype = accumulator_dtype(jnp.result_type(typed))
        return Combination((*self.terms, PerBatch(jnp.asarray(other, dtype))))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Combination:
        return self + -1.0 * other

    def __rsub__(self, other: Any) -> Combination:
        return -1.0 * self + other

    def __neg__(self) -> Combination:
        return -1.0 * self

    def __mul__(self, factor: Any) -> Combination:
        return Combination(
            tuple(
                PerBatch(term.scalar * jnp.asarray(factor, term.scalar.dtype))
                if isinstance(term, PerBatch)
                else term * factor
                for term in self.terms
            )
        )

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Combination:
        return self * (1.0 / divisor)


@_metric
class Sum(_Added):
    """A total over the data, such as the number of tokens seen."""

    total: Any

    @property
    def value(self) -> Any:
        return self.total


@_metric
class Max(AbstractMetric):
    """The largest value over the data; reduced by pmax."""

    maximum: Any

    @property
    def value(self) -> Any:
        return self.maximum

    def merge(self, other: Any) -> Max:
        return Max(_numpy_of(self.maximum).maximum(self.maximum, other.maximum))

    def collapse(self) -> Max:
        return Max(self.maximum.max(0))

    def neutral(self) -> Max:
        return Max(jnp.full_like(self.maximum, _lowest(self.maximum.dtype)))


@_metric
class Min(AbstractMetric):
    """The smallest value over the data; reduced by pmin."""

    minimum: Any

    @property
    def value(self) -> Any:
        return self.minimum

    def merge(self, other: Any) -> Min:
        return Min(_numpy_of(self.minimum).minimum(self.minimum, other.minimum))

    def collapse(self) -> Min:
        return Min(self.minimum.min(0))

    def neutral(self) -> Min:
        return Min(jnp.full_like(self.minimum, _highest(self.minimum.dtype)))


def _countable(x: Any) -> Any:
    """Booleans and narrow integers as wider ones, whose sums count and do not wrap around."""
    dtype = getattr(x, "dtype", None)
    return x.astype(integer_dtype(dtype)) if dtype is not None and dtype.kind in "biu" else x


def _numpy_of(x: Any) -> Any:
    """numpy for what is on the host, where float64 is kept, jax.numpy for the rest."""
    return np if isinstance(x, np.ndarray | np.generic) else jnp


def _lowest(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype that sums are kept in: float32, or the values' own where it is wider."""
    wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize >= 4
    return jnp.dtype(dtype) if wide else jnp.dtype(jnp.float32)


def integer_dtype(dtype: Any) -> Any:
    """The dtype that integers and booleans are counted and compared in: int32 at least."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype(jnp.int32)


def mean(values: Shaped[Array, "..."] | float, where: Shaped[Array, "..."] | None = None) -> Mean:
    """Takes the mean of `values` over all dims, weighted by `where`.

    **Arguments:**

    - `values`: numbers or booleans of any shape; summed in float32 (float64 stays).
    - `where`: a mask or weights whose shape is that of `values` or of its leading dims, so that a
      weight `(batch,)` counts every token of its example. A value whose weight is 0 has no part in
      the mean and gets a gradient of 0, also when it is NaN.

    **Raises:** `ValueError` if the shape of `where` is not a prefix of that of `values`.

    ```python
    >>> x = jnp.array([[4.0, 9.0], [0.0, 0.0]])
    >>> float(et.mean(x, where=jnp.array([[True, False], [True, True]])))
    1.3333333730697632

    ```
    """
    values = jnp.asarray(values)
    dtype = accumulator_dtype(values.dtype)
    values = values.astype(dtype)
    if where is None:
        return Mean(values.sum(), jnp.asarray(values.size, dtype))
    where = jnp.asarray(where)
    if where.shape != values.shape[: where.ndim]:
        raise ValueError(
            "The shape of `where` must be that of `values`, or of its leading dims. "
            f"Got values of shape {values.shape} and where of shape {where.shape}. "
            "Index or reshape `where` so that its dims line up with the first dims of `values`."
        )
    weight = where.astype(dtype).reshape(where.shape + (1,) * (values.ndim - where.ndim))
    weight = jnp.broadcast_to(weight, values.shape)
    # Selected before it is multiplied: 0 * NaN is NaN, and so is its gradient.
    total = jnp.where(weight != 0, values, 0) * weight
    return Mean(total.sum(), weight.sum())


def is_metric(node: Any) -> bool:
    return isinstance(node, AbstractMetric)


def map_metrics(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps `fn` over the metrics of a tree."""
    return jax.tree.map(fn, tree, *rest, is_leaf=is_metric)


def fetch(metrics: PyTree) -> PyTree:
    """Reads metrics off the devices in one transfer, each as a float or a numpy array.

    This is the one place where the kit waits for a metric: call it once a logging interval.

    ```python
    >>> et.fetch({"accuracy": et.mean(jnp.array([True, False]))})
    {'accuracy': 0.5}

    ```
    """
    host = jax.device_get(metrics)

    def number(metric: Any) -> Any:
        value = np.asarray(metric.value if is_metric(metric) else metric)
        return value.item() if value.ndim == 0 else value

    return map_metrics(number, host)


_WIDE = {"f": np.float64, "i": np.int64, "u": np.uint64}


def merge(*metrics: PyTree) -> PyTree:
    """Merges the metrics of several steps or evaluation batches, on the host and in float64.

    The means come out weighted by their counts, so a short last batch counts for what it holds.
    What a call of `repeat` stacked along a leading dim is merged only after `et.collapse`.

    ```python
    >>> parts = [et.Mean(jnp.array(a * n), jnp.array(n)) for a, n in [(0.5, 4.0), (1.0, 1.0)]]
    >>> et.fetch(et.merge(*parts))
    0.6

    ```
    """
    if not metrics:
        raise ValueError("`merge` needs the metrics of one step at least. Got none.")
    wide = [
        jax.tree.map(
            lambda leaf: leaf.astype(_WIDE.get(leaf.dtype.kind, leaf.dtype)),
            jax.tree.map(np.asarray, part),
        )
        for part in jax.device_get(list(metrics))
    ]
    first, *others = (map_metrics(_counted, part) for part in wide)
    return functools.reduce(lambda a, b: map_metrics(lambda x, y: x.merge(y), a, b), others, first)


def _counted(metric: Any) -> Any:
    return jax.tree.map(_countable, metric) if isinstance(metric, _Added) else metric


def collapse(metrics: PyTree) -> PyTree:
    """Merges metrics stacked along a leading dim, such as the steps of one call of `repeat`."""
    return map_metrics(lambda metric: metric.collapse(), metrics)
