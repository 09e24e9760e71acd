"""Residual networks for pictures, channels last.

B: batch, H and W: height and width, C: channels.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .layers import BatchNorm, Conv2d, Linear, max_pool

Weights = Float[Array, " batch"]


@dataclasses.dataclass(frozen=True)
class Size:
    """How deep and wide a network is.

    **Fields:** blocks and channels of each stage, of which all but the first halve the picture;
    `bottleneck` blocks of 1x1, 3x3 and 1x1 with four times the channels, or basic ones of two 3x3.
    """

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    bottleneck: bool = False


RESNET_18 = Size((2, 2, 2, 2), (64, 128, 256, 512))
RESNET_50 = Size((3, 4, 6, 3), (64, 128, 256, 512), bottleneck=True)
RESNET_TINY = Size((1, 1, 1), (16, 32, 64))


class ResNet(eqx.Module):
    """A residual network with BatchNorm, as `(picture, state) -> (logits, state)`.

    **Arguments:**

    - `size`: one of `RESNET_18`, `RESNET_50`, `RESNET_TINY`, or another `Size`.
    - `stem`: `"imagenet"`, a 7x7 convolution of stride 2 and a pool, or `"small"`, one of 3x3 and
      stride 1, for pictures of some tens of pixels.
    - `zero_last_scale`: starts each block as the identity, by a scale of 0 in its last norm (Goyal
      et al. 2017, https://arxiv.org/abs/1706.02677).
    - `axis_names`: as for `models.layers.BatchNorm`.

    **Reference:** He et al. 2015, https://arxiv.org/abs/1512.03385; a bottleneck has its stride in
    the 3x3 convolution, as in PyTorch.

    ```python
    >>> make = eqx.nn.make_with_state(ResNet)
    >>> model, state = make(RESNET_TINY, channels=1, num_classes=10, stem="small",
    ...                     key=jax.random.key(0))
    >>> logits, state = model(jnp.ones((2, 8, 8, 1)), state)
    >>> logits.shape
    (2, 10)

    ```
    """

    stem: Conv2d
    stem_norm: BatchNorm
    blocks: tuple[BasicBlock | Bottleneck, ...]
    head: Linear
    pool: bool = eqx.field(static=True)

    def __init__(
        self,
        size: Size,
        *,
        channels: int = 3,
        num_classes: int,
        stem: Literal["imagenet", "small"] = "imagenet",
        zero_last_scale: bool = False,
        axis_names: tuple[str, ...] | None = None,
        key: PRNGKeyArray,
    ):
        stem_key, head_key, *block_keys = jax.random.split(key, 2 + sum(size.depths))
        imagenet = stem == "imagenet"
        first = size.widths[0]
        self.stem = Conv2d(
            channels, first, size=7 if imagenet else 3, stride=2 if imagenet else 1, key=stem_key
        )
        self.stem_norm = BatchNorm(first, axis_names=axis_names)
        self.pool = imagenet
        block_type = Bottleneck if size.bottleneck else BasicBlock
        blocks = []
        num_in = first
        for stage, (depth, width) in enumerate(zip(size.depths, size.widths, strict=True)):
            for index in range(depth):
                block = block_type(
                    num_in,
                    width,
                    stride=2 if stage > 0 and index == 0 else 1,
                    last_scale=0.0 if zero_last_scale else 1.0,
                    axis_names=axis_names,
                    key=block_keys[len(blocks)],
                )
                blocks.append(block)
                num_in = block_type.expansion * width
        self.blocks = tuple(blocks)
        self.head = Linear(num_in, num_classes, key=head_key)

    def __call__(
        self,
        x_BHWC: Float[Array, "batch _ _ _"],
        state: eqx.nn.State,
        *,
        where: Weights | None = None,
    ) -> tuple[Float[Array, "batch classes"], eqx.nn.State]:
        """Takes pictures and, as `where`, the weight of each: 0 on padding."""
        x_BHWC, state = self.stem_norm(self.stem(x_BHWC), state, where=where)
        x_BHWC = jax.nn.relu(x_BHWC)
        if self.pool:
            x_BHWC = max_pool(x_BHWC, size=3, stride=2)
        for block in self.blocks:
            x_BHWC, state = block(x_BHWC, state, where=where)
        x_BC = x_BHWC.astype(jnp.float32).mean((1, 2)).astype(x_BHWC.dtype)
        return self.head(x_BC), state


class BasicBlock(eqx.Module):
    """Two 3x3 convolutions beside the identity."""

    expansion = 1

    convs: tuple[Conv2d, ...]
    norms: tuple[BatchNorm, ...]
    shortcut: Shortcut | None

    def __init__(
        self,
        num_in: int,
        width: int,
        *,
        stride: int,
        last_scale: float,
        axis_names: tuple[str, ...] | None,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 3)
        self.convs = (
            Conv2d(num_in, width, size=3, stride=stride, key=keys[0]),
            Conv2d(width, width, size=3, key=keys[1]),
        )
        self.norms = (
            BatchNorm(width, axis_names=axis_names),
            BatchNorm(width, axis_names=axis_names, scale=last_scale),
        )
        self.shortcut = make_shortcut(num_in, width, stride, axis_names, keys[2])

    def __call__(
        self, x_BHWC: Array, state: eqx.nn.State, *, where: Weights | None = None
    ) -> tuple[Array, eqx.nn.State]:
        return residual(self.convs, self.norms, self.shortcut, x_BHWC, state, where)


class Bottleneck(eqx.Module):
    """A 3x3 convolution between two of 1x1 beside the identity."""

    expansion = 4

    convs: tuple[Conv2d, ...]
    norms: tuple[BatchNorm, ...]
    shortcut: Shortcut | None

    def __init__(
        self,
        num_in: int,
        width: int,
        *,
        stride: int,
        last_scale: float,
        axis_names: tuple[str, ...] | None,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 4)
        num_out = self.expansion * width
        self.convs = (
            Conv2d(num_in, width, size=1, key=keys[0]),
            Conv2d(width, width, size=3, stride=stride, key=keys[1]),
            Conv2d(width, num_out, size=1, key=keys[2]),
        )
        self.norms = (
            BatchNorm(width, axis_names=axis_names),
            BatchNorm(width, axis_names=axis_names),
            BatchNorm(num_out, axis_names=axis_names, scale=last_scale),
        )
        self.shortcut = make_shortcut(num_in, num_out, stride, axis_names, keys[3])

    def __call__(
        self, x_BHWC: Array, state: eqx.nn.State, *, where: Weights | None = None
    ) -> tuple[Array, eqx.nn.State]:
        return residual(self.convs, self.norms, self.shortcut, x_BHWC, state, where)


class Shortcut(eqx.Module):
    """What stands for the identity where the shape changes."""

    conv: Conv2d
    norm: BatchNorm


def make_shortcut(
    num_in: int, num_out: int, stride: int, axis_names: tuple[str, ...] | None, key: PRNGKeyArray
) -> Shortcut | None:
    if num_in == num_out and stride == 1:
        return None
    conv = Conv2d(num_in, num_out, size=1, stride=stride, key=key)
    return Shortcut(conv, BatchNorm(num_out, axis_names=axis_names))


def residual(
    convs: tuple[Conv2d, ...],
    norms: tuple[BatchNorm, ...],
    shortcut: Shortcut | None,
    x_BHWC: Array,
    state: eqx.nn.State,
    where: Weights | None,
) -> tuple[Array, eqx.nn.State]:
    """Convolutions with a norm each and a ReLU between them, added to the identity."""
    y_BHWC = x_BHWC
    for conv, norm in zip(convs[:-1], norms[:-1], strict=True):
        y_BHWC, state = norm(conv(y_BHWC), state, where=where)
        y_BHWC = jax.nn.relu(y_BHWC)
    y_BHWC, state = norms[-1](convs[-1](y_BHWC), state, where=where)
    if shortcut is not None:
        x_BHWC, state = shortcut.norm(shortcut.conv(x_BHWC), state, where=where)
    return jax.nn.relu(x_BHWC + y_BHWC), state
