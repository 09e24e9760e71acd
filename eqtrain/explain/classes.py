"""The classes of checks that a watch makes in every step, beside those that stand in the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from .plan import Scope, Site
from .record import Branches, Flags, Record, Snapshots
from .words import INDEX, NEW_NAN, ZERO_DIVISOR

# The word that is looked for, and what it says of the primitive at which it is found.
CLASSES = {
    "float": (NEW_NAN, "a NaN was made by `{}`"),
    "index": (INDEX, "an index of `{}` was out of bounds"),
    "division": (ZERO_DIVISOR, "a divisor of `{}` was zero"),
}


def set_off(flags: Flags, classes: Iterable[str]) -> Bool[Array, ""]:
    """Whether one of the classes was met anywhere, on the devices."""
    words = [leaf for leaf in jax.tree.leaves(flags.record) if leaf.dtype == jnp.uint8]
    met = [jnp.any(word == CLASSES[name][0]) for word in words for name in classes]
    return jnp.stack([jnp.zeros((), bool), *met]).any()


def met_in(flags: Flags, lane: tuple[int, ...]) -> Iterator[tuple[Site, str]]:
    """The sites where a class was met on one device in one microbatch, and what to say of each.

    In program order, those of a loop's body behind the loop itself, whichever its turn.
    """
    record = jax.tree.map(lambda leaf: np.asarray(leaf)[lane], flags.record)
    for site, word in _words(flags.plan.scope, record):
        for looked_for, text in CLASSES.values():
            if np.any(word == looked_for):
                yield site, text.format(site.primitive)


def _words(scope: Scope, record: Record) -> Iterator[tuple[Site, Any]]:
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
