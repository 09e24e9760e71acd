"""What a checkpoint says of itself, as JSON that is read without devices and without Orbax."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._core.levels import Level
from .._state.train_state import Structure
from .._util.extras import versions
from .._util.text import kind_text, some
from .error import CheckpointError
from .integrity import SUMS, damaged

META = "meta"
FILE = "metadata.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a TrainState: its dotted path, dtype, shape, and how it lay on the mesh.

    `spec` has an entry a dim: the mesh axes that split it, or none. `key` is the kind of random
    key whose words these are, or None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...] | None = None
    key: str | None = None

    @property
    def kind(self) -> str:
        """As in `float32[8,3]`."""
        return kind_text(self.dtype, self.shape)


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a checkpoint says of itself.

    **Fields:** `step`; `position` of the loader, or None; `metrics`; `leaves`; the `mesh` as sizes
    by axis name, or None; the `chain` of transforms that made the step; `versions` of packages; the
    number of `processes`; `saved_at`, in UTC; and `order`, the settings of the loader that decide
    which rows form a batch.
    """

    step: int
    position: Any
    metrics: dict[str, float]
    leaves: tuple[Leaf, ...]
    mesh: dict[str, int] | None
    chain: tuple[str, ...]
    versions: dict[str, str]
    processes: int
    saved_at: str
    order: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}


def describe(
    structure: Structure,
    step: int,
    loader: Any,
    metrics: Mapping[str, float],
    program: Level | None,
) -> Metadata:
    """What is saved beside the arrays of a TrainState."""
    meshes = [s.mesh for s in structure.shardings if isinstance(s, NamedSharding)]
    return Metadata(
        step=step,
        position=None if loader is None else loader.position,
        metrics=dict(metrics),
        leaves=leaves_of(structure),
        mesh=dict(meshes[0].shape) if meshes else None,
        chain=() if program is None else tuple(str(level.source) for level in program.chain),
        versions=versions(),
        processes=jax.process_count(),
        saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        order=order_of(loader),
    )


def order_of(loader: Any) -> dict[str, Any]:
    """The settings of a loader that decide which rows form a batch, if it tells them."""
    order = getattr(loader, "order", None)
    return dict(order) if isinstance(order, Mapping) else {}


def leaves_of(structure: Structure) -> tuple[Leaf, ...]:
    return tuple(
        Leaf(
            name,
            str(aval.dtype),
            tuple(aval.shape),
            _spec(aval.sharding),
            None if key is None else str(key),
        )
        for name, aval, key in zip(
            structure.names, structure.avals, structure.key_impls, strict=True
        )
    )


def require_fit(step: int, saved: tuple[Leaf, ...], wanted: tuple[Leaf, ...]) -> None:
    """Refuses a template that is not what was saved, by the paths of its leaves."""
    have = {leaf.name: leaf for leaf in saved}
    want = {leaf.name: leaf for leaf in wanted}
    problems = [
        *(f"`{name}` is not in the checkpoint" for name in want if name not in have),
        *(f"`{name}` is in the checkpoint only" for name in have if name not in want),
        *(
            f"`{name}` is {have[name].kind} in the checkpoint and {leaf.kind} in the template"
            for name, leaf in want.items()
            if name in have and have[name].kind != leaf.kind
        ),
        *(
            f"`{name}` is a key of kind {have[name].key} in the checkpoint, {leaf.key} in the "
            "template"
            for name, leaf in want.items()
            if name in have and have[name].key != leaf.key
        ),
    ]
    if problems:
        raise ValueError(
            "A template must have the leaves of the checkpoint, with their shapes and dtypes. "
            f"Got, for the checkpoint of step {step}: {some(problems)}. "
            "Make the template with the model, optimizer and transforms that were saved."
        )


def read_metadata(folder: str | Path, step: int | None = None) -> Metadata:
    """Reads what a checkpoint says of itself. It needs no devices, no Orbax, and no lock.

    **Arguments:**

    - `folder`: that of `Checkpoints`.
    - `step`: which checkpoint; the last one unless given.

    **Raises:** `FileNotFoundError` where there is no such checkpoint; `CheckpointError` for one
    that is damaged.

    ```python
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] @ model) ** 2), state, {}
    >>> step = et.pipe(loss, et.update(optax.sgd(0.1)), et.donate)
    >>> ts = step.init(lambda key: jnp.zeros((8, 2)), key=jax.random.key(0))
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with et.checkpoint.Checkpoints(folder) as checkpoints:
    ...     checkpoints.save(ts, program=step)
    >>> found = et.checkpoint.read_metadata(folder)
    >>> found.step, found.chain, found.leaves[0].name, found.leaves[0].kind
    (0, ('et.update(optimizer)', 'et.donate'), 'model', 'float32[8,2]')

    ```
    """
    folder = Path(folder)
    step = require_step(folder, step)
    path = folder / str(step) / META / FILE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved.pop("format") != FORMAT:
            raise CheckpointError(
                f"A checkpoint must have format {FORMAT}. Got `{path}`, which says otherwise. "
                "Read it by the version of `eqtrain` that wrote it; `versions` in it says which."
            )
        saved["leaves"] = tuple(_leaf(leaf) for leaf in saved["leaves"])
        saved["chain"] = tuple(saved["chain"])
        return Metadata(**saved)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder / str(step), f"`{path}`, which cannot be read ({error})") from error


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in order of their numbers.

    Other folders may have numbers for names. What is deleted, or restored, must be a checkpoint: it
    has at least one of two files, of which the other may be what was damaged.
    """
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in folder.iterdir()
        if path.name.isascii()
        and path.name.isdecimal()
        and str(int(path.name)) == path.name
        and ((path / SUMS).is_file() or (path / META / FILE).is_file())
    )


def require_step(folder: Path, step: int | None) -> int:
    """`step`, or the last one there is. **Raises:** `FileNotFoundError` where there is none."""
    steps = steps_in(folder)
    if not steps:
        raise FileNotFoundError(
            f"A checkpoint must be there to be read. Got `{folder}`, which holds none. "
            "Look for it elsewhere, or begin with `program.init`."
        )
    if step is not None and step not in steps:
        raise FileNotFoundError(
            f"A checkpoint must be there to be read. Got step {step} of `{folder}`, which holds "
            f"{', '.join(map(str, steps[-8:]))}. Choose one of these."
        )
    return steps[-1] if step is None else step


def _leaf(saved: dict[str, Any]) -> Leaf:
    spec = saved["spec"]
    return Leaf(
        name=saved["name"],
        dtype=saved["dtype"],
        shape=tuple(saved["shape"]),
        spec=None if spec is None else tuple(map(tuple, spec)),
        key=saved["key"],
    )


def _spec(sharding: Any) -> tuple[tuple[str, ...], ...] | None:
    if not isinstance(sharding, NamedSharding):
        return None
    return tuple(
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in sharding.spec
    )
