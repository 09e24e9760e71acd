"""BERT against Hugging Face's of the same weights, and what dropout and padding do to it."""

import dataclasses
import doctest
import functools
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from benchmarks import datasets
from models import bert, bert_heads
from models.bert import BERT_TINY, MINILM, Bert, BertConfig, attend
from models.bert_heads import (
    MaskedLanguage,
    MeanClassifier,
    SequenceClassifier,
    TokenClassifier,
    hugging_face,
)
from tests.tiers import default

STILL = dataclasses.replace(BERT_TINY, dropout=0.0, attention_dropout=0.0)
NOT_OURS = ("position_ids$",)


def relative(actual: Any, expected: Any) -> float:
    """The largest difference, relative to the largest number of the array it is in."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def torch_config(config: BertConfig, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.hidden_dim,
        max_position_embeddings=config.max_length,
        type_vocab_size=config.num_types,
        layer_norm_eps=config.norm_epsilon,
        attn_implementation="eager",
        **options,
    )


def randomise(network: Any) -> None:
    """Draws all parameters, so that scales, biases and every part of the network matter."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in network.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            scale = "LayerNorm.weight" in name
            value.copy_(1 + 0.3 * noise if scale else 0.2 * noise)


def shapes_of(kind: Any, *args: Any) -> Any:
    return eqx.filter_eval_shape(kind, *args, key=jax.random.key(0))


@functools.cache
def minilm() -> Path:
    try:
        return datasets.minilm()
    except RuntimeError as error:
        pytest.skip(f"The weights of MiniLM cannot be fetched: {error}")


def draw_rows(config: BertConfig, rows: int, seq: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, a mask of ragged lengths, and types."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, config.vocab_size, size=(rows, seq), dtype=np.int32)
    lengths = np.linspace(3, seq, rows).astype(int)
    mask = (np.arange(seq) < lengths[:, None]).astype(np.float32)
    types = (np.arange(seq) >= lengths[:, None] // 2).astype(np.int32)
    return np.where(mask == 1, tokens, 0).astype(np.int32), mask, types


def test_real_weights_give_the_hidden_states_and_gradients_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    still: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    network = transformers.BertForSequenceClassification(
        torch_config(MINILM, num_labels=5, **still)
    )
    tensors = et.interop.read(minilm())
    state = {f"bert.{name}": torch.from_numpy(tensor) for name, tensor in tensors.items()}
    missing, _ = network.load_state_dict(state, strict=False)
    assert sorted(missing) == ["classifier.bias", "classifier.weight"]
    config = dataclasses.replace(MINILM, dropout=0.0, attention_dropout=0.0)
    model = et.interop.load(
        shapes_of(SequenceClassifier, config, 5),
        {**tensors, **{name: network.state_dict()[name] for name in missing}},
        hugging_face(prefix=""),
        unused=NOT_OURS,
    )
    tokens, mask, types = draw_rows(MINILM, 3, 16)
    labels = np.array([4, 0, 2])

    @eqx.filter_jit
    def ours(model: SequenceClassifier, mask: Any) -> Any:
        hidden = model.bert(jnp.asarray(tokens), mask, types=jnp.asarray(types))

        def loss(model: SequenceClassifier) -> Any:
            logits = model(jnp.asarray(tokens), mask, types=jnp.asarray(types))
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels))
            return nll.mean(), logits

        grads, logits = eqx.filter_grad(loss, has_aux=True)(model)
        return hidden, logits, grads

    inputs = {
        "input_ids": torch.from_numpy(tokens).long(),
        "attention_mask": torch.from_numpy(mask),
        "token_type_ids": torch.from_numpy(types).long(),
    }
    hidden_torch = network.bert(**inputs).last_hidden_state.detach().numpy()
    out = network(**inputs, labels=torch.from_numpy(labels))
    out.loss.backward()

    hidden, logits, grads = ours(model, jnp.asarray(mask))
    seen = mask[..., None] == 1
    assert np.abs(np.where(seen, hidden - hidden_torch, 0)).max() < 1e-5
    assert relative(logits, out.logits.detach().numpy()) < 1e-5
    # By their names in transformers, so that this is the way back too.
    exported = et.interop.export(grads, hugging_face())
    expected = {name: value.grad.numpy() for name, value in network.named_parameters()}
    assert exported.keys() == expected.keys()
    # The gradient of a key's bias is 0 but for rounding, since softmax does not see it.
    largest = max(np.abs(value).max() for value in expected.values())
    for name, value in expected.items():
        error = np.abs(exported[name] - value).max()
        assert error < 1e-5 * (largest if "key.bias" in name else np.abs(value).max()), name
    # Negative control: what the comparison says when padding is looked at.
    others, *_ = ours(model, jnp.ones_like(mask))
    assert np.abs(np.where(seen, others - hidden_torch, 0)).max() > 1e-2


HEADS = {
    "rows": ("BertForSequenceClassification", functools.partial(SequenceClassifier, STILL, 3)),
    "tokens": ("BertForTokenClassification", functools.partial(TokenClassifier, STILL, 3)),
    "words": ("BertForMaskedLM", functools.partial(MaskedLanguage, STILL)),
}


@pytest.mark.parametrize("head", HEADS)
def test_heads_give_the_logits_of_transformers_and_go_back_to_them(head):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name, make = HEADS[head]
    network = getattr(transformers, name)(torch_config(STILL, num_labels=3)).eval()
    randomise(network)
    tensors = dict(network.named_parameters())
    model = et.interop.load(shapes_of(make), tensors, hugging_face())
    tokens, mask, _ = draw_rows(STILL, 3, 8)
    logits = eqx.filter_jit(model)(jnp.asarray(tokens), jnp.asarray(mask))
    inputs = {"input_ids": torch.from_numpy(tokens).long(), "attention_mask": torch.tensor(mask)}
    expected = network(**inputs).logits.detach().numpy()
    seen = np.ones(3, bool) if head == "rows" else mask == 1
    assert relative(np.asarray(logits)[seen], expected[seen]) < 1e-5
    if head == "words":
        at = np.array([[1, 0], [2, 1], [3, 7]])
        some = model(jnp.asarray(tokens), jnp.asarray(mask), at=jnp.asarray(at))
        assert relative(some, np.take_along_axis(np.asarray(logits), at[..., None], 1)) < 1e-5
    back = et.interop.export(model, hugging_face())
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor.detach().numpy())


def test_mean_of_the_tokens_is_classified_as_in_torch():
    torch = pytest.importorskip("torch")
    from benchmarks.peers import torch_bert

    config = torch_config(STILL, num_labels=3, hidden_dropout_prob=0.0)
    network: Any = torch_bert.MeanClassifier(config).eval()
    randomise(network)
    tensors = dict(network.named_parameters())
    model = et.interop.load(shapes_of(MeanClassifier, STILL, 3), tensors, hugging_face())
    tokens, mask, _ = draw_rows(STILL, 3, 8)
    padded = np.append(mask, np.zeros((1, 8), np.float32), 0)

    def logits_of(model: MeanClassifier, mask: Any) -> Any:
        rows = jnp.asarray(np.append(tokens, tokens[:1], 0))
        return model(rows, None if mask is None else jnp.asarray(mask))

    @eqx.filter_jit
    def ours(model: MeanClassifier) -> Any:
        def loss(model: MeanClassifier) -> Any:
            logits = logits_of(model, padded)
            return (logits[:3] ** 2).sum(), logits

        return eqx.filter_grad(loss, has_aux=True)(model)

    inputs = {"input_ids": torch.from_numpy(tokens).long(), "attention_mask": torch.tensor(mask)}
    expected = network(**inputs).logits
    (expected**2).sum().backward()
    grads, logits = ours(model)
    assert relative(logits[:3], expected.detach().numpy()) < 1e-5
    exported = et.interop.export(grads, hugging_face())
    assert exported.keys() == tensors.keys()
    largest = max(float(tensor.grad.abs().max()) for tensor in tensors.values())
    for name, tensor in tensors.items():
        assert np.abs(exported[name] - tensor.grad.numpy()).max() < 1e-5 * largest, name
    # A row of padding alone has a mean of zeros.
    assert model.head.bias is not None
    np.testing.assert_array_equal(logits[3], model.head.bias)
    np.testing.assert_array_equal(logits_of(model, None), logits_of(model, np.ones((4, 8))))


@functools.cache
def tiny() -> Bert:
    """Weights so large that every part of the network matters."""
    make = eqx.filter_jit(lambda key: jax.tree.map(lambda leaf: 5 * leaf, Bert(BERT_TINY, key=key)))
    return make(jax.random.key(1))


@eqx.filter_jit
def forward(model: Bert, tokens: Any, mask: Any, key: Any) -> Any:
    return model(tokens, mask, key=key)


def test_padding_and_other_rows_change_nothing():
    tokens, mask, _ = draw_rows(BERT_TINY, 4, 8)
    keys = jax.random.split(jax.random.key(0), 4)
    for key in (None, keys):
        out = forward(tiny(), tokens, mask, key)
        other = np.where(mask == 1, tokens, 7)
        other[3], mask_3 = 5, mask.copy()
        mask_3[3] = 0  # a row of padding alone, as a last batch has
        changed = forward(tiny(), other.astype(np.int32), mask_3, key)
        assert np.isfinite(changed).all()
        seen = mask[:3] == 1
        np.testing.assert_array_equal(np.asarray(out)[:3][seen], np.asarray(changed)[:3][seen])
        # Negative control: tokens that are seen.
        moved = forward(tiny(), np.where(mask == 1, 7, tokens).astype(np.int32), mask, key)
        assert np.abs(np.asarray(out) - moved)[:3][seen].min() > 0


def test_row_of_padding_alone_gives_finite_gradients():
    tokens, mask, _ = draw_rows(BERT_TINY, 4, 8)
    model = jax.tree.map(jnp.asarray, tiny())
    weight = jnp.array([1.0, 1.0, 1.0, 0.0])
    mask[3] = 0

    @eqx.filter_jit
    def grads(tokens: Any) -> Any:
        def loss(model: Bert) -> Any:
            out = model(tokens, jnp.asarray(mask), key=jax.random.split(jax.random.key(0), 4))
            return (out[:, 0] * weight[:, None]).sum()

        return eqx.filter_grad(loss)(model)

    first = grads(jnp.asarray(tokens))
    tokens[3] = 9
    for a, b in zip(*map(jax.tree.leaves, (first, grads(jnp.asarray(tokens)))), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-6 * float(np.abs(a).max()))


def test_dropout_is_that_of_each_example_whatever_stands_beside_it():
    tokens, mask, _ = draw_rows(BERT_TINY, 4, 8)
    keys = jax.random.split(jax.random.key(0), 4)
    out = forward(tiny(), tokens, mask, keys)
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(
        forward(tiny(), tokens[order], mask[order], keys[order]), out[order]
    )
    others = forward(tiny(), tokens, mask, jax.random.split(jax.random.key(1), 4))
    assert np.abs(np.asarray(others) - out).max() > 0.1
    np.testing.assert_array_equal(
        forward(still(tiny()), tokens, mask, keys), forward(tiny(), tokens, mask, None)
    )


def still(model: Bert) -> Bert:
    """The same weights in a model whose rates are 0."""
    shapes = shapes_of(Bert, STILL)
    return jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(model))


def test_step_on_a_mesh_is_that_of_one_device():
    config = dataclasses.replace(BERT_TINY, num_layers=1)
    tokens, mask, types = draw_rows(config, 8, 8)
    weight = (np.arange(8) < 5).astype(np.float32)  # 2, 2, 1 and 0 rows on four devices
    batch = {"tokens": tokens, "mask": mask * weight[:, None], "types": types, "weight": weight}

    def loss(model: SequenceClassifier, state: Any, batch: Any, key: Any) -> Any:
        logits = model(batch["tokens"], batch["mask"], types=batch["types"], key=key)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 0] % 3)
        return et.mean(nll, where=batch["weight"]), state, {}

    def step(*transforms: Any) -> Any:
        # SGD at rate 1, so that the parameters show the gradients' scale.
        program = et.pipe(loss, *transforms, et.update(optax.sgd(1.0)), et.jit)
        make = functools.partial(SequenceClassifier, config, 3)
        ts = program.init(lambda key: make(key=key), key=jax.random.key(0))
        return jax.tree.leaves(ts.model), jax.tree.leaves(program(ts, batch)[0].model)

    start, alone = step()
    _, split = step(et.shard(et.mesh(data=4), batch=P("data")))
    moved = [float(np.abs(a - b).max()) for a, b in zip(start, alone, strict=True)]
    # A key's bias moves by rounding alone, and some types and words are not there.
    assert sum(size > 1e-4 for size in moved) > 0.9 * len(moved)
    for actual, expected in zip(split, alone, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6, rtol=1e-5)


def test_every_place_of_dropout_drops_its_rate():
    rows, seq, dim, share, rate = 64, 16, 32, 0.5, 0.25
    config = dataclasses.replace(
        BERT_TINY, num_layers=1, num_heads=2, dropout=rate, attention_dropout=share
    )
    model = SequenceClassifier(config, dim, key=jax.random.key(0))
    zero = jax.tree.map(jnp.zeros_like, model)
    ones = jnp.ones(dim)
    tokens = jnp.zeros((rows, seq), jnp.int32)
    keys = jax.random.split(jax.random.key(3), rows)
    kept: dict[str, np.ndarray] = {}

    # Embeddings that are 1 before dropout; with no blocks they are what comes out.
    first = eqx.tree_at(lambda m: (m.norm.bias, m.blocks), zero.bert, (ones, ()))
    kept["embeddings"] = np.asarray(first(tokens, key=keys))
    # A branch that gives 1 before dropout, and a norm behind it, whose signs tell what was kept.
    branches = {
        "attention": (lambda block: block.out.bias, ("attention_norm", "mlp_norm")),
        "mlp": (lambda block: block.down.bias, ("mlp_norm",)),
    }
    for name, (bias, norms) in branches.items():
        block = eqx.tree_at(bias, zero.bert.blocks[0], ones)
        scales = lambda block, norms=norms: [getattr(block, norm).weight for norm in norms]  # noqa: E731
        block = eqx.tree_at(scales, block, [ones] * len(norms))
        out = eqx.tree_at(lambda m: m.blocks, zero.bert, (block,))(tokens, key=keys)
        kept[name] = np.where(np.asarray(out) > 0, 1 / (1 - rate), 0)
    # A pooler that gives 1, and a head that hands on what it is given.
    places = lambda m: (m.pooler.bias, m.head.weight)  # noqa: E731
    pooled = eqx.tree_at(places, zero, (20 * ones, jnp.eye(dim)))
    kept["head"] = np.asarray(pooled(tokens, key=keys))
    # Equal scores, and values that show which share they are multiplied by.
    q, v = jnp.zeros((rows, seq, 2, seq)), jnp.broadcast_to(jnp.eye(seq)[:, None], (seq, 2, seq))
    out = attend(q, q, jnp.broadcast_to(v, (rows, *v.shape)), None, share, keys)
    kept["shares"] = seq * np.asarray(out)

    for name, values in kept.items():
        dropped = share if name == "shares" else rate
        np.testing.assert_allclose(np.unique(values.round(4)), [0, 1 / (1 - dropped)], atol=1e-4)
        noise = np.sqrt(dropped * (1 - dropped) / values.size)
        assert abs((values == 0).mean() - dropped) < 4 * noise, name
    # Each has a mask of its own.
    same = [kept[name].ravel() for name in ("embeddings", "attention", "mlp")]
    assert np.abs(np.corrcoef(same) - np.eye(3)).max() < 4 / np.sqrt(same[0].size)


def test_rows_longer_than_the_positions_raise():
    config = dataclasses.replace(BERT_TINY, max_length=8)
    with pytest.raises(ValueError, match=r"Got 9 tokens and max_length=8\. Truncate"):
        eqx.filter_eval_shape(shapes_of(Bert, config), jnp.zeros((1, 9), jnp.int32))


def test_heads_that_do_not_divide_raise():
    with pytest.raises(ValueError, match="Got dim=32 and num_heads=5"):
        dataclasses.replace(BERT_TINY, num_heads=5)


@functools.cache
def examples() -> dict[str, doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = {**vars(bert), "eqx": eqx, "jax": jax, "jnp": jnp, "et": et}
    tests = [
        *(test for module in (bert, bert_heads) for test in finder.find(module, extraglobs=names)),
        *finder.find(bert.gelu, "gelu", module=False, globs=names),  # no plain function
    ]
    return {test.name: test for test in tests if test.examples}


@pytest.mark.parametrize("name", default(sorted(examples()), sorted(examples())[:2]))
def test_example_runs(name):
    report: list[str] = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = doctest.DocTestRunner(verbose=False).run(examples()[name], out=report.append)
    assert result.failed == 0, "".join(report)
