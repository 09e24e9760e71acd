"""What is seen while a microbatch runs, beside what it computes: arrays that nothing is summed of.

Errors are data. Whatever looks on at the innermost function, a user's checks or a replay that looks
for the first NaN, gives arrays for every microbatch on every device, and what each of them stands
for. They travel with the contribution; the host reads them once something went wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from .._jaxpr.frames import Frame
from .._sharding.ordered import AbstractStacked
from .checks import CheckSite


class AbstractFlags(ABC):
    """What a watch saw of each primitive: a pytree of leading dims `(devices, microbatches)`."""

    @abstractmethod
    def set_off(self, classes: Iterable[str]) -> Bool[Array, ""]:
        """Whether one of the classes of checks failed anywhere, on the devices."""

    @property
    @abstractmethod
    def lanes(self) -> tuple[int, int]:
        """The numbers of devices and of microbatches."""

    @abstractmethod
    def met_in(self, lane: tuple[int, int]) -> Iterator[tuple[tuple[Frame, ...], str]]:
        """What failed on one device in one microbatch, in program order: where, and a message."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["checks", "flags"], meta_fields=["sites", "rows"]
)
@dataclasses.dataclass(frozen=True)
class Findings(AbstractStacked):
    """Arrays of leading dims `(devices, microbatches)`, and what they stand for.

    **Fields:**

    - `checks`: for each site what its check was given.
    - `sites`: the checks of the loss, in order.
    - `flags`: what a watch saw.
    - `rows`: how many rows a microbatch has on one device.

    As a pytree it may hold anything else in the places of its arrays.
    """

    checks: tuple[tuple[Any, ...], ...]
    sites: tuple[CheckSite, ...]
    flags: PyTree
    rows: int

    def failed(self) -> Bool[Array, ""]:
        """Whether any check failed anywhere."""
        each = [
            jnp.any(site.failed(given)) for site, given in zip(self.sites, self.checks, strict=True)
        ]
        return jnp.stack([jnp.zeros((), bool), *each]).any()

    def join(self) -> Findings:
        """Findings stacked over microbatches, each of which may be of several, as those of all."""
        cut = "outer devices inner ... -> devices (outer inner) ..."
        return jax.tree.map(lambda x: einops.rearrange(x, cut), self)


# Looks on while `function(inputs)` runs, where `inputs` has entries `model`, `state`, `batch` and
# `key`. Gives what the function gives, and its flags.
Watch = Callable[[Callable[[dict[str, PyTree]], PyTree], dict[str, PyTree]], tuple[PyTree, PyTree]]


def of_one_microbatch(
    checks: tuple[tuple[Array, ...], ...], sites: tuple[CheckSite, ...], flags: PyTree, rows: int
) -> Findings | None:
    """The findings of the innermost function; None where nothing was looked at."""
    if not sites and flags is None:
        return None
    checks, flags = jax.tree.map(lambda x: x[None, None], (checks, flags))
    return Findings(checks, sites, flags, rows)
