"""Tensor-parallel parts against NumPy in float64, on one device and split over two and four."""

import doctest
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqtrain as et
from models import attention, llama, parallel
from models.parallel import (
    ColumnLinear,
    Embedding,
    RowLinear,
    enter,
    is_split,
    vocab_parallel_cross_entropy,
)

BATCH, SEQ, DIM, HIDDEN, VOCAB = 2, 8, 4, 12, 20
# The number of devices along `model`, and whether activations outside are parts of a sequence.
FORMS = [(1, False), (1, True), (2, False), (2, True), (4, False), (4, True)]


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def close(actual: Any, expected: Any) -> None:
    """Equal but for the rounding of float32, relative to the largest number of each array."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == e.shape
        assert np.abs(a - e).max() < 1e-6 * np.abs(e).max()


def run(devices: int, function: Any, specs: Any, *args: Any) -> Any:
    """`(value, aux), grads` of a function of shards, for its first argument."""
    grad = jax.value_and_grad(function, has_aux=True)
    if devices > 1:
        # The value has to come out equal on all devices: `P()`, which is checked.
        grad = jax.shard_map(
            grad,
            mesh=et.mesh(model=devices),
            in_specs=specs,
            out_specs=((P(), specs[-1]), specs[0]),
        )
    return jax.jit(grad)(*args)


def whole(total: Any) -> Any:
    """Adds up what devices with parts of a sequence have."""
    return lax.psum(total, "model") if is_split(total, "model") else total


@pytest.mark.parametrize(("devices", "sequence"), FORMS)
def test_pair_of_linear_layers_matches_numpy(devices, sequence):
    params = {
        "x": draw(BATCH, SEQ, DIM),
        "column": draw(DIM, HIDDEN),
        "column_bias": draw(HIDDEN),
        "row": draw(HIDDEN, DIM),
        "row_bias": draw(DIM),
    }
    part = P(None, "model") if sequence else P()
    specs = {
        "x": part,
        "column": P(None, "model"),
        "column_bias": P("model"),
        "row": P("model"),
        "row_bias": P(),
    }
    slope = draw(BATCH, SEQ, DIM, 1)[..., 0]

    def function(params: Any, slope: Any) -> Any:
        column = ColumnLinear(DIM, HIDDEN, bias=True, key=jax.random.key(0))
        row = RowLinear(HIDDEN, DIM, bias=True, sequence=sequence, key=jax.random.key(0))
        where = lambda layer: (layer.weight, layer.bias)  # noqa: E731
        column = eqx.tree_at(where, column, (params["column"], params["column_bias"]))
        row = eqx.tree_at(where, row, (params["row"], params["row_bias"]))
        x = enter(params["x"], column.weight, sequence=sequence)
        y = row(column(x) ** 2)
        return whole((y * slope).sum()), y

    (_, y), grads = run(devices, function, (specs, part), params, slope)

    p, slope = wide(params), wide(slope)
    hidden = p["x"] @ p["column"] + p["column_bias"]
    d_hidden = 2 * hidden * (slope @ p["row"].T)
    close(y, hidden**2 @ p["row"] + p["row_bias"])
    close(
        grads,
        {
            "x": d_hidden @ p["column"].T,
            "column": np.einsum("bsd,bsh->dh", p["x"], d_hidden),
            "column_bias": d_hidden.sum((0, 1)),
            "row": np.einsum("bsh,bsd->hd", hidden**2, slope),
            "row_bias": slope.sum((0, 1)),
        },
    )


@pytest.mark.parametrize(("devices", "sequence"), FORMS)
def test_embedding_matches_numpy(devices, sequence):
    table, slope = draw(VOCAB, DIM), draw(BATCH, SEQ, DIM)
    tokens = np.random.default_rng(0).integers(0, VOCAB, size=(BATCH, SEQ), dtype=np.int32)
    tokens[0, :4] = -1, VOCAB, 0, VOCAB - 1
    inside = ((tokens >= 0) & (tokens < VOCAB))[..., None]
    part = P(None, "model") if sequence else P()

    def function(table: Any, tokens: Any, slope: Any) -> Any:
        embedding = Embedding(VOCAB, DIM, sequence=sequence, key=jax.random.key(0))
        y = eqx.tree_at(lambda embedding: embedding.weight, embedding, table)(tokens)
        return whole((y * slope).sum()), y

    (_, y), grad = run(devices, function, (P("model"), P(), part), table, tokens, slope)

    # Outside the vocabulary is 0, with no gradient.
    np.testing.assert_array_equal(y, np.where(inside, table[np.clip(tokens, 0, VOCAB - 1)], 0))
    expected = np.zeros((VOCAB, DIM))
    np.add.at(expected, tokens[inside[..., 0]], wide(slope)[inside[..., 0]])
    close(grad, expected)


def test_gradient_of_a_frequent_token_is_summed_in_float32():
    embedding = Embedding(2, 1, key=jax.random.key(0))
    tokens = jnp.zeros((1, 4096), jnp.int32)

    def total(weight: Any) -> Any:
        changed = eqx.tree_at(lambda embedding: embedding.weight, embedding, weight)
        return changed(tokens).astype(jnp.float32).sum()

    # One by one in bfloat16, 256 + 1 is 256.
    assert jax.grad(total)(embedding.weight.astype(jnp.bfloat16))[0, 0] == 4096


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cross_entropy_matches_numpy(devices, dtype):
    # Far beyond what `exp` takes without the largest being taken away first.
    logits = jnp.asarray(30 * draw(BATCH, SEQ, VOCAB) + 200, dtype)
    labels = np.random.default_rng(0).integers(0, VOCAB, size=(BATCH, SEQ), dtype=np.int32)
    labels[0, :4] = -100, VOCAB, 0, VOCAB - 1
    inside = (labels >= 0) & (labels < VOCAB)
    weight = np.where(inside, draw(BATCH, SEQ) + 2, 0)

    def function(logits: Any, labels: Any, weight: Any) -> Any:
        nll = vocab_parallel_cross_entropy(logits, labels)
        return et.mean(nll, where=weight).total, nll

    specs = P(None, None, "model"), P(), P()
    if devices > 1:
        # `function` gives the nll last, which is equal on all devices.
        function_specs = (specs[0], specs[1], P())
    else:
        function_specs = specs
    (_, nll), grad = run(devices, function, function_specs, logits, labels, weight)

    z = wide(logits)
    z = z - z.max(-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    one_hot = np.eye(VOCAB)[np.clip(labels, 0, VOCAB - 1)]
    assert nll.dtype == np.float32
    assert np.isnan(nll[~inside]).all() and inside.sum() == BATCH * SEQ - 2
    close(nll[inside], -(log_p * one_hot).sum(-1)[inside])
    expected = weight[..., None] * (np.exp(log_p) - one_hot)
    if dtype == "float32":
        close(grad, expected)
    else:  # what comes back is rounded to 8 bits
        np.testing.assert_allclose(wide(grad), expected, rtol=2**-8, atol=1e-6)


def traced(function: Any, *args: Any, devices: int = 2) -> Any:
    """Traces a function of arrays and their specs on a mesh, and runs nothing."""
    arrays, specs = zip(*args, strict=True)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]
    mesh = et.mesh(model=devices)
    return jax.eval_shape(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("model")), *shapes
    )


WEIGHT = ((DIM, HIDDEN), jnp.float32)
X = ((BATCH, SEQ, DIM), jnp.float32)


@pytest.mark.parametrize(
    ("x", "weight", "sequence"),
    [
        (P(None, "model"), P(None, "model"), False),  # parts, where they should be whole
        (P("model"), P(), False),  # so is the batch if it is split over the axis
        (P(), P(None, "model"), True),  # whole, where they should be parts
        (P(None, "model"), P(), True),  # parts, and one layer that was left whole
    ],
)
def test_enter_refuses_activations_that_are_not_as_said(x, weight, sequence):
    with pytest.raises(ValueError, match=f"Split all layers .* or none.*|sequence={sequence}"):
        traced(lambda x, w: enter(x, w, sequence=sequence), (X, x), (WEIGHT, weight))


def test_column_linear_refuses_what_has_not_entered():
    layer = ColumnLinear(DIM, HIDDEN, key=jax.random.key(0))

    def apply(x: Any, weight: Any) -> Any:
        return eqx.tree_at(lambda layer: layer.weight, layer, weight)(x)

    with pytest.raises(ValueError, match=r"must have entered.*Write `x = enter\(x, layer.weight"):
        traced(apply, (X, P()), (WEIGHT, P(None, "model")))


def test_sequence_that_does_not_divide_raises():
    layer = Embedding(VOCAB, DIM, sequence=True, key=jax.random.key(0))

    def apply(tokens: Any, weight: Any) -> Any:
        return eqx.tree_at(lambda layer: layer.weight, layer, weight)(tokens)

    tokens, weight = ((BATCH, 6), jnp.int32), ((VOCAB, DIM), jnp.float32)
    with pytest.raises(ValueError, match="Got length 6 and 4 devices along `model`"):
        traced(apply, (tokens, P()), (weight, P("model")), devices=4)


@pytest.mark.parametrize("spec", [P(None, "model"), P()], ids=["other dim", "batch axis"])
def test_embedding_that_is_not_split_by_tokens_raises(spec):
    layer = Embedding(VOCAB, DIM, key=jax.random.key(0))

    def apply(tokens: Any, weight: Any) -> Any:
        if spec == P():  # as `et.shard` does over the axes that split the batch
            weight = lax.pcast(weight, "model", to="varying")
        return eqx.tree_at(lambda layer: layer.weight, layer, weight)(tokens)

    tokens, weight = ((BATCH, SEQ), jnp.int32), ((VOCAB, DIM), jnp.float32)
    with pytest.raises(ValueError, match=f"must add up to the vocabulary.*vocab_size={VOCAB}"):
        traced(apply, (tokens, P()), (weight, spec))


@functools.cache
def examples() -> dict[str, doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = {"jax": jax, "jnp": jnp, "et": et}
    tests = [
        test
        for module in (parallel, attention, llama)
        for test in finder.find(module, extraglobs=names)
    ]
    return {test.name: test for test in tests if test.examples}


@pytest.mark.parametrize("name", examples())
def test_example_runs(name):
    report: list[str] = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = doctest.DocTestRunner(verbose=False).run(examples()[name], out=report.append)
    assert result.failed == 0, "".join(report)
