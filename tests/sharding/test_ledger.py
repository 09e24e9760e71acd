"""What a Llama step moves over each mesh axis, from the program's text, equals closed forms.

A: microbatches, B: rows of a microbatch on a device, S: sequence, D: dim, L: layers, V: vocabulary;
d, f and m: devices along data, fsdp and model. Counted are tensors, since XLA may send several
together, and bytes that each device gets. Everything is float32.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et
from models.llama import Llama, LlamaConfig, tensor_parallel

CONFIG = LlamaConfig(
    vocab_size=128, dim=64, num_layers=3, num_heads=4, num_kv_heads=2, hidden_dim=128
)
A, ROWS, S = 2, 32, 16
L, D, V, H = CONFIG.num_layers, CONFIG.dim, CONFIG.vocab_size, CONFIG.hidden_dim
KV = CONFIG.num_kv_heads * CONFIG.head_dim
# Elements: of each matrix of one layer, of those outside of the layers, and of the norms' scales.
OF_A_LAYER = [D * D, D * KV, D * KV, D * D, D * H, D * H, H * D]
OUTSIDE = [V * D, D * V]
NORMS = [L * D, L * D, D]
# Below every matrix of a layer, above every norm.
MIN_SIZE = 1024

Ledger = dict[tuple[str, tuple[str, ...]], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to lay a Llama out: `gather` is None, "front" or "lazy"."""

    data: int = 1
    fsdp: int = 1
    model: int = 1
    gather: str | None = None
    sequence: bool = False
    zero: bool = False


CASES = {
    "replicated": Case(data=4),
    "ZeRO-1": Case(data=4, zero=True),
    "FSDP up front": Case(fsdp=4, gather="front"),
    "FSDP lazy": Case(fsdp=4, gather="lazy"),
    "TP": Case(model=2),
    "TP and sequence parallel": Case(model=2, sequence=True),
    "data x FSDP lazy": Case(data=2, fsdp=2, gather="lazy"),
    "FSDP up front x TP": Case(fsdp=2, model=2, gather="front"),
    "FSDP lazy x sequence parallel": Case(fsdp=2, model=2, gather="lazy", sequence=True),
    "data x FSDP lazy x TP": Case(2, 2, 2, gather="lazy"),
    "data x FSDP lazy x sequence parallel": Case(2, 2, 2, gather="lazy", sequence=True),
    "data x model": Case(data=2, model=2),
}


def closed_form(case: Case) -> Ledger:
    d, f, m = case.data, case.fsdp, case.model
    found: dict[Any, list[int]] = collections.defaultdict(lambda: [0, 0])

    def moves(kind: str, axes: str, tensors: int, elements: float) -> None:
        """`tensors` of `elements` each that a device gets over `axes`, if those are any."""
        over = tuple(axis for axis in axes.split() if getattr(case, axis) > 1)
        if over:
            found[kind, over][0] += tensors
            found[kind, over][1] += round(tensors * elements) * 4

    # The matrices, as the optimizer holds them: stacked over layers.
    matrices = [L * size / m for size in OF_A_LAYER] + [size / m for size in OUTSIDE]
    for size in NORMS:
        moves("all-reduce", "data fsdp", 1, size)
    if case.gather is None and not case.zero:
        for size in matrices:
            moves("all-reduce", "data fsdp", 1, size)
    if case.zero:
        for size in matrices:
            moves("reduce-scatter", "data", 1, size / d)
            moves("all-gather", "data", 1, size)
    if case.gather is not None:
        for size in matrices:
            moves("all-reduce", "data", 1, size / f)
        for size in OUTSIDE if case.gather == "lazy" else [m * size for size in matrices]:
            moves("all-gather", "fsdp", 1, size / m)
            moves("reduce-scatter", "fsdp", 1, size / m / f)
    if case.gather == "lazy":
        for size in OF_A_LAYER:
            moves("all-gather", "fsdp", 2 * A * L, size / m)  # forward, and rematerialised
            moves("reduce-scatter", "fsdp", A * L, size / m / f)
    B = ROWS // (d * f * A)
    # Forward the attention and the MLP each leave once, backward each is entered once, and the
    # rematerialised attention leaves again; the embedding leaves, and the head is entered.
    if case.sequence:
        moves("reduce-scatter", "model", A * (5 * L + 2), B * S * D / m)
        # As often the other way, and once more a layer: both are entered again, not one.
        moves("all-gather", "model", A * (6 * L + 2), B * S * D)
        for size in NORMS:
            moves("all-reduce", "model", A, size)
    else:
        moves("all-reduce", "model", A * (5 * L + 2), B * S * D)
    # The largest logit, the sum of exponentials, and the label's logit.
    moves("all-reduce", "model", 3 * A, B * S)
    return {key: (tensors, size) for key, (tensors, size) in found.items()}


def loss(model: Llama, state: PyTree, batch: PyTree, key: Array) -> Any:
    nll = model.nll(batch["tokens"], batch["labels"])
    return et.mean(nll, where=batch["weight"]), state, {}


def program_of(case: Case, config: LlamaConfig = CONFIG, min_size: int = MIN_SIZE) -> et.Program:
    placement = tensor_parallel() if case.model > 1 else et.replicate()
    if case.gather is not None:
        lazy = "blocks" if case.gather == "lazy" else None
        placement = et.fsdp("fsdp", min_size=min_size, lazy=lazy, beside=placement)
    mesh = et.mesh(data=case.data, fsdp=case.fsdp, model=case.model)
    return et.pipe(
        loss,
        et.accumulate(A),
        et.shard(mesh, batch=P(("data", "fsdp")), model=placement),
        et.update(optax.adamw(1e-3), shard_state="data" if case.zero else None),
        et.donate,
    )


def shapes_of(program: et.Program, case: Case, config: LlamaConfig = CONFIG) -> et.TrainState:
    return program.init_shapes(lambda key: Llama(config, sequence_parallel=case.sequence, key=key))


def batch_of(rows: int = ROWS, length: int = S) -> dict[str, jax.ShapeDtypeStruct]:
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    weight = jax.ShapeDtypeStruct((rows, length), jnp.float32)
    return {"tokens": tokens, "labels": tokens, "weight": weight}


@pytest.mark.parametrize("name", CASES)
def test_the_ledger_is_the_closed_form(name: str):
    case = CASES[name]
    program = program_of(case)
    inspection = program.inspect(shapes_of(program, case), batch_of())
    found: dict[Any, list[int]] = collections.defaultdict(lambda: [0, 0])
    scalars = 0
    for collective in inspection.collectives:
        for shape in collective.shapes:
            if shape == "f32[]":
                assert collective.kind == "all-reduce"
                scalars += collective.times
                continue
            entry = found[collective.kind, collective.axes]
            entry[0] += collective.times
            entry[1] += collective.times * size_of(shape)
    assert {key: tuple(entry) for key, entry in found.items()} == closed_form(case)
    # The loss's total and count; and for the norm of the gradients one number a leaf, or two where
    # XLA sums over one axis after the other. Nothing else.
    assert scalars <= 2 + 2 * (len(OF_A_LAYER) + len(OUTSIDE) + len(NORMS))


def size_of(shape: str) -> int:
    assert shape.startswith("f32[")
    return 4 * math.prod(int(dim) for dim in shape[4:-1].split(","))
