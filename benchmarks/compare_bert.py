"""Claim: a training step of BERT takes ours less time than any peer takes, little more than its
matrix products alone, and no more memory.

    python benchmarks/compare_bert.py
    python benchmarks/compare_bert.py --quick
    python benchmarks/compare_bert.py --finetune

Needs the extras `bench` and `test`. About ten minutes on two free cores; `--quick` is a look with
few rounds at a small batch. Runs on the CPU, with as many threads as cores, in float32.

**The step.** AdamW on the mean cross-entropy of 25 classes, from the weights of MiniLM (22.7
million parameters, 6 layers, 384 wide), on ragged rows with a padding mask, dropout of 0.1 wherever
BERT has it. Weights and batch are the same for all; and so must be the losses of the first three
steps without dropout, to 1e-4, or the run stops.

| contender | what it is |
| --- | --- |
| `eqtrain` | the step of `finetune_bert.py`: `et.pipe(loss, et.update(...), et.guard, et.donate)` |
| `torch` | transformers' BertForSequenceClassification, eager, sdpa attention, fused AdamW |
| `torch_compile` | the same under `torch.compile` |
| `plain_jax` | Equinox's own example of a BERT: `filter_jit`, dropout by `jax.random` |
| `nnx` | Flax NNX: `nnx.MultiHeadAttention`, `nnx.Optimizer`, `nnx.jit` |
| `products` | the matrix products of that step alone, by XLA: the floor |

**The figures.** Each contender is a process of its own, which waits while another is measured.
Every round goes through all of them in an order drawn anew. `step` is two steps and the wait for
them, divided by two, after one that is not counted; printed are medians over rounds with their
quartiles, and the medians of the ratios within a round. `ready` is from weights to the end of the
first step, with compilation. `peak` is the most that the process ever held.

**The whole job**, with `--finetune`: `finetune_bert.py` and `peers/torch_bert.py` one after the
other, from the start of each process to its end: imports, compilation, an epoch, evaluation. Ours
runs twice, and the second time finds the compilations of the first in JAX's persistent cache.
`--limit` takes fewer rows.

**Expected:** the goals that the last line, which is JSON, says under `goals` came out or did not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import ENVIRONMENT, HERE, Contender, cells_of, measure, print_table
from benchmarks.peers import products_bert
from benchmarks.report import Report
from benchmarks.sharding import paired, require_same_losses, spread

SCRIPTS = {
    "eqtrain": ["eqtrain_bert.py"],
    "torch": ["torch_bert.py", "--serve"],
    "torch_compile": ["torch_bert.py", "--serve", "--compile"],
    "plain_jax": ["plain_jax_bert.py"],
    "nnx": ["nnx_bert.py"],
    "products": ["products_bert.py"],
}
TORCH = ("torch", "torch_compile")


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a batch."""

    rows: int
    length: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"


def steps_part(
    size: Size, names: list[str], rounds: int, steps: int, folder: Path, check: bool
) -> list[dict[str, Any]]:
    """Measures all contenders at one size; a JSON line for each."""
    with contextlib.ExitStack() as stack:
        contenders = []
        for name in names:
            contender = Contender(name, SCRIPTS[name], folder / f"{name}-{size.rows}.log")
            stack.callback(contender.close)
            contender.make(dataclasses.asdict(size), dropout=0.1)
            contenders.append(contender)
        measure(contenders, rounds, steps)
        if check:  # last, so that it is in no figure
            models = [contender for contender in contenders if contender.name != "products"]
            small = dataclasses.asdict(Size(4, 16))
            require_same_losses(
                {model.name: model.first_losses(small, dropout=0.0) for model in models}
            )
    by_name = {contender.name: contender for contender in contenders}
    lines = []
    for contender in contenders:
        line: dict[str, Any] = {
            "benchmark": "compare_bert",
            "size": str(size),
            "contender": contender.name,
            "step_ms": spread(contender.step_ms),
            "ready_seconds": round(contender.ready_seconds, 1),
            "peak_bytes": contender.peak_bytes,
        }
        for other in ("eqtrain", "products"):
            if other in by_name and other != contender.name:
                line[f"over_{other}"] = paired(contender.step_ms, by_name[other].step_ms)
        if contender.name == "products":
            flops = products_bert.flops(size.rows, size.length)
            line["gflops"] = round(flops / 1e6 / line["step_ms"]["median"], 1)
        lines.append(line)
    return lines


def goals_of(lines: list[dict[str, Any]]) -> dict[str, bool]:
    """Which goals came out, at each size."""
    goals = {}
    for size in dict.fromkeys(line["size"] for line in lines):
        found = {line["contender"]: line for line in lines if line["size"] == size}
        ours, peers = found.get("eqtrain"), [found[name] for name in TORCH if name in found]
        if ours is None:
            continue
        if peers:
            best = min(peer["over_eqtrain"]["median"] for peer in peers)
            goals[f"{size}: best of PyTorch over ours >= 1.3"] = best >= 1.3
            least = min(peer["peak_bytes"] for peer in peers)
            goals[f"{size}: peak no more than PyTorch's"] = ours["peak_bytes"] <= least
        if "over_products" in ours:
            floor = ours["over_products"]["median"]
            goals[f"{size}: ours over products <= 1.3"] = floor <= 1.3
    return goals


def finetune_part(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs the whole job once in each way; a JSON line for each."""
    shared = ["--dataset", args.dataset, "--epochs", str(args.epochs)]
    if args.limit is not None:
        shared += ["--limit", str(args.limit)]
    ours = ["finetune_bert.py", "--no-baseline", "--run", str(folder / "run")]
    commands = {
        "eqtrain": ours,
        "eqtrain, warm cache": ours,
        "torch": ["peers/torch_bert.py"],
        "torch_compile": ["peers/torch_bert.py", "--compile"],
    }
    settings = {
        "JAX_PLATFORMS": "cpu",
        **ENVIRONMENT,
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    lines = []
    for name, (script, *options) in commands.items():
        if args.contenders and name.split(",")[0] not in args.contenders:
            continue
        start = time.perf_counter()
        result = subprocess.run(
            [sys.executable, str(HERE / script), *options, *shared],
            capture_output=True,
            text=True,
            cwd=HERE.parent,
            env={**os.environ, **settings},
        )
        if result.returncode:
            raise RuntimeError(f"`{name}` ended: {result.stderr[-2000:]}")
        line = json.loads(result.stdout.splitlines()[-1])
        wanted = ("test_accuracy", "train_seconds", "compile_seconds", "peak_bytes")
        figures = {key: line[key] for key in wanted if key in line}
        seconds = round(time.perf_counter() - start, 1)
        lines.append({"benchmark": "compare_bert", "job": name, "seconds": seconds, **figures})
        print(f"{name}: {seconds} s", flush=True)
    return lines


def rows_of(lines: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table of steps."""
    header = ["batch", "contender", "step ms", "quartiles", "over ours", "over products"]
    header += ["ready s", "peak GB"]
    return header, [
        [line["size"], line["contender"], *cells_of(line, ("eqtrain", "products"))]
        for line in lines
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps a contender takes in a round")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32], help="of a batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--contenders", nargs="+", choices=SCRIPTS)
    parser.add_argument("--quick", action="store_true", help="for a look only")
    parser.add_argument("--finetune", action="store_true", help="the whole job in place of steps")
    parser.add_argument("--dataset", choices=("wordnet", "newsgroups"), default="wordnet")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--limit", type=int, help="rows of the whole job")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.rows, args.length = 2, [4], 32
    if args.rounds < 2 or args.steps < 1:
        parser.error("Quartiles need `--rounds 2` at least, and each round a step.")
    return args


def main() -> None:
    args = arguments()
    report = Report("compare_bert")
    goals: dict[str, bool] = {}
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if args.finetune:
            lines = finetune_part(args, Path(folder))
            header = ["job", "seconds", "accuracy", "peak GB"]
            rows = [
                [
                    line["job"],
                    f"{line['seconds']:.1f}",
                    f"{line['test_accuracy']:.2%}",
                    f"{line['peak_bytes'] / 1e9:.2f}",
                ]
                for line in lines
            ]
            print_table("The whole job, each once", header, rows)
            seconds = {line["job"]: line["seconds"] for line in lines}
            peers = [seconds[name] for name in TORCH if name in seconds]
            if peers and "eqtrain" in seconds:
                met = min(peers) / seconds["eqtrain"] >= 1.5
                goals["whole job: best of PyTorch over ours >= 1.5"] = met
        else:
            names = args.contenders or list(SCRIPTS)
            for index, rows in enumerate(args.rows):
                size = Size(rows, args.length)
                lines += steps_part(
                    size, names, args.rounds, args.steps, Path(folder), check=index == 0
                )
                print(f"{size} measured after {report.seconds:.0f} s", flush=True)
            title = "A step: medians over rounds, ratios within a round"
            print_table(title, *rows_of(lines))
            goals = goals_of(lines)
    report.end(
        lines,
        goals,
        rounds=args.rounds,
        steps=args.steps,
        quick=args.quick,
        limit=args.limit,
    )


if __name__ == "__main__":
    main()
