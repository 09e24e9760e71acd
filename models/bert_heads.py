"""Heads of BERT: for rows, for tokens, and for masked words.

B: batch, S: sequence, P: places that are predicted, D: dim.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, Shaped

import eqtrain as et

from . import bert as encoder
from .bert import Bert, BertConfig, LayerNorm, Linear, gelu, linear_rules, norm_rules, split_keys
from .layers import _over_last_dim
from .parallel import ColumnLinear


class SequenceClassifier(eqx.Module):
    """A BERT that gives logits for each row, from the vector of its first token.

    ```python
    >>> model = eqx.filter_jit(SequenceClassifier)(BERT_TINY, 3, key=jax.random.key(0))
    >>> eqx.filter_jit(model)(jnp.array([[1, 5, 9, 2]])).shape
    (1, 3)

    ```
    """

    bert: Bert
    pooler: ColumnLinear
    head: ColumnLinear

    def __init__(self, config: BertConfig, num_classes: int, *, key: PRNGKeyArray):
        bert_key, pooler_key, head_key = jax.random.split(key, 3)
        self.bert = Bert(config, key=bert_key)
        self.pooler = Linear(config.dim, config.dim, key=pooler_key)
        self.head = Linear(config.dim, num_classes, key=head_key)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        mask: Shaped[Array, "batch seq"] | None = None,
        *,
        types: Int[Array, "batch seq"] | None = None,
        key: Key[Array, " batch"] | None = None,
    ) -> Float[Array, "batch classes"]:
        bert_key, head_key = split_keys(key, 2)
        x_BSD = self.bert(tokens, mask, types=types, key=bert_key)
        pooled_BD = jnp.tanh(self.pooler(x_BSD[:, 0]))
        return self.head(et.dropout(pooled_BD, self.bert.config.dropout, key=head_key))


class MeanClassifier(eqx.Module):
    """A BERT that gives logits for each row, from the mean of the vectors of its tokens.

    For encoders of sentences, such as MiniLM: they were trained as this mean, and not as their
    first token (Reimers and Gurevych 2019, https://arxiv.org/abs/1908.10084, section 3).

    ```python
    >>> model = eqx.filter_jit(MeanClassifier)(BERT_TINY, 3, key=jax.random.key(0))
    >>> eqx.filter_jit(model)(jnp.array([[1, 5, 9, 2]])).shape
    (1, 3)

    ```
    """

    bert: Bert
    head: ColumnLinear

    def __init__(self, config: BertConfig, num_classes: int, *, key: PRNGKeyArray):
        bert_key, head_key = jax.random.split(key)
        self.bert = Bert(config, key=bert_key)
        self.head = Linear(config.dim, num_classes, key=head_key)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        mask: Shaped[Array, "batch seq"] | None = None,
        *,
        types: Int[Array, "batch seq"] | None = None,
        key: Key[Array, " batch"] | None = None,
    ) -> Float[Array, "batch classes"]:
        bert_key, head_key = split_keys(key, 2)
        x_BSD = self.bert(tokens, mask, types=types, key=bert_key)
        seen_BS = jnp.ones(tokens.shape, bool) if mask is None else mask != 0
        # A row of padding alone, as a last batch has, has no mean.
        count_B = jnp.maximum(seen_BS.sum(1, dtype=jnp.float32), 1)
        total_BD = jnp.where(seen_BS[..., None], x_BSD, 0).sum(1, dtype=jnp.float32)
        mean_BD = (total_BD / count_B[:, None]).astype(x_BSD.dtype)
        return self.head(et.dropout(mean_BD, self.bert.config.dropout, key=head_key))


class TokenClassifier(eqx.Module):
    """A BERT that gives logits for each token.

    ```python
    >>> model = eqx.filter_jit(TokenClassifier)(BERT_TINY, 3, key=jax.random.key(0))
    >>> eqx.filter_jit(model)(jnp.array([[1, 5, 9, 2]])).shape
    (1, 4, 3)

    ```
    """

    bert: Bert
    head: ColumnLinear

    def __init__(self, config: BertConfig, num_classes: int, *, key: PRNGKeyArray):
        bert_key, head_key = jax.random.split(key)
        self.bert = Bert(config, key=bert_key)
        self.head = Linear(config.dim, num_classes, key=head_key)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        mask: Shaped[Array, "batch seq"] | None = None,
        *,
        types: Int[Array, "batch seq"] | None = None,
        key: Key[Array, " batch"] | None = None,
    ) -> Float[Array, "batch seq classes"]:
        bert_key, head_key = split_keys(key, 2)
        x_BSD = self.bert(tokens, mask, types=types, key=bert_key)
        return self.head(et.dropout(x_BSD, self.bert.config.dropout, key=head_key))


class MaskedLanguage(eqx.Module):
    """A BERT that gives logits of the word at each place; its last weight is the words' embedding.

    ```python
    >>> model = eqx.filter_jit(MaskedLanguage)(BERT_TINY, key=jax.random.key(0))
    >>> eqx.filter_jit(model)(jnp.array([[1, 5, 9, 2]]), at=jnp.array([[1, 3]])).shape
    (1, 2, 64)

    ```
    """

    bert: Bert
    transform: ColumnLinear
    norm: LayerNorm
    bias: Float[Array, " vocab"]

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        bert_key, transform_key = jax.random.split(key)
        self.bert = Bert(config, key=bert_key)
        self.transform = Linear(config.dim, config.dim, key=transform_key)
        self.norm = LayerNorm(config.dim, epsilon=config.norm_epsilon)
        self.bias = jnp.zeros((config.vocab_size,), jnp.float32)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        mask: Shaped[Array, "batch seq"] | None = None,
        *,
        types: Int[Array, "batch seq"] | None = None,
        at: Int[Array, "batch places"] | None = None,
        key: Key[Array, " batch"] | None = None,
    ) -> Float[Array, "batch places vocab"]:
        """Takes as `at` the places to predict; all of them unless given, at several times the cost
        of the encoder."""
        x_BPD = self.bert(tokens, mask, types=types, key=key)
        if at is not None:
            x_BPD = jnp.take_along_axis(x_BPD, at[..., None], axis=1)
        x_BPD = self.norm(gelu(self.transform(x_BPD)))
        logits = et.matmul(x_BPD, self.bert.words.weight.T)
        return logits + _over_last_dim(self.bias, logits.ndim)


def hugging_face(prefix: str = "bert.") -> tuple[et.interop.Rule, ...]:
    """The rules for a model with any of these heads, from the names in transformers.

    **Arguments:**

    - `prefix`: of the encoder's names: `""` for a file of a bare `BertModel`, which has no head but
        the pooler.

    ```python
    >>> shapes = eqx.filter_eval_shape(SequenceClassifier, MINILM, 2, key=jax.random.key(0))
    >>> found = et.interop.compare(shapes, {"bert.pooler.dense.bias": 0}, hugging_face())
    >>> found.loaded
    {'pooler.bias': ('bert.pooler.dense.bias',)}

    ```
    """
    return (
        *et.interop.prefixed(encoder.HUGGING_FACE, source=prefix, target="bert."),
        *linear_rules(f"{prefix}pooler.dense", "pooler"),
        *linear_rules("classifier", "head"),
        *linear_rules("cls.predictions.transform.dense", "transform"),
        *norm_rules("cls.predictions.transform", "norm"),
        et.interop.rule("cls.predictions.bias", "bias"),
    )
