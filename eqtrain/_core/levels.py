"""The four levels a transform can take, and the error for a wrong order.

Loss -> Contribute -> Step -> Program. A level is a frozen dataclass with one call signature; a
transform takes one level and gives the same or the next. Which level a value has is known when the
chain is built, so a wrong order is an error before anything is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Shaped

from .._sharding.placement import Layout
from .contribution import Contribution, Objective, count_terms, differentiate, inverse


class OrderError(TypeError):
    """A transform was given a level that it cannot take."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """What all levels share: what they wrap, and the chain of transforms that made them."""

    name: ClassVar[str]
    chain: tuple[Link, ...] = ()
    wrapped: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.wrapped


@dataclasses.dataclass(frozen=True)
class Link:
    """One transform of a chain as a user writes it, and the level that it gave."""

    source: str
    gives: type[Level]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(Level):
    """`(model, state, batch, key) -> (loss, state, metrics)`."""

    name: ClassVar[str] = "Loss"
    function: Callable[[PyTree, PyTree, PyTree, Any], Any]
    compute_dtype: Any = None
    loss_scaling: LossScaling | None = None

    def __call__(self, model: PyTree, state: PyTree, batch: PyTree, key: Shaped[Any, "..."]) -> Any:
        return self.function(model, state, batch, key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contribute(Level):
    """`(model, state, batch, key) -> Contribution`.

    `contribute` and `count` are what the level does, with the objective spelt out; `layout` says
    on which mesh and how the model lies, once `shard` is in the chain.
    """

    name: ClassVar[str] = "Contribute"
    contribute: Callable[[PyTree, PyTree, PyTree, Any, Objective], Contribution]
    count: Callable[[PyTree, PyTree, PyTree, Any], tuple[tuple[Array, ...], PyTree]]
    compute_dtype: Any = None
    loss_scaling: LossScaling | None = None
    layout: Layout | None = None
    # "tree" where sums are taken in a fixed order.
    order: str | None = None

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
        and one gradient buffer is enough only if the counts are known first.
        """
        if trainable is None:
            trainable = jax.tree.map(is_trainable_array, model)
        counts, _ = jax.eval_shape(lambda: self.count(model, state, batch, key))
        if len(counts) == 1:
            return Objective(trainable, None, scale)
        counts, _ = self.count(model, state, batch, key)
        return Objective(trainable, inverse(jnp.stack(counts)), scale)


def is_trainable_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def as_loss(given: Any, source: str) -> Loss:
    """`given` as a Loss, or the error that says where `source` belongs."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, Level) or not callable(given):
        raise order_error(source, "a Loss", given)
    return Loss(wrapped=given, function=given)


def as_contribute(given: Any, source: str) -> Contribute:
    """`given` as a Contribute, a Loss being lifted to one, or the error."""
    if isinstance(given, Contribute):
        return given
    if isinstance(given, Level) and not isinstance(given, Loss) or not callable(given):
        raise order_error(source, "a Loss or Contribute", given)
    loss = as_loss(given, source)

    def contribute(
        model: PyTree, state: PyTree, batch: PyTree, key: Any, objective: Objective
    ) -> Contribution:
        return differentiate(loss, model, state, batch, key, objective)

    def count(model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
        return count_terms(loss, model, state, batch, key)

    return Contribute(
        chain=loss.chain,
        wrapped=loss,
        contribute=contribute,
        count=count,
        compute_dtype=loss.compute_dtype,
        loss_scaling=loss.loss_scaling,
    )


def require_order(order: Any, source: str) -> None:
    if order not in (None, "tree"):
        raise ValueError(
            f'The order of the sums of `{source}` must be "tree" or None. Got {order!r}. '
            'None is faster; "tree" gives the same bits on 1, 2, 4, 8, ... devices.'
        )


def once(given: Level, source: str) -> None:
    """Refuses a transform that is in the chain already."""
    verb = source.split("(")[0]
    for link in given.chain:
        if link.source.split("(")[0] == verb:
            raise OrderError(
                f"`{verb}` may occur once in a chain. Got `{source}` after `{link.source}`, in "
                f"{written(given.chain)}. Remove one of the two."
            )


# How far from the loss each level is; nothing takes the last ones.
_RANK = {"Loss": 0, "Contribute": 1, "Step": 2, "Program": 3, "Evaluation": 3}


def order_error(source: str, takes: str, given: Any) -> OrderError:
    """The error for `source` applied to the wrong level, with the line to write instead.

    `takes` names the level, or two joined by "or", with its article.
    """
    if not isinstance(given, Level) and callable(given):
        given = Loss(wrapped=given, function=given)
    if not isinstance(given, Level):
        return OrderError(
            f"`{source}` takes {takes}. Got {type(given).__name__}, which is no function. "
            f"Write `et.pipe(loss, ..., {source})`, or `@{source}` above the function."
        )
    article = "an" if given.name[0] in "AEIOU" else "a"
    made = f", made by {written(given.chain)}" if given.chain else ""
    rule = f"`{source}` takes {takes}. Got {article} {given.name}{made}."
    accepted = [_RANK[name] for name in takes.removeprefix("a ").split(" or ")]
    links = [link.source for link in given.chain]
    if _RANK[given.name] < min(accepted):
        right = [*links, "et.update(optimizer)", source]
        return OrderError(
            f"{rule} `et.update(optimizer)` makes a Step of it. Write {_pipeline(right)}, "
            f"or as decorators `@{source}` above `@et.update(optimizer)`."
        )
    # The first link that left the levels which this transform takes is the line to move before.
    index, link = next(
        (index, link)
        for index, link in enumerate(given.chain)
        if _RANK[link.gives.name] > max(accepted)
    )
    if link.source == "et.evaluate" or {link.source, source} <= {"et.jit", "et.donate"}:
        kept = [*links[:index], source]
        return OrderError(
            f"{rule} A chain ends with one of the two. Remove `{link.source}`: {_pipeline(kept)}."
            if _RANK["Step"] in accepted and link.source != "et.evaluate"
            else f"{rule} What measures and what trains are two chains. Start from the loss again, "
            f"without `{link.source}`."
        )
    if source == "et.evaluate":
        return OrderError(
            f"{rule} What measures and what trains are two chains. End one before "
            f"`{link.source}`: {_pipeline([*links[:index], source])}."
        )
    right = [*links[:index], source, *links[index:]]
    return OrderError(
        f"{rule} Move it before `{link.source}`: {_pipeline(right)}, "
        f"or as decorators `@{source}` below `@{link.source}`."
    )


def written(chain: tuple[Link, ...]) -> str:
    """A chain as the pipeline that makes it."""
    return _pipeline([link.source for link in chain])


def _pipeline(sources: list[str]) -> str:
    return f"`et.pipe({', '.join(['loss', *sources])})`"


def pipe(loss: Callable[..., Any], *transforms: Callable[[Any], Any]) -> Any:
    """Applies transforms from the loss outward: the decorators read from the bottom up.

    **Raises:** `OrderError` where a transform cannot take what the one before it gives.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] @ model - batch["y"]) ** 2), state, {}
    >>> step = et.pipe(loss, et.accumulate(2), et.update(optax.sgd(0.1)), et.donate)

    ```
    """
    given: Any = loss
    for transform in transforms:
        given = transform(given)
    return given


def require_positive(name: str, number: Any, advice: str) -> None:
    """Refuses a setting that counts something, unless it is 1 or more."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"`{name}` must be positive, an integer. Got {number!r}. {advice}.")
