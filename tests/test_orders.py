"""A wrong order of transforms is refused when it is written, with a line that works.

`pipe` stops at the first transform that does not fit, so all chains are met by walking through
those that do fit and trying every transform that is left after each.
"""

from __future__ import annotations

import math
import re

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et
from tests.orders import (
    LEVELS,
    NINE,
    REPEATABLE,
    WRITTEN,
    Chain,
    build,
    level_of,
    loss,
    right_chains,
)

NAMES = {source: name for name, (source, _) in WRITTEN.items()}


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
        assert (built.name if chain else "Loss") == level_of(chain), chain
        left = [name for name in NINE if name not in chain]
        for name in left:
            if level_of((*chain, name)) is None:
                with pytest.raises(et.OrderError):
                    WRITTEN[name][1](built)
                rest = len(left) - 1
                met += sum(math.perm(rest, taken) for taken in range(rest + 1))
    assert met == sum(math.perm(9, taken) for taken in range(10)) == 986_410


def test_pipe_applies_transforms_from_the_loss_outward():
    chain = ("precision", "accumulate", "update", "guard", "donate")
    built = et.pipe(loss, *(WRITTEN[name][1] for name in chain))
    assert [level.source for level in built.chain] == [WRITTEN[name][0] for name in chain]
    with pytest.raises(et.OrderError):
        et.pipe(loss, et.donate, et.accumulate(2), et.remat)


@pytest.mark.parametrize("name", WRITTEN)
def test_errors_name_both_levels_and_a_line_that_works(name: str):
    for chain in right_chains(tuple(WRITTEN)):
        if name in chain or level_of((*chain, name)) is not None:
            continue
        with pytest.raises(et.OrderError) as caught:
            WRITTEN[name][1](build(chain))
        check_message(str(caught.value), chain, name)


def check_message(message: str, chain: Chain, name: str) -> None:
    source, level = WRITTEN[name][0], level_of(chain)
    rule, _, got = message.partition(" Got ")
    assert f"`{source}` takes a" in rule, message
    assert all(taken in rule for taken in LEVELS[name][0]), message
    # A bare function, which nothing was applied to, may go by either name.
    assert re.match(rf"an? {level}\b" + ("|(a )?function" if not chain else ""), got), message
    assert all(WRITTEN[link][0] in got for link in chain), message

    removed = re.search(r"[Rr]emove `(.*?)`|without `(.*?)`", message)
    kept = {*chain, name}
    if name == "evaluate":
        # What trains is left behind.
        kept = {link for link in kept if LEVELS[link][1] not in ("Step", "Program")}
    if removed:
        # Where what was given is the end of a chain, or what is applied would be another end.
        assert level in ("Program", "Evaluation") or name == "evaluate", message
        gone = NAMES[removed.group(1) or removed.group(2)]
        assert gone in chain, message
        if removed.group(2):
            return  # start again from the loss: another chain, with no line of its own
        kept -= {gone}
    line = suggested(message)
    assert kept <= set(line) <= kept | {"update"}, message
    assert level_of(line) is not None, message
    build(line)


@pytest.mark.parametrize("name", NINE)
def test_a_transform_that_may_not_occur_twice_is_refused(name: str):
    for chain in right_chains(NINE):
        if name not in chain:
            continue
        if level_of((*chain, name)) is None:
            with pytest.raises(et.OrderError, match=re.escape(WRITTEN[name][0])):
                WRITTEN[name][1](build(chain))
        else:
            assert name in REPEATABLE
            WRITTEN[name][1](build(chain))


def train_step(model, state, batch, key):
    return et.mean(batch["x"] * model), state, {}


MESH = et.mesh(data=4, model=2)
HEADS = et.rules({"query": P(None, "model")}, otherwise=et.fsdp("data", lazy="blocks"))
# What was written, and what was not but is so by default.
PIPELINES = {
    "et.pipe(train_step, et.precision('float16'), et.accumulate(8), "
    "et.shard(et.mesh(data=4, model=2), batch=P(('data', 'model')), model=et.fsdp('data', "
    "min_size=1)), et.update(optimizer), et.guard(nonfinite='raise', max_consecutive=3), "
    "et.donate(max_compilations=1))": [
        et.precision("float16"),
        et.accumulate(8),
        et.shard(MESH, batch=P(("data", "model")), model=et.fsdp("data", min_size=1)),
        et.update(optax.adamw(1e-3)),
        et.guard(nonfinite="raise", max_consecutive=3),
        et.donate(max_compilations=1),
    ],
    "et.pipe(train_step, et.remat(policy=jax.checkpoint_policies.dots_saveable), "
    "et.accumulate(2, order='tree'), et.shard(et.mesh(data=4, model=2), "
    "batch={'x': P('data'), 'y': P('data')}, "
    "model=et.rules({'query': P(None, 'model')}, otherwise=et.fsdp('data', lazy='blocks')), "
    "order='tree'), et.update(optimizer, shard_state='data'), et.ema(0.99), "
    "et.guard(spike=et.Spike()), et.repeat(5), et.jit)": [
        et.remat(policy=jax.checkpoint_policies.dots_saveable),
        et.accumulate(2, order="tree"),
        et.shard(MESH, batch={"x": P("data"), "y": P("data")}, model=HEADS, order="tree"),
        et.update(optax.sgd(0.1), shard_state="data"),
        et.ema(0.99),
        et.guard(spike=et.Spike()),
        et.repeat(5),
        et.jit,
    ],
    "et.pipe(train_step, et.precision('float16', loss_scaling=et.LossScaling(initial=8.0)), "
    "et.evaluate)": [
        et.precision("float16", loss_scaling=et.LossScaling(initial=8.0)),
        et.evaluate,
    ],
    "et.pipe(train_step, et.update(optimizer, trainable=et.matching('head')), "
    "et.guard(checks=('float', 'index'), bundles='runs/bad'))": [
        et.update(optax.sgd(0.1), trainable=et.matching("head")),
        et.guard(checks=["float", "index"], bundles="runs/bad"),
    ],
}


@pytest.mark.parametrize("text", PIPELINES)
def test_repr_is_the_pipeline_with_its_arguments(text: str):
    assert repr(et.pipe(train_step, *PIPELINES[text])) == text


def test_levels_are_equal_only_to_themselves():
    first, second = (et.accumulate(2)(train_step) for _ in range(2))
    assert first == first and first != second and len({first, second}) == 2
