"""What a watched program returns beside its result: one byte for each value, as a pytree.

Fields are not annotated as arrays, since pytrees are also rebuilt with leaves of other kinds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from .._guard.findings import AbstractFlags
from .._jaxpr.frames import Frame
from .plan import Plan, Scope, Site
from .words import INDEX, NEW_NAN, ZERO_DIVISOR

# The classes of checks that a guard can make of every primitive: the word that is looked for, and
# what it says of the primitive at which it is found.
CLASSES = {
    "float": (NEW_NAN, "a NaN was made by `{}`"),
    "index": (INDEX, "an index of `{}` was out of bounds"),
    "division": (ZERO_DIVISOR, "a divisor of `{}` was zero"),
}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["words", "inner", "probe"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Record:
    """The words of a scope, by slot; what was recorded inside its nodes, by place; and the
    statistics of the probed site, if it stands here. A scan's has a leading dim for its steps."""

    words: Any
    inner: dict[int, Any]
    probe: Any = None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["taken", "records"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Branches:
    """Which branch of a `cond` ran, and the record of each: zeros of those that did not."""

    taken: Any
    records: tuple[Record, ...]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["iterations", "record"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Snapshots:
    """A `while` loop has any number of turns, so a few are kept: the first that returned a NaN,
    the first that returned an infinity, and the first with a bad index or divisor. -1 is none."""

    iterations: Any
    record: Record


@functools.partial(jax.tree_util.register_dataclass, data_fields=["record"], meta_fields=["plan"])
@dataclasses.dataclass(frozen=True)
class Flags(AbstractFlags):
    """What went wrong where, as arrays that vary over every manual mesh axis.

    A pytree: `lax.scan` stacks it over microbatches, and `shard_map` over devices, each as one
    more leading dim of every array. What the numbers mean is static, and travels along.
    """

    record: Record
    plan: Plan

    @functools.cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every place that was watched, in program order."""
        return tuple(self.plan.scope.sites())

    def set_off(self, classes: Iterable[str]) -> Bool[Array, ""]:
        words = [leaf for leaf in jax.tree.leaves(self.record) if leaf.dtype == jnp.uint8]
        met = [jnp.any(word == CLASSES[name][0]) for word in words for name in classes]
        return jnp.stack([jnp.zeros((), bool), *met]).any()

    @property
    def lanes(self) -> tuple[int, int]:
        devices, num_microbatches = self.record.words.shape[:2]
        return devices, num_microbatches

    def met_in(self, lane: tuple[int, int]) -> Iterator[tuple[tuple[Frame, ...], str]]:
        record = jax.tree.map(lambda leaf: np.asarray(leaf)[lane], self.record)
        for site, word in _words(self.plan.scope, record):
            for looked_for, text in CLASSES.values():
                if np.any(word == looked_for):
                    yield site.frames, text.format(site.primitive)


def _words(scope: Scope, record: Record) -> Iterator[tuple[Site, Any]]:
    """Each site with its words, in program order; those of a loop's body behind the loop itself."""
    for place, node in enumerate(scope.nodes):
        slots = [scope.slots[variable] for variable in node.outputs] + [node.check]
        inner = record.inner.get(place)
        if inner is None:
            for slot in slots:
                if slot is not None:
                    yield node.site, record.words[..., slot]
        elif isinstance(inner, Branches):
            for body, of_branch in zip(node.bodies, inner.records, strict=True):
                yield from _words(body, of_branch)
        else:
            of_body = inner.record if isinstance(inner, Snapshots) else inner
            yield from _words(node.bodies[-1], of_body)
