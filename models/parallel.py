"""Tensor-parallel layers: each may split its weight over a mesh axis, and its shape says so.

A layer knows how large its weight is as a whole. Where it holds less, it is one device's shard, and
the code below places its collectives exactly there; on one device, or where the weight is
replicated, the same code runs with none. A pair of layers costs one collective in the forward pass
and one in the backward pass:

    y = row(activation(column(x)))

Plain, what is outside the pair is equal on all devices along the axis, and `row` sums what they
computed. In the sequence-parallel form each device has its part of the sequence there, dim -2,
which `enter` gathers: as many bytes travel, and norms and residuals are neither stored nor computed
twice.

Gradients need no more than that. Each device differentiates the sum of all devices' losses (see
`et.shard`), in which the transpose of a psum is a psum, of a gather a psum_scatter; and what is
whole on every device, such as the scale of a norm, is summed at the end of the step.

**Reference:** Shoeybi et al. 2019 (Megatron-LM), https://arxiv.org/abs/1909.08053; for the
sequence-parallel form Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

import abc
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

import eqtrain as et

from .layers import _over_last_dim


class AbstractSplit(eqx.Module):
    """A layer whose weight may be split over a mesh axis."""

    axis: eqx.AbstractVar[str | None]

    @property
    @abc.abstractmethod
    def is_split(self) -> bool:
        """Whether this device has a shard of the weight and not the whole."""


def enter(
    x: Float[Array, "*batch seq dim"], layer: AbstractSplit, *, sequence: bool = False
) -> Float[Array, "*batch whole dim"]:
    """Prepares activations for column-split layers; once for all those that share them.

    Plain, `x` comes back as it is. In the sequence-parallel form the sequence is gathered, and its
    gradient is summed and scattered.

    **Arguments:**

    - `layer`: one of the layers. If it is not split, `x` comes back as it is.
    - `sequence`: `x` is this device's part of the sequence.

    ```python
    >>> enter(jnp.ones((2, 5, 4)), ColumnLinear(4, 8, key=jax.random.key(0))).shape
    (2, 5, 4)

    ```
    """
    if layer.axis is None or not (sequence and layer.is_split):
        return x
    # A part of the sequence before, all of it after; its transpose is a psum_scatter.
    return lax.all_gather(x, layer.axis, axis=x.ndim - 2, tiled=True)


def leave(
    x: Float[Array, "*batch whole dim"], layer: AbstractSplit, *, sequence: bool = False
) -> Float[Array, "*batch seq dim"]:
    """Sums what a row-split layer gave over its axis, in the dtype of `x`.

    Plain, the sum is equal on all devices. In the sequence-parallel form each device keeps its part
    of the sequence.

    **Arguments:**

    - `layer`: the layer that gave `x`. If it is not split, `x` comes back as it is.
    - `sequence`: keeps this device's part of the sequence.

    **Raises:** `ValueError` for a sequence that the devices along the axis do not divide.

    ```python
    >>> leave(jnp.ones((2, 5, 4)), RowLinear(8, 4, key=jax.random.key(0))).shape
    (2, 5, 4)

    ```
    """
    axis = layer.axis
    if axis is None or not layer.is_split:
        return x
    if not sequence:
        # Unreduced before, equal along `axis` after; and so is its gradient.
        return lax.psum(x, axis)
    if x.shape[-2] % lax.axis_size(axis):
        raise ValueError(
            "The sequence-parallel form must give every device along the axis an equal part of the "
            f"sequence. Got length {x.shape[-2]} and {lax.axis_size(axis)} devices along `{axis}`. "
            "Pad the sequence, or use the plain form."
        )
    # Unreduced before, a part of the sequence after.
    return lax.psum_scatter(x, axis, scatter_dimension=x.ndim - 2, tiled=True)


class ColumnLinear(AbstractSplit):
    """Computes `x @ weight + bias` where the weight may be split by columns, its outputs.

    **Arguments:**

    - `axis`: the mesh axis over which the weight, and the bias with it, may be split.
    - `deviation`: of the normal distribution that the weight starts from.

    ```python
    >>> ColumnLinear(4, 8, key=jax.random.key(0))(jnp.ones((2, 5, 4))).shape
    (2, 5, 8)

    ```
    """

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"] | None
    num_out: int = eqx.field(static=True)
    axis: str | None = eqx.field(static=True)

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        bias: bool = False,
        axis: str | None = "model",
        deviation: float = 0.02,
        key: PRNGKeyArray,
    ):
        self.weight = deviation * jax.random.normal(key, (num_in, num_out), jnp.float32)
        self.bias = jnp.zeros((num_out,), jnp.float32) if bias else None
        self.num_out = num_out
        self.axis = axis

    @property
    def is_split(self) -> bool:
        return self.axis is not None and self.weight.shape[-1] != self.num_out

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Takes what `enter` gave; it comes out split along the last dim if the weight is.

        **Raises:** `ValueError` for a weight whose shards do not add up to the whole.
        """
        _require_whole(self, self.weight.shape[-1], self.num_out, "columns")
        y = et.matmul(x, self.weight)
        return y if self.bias is None else y + _over_last_dim(self.bias, y.ndim)


class RowLinear(AbstractSplit):
    """Computes `leave(x @ weight) + bias` where the weight may be split by rows, its inputs.

    **Arguments:**

    - `axis`: the mesh axis over which the weight may be split. The bias never is: it is added once,
      after the sum.
    - `sequence`: gives each device its part of the sequence.
    - `deviation`: of the normal distribution that the weight starts from.

    ```python
    >>> RowLinear(8, 4, bias=True, key=jax.random.key(0))(jnp.ones((2, 5, 8))).shape
    (2, 5, 4)

    ```
    """

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"] | None
    num_in: int = eqx.field(static=True)
    axis: str | None = eqx.field(static=True)
    sequence: bool = eqx.field(static=True)

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        bias: bool = False,
        axis: str | None = "model",
        sequence: bool = False,
        deviation: float = 0.02,
        key: PRNGKeyArray,
    ):
        self.weight = deviation * jax.random.normal(key, (num_in, num_out), jnp.float32)
        self.bias = jnp.zeros((num_out,), jnp.float32) if bias else None
        self.num_in = num_in
        self.axis = axis
        self.sequence = sequence

    @property
    def is_split(self) -> bool:
        return self.axis is not None and self.weight.shape[-2] != self.num_in

    def __call__(self, x: Float[Array, "*batch whole in"]) -> Float[Array, "*batch seq out"]:
        """Takes what a ColumnLinear gave, split along the last dim if the weight is.

        **Raises:** `ValueError` for a weight whose shards do not add up to the whole; and see
        `leave`.
        """
        _require_whole(self, self.weight.shape[-2], self.num_in, "rows")
        y = leave(et.matmul(x, self.weight), self, sequence=self.sequence)
        if self.bias is None:
            return y
        return y + _over_last_dim(self.bias.astype(y.dtype), y.ndim)


class Embedding(AbstractSplit):
    """Looks up a vector for each token, in a table that may be split by tokens.

    A device looks up the tokens that it has rows for, and 0 for the others, before the sum. So a
    token outside the vocabulary gets 0, on one device too.

    **Arguments:**

    - `axis`: the mesh axis over which the table may be split.
    - `sequence`: gives each device its part of the sequence.
    - `deviation`: of the normal distribution that the table starts from.

    ```python
    >>> Embedding(10, 4, key=jax.random.key(0))(jnp.array([[1, 9, 10]])).shape
    (1, 3, 4)

    ```
    """

    weight: Float[Array, "vocab dim"]
    vocab_size: int = eqx.field(static=True)
    axis: str | None = eqx.field(static=True)
    sequence: bool = eqx.field(static=True)

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        axis: str | None = "model",
        sequence: bool = False,
        deviation: float = 0.02,
        key: PRNGKeyArray,
    ):
        self.weight = deviation * jax.random.normal(key, (vocab_size, dim), jnp.float32)
        self.vocab_size = vocab_size
        self.axis = axis
        self.sequence = sequence

    @property
    def is_split(self) -> bool:
        return self.axis is not None and self.weight.shape[-2] != self.vocab_size

    def __call__(self, tokens: Int[Array, "batch whole"]) -> Float[Array, "batch seq dim"]:
        """Takes whole sequences of tokens, also in the sequence-parallel form.

        **Raises:** `ValueError` for a weight whose rows do not add up to the vocabulary; and see
        `leave`.
        """
        local = self.weight.shape[0]
        _require_whole(self, local, self.vocab_size, "rows")
        first = lax.axis_index(self.axis) * local if self.axis and self.is_split else 0
        index = tokens.astype(jnp.int32) - first
        mine = (index >= 0) & (index < local)
        # In float32, since the gradient of a frequent token is a sum of very many.
        rows = self.weight.astype(jnp.float32)[jnp.where(mine, index, 0)]
        rows = jnp.where(mine[..., None], rows, 0.0).astype(self.weight.dtype)
        return leave(rows, self, sequence=self.sequence)


def _require_whole(layer: AbstractSplit, local: int, total: int, what: str) -> None:
    """Refuses a weight that is neither whole nor one of equal shards along the layer's axis."""
    # Outside a mesh a weight that is no whole can only be a mistake: it has no axis to lie along.
    axis = layer.axis
    known = axis in jax.sharding.get_abstract_mesh().manual_axes
    devices = lax.axis_size(axis) if axis is not None and known else 1
    if local not in (total, total // devices if total % devices == 0 else total):
        raise ValueError(
            f"The {what} of a weight on all devices along its axis must add up to the whole. "
            f"Got {local} {what} on each of {devices} devices along `{axis}`, where the whole has "
            f"{total}. Split that dim over its axis alone, and keep the axis out of `batch=`."
        )


def vocab_parallel_cross_entropy(
    logits: Float[Array, "*batch vocab"],
    labels: Int[Array, "*batch"],
    vocab_size: int,
    axis: str | None = "model",
) -> Float32[Array, "*batch"]:
    """The negative log-likelihood of each label, where the vocabulary may be split over `axis`.

    Computed in float32. No device sees the logits of another: what travels is three numbers a
    token, in the forward pass alone.

    A label outside the vocabulary has NaN as its nll, and gives no gradient. So -100 on padding is
    fine where the mean leaves it out, as `et.mean(nll, where=weight)` does, and shows elsewhere.

    ```python
    >>> nll = vocab_parallel_cross_entropy(jnp.zeros((2, 4)), jnp.array([3, 4]), 4)
    >>> print(f"{nll[0]:.4f} {nll[1]:.4f}")
    1.3863 nan

    ```
    """
    logits, labels = logits.astype(jnp.float32), labels.astype(jnp.int32)
    split = axis is not None and logits.shape[-1] != vocab_size
    first = lax.axis_index(axis) * logits.shape[-1] if split else 0
    largest = lax.stop_gradient(logits.max(-1))
    if split:
        largest = lax.pmax(largest, axis)
    logits = logits - largest[..., None]
    # Compared and not indexed: the backward pass is then elementwise, without a scatter.
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = jnp.where(columns == (labels - first)[..., None], logits, 0.0).sum(-1)
    normaliser = jnp.exp(logits).sum(-1)
    if axis is not None and split:
        both: Any = _sum_of_parts(jnp.stack((normaliser, chosen)), axis)
        normaliser, chosen = both[0], both[1]
    inside = (labels >= 0) & (labels < vocab_size)
    return jnp.where(inside, jnp.log(normaliser) - chosen, jnp.nan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_of_parts(x: Array, axis: str) -> Array:
    """A psum to the loss itself, which every device along `axis` computes alike from here on.

    So all have the same gradient, and the psum that is its transpose is a product.
    """
    # Each device's part of the vocabulary before, equal along `axis` after.
    return lax.psum(x, axis)


def _sum_forward(x: Array, axis: str) -> tuple[Array, None]:
    return lax.psum(x, axis), None


def _sum_backward(axis: str, _: None, grad: Array) -> tuple[Array]:
    return (grad * lax.axis_size(axis),)


_sum_of_parts.defvjp(_sum_forward, _sum_backward)
