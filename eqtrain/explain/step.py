"""Replays a step that went wrong, and names what went wrong first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._core.loss import batch_size
from .._core.step import Step, View
from .._guard.failures import Failure, coordinates, failures
from .._guard.findings import Findings
from .._state.train_state import Structure, TrainState
from .._util.host import fetch_whole
from .._util.paths import named_leaves
from .blame import Fault, all_faults
from .explanation import Explanation, describe
from .plan import Site
from .probe import statistics
from .rows import RowBlame, blame_rows
from .watch import watching

# Each trial is a step; a bad row among a thousand takes twenty.
MAX_TRIALS = 128
_NEEDS_BEFORE = (
    "the step that made it is an earlier one; to explain that, the state from before the first bad "
    'step is needed, which `guard(nonfinite="skip")` keeps and "raise" hands over as `error.state`',
)


@dataclasses.dataclass
class Seen:
    """What a replayed step says of itself: all on the host."""

    findings: Findings
    loss: Any
    grad_norm: Any
    ruined: dict[str, Any]

    def faults(self) -> list[Fault]:
        """What is to blame, of the first microbatch in which anything went wrong."""
        return all_faults(self.findings.flags, time_dims=(1,))


# The leaves of a TrainState, a batch, the number of the step, and the rows of the batch to take.
Replay = Callable[[tuple[Array, ...], PyTree, int, tuple[int, ...]], Seen]


def make_replay(step: Step, structure: Structure, probe: Site | None = None) -> Replay:
    """Compiles a step to one that is taken under watch, and not taken any further."""
    names: list[str] = []

    @jax.jit
    def run(leaves: tuple[Array, ...], batch: PyTree, number: Array, rows: Array) -> Any:
        parts = structure.unpack(leaves)
        parts = dataclasses.replace(parts, step=number.astype(parts.step.dtype))
        view = View(checks=True, watch=watching(probe), rows=rows)
        take, outcome = step.advance(parts, batch, view)
        new = take()
        params = eqx.filter(new.model, step.is_trainable(new.model))
        names[:] = [name for name, _ in named_leaves(params)]
        ruined = [~jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]
        return outcome.findings, outcome.loss, outcome.grad_norm, ruined

    def call(leaves: tuple[Array, ...], batch: PyTree, number: int, rows: tuple[int, ...]) -> Seen:
        out = run(leaves, batch, np.int32(number), np.array(rows, np.int32))
        findings, loss, norm, ruined = fetch_whole(out)
        return Seen(findings, loss, norm, dict(zip(names, ruined, strict=True)))

    return call


def explain_step(
    step: Step, replay: Replay, ts: TrainState, batch: PyTree, number: int | None = None
) -> Explanation:
    """Names what goes wrong in a step; see `Program.explain`.

    **Arguments:** `replay` is the step's own, from `make_replay`.
    """
    if number is None:
        number = _number(ts)
    all_rows = tuple(range(batch_size(batch)))
    seen = replay(ts.leaves, batch, number, all_rows)
    faults = seen.faults()
    if not faults:
        return _without_fault(step, seen, number)
    fault, *others = faults
    probed = make_replay(step, ts.structure, fault.site)(ts.leaves, batch, number, all_rows)
    device, microbatch = fault.lane

    def fails(rows: tuple[int, ...]) -> bool:
        # As many rows as ever, so that nothing is compiled again.
        filled = tuple(np.resize(rows, len(all_rows)).tolist())
        found = replay(ts.leaves, batch, number, filled).faults()
        return any((other.site, other.kind) == (fault.site, fault.kind) for other in found)

    return describe(
        fault,
        statistics(probed.findings.flags, fault),
        device=coordinates(device, step.layout),
        num_devices=len({lane[0] for lane in fault.lanes}),
        microbatch=microbatch,
        rows=_blame(fails, len(all_rows)),
        others=tuple(others),
        notes=_NEEDS_BEFORE if _given_with_state(fault) else (),
    )


def _given_with_state(fault: Fault) -> bool:
    names = [fault.name_of(operand.name) or "" for operand in fault.site.outputs]
    return fault.site.primitive == "input" and any(
        name.split(".")[0] in ("model", "state") for name in names
    )


def _number(ts: TrainState) -> int:
    """The step to replay: that which the guard held back last, if this is the state it left."""
    now = int(ts.step)
    guard = ts.extra.get("guard")
    held = guard is not None and now > 0 and int(guard["last_bad"]) == now - 1
    return now - 1 if held else now


def _blame(fails: Callable[[tuple[int, ...]], bool], num_rows: int) -> RowBlame:
    spread = sorted({num_rows * part // 4 for part in range(4)} | {num_rows - 1})
    if all(fails((row,)) for row in spread):
        return RowBlame(calls=len(spread))  # whatever is in the batch
    return blame_rows(fails, num_rows, max_calls=MAX_TRIALS)


def _without_fault(step: Step, seen: Seen, number: int) -> Explanation:
    """What is left where the loss and its gradients are as they should be."""
    failed = failures(dataclasses.replace(seen.findings, flags=None), step.layout)
    if failed:
        return _of_checks(failed)
    numbers = f"in step {number} the loss is {seen.loss:g}, the norm of the gradients "
    numbers += f"{seen.grad_norm:g}"
    ruined = [name for name, bad in seen.ruined.items() if bad]
    if ruined:
        leaves = tuple(f"`model.{name}` is not finite after the update" for name in ruined)
        return Explanation("update", "optimizer", "update", notes=(numbers, *leaves))
    if not np.isfinite(seen.grad_norm):
        return Explanation("norm", "optimizer", "update", notes=(numbers,))
    return Explanation("nothing", "", "", notes=(numbers,))


def _of_checks(failed: tuple[Failure, ...]) -> Explanation:
    first = failed[0]
    rows = {failure.example for failure in failed if failure.example is not None}
    return Explanation(
        "check",
        "check",
        "forward",
        first.frames,
        device=first.device,
        num_devices=len({tuple(failure.device.items()) for failure in failed}),
        microbatch=first.microbatch,
        rows=RowBlame(tuple(sorted(rows))) if rows else None,
        notes=tuple(dict.fromkeys(failure.message for failure in failed)),
    )
