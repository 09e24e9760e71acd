"""Copies that should be equal: a checksum of what each device holds, compared over the mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, UInt32


def checksum(x: Array) -> UInt32[Array, ""]:
    """A sum of the bits of an array in which every place weighs differently, modulo 2**32."""
    words = _words(x)
    weights = 2 * lax.iota(jnp.uint32, len(words)) + 1  # odd, so that no bit is lost
    return jnp.sum(words * weights, dtype=jnp.uint32)


def _words(x: Array) -> UInt32[Array, " words"]:
    """The bits of an array, 32 at most in each."""
    if jnp.iscomplexobj(x):
        return jnp.concatenate([_words(x.real), _words(x.imag)])
    if x.dtype == bool:
        return x.reshape(-1).astype(jnp.uint32)
    bits = lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}")).reshape(-1)
    words = bits.astype(jnp.uint32)
    if x.dtype.itemsize == 8:
        return jnp.concatenate([words, (bits >> 32).astype(jnp.uint32)])
    return words


def checksums(mesh: Mesh, leaves: list[Array], specs: list[P]) -> UInt32[Array, "devices leaves"]:
    """The checksum of what each device holds of each leaf, known to every device."""

    def local(*leaves: Array) -> Array:
        own = jnp.stack([checksum(leaf) for leaf in leaves])
        return lax.all_gather(own, mesh.axis_names)

    # Unchecked types: that copies are equal is what we ask.
    return jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=P(), check_vma=False)(
        *leaves
    )


def holders(mesh: Mesh, specs: list[P]) -> Int[np.ndarray, "devices leaves"]:
    """For each device and leaf the first of the devices that hold the same part of it."""
    names = mesh.axis_names
    places = np.indices(tuple(mesh.shape.values())).reshape(len(names), -1)
    columns = []
    for spec in specs:
        used = {axis for entry in spec for axis in _axes(entry)}
        kept = [place * (name in used) for name, place in zip(names, places, strict=True)]
        columns.append(np.ravel_multi_index(kept, tuple(mesh.shape.values())))
    return np.stack(columns, 1)


def _axes(entry: object) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (str(entry),)


def differ(
    sums: UInt32[Array, "devices leaves"], groups: Int[np.ndarray, "devices leaves"]
) -> Bool[Array, ""]:
    """Whether any two copies do."""
    return jnp.any(sums != jnp.take_along_axis(sums, jnp.asarray(groups), 0))


def outliers(
    sums: UInt32[np.ndarray, "devices leaves"], groups: Int[np.ndarray, "devices leaves"]
) -> list[tuple[int, list[int]]]:
    """The leaves whose copies differ, each with the devices whose copy the fewest others have.

    Where no copy is more frequent than another, all devices that hold one.
    """
    found = []
    for leaf in range(sums.shape[1]):
        devices: list[int] = []
        for group in np.unique(groups[:, leaf]):
            members = np.flatnonzero(groups[:, leaf] == group)
            values, which, counts = np.unique(
                sums[members, leaf], return_inverse=True, return_counts=True
            )
            if len(values) > 1:
                common = counts == counts.max()
                odd = np.ones(len(values), bool) if common.sum() > 1 else ~common
                devices += members[odd[which]].tolist()
        if devices:
            found.append((leaf, sorted(devices)))
    return found
