"""Every right order of transforms trains and evaluates alike: as two steps by hand.

What stands before `update` sees batches and gradients, and what stands after it whole steps. So by
default every order of the former runs with all of the latter, and every order of the latter with
all of the former; the product of both is in the grid.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqtrain as et
from tests.orders import (
    DECAY,
    LEARNING_RATE,
    NINE,
    RATE,
    Chain,
    build,
    level_of,
    make_batch,
    right_chains,
)

# Two steps in float32 against float64; and in bfloat16, with its 8 bits.
EXACT, NARROW = 2e-6, 5e-2

LOSSES = [chain for chain in right_chains(NINE) if level_of(chain) in ("Loss", "Contribute")]
ENDINGS = [chain for chain in right_chains(NINE) if chain[:1] == ("update",)]
COMPILED = [ending for ending in ENDINGS if "donate" in ending]
WHOLE: Chain = ("update", "ema", "guard", "repeat", "donate")
# One of every number of transforms before `update`, and all orders of all four of them.
CORNERS = [chain for chain in LOSSES if len(chain) in (0, 1, 4)]


def make(key: Any) -> Any:
    return {"w": np.array([0.5, -1.0, 0.25, 2.0], np.float32)}


def first_state(chain: Chain) -> et.TrainState:
    """What `init` gives; the order plays no part in it, as a test below makes sure."""
    state_makers = ("precision", "shard", "update", "ema", "guard")
    return first_state_of(tuple(name for name in state_makers if name in chain))


@functools.cache
def first_state_of(chain: Chain) -> et.TrainState:
    return build(chain).init(make, key=jax.random.key(0))


@pytest.mark.parametrize("ending", COMPILED, ids="-".join)
def test_the_first_state_depends_on_no_order(ending: Chain):
    ts, expected = build(ending).init_shapes(make), first_state(ending)
    assert ts.structure.names == expected.structure.names
    if len(ending) == len(WHOLE):
        ts = build(ending).init(make, key=jax.random.key(0))
        assert all(bool((a == b).all()) for a, b in zip(ts.leaves, expected.leaves, strict=True))


@functools.cache
def by_hand() -> dict[str, Any]:
    """Losses, parameters and their average, in numpy; only the masks come from the kit."""
    w = average = make(None)["w"].astype(np.float64)
    losses = []
    for step in range(2):
        batch = make_batch(step)
        keys = et.example_keys(first_state(("update",)).key, step, jnp.arange(8))
        scales = np.asarray(et.dropout(jnp.ones((8, 4)), RATE, key=keys), np.float64)
        kept = batch["x"] * scales
        share = batch["weight"] / batch["weight"].sum()
        error = kept @ w - batch["y"]
        losses.append((share * error**2).sum())
        w = w - LEARNING_RATE * (share * 2 * error) @ kept
        average = DECAY * average + (1 - DECAY) * w
    return {"losses": np.array(losses), "w": w, "average": average}


def difference(actual: Any, expected: Any) -> float:
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))


def calls_of(chain: Chain) -> list[Any]:
    batches: list[Any] = [make_batch(0), make_batch(1)]
    if "repeat" in chain:
        return [jax.tree.map(lambda *leaves: np.stack(leaves), *batches)]
    return batches


def check_run(chain: Chain) -> None:
    program, ts = build(chain), jax.tree.map(jnp.copy, first_state(chain))
    losses: list[float] = []
    for batch in calls_of(chain):
        ts, metrics = program(ts, batch)
        fetched = et.fetch(metrics)
        assert ("skipped" in fetched) == ("guard" in chain)
        losses += np.atleast_1d(fetched["loss"]).tolist()
    assert program.compilations == 1 and int(ts.step) == 2

    found = [difference(losses, by_hand()["losses"]), difference(ts.model["w"], by_hand()["w"])]
    if "ema" in chain:
        found.append(difference(ts.ema["w"], by_hand()["average"]))
    if "precision" in chain:
        # Further away than float32 could be, so that `precision` was not passed over.
        assert 100 * EXACT < max(found) < NARROW, chain
    else:
        assert max(found) < EXACT, chain


def test_number_of_right_orders():
    assert (len(LOSSES), len(ENDINGS), len(COMPILED)) == (25, 32, 16)
    # A program compiles the very step that it was given, so that running programs runs all steps.
    for chain in LOSSES:
        for ending in COMPILED:
            step = build((*chain, *ending[:-1]))
            assert et.donate(step).step is step


@pytest.mark.parametrize("chain", LOSSES, ids=lambda chain: "-".join(chain) or "loss")
def test_every_right_order_before_update_trains_alike(chain: Chain):
    check_run((*chain, *WHOLE))


def of_all_four(chain: Chain) -> bool:
    return chain == ("precision", "remat", "accumulate", "shard")


@pytest.mark.parametrize(
    "chain",
    [pytest.param(chain, marks=[] if of_all_four(chain) else pytest.mark.grid) for chain in LOSSES],
    ids=lambda chain: "-".join(chain) or "loss",
)
def test_every_right_order_trains_alike(chain: Chain):
    """All 25 x 16 programs; those that lower to the same text are run once."""
    texts: dict[str, Chain] = {}
    for ending in COMPILED:
        whole = (*chain, *ending)
        text = build(whole).lower(first_state(whole), calls_of(whole)[0]).as_text()
        if text in texts:
            assert set(texts[text]) == set(whole)
        else:
            texts[text] = whole
            check_run(whole)
    # One for each subset of `ema`, `guard` and `repeat`.
    assert len(texts) == 8


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(("remat", "remat"), marks=pytest.mark.grid),
        pytest.param(("remat", "remat", "precision"), marks=pytest.mark.grid),
        ("remat", "precision", "remat"),
        pytest.param(("precision", "remat", "remat"), marks=pytest.mark.grid),
        pytest.param(("accumulate", "accumulate"), marks=pytest.mark.grid),
        pytest.param(("accumulate", "accumulate", "shard"), marks=pytest.mark.grid),
        ("accumulate", "shard", "accumulate"),
        pytest.param(("shard", "accumulate", "accumulate"), marks=pytest.mark.grid),
    ],
    ids="-".join,
)
def test_a_transform_that_may_occur_twice_changes_nothing(chain: Chain):
    check_run((*chain, "update", "donate"))


@pytest.mark.parametrize(
    "chain",
    [pytest.param(chain, marks=[] if chain in CORNERS else pytest.mark.grid) for chain in LOSSES],
    ids=lambda chain: "-".join(chain) or "loss",
)
def test_every_right_order_evaluates_alike(chain: Chain):
    trained = ("shard", "update") if "shard" in chain else ("update",)
    metrics = build((*chain, "evaluate"))(first_state(trained), make_batch(0))
    found = difference(et.fetch(metrics)["loss"], by_hand()["losses"][0])
    assert found < (NARROW if "precision" in chain else EXACT)
    assert "precision" not in chain or found > 10 * EXACT
