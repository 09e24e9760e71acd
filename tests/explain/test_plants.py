"""Planted faults are named by their line and primitive: alone, compiled, and on a mesh."""

import functools
import inspect
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import eqtrain as et
from eqtrain._sharding.varying import vary
from eqtrain.explain import Fault, all_faults, first_fault, statistics, watch
from eqtrain.explain.tensors import measure
from tests.explain.plants import BAD_ROW, DIM, ONES, PLANTS, ROWS, Plant, block, planted_line, rows
from tests.tiers import default

AXES = ("data", "model")

WHOLE = P()
NAMES = ("params", "batch")


def gradient(plant: Plant) -> Any:
    """As the innermost function of a step: the gradient of a loss, and the loss beside it."""

    def loss(params: Any, batch: Any) -> Any:
        value = plant.loss(params, batch)
        return value, value

    return jax.grad(loss, has_aux=True)


@functools.cache
def alone(name: str) -> Any:
    return jax.jit(watch(gradient(PLANTS[name]), names=NAMES))


def on_mesh(differentiated: Any, params_spec: Any = WHOLE) -> Any:
    """Runs a watched gradient over two microbatches on each of 4 x 2 devices."""

    def local(params: Any, batch: Any) -> Any:
        params, batch = jax.tree.map(lambda x: vary(x, frozenset(AXES)), (params, batch))
        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)

        def microbatch(total: Any, part: Any) -> Any:
            (grads, value), flags = differentiated(params, part)
            total = jax.tree.map(jnp.add, total, grads)
            return total, (value, flags)

        grads, aux = lax.scan(microbatch, jax.tree.map(jnp.zeros_like, params), parts)
        return jax.tree.map(lambda x: x[None], (grads, aux))

    specs = (params_spec, P("data"))
    mesh = et.mesh(data=4, model=2)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(AXES)))


def check(fault: Fault | None, plant: Plant) -> Fault:
    assert fault is not None
    assert (fault.kind, fault.site.primitive) == (plant.kind, plant.primitive)
    assert (fault.direction, fault.iterations) == (plant.direction, plant.iterations)
    innermost = fault.site.frames[0]
    assert innermost.file == plant.loss.__code__.co_filename
    where: Any = block if plant.iterations else plant.loss
    assert innermost.line == planted_line(inspect.unwrap(where))
    assert "# planted" in innermost.code
    names = tuple(fault.name_of(operand.name) for operand in fault.site.inputs if operand.name)
    assert set(names) == set(plant.leaves)
    return fault


@pytest.mark.parametrize("name", PLANTS)
def test_fault_is_named_under_jit(name):
    plant = PLANTS[name]
    result, flags = alone(name)(plant.bad_params, plant.bad_batch)
    assert not all(np.isfinite(leaf.astype(np.float32)).all() for leaf in jax.tree.leaves(result))
    check(first_fault(flags), plant)
    # Negative control: the same program, given what is good.
    (grads, value), flags = alone(name)(plant.params, plant.batch)
    assert all_faults(flags) == []
    expected = jax.jit(gradient(plant))(plant.params, plant.batch)
    for ours, theirs in zip(
        jax.tree.leaves((grads, value)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=1e-5)


@pytest.mark.parametrize("name", ["log of a negative", "backward of a root"])
def test_fault_is_named_without_jit(name):
    plant = PLANTS[name]
    check(
        first_fault(watch(gradient(plant), names=NAMES)(plant.bad_params, plant.bad_batch)[1]),
        plant,
    )


# What a plant is named by does not depend on the mesh: one of each kind of scope there.
ON_A_MESH = list(PLANTS)[::3]


@pytest.mark.parametrize("name", default(list(PLANTS), ON_A_MESH))
def test_fault_is_named_in_microbatches_on_a_mesh(name):
    plant = PLANTS[name]
    run = on_mesh(watch(gradient(plant), names=NAMES))
    _, (_, flags) = run(plant.bad_params, plant.bad_batch)
    fault = check(first_fault(flags, time_dims=(1,)), plant)
    if plant.row is None:
        assert fault.lanes == tuple((device, 0) for device in range(8))
    else:
        shard, row = divmod(BAD_ROW, ROWS // 4)
        microbatch = row // (ROWS // 8)
        assert fault.lanes == ((2 * shard, microbatch), (2 * shard + 1, microbatch))
    assert fault.lane == fault.lanes[0]
    _, (_, flags) = run(plant.params, plant.batch)
    assert all_faults(flags, time_dims=(1,)) == []


def test_of_several_microbatches_the_first_is_blamed():
    plant = PLANTS["log of a negative"]
    run = on_mesh(watch(gradient(plant), names=NAMES))
    all_bad = jax.tree.map(lambda x: np.repeat(x[BAD_ROW][None], len(x), 0), plant.bad_batch)
    _, (_, flags) = run(plant.bad_params, all_bad)
    fault = check(first_fault(flags, time_dims=(1,)), plant)
    assert fault.lanes == tuple((device, 0) for device in range(8))


def test_numbers_of_each_kind_are_counted_by_kind():
    values = jnp.array([1.0, -jnp.inf, jnp.nan, 0.0, jnp.inf, jnp.inf, 0.0, -2.0])
    [(moments, counts)] = measure(None, [values], [])["inputs"]
    assert counts.tolist() == [1, 3, 2]  # NaN, infinite, zero
    np.testing.assert_allclose(moments, [-2.0, 1.0, -0.25])


def parallel(params: Any, batch: Any) -> Any:
    """Columns and rows of two matrices split over the model axis, as Megatron has them."""
    h = jnp.exp(batch @ params["columns"])  # planted
    y = lax.psum(h @ params["rows"], "model")
    return jnp.log(y - y + 1.0).sum()


def test_fault_on_one_tensor_parallel_shard_is_placed():
    def loss(params: Any, batch: Any) -> Any:
        value = parallel(params, batch)
        return value, value

    def differentiated(params: Any, batch: Any) -> Any:
        grads, value = jax.grad(loss, has_aux=True)(params, batch)
        return grads, vary(value, frozenset(AXES))

    specs = {"columns": P(None, "model"), "rows": P("model", None)}
    run = on_mesh(watch(differentiated, names=NAMES), specs)
    params = {"columns": np.ones((DIM, 2 * DIM), np.float32), "rows": np.ones((8, DIM), np.float32)}
    bad = {**params, "columns": params["columns"].copy()}
    bad["columns"][0, DIM] = 1e3  # the first column of the shard at model=1
    _, (values, flags) = run(bad, rows(1))
    assert np.isnan(values).all()  # the sum over shards brings it to every device
    fault = first_fault(flags, time_dims=(1,))
    assert fault is not None
    assert (fault.kind, fault.site.primitive) == ("inf", "exp")
    assert fault.site.frames[0].line == planted_line(parallel)
    assert fault.lanes == tuple((2 * data + 1, 0) for data in range(4))
    assert all_faults(run(params, rows(1))[1][1], time_dims=(1,)) == []


@pytest.mark.parametrize("name", ["log of a negative", "0 / 0"])
def test_checkify_names_the_same_line(name):
    plant = PLANTS[name]

    def checked(params: Any, batch: Any) -> Any:
        error, result = checkify.checkify(gradient(plant), errors=checkify.float_checks)(
            params, batch
        )
        return result, jax.tree.map(lambda x: vary(x, frozenset(AXES)), error)

    _, (_, errors) = on_mesh(checked)(plant.bad_params, plant.bad_batch)
    shard, row = divmod(BAD_ROW, ROWS // 4)
    error = jax.tree.map(lambda x: x[2 * shard, row // (ROWS // 8)], errors)
    with pytest.raises(checkify.JaxRuntimeError, match=plant.primitive) as caught:
        error.throw()
    lines = [line for file, line in lines_of(caught.value) if Path(file).name == "plants.py"]
    assert lines[-1] == planted_line(plant.loss)


def lines_of(error: BaseException) -> list[tuple[str, int]]:
    """The files and lines of an error's traceback, behind those of its cause."""
    before = [] if error.__cause__ is None else lines_of(error.__cause__)
    found = traceback.extract_tb(error.__traceback__)
    return before + [(frame.filename, frame.lineno or 0) for frame in found]


def test_statistics_are_of_what_went_in():
    plant = PLANTS["layer"]
    fault = check(first_fault(alone("layer")(plant.bad_params, plant.bad_batch)[1]), plant)
    probed = jax.jit(watch(gradient(plant), names=NAMES, probe=fault.site))
    found = statistics(probed(plant.bad_params, plant.bad_batch)[1], fault)
    dividend, divisor = found.inputs
    assert (dividend.shape, dividend.minimum, dividend.maximum, dividend.zeros) == (
        (16, 4),
        0,
        0,
        64,
    )
    assert (divisor.shape, divisor.dtype, divisor.zeros, divisor.nan) == ((16, 1), "float32", 16, 0)
    [quotient] = found.outputs
    assert (quotient.nan, quotient.inf) == (64, 0)
    with pytest.raises(ValueError, match="probe=fault.site"):
        statistics(alone("layer")(plant.bad_params, plant.bad_batch)[1], fault)


def test_statistics_of_indices_say_what_was_allowed():
    plant = PLANTS["embedding"]
    fault = check(first_fault(alone("embedding")(plant.bad_params, plant.bad_batch)[1]), plant)
    probed = jax.jit(watch(gradient(plant), names=NAMES, probe=fault.site))
    found = statistics(probed(plant.bad_params, plant.bad_batch)[1], fault)
    [bad] = found.indices
    assert (bad.bad, bad.minimum, bad.maximum, bad.largest) == (1, 5, 5, 4)
    assert [tensor.name for tensor in found.inputs] == ["params", "batch"]


def test_statistics_on_a_mesh_are_of_the_device_and_microbatch():
    plant = PLANTS["bfloat16 overflow"]
    run = on_mesh(watch(gradient(plant), names=NAMES))
    fault = first_fault(run(plant.bad_params, plant.bad_batch)[1][1], time_dims=(1,))
    assert fault is not None
    run = on_mesh(watch(gradient(plant), names=NAMES, probe=fault.site))
    found = statistics(run(plant.bad_params, plant.bad_batch)[1][1], fault)
    x, weight = found.inputs
    assert (x.name, x.shape, x.minimum) == ("batch", (2, 4), 1.0)
    assert x.maximum == weight.maximum == float(jnp.bfloat16(1e30))
    assert found.outputs[0].inf == DIM


def test_names_of_layers_hold_their_number():
    def deep(params: Any, batch: Any) -> Any:
        h, _ = lax.scan(lambda h, weight: (h @ weight, None), batch, params["stack"])
        return h.sum()

    stack = np.stack([ONES, ONES * 1e25, ONES * 1e25])
    _, flags = jax.jit(watch(deep, names=NAMES))({"stack": stack}, rows(1))
    fault = first_fault(flags)
    assert fault is not None and fault.iterations == (2,)
    assert fault.name_of(fault.site.inputs[1].name) == "params.stack[2]"
