"""Residual networks for images.

B: batch, H and W: height and width, C: channels.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

import eqtrain as et

from .layers import BatchNorm, Conv2d, Linear, max_pool, mean_pool


@dataclasses.dataclass(frozen=True)
class Size:
    """How deep and how wide a network is.

    **Fields:** the number of blocks of each stage, and their width; stages after the first halve
    height and width. A `bottleneck` block is 1x1, 3x3 and 1x1 with four times its width in
    channels, any other is two times 3x3.
    """

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    bottleneck: bool = False


RESNET_18 = Size((2, 2, 2, 2), (64, 128, 256, 512))
RESNET_50 = Size((3, 4, 6, 3), (64, 128, 256, 512), bottleneck=True)
RESNET_TINY = Size((1, 1, 1), (16, 32, 64))


class ResNet(eqx.Module):
    """A residual network with BatchNorm.

    **Arguments:**

    - `size`: `RESNET_18`, `RESNET_50`, `RESNET_TINY` or another `Size`.
    - `channels`: of the images.
    - `stem`: `"imagenet"` is 7x7 with stride 2 and a pool; `"small"` is 3x3 with stride 1, for
      images of some tens of pixels.
    - `zero_last_scale`: starts every block as its shortcut, with a weight of 0 in its last norm:
      Goyal et al. 2017, https://arxiv.org/abs/1706.02677
    - `axis_names`: see `models.layers.BatchNorm`.

    **Raises:** `ValueError` for another stem.

    **Reference:** He et al. 2015, https://arxiv.org/abs/1512.03385, but for the stride of a
    bottleneck, which is in its 3x3 convolution as in PyTorch ("v1.5").

    ```python
    >>> model, state = eqx.nn.make_with_state(ResNet)(
    ...     RESNET_TINY, channels=1, num_classes=10, stem="small", key=jax.random.key(0)
    ... )
    >>> logits, state = model(jnp.ones((2, 8, 8, 1)), state)
    >>> logits.shape
    (2, 10)

    ```
    """

    stem: ConvNorm
    blocks: tuple[Block, ...]
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
        if stem not in ("imagenet", "small"):
            raise ValueError(f"`stem` must be 'imagenet' or 'small'. Got {stem!r}. Choose one.")
        stem_key, head_key, *block_keys = jax.random.split(key, 2 + sum(size.depths))
        self.pool = stem == "imagenet"
        kernel, stride = (7, 2) if self.pool else (3, 1)
        self.stem = ConvNorm(
            channels, size.widths[0], kernel, stride, axis_names=axis_names, key=stem_key
        )
        num_in, blocks = size.widths[0], []
        for stage, (depth, width) in enumerate(zip(size.depths, size.widths, strict=True)):
            for index in range(depth):
                block = Block(
                    num_in,
                    width,
                    stride=2 if stage > 0 and index == 0 else 1,
                    bottleneck=size.bottleneck,
                    last_scale=0.0 if zero_last_scale else 1.0,
                    axis_names=axis_names,
                    key=block_keys[len(blocks)],
                )
                blocks.append(block)
                num_in = block.num_out
        self.blocks = tuple(blocks)
        self.head = Linear(num_in, num_classes, key=head_key)

    def __call__(
        self,
        x_BHWC: Float[Array, "batch _ _ _"],
        state: eqx.nn.State,
        *,
        where: Shaped[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch classes"], eqx.nn.State]:
        """Takes images and, as `where`, the weight of each: 0 on padding."""
        x_BHWC, state = self.stem(x_BHWC, state, where=where)
        x_BHWC = jax.nn.relu(x_BHWC)
        if self.pool:
            x_BHWC = max_pool(x_BHWC, size=3, stride=2)
        for block in self.blocks:
            x_BHWC, state = block(x_BHWC, state, where=where)
        return self.head(mean_pool(x_BHWC)), state


class Block(eqx.Module):
    """Convolutions beside a shortcut, which is the identity where the shape stays the same."""

    layers: tuple[ConvNorm, ...]
    shortcut: ConvNorm | None

    def __init__(
        self,
        num_in: int,
        width: int,
        *,
        stride: int,
        bottleneck: bool,
        last_scale: float,
        axis_names: tuple[str, ...] | None,
        key: PRNGKeyArray,
    ):
        num_out = 4 * width if bottleneck else width
        shapes = [(num_in, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(num_in, width, 1, 1), (width, width, 3, stride), (width, num_out, 1, 1)]
        *keys, shortcut_key = jax.random.split(key, len(shapes) + 1)
        scales = [1.0] * (len(shapes) - 1) + [last_scale]
        self.layers = tuple(
            ConvNorm(*shape, scale=scale, axis_names=axis_names, key=layer_key)
            for shape, scale, layer_key in zip(shapes, scales, keys, strict=True)
        )
        self.shortcut = None
        if num_in != num_out or stride != 1:
            self.shortcut = ConvNorm(
                num_in, num_out, 1, stride, axis_names=axis_names, key=shortcut_key
            )

    @property
    def num_out(self) -> int:
        return self.layers[-1].conv.weight.shape[-1]

    def __call__(
        self,
        x_BHWC: Float[Array, "batch _ _ _"],
        state: eqx.nn.State,
        *,
        where: Shaped[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch _ _ _"], eqx.nn.State]:
        y_BHWC = x_BHWC
        for layer in self.layers[:-1]:
            y_BHWC, state = layer(y_BHWC, state, where=where)
            y_BHWC = jax.nn.relu(y_BHWC)
        y_BHWC, state = self.layers[-1](y_BHWC, state, where=where)
        if self.shortcut is not None:
            x_BHWC, state = self.shortcut(x_BHWC, state, where=where)
        return jax.nn.relu(x_BHWC + y_BHWC), state


class ConvNorm(eqx.Module):
    """A convolution and the BatchNorm of what comes out."""

    conv: Conv2d
    norm: BatchNorm

    def __init__(
        self,
        num_in: int,
        num_out: int,
        size: int,
        stride: int,
        *,
        scale: float = 1.0,
        axis_names: tuple[str, ...] | None,
        key: PRNGKeyArray,
    ):
        self.conv = Conv2d(num_in, num_out, size=size, stride=stride, key=key)
        self.norm = BatchNorm(num_out, scale=scale, axis_names=axis_names)

    def __call__(
        self,
        x_BHWC: Float[Array, "batch _ _ _"],
        state: eqx.nn.State,
        *,
        where: Shaped[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch _ _ _"], eqx.nn.State]:
        return self.norm(self.conv(x_BHWC), state, where=where)


def hugging_face(size: Size) -> tuple[et.interop.Rule, ...]:
    """Rules for `(model, state)`, from the names in transformers' `ResNetForImageClassification`.

    Those of torchvision's differ in names alone. PyTorch's `num_batches_tracked` is not used.

    ```python
    >>> print(hugging_face(RESNET_18)[0])
    `resnet.embedder.embedder.convolution.weight` -> `stem.conv.weight` by 'o i h w -> h w i o'

    ```
    """

    def conv_norm(source: str, target: str) -> list[et.interop.Rule]:
        rule, norm = et.interop.rule, f"{source}.normalization"
        return [
            rule(f"{source}.convolution.weight", f"{target}.conv.weight", "o i h w -> h w i o"),
            rule(f"{norm}.weight", f"{target}.norm.weight"),
            rule(f"{norm}.bias", f"{target}.norm.bias"),
            rule(f"{norm}.running_mean", f"{target}.norm.running.0"),
            rule(f"{norm}.running_var", f"{target}.norm.running.1"),
        ]

    rules = conv_norm("resnet.embedder.embedder", "stem")
    places = [(stage, layer) for stage, depth in enumerate(size.depths) for layer in range(depth)]
    for block, (stage, layer) in enumerate(places):
        source = f"resnet.encoder.stages.{stage}.layers.{layer}"
        rules += conv_norm(f"{source}.layer.{{i}}", f"blocks.{block}.layers.{{i}}")
        rules += conv_norm(f"{source}.shortcut", f"blocks.{block}.shortcut")
    rules.append(et.interop.rule("classifier.1.weight", "head.weight", "o i -> i o"))
    rules.append(et.interop.rule("classifier.1.bias", "head.bias"))
    return tuple(rules)
