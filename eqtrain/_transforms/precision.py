"""`precision`: computes in a narrow dtype, keeps parameters and sums in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._core.levels import Link, Loss, LossScaling, as_loss, once
from .._sharding.lazy import compute_in, is_shard
from .._util.paths import path_name


def precision(dtype: Any, *, loss_scaling: LossScaling | None = None) -> Callable[[Any], Loss]:
    """Casts the model and the batch to a compute dtype, inside the loss.

    Parameters, gradients, optimizer state and all sums over microbatches and devices stay float32;
    a model that `init` is given in a narrower dtype is stored in float32. The model's state and the
    batch's `weight` keep their dtypes. Compute a softmax or a large sum in float32 yourself:
    `logits.astype(jnp.float32)`.

    **Arguments:**

    - `dtype`: `"bfloat16"`, `"float16"` or `"float32"`.
    - `loss_scaling`: for float16, whose gradients underflow; `LossScaling()` unless given. A step
      whose gradients overflow is skipped and the scale reduced. Gradients are unscaled before
      anything of optax sees them.

    **Returns:** a Loss.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean(batch["x"] @ model), state, {}
    >>> bf16 = et.precision("bfloat16")(loss)

    ```
    """
    compute = jnp.dtype(dtype)
    if not jnp.issubdtype(compute, jnp.floating):
        raise ValueError(
            f"A compute dtype must be floating. Got {compute}. Use 'bfloat16' or 'float16'."
        )
    if compute == jnp.float16 and loss_scaling is None:
        loss_scaling = LossScaling()
    source = f'et.precision("{compute.name}")'

    def transform(given: Any) -> Loss:
        inner = as_loss(given, source)
        once(inner, source)

        def loss(model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
            return inner(cast(model, compute), state, _cast_batch(batch, compute), key)

        return Loss(
            chain=(*inner.chain, Link(source, Loss)),
            wrapped=given,
            function=loss,
            compute_dtype=compute,
            loss_scaling=loss_scaling,
        )

    return transform


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """Casts the floating arrays of a tree."""
    return jax.tree.map(lambda leaf: _cast(leaf, dtype), tree, is_leaf=is_shard)


def _cast(leaf: Any, dtype: Any) -> Any:
    if is_shard(leaf):
        return compute_in(leaf, dtype)
    floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(dtype) if floating else leaf


def _cast_batch(batch: PyTree, dtype: Any) -> PyTree:
    # A weight divides the loss: rounding it would change what the mean is taken over.
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf if path_name(path).split(".")[-1] == "weight" else _cast(leaf, dtype)
        ),
        batch,
    )
