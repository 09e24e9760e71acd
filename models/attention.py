"""Causal attention with grouped heads and rotary positions, for packed sequences too.

B: batch, S and T: sequence, of queries and of keys, D: dim, N: query heads, K: key and value heads,
G: query heads to each of them, R: the rows of all those, G times S, H: dims of a head.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from .parallel import ColumnLinear, RowLinear, enter

Rotation = tuple[Float32[Array, "_ seq half"], Float32[Array, "_ seq half"]]


def rotary(positions: Int[Array, "_ seq"], head_dim: int, theta: float) -> Rotation:
    """The cosines and sines by which heads of `head_dim` dims are rotated at each position.

    ```python
    >>> cos, sin = rotary(jnp.arange(5)[None], 8, 10000.0)
    >>> cos.shape
    (1, 5, 4)

    ```
    """
    frequencies = np.asarray(theta ** -(np.arange(0, head_dim, 2) / head_dim), np.float32)
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BSNH: Float[Array, "batch seq heads head_dim"], rotation: Rotation) -> Array:
    """Rotates the first half of each head against the second, in float32.

    **Reference:** Su et al. 2021, https://arxiv.org/abs/2104.09864, but for which dims are a pair:
    dim i and dim i + head_dim / 2, as in Hugging Face's weights and unlike Meta's.

    ```python
    >>> rotate(jnp.ones((2, 5, 3, 8)), rotary(jnp.arange(5)[None], 8, 10000.0)).shape
    (2, 5, 3, 8)

    ```
    """
    cos, sin = (table[:, :, None] for table in rotation)
    first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x_BSNH.dtype)


def attend(
    q_BSNH: Float[Array, "batch seq heads head_dim"],
    k_BTKH: Float[Array, "batch seq kv_heads head_dim"],
    v_BTKH: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Lets each token attend to itself and those before it, of its own segment; softmax in float32.

    **Reference:** Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; grouped heads: Ainslie et
    al. 2023, https://arxiv.org/abs/2305.13245

    ```python
    >>> attend(jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 2, 8)), jnp.ones((2, 5, 2, 8))).shape
    (2, 5, 4, 8)

    ```
    """
    # Not `jax.nn.dot_product_attention`: forward and backward on a CPU this takes half its time at
    # length 128, three quarters at 256 and 512, and that refuses bfloat16 under strict promotion.
    batch, seq, heads, head_dim = q_BSNH.shape
    kv_heads = k_BTKH.shape[2]
    # Heads first, and all queries of a group as rows of one matrix: products over heads that are
    # dim 2 run at half the speed on a CPU. And rows until the end: what is reshaped on the way from
    # one product to the other is stored for the backward pass in both shapes.
    group = heads // kv_heads
    q_BKRH = q_BSNH.swapaxes(1, 2).reshape(batch, kv_heads, group * seq, head_dim)
    k_BKTH, v_BKTH = k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2)
    scores_BKRT = jnp.einsum("BKRH,BKTH->BKRT", q_BKRH, k_BKTH, preferred_element_type=jnp.float32)
    seen = jnp.tril(jnp.ones((seq, seq), bool))[None]
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    seen_BKRT = jnp.tile(seen, (1, group, 1))[:, None]
    # A token sees itself, so that no row is -inf throughout.
    scores_BKRT = jnp.where(seen_BKRT, scores_BKRT * head_dim**-0.5, -jnp.inf)
    largest = jax.lax.stop_gradient(scores_BKRT.max(-1, keepdims=True))
    share_BKRT = jnp.exp(scores_BKRT - largest)
    # The sum divides what comes out, which is smaller than the scores. As a product, which XLA
    # makes of a division in some programs and not in others.
    inverse_BKR1 = 1 / share_BKRT.sum(-1, keepdims=True)
    out_BKRH = jnp.einsum(
        "BKRT,BKTH->BKRH",
        share_BKRT.astype(v_BTKH.dtype),
        v_BKTH,
        preferred_element_type=jnp.float32,
    )
    out_BKRH = (out_BKRH * inverse_BKR1).astype(v_BTKH.dtype)
    return out_BKRH.reshape(batch, heads, seq, head_dim).swapaxes(1, 2)


class Attention(eqx.Module):
    """Causal attention between projections, whose heads may be split over `axis`.

    Each of the `num_kv_heads` key-value heads serves an equal number of query heads. How many of
    them a device has follows from the width of its weights.

    ```python
    >>> attention = Attention(32, num_heads=4, num_kv_heads=2, key=jax.random.key(0))
    >>> attention(jnp.ones((2, 5, 32)), rotary(jnp.arange(5)[None], 8, 10000.0)).shape
    (2, 5, 32)

    ```
    """

    query: ColumnLinear
    key: ColumnLinear
    value: ColumnLinear
    out: RowLinear
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    axis: str | None = eqx.field(static=True)
    sequence: bool = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        axis: str | None = "model",
        sequence: bool = False,
        key: PRNGKeyArray,
    ):
        query_key, key_key, value_key, out_key = jax.random.split(key, 4)
        self.head_dim = dim // num_heads
        kv_dim = num_kv_heads * self.head_dim
        self.query = ColumnLinear(dim, dim, axis=axis, key=query_key)
        self.key = ColumnLinear(dim, kv_dim, axis=axis, key=key_key)
        self.value = ColumnLinear(dim, kv_dim, axis=axis, key=value_key)
        self.out = RowLinear(dim, dim, axis=axis, sequence=sequence, key=out_key)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.axis = axis
        self.sequence = sequence

    def __call__(
        self,
        x_BSD: Float[Array, "batch part dim"],
        rotation: Rotation,
        segments: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch part dim"]:
        """Takes the cosines and sines of the whole sequence's positions, and its segments.

        **Raises:** `ValueError` for a split that cuts a head, or parts queries from their keys.
        """
        self._require_whole_groups()
        x_BSD = enter(x_BSD, self.query, sequence=self.sequence)
        q_BSNH, k_BSKH, v_BSKH = (
            y.reshape(*y.shape[:-1], -1, self.head_dim)
            for y in (self.query(x_BSD), self.key(x_BSD), self.value(x_BSD))
        )
        q_BSNH, k_BSKH = rotate(q_BSNH, rotation), rotate(k_BSKH, rotation)
        y_BSNH = attend(q_BSNH, k_BSKH, v_BSKH, segments)
        return self.out(y_BSNH.reshape(*y_BSNH.shape[:-2], -1))

    def _require_whole_groups(self) -> None:
        layers = (self.query, self.key, self.value)
        heads = [layer.weight.shape[1] / self.head_dim for layer in layers]
        whole = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        shares = {count / total for count, total in zip(heads, whole, strict=True)}
        if len(shares) > 1 or not all(count.is_integer() for count in heads):
            raise ValueError(
                "A split of attention must give every device whole heads, and the same share of "
                f"query, key and value heads. Got {', '.join(f'{count:g}' for count in heads)} of "
                f"{', '.join(map(str, whole))} heads on each device along `{self.axis}`. "
                f"Split all three, over a number of devices that divides {self.num_kv_heads}."
            )
