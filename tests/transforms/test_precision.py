"""`precision` computes in a narrow dtype, and keeps everything that adds up in float32."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et


def f32(x: Any) -> Any:
    return np.asarray(x, np.float32)


BATCH = {
    "x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
    "ids": np.arange(4, dtype=np.int32),
    "weight": f32([1, 0.3, 1, 1]),
    "parts": {"weight": f32([1, 2, 3, 4]), "scale": f32([1, 2, 3, 4])},
}


def make(key: Any) -> Any:
    model = {"w": jax.random.normal(key, (3,)), "n": jnp.asarray(3), "key": jax.random.key(1)}
    return model, {"mean": jnp.zeros(())}


def observed(dtype: str, *chain: Any, make: Any = make) -> tuple[dict[str, Any], et.TrainState]:
    """Takes a step, and notes the dtypes that the loss was given."""
    seen: dict[str, Any] = {}

    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        named = jax.tree_util.tree_leaves_with_path({"m": model, "s": state, "b": batch})
        seen.update({jax.tree_util.keystr(path): leaf.dtype for path, leaf in named})
        values = batch["x"] @ model["w"]
        seen["values"] = values.dtype
        return et.mean(values, where=batch["weight"]), state, {"v": et.mean(values)}

    program = et.pipe(loss, et.precision(dtype), *chain, et.update(optax.adam(0.1)), et.jit)
    ts = program.init(make, key=jax.random.key(0))
    later, metrics = program(ts, BATCH)
    seen["loss"] = metrics["loss"].total.dtype
    return seen, later


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "chain", [(), (et.accumulate(2), et.shard(et.mesh(data=2), batch=P("data")))]
)
def test_loss_sees_the_compute_dtype(dtype, chain):
    seen, ts = observed(dtype, *chain)
    narrow = jnp.dtype(dtype)
    assert seen["['m']['w']"] == seen["['b']['x']"] == seen["values"] == narrow
    assert seen["['b']['parts']['scale']"] == narrow
    # A weight divides the loss, and running statistics are sums.
    assert seen["['b']['weight']"] == seen["['b']['parts']['weight']"] == jnp.float32
    assert seen["['s']['mean']"] == jnp.float32
    assert seen["['b']['ids']"] == seen["['m']['n']"] == jnp.int32
    assert seen["['m']['key']"] == ts.key.dtype
    assert seen["loss"] == jnp.float32
    for tree in (ts.model["w"], ts.opt_state[0].mu["w"], ts.opt_state[0].nu["w"]):
        assert tree.dtype == jnp.float32


@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float16])
def test_narrow_model_is_stored_in_float32(stored):
    def narrow(key: Any) -> Any:
        (model, state) = make(key)
        return {**model, "w": model["w"].astype(stored)}, state

    _, ts = observed("bfloat16", make=narrow)
    assert ts.model["w"].dtype == jnp.float32


def test_float32_changes_no_bit():
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(jnp.tanh(batch["x"] @ model) ** 2), state, {}

    results = []
    for chain in [(), (et.precision("float32"),)]:
        program = et.pipe(loss, *chain, et.update(optax.adam(0.1)), et.jit)
        ts = program.init(lambda key: jnp.ones(3), key=jax.random.key(0))
        for _ in range(3):
            ts, _ = program(ts, BATCH)
        results.append(np.array(ts.model).tobytes())
    assert results[0] == results[1]


def test_layers_of_equinox_compute_in_the_compute_dtype():
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        out = jax.vmap(model)(batch["x"])
        assert out.dtype == jnp.bfloat16
        return et.mean(out**2), state, {}

    program = et.pipe(loss, et.precision(jnp.bfloat16), et.update(optax.sgd(0.1)), et.jit)
    ts = program.init(
        lambda key: eqx.nn.MLP(3, "scalar", width_size=4, depth=1, key=key), key=jax.random.key(0)
    )
    ts, _ = program(ts, BATCH)
    assert ts.model.layers[0].weight.dtype == jnp.float32


def test_products_in_the_jaxpr_are_narrow_and_sums_are_wide():
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean((batch["x"] @ model) ** 2), state, {}

    contribute = et.pipe(loss, et.precision("bfloat16"), et.accumulate(2))
    keys = et.example_keys(jax.random.key(0), 0, jnp.arange(4))
    text = str(jax.make_jaxpr(lambda m, b: contribute(m, None, b, keys))(jnp.ones(3), BATCH))
    dots = [line for line in text.splitlines() if " dot_general[" in line]
    assert dots and all(":bf16[" in line for line in dots)
    grads = jax.eval_shape(lambda m, b: contribute(m, None, b, keys), jnp.ones(3), BATCH).grads
    assert grads.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64"])
def test_dtypes_that_do_not_compute_are_refused(dtype):
    with pytest.raises(ValueError, match=f"must be floating. Got {dtype}"):
        et.precision(dtype)


def test_loss_scaling_is_on_for_float16_and_only_there():
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(batch["x"] @ model), state, {}

    for dtype, expected in [("float16", True), ("bfloat16", False), ("float32", False)]:
        program = et.pipe(loss, et.precision(dtype), et.update(optax.sgd(0.1)), et.jit)
        ts = program.init(lambda key: jnp.ones(3), key=jax.random.key(0))
        assert ("loss_scale" in ts.extra) is expected
        ts, metrics = program(ts, BATCH)
        assert ("loss_scale" in metrics) is expected
        assert np.isfinite(ts.model).all()


def test_precision_twice_is_refused():
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(batch["x"] @ model), state, {}

    with pytest.raises(et.OrderError, match="`et.precision` may occur once"):
        et.pipe(loss, et.precision("bfloat16"), et.precision("float32"))
