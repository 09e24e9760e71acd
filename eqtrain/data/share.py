"""Which rows of a global batch a process reads, and whether its devices are to hold those."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .._sharding.placement import entry_axes


@dataclasses.dataclass(frozen=True)
class Share:
    """Block `index` of `count` equal blocks of the global batch, along dim `dim` of its arrays."""

    index: int
    count: int
    dim: int = 0


def require_own_rows(sharding: NamedSharding, share: Share) -> None:
    """Refuses a share that is not what the devices of this process hold.

    Nothing later would: JAX takes the rows of each process for a block of their own, or for the
    same block as those of another process, by the sharding alone.

    **Raises:** `ValueError` that says which share it has to be.
    """
    mesh, spec = sharding.mesh, list(map(entry_axes, sharding.spec))
    assert isinstance(mesh, Mesh), "a sharding of devices"
    devices = mesh.devices
    here = np.array([device.process_index == jax.process_index() for device in devices.flat])

    def held(dim: int) -> tuple[list[int], int]:
        """The shards along a dim that devices of this process hold, and how many there are."""
        names = spec[dim] if dim < len(spec) else ()
        sizes = [mesh.shape[name] for name in names]
        places = np.indices(devices.shape).reshape(devices.ndim, -1)
        along = [places[mesh.axis_names.index(name)] for name in names]
        shards = np.zeros_like(here, int)
        for place, size in zip(along, sizes, strict=True):
            shards = shards * size + place
        return sorted(set(shards[here].tolist())), math.prod(sizes)

    for dim in range(len(spec)):
        shards, total = held(dim)
        if dim != share.dim and len(shards) < total:
            raise ValueError(
                "A process reads whole rows of the global batch. "
                f"Got a sharding by {sharding.spec}, of which the devices of process "
                f"{jax.process_index()} hold {len(shards)} of {total} parts along dim {dim}. "
                "Order the devices of the mesh so that such an axis lies within a process."
            )
    shards, total = held(share.dim)
    first, count = share.index * total // share.count, total // share.count
    if total % share.count == 0 and shards == list(range(first, first + count)):
        return
    consecutive = shards == list(range(shards[0], shards[0] + len(shards))) if shards else False
    if consecutive and total % len(shards) == 0 and shards[0] % len(shards) == 0:
        advice = (
            f"Make its loader with `process_index={shards[0] // len(shards)}, "
            f"process_count={total // len(shards)}`: those that hold the same rows read the same."
        )
    else:
        advice = (
            "Order the devices of the mesh so that those of a process hold rows that are together."
        )
    raise ValueError(
        "A process must read the rows that its devices hold. "
        f"Got a loader of share {share.index} of {share.count} in process {jax.process_index()}, "
        f"whose devices hold the parts {shards} of {total} by {sharding.spec}. {advice}"
    )
