"""A multi-layer perceptron that acts on whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, PRNGKeyArray

import eqtrain as et

from .layers import Linear


class MLP(eqx.Module):
    """Linear layers with an activation, and dropout, between them.

    **Arguments:**

    - `sizes`: of the input, of each hidden layer, and of the output.
    - `activation`: any function of one array, `jax.nn.relu` unless given.
    - `dropout`: the share of hidden units that is set to 0.

    **Raises:** `ValueError` for fewer than two sizes.

    **Reference:** Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html

    ```python
    >>> mlp = MLP((8, 32, 4), dropout=0.1, key=jax.random.key(0))
    >>> keys = et.example_keys(jax.random.key(1), 0, jnp.arange(2))
    >>> mlp(jnp.ones((2, 8)), key=keys).shape
    (2, 4)

    ```
    """

    layers: tuple[Linear, ...]
    activation: Callable[[Array], Array] = eqx.field(static=True)
    dropout: float = eqx.field(static=True)

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activation: Callable[[Array], Array] = jax.nn.relu,
        dropout: float = 0.0,
        key: PRNGKeyArray,
    ):
        if len(sizes) < 2:
            raise ValueError(
                "An MLP has the sizes of its input and its output at least. "
                f"Got sizes={tuple(sizes)}. Write `MLP((784, 128, 10), key=key)`."
            )
        keys = jax.random.split(key, len(sizes) - 1)
        self.layers = tuple(
            Linear(num_in, num_out, key=layer_key)
            for num_in, num_out, layer_key in zip(sizes[:-1], sizes[1:], keys, strict=True)
        )
        self.activation = activation
        self.dropout = dropout

    def __call__(
        self, x: Float[Array, "batch in"], *, key: Key[Array, " batch"] | None = None
    ) -> Float[Array, "batch out"]:
        """Takes the batch and one key an example, or None for no dropout."""
        for index, layer in enumerate(self.layers[:-1]):
            layer_key = None if key is None else et.random.fold(key, index)
            x = et.dropout(self.activation(layer(x)), self.dropout, key=layer_key)
        return self.layers[-1](x)
