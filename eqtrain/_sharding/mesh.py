"""The mesh: which devices take part, and what the sides of their grid are called."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


class ThreadsWarning(UserWarning):
    """The devices of a CPU share so few threads that their collectives can block one another."""


def mesh(*, devices: Sequence[Any] | None = None, **axes: int) -> Mesh:
    """Lays devices out on named axes, close ones along the last.

    **Arguments:**

    - `axes`: the size of each axis, in order; one may be -1 and takes what devices are left.
    - `devices`: which devices; all of `jax.devices()` unless given. An explicit size may use fewer,
      and then takes the first ones.

    **Raises:** `ValueError` for more devices than there are, or a size that does not divide them.

    **Warns:** `ThreadsWarning` for devices of one CPU that share no more threads than they are:
    each may hold a thread while it waits in a collective, and the product that another is to
    compute first then gets none.

    ```python
    >>> et.mesh(data=-1, model=1).axis_names
    ('data', 'model')

    ```
    """
    available = list(jax.devices() if devices is None else devices)
    if not axes:
        raise ValueError(
            "A mesh needs an axis. Got none. Write `et.mesh(data=-1)` for all devices on one axis."
        )
    for name, size in axes.items():
        if size != -1 and size < 1:
            raise ValueError(
                f"The size of a mesh axis must be positive, or -1 for what is left. "
                f"Got {name}={size}. Correct it."
            )
    free = [name for name, size in axes.items() if size == -1]
    fixed = math.prod(size for size in axes.values() if size != -1)
    if len(free) > 1:
        raise ValueError(
            f"One axis may be -1 and takes the devices that are left. Got -1 for {free}. "
            "Give all but one a size."
        )
    if fixed > len(available):
        raise ValueError(
            f"A mesh cannot have more devices than there are. Got {_product(axes)} = {fixed} "
            f"devices, and {len(available)} exist ({available[0].platform}). "
            "Use a smaller mesh; or, to try a mesh on a CPU, make devices before JAX starts: "
            f"`jax.config.update('jax_num_cpu_devices', {fixed})` first thing in the script, or "
            f"the environment variable XLA_FLAGS=--xla_force_host_platform_device_count={fixed}."
        )
    if free:
        if len(available) % fixed:
            raise ValueError(
                f"The sizes of a mesh must divide the number of devices, {len(available)}. "
                f"Got {_product(axes)}. Change a size, or pass `devices=`."
            )
        axes[free[0]] = len(available) // fixed
    shape = tuple(axes.values())
    used = available[: math.prod(shape)]
    _warn_of_few_threads(used)
    processes = {device.process_index for device in used}
    if len(processes) < jax.process_count():
        raise ValueError(
            "Every process must own a device of the mesh, or it waits for ever. "
            f"Got {_product(axes)}, on processes {sorted(processes)} of {jax.process_count()}. "
            "Use -1 for the data axis."
        )
    if devices is None and len(used) == len(available):
        # Knows the topology; on several hosts it keeps the slow network to the first axis.
        return jax.make_mesh(shape, tuple(axes), axis_types=(AxisType.Auto,) * len(shape))
    grid = np.array(used, dtype=object).reshape(shape)
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(shape))


def _warn_of_few_threads(devices: list[Any]) -> None:
    local = sum(device.process_index == jax.process_index() for device in devices)
    # XLA sizes the pool of a CPU by this variable, or by the cores that the process may use.
    threads = int(os.environ.get("NPROC") or _usable_cores())
    if devices[0].platform == "cpu" and 1 < local and threads <= local:
        warnings.warn(
            "The devices of one CPU should share more threads than they are, or a collective may "
            f"wait for ever and XLA abort after 40 s. Got {local} devices and {threads} threads. "
            f"Set the environment variable NPROC={4 * local} before JAX uses its first device.",
            ThreadsWarning,
            stacklevel=3,
        )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _product(axes: dict[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in axes.items())
