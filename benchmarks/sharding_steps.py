"""The training steps that `sharding.py` compares: ours, automatic partitioning, and `pmap`.

All take the same step: AdamW on the mean negative log-likelihood of a Llama of `models/llama.py`,
float32, each layer rematerialised, donated, with the loss and the norm of the gradients as results.

As a script it has so many devices, and serves requests from its standard input, a JSON line each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import equinox as eqx
import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et
from benchmarks.environment import make_cpu_devices
from eqtrain._programs.cost import Inspection, inspect_compiled
from models.llama import Llama, LlamaConfig, tensor_parallel
from models.parallel import AbstractSplit

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 1e-2
MODEL_DEVICES = 2  # along `model`, where there is such an axis; the rest are along `data`


@dataclasses.dataclass(frozen=True)
class Size:
    """A Llama and its batch."""

    config: LlamaConfig
    batch: int
    seq: int

    @property
    def num_params(self) -> int:
        c = self.config
        kv_dim = c.num_kv_heads * c.head_dim
        block = 2 * c.dim * (c.dim + kv_dim) + 3 * c.dim * c.hidden_dim + 2 * c.dim
        return 2 * c.vocab_size * c.dim + c.num_layers * block + c.dim


SIZES = {
    "small": Size(LlamaConfig(1024, 256, 4, 8, 4, 768), batch=16, seq=64),
    "tiny": Size(LlamaConfig(64, 32, 2, 4, 2, 64), batch=16, seq=16),
}


@dataclasses.dataclass
class Stepper:
    """One contender in this process. `step` takes what it returned first, and gives the loss."""

    step: Callable[[Any], tuple[Any, Any]]
    state: Any
    compiled: jax.stages.Compiled
    compile_seconds: float

    def run(self, num_steps: int) -> float:
        """Takes so many steps, waits for the last, and gives its loss."""
        loss: Any = None
        for _ in range(num_steps):
            self.state, loss = self.step(self.state)
        jax.block_until_ready((jax.tree.leaves(self.state), loss))
        return float(np.ravel(_local(loss))[0])


def make_batch(size: Size) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(
        0, size.config.vocab_size, (size.batch, size.seq + 1), np.int32
    )
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def make_model(size: Size, *, sequence: bool = False, remat: bool = True) -> Callable[..., Llama]:
    return lambda key: Llama(size.config, sequence_parallel=sequence, remat=remat, key=key)


def make_mesh(split_model: bool) -> Mesh:
    return et.mesh(data=-1, model=MODEL_DEVICES) if split_model else et.mesh(data=-1)


def make_optimizer() -> optax.GradientTransformation:
    return optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def ours(size: Size, placement: Any, **settings: Any) -> Stepper:
    program, ts, batch = _ours(size, placement, **settings)
    start = time.perf_counter()
    # Compiled once more when it is called. A cache on disk would save that, but what is timed would
    # then not be what the compiler just made, as it is for the others.
    compiled = program.lower(ts, batch).compile()
    seconds = time.perf_counter() - start

    def step(ts: Any) -> tuple[Any, Any]:
        ts, metrics = program(ts, batch)
        return ts, metrics["loss"].value

    return Stepper(step, ts, compiled, seconds)


def _ours(
    size: Size,
    placement: Any,
    split_model: bool = False,
    sequence: bool = False,
    remat: bool = True,
    order: str | None = None,
) -> Any:
    def loss(model: Llama, state: None, batch: PyTree, key: Array) -> Any:
        return et.mean(model.nll(batch["tokens"], batch["labels"])), state, {}

    program = et.pipe(
        loss,
        et.shard(make_mesh(split_model), batch=P("data"), model=placement, order=order),
        et.update(make_optimizer()),
        et.donate,
    )
    ts = program.init(make_model(size, sequence=sequence, remat=remat), key=jax.random.key(0))
    sharding: Any = program.batch_sharding
    batch = {
        name: jax.make_array_from_callback(
            rows.shape, sharding, lambda index, rows=rows: rows[index]
        )
        for name, rows in make_batch(size).items()
    }
    return program, ts, batch


class Constrained(AbstractSplit):
    """A layer whose result is to lie as `sharding` says, however it was computed."""

    layer: Any
    sharding: NamedSharding = eqx.field(static=True)
    axis: str | None = eqx.field(static=True)

    def __init__(self, layer: Any, sharding: NamedSharding):
        self.layer = layer
        self.sharding = sharding
        self.axis = None  # in the global view every layer is whole

    @property
    def is_split(self) -> bool:
        return False

    @property
    def weight(self) -> Array:
        return self.layer.weight

    def __call__(self, *args: Any) -> Array:
        return lax.with_sharding_constraint(self.layer(*args), self.sharding)


def constrained(model: Llama, mesh: Mesh, sequence: bool) -> Llama:
    """The same model with the constraints on activations that automatic partitioning is given.

    They are where MaxText and T5X have them: on what goes from layer to layer, on queries, keys and
    values, on what is inside the MLP, and on the logits.
    """
    axis = "model" if "model" in mesh.shape else None
    between = NamedSharding(mesh, P("data", axis if sequence else None, None))
    inside = NamedSharding(mesh, P("data", None, axis))

    def inner(model: Llama) -> list[Any]:
        attention, mlp = model.blocks.attention, model.blocks.mlp
        return [attention.query, attention.key, attention.value, mlp.gate, mlp.up, model.head]

    def outer(model: Llama) -> list[Any]:
        return [model.embedding, model.blocks]

    for where, sharding in ((inner, inside), (outer, between)):
        model = eqx.tree_at(where, model, [Constrained(layer, sharding) for layer in where(model)])
    return model


def automatic(
    size: Size, placement: Any, *, split_model: bool = False, sequence: bool = False
) -> Stepper:
    """`jax.jit` of the global program: what lies where is said, and what travels is XLA's choice.

    Parameters and optimizer state lie as ours do, by the same placement.
    """
    _, ts, batch = _ours(size, placement, split_model)
    params, static = eqx.partition(ts.model, eqx.is_array)
    optimizer, mesh = make_optimizer(), make_mesh(split_model)
    # Scalars too, such as AdamW's count, have to lie on the whole mesh from the start.
    state = (params, ts.opt_state)
    lies = jax.tree.map(lambda leaf: leaf.sharding, state)
    whole = NamedSharding(mesh, P())

    def loss_of(params: PyTree, batch: PyTree) -> Array:
        model = constrained(eqx.combine(params, static), mesh, sequence)
        return model.nll(batch["tokens"], batch["labels"]).mean()

    def step(state: Any, batch: PyTree) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (loss, optax.tree.norm(grads))

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(lies, (whole, whole)))
    return _raw(jitted, state, batch)


def pmap(size: Size) -> Stepper:
    """`jax.pmap`: a full copy of everything on each device, gradients averaged by hand."""
    count = jax.device_count()
    _, ts, _ = _ours(size, et.replicate())
    params, static = eqx.partition(ts.model, eqx.is_array)
    optimizer = make_optimizer()
    state = (params, ts.opt_state)
    lies = NamedSharding(et.mesh(data=-1), P("data"))
    state = jax.tree.map(
        lambda leaf: jax.device_put(np.broadcast_to(leaf, (count, *leaf.shape)), lies), state
    )
    batch = {
        name: jax.device_put(rows.reshape(count, -1, *rows.shape[1:]), lies)
        for name, rows in make_batch(size).items()
    }

    def loss_of(params: PyTree, batch: PyTree) -> Array:
        return eqx.combine(params, static).nll(batch["tokens"], batch["labels"]).mean()

    def step(state: Any, batch: PyTree) -> Any:
        params, opt_state = state
        loss, grads = lax.pmean(jax.value_and_grad(loss_of)(params, batch), "data")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (loss, optax.tree.norm(grads))

    return _raw(jax.pmap(step, axis_name="data", donate_argnums=0), state, batch)


def _raw(jitted: Any, state: Any, batch: PyTree) -> Stepper:
    start = time.perf_counter()
    compiled = jitted.lower(state, batch).compile()
    seconds = time.perf_counter() - start

    def step(state: Any) -> tuple[Any, Any]:
        state, (loss, _) = compiled(state, batch)
        return state, loss

    return Stepper(step, state, compiled, seconds)


def _local(x: Array) -> np.ndarray:
    """What this process has of an array that may lie on several."""
    return np.asarray(x.addressable_shards[0].data)


def _beside() -> Any:
    return et.fsdp("data", lazy="blocks", beside=tensor_parallel("model"))


STEPPERS: dict[str, Callable[[Size], Stepper]] = {
    "ours_replicated": lambda size: ours(size, et.replicate()),
    "ours_fsdp": lambda size: ours(size, et.fsdp("data")),
    "ours_fsdp_lazy": lambda size: ours(size, et.fsdp("data", lazy="blocks")),
    "ours_tensor": lambda size: ours(size, _beside(), split_model=True),
    "ours_sequence": lambda size: ours(size, _beside(), split_model=True, sequence=True),
    "ordered": lambda size: ours(size, et.replicate(), order="tree"),
    "auto_replicated": lambda size: automatic(size, et.replicate()),
    "auto_fsdp": lambda size: automatic(size, et.fsdp("data")),
    "auto_tensor": lambda size: automatic(size, _beside(), split_model=True),
    "auto_sequence": lambda size: automatic(size, _beside(), split_model=True, sequence=True),
    "pmap": pmap,
    "ours_fsdp_no_remat": lambda size: ours(size, et.fsdp("data"), remat=False),
}


def save_weights(size: Size, path: str) -> None:
    """Writes the first weights, by their paths in the model, and the batch."""
    _, ts, _ = _ours(size, et.replicate())
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(ts.model, eqx.is_array))
    arrays: dict[str, Any] = {
        jax.tree_util.keystr(name).lstrip("."): np.asarray(leaf) for name, leaf in leaves
    }
    arrays.update(make_batch(size))
    np.savez(path, allow_pickle=False, **arrays)


def moved_bytes(inspection: Inspection, devices: int) -> dict[str, int]:
    """What one device sends in a step, by kind of collective, where rings are used.

    Of the bytes that each of n devices gets, one sends (n-1)/n; of an all-reduce twice that, and of
    a reduce-scatter n-1 times its own, since it gets an n-th of what is summed.
    """
    moved: dict[str, float] = {}
    for collective in inspection.collectives:
        n = collective.devices or devices
        share = {
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": n - 1,
            "collective-permute": 1,
        }.get(collective.kind, (n - 1) / n)
        sent = share * collective.bytes * collective.times
        moved[collective.kind] = moved.get(collective.kind, 0) + sent
    return {kind: round(size) for kind, size in moved.items()}


def costs(stepper: Stepper, devices: int) -> dict[str, Any]:
    """What the compiled step says of itself, of one device."""
    inspection = inspect_compiled(stepper.compiled)
    moved = moved_bytes(inspection, devices)
    collectives: dict[str, Any] = {
        kind: {"times": inspection.count(kind), "result_bytes": 0, "moved_bytes": moved[kind]}
        for kind in moved
    }
    for one in inspection.collectives:
        collectives[one.kind]["result_bytes"] += one.times * one.bytes
    return {
        "collectives": collectives,
        "moved_bytes": sum(moved.values()),
        "temporary_bytes": inspection.temporary_bytes,
        "argument_bytes": inspection.argument_bytes,
        "donated_bytes": inspection.donated_bytes,
        "flops": inspection.flops,
        "compile_seconds": round(stepper.compile_seconds, 2),
    }


def serve(size: Size) -> None:
    """Answers each line of standard input by one of standard output."""
    steppers: dict[str, Stepper] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, reply = request.get("name"), {}
        if request["do"] == "make":
            steppers[name] = STEPPERS[name](size)
            reply = costs(steppers[name], jax.device_count())
        elif request["do"] == "run":
            start = time.perf_counter()
            loss = steppers[name].run(request["steps"])
            reply = {"seconds": time.perf_counter() - start, "loss": loss}
        elif request["do"] == "text":
            Path(request["path"]).write_text(steppers[name].compiled.as_text() or "")
        elif request["do"] == "save":
            save_weights(size, request["path"])
        print(json.dumps(reply), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--coordinator", help="address of process 0, where there are two")
    parser.add_argument("--process", type=int, default=0)
    args = parser.parse_args()
    make_cpu_devices(args.devices)
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, num_processes=2, process_id=args.process)
    serve(SIZES[args.size])


if __name__ == "__main__":
    main()
