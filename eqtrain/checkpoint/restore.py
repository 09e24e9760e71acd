"""Reading a checkpoint, onto any mesh."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._state.train_state import TrainState
from .error import CheckpointError
from .integrity import verify as verify_files
from .metadata import META, Metadata, leaves_of, order_of, read_metadata, require_fit, require_step
from .processes import all_succeed, same_everywhere
from .storage import STATE, read_arrays


def restore(
    folder: str | os.PathLike[str],
    template: TrainState,
    loader: Any = None,
    *,
    step: int | None = None,
    verify: bool = True,
) -> TrainState:
    """Reads a TrainState from a folder of checkpoints, which another run may be writing to.

    Its arrays come with the shardings of the template, whatever they were when saved: on any mesh,
    and in any number of processes. No device ever holds more than its shard. A program that has run
    already does not compile anew for it, and the next step may donate it.

    **Arguments:**

    - `template`: a TrainState, or `program.init_shapes(make)`, which is one without arrays.
    - `loader`: its `position` is set to that which was saved.
    - `step`: which checkpoint; the last one unless given.
    - `verify`: with False, checksums are not compared: of checkpoints so large that reading each
        file twice takes too long.

    **Raises:** `FileNotFoundError` where there is no such checkpoint; `ValueError`, before any
    array is read, for a template or a loader that does not fit, with the paths of the leaves;
    `CheckpointError` that names the file, for one that is damaged.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] - model) ** 2), state, {}
    >>> step = et.pipe(loss, et.update(optax.sgd(0.25)), et.donate)
    >>> make = lambda key: jnp.array(0.5)
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with et.checkpoint.Checkpoints(folder) as checkpoints:
    ...     checkpoints.save(step.init(make, key=jax.random.key(0)), program=step)
    >>> float(et.checkpoint.restore(folder, step.init_shapes(make)).model)
    0.5

    ```
    """
    folder = Path(folder).absolute()
    step = agreed_step(folder, step)
    path = folder / str(step)
    position = all_succeed(lambda: _fit(path, template, loader, verify), "fit a checkpoint")
    if verify:
        share = jax.process_index(), jax.process_count()
        all_succeed(lambda: verify_files(path, STATE, *share), "verify a checkpoint")
    wanted = {
        name: jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for name, aval, sharding in zip(
            template.structure.names, template.structure.avals, _shardings(template), strict=True
        )
    }
    try:
        arrays = read_arrays(path, {name: aval for name, aval in wanted.items() if aval.size})
    except Exception as error:
        raise CheckpointError(
            f"A checkpoint must be read as it was written. Got an error in reading `{path}`: "
            f"{error} Restore an earlier one, `step=...`."
        ) from error
    leaves = tuple(arrays[name] if aval.size else _empty(aval) for name, aval in wanted.items())
    if loader is not None:
        loader.position = position
    return TrainState(leaves, template.structure, fresh=True)


def agreed_step(folder: Path, step: int | None) -> int:
    found = same_everywhere(all_succeed(lambda: require_step(folder, step), "find a checkpoint"))
    assert found is not None, "a step that is there was not found"
    return found


def _fit(path: Path, template: TrainState, loader: Any, verify: bool) -> Any:
    """Refuses a template or a loader that does not fit. **Returns:** the position of the loader."""
    if verify:
        verify_files(path, META)
    meta = read_metadata(path.parent, int(path.name))
    require_fit(meta.step, meta.leaves, leaves_of(template.structure))
    if loader is not None:
        _require_order(meta, loader)
    return meta.position


def _empty(aval: jax.ShapeDtypeStruct) -> Array:
    array = jnp.zeros(aval.shape, aval.dtype)
    return array if aval.sharding is None else jax.device_put(array, aval.sharding)


def _shardings(template: TrainState) -> list[Any]:
    """Where the program has its arrays; or where its user put them, if that is all there is."""
    return [
        leaf.sharding
        if sharding is None and isinstance(leaf, jax.Array) and leaf.committed
        else sharding
        for leaf, sharding in zip(template.leaves, template.structure.shardings, strict=True)
    ]


def _require_order(meta: Metadata, loader: Any) -> None:
    """Refuses a loader that would go on with other rows."""
    now = order_of(loader)
    # A loader of another kind may tell nothing of its order.
    names = [*meta.order, *(now.keys() - meta.order.keys())] if now and meta.order else []
    other = [
        f"{name}={now.get(name)!r} in place of {meta.order.get(name)!r}"
        for name in names
        if now.get(name) != meta.order.get(name)
    ]
    if meta.position is None or other:
        got = ", ".join(other) or "a checkpoint that was saved without a loader"
        raise ValueError(
            "A loader goes on where it stood, so it must give the same rows. "
            f"Got {got}. "
            "Make it with the settings that were saved; or restore without it, and set its "
            "position."
        )
