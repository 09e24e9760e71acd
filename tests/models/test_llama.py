"""Llama against Hugging Face's of the same weights, published sizes, and itself on meshes."""

import dataclasses
import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from models.llama import (
    HUGGING_FACE,
    LLAMA_7B,
    LLAMA_8B,
    LLAMA_25M,
    LLAMA_TINY,
    Llama,
    LlamaConfig,
    tensor_parallel,
)
from tests.tiers import default, grid

# As many key-value heads as there are devices along `model`, at most.
CONFIG = dataclasses.replace(LLAMA_TINY, num_heads=8, num_kv_heads=4)
ROWS, SEQ = 8, 8


def make(key: Any, config: LlamaConfig = CONFIG, **options: Any) -> Llama:
    """Weights so large, and scales so unequal, that every part of the network matters."""

    def grow(path: Any, leaf: Any) -> Any:
        if "norm" not in jax.tree_util.keystr(path):
            return 10 * leaf
        wave = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape)
        return leaf * (1 + 0.3 * wave)

    return jax.tree_util.tree_map_with_path(grow, Llama(config, key=key, **options))


def arrays_of(model: Llama) -> Any:
    return jax.tree.map(np.asarray, eqx.filter(model, eqx.is_array))


def relative(actual: Any, expected: Any) -> float:
    """The largest difference, relative to the largest number of the array it is in."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(a - e).max() / np.abs(e).max()) for a, e in pairs)


def draw_tokens(rows: int, seq: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, CONFIG.vocab_size, size=(rows, seq), dtype=np.int32)


def parameters(config: LlamaConfig) -> int:
    model = eqx.filter_eval_shape(Llama, config, key=jax.random.key(0))
    leaves = jax.tree.leaves(eqx.filter(model, lambda leaf: hasattr(leaf, "shape")))
    return sum(leaf.size for leaf in leaves)


def test_parameter_counts_are_the_published_ones():
    assert parameters(LLAMA_7B) == 6_738_415_616
    assert parameters(LLAMA_8B) == 8_030_261_248
    assert parameters(LLAMA_25M) == pytest.approx(25e6, rel=0.05)
    tied = dataclasses.replace(LLAMA_8B, tied=True)
    assert parameters(LLAMA_8B) - parameters(tied) == 128_256 * 4096


def torch_llama(config: LlamaConfig) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            intermediate_size=config.hidden_dim,
            rms_norm_eps=config.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied,
            attn_implementation="eager",
            use_cache=False,
        )
    )


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_match_hugging_face(tied):
    torch = pytest.importorskip("torch")
    # Two query heads to a key-value head, and a theta other than the default of either.
    config = dataclasses.replace(LLAMA_TINY, rope_theta=500.0, norm_epsilon=1e-3, tied=tied)
    network = torch_llama(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in network.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    tokens = jnp.asarray(draw_tokens(3, 12))
    tokens_torch = torch.tensor(np.array(tokens)).long()
    logits_torch = network(tokens_torch).logits
    torch.nn.functional.cross_entropy(
        logits_torch[:, :-1].flatten(0, 1), tokens_torch[:, 1:].flatten()
    ).backward()

    shapes = eqx.filter_eval_shape(Llama, config, key=jax.random.key(0), remat=not tied)
    weights = dict(network.named_parameters())
    model = et.interop.load(shapes, weights, HUGGING_FACE)

    forward = eqx.filter_jit(lambda model: model(tokens))
    loss = lambda model: model.nll(tokens[:, :-1], tokens[:, 1:]).mean()  # noqa: E731
    logits, grads = forward(model), eqx.filter_jit(eqx.filter_grad(loss))(model)

    assert relative(logits, logits_torch.detach().numpy()) < 1e-5
    expected = {name: weight.grad.numpy() for name, weight in weights.items()}
    exported = et.interop.export(grads, HUGGING_FACE)
    assert exported.keys() == expected.keys()
    assert relative(exported, expected) < 1e-5
    # Negative control: what the comparison says of another theta.
    other = dataclasses.replace(config, rope_theta=1000.0)
    shapes = eqx.filter_eval_shape(Llama, other, key=jax.random.key(0))
    model = et.interop.load(shapes, weights, HUGGING_FACE)
    assert relative(forward(model), logits_torch.detach().numpy()) > 1e-3


def test_packed_sequences_do_not_see_each_other():
    model = start()
    tokens = jnp.asarray(draw_tokens(1, 12))
    forward = eqx.filter_jit(lambda model, *args, **options: model(*args, **options))
    alone = np.concatenate([forward(model, tokens[:, :6]), forward(model, tokens[:, 6:])], axis=1)
    segments = jnp.asarray([[3] * 6 + [1] * 6])
    positions = jnp.asarray([[*range(6), *range(6)]])
    packed = forward(model, tokens, segments=segments, positions=positions)
    assert relative(packed, alone) < 1e-5
    # Only differences of positions matter.
    shifted = positions + 100 * segments
    assert relative(forward(model, tokens, segments=segments, positions=shifted), alone) < 1e-4
    assert relative(forward(model, tokens, segments=segments), alone) < 1e-5
    # Negative controls.
    one_segment = forward(model, tokens, segments=0 * segments, positions=positions)
    assert relative(one_segment, alone) > 0.01
    stretched = forward(model, tokens, segments=segments, positions=2 * positions)
    assert relative(stretched, alone) > 0.01


def loss(model: Llama, state: Any, batch: Any, key: Any) -> Any:
    nll = model.nll(batch["tokens"], batch["labels"], segments=batch["segments"])
    return et.mean(nll, where=batch["weight"]), state, {}


def make_batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    batches = []
    for tokens in np.split(draw_tokens(2 * ROWS, SEQ + 1), 2):
        weight = rng.choice([0, 1, 3], size=(ROWS, SEQ)).astype(np.float32)
        batches.append(
            {
                "tokens": tokens[:, :-1],
                "labels": np.where(weight > 0, tokens[:, 1:], -100),
                "segments": np.sort(rng.integers(0, 2, size=(ROWS, SEQ), dtype=np.int32)),
                "weight": weight,
            }
        )
    return batches


def program_of(*transforms: Any) -> et.Program:
    """SGD at rate 1, so that the parameters show the gradients' scale."""
    return et.pipe(loss, *transforms, et.update(optax.sgd(1.0)), et.jit)


def train(program: et.Program, **options: Any) -> tuple[Llama, list[float]]:
    """The parameters after two steps, and the loss of each."""
    ts = program.init(functools.partial(make, **options), key=jax.random.key(0))
    losses = []
    for batch in make_batches():
        ts, metrics = program(ts, jax.device_put(batch, program.batch_sharding))
        losses.append(float(metrics["loss"]))
    assert program.compilations == 1
    return arrays_of(ts.model), losses


@functools.cache
def start() -> Llama:
    """The model before the first step."""
    return program_of().init(make, key=jax.random.key(0)).model


@functools.cache
def alone() -> tuple[Llama, list[float]]:
    return train(program_of())


SPLIT = tensor_parallel("model")
# Small enough that the scales of norms are split too.
LAZY = et.fsdp("fsdp", min_size=16, lazy="blocks", beside=SPLIT)
PLACEMENTS = {
    "replicated": SPLIT,
    "up front": et.fsdp("fsdp", min_size=16, beside=SPLIT),
    "lazy": LAZY,
}
CUBE = {"data": 2, "fsdp": 2, "model": 2}
CASES = [
    (CUBE, "replicated", False),
    (CUBE, "up front", False),
    (CUBE, "lazy", False),
    (CUBE, "replicated", True),
    (CUBE, "lazy", True),
    ({"model": 4}, "replicated", False),
    ({"model": 4}, "replicated", True),
]


def shard(axes: dict[str, int], placement: Any) -> Any:
    batch = P(("data", "fsdp")) if "data" in axes else P()
    return et.shard(et.mesh(devices=None, **axes), batch=batch, model=placement)


def check_trained(actual: Llama, losses: list[float]) -> None:
    expected, losses_alone = alone()
    np.testing.assert_allclose(losses, losses_alone, rtol=1e-5)
    assert relative(actual, expected) < 1e-5
    # Negative control: a gradient of the wrong scale, by a factor of 2 or 1/2, would show.
    moved = jax.tree.map(lambda a, b: a - b, expected, arrays_of(start()))
    pairs = zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True)
    assert min(np.abs(m).max() / np.abs(e).max() for m, e in pairs) > 0.05


# Those with one device's sums along an axis of its own: what the others have is in the cube.
DEFAULT = [(CUBE, "lazy", True), ({"model": 4}, "replicated", False)]


@pytest.mark.parametrize(("axes", "placement", "sequence_parallel"), default(CASES, DEFAULT))
def test_training_on_a_mesh_is_that_of_one_device(axes, placement, sequence_parallel):
    program = program_of(et.accumulate(2), shard(axes, PLACEMENTS[placement]))
    check_trained(*train(program, sequence_parallel=sequence_parallel))


# How often the activations of all tokens travel. Of a layer: twice forward, twice backward, and
# once when it is run again, since the backward pass needs no sum of what its last part gives.
# Embedding and head add one each way. A gathered sequence is gathered again, not kept.
MEGATRON = {
    False: {"all-reduce": 5 * CONFIG.num_layers + 2},
    True: {"reduce-scatter": 5 * CONFIG.num_layers + 2, "all-gather": 6 * CONFIG.num_layers + 2},
}


@pytest.mark.parametrize("sequence_parallel", [grid(False), True])
def test_two_devices_train_as_one_by_the_collectives_of_megatron(sequence_parallel):
    program = program_of(shard({"model": 2}, SPLIT))
    check_trained(*train(program, sequence_parallel=sequence_parallel))
    ts = program.init(
        functools.partial(make, sequence_parallel=sequence_parallel), key=jax.random.key(0)
    )
    found = program.inspect(ts, jax.device_put(make_batches()[0], program.batch_sharding))
    counts: dict[str, int] = {}
    for collective in found.collectives:
        # A scattered result is one device's part.
        if collective.elements >= ROWS * SEQ * CONFIG.dim // 2:
            # XLA may join two that do not wait for each other.
            large = [
                text for text in collective.shapes if elements(text) >= ROWS * SEQ * CONFIG.dim // 2
            ]
            counts[collective.kind] = counts.get(collective.kind, 0) + collective.times * len(large)
    assert counts == MEGATRON[sequence_parallel]
    # Beside those: the largest logit, its two sums, the gradient norm, and the scales of norms.
    assert sum(c.times for c in found.collectives) - sum(counts.values()) <= 4


def elements(text: str) -> int:
    """The number of elements of an array in the text of a program, such as `f32[8,32]`."""
    dims = text[text.index("[") + 1 : -1]
    return math.prod(map(int, dims.split(","))) if dims else 1


@pytest.mark.grid
def test_sequence_parallel_model_with_no_shards_needs_no_mesh():
    assert relative(train(program_of(), sequence_parallel=True, remat=False)[0], alone()[0]) < 1e-5


@pytest.mark.grid
def test_tied_head_trains_on_a_mesh_as_on_one_device():
    tied: Any = {"config": dataclasses.replace(CONFIG, tied=True), "sequence_parallel": True}
    placement = tensor_parallel("model", tied=True)
    actual, _ = train(program_of(shard({"model": 4}, placement)), **tied)
    assert relative(actual, train(program_of(), **tied)[0]) < 1e-5


@pytest.mark.grid
def test_bfloat16_on_a_mesh_is_near_float32():
    program = program_of(et.precision("bfloat16"), shard(CUBE, LAZY))
    actual, losses = train(program, sequence_parallel=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(losses, alone()[1], rtol=0.01)
    assert 1e-4 < relative(actual, alone()[0]) < 0.05  # 8 bits, layer after layer


def traced(placement: Any, config: LlamaConfig = CONFIG, **options: Any) -> Any:
    contribute = et.pipe(loss, shard({"model": 4}, placement))
    model = eqx.filter_eval_shape(Llama, config, key=jax.random.key(0), **options)
    batch = make_batches()[0]
    keys = et.example_keys(jax.random.key(0), 0, jnp.arange(ROWS))
    return eqx.filter_eval_shape(contribute, model, None, batch, keys)


def test_split_that_cuts_a_head_raises():
    with pytest.raises(ValueError, match=r"Got 1, 0.5, 0.5 of 4, 2, 2 heads .*that divides 2\."):
        traced(SPLIT, LLAMA_TINY)


def test_split_of_queries_alone_raises():
    placement = et.rules({"query": P(None, None, "model"), "out": P(None, "model")})
    with pytest.raises(ValueError, match=r"Got 2, 4, 4 of 8, 4, 4 heads .*Split all three"):
        traced(placement)


def test_sequence_parallel_layers_are_split_together():
    placement = et.rules({"embedding": P("model")}, otherwise=et.replicate())
    with pytest.raises(ValueError, match="embedding split along `model`, and .*head whole"):
        traced(placement, sequence_parallel=True)
    traced(placement)  # plain, any may be


@pytest.mark.grid
def test_whole_weights_are_whole_where_the_axis_splits_the_batch():
    check_trained(*train(program_of(et.shard(et.mesh(model=4), batch=P("model")))))


@pytest.mark.parametrize("change", [{"num_kv_heads": 3}, {"num_heads": 3}, {"num_heads": 32}])
def test_heads_that_do_not_divide_raise(change):
    with pytest.raises(ValueError, match="Query heads must divide `dim`"):
        dataclasses.replace(LLAMA_TINY, **change)
