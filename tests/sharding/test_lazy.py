"""FSDP by layer: blocks reach the loss as shards, and each is gathered where it is used."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et

LAYERS, WIDTH, ROWS = 3, 16, 16
RNG = np.random.default_rng(0)
BATCH = {name: RNG.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x", "y")}


def make(key: Array) -> PyTree:
    keys = jax.random.split(key, 3)
    return {
        "first": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 4,
        "blocks": {
            "up": jax.random.normal(keys[1], (LAYERS, WIDTH, 2 * WIDTH)) / 4,
            "down": jax.random.normal(keys[2], (LAYERS, 2 * WIDTH, WIDTH)) / 8,
        },
    }


def block(x: Array, weights: PyTree) -> Array:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def loss_with(run: Callable[[Array, PyTree], tuple[Array, None]]) -> Callable[..., Any]:
    def loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
        x, _ = lax.scan(run, batch["x"] @ model["first"], model["blocks"])
        return et.mean((x - batch["y"]).astype(jnp.float32) ** 2), state, {}

    return loss


gathering = loss_with(jax.checkpoint(lambda x, weights: (block(x, et.gather(weights)), None)))
forgetful = loss_with(jax.checkpoint(lambda x, weights: (block(x, weights), None)))


def program_of(
    loss: Any, axes: Any, placement: Any, *transforms: Any, **settings: Any
) -> et.Program:
    shard = et.shard(et.mesh(**axes), batch=P(tuple(axes)), model=placement)
    return et.pipe(loss, *transforms, shard, et.update(optax.sgd(0.5), **settings), et.jit)


def lazy(axis: str = "fsdp", **settings: Any) -> Any:
    return et.fsdp(axis, lazy="blocks", **{"min_size": 1, **settings})


@functools.cache
def step_on_one_device(microbatches: int = 2) -> PyTree:
    step = et.pipe(gathering, et.accumulate(microbatches), et.update(optax.sgd(0.5)), et.jit)
    ts, _ = step(step.init(make, key=jax.random.key(0)), BATCH)
    return jax.tree.map(np.array, ts.model)


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"data": 2, "fsdp": 4}])
@pytest.mark.parametrize("outside", [False, True])
def test_a_step_is_that_of_one_device(axes: Any, outside: bool):
    shard = et.shard(et.mesh(**axes), batch=P(tuple(axes)), model=lazy())
    chain = [shard, et.accumulate(2)] if outside else [et.accumulate(2), shard]
    program = et.pipe(gathering, *chain, et.update(optax.sgd(0.5)), et.donate)
    ts, _ = program(program.init(make, key=jax.random.key(0)), BATCH)
    expected = step_on_one_device()
    for a, b in zip(jax.tree.leaves(ts.model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert ts.model["blocks"]["up"].sharding.spec == P(None, None, "fsdp")


def test_frozen_blocks_are_gathered_and_stay():
    program = program_of(gathering, {"fsdp": 4}, lazy(), trainable=et.matching("first"))
    ts = program.init(make, key=jax.random.key(0))
    before = jax.tree.map(np.array, ts.model)
    ts, _ = program(ts, BATCH)
    np.testing.assert_array_equal(ts.model["blocks"]["up"], before["blocks"]["up"])
    assert not np.array_equal(ts.model["first"], before["first"])
    ledger = program.inspect(ts, BATCH).ledger
    # The scatter of `first` alone; nothing of what is frozen is summed.
    assert ledger["reduce-scatter", ("fsdp",)] == (1, 4 * WIDTH * WIDTH // 4)


def test_evaluation_gathers_too():
    program = program_of(gathering, {"fsdp": 4}, lazy())
    ts = program.init(make, key=jax.random.key(0))
    shard = et.shard(et.mesh(fsdp=4), batch=P("fsdp"), model=lazy())
    measured = et.evaluate(shard(gathering))(ts, BATCH)["loss"].value
    alone = et.evaluate(gathering)(ts.replace(), BATCH)["loss"].value
    np.testing.assert_allclose(measured, alone, rtol=1e-6)


@pytest.mark.parametrize("forgetting", ["operator", "function", "attribute"])
def test_forgetting_to_gather_is_an_error_that_says_so(forgetting: str):
    def use(x: Array, weights: PyTree) -> tuple[Array, None]:
        up = weights["up"]
        if forgetting == "operator":
            return block(x, weights), None
        if forgetting == "function":
            return x + jnp.sum(up), None
        return x * up.shape[0], None

    program = program_of(loss_with(use), {"fsdp": 4}, lazy())
    ts = program.init(make, key=jax.random.key(0))
    message = r"Got `model.blocks.up`.*Write `block = et.gather\(block\)`"
    with pytest.raises(TypeError, match=message):
        program(ts, BATCH)


def test_weights_travel_in_bfloat16_and_gradients_in_float32():
    """Read from the program before XLA, which makes float32 of bfloat16 on a CPU."""
    program = program_of(gathering, {"fsdp": 4}, lazy(), et.precision("bfloat16"))
    text = program.lower(program.init_shapes(make), BATCH).as_text()
    gathers = re.findall(r'"stablehlo.all_gather".*?-> tensor<[\dx]*(\w+)>', text, re.DOTALL)
    scatters = re.findall(r'"stablehlo.reduce_scatter".*?-> tensor<[\dx]*(\w+)>', text, re.DOTALL)
    assert len(gathers) >= 5 and set(gathers) == {"bf16"}
    assert len(scatters) == 3 and set(scatters) == {"f32"}


def test_gradients_are_summed_in_float32():
    """Each of 4 devices holds 1 + 2**-8, which bfloat16 would round to 1 on the way."""

    def loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
        weight = et.gather(model["blocks"])["w"]
        # Each row's own part of the gradient is exact in bfloat16; their sum is not.
        return et.mean((weight * batch["x"].astype(weight.dtype)).sum(-1)), state, {}

    x = np.full((4, 8), 1, np.float32)
    x[0] = 2**-8
    program = et.pipe(
        loss,
        et.precision("bfloat16"),
        et.shard(et.mesh(data=4), batch=P("data"), model=lazy("data")),
        et.update(optax.sgd(1.0)),
        et.jit,
    )
    ts = program.init(lambda key: {"blocks": {"w": jnp.zeros((1, 8))}}, key=jax.random.key(0))
    ts, _ = program(ts, {"x": x})
    np.testing.assert_array_equal(ts.model["blocks"]["w"], np.full((1, 8), -(3 + 2**-8) / 4))


def test_one_block_is_whole_at_a_time():
    """With twice as many layers a device holds twice the shards, and no more whole blocks."""

    def deep(layers: int) -> Callable[[Array], PyTree]:
        return lambda key: {
            "first": jnp.ones((64, 64)),
            "blocks": {
                "up": jnp.ones((layers, 64, 256)),
                "down": jnp.ones((layers, 256, 64)),
            },
        }

    batch = {name: jax.ShapeDtypeStruct((8, 64), jnp.float32) for name in ("x", "y")}
    whole = 4 * 2 * 64 * 256
    temporary = {}
    for layers in (4, 8):
        for name, placement in (("lazy", lazy()), ("front", et.fsdp("fsdp", min_size=1))):
            program = program_of(gathering, {"fsdp": 8}, placement)
            found = program.inspect(program.init_shapes(deep(layers)), batch)
            temporary[name, layers] = found.temporary_bytes
    # Gradients are shards; what grows are they, and the inputs of blocks that are kept.
    growth = temporary["lazy", 8] - temporary["lazy", 4]
    assert growth <= 4 * (3 * whole / 8 + 4 * 8 * 64)
    # The control: up front, every block is whole, and so is its gradient.
    assert temporary["front", 8] - temporary["front", 4] >= 4 * 2 * whole
    assert temporary["lazy", 4] <= 4 * whole + 4 * 3 * whole / 8


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("blocks.w", (8, 6, 4), P(None, "fsdp")),  # dim 0 numbers the blocks
        ("blocks.b", (8, 4), P(None, "fsdp")),
        ("blocks.0.w", (8, 4), P("fsdp")),  # a sequence of blocks has no such dim
        ("first", (8, 4), P("fsdp")),
        ("blocksize", (8, 4), P("fsdp")),
    ],
)
def test_the_dim_that_numbers_the_blocks_is_not_split(path: str, shape: Any, spec: P):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert lazy().rule(path, leaf, et.mesh(fsdp=2)) == spec


def test_min_size_counts_one_block():
    leaf = jax.ShapeDtypeStruct((8, 4, 4), jnp.float32)
    assert lazy(min_size=17).rule("blocks.w", leaf, et.mesh(fsdp=2)) == P()
    assert lazy(min_size=16).rule("blocks.w", leaf, et.mesh(fsdp=2)) == P(None, "fsdp")


def test_beside_splits_what_is_left_whole():
    heads = et.rules({"query": P(None, "model"), "out": P("model")})
    placement = et.fsdp("fsdp", min_size=1, beside=heads)
    mesh = et.mesh(fsdp=2, model=2)
    leaf = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    assert placement.rule("query", leaf, mesh) == P("fsdp", "model")
    assert placement.rule("out", leaf, mesh) == P("model", "fsdp")
    assert placement.rule("other", leaf, mesh) == P(None, "fsdp")
    with pytest.raises(ValueError, match=r"Got `query` of shape \(3, 8\), of which dims \[0\]"):
        placement.rule("query", jax.ShapeDtypeStruct((3, 8), jnp.float32), mesh)
    with pytest.raises(ValueError, match="'query', which matches none of"):
        placement.check(["out"])


def test_lazy_that_names_nothing_is_refused():
    program = program_of(gathering, {"fsdp": 4}, et.fsdp("fsdp", lazy="layers"))
    with pytest.raises(ValueError, match="Got 'layers', where the leaves are: blocks.down"):
        program.init(make, key=jax.random.key(0))


def test_rules_pass_lazy_on():
    placement = et.rules({"first": P()}, otherwise=lazy())
    assert placement.lazy("blocks.up") and not placement.lazy("first")


def test_gather_leaves_whole_trees_as_they_are():
    tree = {"a": jnp.ones(2), "b": None, "c": jnp.tanh}
    assert et.gather(tree) == tree


def test_the_report_of_a_placement():
    program = program_of(gathering, {"data": 2, "fsdp": 4}, lazy(min_size=500))
    report = program.placement(program.init_shapes(make))
    leaves = {leaf.name: leaf for leaf in report.leaves}
    up = leaves["model.blocks.up"]
    assert (up.spec, up.shard_shape, up.bytes) == (
        P(None, None, "fsdp"),
        (LAYERS, WIDTH, 2 * WIDTH // 4),
        4 * LAYERS * WIDTH * 2 * WIDTH // 4,
    )
    split, whole = LAYERS * 2 * WIDTH * 2 * WIDTH // 4, WIDTH * WIDTH
    assert report.parameters == report.gradients == 4 * (split + whole)
    assert report.optimizer_state == 0 and report.other == 8 + 4
    lines = str(report).splitlines()
    assert len(lines) == 1 + len(leaves) + 1 and "P(None, None, 'fsdp')" in str(report)
    ts = program.init(make, key=jax.random.key(0))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in ts.leaves)
    assert held == report.parameters + report.optimizer_state + report.other


def test_a_placement_needs_a_mesh():
    step = et.pipe(gathering, et.update(optax.sgd(0.1)), et.jit)
    with pytest.raises(ValueError, match="Got a chain without one"):
        step.placement(step.init_shapes(make))
