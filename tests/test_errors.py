"""Batches, meshes and placements that do not fit: an error once it is known, and nothing is lost.

Each test names a piece of the rule, of what was got and of the advice, which come in this order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from tests.refusals import BATCH, call, loss, make, refused, returning, shard

# Batches


def test_batch_that_the_devices_do_not_divide():
    batch = {"x": np.ones((6, 4), np.float32), "y": np.ones(6, np.float32)}
    with refused(
        ValueError, "must divide", "`batch.x` of shape (6, 4), whose rows (6) 4 devices", "pad"
    ):
        call(loss, batch, shard())


@pytest.mark.parametrize("inside", [True, False])
def test_batch_that_devices_times_microbatches_do_not_divide(inside):
    batch = {"x": np.ones((12, 4), np.float32), "y": np.ones(12, np.float32)}
    chain = [et.accumulate(2), shard()]
    # Inside `shard` a device has 3 of the 12 rows; outside all 12 are cut over 4 devices.
    got, advice = ("a batch of 3 rows", "[1, 3]") if inside else ("12 rows split over 4", "[1, 3]")
    with refused(ValueError, "`num_microbatches` must divide", got, advice):
        call(loss, batch, *(chain if inside else reversed(chain)))


@pytest.mark.parametrize("rows", [2, 6])
def test_batch_that_the_devices_do_not_divide_outside_of_shard(rows):
    batch = {"x": np.ones((rows, 4), np.float32), "y": np.ones(rows, np.float32)}
    got = f"num_microbatches=2 and a batch of {rows} rows split over 4 devices. No number does"
    with refused(
        ValueError, "must divide the rows", got, "multiple of 8 rows, or pad the last batch"
    ):
        call(loss, batch, shard(), et.accumulate(2))


def test_batch_that_microbatches_do_not_divide():
    with refused(ValueError, "must divide", "num_microbatches=3 and a batch of 8", "[1, 2, 4, 8]"):
        call(loss, BATCH, et.accumulate(3))


@pytest.mark.parametrize("chain", [(), (et.accumulate(2),), (shard(data=2),)])
def test_batch_leaves_of_unequal_length(chain):
    batch = {"x": np.ones((8, 4), np.float32), "y": np.ones(6, np.float32)}
    with refused(
        ValueError, "share their leading dim", "`batch.x` with 8, `batch.y` with 6", "one row"
    ):
        call(loss, batch, *chain)


@pytest.mark.parametrize(
    "value", ["a name", {"deep": "text"}, object()], ids=["str", "deep", "any"]
)
@pytest.mark.parametrize("chain", [(), (et.accumulate(2),), (shard(data=2),)])
def test_batch_with_what_is_no_array(value, chain):
    name = "batch.z.deep" if isinstance(value, dict) else "batch.z"
    with refused(TypeError, "arrays and numbers alone", f"at `{name}`", "Leave it out"):
        call(loss, {**BATCH, "z": value}, *chain)


@pytest.mark.parametrize("chain", [(), (et.accumulate(2), shard(data=2))], ids=["alone", "mesh"])
def test_training_goes_on_after_a_batch_that_was_refused(chain):
    program = et.pipe(loss, *chain, et.update(optax.sgd(0.1)), et.donate(max_compilations=1))
    ts = program.init(make, key=jax.random.key(0))
    with refused(ValueError, "share their leading dim", "with 8", "one row an example"):
        program(ts, {**BATCH, "y": np.ones(6, np.float32)})
    ts, _ = program(ts, BATCH)  # what was refused was not compiled, and does not count
    assert int(ts.step) == 1 and program.compilations == 1


def test_batch_without_an_array():
    def constant(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(model["w"]), state, {}

    with refused(ValueError, "share their leading dim", "no array", "one row an example"):
        call(constant, {"z": 3.0})


def test_batch_on_other_devices():
    elsewhere = jax.device_put(BATCH, jax.devices()[7])
    with refused(ValueError, "on the devices of the mesh", "`batch.x` on", "numpy arrays"):
        call(loss, elsewhere, shard(data=2))
    on_two = et.mesh(devices=jax.devices()[6:], data=2)
    split = jax.device_put(BATCH, jax.sharding.NamedSharding(on_two, P("data")))
    with refused(ValueError, "on the devices of the mesh", "`batch.x` on", "numpy arrays"):
        call(loss, split, shard(data=2))


def test_scalar_loss_of_a_batch_with_weights():
    batch = {**BATCH, "weight": np.ones(8, np.float32)}
    with refused(ValueError, "counts every row alike", "a scalar", "where=batch['weight']"):
        call(returning(lambda v, s: v.mean(), lambda v, s: s, {}), batch)


# Meshes


@pytest.mark.parametrize(
    ("axes", "rule", "got", "advice"),
    [
        ({"data": 0}, "must be positive, or -1", "data=0", "Correct"),
        ({"data": 2, "model": -2}, "must be positive, or -1", "model=-2", "Correct"),
        ({"data": -1, "model": -1}, "One axis may be -1", "['data', 'model']", "all but one"),
        ({"data": -1, "model": 3}, "must divide the number of devices, 8", "model=3", "`devices=`"),
        ({}, "needs an axis", "none", "et.mesh(data=-1)"),
        ({"data": 4, "model": 4}, "more devices than there are", "= 16 devices, and 8 exist", "16"),
    ],
)
def test_meshes(axes, rule, got, advice):
    with refused(ValueError, rule, got, advice):
        et.mesh(**axes)


# `shard`


@pytest.mark.parametrize("batch", [P("dta"), {"x": P("data"), "y": P("dta")}, P(("data", "dta"))])
def test_unknown_axis_in_batch(batch):
    with refused(ValueError, "axes of the mesh alone, which has {'data': 4}", "`dta`", "Correct"):
        shard(batch=batch)


@pytest.mark.parametrize(
    "placement", [et.fsdp("dta"), et.rules({"w": P("dta")}), P("dta"), lambda path, leaf: P("dta")]
)
def test_unknown_axis_in_model(placement):
    with refused(ValueError, "axes of the mesh alone, which has {'data': 4}", "`dta`", "Correct"):
        call(loss, BATCH, shard(placement))


@pytest.mark.parametrize("batch", ["data", None, {"x": "data"}, ("data",)])
def test_batch_that_is_no_spec(batch):
    with refused(TypeError, "PartitionSpec or a tree of them", repr(batch)[:6], "P('data')"):
        shard(batch=batch)


def test_batch_specs_that_split_examples_differently():
    with refused(ValueError, "dim 0, over the same axes", "'y': P", "same first entry"):
        shard(batch={"x": P("data"), "y": P(None)})


def test_batch_specs_that_are_no_prefix():
    with refused(ValueError, "prefix of the batch", "x, y", "Give every entry"):
        call(loss, BATCH, shard(batch={"x": P("data")}))


def test_rule_that_matches_nothing():
    placement = et.rules({"w": P("data"), "wieght": P()})
    with refused(ValueError, "must match a leaf", "'wieght', which matches none of: b, w", "leave"):
        call(loss, BATCH, shard(placement))


def test_spec_with_too_many_entries():
    placement = et.rules({"^w": P("data", None)})
    with refused(ValueError, "more entries than the leaf", "`model.w` of shape (4,)", "Remove"):
        call(loss, BATCH, shard(placement))


def test_spec_that_uses_an_axis_twice():
    def matrix(key: Any) -> Any:
        return {"w": jnp.ones((4, 4)), "b": jnp.zeros(())}

    with refused(ValueError, "may split one dim", "`model.w`", "Remove one"):
        call(loss, BATCH, shard(et.rules({"w": P("data", "data")})), make=matrix)


def test_dim_that_does_not_divide():
    def odd(key: Any) -> Any:
        return {"w": jnp.ones(6), "b": jnp.zeros(())}

    with refused(
        ValueError, "must divide the dim", "`model.w` of shape (6,), whose dim 0 (6)", "rule"
    ):
        call(loss, BATCH, shard(et.rules({"w": P("data")})), make=odd)
    with refused(ValueError, "must find a dim", "`w` of shape (6,)", "`min_size` above 6"):
        call(loss, BATCH, shard(et.fsdp("data", min_size=4)), make=odd)


def test_tree_placement_that_lacks_a_leaf():
    with refused(
        ValueError, "a spec for every array", "none for `b` of shape ()", "`P()` replicates"
    ):
        call(loss, BATCH, shard({"w": P("data")}))


@pytest.mark.parametrize("placement", ["fsdp", 3, {"w": "data"}])
def test_placement_that_is_none(placement):
    with refused(TypeError, "must be a placement", type(placement).__name__, "et.replicate()"):
        shard(placement)


def test_function_that_gives_no_spec():
    with refused(TypeError, "PartitionSpec for every leaf", "'data' for `model.", "`P()`"):
        call(loss, BATCH, shard(lambda path, leaf: "data"))
