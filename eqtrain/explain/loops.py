"""Loops and branches, run as they are, with what was recorded inside them brought out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool

from .._jaxpr.jaxprs import scan_operands
from .plan import Name, Scope
from .record import Branches, Record, Snapshots
from .words import INDEX, INF, NAN, NEW_INF


class Inside(NamedTuple):
    """What a loop's or branch's equation is to know of the program around it.

    **Fields:** `run` runs a jaxpr as a scope of its own, given its place among several, the values
    and names of its operands; `spread` makes arrays vary over every manual axis; `depth` is the
    number of loops around.
    """

    run: Callable[[Any, int, list[Any], list[Name | None]], tuple[list[Any], Record, Scope]]
    spread: Callable[[Any], Any]
    depth: int


class Ran(NamedTuple):
    """What running it gave: results, records, the scopes inside, and further fields of its node."""

    outputs: list[Any]
    inner: Any
    bodies: tuple[Scope, ...]
    details: dict[str, Any]


def run_scan(eqn: Any, values: list[Any], names: list[Name | None], inside: Inside) -> Ran:
    """A scan, with the records of its steps stacked."""
    params = eqn.params
    constants, carried = scan_operands(params)
    first = constants + carried
    sliced = [name and (*name, "[", inside.depth, "]") for name in names[first:]]
    inner_names = [*names[:constants], *([None] * carried), *sliced]
    scopes: list[Scope] = []

    def step(carry: Any, xs: Any) -> Any:
        operands = [*values[:constants], *carry, *xs]
        outputs, record, scope = inside.run(params["jaxpr"], 0, operands, inner_names)
        scopes[:] = [scope]
        return tuple(outputs[:carried]), (outputs[carried:], record)

    carry, (stacked, record) = lax.scan(
        step,
        tuple(values[constants:first]),
        values[first:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    details = {
        "constants": constants,
        "carried": carried,
        "length": params["length"],
        "reverse": params["reverse"],
    }
    return Ran([*carry, *stacked], record, tuple(scopes), details)


def run_cond(eqn: Any, values: list[Any], names: list[Name | None], inside: Inside) -> Ran | None:
    """A `cond` or `switch`: every branch returns the records of all, zeros for the others."""
    if "branches_platforms" in eqn.params:  # chosen while compiling, so there is nothing to record
        return None
    index, *operands = values
    branches = eqn.params["branches"]
    scopes: list[Any] = [None] * len(branches)

    def run(branch: int, *operands: Any) -> tuple[list[Any], Record]:
        outputs, record, scopes[branch] = inside.run(
            branches[branch], branch, list(operands), names[1:]
        )
        return outputs, record

    shapes = [
        jax.eval_shape(lambda *operands, branch=branch: run(branch, *operands)[1], *operands)
        for branch in range(len(branches))
    ]

    def run_among(branch: int, *operands: Any) -> tuple[list[Any], tuple[Record, ...]]:
        outputs, record = run(branch, *operands)
        records = [
            record if place == branch else _zeros(shape, inside)
            for place, shape in enumerate(shapes)
        ]
        return outputs, tuple(records)

    calls = [functools.partial(run_among, branch) for branch in range(len(branches))]
    outputs, records = lax.switch(index, calls, *operands)
    taken = jnp.asarray(index).astype(jnp.int32)
    return Ran(outputs, Branches(inside.spread(taken), records), tuple(scopes), {})


def run_while(eqn: Any, values: list[Any], names: list[Name | None], inside: Inside) -> Ran | None:
    """A `while` loop, with the records of the first turns that something went wrong in."""
    params = eqn.params
    tests, constants = params["cond_nconsts"], params["body_nconsts"]
    if params["cond_jaxpr"].out_avals[0].shape:  # of a `vmap`: some rows are done before others
        return None
    first = tests + constants
    inner_names = [*names[tests:first], *([None] * (len(values) - first))]
    scopes: list[Scope] = []

    def run(*carry: Any) -> tuple[list[Any], Record]:
        operands = [*values[tests:first], *carry]
        outputs, record, scope = inside.run(params["body_jaxpr"], 0, operands, inner_names)
        scopes[:] = [scope]
        return outputs, record

    def goes_on(state: Any) -> Any:
        condition = jaxpr_as_fun(params["cond_jaxpr"])
        return condition(*values[:tests], *state[0])[0]

    def turn(state: Any) -> Any:
        carry, number, iterations, records = state
        outputs, record = run(*carry)
        taken, kept = [], []
        for event, iteration, before in zip(
            _events(record, scopes[0]), iterations, records, strict=True
        ):
            now = event & (iteration < 0)
            taken.append(jnp.where(now, number, iteration))
            kept.append(jax.tree.map(functools.partial(jnp.where, now), record, before))
        return tuple(outputs), number + 1, taken, kept

    carry = tuple(values[first:])
    empty = _zeros(jax.eval_shape(lambda *carry: run(*carry)[1], *carry), inside)
    never = inside.spread(jnp.asarray(-1, jnp.int32))
    zero = inside.spread(jnp.asarray(0, jnp.int32))
    state = (carry, zero, [never] * 3, [empty] * 3)
    carry, _, iterations, records = lax.while_loop(goes_on, turn, state)
    snapshots = Snapshots(
        jnp.stack(iterations), jax.tree.map(lambda *leaves: jnp.stack(leaves), *records)
    )
    details = {"constants": constants, "carried": len(carry)}
    return Ran(list(carry), snapshots, tuple(scopes), details)


def _events(record: Record, scope: Scope) -> list[Bool[Array, ""]]:
    """Whether a turn returned a NaN, an infinity, or used a bad index or divisor."""
    slots = [scope.slots[variable] for variable in scope.outputs if variable is not None]
    words = record.words[np.array([slot for slot in slots if slot is not None], np.int32)]
    infinite = (words == INF) | (words == NEW_INF)
    everything = [leaf for leaf in jax.tree.leaves(record) if leaf.dtype == jnp.uint8]
    checked = [jnp.any(words >= INDEX) for words in everything]
    return [jnp.any(words >= NAN), jnp.any(infinite), jnp.any(jnp.stack(checked))]


def _zeros(shapes: Any, inside: Inside) -> Any:
    return inside.spread(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
