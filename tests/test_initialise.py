"""The first TrainState: the same bits on any mesh, and arrays of its own."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

import eqtrain as et


class Normal(eqx.Module):
    """Weights from several distributions, of shapes that eight devices divide."""

    normal: Array
    truncated: Array
    orthogonal: Array
    uniform: Array
    glorot: Array

    def __init__(self, key: Array):
        keys = jax.random.split(key, 5)
        self.normal = 0.02 * jax.random.normal(keys[0], (24, 16))
        self.truncated = jax.random.truncated_normal(keys[1], -2.0, 2.0, (16, 8)) / np.sqrt(16)
        self.orthogonal = jax.nn.initializers.orthogonal()(keys[2], (16, 8))
        self.uniform = jax.random.uniform(keys[3], (8,), minval=-0.5, maxval=0.5)
        self.glorot = jax.nn.initializers.glorot_normal()(keys[4], (8, 40))


MAKERS = {
    "mlp": lambda key: eqx.nn.MLP(8, 16, 24, 2, key=key),
    "convolution": lambda key: eqx.nn.Conv2d(8, 16, 3, key=key),
    "attention": lambda key: eqx.nn.MultiheadAttention(2, 16, key=key),
    "several distributions": Normal,
}


def loss(model: PyTree, state: PyTree, batch: PyTree, key: Array) -> Any:
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return et.mean(batch["x"] * sum(leaf.sum() for leaf in leaves)), state, {}


def program_of(*chain: Any, end: Any = et.donate) -> et.Program:
    return et.pipe(loss, *chain, et.update(optax.adam(0.1)), et.ema(0.9), end)


def bits(ts: et.TrainState) -> list[bytes]:
    def of(leaf: Array) -> bytes:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return [of(leaf) for leaf in ts.leaves]


@functools.cache
def bits_on_one_device(maker: str) -> list[bytes]:
    return bits(program_of().init(MAKERS[maker], key=jax.random.key(3)))


PLACEMENTS = {"replicate": et.replicate(), "fsdp": et.fsdp("data", min_size=1)}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("maker", MAKERS)
def test_the_bits_do_not_depend_on_the_mesh(maker: str, devices: int, placement: str):
    shard = et.shard(et.mesh(data=devices), batch=P("data"), model=PLACEMENTS[placement])
    ts = program_of(shard).init(MAKERS[maker], key=jax.random.key(3))
    assert bits(ts) == bits_on_one_device(maker)
    for leaf in jax.tree.leaves(eqx.filter((ts.model, ts.opt_state[0].mu), eqx.is_array)):
        held = leaf.size // devices if placement == "fsdp" else leaf.size
        assert all(shard.data.size == held for shard in leaf.addressable_shards)


def test_other_keys_give_other_bits():
    ts = program_of().init(MAKERS["mlp"], key=jax.random.key(4))
    assert bits(ts)[0] != bits_on_one_device("mlp")[0]


MESH = et.mesh(data=4)
CHAINS: dict[str, tuple[Any, ...]] = {
    "no mesh": (),
    "replicated": (et.shard(MESH, batch=P("data")),),
    "split": (et.shard(MESH, batch=P("data"), model=et.fsdp("data", min_size=1)),),
}
BATCH = {"x": np.arange(8, dtype=np.float32)}


def given(kind: str) -> Any:
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    return {
        "numpy": lambda: values,
        "jax": lambda: jnp.asarray(values),
        "on another device": lambda: jax.device_put(values, jax.devices()[5]),
        "on the mesh": lambda: jax.device_put(values, NamedSharding(MESH, P())),
        "split on the mesh": lambda: jax.device_put(values, NamedSharding(MESH, P("data"))),
    }[kind]()


KINDS = ["numpy", "jax", "on another device", "on the mesh", "split on the mesh"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_arrays_that_make_closed_over_outlive_donation(chain: Any, kind: str):
    if not chain and kind == "split on the mesh":
        pytest.skip("A program without a mesh is for arrays that are not split.")
    weight = given(kind)
    before = np.array(weight)
    program = program_of(*chain)
    ts = program.init(lambda key: {"w": weight}, key=jax.random.key(0))
    assert np.array_equal(np.array(ts.model["w"]), before)
    for _ in range(3):
        ts, _ = program(ts, BATCH)
    # With warnings as errors, a parameter that was not donated would have failed by now.
    assert isinstance(weight, np.ndarray) or not weight.is_deleted()
    assert np.array_equal(np.array(weight), before)
    assert not np.array_equal(np.array(ts.model["w"]), before)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_what_follows_a_parameter_lies_where_it_does(chain: Any):
    ts = program_of(*chain).init(lambda key: {"w": given("numpy")}, key=jax.random.key(0))
    adam = ts.opt_state[0]
    for leaf in (adam.mu["w"], adam.nu["w"], ts.ema["w"]):
        assert leaf.sharding == ts.model["w"].sharding
    assert adam.count.sharding.is_fully_replicated
