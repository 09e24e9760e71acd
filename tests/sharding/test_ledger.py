"""What a Llama step moves over each mesh axis, from the program's text, equals closed forms.

A: microbatches, B: rows of a microbatch on a device, S: sequence, D: dim, L: layers, V: vocabulary;
d, f and m: devices along data, fsdp and model. Counted are tensors, since XLA may send several
together, and bytes that each device gets. Everything is float32.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et
from models.llama import LLAMA_7B, Llama, LlamaConfig, tensor_parallel
from tests.tiers import default

CONFIG = LlamaConfig(
    vocab_size=128, dim=64, num_layers=3, num_heads=4, num_kv_heads=2, hidden_dim=128
)
A, ROWS, S = 2, 32, 16
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


def of_a_layer(config: LlamaConfig) -> list[int]:
    """The elements of each matrix of one layer."""
    D, H = config.dim, config.hidden_dim
    KV = config.num_kv_heads * config.head_dim
    return [D * D, D * KV, D * KV, D * D, D * H, D * H, H * D]


def closed_form(case: Case, config: LlamaConfig = CONFIG, rows: int = ROWS, S: int = S) -> Ledger:
    d, f, m = case.data, case.fsdp, case.model
    L, D, V = config.num_layers, config.dim, config.vocab_size
    layer, outside, norms = of_a_layer(config), [V * D, D * V], [L * D, L * D, D]
    found: dict[Any, list[int]] = collections.defaultdict(lambda: [0, 0])

    def moves(kind: str, axes: str, tensors: int, elements: float) -> None:
        """`tensors` of `elements` each that a device gets over `axes`, if those are any."""
        over = tuple(axis for axis in axes.split() if getattr(case, axis) > 1)
        if over:
            found[kind, over][0] += tensors
            found[kind, over][1] += round(tensors * elements) * 4

    # The matrices, as the optimizer holds them: stacked over layers.
    matrices = [L * size / m for size in layer] + [size / m for size in outside]
    # What is whole on every device is summed over all axes, once a step.
    for size in norms:
        moves("all-reduce", "data fsdp model", 1, size)
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
        for size in outside if case.gather == "lazy" else [m * size for size in matrices]:
            moves("all-gather", "fsdp", 1, size / m)
            moves("reduce-scatter", "fsdp", 1, size / m / f)
    if case.gather == "lazy":
        for size in layer:
            moves("all-gather", "fsdp", 2 * A * L, size / m)  # forward, and rematerialised
            moves("reduce-scatter", "fsdp", A * L, size / m / f)
    B = rows // (d * f * A)
    # Forward the attention and the MLP each leave once, backward each is left once, and the
    # rematerialised attention leaves again; the embedding leaves, forward and backward.
    if case.sequence:
        moves("reduce-scatter", "model", A * (5 * L + 2), B * S * D / m)
        # As often the other way, and once more a layer: both are entered again, not one.
        moves("all-gather", "model", A * (6 * L + 2), B * S * D)
    else:
        moves("all-reduce", "model", A * (5 * L + 2), B * S * D)
    # The largest logit; the sum of exponentials and the label's logit, together.
    moves("all-reduce", "model", A, B * S)
    moves("all-reduce", "model", A, 2 * B * S)
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


def check(inspection: et.Inspection, expected: Ledger) -> None:
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
    assert {key: tuple(entry) for key, entry in found.items()} == expected
    # The loss's total and count; and for the norm of the gradients one number for each of the 12
    # leaves, or two where XLA sums over one axis after the other. Nothing else.
    assert scalars <= 2 + 2 * 12


def size_of(shape: str) -> int:
    assert shape.startswith("f32[")
    return 4 * math.prod(int(dim) for dim in shape[4:-1].split(","))


# Every kind of collective over every axis once; what the others join is in the grid.
DEFAULT = [
    "ZeRO-1",
    "FSDP up front x TP",
    "data x FSDP lazy x TP",
    "data x FSDP lazy x sequence parallel",
]


@pytest.mark.parametrize("name", default(list(CASES), DEFAULT))
def test_the_ledger_is_the_closed_form(name: str):
    case = CASES[name]
    program = program_of(case)
    check(program.inspect(shapes_of(program, case), batch_of()), closed_form(case))


def check_7b(case: Case) -> None:
    """Compiles a step of the 7B model, of which no array is ever made, and checks what it costs."""
    devices, rows, length = case.data * case.fsdp * case.model, 2 * 64, 2048
    program = program_of(case, LLAMA_7B, min_size=2**13)  # above the norms
    ts = shapes_of(program, case, LLAMA_7B)
    inspection = program.inspect(ts, batch_of(rows, length))
    check(inspection, closed_form(case, LLAMA_7B, rows, length))
    # Parameters and two moments of each, of which the norms' scales alone are whole everywhere.
    norms = LLAMA_7B.dim * (2 * LLAMA_7B.num_layers + 1)
    split = case.fsdp * case.model
    held = 4 * 3 * ((6_738_415_616 - norms) // split + norms)
    rows_of_one = rows // (case.data * case.fsdp)
    batch = 3 * 4 * rows_of_one * length + 8 * rows  # with the words of every row's key
    assert abs(inspection.argument_bytes - held) <= batch + 64
    report = program.placement(ts)
    assert report.parameters == report.gradients == held // 3
    assert report.optimizer_state == 2 * held // 3 + 4
    assert inspection.donated_bytes >= held and devices == jax.device_count()


@pytest.mark.grid
def test_7b_on_8_devices():
    check_7b(Case(2, 2, 2, gather="lazy"))


def test_7b_on_64_devices():
    """In a process of its own, since the number of devices is fixed when JAX starts."""
    script = (
        "import warnings; warnings.simplefilter('ignore', UserWarning)\n"
        "from tests.sharding.test_ledger import Case, check_7b\n"
        "check_7b(Case(4, 4, 4, gather='lazy'))"
    )
    flags = "--xla_force_host_platform_device_count=64"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "65"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
