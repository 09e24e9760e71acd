"""What a dozen programs compute and cost, to the bit: for a refactoring that must change nothing.

    python tests/fingerprint.py > before.json     # on the commit before
    python tests/fingerprint.py > after.json      # and after
    diff before.json after.json

Losses and parameters are compared as bits, and of the compiled step its collectives, FLOPs and
temporary memory. It uses the public interface alone, so that it runs on any commit.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu", NPROC="16")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parent.parent))

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import eqtrain as et  # noqa: E402

ROWS, WIDTH = 16, 32


def make(key):
    a, b, c = jax.random.split(key, 3)
    return {
        "blocks": jax.random.normal(a, (3, WIDTH, WIDTH)) * 0.2,
        "in": jax.random.normal(b, (8, WIDTH)) * 0.3,
        "out": jax.random.normal(c, (WIDTH, 4)) * 0.3,
    }


def make_with_state(key):
    return make(key), {"seen": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)}


def forward(model, x, key):
    @jax.checkpoint
    def block(x, weight):
        weight = et.gather({"w": weight})["w"]
        return x + jnp.tanh(x @ weight), None

    x = et.dropout(jnp.tanh(x @ model["in"]), 0.1, key=key)
    x, _ = jax.lax.scan(block, x, model["blocks"])
    return x @ model["out"]


def loss(model, state, batch, key):
    out = forward(model, batch["x"], key).astype(jnp.float32)
    error = ((out - batch["y"].astype(jnp.float32)) ** 2).mean(-1)
    return (
        et.mean(error, where=batch["weight"]),
        state,
        {"worst": et.Max(error.max()), "seen": et.Sum((batch["weight"] > 0).sum())},
    )


def two_terms(model, state, batch, key):
    mean, state, metrics = loss(model, state, batch, key)
    out = forward(model, batch["x"], key)
    return mean + 0.1 * et.mean((out**2).mean(-1)), state, metrics


def stateful(model, state, batch, key):
    mean, _, metrics = loss(model, state, batch, key)
    seen = 0.9 * state["seen"] + 0.1 * batch["x"].mean()
    return mean, {"seen": seen, "count": state["count"] + 1}, metrics


def checked(model, state, batch, key):
    from jax.experimental import checkify

    checkify.check(jnp.all(batch["weight"] >= 0), "weights are {w}", w=batch["weight"].min())
    return loss(model, state, batch, key)


def batches():
    rng = np.random.default_rng(0)
    for _ in range(3):
        yield {
            "x": rng.normal(size=(ROWS, 8)).astype(np.float32),
            "y": rng.normal(size=(ROWS, 4)).astype(np.float32),
            "weight": rng.choice([0.0, 1.0, 2.0], size=ROWS).astype(np.float32),
        }


def programs():
    mesh = et.mesh(data=4, devices=jax.devices()[:4])
    grid = et.mesh(data=4, model=2)
    replicated = et.shard(mesh, batch=P("data"))
    fsdp = et.fsdp("data", min_size=1)
    adam = et.update(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
    yield "alone", loss, make, [adam, et.donate]
    yield "accumulated", loss, make, [et.accumulate(4), adam, et.donate]
    yield "replicated", loss, make, [et.accumulate(2), replicated, adam, et.donate]
    yield "outside", loss, make, [replicated, et.accumulate(2), adam, et.donate]
    yield "fsdp", two_terms, make, [et.shard(mesh, batch=P("data"), model=fsdp), adam, et.donate]
    lazy = et.fsdp("data", min_size=1, lazy="blocks")
    yield (
        "lazy",
        loss,
        make,
        [
            et.accumulate(2),
            et.shard(mesh, batch=P("data"), model=lazy),
            adam,
            et.donate,
        ],
    )
    yield (
        "tree",
        loss,
        make,
        [
            et.accumulate(2, order="tree"),
            et.shard(mesh, batch=P("data"), model=fsdp, order="tree"),
            adam,
            et.donate,
        ],
    )
    yield (
        "bfloat16",
        loss,
        make,
        [
            et.precision("bfloat16"),
            et.shard(grid, batch=P(("data", "model")), model=fsdp),
            adam,
            et.donate,
        ],
    )
    yield "float16", two_terms, make, [et.precision("float16"), replicated, adam, et.donate]
    guard = et.guard(spike=et.Spike())
    yield "guarded", checked, make, [replicated, adam, et.ema(0.9), guard, et.donate]
    zero = et.update(optax.adam(1e-2), shard_state="data")
    yield "zero", loss, make, [et.accumulate(2), replicated, zero, et.jit]
    yield "stateful", stateful, make_with_state, [et.accumulate(2), replicated, adam, et.donate]
    yield "repeated", loss, make, [replicated, adam, et.guard, et.repeat(3), et.donate]


def bits(tree):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()[:16]


def fingerprint(function, make, transforms):
    program = et.pipe(function, *transforms)
    ts = program.init(make, key=jax.random.key(0))
    stacked = program.step.num_steps is not None
    given = list(batches())
    if stacked:
        given = [jax.tree.map(lambda *leaves: np.stack(leaves), *given)]
    compiled = program.lower(ts, given[0]).compile()
    memory = compiled.memory_analysis()
    found = {
        "collectives": [str(line) for line in program.inspect(ts, given[0]).collectives],
        "flops": compiled.cost_analysis()["flops"],
        "temporary": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
    }
    metrics = []
    for batch in given:
        ts, of_step = program(ts, batch)
        metrics.append(bits(of_step))
    return {**found, "metrics": metrics, "model": bits(ts.model), "optimizer": bits(ts.opt_state)}


if __name__ == "__main__":
    only = sys.argv[1:]
    print(
        json.dumps(
            {
                name: fingerprint(function, make, transforms)
                for name, function, make, transforms in programs()
                if not only or name in only
            },
            indent=1,
        )
    )
