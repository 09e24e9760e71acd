"""Layers that act on whole batches, so that what a statistic is taken over is theirs to say.

B: batch, H and W: height and width, C: channels, I and O: channels in and out.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

import eqtrain as et


class Linear(eqx.Module):
    """Computes `x @ weight + bias` over the last dim.

    **Reference:** initialised uniformly within `1 / sqrt(num_in)`, as in PyTorch: LeCun et al.
    1998, http://yann.lecun.com/exdb/publis/pdf/lecun-98b.pdf

    ```python
    >>> Linear(3, 2, key=jax.random.key(0))(jnp.ones((4, 3))).shape
    (4, 2)

    ```
    """

    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    def __init__(self, num_in: int, num_out: int, *, key: PRNGKeyArray):
        weight_key, bias_key = jax.random.split(key)
        bound = 1 / math.sqrt(num_in)
        self.weight = jax.random.uniform(weight_key, (num_in, num_out), minval=-bound, maxval=bound)
        self.bias = jax.random.uniform(bias_key, (num_out,), minval=-bound, maxval=bound)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        return et.matmul(x, self.weight) + _over_last_dim(self.bias, x.ndim)


class Conv2d(eqx.Module):
    """Convolves images, channels last, padded by half the kernel on all sides, without bias.

    **Reference:** initialised for the fan-out: He et al. 2015, https://arxiv.org/abs/1502.01852

    ```python
    >>> Conv2d(3, 8, size=3, stride=2, key=jax.random.key(0))(jnp.ones((1, 8, 8, 3))).shape
    (1, 4, 4, 8)

    ```
    """

    weight: Float[Array, "height width in out"]
    stride: int = eqx.field(static=True)

    def __init__(self, num_in: int, num_out: int, *, size: int, stride: int = 1, key: PRNGKeyArray):
        deviation = math.sqrt(2 / (size * size * num_out))
        self.weight = deviation * jax.random.normal(key, (size, size, num_in, num_out))
        self.stride = stride

    def __call__(self, x_BHWI: Float[Array, "batch _ _ in"]) -> Float[Array, "batch _ _ out"]:
        return et.convolve(x_BHWI, self.weight, self.stride)


class BatchNorm(eqx.Module):
    """Normalises each channel over the batch, and over the devices that hold a part of it.

    Statistics are those of the rows that count, wherever they are: one psum adds up sums, sums of
    squares and counts, so that unequal parts are exact where a mean of means is not. They are
    float32 whatever the dtype of `x`, and so are the running ones, which start as mean 0 and
    variance 1 and are used as they are, without correction for that start:
    `running = momentum * running + (1 - momentum) * batch`, with the biased variance.

    **Arguments:**

    - `axis_names`: the mesh axes to sum over; those that split the batch unless given. Name them
        where an axis splits the channels. With `()` each device normalises
        by itself, and the state that comes out varies as the data does.
    - `scale`: what the weight starts as.
    - `inference`: uses the running statistics, and leaves them as they are; see
        `eqx.nn.inference_mode`.

    **Reference:** Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167

    ```python
    >>> norm, state = eqx.nn.make_with_state(BatchNorm)(1)
    >>> y, state = norm(jnp.array([[0.0], [2.0], [4.0], [10.0]]), state)
    >>> mean, variance = state.get(norm.running)
    >>> print(f"{mean[0]:.2f} {variance[0]:.2f}")
    0.40 2.30

    ```
    """

    weight: Float[Array, " channels"]
    bias: Float[Array, " channels"]
    running: eqx.nn.StateIndex
    momentum: float = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    axis_names: tuple[str, ...] | None = eqx.field(static=True)
    inference: bool

    def __init__(
        self,
        channels: int,
        *,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        axis_names: tuple[str, ...] | None = None,
        scale: float = 1.0,
        inference: bool = False,
    ):
        self.weight = jnp.full((channels,), scale, jnp.float32)
        self.bias = jnp.zeros((channels,), jnp.float32)
        self.running = eqx.nn.StateIndex(
            (jnp.zeros((channels,), jnp.float32), jnp.ones((channels,), jnp.float32))
        )
        self.momentum = momentum
        self.epsilon = epsilon
        self.axis_names = axis_names
        self.inference = inference

    def __call__(
        self,
        x: Float[Array, "batch *spatial channels"],
        state: eqx.nn.State,
        *,
        where: Shaped[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch *spatial channels"], eqx.nn.State]:
        """Takes the batch and, as `where`, the weight of each row: 0 on padding.

        Where no row counts on any device, the running statistics stay as they are.

        **Raises:** `ValueError` inside a `shard_map` over a mesh that has no axis of a given name,
        or whose `check_vma=False` hides over which axes the data varies while none is named.
        """
        mean, variance = state.get(self.running)
        if not self.inference:
            running = jnp.stack((mean, variance))
            axes = _axes_to_sum(self.axis_names, x, where)
            batch, count = _moments(x, where, mean, axes)
            pull = jnp.where(count > 0, 1 - self.momentum, 0.0)
            moved = running + pull * (lax.stop_gradient(batch) - running)
            state = _replace(state, self.running, tuple(moved))
            if axes and _has_types():
                # Varying from here on, and in one piece, so that the backward pass has one psum.
                batch = lax.pcast(batch, axes, to="varying")
            mean, variance = batch
        scale = self.weight.astype(jnp.float32) * lax.rsqrt(variance + self.epsilon)
        y = x.astype(jnp.float32) - _over_last_dim(mean, x.ndim)
        y = y * _over_last_dim(scale, x.ndim)
        y = y + _over_last_dim(self.bias.astype(jnp.float32), x.ndim)
        return y.astype(x.dtype), state


def max_pool(
    x_BHWC: Float[Array, "batch _ _ channels"], *, size: int, stride: int
) -> Float[Array, "batch _ _ channels"]:
    """Takes the largest value in each window, padded by half the window on all sides.

    Values that are largest alike share the gradient.

    ```python
    >>> max_pool(jnp.ones((1, 8, 8, 3)), size=3, stride=2).shape
    (1, 4, 4, 3)

    ```
    """
    # The maximum of the windows' first elements, of their second ones, and so on: the gradient of
    # `lax.reduce_window` takes a CPU twice as long.
    pad = size // 2
    out = tuple((n + 2 * pad - size) // stride + 1 for n in x_BHWC.shape[1:3])
    around = ((0, 0), (pad, pad), (pad, pad), (0, 0))
    padded = jnp.pad(x_BHWC, around, constant_values=-jnp.inf)
    rows, columns = (slice(None, 1 + (n - 1) * stride, stride) for n in out)
    return functools.reduce(
        jnp.maximum,
        [padded[:, i:, j:][:, rows, columns] for i in range(size) for j in range(size)],
    )


def mean_pool(x_BHWC: Float[Array, "batch _ _ channels"]) -> Float[Array, "batch channels"]:
    """Takes the mean of each image, summed in float32.

    ```python
    >>> mean_pool(jnp.ones((1, 8, 8, 3))).shape
    (1, 3)

    ```
    """
    return x_BHWC.mean((1, 2), dtype=jnp.float32).astype(x_BHWC.dtype)


def _moments(
    x: Float[Array, "batch *spatial channels"],
    where: Shaped[Array, " batch"] | None,
    running_mean: Float[Array, " channels"],
    axes: tuple[str, ...],
) -> tuple[Float[Array, "2 channels"], Float[Array, ""]]:
    """The mean and biased variance of each channel over the weighted rows, and their count."""
    weight = jnp.ones(x.shape[:1], jnp.float32) if where is None else where.astype(jnp.float32)
    weight = weight.reshape(weight.shape + (1,) * (x.ndim - 1))
    dims = tuple(range(x.ndim - 1))
    count = weight.sum() * math.prod(x.shape[1:-1])
    # A product would let an inf or NaN on padding through.
    x = jnp.where(weight == 0, 0.0, x.astype(jnp.float32))
    # E[x^2] - E[x]^2 cancels where the mean is large. So what is summed on a device has its own
    # mean taken away, and what is summed over devices the running mean, if that is theirs alike.
    own = lax.stop_gradient((weight * x).sum(dims) * _inverse(count))
    shift = lax.stop_gradient(running_mean) if axes else own
    if _varying(shift) & set(axes):
        shift = jnp.zeros(shift.shape, jnp.float32)
    x = x - _over_last_dim(own, x.ndim)
    total, square = (weight * x).sum(dims), (weight * x * x).sum(dims)
    move = own - shift
    total, square = total + count * move, square + move * (2 * total + count * move)
    if axes:
        # Varies over `axes` before, is the same everywhere after; once a call of the layer.
        sums = lax.psum(jnp.concatenate((total, square, count[None])), axes)
        (total, square), count = sums[:-1].reshape(2, -1), sums[-1]
    share = _inverse(count)
    offset = total * share
    variance = jnp.maximum(square * share - offset**2, 0.0)
    return jnp.stack((shift + offset, variance)), count


def _inverse(count: Float[Array, ""]) -> Float[Array, ""]:
    """One over a count; 1 where nothing was counted, which has sums of 0.

    By hand, since XLA makes a product of a division by a scalar in some programs and not in others.
    """
    return 1.0 / jnp.where(count == 0, 1.0, count)


def _axes_to_sum(names: tuple[str, ...] | None, *data: Array | None) -> tuple[str, ...]:
    """The mesh axes of the `shard_map` around, if any, that BatchNorm sums over."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return ()
    unknown = sorted(set(names or ()) - set(mesh.axis_names))
    if unknown:
        raise ValueError(
            "Inside `shard_map`, the `axis_names` of BatchNorm must be axes of the mesh. "
            f"Got {unknown[0]!r}, where the mesh has {', '.join(map(repr, mesh.axis_names))}. "
            "Correct the name."
        )
    wanted = tuple(axis for axis in mesh.manual_axes if names is None or axis in names)
    if not _has_types():
        if names is not None:
            return wanted
        if not et.rows.batch_axes():
            raise ValueError(
                "BatchNorm sums over the axes that split the batch, which `et.shard` knows. "
                "Got data inside another `shard_map`, with `check_vma=False`. "
                f"Pass `check_vma=True`, or name the axes: `axis_names={mesh.manual_axes}`."
            )
        return et.rows.batch_axes()
    varying = frozenset().union(*(_varying(x) for x in data if x is not None))
    return tuple(axis for axis in wanted if axis in varying)


def _has_types() -> bool:
    """Whether values say along which axes they vary: inside `shard_map(check_vma=True)`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return bool(axes and _varying(lax.axis_index(axes)))  # which varies for certain


def _varying(x: Array) -> frozenset[str]:
    aval: Any = jax.typeof(x)
    return aval.manual_axis_type.varying


def _replace(state: eqx.nn.State, index: eqx.nn.StateIndex, value: Any) -> eqx.nn.State:
    """Does what `state.set` does, also where the new value varies over a mesh axis and the old one
    does not: `set` refuses that, which is how one device's own statistics begin."""
    old = state.substate(index)
    return state.update(jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(value)))


def _over_last_dim(x: Float[Array, " channels"], ndim: int) -> Float[Array, "..."]:
    """Puts dims of size 1 before the only one, since no rank is promoted silently."""
    return x.reshape((1,) * (ndim - 1) + x.shape)
