"""`remat` computes again what it did not keep, and changes no bit of the result."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et

BATCH = {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)}
SAVE_DOTS = jax.checkpoint_policies.dots_saveable
SAVE_ALL = jax.checkpoint_policies.everything_saveable


def make(key: Any) -> list[Any]:
    return [jax.random.normal(key, (8, 8)) for key in jax.random.split(key, 3)]


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    x = batch["x"]
    for weight in model:
        x = et.dropout(jnp.cos(x @ weight), 0.25, key=key)
    return et.mean(x**2), state, {"x": et.mean(x)}


def count(primitive: str, loss: Any, *chain: Any) -> int:
    contribute = et.pipe(loss, *chain, et.accumulate(1))
    keys = et.example_keys(jax.random.key(0), 0, jnp.arange(4))
    model = make(jax.random.key(1))
    text = str(jax.make_jaxpr(lambda m, b: contribute(m, None, b, keys))(model, BATCH))
    return text.count(f" = {primitive}")


def test_backward_pass_computes_again():
    # Forward: 3 of each. Backward: sin, and two products a layer but one for the first.
    assert (count("cos", loss), count("sin", loss), count("dot_general", loss)) == (3, 3, 8)
    # All is made again but the last cosine, whose value nothing in the backward pass needs.
    assert count("dot_general", loss, et.remat) > count("dot_general", loss)
    assert count("cos", loss, et.remat) > count("cos", loss)


@pytest.mark.parametrize(
    ("policy", "dots_again", "cosines_again"), [(SAVE_DOTS, False, True), (SAVE_ALL, False, False)]
)
def test_policy_says_what_is_kept(policy, dots_again, cosines_again):
    chain = et.remat(policy=policy)
    assert (count("dot_general", loss, chain) > count("dot_general", loss)) is dots_again
    assert (count("cos", loss, chain) > count("cos", loss)) is cosines_again


MESH = (et.accumulate(2), et.shard(et.mesh(data=2), batch=P("data")))


@pytest.mark.parametrize(
    ("chain", "policy"), [((), None), ((et.accumulate(2),), SAVE_DOTS), (MESH, None)]
)
def test_values_are_bit_equal(chain, policy):
    results = []
    for first in [(), (et.remat(policy=policy),)]:
        program = et.pipe(loss, *first, *chain, et.update(optax.adam(0.1)), et.jit)
        ts = program.init(make, key=jax.random.key(0))
        ts, _ = program(ts, BATCH)
        ts, metrics = program(ts, BATCH)
        results.append([np.array(leaf).tobytes() for leaf in jax.tree.leaves((ts.model, metrics))])
    assert results[0] == results[1]


def test_mask_of_dropout_is_the_same_in_both_passes():
    """Gradient of sum(mask * w * x): 0 exactly where the forward pass dropped."""

    def masked(model: Any, state: Any, batch: Any, key: Any) -> Any:
        return et.mean(et.dropout(batch["x"] * model, 0.5, key=key)), state, {}

    keys = et.example_keys(jax.random.key(0), 0, jnp.arange(4))
    kept = et.dropout(jnp.ones((4, 8)), 0.5, key=keys)
    contribute = et.pipe(masked, et.remat, et.accumulate(1))
    grads = contribute(jnp.ones((4, 8)), None, {"x": jnp.ones((4, 8))}, keys).grads
    assert np.array_equal(grads, kept)


def test_models_with_functions_and_state_pass_through():
    @et.remat
    def with_state(model: Any, state: Any, batch: Any, key: Any) -> Any:
        values = jax.vmap(model)(batch["x"])
        return et.mean(values), {"seen": state["seen"] + 1}, {"top": et.Max(values.max())}

    def make_mlp(key: Any) -> Any:
        model = eqx.nn.MLP(8, "scalar", width_size=4, depth=1, key=key)
        return model, {"seen": jnp.asarray(0)}

    program = et.pipe(with_state, et.accumulate(2), et.update(optax.sgd(0.1)), et.jit)
    ts = program.init(make_mlp, key=jax.random.key(0))
    ts, metrics = program(ts, BATCH)
    assert ts.state["seen"] == 2 and np.isfinite(et.fetch(metrics)["top"])


def test_remat_of_what_is_no_loss_is_refused():
    with pytest.raises(et.OrderError, match="`et.remat` takes a Loss. Got a Contribute"):
        et.pipe(loss, et.accumulate(2), et.remat)
