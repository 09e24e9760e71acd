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
    """`(value, aux), grads` of a function of shards, for its first argument.

    By the rule of `et.shard`, written out: each device differentiates its share of the value that
    all of them compute, and what is whole on every device is summed.
    """

    def share(*args: Any) -> Any:
        value, aux = function(*args)
        return value / devices, (value, aux)

    def local(*args: Any) -> Any:
        grads, (value, aux) = jax.grad(share, has_aux=True)(*args)
        if devices > 1:
            grads = jax.tree.map(
                lambda spec, grad: grad if "model" in spec else lax.psum(grad, "model"),
                specs[0],
                grads,
                is_leaf=lambda node: isinstance(node, P),
            )
        return (value, aux), grads

    if devices > 1:
        local = jax.shard_map(
            local,
            mesh=et.mesh(model=devices),
            in_specs=specs,
            out_specs=((P(), specs[-1]), specs[0]),
            check_vma=False,
        )
    return jax.jit(local)(*args)


@pytest.mark.parametrize(("devices", "sequence"), FORMS)
def test_pair_of_linear_layers_matches_numpy(devices, sequence):
    params = {
        "x": draw(BATCH, SEQ, DIM),
        "column": draw(DIM, HIDDEN),
        "column_bias": draw(HIDDEN),
        "row": draw(HIDDEN, DIM),
        "row_bias": draw(DIM),
    }
    part = P(None, "model") if sequence and devices > 1 else P()
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
        x = enter(params["x"], column, sequence=sequence)
        y = row(column(x) ** 2)
        total = (y * slope).sum()
        return lax.psum(total, "model") if part != P() else total, y

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
    part = P(None, "model") if sequence and devices > 1 else P()

    def function(table: Any, tokens: Any, slope: Any) -> Any:
        embedding = Embedding(VOCAB, DIM, sequence=sequence, key=jax.random.key(0))
        y = eqx.tree_at(lambda embedding: embedding.weight, embedding, table)(tokens)
        total = (y * slope).sum()
        return lax.psum(total, "model") if part != P() else total, y

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
        nll = vocab_parallel_cross_entropy(logits, labels, VOCAB)
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
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("model"), check_vma=False),
        *shapes,
    )


def test_sequence_that_does_not_divide_raises():
    layer = Embedding(VOCAB, DIM, sequence=True, key=jax.random.key(0))

    def apply(tokens: Any, weight: Any) -> Any:
        return eqx.tree_at(lambda layer: layer.weight, layer, weight)(tokens)

    tokens, weight = ((BATCH, 6), jnp.int32), ((VOCAB, DIM), jnp.float32)
    with pytest.raises(ValueError, match="Got length 6 and 4 devices along `model`"):
        traced(apply, (tokens, P()), (weight, P("model")), devices=4)


LAYERS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "column": (ColumnLinear(DIM, HIDDEN, key=jax.random.key(0)), (BATCH, SEQ, DIM), "columns"),
    "row": (RowLinear(HIDDEN, DIM, key=jax.random.key(0)), (BATCH, SEQ, HIDDEN), "rows"),
    "embedding": (Embedding(VOCAB, DIM, key=jax.random.key(0)), (BATCH, SEQ), "rows"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_weight_that_is_no_shard_of_the_layers_axis_raises(name):
    layer, shape, what = LAYERS[name]

    def apply(x: Any, weight: Any) -> Any:
        return eqx.tree_at(lambda layer: layer.weight, layer, weight)(x)

    x = shape, jnp.int32 if name == "embedding" else jnp.float32
    wrong = list(layer.weight.shape)
    wrong[1 if what == "columns" else 0] += 4  # 2 devices hold more than the whole
    with pytest.raises(ValueError, match=f"The {what} of a weight .* must add up to the whole"):
        traced(apply, (x, P()), ((tuple(wrong), jnp.float32), P()))


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
