"""Replay bundles: a step's TrainState and batch as a folder of plain files, to be looked at later.

    state.safetensors   the leaves of the TrainState, by name
    batch.safetensors   the arrays of the batch, by name
    bundle.json         what they are, what wrote them and why, and their checksums

No file can run code when it is read. What is no array is not stored but comes from the user's own
`make`; so a bundle is restored to a TrainState of the same leaves, on any mesh or on one device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._core.step import AbstractCompiledStep
from .._state.train_state import Structure, TrainState, kind
from .._util.extras import versions
from .._util.host import fetch_whole
from .._util.paths import named_leaves
from .._util.text import some
from .files import (
    BundleError,
    decode_batch,
    encode_batch,
    plain,
    read_arrays,
    require_names,
    write_arrays,
)

FORMAT = 1
INDEX, STATE, BATCH = "bundle.json", "state.safetensors", "batch.safetensors"


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A replay bundle as it was read. Made by `read_bundle`.

    **Fields:** `path`; `state`, the TrainState's leaves by name, on the host; `batch`; `step`, the
    step that was to be taken; `chain`, the transforms as text; `mesh`, its axes with their sizes,
    or None; `num_steps`, how many batches are stacked for one call, or None; `key_impl`, of which
    kind the key is; `versions`; `reason`, why it was saved; `settings`, what the TrainState held
    beside arrays; `notes`, what differs between then and now and is no reason to refuse.
    """

    path: Path
    state: dict[str, np.ndarray]
    batch: PyTree
    step: int
    chain: str
    mesh: dict[str, int] | None
    num_steps: int | None
    key_impl: str
    versions: dict[str, str]
    reason: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str]

    def state_for(
        self, template: TrainState, *, fields: Collection[str] | None = None
    ) -> TrainState:
        """The TrainState, placed as `template` is.

        **Arguments:**

        - `template`: from `program.init_shapes(make)` or `program.init(make, key=key)`.
        - `fields`: the fields that `template` has, if it has not all those of the TrainState;
          leaves of others stay in the bundle.

        **Raises:** `BundleError` that names each leaf which is missing, or of another shape or
        dtype. Another mesh, and another value of what is no array, are added to `notes`.
        """
        structure = template.structure
        avals = dict(zip(structure.names, structure.avals, strict=True))
        saved = {
            name: leaf
            for name, leaf in self.state.items()
            if fields is None or name.split(".")[0] in fields
        }
        wrong = []
        for name in {**avals, **saved}:
            sides = [
                f"{kind(leaves[name])} in the {where}" if name in leaves else f"not in the {where}"
                for leaves, where in ((saved, "bundle"), (avals, "program"))
            ]
            if sides[0].split(" in ")[0] != sides[1].split(" in ")[0]:
                wrong.append(f"`{name}` is {' and '.join(sides)}")
        if wrong:
            raise BundleError(
                "A bundle must have the leaves of the program that it is restored to. "
                f"Got {self.path}, where {some(wrong)}. "
                f"Use the model and the chain that it was saved with: {self.chain}."
            )
        self._note_differences(structure)
        leaves = tuple(_placed(saved[name], aval.sharding) for name, aval in avals.items())
        return TrainState(leaves, structure, fresh=True)

    def _note_differences(self, structure: Structure) -> None:
        shardings = [place for place in structure.shardings if isinstance(place, NamedSharding)]
        mesh = dict(shardings[0].mesh.shape) if shardings else None
        found = []
        if mesh != self.mesh:
            found.append(f"Saved {_mesh_text(self.mesh)}, restored {_mesh_text(mesh)}.")
        now = _settings(structure)
        for name in self.settings:
            if name in now and self.settings[name] != now[name]:
                found.append(f"`{name}` was {self.settings[name]!r}, and is {now[name]!r}.")
        self.notes.extend(note for note in found if note not in self.notes)


def save_bundle(
    folder: str | os.PathLike[str],
    ts: TrainState,
    batch: PyTree,
    *,
    program: AbstractCompiledStep,
    reason: Mapping[str, Any],
) -> Path:
    """Writes a replay bundle: the step that `program(ts, batch)` would take, or took.

    It is written beside `folder` and then renamed, so that no half of one is ever found there. All
    processes of a run must call it; the first writes.

    **Arguments:**

    - `folder`: the bundle's own folder, which must not be there yet.
    - `ts`: the TrainState before the step. A step that `guard` skipped left it as it was.
    - `batch`: dicts, lists and tuples of arrays and numbers.
    - `reason`: why it is saved, as what JSON can hold; numbers that are not finite become text.

    **Returns:** the path of the bundle.

    **Raises:** `BundleError` if `folder` is there, or for a batch of other containers;
    `UsedStateError` for a TrainState that was donated; `ImportError` without safetensors.

    ```python
    >>> import tempfile
    >>> from eqtrain.bundles import read_bundle, save_bundle
    >>> def loss(model, state, batch, key):
    ...     return et.mean((batch["x"] - model) ** 2), state, {}
    >>> step = et.pipe(loss, et.update(optax.sgd(0.25)), et.donate)
    >>> ts = step.init(lambda key: jnp.array(0.5), key=jax.random.key(0))
    >>> with tempfile.TemporaryDirectory() as runs:
    ...     path = save_bundle(f"{runs}/step-0", ts, {"x": np.ones(2)}, program=step, reason={})
    ...     bundle = read_bundle(path)
    >>> bundle.step, float(bundle.state["model"]), bundle.batch["x"].tolist()
    (0, 0.5, [1.0, 1.0])

    ```
    """
    folder = Path(folder)
    ts.require_unused()
    if folder.exists():
        raise BundleError(
            f"A bundle is written to a folder that is not there yet. Got {folder}. "
            "Give each bundle a name of its own, such as by its step."
        )
    require_names(ts.structure.names)
    batch_tree, batch_leaves = encode_batch(batch)
    # All processes gather, in the same order; only the first needs what comes of it.
    state_arrays = dict(zip(ts.structure.names, map(_copy, ts.leaves), strict=True))
    batch_arrays = {name: _copy(leaf) for name, leaf in batch_leaves.items()}
    if jax.process_index() != 0:
        return folder
    layout = program.step.layout
    index = {
        "format": FORMAT,
        "versions": versions(),
        "chain": repr(program),
        "mesh": None if layout is None else dict(layout.mesh.shape),
        "num_steps": program.step.num_steps,
        "step": int(state_arrays["step"]),
        "key_impl": str(jax.random.key_impl(ts.key)),
        "reason": plain(reason),
        "settings": _settings(ts.structure),
        "state": {name: kind(array) for name, array in state_arrays.items()},
        "batch": {name: kind(array) for name, array in batch_arrays.items()},
        "batch_tree": batch_tree,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    beside.mkdir()
    try:
        files = {STATE: state_arrays, BATCH: batch_arrays}
        index["files"] = {name: write_arrays(beside / name, files[name]) for name in files}
        (beside / INDEX).write_text(json.dumps(index, indent=1, allow_nan=False) + "\n")
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return folder


def _copy(leaf: Any) -> np.ndarray:
    return np.array(fetch_whole(leaf), order="C")


def read_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Reads a replay bundle, and sees that nothing of it is missing or damaged.

    **Returns:** a Bundle, whose `notes` name the versions that differ from those now installed.

    **Raises:** `BundleError` for what is no bundle, is damaged, or is of a format that this version
    does not know; `ImportError` without safetensors.
    """
    path = Path(path)
    index = _read_index(path)
    try:
        state = read_arrays(path / STATE, index["files"][STATE], index["state"])
        arrays = read_arrays(path / BATCH, index["files"][BATCH], index["batch"])
        now = versions()
        return Bundle(
            path=path,
            state=state,
            batch=decode_batch(index["batch_tree"], arrays),
            notes=[
                f"Saved with {name} {version}; this is {name} {now.get(name, 'unknown')}."
                for name, version in index["versions"].items()
                if version != now.get(name)
            ],
            **{
                name: index[name]
                for name in ("step", "chain", "mesh", "num_steps", "key_impl", "versions")
            },
            reason=index["reason"],
            settings=index["settings"],
        )
    except BundleError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BundleError(
            f"`{INDEX}` must say what the files of a bundle hold. Got {path / INDEX}, which does "
            f"not: {type(error).__name__}: {error}. Copy the bundle again, or save another."
        ) from error


def _read_index(path: Path) -> dict[str, Any]:
    if not (path / INDEX).is_file():
        what = "no folder" if not path.is_dir() else f"a folder without `{INDEX}`"
        raise BundleError(
            f"A bundle is a folder that `save_bundle` wrote. Got {path}, {what}. "
            "Give the path of a bundle."
        )
    try:
        index = json.loads((path / INDEX).read_text())
        number = index["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(
            f"`{INDEX}` must be JSON that says its format. Got {path / INDEX}: "
            f"{' '.join(str(error).split())}. Copy the bundle again, or save another."
        ) from error
    if number != FORMAT:
        raise BundleError(
            f"This version of eqtrain reads bundles of format {FORMAT}. Got {path} of format "
            f"{number}, written by eqtrain {index.get('versions', {}).get('eqtrain', 'unknown')}. "
            "Read it with that version."
        )
    return index


def _placed(array: np.ndarray, sharding: Any) -> jax.Array:
    # Copied: JAX may take a numpy array's memory as it is, which the bundle keeps and no step can
    # reuse.
    if sharding is None:
        return jnp.array(array, copy=True)
    return jnp.copy(jax.make_array_from_callback(array.shape, sharding, lambda part: array[part]))


def _settings(structure: Structure) -> dict[str, Any]:
    """What a TrainState holds beside arrays and functions, by name."""
    leaves = named_leaves(jax.tree.unflatten(structure.treedef, structure.static))
    simple = [(name, leaf) for name, leaf in leaves if isinstance(leaf, bool | int | float | str)]
    return {name: plain(leaf) for name, leaf in simple}


def _mesh_text(mesh: dict[str, int] | None) -> str:
    if mesh is None:
        return "without a mesh"
    return "on a mesh of " + ", ".join(f"{name}={size}" for name, size in mesh.items())
