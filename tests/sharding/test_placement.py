"""Placements give each leaf the spec that was asked for, and what belongs to it the same one."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from eqtrain._sharding.placement import make_layout

SHAPES = {
    "wide": (4, 8),
    "tall": (16, 8),
    "square": (8, 8),
    "odd": (7, 8),
    "vector": (8,),
    "scalar": (),
}


def leaves(names: str) -> dict[str, Any]:
    return {name: jnp.ones(SHAPES[name]) for name in names.split()}


def specs(placement: Any, arrays: dict[str, Any], **axes: Any) -> dict[str, P]:
    layout = make_layout(et.mesh(**(axes or {"data": 4})), P("data"), placement)
    return dict(zip(sorted(arrays), layout.model_specs(arrays), strict=True))


def test_replicate_copies_everything():
    model = leaves("odd scalar tall")
    assert set(specs(et.replicate(), model).values()) == {P()}


def test_fsdp_splits_the_largest_dim_that_divides():
    model = leaves("odd square tall vector wide")
    assert specs(et.fsdp("data", min_size=8), model) == {
        "odd": P(None, "data"),
        "square": P("data"),  # of equal ones the first
        "tall": P("data"),
        "vector": P("data"),
        "wide": P(None, "data"),
    }


def test_fsdp_leaves_what_is_small_and_one_device_alone():
    model = leaves("scalar square tall vector")
    found = specs(et.fsdp("data", min_size=65), model)
    assert found == {"scalar": P(), "square": P(), "tall": P("data"), "vector": P()}
    assert set(specs(et.fsdp("data", min_size=1), model, data=1).values()) == {P()}


def test_first_rule_that_matches_wins_and_placements_nest():
    model = leaves("odd square tall vector wide")
    placement = et.rules(
        {"tall": P(None, "model"), "l": P("model"), "^w": et.fsdp("data", min_size=1)},
        otherwise=et.fsdp("data", min_size=64),
    )
    assert specs(placement, model, data=2, model=2) == {
        "odd": P(),
        "square": P("data"),
        "tall": P(None, "model"),
        "vector": P(),
        "wide": P(None, "data"),
    }


@pytest.mark.parametrize("otherwise", [None, P(), P("data")])
def test_leaves_without_a_rule(otherwise):
    model = leaves("tall vector")
    found = specs(et.rules({"tall": P("data")}, otherwise=otherwise), model)
    assert found["vector"] == (otherwise or P())


@pytest.mark.parametrize(
    "placement",
    [
        {"tall": P("data"), "vector": P()},
        lambda path, leaf: P("data") if leaf.ndim == 2 else P(),
        lambda path, leaf: P("data", None) if path == "tall" else P(None),
    ],
    ids=["tree", "function", "trailing_none"],
)
def test_trees_and_functions(placement):
    assert specs(placement, leaves("tall vector")) == {"tall": P("data"), "vector": P()}


def test_one_spec_for_all_leaves_and_several_axes_for_a_dim():
    assert specs(P("data"), leaves("tall vector")) == {"tall": P("data"), "vector": P("data")}
    placement = et.rules({"tall": P(("model", "data"))})
    assert specs(placement, leaves("tall"), data=2, model=4) == {"tall": P(("model", "data"))}


def test_a_dim_that_would_reach_the_model_in_pieces_is_refused():
    # Gathered over `data`, a device would have every fourth eighth of it, and not a quarter.
    placement = et.rules({"tall": P(("data", "model"))})
    with pytest.raises(ValueError, match=r"`model.tall`. Write \('model', 'data'\) for"):
        specs(placement, leaves("tall"), data=2, model=4)


def test_a_dim_split_by_model_and_batch_axes_is_whole_along_the_batch():
    def parallel(model: Any, state: Any, batch: Any, key: Any) -> Any:
        y = jax.lax.psum((batch["x"] @ model["up"]) @ model["down"], "model")
        return et.mean(y), state, {}

    rng = np.random.default_rng(0)
    up, down = rng.normal(size=(4, 8)), rng.normal(size=(8, 1))
    x = rng.normal(size=(4, 4)).astype(np.float32)
    step = et.pipe(
        parallel,
        et.shard(
            et.mesh(data=2, model=2),
            batch=P("data"),
            model=et.rules({"up": P(None, ("model", "data")), "down": P(("model", "data"))}),
        ),
        et.update(optax.sgd(1.0)),
        et.jit,
    )
    weights = {"up": jnp.asarray(up, jnp.float32), "down": jnp.asarray(down, jnp.float32)}
    ts, metrics = step(step.init(lambda key: weights, key=jax.random.key(0)), {"x": x})
    np.testing.assert_allclose(et.fetch(metrics)["loss"], (x @ up @ down).mean(), rtol=1e-5)
    expected = down - (x @ up).mean(0)[:, None]
    np.testing.assert_allclose(ts.model["down"], expected, rtol=1e-5)


def test_batch_specs_serve_leaves_of_several_ranks():
    mesh = et.mesh(data=2, seq=2)
    batch = {"tokens": jnp.ones((4, 6)), "label": jnp.ones(4), "temperature": jnp.ones(())}
    layout = make_layout(mesh, P("data", "seq"), et.replicate())
    assert layout.batch_specs(batch) == [P("data"), P(), P("data", "seq")]
    assert layout.batch_axes == ("data", "seq") and layout.example_axes == ("data",)
    assert layout.batch_shards == 2
    tree = {"tokens": P(("data", "seq")), "label": P(("data", "seq")), "temperature": P()}
    with pytest.raises(ValueError, match="same first entry"):
        make_layout(mesh, tree, et.replicate())
    del tree["temperature"]
    layout = make_layout(mesh, tree, et.replicate())
    assert layout.batch_axes == ("data", "seq") and layout.batch_shards == 4


# What `init` does with them.


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    total = sum(leaf.sum() for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    return et.mean(total * batch["x"]), state, {}


def make(key: Any) -> dict[str, Any]:
    names = sorted(SHAPES)
    keys = jax.random.split(key, len(names))
    return {
        name: jax.random.normal(key, SHAPES[name]) for name, key in zip(names, keys, strict=True)
    }


def started(placement: Any, optimizer: Any = None, after: Any = (), **axes: Any) -> et.TrainState:
    chain = [et.shard(et.mesh(**axes), batch=P("data"), model=placement)] if axes else []
    update = et.update(optax.adam(0.1) if optimizer is None else optimizer)
    return et.pipe(loss, *chain, update, *after).init(make, key=jax.random.key(0))


FSDP = et.fsdp("data", min_size=64)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("placement", [et.replicate(), FSDP], ids=["replicate", "fsdp"])
def test_first_values_do_not_depend_on_the_mesh(size, placement):
    if size == 8 and placement is FSDP:
        placement = et.rules({"wide": P(None, "data")}, otherwise=FSDP)
    alone, many = started(placement), started(placement, data=size)
    for a, b in zip(jax.tree.leaves(alone.model), jax.tree.leaves(many.model), strict=True):
        assert np.array(a).tobytes() == np.array(b).tobytes()
    assert np.array_equal(jax.random.key_data(alone.key), jax.random.key_data(many.key))


def test_no_device_holds_more_than_its_shard():
    ts = started(FSDP, data=4)
    tall = ts.model["tall"]
    assert tall.sharding.spec == P("data")
    assert {shard.data.shape for shard in tall.addressable_shards} == {(4, 8)}
    assert {shard.data.shape for shard in ts.model["vector"].addressable_shards} == {(8,)}


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        (optax.adamw(0.1), ["mu", "nu"]),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)), ["trace"]),
        (optax.masked(optax.lion(0.1), et.matching("tall")), ["mu"]),
        (optax.lamb(0.1), ["mu", "nu"]),
    ],
    ids=["adamw", "chain", "masked", "lamb"],
)
def test_moments_and_averages_lie_where_their_parameter_does(optimizer, fields):
    ts = started(FSDP, optimizer, (et.ema(0.9),), data=4)
    for field in fields:
        moments = optax.tree_utils.tree_get(ts.opt_state, field)
        assert moments["tall"].sharding == ts.model["tall"].sharding
        assert moments["tall"].sharding.spec == P("data")
    assert ts.extra["ema"]["tall"].sharding.spec == P("data")
    assert ts.extra["ema"]["vector"].sharding.spec == P()


def test_factored_moments_are_replicated():
    ts = started(FSDP, optax.adafactor(0.1, min_dim_size_to_factor=8), data=4)
    factors = optax.tree_utils.tree_get(ts.opt_state, "v_row")
    assert factors["tall"].shape != SHAPES["tall"]
    assert factors["tall"].sharding.spec == P()


def test_placements_stay_from_step_to_step():
    chain = et.shard(et.mesh(data=4), batch=P("data"), model=FSDP)
    program = et.pipe(loss, chain, et.update(optax.adam(0.1)), et.ema(0.9), et.guard, et.donate)
    ts = program.init(make, key=jax.random.key(0))
    before = [leaf.sharding for leaf in jax.tree.leaves(ts)]
    for _ in range(3):
        ts, _ = program(ts, {"x": np.ones(4, np.float32)})
    assert [leaf.sharding for leaf in jax.tree.leaves(ts)] == before
    assert program.compilations == 1


def test_model_that_is_one_array_is_placed_too():
    chain = et.shard(et.mesh(data=4), batch=P("data"), model=P("data"))
    step = et.pipe(loss, chain, et.update(optax.adam(0.1)), et.ema(0.9))
    ts = step.init(lambda key: jnp.ones(8), key=jax.random.key(0))
    assert ts.model.sharding.spec == P("data")
    assert ts.opt_state[0].mu.sharding.spec == P("data")
    assert ts.extra["ema"].sharding.spec == P("data")
