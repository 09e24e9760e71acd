"""Every order of transforms is either refused, with a line that works, or gives the same result.

Which orders are right is said by the table below and not by the code. `pipe` stops at the first
transform that does not fit, so all chains are met by walking through those that do fit and trying
every transform that is left after each.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from tests.helpers import (
    LEARNING_RATE,
    Training,
    loss,
    make_batches,
    make_params,
    train_by_hand,
)

# What each transform takes, and what it gives; None is the level that it took.
LEVELS: dict[str, tuple[tuple[str, ...], str]] = {
    "precision": (("Loss",), "Loss"),
    "remat": (("Loss",), "Loss"),
    "accumulate": (("Loss", "Contribute"), "Contribute"),
    "shard": (("Loss", "Contribute"), "Contribute"),
    "update": (("Loss", "Contribute"), "Step"),
    "ema": (("Step",), "Step"),
    "guard": (("Step",), "Step"),
    "repeat": (("Step",), "Step"),
    "donate": (("Step",), "Program"),
    "jit": (("Step",), "Program"),
    "evaluate": (("Loss", "Contribute"), "Evaluation"),
}
# These may stand in a chain twice.
REPEATABLE = ("accumulate", "remat")
DECAY = 0.5

# The transforms as they are written, and as error messages write them.
WRITTEN: dict[str, tuple[str, Any]] = {
    "precision": ('et.precision("bfloat16")', et.precision("bfloat16")),
    "remat": ("et.remat", et.remat),
    "accumulate": ("et.accumulate(2)", et.accumulate(2)),
    "shard": ("et.shard(mesh, ...)", et.shard(et.mesh(data=2), batch=P("data"))),
    "update": ("et.update(optimizer)", et.update(optax.sgd(LEARNING_RATE))),
    "ema": (f"et.ema({DECAY})", et.ema(DECAY)),
    "guard": ('et.guard(nonfinite="skip")', et.guard(nonfinite="skip")),
    "repeat": ("et.repeat(2)", et.repeat(2)),
    "donate": ("et.donate", et.donate),
    "jit": ("et.jit", et.jit),
    "evaluate": ("et.evaluate", et.evaluate),
}
NAMES = {source: name for name, (source, _) in WRITTEN.items()}
# `jit` differs from `donate`, and `evaluate` from both, in how a chain ends and not in what it does.
NINE = tuple(name for name in WRITTEN if name not in ("jit", "evaluate"))

Chain = tuple[str, ...]


def level_of(chain: Chain) -> str | None:
    """The level that a chain gives by the table, or None if it is not right."""
    level = "Loss"
    for index, name in enumerate(chain):
        takes, gives = LEVELS[name]
        if level not in takes or (name in chain[:index] and name not in REPEATABLE):
            return None
        level = gives
    return level


def right_chains(names: tuple[str, ...]) -> Iterator[Chain]:
    """Every order of every subset of `names` that the table allows."""

    def extend(chain: Chain) -> Iterator[Chain]:
        yield chain
        for name in names:
            if name not in chain and level_of((*chain, name)) is not None:
                yield from extend((*chain, name))

    return extend(())


@functools.cache
def build(chain: Chain) -> Any:
    return et.pipe(loss, *(WRITTEN[name][1] for name in chain))


def suggested(message: str) -> Chain:
    """The last pipeline in a message: the line to write instead."""
    sources = re.findall(r"`et\.pipe\(loss(?:, )?(.*?)\)`", message)[-1]
    return tuple(NAMES[source] for source in re.split(r", (?=et\.)", sources) if source)


def test_all_chains_are_built_or_refused_as_the_table_says():
    """Counted: all 986,410 orders of all subsets of nine transforms are right, or start wrongly."""
    met = 0
    for chain in right_chains(NINE):
        met += 1
        built = build(chain)
        assert (type(built).__name__ if chain else "Loss") == level_of(chain), chain
        left = [name for name in NINE if name not in chain]
        for name in left:
            if level_of((*chain, name)) is None:
                with pytest.raises(et.OrderError):
                    WRITTEN[name][1](built)
                rest = len(left) - 1
                met += sum(math.perm(rest, taken) for taken in range(rest + 1))
    assert met == sum(math.perm(9, taken) for taken in range(10)) == 986_410


def test_errors_name_both_levels_and_a_line_that_works():
    for chain in right_chains(tuple(WRITTEN)):
        built = build(chain)
        for name in WRITTEN:
            if name in chain or level_of((*chain, name)) is not None:
                continue
            with pytest.raises(et.OrderError) as caught:
                WRITTEN[name][1](built)
            check_message(str(caught.value), chain, name)


def check_message(message: str, chain: Chain, name: str) -> None:
    source, level = WRITTEN[name][0], level_of(chain)
    assert f"`{source}` takes a" in message, message
    for taken in LEVELS[name][0]:
        assert taken in message.split(" Got ")[0], message
    assert re.search(rf"Got an? {level}\b", message), message
    for link in chain:
        assert WRITTEN[link][0] in message.split(" Got ")[1], message

    removed = re.search(r"[Rr]emove `(.*?)`|without `(.*?)`", message)
    if removed:
        # The end of a chain is taken off it, where what was given is one already.
        assert level in ("Program", "Evaluation") or name == "evaluate", message
        gone = NAMES[removed.group(1) or removed.group(2)]
        assert gone in chain, message
        if "without" in message:
            return
        kept = {*chain, name} - {gone}
    else:
        kept = {*chain, name}
    line = suggested(message)
    assert kept <= set(line) <= kept | {"update"}, message
    assert level_of(line) is not None, message
    build(line)


def test_a_transform_that_may_not_occur_twice_is_refused():
    for chain in right_chains(NINE):
        built = build(chain)
        for name in chain:
            if level_of((*chain, name)) is None:
                with pytest.raises(et.OrderError, match=re.escape(WRITTEN[name][0])):
                    WRITTEN[name][1](built)
            else:
                assert name in REPEATABLE
                WRITTEN[name][1](built)


# Orders that run. Two steps each: nothing but the order differs from chain to chain.

# Float32 against float64, and bfloat16 with its 8 bits against float64.
EXACT, NARROW = 3e-6, 3e-2


PREFIXES = [chain for chain in right_chains(NINE) if level_of(chain) in ("Loss", "Contribute")]
ENDINGS = [chain[1:] for chain in right_chains(NINE) if chain[0:1] == ("update",)]
COMPILED = [ending for ending in ENDINGS if "donate" in ending]


@functools.cache
def by_hand() -> Training:
    return train_by_hand(make_batches(2))


@functools.cache
def average_by_hand() -> Any:
    """The average of the parameters after the two steps, which starts as they do."""
    average = params = make_params()
    for grads in by_hand().grads:
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
        average = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, average, params)
    return average


def first_state(chain: Chain) -> et.TrainState:
    """What `init` gives; the order plays no part in it, as a test below makes sure."""
    state_makers = ("precision", "shard", "update", "ema", "guard")
    return first_state_of(tuple(name for name in state_makers if name in chain))


@functools.cache
def first_state_of(chain: Chain) -> et.TrainState:
    return build(chain).init(lambda key: make_params(), key=jax.random.key(0))


@pytest.mark.parametrize("ending", COMPILED, ids="-".join)
def test_the_first_state_depends_on_no_order(ending: Chain):
    ts = build(("update", *ending)).init(lambda key: make_params(), key=jax.random.key(0))
    expected = first_state(("update", *ending))
    assert ts.structure.names == expected.structure.names
    assert all(map(np.array_equal, ts.leaves[1:], expected.leaves[1:]))


def run(chain: Chain) -> tuple[list[float], Any, Any]:
    """Two steps: losses, parameters, and the average or None."""
    program, ts = build(chain), jax.tree.map(jnp.copy, first_state(chain))
    calls: list[Any] = make_batches(2)
    if "repeat" in chain:
        calls = [jax.tree.map(lambda *leaves: np.stack(leaves), *calls)]
    losses: list[float] = []
    for batch in calls:
        ts, metrics = program(ts, batch)
        fetched = et.fetch(metrics)
        assert ("skipped" in fetched) == ("guard" in chain)
        losses += np.atleast_1d(fetched["loss"]).tolist()
    return losses, ts.model, ts.ema if "ema" in chain else None


def difference(actual: Any, expected: Any) -> float:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(a - e)) / np.max(np.abs(e))) for a, e in pairs)


def check_run(chain: Chain) -> None:
    losses, params, average = run(chain)
    expected = by_hand()
    found = difference(
        (losses, params), ([step["loss"] for step in expected.metrics], expected.params)
    )
    if average is not None:
        found = max(found, difference(average, average_by_hand()))
    if "precision" in chain:
        assert 100 * EXACT < found < NARROW, chain
    else:
        assert found < EXACT, chain


def test_number_of_right_orders():
    assert (len(PREFIXES), len(COMPILED), len(ENDINGS)) == (25, 16, 32)
    # A program compiles the very step that it was given, so that running programs runs all steps.
    for prefix in PREFIXES:
        for ending in COMPILED:
            step = build((*prefix, "update", *ending[:-1]))
            assert et.donate(step).step is step


@pytest.mark.parametrize("prefix", PREFIXES, ids="-".join)
def test_every_right_order_trains_alike(prefix: Chain):
    """All 25 x 16 programs; those that lower to the same text are run once."""
    texts: dict[str, Chain] = {}
    for ending in COMPILED:
        chain = (*prefix, "update", *ending)
        batch: Any = make_batches(2)[0]
        if "repeat" in chain:
            batch = jax.tree.map(lambda leaf: np.stack([leaf] * 2), batch)
        text = build(chain).lower(first_state(chain), batch).as_text()
        if text in texts:
            assert set(texts[text]) == set(chain)
        else:
            texts[text] = chain
            check_run(chain)
    # A program a subset of the three: that more orders than that were told apart would be waste.
    assert len(texts) == 8


@pytest.mark.parametrize(
    "prefix",
    [
        ("remat", "remat"),
        ("remat", "remat", "precision"),
        ("remat", "precision", "remat"),
        ("precision", "remat", "remat"),
        ("accumulate", "accumulate"),
        ("accumulate", "accumulate", "shard"),
        ("accumulate", "shard", "accumulate"),
        ("shard", "accumulate", "accumulate"),
    ],
    ids="-".join,
)
def test_a_transform_that_may_occur_twice_changes_nothing(prefix: Chain):
    check_run((*prefix, "update", "donate"))


@pytest.mark.parametrize("prefix", PREFIXES, ids="-".join)
def test_every_right_order_evaluates_alike(prefix: Chain):
    trained = [name for name in prefix if name == "shard"]
    metrics = build((*prefix, "evaluate"))(first_state((*trained, "update")), make_batches(2)[0])
    found = difference(et.fetch(metrics)["loss"], by_hand().metrics[0]["loss"])
    assert found < (NARROW if "precision" in prefix else EXACT)
