"""What is seen while a microbatch runs, beside what it computes: arrays that nothing is summed of.

Errors are data. Whatever looks on at the innermost function, a user's checks or a replay that looks
for the first NaN, gives arrays for every microbatch on every device, and what each of them stands
for. They travel with the contribution; the host reads them once something went wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from .varying import vary


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["sites", "rows"]
)
@dataclasses.dataclass(frozen=True)
class Findings:
    """Arrays of leading dims `(devices, microbatches)`, and what they stand for.

    **Fields:**

    - `arrays`: for each site a tuple of arrays.
    - `sites`: what stands at each site, hashable.
    - `rows`: how many rows a microbatch has on one device.
    """

    arrays: tuple[tuple[Array, ...], ...]
    sites: tuple[Any, ...]
    rows: int

    def failed(self) -> Bool[Array, ""]:
        """Whether anything failed anywhere."""
        each = [
            jnp.any(site.failed(arrays))
            for site, arrays in zip(self.sites, self.arrays, strict=True)
        ]
        return jnp.stack(each).any()


# Looks on while `function(inputs)` runs, where `inputs` has entries `model`, `state`, `batch` and
# `key`. Gives what the function gives, and the arrays and sites of one microbatch.
Watch = Callable[
    [Callable[[dict[str, PyTree]], PyTree], dict[str, PyTree]],
    tuple[PyTree, tuple[tuple[tuple[Array, ...], ...], tuple[Any, ...]]],
]


def is_findings(node: Any) -> bool:
    return isinstance(node, Findings)


def of_one_microbatch(
    arrays: tuple[tuple[Array, ...], ...], sites: tuple[Any, ...], rows: int
) -> Findings | None:
    """The findings of the innermost function; None where nothing was looked at."""
    if not sites:
        return None
    return Findings(jax.tree.map(lambda x: x[None, None], arrays), sites, rows)


def join_microbatches(findings: Findings | None) -> Findings | None:
    """Findings stacked by a scan over microbatches, each of which may be of several."""
    cut = "outer devices inner ... -> devices (outer inner) ..."
    return jax.tree.map(lambda x: einops.rearrange(x, cut), findings)


def of_every_device(findings: Findings | None, axes: tuple[str, ...]) -> Findings | None:
    """Findings inside `shard_map`, which differ from device to device."""
    return jax.tree.map(lambda x: vary(x, axes), findings)
