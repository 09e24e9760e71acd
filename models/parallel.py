"""Tensor-parallel layers: each splits its weight over a mesh axis, or not, and knows from its type.

Inside `shard_map` with `check_vma=True`, a weight that is split over an axis varies over it. So the
code below places its collectives exactly where a weight is a shard; on one device, or where the
weight is replicated, the same code runs with none. A pair of layers costs one collective before the
first and one after the second, in the forward pass and again in the backward pass:

    y = leave(row(activation(column(enter(x)))))

Plain, what is outside the pair is equal on all devices along the axis. In the sequence-parallel
form each device has its part of the sequence there, dim -2: as many bytes travel, and norms and
residuals are neither stored nor computed twice.

**Reference:** Shoeybi et al. 2019 (Megatron-LM), https://arxiv.org/abs/1909.08053; for the
sequence-parallel form Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray, PyTree

import eqtrain as et

from .layers import _over_last_dim, _varying


def is_split(weight: Array, axis: str | None) -> bool:
    """Whether `weight` is one device's shard of a weight that is split over `axis`.

    ```python
    >>> is_split(jnp.ones((2, 3)), "model")
    False

    ```
    """
    return axis is not None and axis in _varying(weight)


def enter(
    x: Float[Array, "*batch seq dim"],
    weight: Array,
    axis: str | None = "model",
    *,
    sequence: bool = False,
) -> Float[Array, "*batch whole dim"]:
    """Prepares activations for column-split weights; once for all those that share them.

    Plain, it casts `x` to varying, and the gradient is summed over `axis`: Megatron's f. In the
    sequence-parallel form it gathers the sequence, and the gradient is summed and scattered.

    **Arguments:**

    - `weight`: of one of the layers. If it is no shard, `x` comes back as it is.
    - `sequence`: `x` is this device's part of the sequence.

    **Raises:** `ValueError` for an `x` that is a part of the sequence where it should be whole, or
    the reverse.

    ```python
    >>> enter(jnp.ones((2, 5, 4)), jnp.ones((4, 8))).shape
    (2, 5, 4)

    ```
    """
    split = is_split(weight, axis)
    if is_split(x, axis) != (split and sequence):
        raise ValueError(
            "Activations must vary over the axis of a tensor-parallel layer if they are parts of a "
            "sequence, and only then; and then its weight is split. "
            f"Got activations {jax.typeof(x)} and a weight {jax.typeof(weight)} along `{axis}`, "
            f"with sequence={sequence}. Split all layers of the model over `{axis}` or none, and "
            f"keep `{axis}` out of `batch=`; where it does split the batch, pass `axis=None`."
        )
    if axis is None or not split:
        return x
    if sequence:
        # A part of the sequence before, all of it after; its transpose is a psum_scatter.
        return lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True)
    # Its transpose is a psum. Without it JAX would place one for each weight, silently.
    return lax.pcast(x, axis, to="varying")


def leave(
    x: Float[Array, "*batch whole dim"],
    weight: Array,
    axis: str | None = "model",
    *,
    sequence: bool = False,
) -> Float[Array, "*batch seq dim"]:
    """Sums what row-split weights gave over `axis`, in the dtype of `x`.

    Plain, the sum is equal on all devices, and its gradient costs nothing: Megatron's g. In the
    sequence-parallel form each device keeps its part of the sequence.

    **Arguments:**

    - `weight`: of the layer that gave `x`. If it is no shard, `x` comes back as it is.
    - `sequence`: keeps this device's part of the sequence.

    **Raises:** `ValueError` for a sequence that the devices along `axis` do not divide.

    ```python
    >>> leave(jnp.ones((2, 5, 4)), jnp.ones((8, 4))).shape
    (2, 5, 4)

    ```
    """
    if axis is None or not is_split(weight, axis):
        return x
    if not sequence:
        # Unreduced before, equal along `axis` after.
        return lax.psum(x, axis)
    if x.shape[-2] % lax.axis_size(axis):
        raise ValueError(
            "The sequence-parallel form must give every device along the axis an equal part of the "
            f"sequence. Got length {x.shape[-2]} and {lax.axis_size(axis)} devices along `{axis}`. "
            "Pad the sequence, or use the plain form."
        )
    # Unreduced before, a part of the sequence after.
    return lax.psum_scatter(x, axis, scatter_dimension=x.ndim - 2, tiled=True)


def vary_over_sequence(params: PyTree, axis: str) -> PyTree:
    """Casts params that act on parts of a sequence, such as the scales of norms, to varying.

    The transpose is the psum of their gradients over `axis`, in float32 whatever the compute dtype.
    Without it JAX would place one at each use. Apply it to the stacked params of all layers, before
    the scan: then they share one psum, after the backward pass.
    """
    return jax.tree.map(lambda p: lax.pcast(p.astype(jnp.float32), axis, to="varying"), params)


class ColumnLinear(eqx.Module):
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
        self.axis = axis

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Takes what `enter` gave; it comes out split along the last dim if the weight is.

        **Raises:** `ValueError` for an `x` that has not entered.
        """
        if is_split(self.weight, self.axis) and not is_split(x, self.axis):
            raise ValueError(
                "What goes into a column-split layer must have entered. "
                f"Got {jax.typeof(x)}, equal along `{self.axis}`. "
                "Write `x = enter(x, layer.weight, axis)` once, for all layers that share `x`."
            )
        y = et.matmul(x, self.weight)
        return y if self.bias is None else y + _over_last_dim(self.bias, y.ndim)


class RowLinear(eqx.Module):
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
        self.axis = axis
        self.sequence = sequence

    def __call__(self, x: Float[Array, "*batch whole in"]) -> Float[Array, "*batch seq out"]:
        """Takes what a ColumnLinear gave, split along the last dim if the weight is.

        **Raises:** see `leave`.
        """
        y = leave(et.matmul(x, self.weight), self.weight, self.axis, sequence=self.sequence)
        if self.bias is None:
            return y
        bias = self.bias
        if self.axis is not None and self.sequence and is_split(y, self.axis):
            bias = vary_over_sequence(bias, self.axis)
        return y + _over_last_dim(bias.astype(y.dtype), y.ndim)


class Embedding(eqx.Module):
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

    def __call__(self, tokens: Int[Array, "batch whole"]) -> Float[Array, "batch seq dim"]:
        """Takes whole sequences of tokens, also in the sequence-parallel form.

        **Raises:** `ValueError` for a weight whose rows do not add up to the vocabulary; and see
        `leave`.
        """
        local = self.weight.shape[0]
        first, total = _part(self.weight, local, self.axis)
        if total != self.vocab_size:
            raise ValueError(
                "The rows of an Embedding on all devices along its axis must add up to the "
                f"vocabulary. Got a weight {jax.typeof(self.weight)} on each of {total // local} "
                f"along `{self.axis}`, and vocab_size={self.vocab_size}. Split dim 0 over its axis "
                "alone, keep that out of `batch=`, and pass `check_vma=True` to `shard_map`."
            )
        index = tokens.astype(jnp.int32) - first
        mine = (index >= 0) & (index < local)
        # In float32, since the gradient of a frequent token is a sum of very many.
        rows = self.weight.astype(jnp.float32)[jnp.where(mine, index, 0)]
        rows = jnp.where(mine[..., None], rows, 0.0).astype(self.weight.dtype)
        return leave(rows, self.weight, self.axis, sequence=self.sequence)


def vocab_parallel_cross_entropy(
    logits: Float[Array, "*batch vocab"], labels: Int[Array, "*batch"], axis: str | None = "model"
) -> Float32[Array, "*batch"]:
    """The negative log-likelihood of each label, where the vocabulary may be split over `axis`.

    Computed in float32. No device sees the logits of another: what travels is three numbers a
    token, in the forward pass alone.

    A label outside the vocabulary has NaN as its nll, and gives no gradient. So -100 on padding is
    fine where the mean leaves it out, as `et.mean(nll, where=weight)` does, and shows elsewhere.

    ```python
    >>> nll = vocab_parallel_cross_entropy(jnp.zeros((2, 4)), jnp.array([3, 4]))
    >>> print(f"{nll[0]:.4f} {nll[1]:.4f}")
    1.3863 nan

    ```
    """
    logits, labels = logits.astype(jnp.float32), labels.astype(jnp.int32)
    first, total = _part(logits, logits.shape[-1], axis)
    split = axis is not None and is_split(logits, axis)
    largest = lax.stop_gradient(logits.max(-1))
    if split:
        largest = lax.pmax(largest, axis)
    logits = logits - largest[..., None]
    # Compared and not indexed: the backward pass is then elementwise, without a scatter.
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = jnp.where(columns == (labels - first)[..., None], logits, 0.0).sum(-1)
    normaliser = jnp.exp(logits).sum(-1)
    if split:
        # Each device's part of the vocabulary before, equal along `axis` after. The transpose of
        # a psum to what is equal everywhere costs nothing.
        normaliser, chosen = lax.psum((normaliser, chosen), axis)
    inside = (labels >= 0) & (labels < total)
    return jnp.where(inside, jnp.log(normaliser) - chosen, jnp.nan)


def _part(x: Array, local: int, axis: str | None) -> tuple[Int[Array, ""] | int, int]:
    """Where this device's part of a vocabulary begins, and how long all parts are together."""
    if axis is None or not is_split(x, axis):
        return 0, local
    return lax.axis_index(axis) * local, lax.axis_size(axis) * local
