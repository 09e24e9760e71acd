"""A contender of `benchmarks/compare_bert.py`: Flax NNX, with the trainer of its own guides.

`nnx.MultiHeadAttention`, `nnx.Dropout` from the model's own `nnx.Rngs`, `nnx.Optimizer`, and a step
under `nnx.jit` (https://flax.readthedocs.io/en/latest/mnist_tutorial.html). eqtrain's rules load
the weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import eqtrain as et
from benchmarks import bert_data, datasets
from benchmarks.peers.served import Stepper, serve
from models.bert import MINILM, BertConfig


class Layer(nnx.Module):
    def __init__(self, config: BertConfig, rate: float, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(
            config.num_heads,
            config.dim,
            dropout_rate=rate,
            broadcast_dropout=False,
            deterministic=False,
            decode=False,
            rngs=rngs,
        )
        self.attention_norm = nnx.LayerNorm(config.dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.up = nnx.Linear(config.dim, config.hidden_dim, rngs=rngs)
        self.down = nnx.Linear(config.hidden_dim, config.dim, rngs=rngs)
        self.norm = nnx.LayerNorm(config.dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.attention_dropout = nnx.Dropout(rate, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any, seen: Any) -> Any:
        x = self.attention_norm(x + self.attention_dropout(self.attention(x, mask=seen)))
        y = self.down(nnx.gelu(self.up(x), approximate=False))
        return self.norm(x + self.dropout(y))


class Classifier(nnx.Module):
    def __init__(self, config: BertConfig, num_classes: int, rate: float, rngs: nnx.Rngs):
        self.words = nnx.Embed(config.vocab_size, config.dim, rngs=rngs)
        self.positions = nnx.Embed(config.max_length, config.dim, rngs=rngs)
        self.types = nnx.Embed(config.num_types, config.dim, rngs=rngs)
        self.norm = nnx.LayerNorm(config.dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.layers = nnx.List([Layer(config, rate, rngs) for _ in range(config.num_layers)])
        self.pooler = nnx.Linear(config.dim, config.dim, rngs=rngs)
        self.head = nnx.Linear(config.dim, num_classes, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head_dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, tokens: Any, mask: Any) -> Any:
        x = self.words(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        x = self.dropout(self.norm(x + self.types(jnp.zeros_like(tokens))))
        seen = (mask == 1)[:, None, None]
        for layer in self.layers:
            x = layer(x, seen)
        pooled = jnp.tanh(self.pooler(x[:, 0]))
        return self.head(self.head_dropout(pooled))


def rules() -> tuple[et.interop.Rule, ...]:
    """From transformers' names to the paths in `nnx.to_pure_dict`."""
    rule, layer = et.interop.rule, "encoder.layer.{i}"
    made = []
    for theirs, ours in (("query", "query"), ("key", "key"), ("value", "value")):
        source, target = f"{layer}.attention.self.{theirs}", f"layers.{{i}}.attention.{ours}"
        heads = {"h": MINILM.num_heads}
        made.append(rule(f"{source}.weight", f"{target}.kernel", "(h d) i -> i h d", **heads))
        made.append(rule(f"{source}.bias", f"{target}.bias", "(h d) -> h d", **heads))
    source, target = f"{layer}.attention.output.dense", "layers.{i}.attention.out"
    made.append(
        rule(f"{source}.weight", f"{target}.kernel", "o (h d) -> h d o", h=MINILM.num_heads)
    )
    made.append(rule(f"{source}.bias", f"{target}.bias"))
    linear = {
        f"{layer}.intermediate.dense": "layers.{i}.up",
        f"{layer}.output.dense": "layers.{i}.down",
        "pooler.dense": "pooler",
        "classifier": "head",
    }
    for source, target in linear.items():
        made.append(rule(f"{source}.weight", f"{target}.kernel", "o i -> i o"))
        made.append(rule(f"{source}.bias", f"{target}.bias"))
    norms = {
        "embeddings": "norm",
        f"{layer}.attention.output": "layers.{i}.attention_norm",
        f"{layer}.output": "layers.{i}.norm",
    }
    for source, target in norms.items():
        made.append(rule(f"{source}.LayerNorm.weight", f"{target}.scale"))
        made.append(rule(f"{source}.LayerNorm.bias", f"{target}.bias"))
    tables = {"word": "words", "token_type": "types", "position": "positions"}
    for source, target in tables.items():
        made.append(rule(f"embeddings.{source}_embeddings.weight", f"{target}.embedding"))
    return tuple(made)


def make_stepper(batch: bert_data.Batch, dropout: float) -> Stepper:
    num_classes = bert_data.NUM_CLASSES["wordnet"]
    tensors = et.interop.read(datasets.minilm())
    tensors["classifier.weight"] = bert_data.first_head(num_classes, MINILM.dim)
    tensors["classifier.bias"] = 0 * tensors["classifier.weight"][:, 0]
    model = Classifier(MINILM, num_classes, dropout, nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    loaded = et.interop.load(params, tensors, rules(), unused=("position_ids",))
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, loaded)
    nnx.update(model, state)
    optimizer = nnx.Optimizer(
        model, optax.adamw(1e-4, weight_decay=bert_data.WEIGHT_DECAY), wrt=nnx.Param
    )
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}

    def compute_loss(model: Classifier, batch: Any) -> Any:
        logits = model(batch["tokens"], batch["mask"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    @nnx.jit
    def train_step(model: Classifier, optimizer: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(compute_loss)(model, batch)
        optimizer.update(model, grads)
        return loss

    def run(num_steps: int) -> float:
        loss = jnp.zeros(())
        for _ in range(num_steps):
            loss = train_step(model, optimizer, arrays)
        jax.block_until_ready(nnx.state(model, nnx.Param))
        return float(loss)

    return run


if __name__ == "__main__":
    serve(bert_data.made_up_batch, make_stepper)
