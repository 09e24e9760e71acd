"""Finds, on the host, which operation is to blame for what is wrong with a result.

The flags say of each value whether it holds a NaN or an infinity. From the results that do, the
way leads back: a NaN came from an operand that held one, or was made on the spot, and then any
infinity that went in is followed too, since an overflow shows as a NaN only once it is subtracted
or multiplied by zero. What no bad result comes from, such as the infinities of a mask that the
softmax turned into zeros, is never looked at.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from .origins import Origin, Origins
from .plan import Site
from .record import Flags, Record


@dataclasses.dataclass(frozen=True)
class Fault:
    """What went wrong first, and where.

    **Fields:**

    - `kind`: `"nan"`, `"inf"`, `"index"` or `"division"`.
    - `site`: the operation.
    - `iterations`: the step of each loop around it, counted as the loop's operands are, the
      outermost loop first.
    - `direction`: `"backward"` where only gradients came out bad because of it, else `"forward"`.
    - `lane`: the index of the leading dims of the flags where it happened, the first of `lanes`.
    - `lanes`: all of those where just this is to blame, of the same time.
    """

    kind: str
    site: Site
    iterations: tuple[int, ...]
    direction: str
    lane: tuple[int, ...]
    lanes: tuple[tuple[int, ...], ...]

    def name_of(self, name: tuple[str | int, ...] | None) -> str | None:
        """The name of an operand, with the steps of the loops filled in."""
        if name is None:
            return None
        parts = (part if isinstance(part, str) else str(self.iterations[part]) for part in name)
        return "".join(parts)


def first_fault(flags: Flags, *, time_dims: tuple[int, ...] = ()) -> Fault | None:
    """The operation to blame, or None if nothing went wrong.

    **Arguments:** as `all_faults`.
    """
    return next(iter(all_faults(flags, time_dims=time_dims)), None)


def all_faults(flags: Flags, *, time_dims: tuple[int, ...] = ()) -> list[Fault]:
    """Every operation that bad results come from, the one to blame first.

    Made NaNs and infinities come first, in program order, then those that were passed in or are
    written in the program, then bad indices, then divisions of integers by zero.

    **Arguments:**

    - `flags`: what a watched function returned, on the host or not.
    - `time_dims`: which leading dims of the flags are one after another, such as microbatches. Only
      the first index at which something went wrong is looked at. The others are simultaneous, such
      as devices: what went wrong first in the program's order is the cause of what followed
      elsewhere through a collective.
    """
    record = jax.tree.map(np.asarray, flags.record)
    lead = record.words.shape[:-1]
    lanes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for lane in np.ndindex(lead):
        lanes.setdefault(tuple(lane[dim] for dim in time_dims), []).append(lane)
    for time in sorted(lanes):
        found: dict[Any, list[Any]] = {}
        seen: dict[bytes, list[Origin]] = {}
        for lane in lanes[time]:
            for origin in _origins(flags, record, lane, seen):
                found.setdefault(origin, []).append(lane)
        if found:
            ranked = sorted(found, key=lambda origin: origin.rank)
            return [_fault(origin, found[origin]) for origin in ranked]
    return []


def _origins(
    flags: Flags, record: Record, lane: tuple[int, ...], seen: dict[bytes, list[Origin]]
) -> list[Origin]:
    here = jax.tree.map(lambda leaf: leaf[lane], record)
    words = b"".join(leaf.tobytes() for leaf in jax.tree.leaves(here))
    if words not in seen:  # devices mostly agree
        seen[words] = Origins(flags.plan.scope, here).all()
    return seen[words]


def _fault(origin: Origin, lanes: list[tuple[int, ...]]) -> Fault:
    direction = "backward" if origin.backward else "forward"
    return Fault(origin.kind, origin.site, origin.iterations, direction, lanes[0], tuple(lanes))
