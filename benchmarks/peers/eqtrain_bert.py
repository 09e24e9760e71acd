"""Ours, as a contender of `benchmarks/compare_bert.py`: the step of `finetune_bert.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import jax

from benchmarks import bert_data
from benchmarks.finetune_bert import make_model, make_step
from benchmarks.peers.eqtrain_stepper import stepper_of
from benchmarks.peers.served import Stepper, serve


def make_stepper(batch: bert_data.Batch, dropout: float) -> Stepper:
    step = make_step(1e-4)
    make = make_model("wordnet", dropout)
    return stepper_of(step, step.init(make, key=jax.random.key(0)), batch)


if __name__ == "__main__":
    serve(bert_data.made_up_batch, make_stepper)
