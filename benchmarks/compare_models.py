"""Claim: training steps of ResNets and of a Llama take ours less time than PyTorch takes, and no
more memory.

    python benchmarks/compare_models.py
    python benchmarks/compare_models.py --quick
    python benchmarks/compare_models.py --models llama llama_remat

Needs the extras `bench` and `test`. About fifteen minutes on two free cores; `--quick` is a look at
tiny models, and its times mean nothing. Runs on the CPU, with as many threads as cores, in float32.

**The steps.** The mean cross-entropy of made-up batches. SGD with momentum and weight decay for
ResNets, whose BatchNorms train; AdamW for the Llama. First weights and batch are the same for all,
carried over by `et.interop`; and so must be the losses of the first three steps, to 1e-4, or the
run stops. For that the blocks of ResNets start as their shortcuts. Else PyTorch's own loss of the
ResNet-50 in the second step is 1% off from what it is in float64, and so is ours: the last
BatchNorms see 64 numbers a channel, and make rounding errors large.

| model | batch | what it is |
| --- | --- | --- |
| `resnet18` | 64 x 32 x 32 x 3 | 10 classes, the stem for small images: 3x3, stride 1, no pool |
| `resnet50` | 16 x 64 x 64 x 3 | 1000 classes, ImageNet's stem: 7x7, stride 2, and a pool |
| `llama` | 4 x 512 | `LLAMA_25M`: 6 layers, 512 wide, 8 and 4 heads, 8192 tokens |
| `llama_remat` | 4 x 512 | the same, each layer computed again in the backward pass |

| contender | what it is |
| --- | --- |
| `eqtrain` | `et.pipe(loss, et.update(...), et.guard, et.donate)` of `models/`; their own remat |
| `torch` | transformers' models, eager, fused optimizers, channels_last, sdpa, checkpointing |
| `torch_compile` | the same, the loss with the model under `torch.compile` |

**The figures.** Each contender is a process of its own, with the same environment, which waits
while another is measured. Every round goes through all of them in an order drawn anew. `step` is
two steps and the wait for them, divided by two, after one that is not counted; printed are medians
over rounds with their quartiles, and the medians of the ratios within a round. `ready` is from
weights to the end of the first step, with compilation. `peak` is the most that the process ever
held.

**Expected:** ResNets at least 1.1 times as fast as the better of PyTorch's, the Llama 1.3 times,
and peaks no more than the least of PyTorch's. These are goals: the last line, which is JSON, says
under `goals` which of them came out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import COMPARED, Contender, cells_of, measure, print_table
from benchmarks.peers.eqtrain_models import write_weights
from benchmarks.report import Report
from benchmarks.sharding import paired, require_same_losses, spread
from models.llama import LLAMA_25M, LLAMA_TINY, LlamaConfig
from models.resnet import RESNET_18, RESNET_50, Size

SCRIPTS = {
    "eqtrain": ["eqtrain_models.py"],
    "torch": ["torch_models.py"],
    "torch_compile": ["torch_models.py", "--compile"],
}
TORCH = ("torch", "torch_compile")


@dataclasses.dataclass(frozen=True)
class Job:
    """A model and its batch, as requests have them, and what is asked of our step."""

    config: dict[str, Any]
    batch: dict[str, Any]
    least: float

    def __str__(self) -> str:
        batch = self.batch
        if batch["kind"] == "llama":
            return f"{batch['rows']} x {batch['length']}"
        return f"{batch['rows']} x {batch['side']} x {batch['side']} x 3"


def resnet_job(
    size: Size, stem: str, *, rows: int, side: int, classes: int, shortcuts: bool = True
) -> Job:
    config = {**dataclasses.asdict(size), "kind": "resnet", "stem": stem, "num_classes": classes}
    config["zero_last_scale"] = shortcuts
    batch = {"kind": "resnet", "rows": rows, "side": side, "classes": classes}
    return Job(config, batch, least=1.1)


def llama_job(config: LlamaConfig, *, remat: bool, rows: int, length: int) -> Job:
    batch = {"kind": "llama", "rows": rows, "length": length, "vocabulary": config.vocab_size}
    settings = {**dataclasses.asdict(config), "kind": "llama", "remat": remat}
    return Job(settings, batch, least=1.3)


JOBS = {
    "resnet18": resnet_job(RESNET_18, "small", rows=64, side=32, classes=10),
    "resnet50": resnet_job(RESNET_50, "imagenet", rows=16, side=64, classes=1000),
    "llama": llama_job(LLAMA_25M, remat=False, rows=4, length=512),
    "llama_remat": llama_job(LLAMA_25M, remat=True, rows=4, length=512),
}
# The same kinds of layers, for a look and for tests; small enough for all to be at work from the
# first step.
TINY_JOBS = {
    "resnet18": resnet_job(
        Size((1, 1), (8, 16)), "small", rows=8, side=8, classes=10, shortcuts=False
    ),
    "resnet50": resnet_job(
        Size((1,), (8,), bottleneck=True), "imagenet", rows=8, side=16, classes=10, shortcuts=False
    ),
    "llama": llama_job(LLAMA_TINY, remat=False, rows=2, length=16),
    "llama_remat": llama_job(LLAMA_TINY, remat=True, rows=2, length=16),
}


def compare(
    model: str, job: Job, names: list[str], rounds: int, steps: int, folder: Path
) -> list[dict[str, Any]]:
    """Measures all contenders at one model; a JSON line for each."""
    weights = folder / f"{model}.safetensors"
    write_weights(weights, job.config)
    with contextlib.ExitStack() as stack:
        contenders, losses = [], {}
        for name in names:
            contender = Contender(name, SCRIPTS[name], folder / f"{name}-{model}.log")
            stack.callback(contender.close)
            first = contender.make(job.batch, config=job.config, weights=str(weights))
            more = [contender.ask("run", steps=1)["loss"] for _ in range(COMPARED - 1)]
            losses[name] = [first, *more]
            contenders.append(contender)
        require_same_losses(losses)
        measure(contenders, rounds, steps)
    ours = next((one for one in contenders if one.name == "eqtrain"), None)
    lines = []
    for contender in contenders:
        line: dict[str, Any] = {
            "benchmark": "compare_models",
            "model": model,
            "batch": str(job),
            "contender": contender.name,
            "step_ms": spread(contender.step_ms),
            "ready_seconds": round(contender.ready_seconds, 1),
            "peak_bytes": contender.peak_bytes,
            "losses": losses[contender.name],
        }
        if ours is not None and contender is not ours:
            line["over_eqtrain"] = paired(contender.step_ms, ours.step_ms)
        lines.append(line)
    return lines


def goals_of(lines: list[dict[str, Any]]) -> dict[str, bool]:
    """Which goals came out, of each model."""
    goals = {}
    for model in dict.fromkeys(line["model"] for line in lines):
        found = {line["contender"]: line for line in lines if line["model"] == model}
        ours, peers = found.get("eqtrain"), [found[name] for name in TORCH if name in found]
        if ours is None or not peers:
            continue
        least = JOBS[model].least
        best = min(peer["over_eqtrain"]["median"] for peer in peers)
        goals[f"{model}: best of PyTorch over ours >= {least}"] = best >= least
        peak = min(peer["peak_bytes"] for peer in peers)
        goals[f"{model}: peak no more than PyTorch's"] = ours["peak_bytes"] <= peak
    return goals


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps a contender takes in a round")
    parser.add_argument("--models", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--contenders", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--quick", action="store_true", help="tiny models, for a look only")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 2
    if args.rounds < 2 or args.steps < 1:
        parser.error("Quartiles need `--rounds 2` at least, and each round a step.")
    return args


def main() -> None:
    args = arguments()
    report = Report("compare_models")
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            job = (TINY_JOBS if args.quick else JOBS)[model]
            lines += compare(model, job, args.contenders, args.rounds, args.steps, Path(folder))
            print(f"{model} measured after {report.seconds:.0f} s", flush=True)
    header = ["model", "contender", "step ms", "quartiles", "over ours", "ready s", "peak GB"]
    rows = [
        [f"{line['model']}, {line['batch']}", line["contender"], *cells_of(line, ("eqtrain",))]
        for line in lines
    ]
    print_table("A step: medians over rounds, ratios within a round", header, rows)
    report.end(
        lines,
        goals_of(lines),
        rounds=args.rounds,
        steps=args.steps,
        quick=args.quick,
    )


if __name__ == "__main__":
    main()
