"""Layers that act on whole batches, so that what they sum over is theirs to say.

B: batch, H and W: height and width, C: channels, I and O: channels in and out.
"""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PRNGKeyArray


class Linear(eqx.Module):
    """`x @ weight + bias` over the last dim.

    **Reference:** the uniform initialisation is PyTorch's, He et al. 2015,
    https://arxiv.org/abs/1502.01852

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
        y = x @ self.weight
        return y + self.bias.reshape((1,) * (y.ndim - 1) + (-1,))


class Conv2d(eqx.Module):
    """A convolution without bias over pictures with channels last, padded on all sides alike.

    **Reference:** initialised for the fan-out, He et al. 2015, https://arxiv.org/abs/1502.01852

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
        pad = self.weight.shape[0] // 2
        return lax.conv_general_dilated(
            x_BHWI,
            self.weight,
            window_strides=(self.stride, self.stride),
            padding=((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


class BatchNorm(eqx.Module):
    """Normalises each channel over the batch, and over all devices that hold a part of it.

    The statistics are those of the rows with weight, joined over devices by one psum of sums, sums
    of squares and the count: unequal counts are exact, where a mean of means would not be. They and
    the running ones are float32 whatever the dtype of `x`.

    The running statistics start as mean 0 and variance 1 and are used as they are:
    `running = momentum * running + (1 - momentum) * batch`, with the biased variance. The last call
    of a step wins; in a scan over microbatches that is once a microbatch, in order.

    **Arguments:**

    - `axis_names`: the mesh axes to join over; every axis that the data varies over unless given.
      Name them where channels are split over one. `()` keeps each device's own statistics.

    **Reference:** Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167

    ```python
    >>> norm, state = eqx.nn.make_with_state(BatchNorm)(1)
    >>> y, state = norm(jnp.array([[0.0], [2.0], [4.0], [10.0]]), state)
    >>> mean, variance = state.get(norm.running)
    >>> print(mean, variance)
    [0.4] [2.3]

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
    ):
        self.weight = jnp.full((channels,), scale)
        self.bias = jnp.zeros((channels,))
        self.running = eqx.nn.StateIndex((jnp.zeros((channels,)), jnp.ones((channels,))))
        self.momentum = momentum
        self.epsilon = epsilon
        self.axis_names = axis_names
        self.inference = False

    def __call__(
        self,
        x: Float[Array, "batch *spatial channels"],
        state: eqx.nn.State,
        *,
        where: Float[Array, " batch"] | Bool[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch *spatial channels"], eqx.nn.State]:
        """Takes `x` and, as `where`, the weight of each row: 0 on padding."""
        mean, variance = state.get(self.running)
        if not self.inference:
            running_mean, running_variance = mean, variance
            mean, variance, count = self._statistics(x, where, running_mean)
            # A batch of padding alone says nothing about the data.
            pull = jnp.where(count > 0, 1 - self.momentum, 0.0)
            state = _set(
                state,
                self.running,
                (
                    running_mean + pull * (lax.stop_gradient(mean) - running_mean),
                    running_variance + pull * (lax.stop_gradient(variance) - running_variance),
                ),
            )
        scale = self.weight.astype(jnp.float32) * lax.rsqrt(variance + self.epsilon)
        shift = self.bias.astype(jnp.float32) - mean * scale
        shape = (1,) * (x.ndim - 1) + (-1,)
        y = x.astype(jnp.float32) * scale.reshape(shape) + shift.reshape(shape)
        return y.astype(x.dtype), state

    def _statistics(
        self, x: Array, where: Array | None, guess: Float[Array, " channels"]
    ) -> tuple[Array, Array, Array]:
        """The mean, biased variance and count over the weighted rows of all devices."""
        weight = jnp.ones(x.shape[:1]) if where is None else where.astype(jnp.float32)
        weight = weight.reshape(weight.shape + (1,) * (x.ndim - 1))
        # Sums of squares cancel when the mean is large. The running mean, which every device
        # knows, takes most of it away before anything is summed.
        guess = lax.stop_gradient(guess)
        centred = x.astype(jnp.float32) - guess.reshape((1,) * (x.ndim - 1) + (-1,))
        centred = jnp.where(weight != 0, centred, 0.0)
        dims = tuple(range(x.ndim - 1))
        per_row = math.prod(x.shape[1:-1])
        sums = (
            (centred * weight).sum(dims),
            (centred * centred * weight).sum(dims),
            weight.sum() * per_row,
        )
        axes = _varying(sums[0])
        axes = axes if self.axis_names is None else axes & set(self.axis_names)
        if axes:
            # Varies over the axes before, equal there afterwards; once a call of the layer.
            total, squares, count = lax.psum(_vary(sums, axes), tuple(sorted(axes)))
        else:
            total, squares, count = sums
        share = 1 / jnp.where(count > 0, count, 1.0)
        offset = total * share
        variance = jnp.maximum(squares * share - offset * offset, 0.0)
        return guess + offset, variance, count


def max_pool(
    x_BHWC: Float[Array, "batch _ _ channels"], *, size: int, stride: int
) -> Float[Array, "batch _ _ channels"]:
    """Takes the largest value in each window, padded on all sides alike."""
    pad = size // 2
    return lax.reduce_window(
        x_BHWC,
        -jnp.inf,
        lax.max,
        (1, size, size, 1),
        (1, stride, stride, 1),
        ((0, 0), (pad, pad), (pad, pad), (0, 0)),
    )


def _varying(x: Array) -> frozenset[str]:
    """The mesh axes along which `x` differs from device to device, inside `shard_map`."""
    aval: Any = jax.typeof(x)
    return frozenset(aval.manual_axis_type.varying)


def _vary(tree: Any, axes: frozenset[str]) -> Any:
    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - _varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _set(state: eqx.nn.State, index: eqx.nn.StateIndex, value: Any) -> eqx.nn.State:
    """`state.set`, which refuses a value that varies where the old one did not."""
    axes = frozenset().union(*map(_varying, jax.tree.leaves(value)))
    return _vary(state, axes).set(index, _vary(value, axes))
