"""`remat`: recomputes activations in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._core.levels import Loss, as_loss
from .._util.text import Code, call, name_of


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
    return Remat(loss, policy) if loss is not None else lambda given: Remat(given, policy)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Remat(Loss):
    """A loss whose activations are made again in the backward pass."""

    policy: Callable[..., bool] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", as_loss(self.inner, self.source))

    @property
    def source(self) -> str:
        return call("remat", policy=None if self.policy is None else _text_of(self.policy))

    def __call__(self, model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
        return eqx.filter_checkpoint(self.inner.__call__, policy=self.policy)(
            model, state, batch, key
        )


def _text_of(policy: Callable[..., bool]) -> Code:
    """JAX's policies are objects without a name of their own."""
    known = vars(jax.checkpoint_policies).items()
    names = [f"jax.checkpoint_policies.{name}" for name, value in known if value is policy]
    return Code(names[0] if names else name_of(policy))
