"""The MLP against NumPy in float64 and PyTorch, and its dropout against masks drawn outside."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqtrain as et
from models.mlp import MLP

SIZES = (6, 32, 16, 3)


def example_keys(*index: int) -> Any:
    return et.example_keys(jax.random.key(1), 0, jnp.array(index))


def by_hand(mlp: MLP, x: Any, scales: tuple[Any, ...] = (1.0, 1.0)) -> np.ndarray:
    """The output in float64; `scales` is what dropout multiplies each hidden layer with."""
    out = np.asarray(x, np.float64)
    for layer, scale in zip(mlp.layers, (*scales, None), strict=True):
        out = out @ np.asarray(layer.weight, np.float64) + np.asarray(layer.bias, np.float64)
        if scale is not None:
            out = np.maximum(out, 0) * scale
    return out


def test_gradients_match_torch(getkey):
    torch = pytest.importorskip("torch")
    mlp = MLP(SIZES, activation=jnp.tanh, key=getkey())
    x = jax.random.normal(getkey(), (5, SIZES[0]))
    modules: list[Any] = []
    for layer in mlp.layers:
        linear = torch.nn.Linear(*layer.weight.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(np.array(layer.weight).T))
            linear.bias.copy_(torch.tensor(np.array(layer.bias)))
        modules += [linear, torch.nn.Tanh()]
    out = torch.nn.Sequential(*modules[:-1])(torch.tensor(np.array(x)))
    (out**2).sum().backward()

    grads = eqx.filter_grad(lambda mlp: (mlp(x) ** 2).sum())(mlp)
    # Sums of up to 32 products in float32.
    np.testing.assert_allclose(mlp(x), out.detach().numpy(), rtol=1e-5, atol=1e-6)
    for layer, linear in zip(grads.layers, modules[::2], strict=True):
        np.testing.assert_allclose(layer.weight.T, linear.weight.grad, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(layer.bias, linear.bias.grad, rtol=1e-5, atol=1e-5)


def test_dropout_multiplies_each_hidden_layer_with_a_mask_of_its_own(getkey):
    mlp = MLP(SIZES, dropout=0.25, key=getkey())
    x = jax.random.normal(getkey(), (4, SIZES[0]))
    keys = example_keys(0, 1, 2, 3)
    # Drawn from single keys, an example at a time.
    masks = [
        np.stack(
            [et.dropout(jnp.ones(width), 0.25, key=jax.random.fold_in(key, index)) for key in keys]
        )
        for index, width in enumerate(SIZES[1:-1])
    ]
    out = mlp(x, key=keys)
    np.testing.assert_allclose(out, by_hand(mlp, x, tuple(masks)), rtol=1e-5, atol=1e-6)
    # Negative controls: one mask for both layers, and no mask.
    repeated = masks[0], masks[0][:, : SIZES[2]]
    assert np.abs(out - by_hand(mlp, x, repeated)).max() > 0.01
    assert np.abs(out - by_hand(mlp, x)).max() > 0.01


def test_example_has_the_same_mask_in_any_batch(getkey):
    mlp = MLP(SIZES, dropout=0.5, key=getkey())
    x = jax.random.normal(getkey(), (4, SIZES[0]))
    whole = mlp(x, key=example_keys(0, 1, 2, 3))
    part = mlp(x[2:], key=example_keys(2, 3))
    np.testing.assert_allclose(part, whole[2:], rtol=1e-6)
    other = mlp(x[2:], key=example_keys(0, 1))  # negative control
    assert np.abs(other - whole[2:]).max() > 0.01


def test_no_key_means_no_dropout(getkey):
    mlp = MLP(SIZES, dropout=0.5, key=getkey())
    x = jax.random.normal(getkey(), (4, SIZES[0]))
    np.testing.assert_allclose(mlp(x), by_hand(mlp, x), rtol=1e-5, atol=1e-6)


def test_layers_start_different(getkey):
    first, second = MLP((8, 8, 8), key=getkey()).layers
    assert np.abs(first.weight - second.weight).max() > 0.01


def test_fewer_than_two_sizes_raise(getkey):
    with pytest.raises(ValueError, match=r"Got sizes=\(8,\)"):
        MLP((8,), key=getkey())
