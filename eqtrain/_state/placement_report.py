"""Where each leaf of a TrainState lies, and what that costs a device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import PartitionSpec as P

from .._metrics import accumulator_dtype
from .._sharding.placement import Layout
from .._util.text import aligned
from .train_state import TrainState, kind


@dataclasses.dataclass(frozen=True)
class PlacedLeaf:
    """One leaf.

    **Fields:** `name`, its path in the TrainState; `shape` and `dtype`; `spec`; `shard_shape`, of a
    device's part; `bytes` of that.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    spec: P
    shard_shape: tuple[int, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class PlacementReport:
    """Where the leaves of a TrainState lie. Printed, it is a table with the totals a device.

    **Fields:** `leaves`; and in bytes a device: `parameters`, which are the model's leaves,
    trainable or not; `gradients`, as they are when the optimizer gets them; `optimizer_state`;
    `other`, which is the model's state, the key, and what transforms carry.
    """

    leaves: tuple[PlacedLeaf, ...]
    parameters: int
    gradients: int
    optimizer_state: int
    other: int

    def __str__(self) -> str:
        header = ("leaf", "shape", "spec", "shard", "bytes a device")
        rows = [
            (
                leaf.name,
                kind(leaf),
                f"P({', '.join(map(repr, leaf.spec))})",
                f"[{','.join(map(str, leaf.shard_shape))}]",
                f"{leaf.bytes:,}",
            )
            for leaf in self.leaves
        ]
        lines = aligned([header, *rows], right=(4,))
        totals = (
            f"a device holds {self.parameters:,} bytes of parameters, "
            f"{self.optimizer_state:,} of optimizer state, {self.other:,} of other state; "
            f"and {self.gradients:,} of gradients in a step"
        )
        return "\n".join([*lines, totals])


def placement_report(
    ts: TrainState, layout: Layout, state_layout: Layout, trainable: set[str]
) -> PlacementReport:
    """Reports where the leaves of `ts` lie; `trainable` are paths in the model."""
    leaves = tuple(
        PlacedLeaf(
            name,
            aval.shape,
            aval.dtype,
            aval.sharding.spec,
            aval.sharding.shard_shape(aval.shape),
            _bytes(aval.dtype, aval.sharding.shard_shape(aval.shape)),
        )
        for name, aval in zip(ts.structure.names, ts.structure.avals, strict=True)
    )
    model = {
        name.removeprefix("model").removeprefix("."): aval
        for name, aval in zip(ts.structure.names, ts.structure.avals, strict=True)
        if name == "model" or name.startswith("model.")
    }
    specs = state_layout.specs_by_name(model)
    gradients = sum(
        _bytes(accumulator_dtype(leaf.dtype), layout.sharding(specs[name]).shard_shape(leaf.shape))
        for name, leaf in model.items()
        if name in trainable
    )
    totals = {"model": 0, "opt_state": 0, "other": 0}
    for leaf in leaves:
        field = leaf.name.split(".")[0]
        totals[field if field in totals else "other"] += leaf.bytes
    return PlacementReport(leaves, totals["model"], gradients, totals["opt_state"], totals["other"])


def _bytes(dtype: Any, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize
