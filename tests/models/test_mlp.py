"""The MLP against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqtrain as et
from models.mlp import MLP


def test_without_keys_there_is_no_dropout():
    mlp = MLP((3, 5, 2), dropout=0.5, key=jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    first, last = mlp.layers
    hidden = np.maximum(x @ np.array(first.weight) + np.array(first.bias), 0)
    expected = hidden @ np.array(last.weight) + np.array(last.bias)
    np.testing.assert_allclose(mlp(jnp.array(x)), expected, rtol=1e-5, atol=1e-6)
    keys = et.example_keys(jax.random.key(1), 0, jnp.arange(4))
    assert not np.allclose(mlp(jnp.array(x), key=keys), expected, rtol=1e-2)


def test_layers_have_masks_of_their_own():
    mlp = MLP((64, 64, 64, 64), activation=lambda x: x, dropout=0.5, key=jax.random.key(0))
    identity = jax.tree.map(lambda x: jnp.eye(64) if x.ndim == 2 else jnp.zeros(64), mlp)
    keys = et.example_keys(jax.random.key(1), 0, jnp.arange(8))
    y = identity(jnp.ones((8, 64)), key=keys)
    # Kept by both masks: a quarter if they are independent, a half if they are the same one.
    assert abs(float((y != 0).mean()) - 0.25) < 0.08


def test_too_few_sizes_are_refused():
    with pytest.raises(ValueError, match=r"Got sizes=\(3,\)"):
        MLP((3,), key=jax.random.key(0))
