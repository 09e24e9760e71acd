"""`remat`: recomputes activations in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from .._core.levels import Link, Loss, as_loss


def remat(
    loss: Callable[..., Any] | None = None, *, policy: Callable[..., bool] | None = None
) -> Any:
    """Stores less for the backward pass of a loss, and computes it again there.

    Around a whole loss with no policy this saves little by itself, since the backward pass begins
    by making all activations again; choose what to keep by `policy`, or put `jax.checkpoint` around
    the blocks of the model.

    **Arguments:**

    - `policy`: one of `jax.checkpoint_policies`; nothing is stored unless given.

    **Returns:** a Loss. Used bare (`@et.remat`) or with arguments (`@et.remat(policy=...)`).

    ```python
    >>> @et.remat(policy=jax.checkpoint_policies.dots_saveable)
    ... def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] @ model) ** 2), state, {}

    ```
    """
    source = "et.remat" if policy is None else "et.remat(policy=...)"

    def transform(given: Any) -> Loss:
        inner = as_loss(given, source)

        def checkpointed(model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
            return eqx.filter_checkpoint(inner.function, policy=policy)(model, state, batch, key)

        return Loss(
            chain=(*inner.chain, Link(source, Loss)),
            wrapped=given,
            function=checkpointed,
            compute_dtype=inner.compute_dtype,
            loss_scaling=inner.loss_scaling,
        )

    return transform if loss is None else transform(loss)
