"""Every byte of a TrainState is donated, none piles up, and a used-up one says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqtrain as et
from tests.helpers import loss, make_batches, make_params
from tests.tiers import default, grid

MESH = et.mesh(data=4)
WHOLE = et.shard(MESH, batch=P("data"))
SPLIT = et.shard(MESH, batch=P("data"), model=et.fsdp("data", min_size=1))
SGD, ADAMW = et.update(optax.sgd(0.01)), et.update(optax.adamw(0.01))

CHAINS: dict[str, tuple[Any, ...]] = {
    "no mesh": (SGD,),
    "replicated": (WHOLE, SGD),
    "split": (SPLIT, SGD),
    "split, adamw": (SPLIT, ADAMW),
    "split, accumulate inside": (et.accumulate(2), SPLIT, ADAMW),
    "split, accumulate outside": (SPLIT, et.accumulate(2), ADAMW),
    "replicated, ema": (WHOLE, ADAMW, et.ema(0.9)),
    "split, ema": (SPLIT, ADAMW, et.ema(0.9)),
    "replicated, guard": (WHOLE, ADAMW, et.guard),
    "split, guard": (SPLIT, ADAMW, et.guard),
    "split, ema and guard": (SPLIT, ADAMW, et.ema(0.9), et.guard),
    "bfloat16": (et.precision("bfloat16"), SPLIT, ADAMW, et.guard),
    "float16": (et.precision("float16"), SPLIT, ADAMW, et.guard),
    "clipped": (SPLIT, et.update(optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.01)))),
    "scheduled": (WHOLE, et.update(optax.adam(optax.cosine_decay_schedule(0.1, 10)))),
}


def program_of(*chain: Any, end: Any = et.donate) -> et.Program:
    return et.pipe(loss, *chain, end)


def started(program: et.Program) -> et.TrainState:
    return program.init(lambda key: make_params(), key=jax.random.key(0))


def bytes_a_device(leaf: jax.Array) -> int:
    """Bytes of one device's shard, worked out from the shape; a key is two numbers of 32 bits."""
    size = math.prod(leaf.sharding.shard_shape(leaf.shape))
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return size * (8 if is_key else leaf.dtype.itemsize)


# Each transform that adds to the state, or that may keep a buffer, once.
DONATING = [
    "no mesh",
    "replicated",
    "split, accumulate outside",
    "split, ema and guard",
    "float16",
    "clipped",
]


@pytest.mark.parametrize("name", default(list(CHAINS), DONATING))
def test_every_byte_is_donated(name: str):
    chain = CHAINS[name]
    batches = make_batches(3)
    program = program_of(*chain)
    ts = started(program)
    assert program.inspect(ts, batches[0]).donated_bytes == sum(map(bytes_a_device, ts.leaves))
    for batch in batches:
        shardings = [leaf.sharding for leaf in ts.leaves]
        given = ts
        ts, _ = program(ts, batch)
        assert all(leaf.is_deleted() for leaf in given.leaves)
        # A sharding that a step changed would be compiled anew, and could not be donated.
        assert [leaf.sharding for leaf in ts.leaves] == shardings
    assert program.compilations == 1


def test_split_leaves_take_a_fourth_of_a_device():
    sizes = {}
    for name in ("replicated", "split"):
        ts = started(program_of(*CHAINS[name]))
        sizes[name] = sum(bytes_a_device(leaf) for leaf in jax.tree.leaves(ts.model))
    assert sizes["replicated"] == 4 * sizes["split"]


@pytest.mark.parametrize("chain", [CHAINS["no mesh"], CHAINS["split"]], ids=["no mesh", "split"])
def test_jit_donates_nothing(chain: Any):
    program = program_of(*chain, end=et.jit)
    ts = started(program)
    assert program.inspect(ts, make_batches(1)[0]).donated_bytes == 0
    later, _ = program(ts, make_batches(1)[0])
    assert not any(leaf.is_deleted() for leaf in (*ts.leaves, *later.leaves))
    again, _ = program(ts, make_batches(1)[0])
    assert all(map(np.array_equal, jax.tree.leaves(again.model), jax.tree.leaves(later.model)))


@pytest.mark.parametrize("name", ["no mesh", grid("replicated"), "split"])
def test_a_view_that_is_held_is_reported_by_path(name: str):
    chain = CHAINS[name]
    """What `np.asarray` gives on a CPU is the buffer itself, which then cannot be donated."""
    program = program_of(*chain)
    ts = started(program)
    view = np.asarray(ts.model["second"]["weight"].addressable_shards[0].data)
    if view.flags.owndata:
        pytest.skip("This backend copies.")
    before = view.copy()
    with pytest.warns(et.DonationWarning, match=r"Got 1 .*: `model\.second\.weight`"):
        ts, _ = program(ts, make_batches(1)[0])
    assert np.array_equal(view, before)

    # A copy keeps nothing, as warnings that are errors make sure.
    ts = started(program)
    copy = np.array(ts.model["second"]["weight"])
    program(ts, make_batches(1)[0])
    assert np.array_equal(copy, make_params()["second"]["weight"])


@pytest.mark.parametrize("name", ["no mesh", "split, ema and guard", grid("replicated, ema")])
def test_nothing_piles_up(name: str):
    program = program_of(*CHAINS[name])
    ts, batch = started(program), make_batches(1)[0]
    counts, metrics = {}, {}
    for step in range(1, 101):
        ts, metrics = program(ts, batch)
        if step in (10, 100):
            counts[step] = live(ts, metrics)
    assert counts[10] == counts[100]

    kept = metrics  # what is kept is seen
    ts, metrics = program(ts, batch)
    assert live(ts, metrics)[0] == counts[100][0] + len(jax.tree.leaves(kept))


def live(*results: Any) -> tuple[int, int]:
    """The number and the bytes of all arrays that anything holds."""
    jax.block_until_ready(results)
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


READS: dict[str, Callable[[et.TrainState], Any]] = {
    "model": lambda ts: ts.model,
    "state": lambda ts: ts.state,
    "opt_state": lambda ts: ts.opt_state,
    "key": lambda ts: ts.key,
    "step": lambda ts: ts.step,
    "ema": lambda ts: ts.ema,
    "extra": lambda ts: ts.extra,
    "parts": lambda ts: ts.parts,
    "replace": lambda ts: ts.replace(state=None),
    "leaves": jax.tree.leaves,
    "map": lambda ts: jax.tree.map(jnp.copy, ts),
    "paths": jax.tree_util.tree_leaves_with_path,
    "device_get": jax.device_get,
    "step again": lambda ts: program_of(*CHAINS["replicated, ema"])(ts, make_batches(1)[0]),
    "evaluate": lambda ts: et.evaluate(WHOLE(loss))(ts, make_batches(1)[0]),
}


@pytest.fixture(scope="module")
def used() -> et.TrainState:
    program = program_of(*CHAINS["replicated, ema"])
    ts = started(program)
    ts, _ = program(ts, make_batches(1)[0])
    program(ts, make_batches(1)[0])
    return ts


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_used_state_says_which_call_took_it(read: Any, used: et.TrainState):
    with pytest.raises(et.UsedStateError, match=r"call 2 of `train_step` took.*Use the TrainState"):
        read(used)


def test_a_used_state_may_be_printed(used: et.TrainState):
    assert "used up by call 2" in repr(used)


@pytest.mark.parametrize("name", ["no mesh", grid("replicated"), "split", "replicated, guard"])
def test_a_state_whose_buffers_another_name_gave_away_is_named(name: str):
    # On a mesh jaxlib would end the process.
    program, batch = program_of(*CHAINS[name]), make_batches(1)[0]
    ts, _ = program(started(program), batch)
    alias = jax.tree.map(lambda leaf: leaf, ts)
    program(ts, batch)
    with pytest.raises(et.UsedStateError, match=r"`model\.first\.bias` was deleted"):
        program(alias, batch)
    with pytest.raises(et.UsedStateError, match=r"`model\.first\.bias` was deleted"):
        program.explain(alias, batch)
    for fields in (["step"], ["model"], ["model", "step"], ["model", "opt_state", "step", "extra"]):
        ts, _ = program(started(program), batch)
        new = {field: jax.tree.map(jnp.copy, getattr(ts, field)) for field in fields}
        program(ts.replace(**new), batch)
        with pytest.raises(et.UsedStateError, match="was deleted"):
            program(ts, batch)
        # The other way round: a copy that was given others in these fields.
        ts, _ = program(started(program), batch)
        other = ts.replace(**{field: getattr(ts, field) for field in fields})
        program(ts, batch)
        with pytest.raises(et.UsedStateError, match="was deleted"):
            program(other, batch)


def test_a_state_that_was_given_away_is_named_whatever_the_batch_lies_on():
    program, batch = program_of(*CHAINS["no mesh"]), make_batches(1)[0]
    ts, _ = program(started(program), batch)
    alias = jax.tree.map(lambda leaf: leaf, ts)
    program(ts, batch)
    with pytest.raises(et.UsedStateError, match=r"`model\.first\.bias` was deleted"):
        program(alias, jax.device_put(batch, jax.devices()[0]))


def test_a_state_that_was_given_away_is_named_where_a_batch_alone_is_on_a_mesh():
    # It takes the state there, and that is compiled.
    program = program_of(*CHAINS["no mesh"], end=et.donate(max_compilations=2))
    batch = make_batches(1)[0]
    batch = jax.device_put(batch, NamedSharding(et.mesh(data=2), P()))
    ts, _ = program(started(program), batch)
    other = ts.replace(opt_state=ts.opt_state)
    program(other, batch)
    with pytest.raises(et.UsedStateError, match="was deleted"):
        program(ts, batch)


@pytest.mark.parametrize("name", ["no mesh", grid("replicated"), "split"])
def test_evaluation_leaves_the_state_alone(name: str):
    program = program_of(*CHAINS[name])
    measure = et.pipe(loss, *CHAINS[name][:-1], et.evaluate)
    ts, batch = started(program), make_batches(1)[0]
    losses = []
    for _ in range(2):
        first, second = (et.fetch(measure(ts, batch))["loss"] for _ in range(2))
        assert first == second and not any(leaf.is_deleted() for leaf in ts.leaves)
        ts, metrics = program(ts, batch)
        # It measured what the step then saw: same parameters, same masks.
        assert np.isclose(first, et.fetch(metrics)["loss"], rtol=1e-6)
        losses.append(first)
    assert losses[1] != losses[0]
