"""The files of a replay bundle: arrays as safetensors, and the tree of a batch as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._util.extras import extra
from .._util.files import sha256

# What safetensors reads back as a numpy array; the rest is stored as bytes.
_NATIVE = frozenset(
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex64".split()
)


class BundleError(ValueError):
    """A folder is no replay bundle, or does not match what it is to be restored to."""


def _safetensors() -> Any:
    return extra("safetensors.numpy", "safetensors", "Replay bundles are files of safetensors.")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Writes a safetensors file, and returns its size and checksum."""
    stored = {
        name: array if array.dtype.name in _NATIVE else np.frombuffer(array.tobytes(), np.uint8)
        for name, array in arrays.items()
    }
    _safetensors().save_file(stored, path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def read_arrays(path: Path, file: Any, kinds: Any) -> dict[str, np.ndarray]:
    """Reads what `write_arrays` wrote.

    **Raises:** `BundleError` if the file is not there, or not what was written.
    """
    advice = "Copy the bundle again, or save another."
    if not path.is_file():
        raise BundleError(f"A bundle must have all of its files. Got no {path}. {advice}")
    size, found = file["bytes"], path.stat().st_size
    if found != size:
        raise BundleError(
            f"A bundle's files must be whole. Got {found} bytes of {size} in {path}. {advice}"
        )
    if sha256(path) != file["sha256"]:
        raise BundleError(
            "A bundle's files must be what was written. "
            f"Got {path}, whose sha256 is another than its index says. {advice}"
        )
    stored = _safetensors().load_file(path)
    if stored.keys() != kinds.keys():
        raise KeyError(", ".join(sorted(stored.keys() ^ kinds.keys())))
    return {name: _as_kind(array, kinds[name]) for name, array in stored.items()}


def _as_kind(array: np.ndarray, text: str) -> np.ndarray:
    """An array as the `kind` that it was saved as, which is its own unless it holds bytes."""
    dtype, _, shape = text.rstrip("]").partition("[")
    return (
        array.reshape(-1)
        .view(jnp.dtype(dtype))
        .reshape([int(dim) for dim in shape.split(",") if dim])
    )


def require_names(names: tuple[str, ...]) -> None:
    """Refuses two leaves of one name."""
    if len(set(names)) < len(names):
        raise BundleError(
            "A bundle stores leaves by name, so no two may share one. Got more leaves than names "
            f"in {', '.join(names)}. Rename a key of the model that has a dot in it."
        )


def encode_batch(batch: PyTree) -> tuple[Any, dict[str, Any]]:
    """The tree of a batch for JSON, and its arrays by name.

    **Raises:** `BundleError` for other containers than dict, list and tuple, and other leaves than
    arrays and numbers.
    """
    arrays: dict[str, Any] = {}

    def encode(node: Any, name: str) -> Any:
        if node is None:
            return None
        if type(node) is dict and all(type(key) in (str, int) for key in node):
            return {"dict": [[key, encode(child, f"{name}.{key}")] for key, child in node.items()]}
        if type(node) in (list, tuple):
            children = [encode(child, f"{name}.{index}") for index, child in enumerate(node)]
            return {type(node).__name__: children}
        if type(node) in (bool, int, float):
            return {"number": plain(node)}
        if not isinstance(node, jax.Array | np.ndarray | np.generic):
            raise BundleError(
                "A bundle's batch must be dicts, lists and tuples of arrays and numbers. "
                f"Got {type(node).__name__} at `{name}`. "
                "Save the batch as such, or its part that matters; or leave out `bundles=` of "
                "`et.guard`."
            )
        while name in arrays:
            name += "_"
        if isinstance(node, jax.Array) and jnp.issubdtype(node.dtype, jax.dtypes.prng_key):
            arrays[name] = jax.random.key_data(node)
            return {"array": name, "key_impl": str(jax.random.key_impl(node))}
        arrays[name] = node
        return {"array": name}

    return encode(batch, "batch"), arrays


def decode_batch(tree: Any, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """The batch that `encode_batch` was given, with its arrays on the host.

    **Raises:** `KeyError` or `TypeError` if the tree is not one, or has other arrays.
    """
    used = set()

    def decode(node: Any) -> Any:
        if node is None:
            return None
        (what, value), *more = node.items()
        if what == "dict":
            return {key: decode(child) for key, child in value}
        if what in ("list", "tuple"):
            return {"list": list, "tuple": tuple}[what](map(decode, value))
        if what == "number":
            return float(value) if isinstance(value, str) else value
        if what != "array":
            raise KeyError(what)
        used.add(value)
        array = arrays[value]
        return jax.random.wrap_key_data(jnp.asarray(array), impl=more[0][1]) if more else array

    batch = decode(tree)
    if used != arrays.keys():
        raise KeyError(", ".join(sorted(arrays.keys() - used)))
    return batch


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite, and what else there is, as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
