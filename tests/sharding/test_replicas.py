"""Copies that drift apart are named, by leaf and device; those that do not, are not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from eqtrain._guard.replicas import checksum

BATCH = {"x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)}


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean((batch["x"] @ model["w"] + model["b"][None]) ** 2), state, {}


def make(key: Any) -> Any:
    return {"w": jax.random.normal(key, (8, 4)), "b": jnp.zeros(4)}


def program_of(placement: Any = None, every: int = 2, *after: Any, data: int = 4) -> Any:
    mesh = et.mesh(data=data, model=8 // data)
    shard = et.shard(mesh, batch=P("data"), model=placement)
    guard = et.guard(replicas_every=every)
    return et.pipe(loss, shard, et.update(optax.adam(0.1)), guard, *after, et.donate)


def with_fault(ts: et.TrainState, name: str, device: int, change: Any) -> et.TrainState:
    """The same, of which one device holds something else in one leaf."""
    place = ts.structure.names.index(name)
    leaf = ts.leaves[place]
    copies = [np.array(shard.data) for shard in leaf.addressable_shards]
    copies[device] = change(copies[device])
    devices = [shard.device for shard in leaf.addressable_shards]
    faulty = jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, list(map(jax.device_put, copies, devices))
    )
    leaves = (*ts.leaves[:place], faulty, *ts.leaves[place + 1 :])
    return et.TrainState(leaves, ts.structure, fresh=True)


def nudge(x: Any) -> Any:
    """Another last bit in one place."""
    x = x.copy()
    x.reshape(-1)[0] = np.nextafter(x.reshape(-1)[0], np.float32(np.inf))
    return x


def test_the_device_and_the_leaf_are_named():
    program = program_of(every=2, data=8)
    ts = program.init(make, key=jax.random.key(0))
    ts, _ = program(ts, BATCH)
    ts = with_fault(ts, "model.w", 5, lambda x: x + 1)
    ts, _ = program(ts, BATCH)
    with pytest.raises(
        et.ReplicasError, match=r"`model.w` on device \(data=5, model=0\)"
    ) as caught:
        program.check(ts)
    trip = caught.value.trip
    assert trip is not None and trip.causes == ("replicas",) and trip.step == 1
    # All devices were given the sum of the same gradients, and so the same moments.
    assert trip.apart == (("model.w", ({"data": 5, "model": 0},)),)


def test_one_bit_of_a_moment_is_enough():
    program = program_of(every=1, data=8)
    ts = program.init(make, key=jax.random.key(0))
    ts, _ = program(ts, BATCH)
    ts, _ = program(with_fault(ts, "opt_state.0.nu.w", 3, nudge), BATCH)
    with pytest.raises(et.ReplicasError, match=r"`opt_state.0.nu.w` on device \(data=3, model=0\)"):
        program(ts, BATCH)  # flags are read one call late


def test_nothing_is_compared_between_the_steps_that_are_named():
    program = program_of(every=4, data=8)
    ts = program.init(make, key=jax.random.key(0))
    ts = with_fault(ts, "model.b", 1, lambda x: x + 1)
    for _ in range(3):
        ts, _ = program(ts, BATCH)
        program.check(ts)
    ts, _ = program(ts, BATCH)
    with pytest.raises(et.ReplicasError):
        program.check(ts)


def test_a_call_of_repeat_compares_where_a_multiple_was_passed():
    program = program_of(None, 4, et.repeat(3), data=8)
    stacked = {"x": np.stack([BATCH["x"]] * 3)}
    ts = with_fault(program.init(make, key=jax.random.key(0)), "model.b", 1, lambda x: x + 1)
    ts, _ = program(ts, stacked)  # steps 0 to 2
    program.check(ts)
    ts, _ = program(ts, stacked)
    with pytest.raises(et.ReplicasError):
        program.check(ts)


@pytest.mark.parametrize(
    "placement",
    [
        et.fsdp("data", min_size=1),
        et.rules({"w": P(None, "data")}, otherwise=et.replicate()),
    ],
    ids=["fsdp", "rules"],
)
def test_copies_that_are_equal_are_left_alone(placement):
    program = program_of(placement, 1)
    ts = program.init(make, key=jax.random.key(0))
    for _ in range(5):
        ts, _ = program(ts, BATCH)
    program.check(ts)
    assert program.trips == ()


def test_a_part_that_two_devices_hold_is_compared_between_those():
    """Along `model` only, since `data` splits it. Nobody can say which of two is right."""
    program = program_of(et.fsdp("data", min_size=1), 1)
    ts = program.init(make, key=jax.random.key(0))
    ts = with_fault(ts, "opt_state.0.nu.w", 4, lambda x: x + 1)
    ts, _ = program(ts, BATCH)
    with pytest.raises(et.ReplicasError) as caught:
        program.check(ts)
    assert caught.value.trip is not None
    apart = dict(caught.value.trip.apart)
    assert apart["opt_state.0.nu.w"] == ({"data": 2, "model": 0}, {"data": 2, "model": 1})


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int32", "int8", "bool", "uint32", "complex64"]
)
def test_the_checksum_sees_each_element_and_its_place(dtype):
    values = np.arange(24).reshape(4, 6) % 2 == 1 if dtype == "bool" else np.arange(24) - 3
    x = jnp.asarray(values).astype(dtype).reshape(4, 6)
    seen = {int(checksum(x))}
    for i in range(24):
        flat = x.reshape(-1)
        changed = ~flat[i] if dtype == "bool" else flat[i] + 1
        seen.add(int(checksum(flat.at[i].set(changed).reshape(4, 6))))
    assert len(seen) == 25 or dtype == "bool" and len(seen) > 20
    if dtype != "bool":
        assert int(checksum(x[::-1])) not in seen


def test_the_checksum_is_the_formula():
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    words = x.reshape(-1).view(np.uint32).astype(np.uint64)
    expected = int((words * (2 * np.arange(15, dtype=np.uint64) + 1)).sum() % 2**32)
    assert int(checksum(jnp.asarray(x))) == expected


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="a chain without a mesh"):
        et.pipe(loss, et.update(optax.sgd(0.1)), et.guard(replicas_every=10))
    with pytest.raises(ValueError, match="`replicas_every` must be positive"):
        et.guard(replicas_every=0)
