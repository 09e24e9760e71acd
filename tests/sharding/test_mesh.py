"""A mesh has the axes that were asked for, on the devices that were asked for."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import eqtrain as et


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({"data": 8}, {"data": 8}),
        ({"data": -1}, {"data": 8}),
        ({"data": -1, "model": 2}, {"data": 4, "model": 2}),
        ({"data": 2, "seq": -1, "model": 2}, {"data": 2, "seq": 2, "model": 2}),
        ({"data": 8, "model": -1}, {"data": 8, "model": 1}),
        ({"data": 1}, {"data": 1}),
        ({"data": 3}, {"data": 3}),
        ({"data": 2, "model": 2}, {"data": 2, "model": 2}),
    ],
)
def test_mesh_has_the_sizes_in_order(axes, shape):
    mesh = et.mesh(**axes)
    assert dict(mesh.shape) == shape and mesh.axis_names == tuple(shape)
    # Explicit axes, which `jax.make_mesh` makes by default, refuse inputs that are not sharded yet.
    assert set(mesh.axis_types) == {AxisType.Auto}
    used = list(mesh.devices.flat)
    assert len(set(used)) == len(used) == np.prod(list(shape.values()))
    assert set(used) == set(jax.devices()[: len(used)])


def test_mesh_of_chosen_devices_keeps_their_order():
    chosen = jax.devices()[5:1:-1]
    mesh = et.mesh(devices=chosen, data=2, model=-1)
    assert mesh.devices.tolist() == [[chosen[0], chosen[1]], [chosen[2], chosen[3]]]


def test_sizes_that_were_passed_are_left_alone():
    axes: Any = {"data": -1, "model": 2}
    et.mesh(**axes)
    assert axes == {"data": -1, "model": 2}


def test_shard_map_takes_inputs_that_are_not_sharded():
    mesh = et.mesh(data=4)
    total = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    assert total(jnp.arange(8.0)) == 28


def test_fewer_threads_than_devices_are_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NPROC", "4")
    with pytest.warns(et.ThreadsWarning, match="Got 8 devices and 4 threads.*NPROC=32"):
        et.mesh(data=8)
    et.mesh(data=2)  # an error, if it warned
    monkeypatch.setenv("NPROC", "9")
    et.mesh(data=8)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_the_cores_that_count_are_those_the_process_may_use(monkeypatch: pytest.MonkeyPatch):
    """XLA makes a thread for each of these, as under `taskset` or in a container."""
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3})
    with pytest.warns(et.ThreadsWarning, match="Got 8 devices and 2 threads"):
        et.mesh(data=8)
