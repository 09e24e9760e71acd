"""`update`: turns the sum of all contributions into the next parameters."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, PyTree

from .._core.contribution import Contribution, Objective, mean_grads
from .._core.levels import LossScaling, as_contribute, is_trainable_array
from .._core.loss import batch_size, is_example_array
from .._core.loss_scale import first_scale, next_scale
from .._core.step import Outcome, Step, Take, View, branch, keep
from .._jaxpr.jaxprs import primitives
from .._metrics import Combination, Mean
from .._sharding.ordered import fence
from .._sharding.placement import Layout, split_state
from .._state.train_state import Parts, scalars_as_arrays
from .._util.paths import named_leaves
from .._util.text import Code, call, name_of
from ..random import example_keys
from .precision import cast

# A function from the model to a pytree of booleans, or such a pytree, or None.
Choice = Any


def update(
    optimizer: optax.GradientTransformation,
    *,
    trainable: Choice = None,
    shard_state: str | None = None,
) -> Callable[[Any], Step]:
    """Divides the summed gradients by the global count, once, and hands them to an optimizer.

    The optimizer sees the mean gradients of the global batch, in the global view: a norm is the
    norm of the whole tree whatever the mesh. It is given the loss too, for those that take
    `value=`. Gradients of complex leaves come conjugated, as optax expects: against
    `jax.grad`'s own the loss does not fall.

    **Arguments:**

    - `optimizer`: any of optax's, or a chain of them.
    - `trainable`: which leaves are trained: a function from the model to a pytree of booleans, such
      as `et.matching("head")`, or such a pytree. Every floating array unless given. The others get
      no gradients and no moments, and have no share in the norm.
    - `shard_state`: an axis that splits the batch, over which the optimizer's state is split beside
      what splits the parameters (ZeRO-1). Gradients are scattered over it, each device updates its
      part, and the new parameters are gathered. It takes `et.shard` in the chain.

    **Returns:** a Step, whose metrics are the loss's with `loss` and `grad_norm` beside them.

    **Raises:** `ValueError` if nothing is trainable, and for `shard_state` without `et.shard`;
    `TypeError` for an optimizer that is none.

    **Reference:** Rajbhandari et al. 2020 (ZeRO), https://arxiv.org/abs/1910.02054

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] @ model - batch["y"]) ** 2), state, {}
    >>> step = et.update(optax.adamw(1e-3, mask=et.matching("weight")))(loss)

    ```
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            "`update` takes an optimizer of optax. "
            f"Got {type(optimizer).__name__}. Write `et.update(optax.adamw(3e-4))`."
        )
    return lambda given: Update(given, optimizer, trainable, shard_state)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Update(Step):
    """A contribution, and what an optimizer makes of it."""

    optimizer: optax.GradientTransformation
    trainable: Choice
    shard_state: str | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", as_contribute(self.inner, self.source))
        _require_axis(self.inner.layout, self.shard_state)

    @property
    def source(self) -> str:
        # An optimizer of optax is two functions, which do not say what it was made of.
        trainable = None if self.trainable is None else Code(_text_of_choice(self.trainable))
        optimizer = Code("optimizer")
        return call("update", optimizer, trainable=trainable, shard_state=self.shard_state)

    @property
    def layout(self) -> Layout | None:
        return self.inner.layout

    @property
    def state_layout(self) -> Layout | None:
        layout = self.layout
        if layout is None or self.shard_state is None:
            return layout
        return dataclasses.replace(
            layout, placement=split_state(layout.placement, self.shard_state)
        )

    def is_trainable(self, model: PyTree) -> PyTree:
        return _trainable_mask(model, self.trainable)

    @functools.cached_property
    def _compute(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """The optimizer's update, which is traced once, though it stands in several branches."""
        optimizer = optax.with_extra_args_support(self.optimizer)
        return jax.jit(_as_optax_promotes(functools.partial(_updated, optimizer)))

    def begin(self, model: PyTree, state: PyTree, key: Array) -> Parts:
        if self.inner.compute_dtype is not None:
            model = cast(model, jnp.float32)
        params = eqx.filter(model, self.is_trainable(model))
        _warn_of_narrow(params)
        extra = {}
        if self.inner.loss_scaling is not None:
            extra["loss_scale"] = first_scale(self.inner.loss_scaling)
        return Parts(
            model=model,
            state=state,
            opt_state=scalars_as_arrays(_as_optax_promotes(self.optimizer.init)(params)),
            key=key,
            step=jnp.zeros((), jnp.int32),
            extra=extra,
        )

    def advance(self, parts: Parts, batch: PyTree, view: View) -> tuple[Take, Outcome]:
        mask = self.is_trainable(parts.model)
        batch, keys = _examples(parts, batch, view)
        objective = self._objective(parts, batch, keys, mask, view)
        total = self.inner.contribute(parts.model, parts.state, batch, keys, objective)
        sums, norm, mean = self._norm(total, objective, parts.step)
        old = eqx.filter(parts.model, mask)

        def updated() -> tuple[PyTree, PyTree]:
            return self._compute(mean(sums), parts.opt_state, old, total.loss.value)

        if _is_costly(updated):  # too dear to do twice, so that both old and new are held
            once = updated()
            updated = lambda: once  # noqa: E731

        def take() -> Parts:
            params, opt_state = updated()
            return Parts(
                model=eqx.combine(self._as_it_lies(params, parts.model, objective), parts.model),
                state=total.state,
                opt_state=opt_state,
                key=parts.key,
                step=parts.step + 1,
                extra=parts.extra,
            )

        def stays_finite() -> Bool[Array, ""]:
            return branch(
                jnp.isfinite(norm),
                lambda: _all_stay_finite(updated()[0], old),
                lambda: jnp.zeros((), bool),
            )

        metrics = {
            "loss": _as_mean(total.loss),
            "grad_norm": Mean(norm, jnp.ones_like(norm)),
            **total.metrics,
        }
        outcome = Outcome(metrics, total.loss.value, norm, stays_finite, findings=total.findings)
        if self.inner.loss_scaling is None:
            return take, outcome
        return _scaled(self.inner.loss_scaling, parts, take, outcome)

    def _objective(
        self, parts: Parts, batch: PyTree, keys: Array, mask: PyTree, view: View
    ) -> Objective:
        scaling = self.inner.loss_scaling
        scale = None if scaling is None else parts.extra["loss_scale"]["scale"]
        objective = self.inner.objective(parts.model, parts.state, batch, keys, mask, scale)
        if scale is not None and objective.weights is None:
            # A scale is meant for the gradient of a mean; a total's is some power of two larger.
            total_scale = scale * 2.0 ** -math.floor(math.log2(batch_size(batch)))
            objective = dataclasses.replace(objective, scale=total_scale)
        grad_specs = None
        if self.shard_state is not None and self.state_layout is not None:
            grad_specs = _trained_specs(self.state_layout, parts.model, mask)
        return dataclasses.replace(
            objective, checks=view.checks, watch=view.watch, grad_specs=grad_specs
        )

    def _norm(
        self, total: Contribution, objective: Objective, step: Array
    ) -> tuple[PyTree, Float[Array, ""], Callable[[PyTree], PyTree]]:
        """The summed gradients, the norm of their mean, and what makes that mean of them."""

        def mean(sums: PyTree) -> PyTree:
            grads = mean_grads(dataclasses.replace(total, grads=sums), objective)
            return fence(grads, step) if self.inner.order == "tree" else grads

        # The norm is known before an update begins, or XLA fuses the two, and takes three times as
        # long over both. Only sums are held meanwhile: what divides them is fused with what reads
        # them.
        norm = optax.tree.norm(mean(total.grads))
        sums, norm = jax.lax.optimization_barrier((total.grads, norm))
        return sums, norm, mean

    def _as_it_lies(self, params: PyTree, model: PyTree, objective: Objective) -> PyTree:
        """The new parameters, gathered where each device updated its part of them."""
        if objective.grad_specs is None or self.state_layout is None or self.layout is None:
            return params
        params = self.state_layout.constrain(params, objective.grad_specs)
        specs = _trained_specs(self.layout, model, self.is_trainable(model))
        return self.layout.constrain(params, specs)


def _text_of_choice(trainable: Choice) -> str:
    return name_of(trainable) if callable(trainable) else "tree"


def _examples(parts: Parts, batch: PyTree, view: View) -> tuple[PyTree, Array]:
    """The batch with the rows that are looked at, and the key of each."""
    examples = jnp.arange(batch_size(batch), dtype=jnp.int32)
    if view.rows is not None:
        examples = view.rows
        batch = jax.tree.map(lambda x: x[examples] if is_example_array(x) else x, batch)
    return batch, example_keys(parts.key, parts.step, examples)


def _scaled(
    scaling: LossScaling, parts: Parts, take: Take, outcome: Outcome
) -> tuple[Take, Outcome]:
    """A step that is skipped where its gradients overflow, and learns its next scale from that."""
    before, norm = parts.extra["loss_scale"], outcome.grad_norm
    scale, after = before["scale"], next_scale(scaling, before, jnp.isfinite(norm))

    def take_scaled() -> Parts:
        new = keep(jnp.isfinite(norm), take, parts)
        return dataclasses.replace(new, extra={**new.extra, "loss_scale": after})

    metrics = {**outcome.metrics, "loss_scale": Mean(scale, jnp.ones_like(scale))}
    return take_scaled, dataclasses.replace(
        outcome,
        metrics=metrics,
        # At a scale of 1 there is nothing left to reduce: the gradient itself is not finite.
        overflow=~jnp.isfinite(norm) & (scale > 1),
        loss_scale=after,
    )


def _require_axis(layout: Layout | None, shard_state: str | None) -> None:
    """Refuses an axis over which the optimizer's state cannot be split."""
    if shard_state is None:
        return
    if layout is None:
        raise ValueError(
            "`shard_state` splits the optimizer's state over an axis of a mesh. "
            f"Got {shard_state!r} and a chain without a mesh. "
            "Put `et.shard(mesh, ...)` before `et.update`."
        )
    if shard_state not in layout.batch_axes:
        raise ValueError(
            "`shard_state` must be an axis that splits the batch, over which gradients are summed. "
            f"Got {shard_state!r}, where the batch is split over {layout.batch_axes}. "
            "Name one of those."
        )


def _trained_specs(layout: Layout, model: PyTree, mask: PyTree) -> tuple[P, ...]:
    """The spec of each trainable leaf, in order."""
    specs = layout.specs_by_name(dict(named_leaves(eqx.filter(model, eqx.is_array))))
    return tuple(specs[name] for name, _ in named_leaves(eqx.filter(model, mask)))


def _updated(
    optimizer: Any, grads: PyTree, opt_state: PyTree, params: PyTree, loss: Float[Array, ""]
) -> tuple[PyTree, PyTree]:
    """The next parameters and the next state of the optimizer."""
    # Of a complex leaf `jax.grad` gives the conjugate of the direction in which the loss grows.
    grads = jax.tree.map(lambda g, p: jnp.conj(g).astype(p.dtype), grads, params)
    updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
    return jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates), opt_state


def _is_costly(compute: Callable[[], Any]) -> bool:
    """Whether an update does more than read and write: products of matrices, or loops."""
    jaxpr = jax.make_jaxpr(compute)()
    return not primitives(jaxpr).isdisjoint(("dot_general", "scan", "while"))


def _all_stay_finite(new: PyTree, old: PyTree) -> Bool[Array, ""]:
    """Whether every number that was finite still is."""
    each = jax.tree.map(lambda a, b: (jnp.isfinite(a) | ~jnp.isfinite(b)).all(), new, old)
    return functools.reduce(jnp.logical_and, jax.tree.leaves(each))


def _as_mean(loss: Combination) -> Mean | Combination:
    return loss.terms[0] if len(loss.terms) == 1 else loss


def _trainable_mask(model: PyTree, trainable: Choice) -> PyTree:
    """Which leaves are trained, as a pytree of booleans like the model."""
    floating = jax.tree.map(is_trainable_array, model)
    if trainable is None:
        mask = floating
    else:
        params = eqx.filter(model, floating)
        # A pytree of booleans that is an Equinox module may be callable too.
        is_tree = any(isinstance(leaf, bool) for leaf in jax.tree.leaves(trainable))
        full = jax.tree.broadcast(trainable if is_tree else trainable(params), params)
        chosen_leaves = iter(jax.tree.leaves(full))
        mask = jax.tree.map(lambda inexact: inexact and bool(next(chosen_leaves)), floating)
    if not any(jax.tree.leaves(mask)):
        raise ValueError(
            "Something must be trainable. Got a model with no floating array that is: "
            f"{', '.join(name for name, _ in named_leaves(eqx.filter(model, eqx.is_array)))}. "
            "Change `trainable=`, or make the parameters floating arrays."
        )
    return mask


def _as_optax_promotes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets optax mix its integer counts with floats, also where the user is strict elsewhere."""

    def promoted(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoted


def _warn_of_narrow(params: PyTree) -> None:
    narrow = [name for name, leaf in named_leaves(params) if leaf.dtype.itemsize < 4]
    if narrow:
        warnings.warn(
            "Parameters and moments in a dtype narrower than float32 lose small updates: bfloat16 "
            f"keeps 8 bits. Got {', '.join(narrow[:5])}. Put `et.precision('bfloat16')` in the "
            "chain: it computes in bfloat16 and keeps float32 parameters.",
            stacklevel=2,
        )
