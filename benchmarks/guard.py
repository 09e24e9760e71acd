"""Claim: a guard that skips bad steps and looks for spikes costs at most 2 % of a step.

    python benchmarks/guard.py

Some four minutes on two free cores; `--quick` is for a look only. Runs on the CPU, on 2 devices.

**The steps.** `resnet`: SGD with momentum on the digits ResNet of `train_digits.py`, 64 rows of 8 x
8, with BatchNorm. `llama`: AdamW on a Llama of 0.9 million parameters, 8 rows of 64 tokens. Both
are sharded over the batch, in two microbatches, float32, donated.

| contender | what is added to `off`, which has no guard |
| --- | --- |
| `skip` | `et.guard(nonfinite="skip")` |
| `skip_spike` | and `spike=et.Spike(window=64)` |
| `user_checks` | `skip`, and two checks in the loss: one an example, one of the whole microbatch |
| `replicas` | `skip`, and `replicas_every=1`: checksums of all copies after every step |
| `replicas_100` | `skip`, and `replicas_every=100` |
| `all_checks` | `user_checks`, and `checks=` float, index, division: every primitive is watched |
| `checkify` | JAX's `checkify` with all its checks around the whole of `off`'s loss, one device |

`checkify` is there to compare `all_checks` with; it runs on one device, without accumulation, since
it does not work inside these, and is compared with `off_one`, the same without it.

**The figures**: the median over rounds of a step's time, of runs of steps without a look at them;
and the median of its ratio to `off` within a round. Every round goes through all contenders in an
order drawn anew.

**Expected:** `skip_spike` at most 1.02 x `off`. The last line, which is JSON, says under `goals`
whether it came out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

import eqtrain as et
from benchmarks.environment import environment, make_cpu_devices
from eqtrain._ops import convolve as convolution
from models.llama import Llama, LlamaConfig
from models.resnet import RESNET_TINY, ResNet

DEVICES = 2
MOST_OVER_OFF = 1.02
GUARDS: dict[str, Callable[[], Any] | None] = {
    "off": None,
    "skip": lambda: et.guard(nonfinite="skip"),
    "skip_spike": lambda: et.guard(nonfinite="skip", spike=et.Spike(window=64)),
    "user_checks": lambda: et.guard(nonfinite="skip"),
    "replicas": lambda: et.guard(nonfinite="skip", replicas_every=1),
    "replicas_100": lambda: et.guard(nonfinite="skip", replicas_every=100),
    "all_checks": lambda: et.guard(checks=("user", "float", "index", "division")),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What is trained: the loss of each row, the model, the optimizer, a batch."""

    nll: Callable[[PyTree, PyTree, PyTree], tuple[Any, PyTree]]
    make: Callable[[Any], Any]
    optimizer: optax.GradientTransformation
    batch: dict[str, np.ndarray]
    steps: int  # a run

    def loss(self, checked: bool) -> Callable[..., Any]:
        def loss(model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
            nll, state = self.nll(model, state, batch)
            if checked:
                jax.vmap(lambda x: checkify.check(jnp.all(x < 1e4), "nll is {x}", x=x.max()))(nll)
                checkify.check(nll.mean() > 0, "the mean is {mean}", mean=nll.mean())
            return et.mean(nll), state, {}

        return loss


def resnet() -> Work:
    rng = np.random.default_rng(0)

    def nll(model: PyTree, state: PyTree, batch: PyTree) -> Any:
        logits, state = model(batch["image"], state)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), state

    batch = {
        "image": rng.normal(size=(64, 8, 8, 1)).astype(np.float32),
        "label": rng.integers(0, 10, 64).astype(np.int32),
    }

    def make(key: Any) -> Any:
        return eqx.nn.make_with_state(ResNet)(
            RESNET_TINY, channels=1, num_classes=10, stem="small", key=key
        )

    return Work(nll, make, optax.sgd(1e-3, momentum=0.9), batch, steps=10)


def llama() -> Work:
    config = LlamaConfig(512, 128, 4, 4, 2, 384)
    tokens = np.random.default_rng(0).integers(0, 512, (8, 65), np.int32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def nll(model: PyTree, state: PyTree, batch: PyTree) -> Any:
        return model.nll(batch["tokens"], batch["labels"]), state

    return Work(nll, lambda key: Llama(config, key=key), optax.adamw(1e-3), batch, steps=5)


class Contender:
    """One program, its state between runs, and the seconds a step of each run."""

    def __init__(self, name: str, work: Work, chain: tuple[Any, ...], loss: Any):
        self.name = name
        self.steps = work.steps
        self.program: Any = et.pipe(loss, *chain, et.donate)
        self.ts = self.program.init(work.make, key=jax.random.key(0))
        sharding = self.program.batch_sharding
        self.batch = work.batch if sharding is None else jax.device_put(work.batch, sharding)
        self.seconds: list[float] = []
        self.first_loss = 0.0

    def run(self, steps: int) -> Any:
        metrics: Any = None
        for _ in range(steps):
            self.ts, metrics = self.program(self.ts, self.batch)
        jax.block_until_ready(self.ts.leaves)
        return metrics

    def measure(self) -> None:
        start = time.perf_counter()
        self.run(self.steps)
        self.seconds.append((time.perf_counter() - start) / self.steps)


def checkified(loss: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's own way: all of its checks around the loss, whose error is a metric that is read."""

    def checked(model: PyTree, state: PyTree, batch: PyTree, key: Any) -> Any:
        arrays, static = eqx.partition((model, state), eqx.is_array)
        structure: Any = None

        def run(arrays: PyTree, batch: PyTree) -> Any:
            nonlocal structure
            out = loss(*eqx.combine(arrays, static), batch, key)
            dynamic, structure = eqx.partition(out, eqx.is_array)
            return dynamic

        # JAX's checkify fails in a gradient where a function has a derivative of its own.
        with (
            mock.patch.object(et, "matmul", jnp.matmul),
            mock.patch.multiple(convolution, matmul=jnp.matmul, _convolve=convolution._plain),
        ):
            error, out = checkify.checkify(run, errors=checkify.all_checks)(arrays, batch)
        value, state, metrics = eqx.combine(out, structure)
        failed = jnp.stack([jnp.asarray(pred) for pred in error._pred.values()]).any()
        return value, state, {**metrics, "failed": et.Max(failed.astype(jnp.int32))}

    return checked


def contenders_of(work: Work) -> list[Contender]:
    shard = et.shard(et.mesh(data=DEVICES), batch=P("data"))
    made = []
    for name, guard in GUARDS.items():
        chain = (et.accumulate(2), shard, et.update(work.optimizer), *([guard()] if guard else []))
        checked = name in ("user_checks", "all_checks")
        made.append(Contender(name, work, chain, work.loss(checked)))
    alone = (et.update(work.optimizer),)
    made.append(Contender("off_one", work, alone, work.loss(False)))
    made.append(Contender("checkify", work, alone, checkified(work.loss(False))))
    return made


def compare(contenders: list[Contender], rounds: int) -> dict[str, dict[str, Any]]:
    for contender in contenders:
        start = time.perf_counter()
        contender.first_loss = float(contender.run(1)["loss"])
        print(f"{contender.name}: first step {time.perf_counter() - start:.1f} s", flush=True)
    losses = {contender.first_loss for contender in contenders[:-2]}
    assert max(losses) - min(losses) < 1e-4, f"the contenders take different steps: {losses}"
    for _ in range(rounds):
        for contender in random.sample(contenders, len(contenders)):
            contender.measure()
    by_name = {contender.name: contender for contender in contenders}
    figures = {}
    for contender in contenders:
        base = by_name["off_one" if contender.name in ("off_one", "checkify") else "off"]
        ratios = [a / b for a, b in zip(contender.seconds, base.seconds, strict=True)]
        q1, median, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
        figures[contender.name] = {
            "step_ms": round(statistics.median(contender.seconds) * 1e3, 3),
            "over": base.name,
            "ratio": round(median, 4),
            "quartiles": [round(q1, 4), round(q3, 4)],
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="4 rounds, for a look only")
    args = parser.parse_args()
    rounds = 4 if args.quick else args.rounds
    make_cpu_devices(DEVICES)
    started = time.perf_counter()
    results = {}
    for work in (resnet, llama):
        print(work.__name__, flush=True)
        results[work.__name__] = compare(contenders_of(work()), rounds)
        jax.clear_caches()
    print(f"\n{'':8}{'contender':14}{'step, ms':>10}{'ratio':>8}  quartiles")
    for work, figures in results.items():
        for name, line in figures.items():
            low, high = line["quartiles"]
            print(
                f"{work:8}{name:14}{line['step_ms']:10.2f}{line['ratio']:8.3f}"
                f"  {low:.3f} - {high:.3f} over {line['over']}"
            )
    goals = {
        f"{work}: skip_spike <= {MOST_OVER_OFF} x off": figures["skip_spike"]["ratio"]
        <= MOST_OVER_OFF
        for work, figures in results.items()
    }
    final = {
        "benchmark": "guard",
        "results": results,
        "goals": goals,
        "rounds": rounds,
        "load_average": round(os.getloadavg()[0], 2),
        "seconds": round(time.perf_counter() - started, 1),
        **environment(),
    }
    print(json.dumps(final))


if __name__ == "__main__":
    main()
