"""Which collectives a step has, counted in the text of the program that XLA compiled."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et
from eqtrain._programs.cost import collectives_of
from tests.helpers import ROWS, combined_loss, error_of, make_batches, make_params, network
from tests.tiers import default, grid, pairwise

INSIDE, OUTSIDE = "accumulate inside shard", "accumulate outside shard"
PLACEMENTS = {"replicate": et.replicate(), "fsdp": et.fsdp("data", min_size=1)}
# Weights of 8 x 16 and 16 x 8, biases of 16 and 8, in float32.
GRADIENT_BYTES = 4 * (8 * 16 + 16 + 16 * 8 + 8)
LEAVES = 4


def bare_loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    """The loss alone: its total and its count are all there is beside the gradient."""
    error = error_of(network(model, batch["x"], key), batch)
    return et.mean(error, where=batch["weight"]), state, {}


def program_of(
    loss: Any, devices: int, microbatches: int, placement: str = "replicate", order: str = INSIDE
) -> et.Program:
    shard = et.shard(et.mesh(data=devices), batch=P("data"), model=PLACEMENTS[placement])
    transforms = [et.accumulate(microbatches), shard]
    if order == OUTSIDE:
        transforms.reverse()
    return et.pipe(loss, *transforms, et.update(optax.sgd(0.1)), et.donate)


def inspect(program: et.Program, make: Any = make_params) -> et.Inspection:
    ts = program.init(lambda key: make(), key=jax.random.key(0))
    # Placed as a loader does. Of a batch on the host XLA may ask for whichever rows it likes.
    return program.inspect(ts, jax.device_put(make_batches()[0], program.batch_sharding))


def totals(found: et.Inspection, kind: str) -> list[tuple[int, int]]:
    """Times and bytes of each collective of a kind which moves more than single numbers."""
    return sorted(
        (collective.times, collective.bytes)
        for collective in found.collectives
        if collective.kind == kind and collective.elements > len(collective.shapes)
    )


def scalars(found: et.Inspection) -> int:
    """How many single numbers a call reduces, those that travel with a gradient left out."""
    return sum(
        collective.times * len(collective.shapes)
        for collective in found.collectives
        if collective.elements == len(collective.shapes)
    )


def kinds(found: et.Inspection) -> set[str]:
    return {collective.kind for collective in found.collectives}


@pairwise({"devices": [2, 4], "microbatches": [1, 4]})
def test_gradients_travel_in_one_all_reduce_a_step(devices: int, microbatches: int):
    found = inspect(program_of(bare_loss, devices, microbatches))
    # The gradient, and the total and the count of the loss.
    assert [(c.kind, c.times, c.bytes) for c in found.collectives] == [
        ("all-reduce", 1, GRADIENT_BYTES + 2 * 4)
    ]


@pytest.mark.parametrize("leaves", [1, grid(3), 20])
def test_gradients_travel_together_however_many_leaves(leaves: int):
    def many(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
        out = jnp.stack([batch["x"] @ weight for weight in model]).sum(0)
        return et.mean(error_of(out, batch), where=batch["weight"]), state, {}

    weights = [np.full((8, 8), index, np.float32) for index in range(leaves)]
    found = inspect(program_of(many, 4, 2), lambda: weights)
    assert [(c.kind, c.times, c.bytes) for c in found.collectives] == [
        ("all-reduce", 1, 4 * (leaves * 64 + 2))
    ]


@pytest.mark.parametrize("microbatches", [grid(1), 2, grid(4), 8])
def test_accumulating_outside_reduces_once_a_microbatch(microbatches: int):
    found = inspect(program_of(bare_loss, 4, microbatches, order=OUTSIDE))
    assert [(c.kind, c.times, c.bytes) for c in found.collectives] == [
        ("all-reduce", microbatches, GRADIENT_BYTES + 2 * 4)
    ]


def test_a_gradient_reduced_in_every_microbatch_is_told_apart():
    """What happens inside where parameters are not cast to varying: the count sees it."""
    mesh = et.mesh(data=4)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def naive(weight: Array, x: Array) -> Array:
        def body(grads: Array, part: Array) -> tuple[Array, None]:
            return grads + jax.grad(lambda w: ((part @ w) ** 2).sum())(weight), None

        return jax.lax.scan(body, jnp.zeros_like(weight), x.reshape(2, -1, 8))[0]

    text = jax.jit(naive).lower(jnp.ones((8, 8)), jnp.ones((ROWS, 8))).compile().as_text()
    assert [(c.kind, c.times) for c in collectives_of(text or "")] == [("all-reduce", 2)]


@pytest.mark.parametrize("microbatches", [1, grid(2), 4])
def test_split_leaves_are_gathered_and_scattered_once(microbatches: int):
    found = inspect(program_of(bare_loss, 4, microbatches, "fsdp"))
    whole = sorted((1, size) for size in (4 * 128, 4 * 16, 4 * 128, 4 * 8))
    assert totals(found, "all-gather") == whole
    assert totals(found, "reduce-scatter") == [(1, size // 4) for _, size in whole]
    assert kinds(found) == {"all-gather", "reduce-scatter", "all-reduce"}
    # The total and the count of the loss, and each leaf's share of the squared norm.
    assert scalars(found) == 2 + LEAVES
    assert totals(found, "all-reduce") == []


@pytest.mark.parametrize("microbatches", [grid(2), 4])
def test_accumulating_split_leaves_outside_scatters_once_a_microbatch(microbatches: int):
    found = inspect(program_of(bare_loss, 4, microbatches, "fsdp", OUTSIDE))
    shards = sorted((microbatches, size // 4) for size in (4 * 128, 4 * 16, 4 * 128, 4 * 8))
    assert totals(found, "reduce-scatter") == shards
    # The parameters are those of the whole step, so that XLA may gather them once.
    assert {times for times, _ in totals(found, "all-gather")} <= {1, microbatches}
    assert len(totals(found, "all-gather")) == LEAVES
    assert kinds(found) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert scalars(found) == 2 * microbatches + LEAVES
    assert totals(found, "all-reduce") == []


@pairwise({"placement": list(PLACEMENTS), "order": [INSIDE, OUTSIDE]})
def test_no_row_moves_between_devices(placement: str, order: str):
    found = inspect(program_of(combined_loss, 4, 2, placement, order))
    assert kinds(found) <= {"all-gather", "reduce-scatter", "all-reduce"}

    # What a contiguous cut of a sharded batch would cost.
    mesh = et.mesh(data=4)
    rows = jax.device_put(np.ones((ROWS, 8), np.float32), jax.NamedSharding(mesh, P("data")))
    cut = jax.NamedSharding(mesh, P(None, "data"))
    text = jax.jit(lambda x: x.reshape(2, ROWS // 2, 8), out_shardings=cut).lower(rows)
    moved = {c.kind for c in collectives_of(text.compile().as_text() or "")}
    assert moved & {"all-to-all", "collective-permute", "all-gather"}


@pytest.mark.parametrize(
    ("loss", "placement", "order"),
    default(
        list(itertools.product([bare_loss, combined_loss], PLACEMENTS, [INSIDE, OUTSIDE])),
        [(bare_loss, "fsdp", INSIDE), (combined_loss, "replicate", OUTSIDE)],
    ),
)
def test_one_device_needs_no_collectives(loss: Any, placement: str, order: str):
    found = inspect(program_of(loss, 1, 2, placement, order))
    assert found.collectives == ()
    assert "no collectives" in str(found)


def test_an_axis_of_one_device_needs_no_collectives():
    for mesh in (et.mesh(data=1), et.mesh(data=1, model=1)):
        shard = et.shard(mesh, batch=P("data"))
        found = inspect(et.pipe(bare_loss, shard, et.update(optax.sgd(0.1)), et.jit))
        assert found.collectives == ()


def test_leaves_that_are_whole_along_a_model_axis_are_summed_over_it_once():
    shard = et.shard(et.mesh(data=1, model=4), batch=P("data"))
    found = inspect(et.pipe(bare_loss, shard, et.update(optax.sgd(0.1)), et.jit))
    [collective] = found.collectives
    assert (collective.kind, collective.axes) == ("all-reduce", ("model",))
    parameters = 4 * sum(leaf.size for leaf in jax.tree.leaves(make_params()))
    assert (collective.bytes, collective.times) == (parameters, 1)


def operands(text: str, op: str) -> list[tuple[str, int]]:
    """The dtype and the number of elements of what each such op of a StableHLO text is given."""
    pattern = rf'"stablehlo\.{op}"(?:.|\n)*?: \(tensor<([^>]*)>(?:, tensor<[^>]*>)*\) ->'
    found = [match.split("x") for match in re.findall(pattern, text)]
    return [(parts[-1], int(np.prod([int(dim) for dim in parts[:-1]]))) for parts in found]


@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        ("bfloat16", INSIDE),
        grid("bfloat16", OUTSIDE),
        grid("float16", INSIDE),
        ("float16", OUTSIDE),
    ],
)
def test_reductions_are_float32_and_gathers_narrow(dtype: str, order: str):
    """Read before XLA, which makes collectives of a CPU float32 by itself."""
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    placement = et.rules({"first": et.fsdp("data", min_size=1)}, otherwise=et.replicate())
    transforms = [et.accumulate(2), et.shard(et.mesh(data=4), batch=P("data"), model=placement)]
    if order == OUTSIDE:
        transforms.reverse()
    program = et.pipe(
        bare_loss, et.precision(dtype), *transforms, et.update(optax.sgd(0.1)), et.jit
    )
    ts = program.init(lambda key: make_params(), key=jax.random.key(0))
    text = program.lower(ts, make_batches()[0]).as_text()
    # The first layer is split: an eighth by sixteenth of it, and a quarter of its bias, a device.
    assert sorted(operands(text, "all_gather")) == [(short, 4), (short, 32)]
    assert sorted(operands(text, "reduce_scatter")) == [("f32", 16), ("f32", 128)]
    reduced = operands(text, "all_reduce")
    assert {kind for kind, _ in reduced} == {"f32"}
    assert sorted(size for _, size in reduced if size > 1) == [8, 128]


def test_narrow_reductions_are_told_apart():
    @functools.partial(jax.shard_map, mesh=et.mesh(data=4), in_specs=P("data"), out_specs=P())
    def narrow(x: Array) -> Array:
        return jax.lax.psum(x.astype(jnp.bfloat16).sum(0), "data")

    text = jax.jit(narrow).lower(jnp.ones((8, 3))).as_text()
    assert operands(text, "all_reduce") == [("bf16", 3)]


def dots(loss: Any, microbatches: int, devices: int | None = None) -> int:
    """How many matrix products the compiled step has."""
    if devices is None:
        program = et.pipe(loss, et.accumulate(microbatches), et.update(optax.sgd(0.1)), et.jit)
    else:
        program = program_of(loss, devices, microbatches)
    ts = program.init(lambda key: make_params(), key=jax.random.key(0))
    text = program.lower(ts, make_batches()[0]).compile().as_text()
    assert text is not None
    return len(re.findall(r"= \S+ dot\(", text))


@pytest.mark.parametrize(
    ("microbatches", "devices"), [(1, None), grid(1, 4), grid(2, None), (2, 4)]
)
def test_counting_first_costs_no_matrix_product(microbatches: int, devices: int | None):
    # Forward two, backward three: the batch gets no gradient.
    assert dots(bare_loss, microbatches, devices) == 5
    assert dots(combined_loss, microbatches, devices) == 5


def test_a_count_that_needs_the_model_does_cost():
    def confident(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
        out = network(model, batch["x"], key)
        sure = et.mean(error_of(out, batch), where=out.mean(-1) > 0)
        return sure + 0.1 * et.mean(out), state, {}

    assert dots(confident, 2) == 5 + 2
