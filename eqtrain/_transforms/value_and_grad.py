"""`value_and_grad`: the kit's gradients in a training step that somebody wrote by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._core.contribution import mean_grads
from .._core.levels import Contribute, as_contribute, pipe
from .._core.loss import batch_size
from ..random import example_keys


def value_and_grad(
    loss: Callable[[PyTree, PyTree], Any], *transforms: Callable[[Any], Any]
) -> Callable[[PyTree, PyTree], tuple[Float[Array, ""], PyTree]]:
    """Differentiates a loss `(model, batch) -> loss`, accumulated or sharded as the transforms say.

    Stands where `eqx.filter_value_and_grad(loss)` did, and gives what that gives for the whole
    global batch on one device: the mean loss, and its gradient with None where a leaf is no
    floating array. That of a complex leaf is as `jax.grad`'s: conjugate it before it goes to optax.
    A model with state or randomness takes a loss of four arguments and `et.pipe`.

    **Arguments:**

    - `loss`: returns what a Loss may: a scalar, `et.mean(...)`, or a combination of means.
    - `transforms`: any that give a Loss or a Contribute, such as `et.accumulate` and `et.shard`.

    **Raises:** `OrderError` if a transform is among them that gives a later level; `ValueError`
    for loss scaling, whose scale only a TrainState can keep.

    ```python
    >>> def loss(model, batch):
    ...     return ((batch["x"] * model) ** 2).mean()
    >>> sharded = et.shard(et.mesh(data=-1), batch=P("data"))
    >>> value, grads = et.value_and_grad(loss, sharded)(jnp.array(2.0), {"x": jnp.full((8,), 3.0)})
    >>> float(value), float(grads)
    (36.0, 36.0)

    ```
    """

    def whole(model: PyTree, state: None, batch: PyTree, key: Any) -> tuple[Any, None, dict]:
        return loss(model, batch), state, {}

    contribute: Contribute = as_contribute(pipe(whole, *transforms), "et.value_and_grad(loss, ...)")
    if contribute.loss_scaling is not None:
        raise ValueError(
            "A loss scale lives in the TrainState, which `value_and_grad` does not have. "
            "Got `et.precision` with loss scaling. Use bfloat16, or `et.update`."
        )

    def differentiated(model: PyTree, batch: PyTree) -> tuple[Float[Array, ""], PyTree]:
        # The loss takes no key; the chain cuts and shards one for every example all the same.
        index = jnp.arange(batch_size(batch), dtype=jnp.int32)
        keys = example_keys(jax.random.key(0), 0, index)
        objective = contribute.objective(model, None, batch, keys)
        total = contribute.contribute(model, None, batch, keys, objective)
        return total.loss.value, mean_grads(total, objective)

    return differentiated
