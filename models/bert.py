"""BERT's encoder. Its heads are in `models/bert_heads.py`.

B: batch, S and T: sequence, of queries and of keys, D: dim, N: heads, H: dims of a head.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, Shaped

import eqtrain as et

from .layers import _over_last_dim
from .parallel import ColumnLinear, Embedding

# Drawn from a normal distribution of deviation 0.02, with a bias of 0, and split over no axis.
Linear = functools.partial(ColumnLinear, bias=True, axis=None)
Keys = tuple[Key[Array, " batch"] | None, ...]


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The sizes of a BERT, and how much it drops in training.

    **Fields:** `hidden_dim` is the width within the MLP. `dropout` acts on what the embeddings,
    each attention and each MLP give, and on what a head is given; `attention_dropout` on the shares
    of attention.

    **Raises:** `ValueError` for heads that do not divide.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    max_length: int = 512
    num_types: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_epsilon: float = 1e-12

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(
                f"Heads must divide `dim`. Got dim={self.dim} and num_heads={self.num_heads}. "
                "Change one of them."
            )


BERT_TINY = BertConfig(vocab_size=64, dim=32, num_layers=2, num_heads=4, hidden_dim=64)
MINILM = BertConfig(vocab_size=30_522, dim=384, num_layers=6, num_heads=12, hidden_dim=1536)
BERT_BASE = BertConfig(vocab_size=30_522, dim=768, num_layers=12, num_heads=12, hidden_dim=3072)
BERT_LARGE = BertConfig(vocab_size=30_522, dim=1024, num_layers=24, num_heads=16, hidden_dim=4096)


class Bert(eqx.Module):
    """An encoder that gives a vector for each token, from all tokens of its row.

    **Arguments:**

    - `config`: `BERT_TINY`, `MINILM`, `BERT_BASE`, `BERT_LARGE`, or another `BertConfig`.

    **Reference:** Devlin et al. 2018, https://arxiv.org/abs/1810.04805; MiniLM: Wang et al. 2020,
    https://arxiv.org/abs/2002.10957

    ```python
    >>> bert = eqx.filter_jit(Bert)(BERT_TINY, key=jax.random.key(0))
    >>> eqx.filter_jit(bert)(jnp.array([[1, 5, 9, 0, 0]]), jnp.array([[1, 1, 1, 0, 0]])).shape
    (1, 5, 32)

    ```
    """

    words: Embedding
    positions: Embedding
    types: Embedding
    norm: LayerNorm
    blocks: tuple[Block, ...]
    config: BertConfig = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        words_key, positions_key, types_key, *block_keys = jax.random.split(
            key, 3 + config.num_layers
        )
        make = functools.partial(Embedding, dim=config.dim, axis=None)
        self.words = make(config.vocab_size, key=words_key)
        self.positions = make(config.max_length, key=positions_key)
        self.types = make(config.num_types, key=types_key)
        self.norm = LayerNorm(config.dim, epsilon=config.norm_epsilon)
        self.blocks = tuple(Block(config, key=block_key) for block_key in block_keys)
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        mask: Shaped[Array, "batch seq"] | None = None,
        *,
        types: Int[Array, "batch seq"] | None = None,
        key: Key[Array, " batch"] | None = None,
    ) -> Float[Array, "batch seq dim"]:
        """The vector of each token; that of padding means nothing.

        **Arguments:**

        - `mask`: 0 on padding, which no token looks at; without it there is none.
        - `types`: which of the texts in its row a token is of; 0 unless given.
        - `key`: one an example, for dropout; None leaves it out, as for evaluation.

        **Raises:** `ValueError` for rows longer than the model has positions.
        """
        seq = tokens.shape[1]
        if seq > self.config.max_length:
            raise ValueError(
                "A row must be no longer than the model's positions. "
                f"Got {seq} tokens and max_length={self.config.max_length}. Truncate the rows."
            )
        keys = split_keys(key, 1 + 3 * len(self.blocks))
        x_BSD = self.words(tokens) + self.positions.weight[None, :seq]
        # Not looked up where it is the same for all: that gradient is a sum, and no scatter.
        x_BSD = x_BSD + (self.types.weight[None, :1] if types is None else self.types(types))
        x_BSD = et.dropout(self.norm(x_BSD), self.config.dropout, key=keys[0])
        # Finite, so that a row of padding alone, which has no weight, gives no NaN.
        unseen = None if mask is None else jnp.where(mask == 0, jnp.float32(-1e30), 0.0)
        # A loop and no scan, which stacks what each layer keeps for the backward pass: for `MINILM`
        # on a CPU a step takes 8% less time and memory, and compiling it 40% more.
        for index, block in enumerate(self.blocks):
            x_BSD = block(x_BSD, unseen, keys[1 + 3 * index : 4 + 3 * index])
        return x_BSD


class Block(eqx.Module):
    """Attention, then an MLP, each with a residual connection and a norm behind it."""

    qkv: ColumnLinear
    out: ColumnLinear
    attention_norm: LayerNorm
    up: ColumnLinear
    down: ColumnLinear
    mlp_norm: LayerNorm
    num_heads: int = eqx.field(static=True)
    dropout: float = eqx.field(static=True)
    attention_dropout: float = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        qkv_key, out_key, up_key, down_key = jax.random.split(key, 4)
        self.qkv = Linear(config.dim, 3 * config.dim, key=qkv_key)
        self.out = Linear(config.dim, config.dim, key=out_key)
        self.attention_norm = LayerNorm(config.dim, epsilon=config.norm_epsilon)
        self.up = Linear(config.dim, config.hidden_dim, key=up_key)
        self.down = Linear(config.hidden_dim, config.dim, key=down_key)
        self.mlp_norm = LayerNorm(config.dim, epsilon=config.norm_epsilon)
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.attention_dropout = config.attention_dropout

    def __call__(
        self,
        x_BSD: Float[Array, "batch seq dim"],
        unseen: Float[Array, "batch seq"] | None,
        keys: Keys,
    ) -> Float[Array, "batch seq dim"]:
        q_BSNH, k_BSNH, v_BSNH = (
            part.reshape(*part.shape[:2], self.num_heads, -1)
            for part in jnp.split(self.qkv(x_BSD), 3, axis=-1)
        )
        y_BSNH = attend(q_BSNH, k_BSNH, v_BSNH, unseen, self.attention_dropout, keys[0])
        y_BSD = et.dropout(self.out(y_BSNH.reshape(x_BSD.shape)), self.dropout, key=keys[1])
        x_BSD = self.attention_norm(x_BSD + y_BSD)
        y_BSD = et.dropout(self.down(gelu(self.up(x_BSD))), self.dropout, key=keys[2])
        return self.mlp_norm(x_BSD + y_BSD)


def attend(
    q_BSNH: Float[Array, "batch seq heads head_dim"],
    k_BTNH: Float[Array, "batch seq heads head_dim"],
    v_BTNH: Float[Array, "batch seq heads head_dim"],
    unseen: Float[Array, "batch seq"] | None = None,
    rate: float = 0.0,
    key: Key[Array, " batch"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Lets each token attend to all of its row; softmax in float32.

    **Arguments:**

    - `unseen`: is added to the scores of each key: 0, or very negative where it is not to be seen.
    - `rate`: of the dropout of shares.

    ```python
    >>> attend(jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 4, 8)), jnp.ones((2, 5, 4, 8))).shape
    (2, 5, 4, 8)

    ```
    """
    # Heads first: products over heads that are dim 2 run at half the speed on a CPU.
    q_BNSH = q_BSNH.swapaxes(1, 2) * q_BSNH.shape[-1] ** -0.5
    k_BNTH, v_BNTH = k_BTNH.swapaxes(1, 2), v_BTNH.swapaxes(1, 2)
    scores_BNST = jnp.einsum("BNSH,BNTH->BNST", q_BNSH, k_BNTH, preferred_element_type=jnp.float32)
    if unseen is not None:
        scores_BNST = scores_BNST + unseen[:, None, None]
    # With dropout, this takes a fifth less time on a CPU than to divide by the sum after the
    # product, and less memory; a `custom_vjp` around both products gave nothing.
    share_BNST = et.dropout(jax.nn.softmax(scores_BNST), rate, key=key).astype(v_BNTH.dtype)
    return jnp.einsum("BNST,BNTH->BNSH", share_BNST, v_BNTH).swapaxes(1, 2)


class LayerNorm(eqx.Module):
    """Normalises the last dim to mean 0 and variance 1, in float32.

    **Reference:** Ba et al. 2016, https://arxiv.org/abs/1607.06450

    ```python
    >>> norm = LayerNorm(2)
    >>> [round(float(y), 4) for y in norm(jnp.array([3.0, 4.0]))]
    [-1.0, 1.0]

    ```
    """

    weight: Float[Array, " dim"]
    bias: Float[Array, " dim"]
    epsilon: float = eqx.field(static=True)

    def __init__(self, dim: int, *, epsilon: float = 1e-12):
        self.weight = jnp.ones((dim,), jnp.float32)
        self.bias = jnp.zeros((dim,), jnp.float32)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        y = x.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + self.epsilon)
        y = y * _over_last_dim(self.weight.astype(jnp.float32), x.ndim)
        return (y + _over_last_dim(self.bias.astype(jnp.float32), x.ndim)).astype(x.dtype)


def split_keys(key: Key[Array, " batch"] | None, num: int) -> Keys:
    """Keys for so many masks, or as many times None."""
    # All at once: a `fold` for each mask would add a threefry to the program for each.
    return (None,) * num if key is None else et.random.split(key, num)


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The exact GELU, by the error function. The backward pass keeps `x` alone.

    JAX's keeps two arrays more of the MLP's width: a fifth of what a step of `MINILM` holds.

    **Reference:** Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415

    ```python
    >>> print(f"{gelu(jnp.array(1.0)):.4f} {jax.grad(gelu)(jnp.array(1.0)):.4f}")
    0.8413 1.0833

    ```
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


def _gelu_forward(x: Array) -> tuple[Array, Array]:
    return gelu(x), x


def _gelu_backward(x: Array, grad: Array) -> tuple[Array]:
    # Else XLA would find the error function computed already, and keep it after all.
    wide = lax.optimization_barrier(x).astype(jnp.float32)
    density = jnp.exp(-0.5 * wide * wide) * (2 * math.pi) ** -0.5
    return ((grad.astype(jnp.float32) * (_normal_cdf(wide) + wide * density)).astype(x.dtype),)


def _normal_cdf(x: Array) -> Array:
    return 0.5 + 0.5 * lax.erf(x * 0.5**0.5)


gelu.defvjp(_gelu_forward, _gelu_backward)


def linear_rules(source: str, target: str) -> tuple[et.interop.Rule, ...]:
    """Of a linear layer, which PyTorch stores as (out, in)."""
    return (
        et.interop.rule(f"{source}.weight", f"{target}.weight", "o i -> i o"),
        et.interop.rule(f"{source}.bias", f"{target}.bias"),
    )


def norm_rules(source: str, target: str) -> tuple[et.interop.Rule, ...]:
    """Of a LayerNorm, which Hugging Face keeps within the module before it."""
    return tuple(
        et.interop.rule(f"{source}.LayerNorm.{name}", f"{target}.{name}")
        for name in ("weight", "bias")
    )


_QKV = {"part": ("query", "key", "value")}
_SELF = "encoder.layer.{layer}.attention.self.{part}"
# For a bare `Bert`, from the names in transformers' `BertModel`.
HUGGING_FACE = (
    et.interop.rule("embeddings.word_embeddings.weight", "words.weight"),
    et.interop.rule("embeddings.position_embeddings.weight", "positions.weight"),
    et.interop.rule("embeddings.token_type_embeddings.weight", "types.weight"),
    *norm_rules("embeddings", "norm"),
    et.interop.rule(
        f"{_SELF}.weight", "blocks.{layer}.qkv.weight", "part o i -> i (part o)", **_QKV
    ),
    et.interop.rule(f"{_SELF}.bias", "blocks.{layer}.qkv.bias", "part o -> (part o)", **_QKV),
    *linear_rules("encoder.layer.{layer}.attention.output.dense", "blocks.{layer}.out"),
    *norm_rules("encoder.layer.{layer}.attention.output", "blocks.{layer}.attention_norm"),
    *linear_rules("encoder.layer.{layer}.intermediate.dense", "blocks.{layer}.up"),
    *linear_rules("encoder.layer.{layer}.output.dense", "blocks.{layer}.down"),
    *norm_rules("encoder.layer.{layer}.output", "blocks.{layer}.mlp_norm"),
)
