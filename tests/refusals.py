"""What the tests of errors share: a small model, and a look at all three parts of a message.

The parts are the rule, what was got instead, and what to write.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqtrain as et


@contextlib.contextmanager
def refused(kind: type[Exception], rule: str, got: str, advice: str) -> Iterator[None]:
    """Expects an error of exactly this type, whose message has the parts in this order."""
    # As users run it: the checks of annotations would speak first, and to nobody but us.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(kind) as caught:
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert type(caught.value) is kind, repr(caught.value)
    message, place = str(caught.value), 0
    for part in (rule, "Got ", got, advice):
        found = message.find(part, place)
        assert found >= 0, f"{part!r} is not in {message[place:]!r}, the rest of {message!r}"
        place = found + len(part)


BATCH = {"x": np.ones((8, 4), np.float32), "y": np.ones(8, np.float32)}


def make(key: Any) -> Any:
    return {"w": jax.random.normal(key, (4,)), "b": jnp.zeros(())}


def squares(model: Any, batch: Any) -> Any:
    return (batch["x"] @ model["w"] + model["b"] - batch["y"]) ** 2


def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
    return et.mean(squares(model, batch)), state, {}


def returning(*out: Any) -> Any:
    """A loss that returns something else than a loss should; functions are called with its own."""

    def wrong(model: Any, state: Any, batch: Any, key: Any) -> Any:
        values = squares(model, batch)
        made = [part(values, state) if callable(part) else part for part in out]
        return tuple(made) if len(made) > 1 else made[0]

    return wrong


def call(wrong: Any, batch: Any, *chain: Any, make: Any = make, state: Any = None) -> None:
    """Takes a donated step that must fail as it is traced, and shows that nothing was lost."""
    program = et.pipe(wrong, *chain, et.update(optax.sgd(0.1)), et.donate)
    made = make if state is None else lambda key: (make(key), state)
    ts = program.init(made, key=jax.random.key(0))
    before = [np.array(leaf) for leaf in jax.tree.leaves((ts.model, ts.opt_state))]
    try:
        program(ts, batch)
    finally:
        assert ts.used is None
        after = [np.array(leaf) for leaf in jax.tree.leaves((ts.model, ts.opt_state))]
        for a, b in zip(before, after, strict=True):
            assert a.tobytes() == b.tobytes()


_BY_DATA = P("data")


def shard(placement: Any = None, batch: Any = _BY_DATA, **axes: Any) -> Any:
    return et.shard(et.mesh(**(axes or {"data": 4})), batch=batch, model=placement)
