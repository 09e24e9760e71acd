"""A contender of `benchmarks/compare_bert.py`: JAX and Equinox as people write them.

After the BERT among Equinox's own examples (https://docs.kidger.site/equinox/examples/bert/):
modules of one example under `jax.vmap`, `eqx.nn.MultiheadAttention`, dropout by `jax.random`, and a
step under `eqx.filter_jit` with donation. Nothing of eqtrain is in the step; its rules load the
weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import eqtrain as et
from benchmarks import bert_data, datasets
from benchmarks.peers.served import Stepper, serve
from models.bert import MINILM, BertConfig


class Embedder(eqx.Module):
    words: eqx.nn.Embedding
    types: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config: BertConfig, rate: float, key: Any):
        keys = jax.random.split(key, 3)
        self.words = eqx.nn.Embedding(config.vocab_size, config.dim, key=keys[0])
        self.types = eqx.nn.Embedding(config.num_types, config.dim, key=keys[1])
        self.positions = eqx.nn.Embedding(config.max_length, config.dim, key=keys[2])
        self.norm = eqx.nn.LayerNorm(config.dim, eps=config.norm_epsilon)
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, tokens: Any, key: Any) -> Any:
        x = jax.vmap(self.words)(tokens)
        x = x + jax.vmap(self.types)(jnp.zeros_like(tokens))
        x = x + jax.vmap(self.positions)(jnp.arange(tokens.shape[0]))
        return self.dropout(jax.vmap(self.norm)(x), key=key)


class Layer(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config: BertConfig, rate: float, key: Any):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(
            config.num_heads,
            config.dim,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            dropout_p=rate,
            key=keys[0],
        )
        self.attention_norm = eqx.nn.LayerNorm(config.dim, eps=config.norm_epsilon)
        self.up = eqx.nn.Linear(config.dim, config.hidden_dim, key=keys[1])
        self.down = eqx.nn.Linear(config.hidden_dim, config.dim, key=keys[2])
        self.norm = eqx.nn.LayerNorm(config.dim, eps=config.norm_epsilon)
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x: Any, mask: Any, key: Any) -> Any:
        keys = jax.random.split(key, 3)
        seen = jnp.broadcast_to(mask == 1, (x.shape[0], x.shape[0]))
        y = self.attention(x, x, x, mask=seen, key=keys[0])
        x = jax.vmap(self.attention_norm)(x + self.dropout(y, key=keys[1]))
        y = jax.vmap(lambda x: self.down(jax.nn.gelu(self.up(x), approximate=False)))(x)
        return jax.vmap(self.norm)(x + self.dropout(y, key=keys[2]))


class Classifier(eqx.Module):
    embedder: Embedder
    layers: list[Layer]
    pooler: eqx.nn.Linear
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, config: BertConfig, num_classes: int, rate: float, key: Any):
        keys = jax.random.split(key, 3 + config.num_layers)
        self.embedder = Embedder(config, rate, keys[0])
        self.layers = [Layer(config, rate, layer_key) for layer_key in keys[3:]]
        self.pooler = eqx.nn.Linear(config.dim, config.dim, key=keys[1])
        self.head = eqx.nn.Linear(config.dim, num_classes, key=keys[2])
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, tokens: Any, mask: Any, key: Any) -> Any:
        keys = jax.random.split(key, 2 + len(self.layers))
        x = self.embedder(tokens, keys[0])
        for layer, layer_key in zip(self.layers, keys[2:], strict=True):
            x = layer(x, mask, layer_key)
        pooled = jnp.tanh(self.pooler(x[0]))
        return self.head(self.dropout(pooled, key=keys[1]))


def rules() -> tuple[et.interop.Rule, ...]:
    """From transformers' names."""
    either = {"w": ("weight", "bias")}
    embeddings, layer = "embeddings", "encoder.layer.{i}"
    modules = {
        f"{embeddings}.LayerNorm": "embedder.norm",
        f"{layer}.attention.self.query": "layers.{i}.attention.query_proj",
        f"{layer}.attention.self.key": "layers.{i}.attention.key_proj",
        f"{layer}.attention.self.value": "layers.{i}.attention.value_proj",
        f"{layer}.attention.output.dense": "layers.{i}.attention.output_proj",
        f"{layer}.attention.output.LayerNorm": "layers.{i}.attention_norm",
        f"{layer}.intermediate.dense": "layers.{i}.up",
        f"{layer}.output.dense": "layers.{i}.down",
        f"{layer}.output.LayerNorm": "layers.{i}.norm",
        "pooler.dense": "pooler",
        "classifier": "head",
    }
    tables = {"word": "words", "token_type": "types", "position": "positions"}
    made = [et.interop.rule(f"{a}.{{w}}", f"{b}.{{w}}", None, **either) for a, b in modules.items()]
    made += [
        et.interop.rule(f"embeddings.{a}_embeddings.weight", f"embedder.{b}.weight")
        for a, b in tables.items()
    ]
    return tuple(made)


def make_stepper(batch: bert_data.Batch, dropout: float) -> Stepper:
    num_classes = bert_data.NUM_CLASSES["wordnet"]
    tensors = et.interop.read(datasets.minilm())
    tensors["classifier.weight"] = bert_data.first_head(num_classes, MINILM.dim)
    tensors["classifier.bias"] = 0 * tensors["classifier.weight"][:, 0]
    shapes = eqx.filter_eval_shape(Classifier, MINILM, num_classes, dropout, jax.random.key(0))
    model = et.interop.load(shapes, tensors, rules(), unused=("position_ids",))
    optimizer = optax.adamw(1e-4, weight_decay=bert_data.WEIGHT_DECAY)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    key = jax.random.key(0)

    @eqx.filter_value_and_grad
    def compute_loss(model: Classifier, batch: Any, keys: Any) -> Any:
        logits = jax.vmap(model)(batch["tokens"], batch["mask"], keys)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    @eqx.filter_jit(donate="all")
    def make_step(model: Any, opt_state: Any, key: Any, batch: Any) -> Any:
        # The batch is copied, since it is donated with the rest.
        key, step_key = jax.random.split(key)
        keys = jax.random.split(step_key, batch["tokens"].shape[0])
        loss, grads = compute_loss(model, batch, keys)
        updates, opt_state = optimizer.update(
            grads, opt_state, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), opt_state, key, loss

    def run(num_steps: int) -> float:
        nonlocal model, opt_state, key
        loss = jnp.zeros(())
        for _ in range(num_steps):
            model, opt_state, key, loss = make_step(
                model, opt_state, key, jax.tree.map(jnp.copy, arrays)
            )
        jax.block_until_ready((model, opt_state))
        return float(loss)

    return run


if __name__ == "__main__":
    serve(bert_data.made_up_batch, make_stepper)
