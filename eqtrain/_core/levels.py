"""The first two levels that a transform can take: a Loss, and what it contributes to a step.

Loss -> Contribute -> Step -> Program. A transform takes one level and gives the same or the next,
as a frozen object that holds what it was applied to; so a wrong order is an error before anything
is traced, and what was built can be written down again.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Shaped

from .._sharding.placement import Layout
from .contribution import COUNTING, Contribution, Objective, differentiate, inverse
from .level import Level
from .order import order_error


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """How float16 gradients are kept in range: multiplied by a scale that adapts.

    **Reference:** Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740

    **Fields:** `initial` scale; `factor` by which it grows after `period` good steps in a row, and
    shrinks after each overflow; it never falls below 1.
    """

    initial: float = 2.0**15
    factor: float = 2.0
    period: int = 2000

    def __post_init__(self) -> None:
        if not (1 <= self.initial < float("inf") and self.factor > 1 and self.period >= 1):
            raise ValueError(
                "A loss scale starts at 1 or more, and grows by a factor above 1 every `period` "
                f"steps. Got initial={self.initial}, factor={self.factor}, period={self.period}. "
                "The defaults suit float16: `LossScaling()`."
            )


class Loss(Level):
    """`(model, state, batch, key) -> (loss, state, metrics)`."""

    name: ClassVar[str] = "Loss"
    rank: ClassVar[int] = 0

    @property
    def compute_dtype(self) -> Any:
        """The dtype that the loss computes in, where a transform chose it."""
        return self.inner.compute_dtype if isinstance(self.inner, Loss) else None

    @property
    def loss_scaling(self) -> LossScaling | None:
        """How gradients are scaled, where a transform does."""
        return self.inner.loss_scaling if isinstance(self.inner, Loss) else None

    def __call__(self, model: PyTree, state: PyTree, batch: PyTree, key: Shaped[Any, "..."]) -> Any:
        return self.inner(model, state, batch, key)


class UserLoss(Loss):
    """The function that a user wrote."""

    @property
    def source(self) -> None:
        return None


class Contribute(Level):
    """`(model, state, batch, key) -> Contribution`."""

    name: ClassVar[str] = "Contribute"
    rank: ClassVar[int] = 1

    @abstractmethod
    def contribute(
        self, model: PyTree, state: PyTree, batch: PyTree, key: Any, objective: Objective
    ) -> Contribution:
        """What the level does, with the objective spelt out."""

    @property
    def compute_dtype(self) -> Any:
        return self.inner.compute_dtype

    @property
    def loss_scaling(self) -> LossScaling | None:
        return self.inner.loss_scaling

    @property
    def layout(self) -> Layout | None:
        """On which mesh it runs and how the model lies there, once `shard` is in the chain."""
        return self.inner.layout if isinstance(self.inner, Contribute) else None

    @property
    def order(self) -> str | None:
        """`"tree"` where sums are taken in a fixed order."""
        return self.inner.order if isinstance(self.inner, Contribute) else None

    def __call__(
        self,
        model: PyTree,
        state: PyTree,
        batch: PyTree,
        key: Shaped[Any, "..."],
        objective: Objective | None = None,
    ) -> Contribution:
        if objective is None:
            objective = self.objective(model, state, batch, key)
        return self.contribute(model, state, batch, key, objective)

    def objective(
        self,
        model: PyTree,
        state: PyTree,
        batch: PyTree,
        key: Shaped[Any, "..."],
        trainable: PyTree | None = None,
        scale: Float[Array, ""] | None = None,
    ) -> Objective:
        """The weights that the loss's terms have in the global batch, and what to differentiate.

        A loss of one term is divided once, afterwards. With more terms each has its own count,
        and one gradient buffer is enough only if the counts are known first. What the counts do not
        depend on is dead code in the compiled program.
        """
        if trainable is None:
            trainable = jax.tree.map(is_trainable_array, model)

        def counts() -> list[Array]:
            counted = self.contribute(model, state, batch, key, COUNTING)
            return [term.count for term in counted.loss.terms]

        if len(jax.eval_shape(counts)) == 1:
            return Objective(trainable, None, scale)
        return Objective(trainable, inverse(jnp.stack(counts())), scale)


class Lifted(Contribute):
    """A Loss where a Contribute is wanted: all of the batch at once, where it is."""

    @property
    def source(self) -> None:
        return None

    def contribute(
        self, model: PyTree, state: PyTree, batch: PyTree, key: Any, objective: Objective
    ) -> Contribution:
        return differentiate(self.inner, model, state, batch, key, objective)


def is_trainable_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def as_loss(given: Any, source: str) -> Loss:
    """`given` as a Loss, or the error that says where `source` belongs."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, Level) or not callable(given):
        raise order_error(source, (Loss,), given)
    return UserLoss(given)


def as_contribute(given: Any, source: str) -> Contribute:
    """`given` as a Contribute, a Loss being lifted to one, or the error."""
    if isinstance(given, Contribute):
        return given
    if isinstance(given, Level) and not isinstance(given, Loss) or not callable(given):
        raise order_error(source, (Loss, Contribute), given)
    return Lifted(as_loss(given, source))


def innermost_loss(level: Level) -> Loss:
    """The Loss of a chain, with what was made of it while it was one."""
    while not isinstance(level, Loss):
        level = level.inner
    return level


def pipe(loss: Callable[..., Any], *transforms: Callable[[Any], Any]) -> Any:
    """Applies transforms from the loss outward: the decorators read from the bottom up.

    **Raises:** `OrderError` where a transform cannot take what the one before it gives.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] @ model - batch["y"]) ** 2), state, {}
    >>> step = et.pipe(loss, et.accumulate(2), et.update(optax.sgd(0.1)), et.donate)
    >>> step
    et.pipe(loss, et.accumulate(2), et.update(optimizer), et.donate)

    ```
    """
    given: Any = loss
    for transform in transforms:
        given = transform(given)
    return given


def require_order(order: Any, source: str) -> None:
    """Refuses an order of sums that does not exist."""
    if order not in (None, "tree"):
        raise ValueError(
            f'The order of the sums of `{source}` must be "tree" or None. Got {order!r}. '
            'None is faster; "tree" gives the same bits on 1, 2, 4, 8, ... devices.'
        )


def require_positive(name: str, number: Any, advice: str) -> None:
    """Refuses a setting that counts something, unless it is 1 or more."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"`{name}` must be positive, an integer. Got {number!r}. {advice}.")
