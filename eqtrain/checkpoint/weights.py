"""Weights alone, in a safetensors file, which other frameworks read too."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._state.train_state import kind
from .._util.extras import extra
from .._util.paths import named_leaves
from .._util.text import kind_text, some

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


def export_weights(model: PyTree, path: str | os.PathLike[str]) -> None:
    """Writes the arrays of a model to a safetensors file, by their paths, with their dtypes.

    The file appears under its name when it is whole. `ts.model` is a model, and so is `ts.ema`.

    **Raises:** `ValueError` for an array that such a file cannot hold, or that this process holds
    only in part; `ImportError` without the extra `safetensors`.

    ```python
    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/weights.safetensors"
    >>> et.checkpoint.export_weights({"linear": {"weight": jnp.ones((2, 3), jnp.bfloat16)}}, path)
    >>> template = {"linear": {"weight": jnp.zeros((2, 3), jnp.bfloat16)}}
    >>> et.checkpoint.read_weights(template, path)["linear"]["weight"].dtype
    dtype(bfloat16)

    ```
    """
    safetensors = _safetensors()
    tensors = {}
    for name, leaf in _arrays(model):
        if (
            jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
            or str(leaf.dtype) not in _NAMES.values()
        ):
            raise ValueError(
                "A safetensors file holds numbers of the usual dtypes. "
                f"Got `{name}` of {leaf.dtype}. Leave it out by `eqx.partition`, or cast it."
            )
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                "Weights are written by a process that holds them whole. "
                f"Got `{name}`, of which other processes hold a part. "
                "Restore a checkpoint in one process and export that."
            )
        if name in tensors:
            raise ValueError(
                "Weights are written by their paths, which must differ. "
                f"Got `{name}` twice. Rename one."
            )
        # What is not contiguous would be written in another order, and nothing would say so.
        tensors[name] = np.ascontiguousarray(np.asarray(leaf)).reshape(leaf.shape)
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        safetensors.numpy.save_file(tensors, unfinished, metadata={"format": "np"})
        with open(unfinished, "r+b") as file:  # some systems sync what may be written
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_weights(model: PyTree, path: str | os.PathLike[str]) -> PyTree:
    """Reads the arrays of a model from a safetensors file, by their paths.

    **Arguments:**

    - `model`: a template: arrays, or `jax.ShapeDtypeStruct` in their places. What is no array comes
      back as it is. Arrays that are sharded come back so, and of each only the shard is read.

    **Raises:** `ValueError` that names the paths which are missing or of another shape or dtype, in
    either of the two; `ImportError` without the extra `safetensors`.

    ```python
    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/weights.safetensors"
    >>> et.checkpoint.export_weights({"bias": jnp.array([1.0, 2.0])}, path)
    >>> et.checkpoint.read_weights({"bias": jax.ShapeDtypeStruct((2,), jnp.float32)}, path)
    {'bias': Array([1., 2.], dtype=float32)}

    ```
    """
    safetensors = _safetensors()
    wanted = dict(_arrays(model))
    with safetensors.safe_open(path, framework="numpy") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        _require_same(wanted, {name: _kind(part) for name, part in found.items()}, path)
        read = {name: _read(file, found[name], name, leaf) for name, leaf in wanted.items()}
    flat, treedef = jax.tree.flatten(model)
    arrays = iter(read.values())
    return treedef.unflatten([next(arrays) if _is_array(leaf) else leaf for leaf in flat])


def _safetensors() -> ModuleType:
    use = "Weights are written and read by safetensors."
    extra("safetensors.numpy", "safetensors", use)  # which the package leaves out
    return extra("safetensors", "safetensors", use)


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray)


def _arrays(model: PyTree) -> list[tuple[str, Any]]:
    return [(name, leaf) for name, leaf in named_leaves(model) if _is_array(leaf)]


def _kind(part: Any) -> str:
    dtype = part.get_dtype()
    return kind_text(_NAMES.get(dtype, dtype), part.get_shape())


def _require_same(wanted: dict[str, Any], found: dict[str, str], path: Any) -> None:
    problems = [
        *(f"`{name}` is not in the file" for name in wanted if name not in found),
        *(f"`{name}` is in the file only" for name in found if name not in wanted),
        *(
            f"`{name}` is {found[name]} in the file and {kind(leaf)} in the model"
            for name, leaf in wanted.items()
            if name in found and found[name] != kind(leaf)
        ),
    ]
    if problems:
        raise ValueError(
            "A model must have the arrays of the file that it is read from. "
            f"Got, for `{path}`: {some(problems)}. "
            "Make the model as it was when it was exported."
        )


def _read(file: Any, part: Any, name: str, leaf: Any) -> jax.Array:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True) or not leaf.size or not leaf.shape:
        array = jnp.array(file.get_tensor(name))  # a copy, which a step may donate
        placed = sharding is not None and getattr(leaf, "committed", True)
        return jax.device_put(array, sharding) if placed else array

    def shard(index: Any) -> np.ndarray:
        return np.array(part[index])

    return jax.make_array_from_callback(leaf.shape, sharding, shard)
