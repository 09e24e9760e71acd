"""Reads the statistics of a probed site on the host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .blame import Fault
from .plan import Operand
from .record import Branches, Flags, Record, Snapshots
from .tensors import Indices, Statistics, Tensor


def statistics(flags: Flags, fault: Fault) -> Statistics:
    """What went into the operation to blame, and what came out, where and when it went wrong.

    **Arguments:**

    - `flags`: from a function watched with `probe=fault.site`, called as before.
    - `fault`: what `first_fault` made of the flags of that call.

    **Raises:** `ValueError` if it was not probed.
    """
    found = _find(flags, fault)
    if found is None:
        raise ValueError(
            "Statistics are measured where the function is watched with `probe=`. "
            f"Got flags without those of {fault.site.primitive!r}. "
            "Run `watch(f, probe=fault.site)` on the same arguments, and give its flags."
        )

    def tensors(operands: tuple[Operand, ...], measured: list[Any]) -> tuple[Tensor, ...]:
        return tuple(
            _tensor(fault.name_of(operand.name), operand, numbers)
            for operand, numbers in zip(operands, measured, strict=True)
        )

    return Statistics(
        tensors(fault.site.inputs, found["inputs"]),
        tensors(fault.site.outputs, found["outputs"]),
        _bad_indices(found.get("indices")),
    )


def _find(flags: Flags, fault: Fault) -> dict[str, Any] | None:
    """Descends from the whole program to the scope that the site is part of."""
    record = jax.tree.map(lambda leaf: np.asarray(leaf)[fault.lane], flags.record)
    iterations = iter(fault.iterations)
    places = iter(fault.site.path[:-1])
    for place in places:
        inner = record.inner[place]
        if isinstance(inner, Branches):
            record = inner.records[next(places)]
            continue
        row = next(iterations)
        if isinstance(inner, Snapshots):
            inner, row = inner.record, inner.iterations.tolist().index(row)
        record = _row(inner, row)
    return record.probe


def _row(record: Record, row: int) -> Record:
    return jax.tree.map(lambda leaf: leaf[row], record)


def _tensor(name: str | None, operand: Operand, numbers: Any) -> Tensor:
    if numbers is None:
        return Tensor(name, operand.shape, operand.dtype)
    (minimum, maximum, mean), (nan, inf, zeros) = (part.tolist() for part in numbers)
    return Tensor(name, operand.shape, operand.dtype, minimum, maximum, mean, nan, inf, zeros)


def _bad_indices(found: Any) -> tuple[Indices, ...]:
    if found is None:
        return ()
    columns = enumerate(found.T.tolist())
    return tuple(Indices(dim, *column) for dim, column in columns if column[0])
