"""Llama: a decoder whose layers are scanned, rematerialised, and split as the mesh asks.

B: batch, S: sequence, or a device's part of it, D: dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

import eqtrain as et

from .attention import Attention, Rotation, rotary
from .parallel import (
    ColumnLinear,
    Embedding,
    RowLinear,
    enter,
    vocab_parallel_cross_entropy,
)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama.

    **Fields:** `hidden_dim` is the width within the MLP. Each of the `num_kv_heads` key-value heads
    serves an equal number of the `num_heads` query heads. With `tied`, the output head is the
    embedding transposed.

    **Raises:** `ValueError` for heads that do not divide.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        if self.dim % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ValueError(
                "Query heads must divide `dim` into an even number each, and key-value heads must "
                f"divide query heads. Got dim={self.dim}, num_heads={self.num_heads}, "
                f"num_kv_heads={self.num_kv_heads}. Change one of them."
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


LLAMA_TINY = LlamaConfig(
    vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=64
)
LLAMA_25M = LlamaConfig(
    vocab_size=8192, dim=512, num_layers=6, num_heads=8, num_kv_heads=4, hidden_dim=1344
)
LLAMA_7B = LlamaConfig(
    vocab_size=32_000, dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, hidden_dim=11_008
)
LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=14_336,
    rope_theta=500_000.0,
)


def tensor_parallel(axis: str = "model", *, tied: bool = False) -> Any:
    """A placement that splits a Llama over `axis`: its heads, MLPs' widths, and vocabulary.

    The scales of norms stay whole. `tied` as in the config.

    **Raises:** `ValueError`, when a model is placed, for sizes that do not divide, and for a tied
    model without `tied=True`: it has no head.

    ```python
    >>> placement = et.fsdp("fsdp", lazy="blocks", beside=tensor_parallel("model"))

    ```
    """
    # Dim 0 of what is in the blocks numbers them.
    patterns = {
        r"^embedding\.weight$": P(axis),
        r"^blocks\..*\.(query|key|value|gate|up)\.weight$": P(None, None, axis),
        r"^blocks\..*\.(out|down)\.weight$": P(None, axis),
    }
    return et.rules(patterns if tied else {**patterns, r"^head\.weight$": P(None, axis)})


class Llama(eqx.Module):
    """A decoder-only transformer that gives the logits of each next token.

    Its weights may be split over `axis`, by `tensor_parallel`, and over a batch axis beside, by
    `et.fsdp("fsdp", lazy="blocks", beside=tensor_parallel("model"))`: the layers are stacked along
    dim 0 in `blocks`, and each is gathered, run, and rematerialised in the backward pass.

    **Arguments:**

    - `config`: `LLAMA_TINY`, `LLAMA_25M`, `LLAMA_7B`, `LLAMA_8B`, or another `LlamaConfig`.
    - `axis`: the mesh axis over which weights may be split; it must not split the batch.
    - `sequence_parallel`: where weights are split, each device has a part of the sequence between
      the attentions and MLPs. Every layer has to be split then.
    - `remat`: stores the input of each layer alone for the backward pass. Without it, the weights
      that `et.fsdp` gathers layer by layer are stored too, all of them.

    **Reference:** Touvron et al. 2023, https://arxiv.org/abs/2302.13971; Grattafiori et al. 2024
    (Llama 3), https://arxiv.org/abs/2407.21783. All weights start from a normal distribution of
    deviation 0.02, as Hugging Face's do.

    ```python
    >>> def loss(model, state, batch, key):
    ...     nll = model.nll(batch["tokens"], batch["labels"])
    ...     return et.mean(nll, where=batch["weight"]), state, {}
    >>> llama = eqx.filter_jit(Llama)(LLAMA_TINY, key=jax.random.key(0))
    >>> eqx.filter_jit(llama)(jnp.array([[1, 5, 9, 2, 6]])).shape
    (1, 5, 64)

    ```
    """

    embedding: Embedding
    blocks: Block
    norm: RMSNorm
    head: ColumnLinear | None
    config: LlamaConfig = eqx.field(static=True)
    axis: str | None = eqx.field(static=True)
    sequence_parallel: bool = eqx.field(static=True)
    remat: bool = eqx.field(static=True)

    def __init__(
        self,
        config: LlamaConfig,
        *,
        axis: str | None = "model",
        sequence_parallel: bool = False,
        remat: bool = True,
        key: PRNGKeyArray,
    ):
        embedding_key, blocks_key, head_key = jax.random.split(key, 3)
        self.embedding = Embedding(
            config.vocab_size, config.dim, axis=axis, sequence=sequence_parallel, key=embedding_key
        )
        # Under vmap, so that no layer exists apart from the stack of them.
        self.blocks = eqx.filter_vmap(
            lambda key: Block(config, axis=axis, sequence=sequence_parallel, key=key)
        )(jax.random.split(blocks_key, config.num_layers))
        self.norm = RMSNorm(config.dim, epsilon=config.norm_epsilon)
        self.head = (
            None
            if config.tied
            else ColumnLinear(config.dim, config.vocab_size, axis=axis, key=head_key)
        )
        self.config = config
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.remat = remat

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segments: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """The logits of the token after each; this device's part of the vocabulary if it is split.

        **Arguments:**

        - `segments`: numbers the sequences that are packed into a row. A token attends to those
          before it that have its number.
        - `positions`: 0, 1, 2 and so on unless given, which also serves packed sequences: only
          differences of positions matter, within a segment.

        **Raises:** `ValueError` for a split that cuts a head, that leaves out layers which have to
        be split together, or whose devices do not divide a sequence that they are to share.
        """
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        rotation = rotary(positions, self.config.head_dim, self.config.rope_theta)
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def run(x_BSD: Array, arrays: Block) -> tuple[Array, None]:
            # What lies split over a batch axis is whole from here to the end of this block.
            block = et.gather(eqx.combine(arrays, static))
            if self.sequence_parallel:
                self._require_split_together(block)
            return block(x_BSD, rotation, segments), None

        if self.remat:
            run = jax.checkpoint(run, prevent_cse=False)  # a scan keeps passes apart by itself
        x_BSD, _ = lax.scan(run, self.embedding(tokens), arrays)
        x_BSD = self.norm(x_BSD)
        last = self.embedding if self.head is None else self.head
        x_BSD = enter(x_BSD, last, sequence=self.sequence_parallel)
        return et.matmul(x_BSD, last.weight.T) if self.head is None else self.head(x_BSD)

    def _require_split_together(self, block: Block) -> None:
        """A layer that is whole sees parts of sequences where the others see them whole."""
        layers = {
            "embedding": self.embedding,
            "blocks.attention.query": block.attention.query,
            "blocks.attention.out": block.attention.out,
            "blocks.mlp.gate": block.mlp.gate,
            "blocks.mlp.down": block.mlp.down,
            **({} if self.head is None else {"head": self.head}),
        }
        split = [name for name, layer in layers.items() if layer.is_split]
        whole = [name for name, layer in layers.items() if not layer.is_split]
        if split and whole:
            raise ValueError(
                "A sequence-parallel model must have all of its layers split over the axis, or none"
                f". Got {', '.join(split)} split along `{self.axis}`, and {', '.join(whole)} whole."
                " Place the model by `tensor_parallel`."
            )

    def nll(
        self,
        tokens: Int[Array, "batch seq"],
        labels: Int[Array, "batch seq"],
        *,
        segments: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
    ) -> Float32[Array, "batch seq"]:
        """The negative log-likelihood of `labels`, which are the tokens one further.

        It is equal along the axis that splits the weights, and NaN where a label is outside the
        vocabulary: see `vocab_parallel_cross_entropy`.
        """
        logits = self(tokens, segments=segments, positions=positions)
        return vocab_parallel_cross_entropy(logits, labels, self.config.vocab_size, self.axis)


class Block(eqx.Module):
    """Attention, then an MLP, each behind a norm and beside a residual connection."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: MLP

    def __init__(self, config: LlamaConfig, *, axis: str | None, sequence: bool, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = RMSNorm(config.dim, epsilon=config.norm_epsilon)
        self.attention = Attention(
            config.dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            axis=axis,
            sequence=sequence,
            key=attention_key,
        )
        self.mlp_norm = RMSNorm(config.dim, epsilon=config.norm_epsilon)
        self.mlp = MLP(config.dim, config.hidden_dim, axis=axis, sequence=sequence, key=mlp_key)

    def __call__(
        self,
        x_BSD: Float[Array, "batch part dim"],
        rotation: Rotation,
        segments: Int[Array, "batch seq"] | None,
    ) -> Float[Array, "batch part dim"]:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotation, segments)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class RMSNorm(eqx.Module):
    """Divides by the root of the mean square over the last dim, in float32.

    **Reference:** Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467

    ```python
    >>> norm = RMSNorm(2)
    >>> [round(float(y), 4) for y in norm(jnp.array([3.0, 4.0]))]
    [0.8485, 1.1314]

    ```
    """

    weight: Float[Array, " dim"]
    epsilon: float = eqx.field(static=True)

    def __init__(self, dim: int, *, epsilon: float = 1e-5):
        self.weight = jnp.ones((dim,), jnp.float32)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + self.epsilon)
        weight = self.weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (y * weight).astype(x.dtype)


class MLP(eqx.Module):
    """Computes `down(silu(gate(x)) * up(x))`, whose inner width may be split over `axis`.

    **Reference:** Shazeer 2020 (SwiGLU), https://arxiv.org/abs/2002.05202
    """

    gate: ColumnLinear
    up: ColumnLinear
    down: RowLinear
    axis: str | None = eqx.field(static=True)
    sequence: bool = eqx.field(static=True)

    def __init__(
        self, dim: int, hidden_dim: int, *, axis: str | None, sequence: bool, key: PRNGKeyArray
    ):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate = ColumnLinear(dim, hidden_dim, axis=axis, key=gate_key)
        self.up = ColumnLinear(dim, hidden_dim, axis=axis, key=up_key)
        self.down = RowLinear(hidden_dim, dim, axis=axis, sequence=sequence, key=down_key)
        self.axis = axis
        self.sequence = sequence

    def __call__(self, x_BSD: Float[Array, "batch part dim"]) -> Float[Array, "batch part dim"]:
        x_BSD = enter(x_BSD, self.gate, sequence=self.sequence)
        return self.down(jax.nn.silu(self.gate(x_BSD)) * self.up(x_BSD))


_HUGGING_FACE_LAYERS = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
# For `et.interop`, from the names in transformers' `LlamaForCausalLM`. A tied model has no head.
HUGGING_FACE = (
    et.interop.rule("model.embed_tokens.weight", "embedding.weight"),
    *(
        et.interop.rule(
            f"model.layers.{{layer}}.{theirs}.weight",
            f"blocks.{ours}.weight",
            "layer o i -> layer i o",
        )
        for theirs, ours in _HUGGING_FACE_LAYERS.items()
    ),
    et.interop.rule("model.layers.{layer}.input_layernorm.weight", "blocks.attention_norm.weight"),
    et.interop.rule(
        "model.layers.{layer}.post_attention_layernorm.weight", "blocks.mlp_norm.weight"
    ),
    et.interop.rule("model.norm.weight", "norm.weight"),
    et.interop.rule("lm_head.weight", "head.weight", "o i -> i o"),
)
