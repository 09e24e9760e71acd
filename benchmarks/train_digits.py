"""Trains a small ResNet with BatchNorm on pictures of digits, and measures that: the job of
`examples/digits.py`, which is the one to read.

    python benchmarks/train_digits.py
    python benchmarks/train_digits.py --devices 8 --precision bfloat16 --dataset mnist5k

Needs the extra `bench`. The default takes well under 40 s on two cores, compilation included, and
ends at 98% test accuracy or more. It prints a table, leaves a run folder with `metrics.jsonl` and
`curves.png`, and its last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import eqtrain as et
from benchmarks import datasets
from benchmarks.environment import environment, make_cpu_devices
from benchmarks.run_folder import RunFolder
from examples.digits import measures, shifted
from models.resnet import RESNET_TINY, ResNet

Rows = dict[str, np.ndarray]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", choices=datasets.LOADERS, default="digits")
    parser.add_argument("--devices", type=int, default=4, help="CPU devices to make")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches a step")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "float16"), default="float32"
    )
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--batch-size", type=int, default=128, help="rows of the global batch")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20, help="steps")
    parser.add_argument("--run", type=Path, help="folder of the run")
    return parser.parse_args()


def make_programs(args: argparse.Namespace) -> tuple[et.Program, et.Evaluation]:
    """The training step and the evaluation, on all devices that there are."""
    mesh = et.mesh(data=-1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, args.steps // 10, args.steps
    )
    # Weights of convolutions and of the head decay; the norms' scales and all biases do not.
    optimizer = optax.adamw(schedule, weight_decay=0.05, mask=et.matching("weight$", but="norm"))

    @et.donate
    @et.guard(nonfinite="skip")
    @et.update(optimizer)
    @et.shard(mesh, batch=P("data"))
    @et.accumulate(args.accumulate)
    @et.precision(args.precision)
    def train_step(model: Any, state: Any, batch: Any, key: Any) -> Any:
        images = jax.vmap(shifted)(batch["image"], key)  # one key an example
        logits, state = model(images, state, where=batch["weight"])
        return measures(logits, batch, state)

    @et.evaluate
    @et.shard(mesh, batch=P("data"))
    @et.precision(args.precision)
    def evaluate(model: Any, state: Any, batch: Any, key: Any) -> Any:
        logits, state = eqx.nn.inference_mode(model)(batch["image"], state)
        return measures(logits, batch, state)

    return train_step, evaluate


def fit(args: argparse.Namespace, train: Rows, test: Rows, run: RunFolder) -> dict[str, Any]:
    """Trains and evaluates; the figures of the run."""
    train_step, evaluate = make_programs(args)
    channels = train["image"].shape[-1]
    num_classes = int(train["label"].max()) + 1

    def make(key: Any) -> Any:
        return eqx.nn.make_with_state(ResNet)(
            RESNET_TINY, channels=channels, num_classes=num_classes, stem="small", key=key
        )

    def test_metrics(ts: et.TrainState) -> dict[str, float]:
        loader = et.data.Loader(test, args.batch_size, shuffle=False, epochs=1)
        return et.fetch(et.merge(*[evaluate(ts, batch) for batch in loader]))

    start = time.perf_counter()
    ts = train_step.init(make, key=jax.random.key(args.seed))
    jax.block_until_ready(ts.leaves)
    seconds = {"init_seconds": time.perf_counter() - start}
    loader = et.data.Loader(train, args.batch_size, seed=args.seed)
    window: list[Any] = []
    with et.data.prefetch(loader, train_step.batch_sharding) as batches:
        batch = next(batches)
        start = time.perf_counter()
        ts, metrics = train_step(ts, batch)
        jax.block_until_ready(ts.leaves)
        seconds["compile_seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        for step in range(1, args.steps + 1):
            if step > 1:
                batch = next(batches)
                ts, metrics = train_step(ts, batch)
            window.append(metrics)
            if step % args.log_every == 0 or step == args.steps:
                logged = et.fetch(et.merge(*window))
                run.write({"step": step, **{f"train_{name}": v for name, v in logged.items()}})
                run.show(step, f"loss {logged['loss']:.4f}  accuracy {logged['accuracy']:.1%}")
                window.clear()
        jax.block_until_ready(ts.leaves)
        train_seconds = time.perf_counter() - start
    train_step.check(ts)
    tested = test_metrics(ts)
    run.write({"step": args.steps, **{f"test_{name}": value for name, value in tested.items()}})
    inspection = train_step.inspect(ts, batch)
    return {
        "test_accuracy": tested["accuracy"],
        "test_loss": tested["loss"],
        "skipped_steps": int(ts.extra["guard"]["skipped"]),
        "steps_per_second": (args.steps - 1) / train_seconds,
        "examples_per_second": (args.steps - 1) * args.batch_size / train_seconds,
        **seconds,
        "compilations": train_step.compilations,
        "collectives_per_step": sum(collective.times for collective in inspection.collectives),
        "collective_bytes_per_step": sum(
            collective.times * collective.bytes for collective in inspection.collectives
        ),
        "donated_bytes": inspection.donated_bytes,
    }


def main() -> None:
    args = arguments()
    make_cpu_devices(args.devices)
    started = time.perf_counter()
    console = Console()
    run = RunFolder(args.dataset, args.run, console)
    train, test = datasets.load(args.dataset)

    with run.steps(args.steps):
        figures = fit(args, train, test, run)

    figures["total_seconds"] = time.perf_counter() - started
    plot(run.lines, figures, args, run.path / "curves.png")
    console.print(table(figures, args))
    console.print(f"The run is in {run.path}/: metrics.jsonl, curves.png")
    settings = {name: value for name, value in vars(args).items() if name != "run"}
    print(json.dumps({"benchmark": "train_digits", **figures, **settings, **environment()}))


def table(figures: dict[str, Any], args: argparse.Namespace) -> Table:
    grid = Table(
        title=f"ResNet on {args.dataset}: {args.devices} devices, {args.accumulate} microbatches, "
        f"{args.precision}",
        title_justify="left",
        show_header=False,
    )
    for name, value in (
        ("test accuracy", f"{figures['test_accuracy']:.2%}"),
        ("steps/s", f"{figures['steps_per_second']:.1f}"),
        ("examples/s", f"{figures['examples_per_second']:,.0f}"),
        ("compile time", f"{figures['compile_seconds']:.1f} s"),
        ("compilations", f"{figures['compilations']}"),
        ("collectives a step", f"{figures['collectives_per_step']}"),
        ("bytes of those", f"{figures['collective_bytes_per_step']:,}"),
        ("skipped steps", f"{figures['skipped_steps']}"),
        ("whole run", f"{figures['total_seconds']:.1f} s"),
    ):
        grid.add_row(name, value)
    return grid


def plot(
    lines: list[dict[str, Any]], figures: dict[str, Any], args: argparse.Namespace, path: Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trained = [line for line in lines if "train_loss" in line]
    steps = [line["step"] for line in trained]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(steps, [line["train_loss"] for line in trained])
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    right.plot(steps, [line["train_accuracy"] for line in trained], label="training")
    right.axhline(
        figures["test_accuracy"],
        color="C1",
        linestyle="--",
        label=f"test, at the end: {figures['test_accuracy']:.2%}",
    )
    right.set(xlabel="step", ylabel="accuracy")
    right.legend(loc="lower right")
    figure.suptitle(f"{args.dataset}, {args.devices} devices, {args.precision}")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
