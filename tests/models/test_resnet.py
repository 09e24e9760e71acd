"""ResNets against a plain PyTorch implementation with the same weights."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.resnet import RESNET_18, RESNET_50, BasicBlock, ResNet, Size


@pytest.mark.parametrize(
    "size, published", [(RESNET_18, 11_689_512), (RESNET_50, 25_557_032)], ids=["18", "50"]
)
def test_number_of_parameters(size: Size, published: int):
    model, _ = eqx.filter_eval_shape(
        eqx.nn.make_with_state(ResNet), size, num_classes=1000, key=jax.random.key(0)
    )
    arrays = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct)]
    assert sum(leaf.size for leaf in arrays) == published


def torch_weight(weight: Any, torch: Any) -> Any:
    """A parameter of theirs, which is learned, with channels first."""
    array = np.array(weight)
    if array.ndim == 4:
        array = array.transpose(3, 2, 0, 1)
    return torch.tensor(np.ascontiguousarray(array), requires_grad=True)


class TorchResNet:
    """The network of He et al. in functional PyTorch, on the parameters of ours."""

    def __init__(self, model: ResNet, torch: Any):
        self.torch = torch
        self.model = model
        self.functional = torch.nn.functional
        self.parameters: list[Any] = []

    def parameter(self, weight: Any) -> Any:
        self.parameters.append(torch_weight(weight, self.torch))
        return self.parameters[-1]

    def conv(self, layer: Any, x: Any) -> Any:
        weight = self.parameter(layer.weight)
        padding = weight.shape[-1] // 2
        return self.functional.conv2d(x, weight, stride=layer.stride, padding=padding)

    def norm(self, layer: Any, x: Any) -> Any:
        weight, bias = self.parameter(layer.weight), self.parameter(layer.bias)
        return self.functional.batch_norm(x, None, None, weight, bias, training=True)

    def __call__(self, x: Any) -> Any:
        relu = self.functional.relu
        x = relu(self.norm(self.model.stem_norm, self.conv(self.model.stem, x)))
        if self.model.pool:
            x = self.functional.max_pool2d(x, 3, 2, padding=1)
        for block in self.model.blocks:
            y = x
            depth = 2 if isinstance(block, BasicBlock) else 3
            for index in range(depth):
                y = self.norm(block.norms[index], self.conv(block.convs[index], y))
                y = relu(y) if index < depth - 1 else y
            if block.shortcut is not None:
                x = self.norm(block.shortcut.norm, self.conv(block.shortcut.conv, x))
            x = relu(x + y)
        return x.mean((2, 3)) @ self.parameter(self.model.head.weight) + self.parameter(
            self.model.head.bias
        )


def in_their_order(model: ResNet) -> list[jax.Array]:
    """The parameters in the order in which `TorchResNet` meets them."""

    def pair(conv: Any, norm: Any) -> list[jax.Array]:
        return [conv.weight, norm.weight, norm.bias]

    leaves = pair(model.stem, model.stem_norm)
    for block in model.blocks:
        for conv, norm in zip(block.convs, block.norms, strict=True):
            leaves += pair(conv, norm)
        if block.shortcut is not None:
            leaves += pair(block.shortcut.conv, block.shortcut.norm)
    return [*leaves, model.head.weight, model.head.bias]


@pytest.mark.parametrize(
    "size, stem",
    [(RESNET_18, "imagenet"), (Size((1, 2), (8, 16), bottleneck=True), "small")],
    ids=["18", "bottleneck"],
)
def test_logits_and_gradients_equal_torch(size: Size, stem: Any):
    torch = pytest.importorskip("torch")
    model, state = eqx.nn.make_with_state(ResNet)(
        size, num_classes=10, stem=stem, key=jax.random.key(0)
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 32, 32, 3)).astype(np.float32)
    cotangent = rng.normal(size=(4, 10)).astype(np.float32)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def ours(params: Any, x: jax.Array) -> Any:
        def total(params: Any) -> tuple[jax.Array, jax.Array]:
            logits, _ = eqx.combine(params, static)(x, state)
            return (logits * cotangent).sum(), logits

        return jax.grad(total, has_aux=True)(params)

    grads, logits = ours(params, jnp.array(x))
    theirs = TorchResNet(model, torch)
    expected = theirs(torch.tensor(x.transpose(0, 3, 1, 2).copy()))
    expected.backward(torch.tensor(cotangent))
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-3, atol=1e-3)
    assert len(theirs.parameters) == len(jax.tree.leaves(params))
    for mine, parameter in zip(in_their_order(grads), theirs.parameters, strict=True):
        his = parameter.grad.numpy()
        his = his.transpose(2, 3, 1, 0) if his.ndim == 4 else his
        # Dozens of float32 layers in another order of sums: an error of a thousandth of the
        # gradient's size, where a wrong layer gives one of its whole size.
        assert np.linalg.norm(mine - his) < 2e-3 * np.linalg.norm(his) + 1e-6


def test_zero_scales_start_blocks_as_the_identity():
    make = eqx.nn.make_with_state(ResNet)
    size = Size((3,), (8,))
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    zero, state = make(
        size, num_classes=4, stem="small", zero_last_scale=True, key=jax.random.key(0)
    )
    leaves, treedef = jax.tree.flatten(state)  # a State refuses to be used twice
    hidden = jax.nn.relu(zero.stem_norm(zero.stem(x), state)[0])
    logits, _ = zero(x, jax.tree.unflatten(treedef, leaves))
    np.testing.assert_allclose(logits, zero.head(hidden.mean((1, 2))), rtol=1e-4, atol=1e-5)
    other, state = make(size, num_classes=4, stem="small", key=jax.random.key(0))
    assert not np.allclose(other(x, state)[0], logits, rtol=1e-2)
