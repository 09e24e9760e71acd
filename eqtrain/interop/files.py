"""Tensors by name in files of safetensors, and from PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._util.extras import extra


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a safetensors file, or of all of them in a folder.

    **Raises:** `FileNotFoundError` where there is none; `ImportError` without safetensors.

    ```python
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "model.safetensors")
    >>> et.interop.write(path, {"weight": np.ones(3, np.float32)})
    >>> et.interop.read(path)["weight"].shape
    (3,)

    ```
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(
            f"Weights are read from a safetensors file, or a folder of them. Got {path}, where "
            "there is none. Correct the path."
        )
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        tensors.update(_safetensors().load_file(file))
    return tensors


def write(path: str | Path, tensors: Mapping[str, Any]) -> None:
    """Writes arrays by name as a safetensors file, such as what `export` gives.

    **Raises:** `ImportError` without safetensors.

    ```python
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "model.safetensors")
    >>> et.interop.write(path, {"weight": np.ones(3, np.float32)})
    >>> path.stat().st_size > 12
    True

    ```
    """
    arrays = {name: np.asarray(as_numpy(tensor), order="C") for name, tensor in tensors.items()}
    # Named as in PyTorch, whose libraries ask for it.
    _safetensors().save_file(arrays, path, metadata={"format": "pt"})


def as_numpy(tensor: Any) -> np.ndarray:
    """A tensor of any framework as a numpy array, which may share its memory."""
    if hasattr(tensor, "detach"):  # PyTorch's, whose bfloat16 numpy does not know
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = jax.dlpack.from_dlpack(tensor.contiguous())
    return np.asarray(tensor)


def _safetensors() -> Any:
    use = "Weights are stored in files of safetensors."
    return extra("safetensors.numpy", "safetensors", use)
