"""What a watched program returns beside its result: one byte for each value, as a pytree.

Fields are not annotated as arrays, since pytrees are also rebuilt with leaves of other kinds.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from .plan import Plan, Site


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
class Flags:
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
