"""Collectives over the rows of the global batch, for a loss that looks at more than its own rows.

Inside `et.shard` a loss sees the rows of one device. A statistic over a batch (`x.mean(0)`) is then
one of that device's rows alone. With these functions it is one of all rows, on every mesh, and on
one device, where they do nothing but what their names say. Gradients go through them: a row's loss
may depend on every device's rows.

Under `et.accumulate` all rows are those of one microbatch, on all devices.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from ._metrics import accumulator_dtype
from ._sharding.here import batch_axes_here


def gather(x: Shaped[Array, "rows *dims"]) -> Shaped[Array, "all_rows *dims"]:
    """The rows of all devices along dim 0, in the order of the global batch.

    ```python
    >>> def contrastive(model, state, batch, key):
    ...     a, b = batch["a"] @ model, batch["b"] @ model
    ...     logits = a @ et.rows.gather(b).T  # each row against those of the whole batch
    ...     nll = optax.softmax_cross_entropy_with_integer_labels(logits, et.rows.index(a))
    ...     return et.mean(nll), state, {}
    >>> et.rows.gather(jnp.ones((3, 2))).shape
    (3, 2)

    ```
    """
    axes = batch_axes_here().rows
    # Differs along `axes` before, the same rows everywhere after; its transpose is a psum_scatter.
    return lax.all_gather(x, axes, axis=0, tiled=True) if axes else x


def index(x: Shaped[Array, "rows *dims"]) -> Int[Array, " rows"]:
    """Where each row of `x` stands among those that `gather` gives.

    ```python
    >>> et.rows.index(jnp.ones((3, 2))).tolist()
    [0, 1, 2]

    ```
    """
    axes = batch_axes_here().rows
    first = lax.axis_index(axes) * x.shape[0] if axes else 0
    return first + jnp.arange(x.shape[0], dtype=jnp.int32)


def sum(  # noqa: A001 (`et.rows.sum`)
    x: Shaped[Array, "rows *dims"], *, where: Shaped[Array, " rows"] | None = None
) -> Shaped[Array, "*dims"]:
    """The sum over the rows of the global batch, in float32 at least.

    **Arguments:** `where` is the weight of each row, 0 on padding.

    ```python
    >>> float(et.rows.sum(jnp.array([1.0, 2.0, 4.0]), where=jnp.array([1.0, 1.0, 0.0])))
    3.0

    ```
    """
    wide = x.astype(accumulator_dtype(x.dtype)) if jnp.issubdtype(x.dtype, jnp.inexact) else x
    if where is not None:
        weight = where.astype(wide.dtype).reshape(where.shape + (1,) * (x.ndim - 1))
        # A product would let an inf or a NaN on padding through.
        wide = jnp.where(weight == 0, jnp.zeros((), wide.dtype), wide) * weight
    total = wide.sum(0)
    axes = batch_axes_here().rows
    return lax.psum(total, axes) if axes else total


def mean(
    x: Float[Array, "rows *dims"], *, where: Shaped[Array, " rows"] | None = None
) -> Float[Array, "*dims"]:
    """The mean over the rows of the global batch, in float32 at least; 0 where none counts.

    **Arguments:** `where` is the weight of each row, 0 on padding.

    ```python
    >>> float(et.rows.mean(jnp.array([1.0, 2.0, 9.0]), where=jnp.array([1.0, 1.0, 0.0])))
    1.5

    ```
    """
    ones = jnp.ones(x.shape[:1], jnp.float32) if where is None else where.astype(jnp.float32)
    count = lax.stop_gradient(sum(ones))
    total = sum(x, where=where)
    return total / jnp.where(count == 0, 1, count).astype(total.dtype)


def max(x: Shaped[Array, "rows *dims"]) -> Shaped[Array, "*dims"]:  # noqa: A001
    """The largest of each number over the rows of the global batch, with no gradient.

    ```python
    >>> float(et.rows.max(jnp.array([1.0, 4.0, 2.0])))
    4.0

    ```
    """
    largest = lax.stop_gradient(x).max(0)
    axes = batch_axes_here().rows
    return lax.pmax(largest, axes) if axes else largest


def batch_axes() -> tuple[str, ...]:
    """The mesh axes that split the batch here, for a collective of one's own: none on one device.

    ```python
    >>> et.rows.batch_axes()
    ()

    ```
    """
    return batch_axes_here().batch
