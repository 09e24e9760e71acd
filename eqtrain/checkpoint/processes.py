"""Decisions that all processes of a run share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from .error import CheckpointError

Result = TypeVar("Result")


def is_first() -> bool:
    """Whether this process is the one that makes and deletes folders."""
    return jax.process_index() == 0


def same_everywhere(step: int | None) -> int | None:
    """What the first process says."""
    if jax.process_count() == 1:
        return step
    from jax.experimental import multihost_utils  # which `import jax` leaves out

    # In two halves, since JAX narrows 64-bit integers.
    high, low = divmod(-1 if step is None else step, 2**31)
    high, low = multihost_utils.broadcast_one_to_all(np.array([high, low], np.int32)).tolist()
    found = high * 2**31 + low
    return None if found < 0 else found


def all_succeed(action: Callable[[], Result], what: str) -> Result:
    """Runs `action` in every process; if it fails in one of them, it raises in all."""
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        failed = multihost_utils.process_allgather(np.array([error is not None]))
        processes = np.flatnonzero(np.asarray(failed)).tolist()
        if processes and error is None:
            error = CheckpointError(
                f"All processes must {what} together. Got an error in {processes}. "
                "Look at what they say."
            )
    if error is not None:
        raise error
    return result
