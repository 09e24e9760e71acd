"""How a step of ours becomes what `peers/served.py` serves."""

from __future__ import annotations

from typing import Any

import jax

import eqtrain as et
from benchmarks.peers.served import Stepper


def stepper_of(step: et.Program, ts: et.TrainState, batch: Any) -> Stepper:
    """Takes steps from `ts` on, always with that batch."""

    def run(num_steps: int) -> float:
        nonlocal ts
        metrics = {}
        for _ in range(num_steps):
            ts, metrics = step(ts, batch)
        jax.block_until_ready(ts.leaves)
        return et.fetch(metrics)["loss"]

    return run
