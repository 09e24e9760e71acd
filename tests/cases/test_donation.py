"""Recipes from public reports: what is kept of a TrainState that later steps use up."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

BATCH = {"x": np.arange(8, dtype=np.float32)}


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean((model["a"].sum() * batch["x"] - model["b"]) ** 2), state, {}


def make(key: Any) -> Any:
    return {"a": jax.random.normal(key, (8,)), "b": jnp.float32(0)}


CHAINS = {
    "alone": (),
    "mesh": (et.shard(et.mesh(data=4), batch=P("data"), model=et.fsdp("data", min_size=8)),),
}


def program_of(chain: Any, compile: Any) -> Any:
    return et.pipe(loss, *chain, et.update(optax.adam(0.01)), compile)


def copies(ts: et.TrainState) -> dict[str, np.ndarray]:
    """Every leaf but the key as a copy. `np.asarray` would give views of buffers of the CPU."""
    return {
        jax.tree_util.keystr(path): np.array(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path((ts.model, ts.opt_state, ts.step))
    }


# Case 24: something reads step 5 while steps 6 to 8 run.


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_copy_of_a_step_is_not_touched_by_later_ones(chain):
    undonated = program_of(chain, et.jit)
    ts = undonated.init(make, key=jax.random.key(0))
    for _ in range(5):
        ts, _ = undonated(ts, BATCH)
    right = copies(ts)

    program = program_of(chain, et.donate)
    ts = program.init(make, key=jax.random.key(0))
    for _ in range(5):
        ts, _ = program(ts, BATCH)
    saved = copies(ts)
    at_once = {name: array.tobytes() for name, array in saved.items()}
    for _ in range(3):
        ts, _ = program(ts, BATCH)
    jax.block_until_ready(jax.tree.leaves(ts))
    assert {name: array.tobytes() for name, array in saved.items()} == at_once
    assert at_once == {name: array.tobytes() for name, array in right.items()}
    assert at_once != {name: array.tobytes() for name, array in copies(ts).items()}


def test_copy_that_a_thread_writes_is_that_of_its_step():
    program = program_of((), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    for _ in range(5):
        ts, _ = program(ts, BATCH)
    saved, blocking = copies(ts), copies(ts)
    later_steps_ran = threading.Event()
    written: dict[str, bytes] = {}

    def write() -> None:
        assert later_steps_ran.wait(timeout=60)
        written.update({name: array.tobytes() for name, array in saved.items()})

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(3):
        ts, _ = program(ts, BATCH)
    jax.block_until_ready(jax.tree.leaves(ts))
    later_steps_ran.set()
    thread.join()
    assert written == {name: array.tobytes() for name, array in blocking.items()}


def test_reading_the_state_late_is_an_error_and_no_wrong_number():
    program = program_of((), et.donate)
    kept = program.init(make, key=jax.random.key(0))
    leaves = kept.leaves
    program(kept, BATCH)
    with pytest.raises(et.UsedStateError, match="call 1 of `train_step`"):
        copies(kept)
    with pytest.raises(RuntimeError, match="deleted"):  # also behind the kit's back
        np.array(leaves[0])


def test_view_of_a_buffer_is_reported_and_stays_right():
    """A view on a CPU silently keeps its buffer from being donated, so the kit says so."""
    program = program_of((), et.donate)
    ts = program.init(make, key=jax.random.key(0))
    view = np.asarray(ts.model["a"])
    if view.flags.owndata:
        pytest.skip("This backend copies.")
    before = view.tobytes()
    with pytest.warns(et.DonationWarning, match="`model.a`"):
        ts, _ = program(ts, BATCH)
    for _ in range(3):
        ts, _ = program(ts, BATCH)
    jax.block_until_ready(jax.tree.leaves(ts))
    assert view.tobytes() == before
