"""`precision`: computes in a narrow dtype, keeps parameters and sums in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._core.levels import Loss, LossScaling, as_loss
from .._core.order import require_once
from .._sharding.lazy import compute_in, is_shard
from .._util.paths import path_name
from .._util.text import call, made_by


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
    return lambda given: Precision(given, compute, loss_scaling)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Precision(Loss):
    """A loss that computes in another dtype than its parameters have."""

    dtype: Any
    scaling: LossScaling | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", as_loss(self.inner, self.source))
        require_once(self)

    @property
    def source(self) -> str:
        usual = self.scaling is None or self.scaling == LossScaling()
        scaling = None if usual else made_by(self.scaling)
        return call("precision", self.dtype.name, loss_scaling=scaling)

    @property
    def compute_dtype(self) -> Any:
        return self.dtype

    @property
    def loss_scaling(self) -> LossScaling | None:
        return self.scaling

    def __call__(self, model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
        model, batch = cast(model, self.dtype), _cast_batch(batch, self.dtype)
        return self.inner(model, state, batch, key)


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
