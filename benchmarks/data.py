"""Claim: the loader is not what a step waits for, and reading ahead hides what a source takes.

    python benchmarks/data.py

Takes about two minutes on two quiet cores; `--quick` takes 3 rounds in place of 15 and is for a
look only. Runs on the CPU. `grain`, `torch` and `rich` are used where they are installed.

**Throughput.** Shuffled batches of two sources that are in memory, one epoch after the other:

| source | rows | a row | batch |
| --- | --- | --- | --- |
| `digits` | 1,797 | 64 float32 and a label | 128 |
| `tokens` | 100,000 | 128 int32 and a mask of 128 | 16 |

| contender | what is asked for batches |
| --- | --- |
| `numpy` | `rng.permutation` once an epoch, and arrays indexed by a part of it: the most there is |
| `ours` | `et.data.Loader` on the arrays; it pads, carries a `weight` and can be resumed |
| `ours_rows` | the same on a class that gives one row at a time, as all below |
| `ours_threads` | that with `num_threads=2` |
| `grain` | `MapDataset.source(rows).shuffle().batch()` read by index, in this thread |
| `grain_threads` | the same through `to_iter_dataset()`, with Grain's own threads |
| `torch` | `DataLoader(shuffle=True)`, without workers |

Figures are examples a second and microseconds a batch. All contenders must give every row once an
epoch, which is checked first. In the last line, `step` is what a batch is for, in microseconds: of
`digits` a compiled step of an MLP (64, 256, 10), measured; of `tokens` what the matrix products of
a MiniLM (10.6 million parameters beside its embedding, 6 operations a token each) take at the
speed of a product of 1024 x 1024 matrices, measured.

**Overlap.** A source that waits for a fixed time for each batch, and a step that takes about as
long. `read` and `step` are one alone. `waiting` reads a batch, takes the step, waits for it and so
on. `plain` does not wait for the step, which JAX computes in the background. `prefetch_2` is
`et.data.prefetch(loader, depth=2)`, waiting for each step as one does who reads its metrics.

Every round goes through all contenders in an order drawn anew. What is printed is the median over
rounds, with its quartiles. Garbage is collected between measurements and never within.

**Expected:** a batch of `ours` takes at most a fifth of the step, for both sources; `prefetch_2` is
at most 1.15 x the longer of `read` and `step`, where `waiting` is about their sum. These are goals:
the last line, which is JSON, says under `goals` which of them came out.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqtrain as et
from benchmarks.environment import environment

Arrays = dict[str, np.ndarray]
Contender = Callable[[], Iterator[Any]]

BATCH = {"digits": 128, "tokens": 16}
MINILM_PARAMETERS = 10.6e6
MOST_OF_A_STEP = 0.2
MOST_OVER_LONGER = 1.15


class Rows:
    """One row at a time, of arrays."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays["id"])

    def __getitem__(self, index: Any) -> Arrays:
        return {name: array[index] for name, array in self._arrays.items()}


def make_source(name: str) -> Arrays:
    rng = np.random.default_rng(0)
    if name == "digits":
        x = rng.random((1797, 64), np.float32)
        return {"id": np.arange(1797), "x": x, "label": rng.integers(0, 10, 1797)}
    tokens = rng.integers(0, 30_522, (100_000, 128), np.int32)
    return {"id": np.arange(100_000), "tokens": tokens, "mask": tokens > 1000}


def numpy_batches(arrays: Arrays, batch_size: int) -> Iterator[Arrays]:
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(arrays["id"]))
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            yield {name: array[chosen] for name, array in arrays.items()}


def make_contenders(arrays: Arrays, batch_size: int) -> dict[str, Contender]:
    """For each, a function that starts an endless iterator over batches."""
    rows: Any = Rows(arrays)

    def ours(source: Any, num_threads: int = 0) -> Contender:
        return lambda: et.data.Loader(source, batch_size, num_threads=num_threads).iterate()

    found: dict[str, Contender] = {
        "numpy": lambda: numpy_batches(arrays, batch_size),
        "ours": ours(arrays),
        "ours_rows": ours(rows),
        "ours_threads": ours(rows, 2),
    }
    try:
        import grain

        def pipeline(epoch: int) -> Any:
            return grain.MapDataset.source(rows).shuffle(seed=epoch).batch(batch_size)

        def indexed() -> Iterator[Any]:
            for epoch in itertools.count():
                batches = pipeline(epoch)
                yield from (batches[i] for i in range(len(batches)))

        def threaded() -> Iterator[Any]:
            for epoch in itertools.count():
                # Little is read ahead, or a round would time batches that were read before it.
                options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
                yield from pipeline(epoch).to_iter_dataset(options)

        found |= {"grain": indexed, "grain_threads": threaded}
    except ImportError:
        pass
    try:
        import torch

        def torch_batches() -> Iterator[Any]:
            loader = torch.utils.data.DataLoader(rows, batch_size, shuffle=True)
            while True:
                yield from loader

        found["torch"] = torch_batches
    except ImportError:
        pass
    return found


def check_rows(name: str, batches: Iterator[Any], num_rows: int, batch_size: int) -> None:
    """Every row has to come once in the first epoch."""
    ids = []
    for batch in itertools.islice(batches, -(-num_rows // batch_size)):
        weight = np.asarray(batch.get("weight", np.ones(len(batch["id"]))))
        ids.append(np.asarray(batch["id"])[weight > 0])
    if not np.array_equal(np.sort(np.concatenate(ids)), np.arange(num_rows)):
        raise RuntimeError(f"`{name}` must give each of {num_rows} rows once. Got others.")


def timed(take: Callable[[], Any]) -> float:
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    take()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds


def measure_throughput(source: str, rounds: int, num_batches: int) -> dict[str, list[float]]:
    """Microseconds a batch, one figure a round, for each contender."""
    arrays, batch_size = make_source(source), BATCH[source]
    running: dict[str, Iterator[Any]] = {}
    for name, start in make_contenders(arrays, batch_size).items():
        check_rows(name, start(), len(arrays["id"]), batch_size)
        running[name] = start()
        next(running[name])
    figures: dict[str, list[float]] = {name: [] for name in running}
    order, shuffle = list(running), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            batches = running[name]
            seconds = timed(lambda: list(itertools.islice(batches, num_batches)))  # noqa: B023
            figures[name].append(seconds * 1e6 / num_batches)
    for batches in running.values():
        close = getattr(batches, "close", None)
        if close is not None:
            close()
    return figures


def digits_step() -> Callable[[], None]:
    """Takes a step on a batch that is there already, and waits for it."""

    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        logits = jax.vmap(model)(batch["x"])
        return (
            et.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])),
            state,
            {},
        )

    step = et.pipe(loss, et.update(optax.adam(1e-3)), et.donate)
    make = lambda key: eqx.nn.MLP(64, 10, 256, 1, key=key)  # noqa: E731
    held = [step.init(make, key=jax.random.key(0))]
    batch = {"x": jnp.ones((128, 64)), "y": jnp.zeros(128, jnp.int32)}

    def take() -> None:
        held[0], metrics = step(held[0], batch)
        jax.block_until_ready(metrics)

    return take


def tokens_step() -> tuple[Callable[[], None], float]:
    """A product of matrices, and how many of them are the least that a MiniLM's step computes."""
    matrix = jnp.ones((1024, 1024))
    multiply = jax.jit(jnp.matmul)
    operations = 6 * MINILM_PARAMETERS * BATCH["tokens"] * 128
    return lambda: jax.block_until_ready(multiply(matrix, matrix)), operations / (2 * 1024**3)


def measure_steps(rounds: int) -> dict[str, list[float]]:
    """Microseconds, one figure a round."""
    product, count = tokens_step()
    takes = {"digits": (digits_step(), 1.0), "tokens": (product, count)}
    figures: dict[str, list[float]] = {name: [] for name in takes}
    for name, (take, scale) in takes.items():
        take()
        for _ in range(rounds):
            seconds = timed(lambda: [take() for _ in range(20)])  # noqa: B023
            figures[name].append(seconds / 20 * scale * 1e6)
    return figures


class Waiting:
    """Rows that take a fixed time a batch to come."""

    def __init__(self, arrays: Arrays, seconds: float) -> None:
        self._arrays = arrays
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._arrays["id"])

    def __getitem__(self, index: int) -> Arrays:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Arrays]:
        time.sleep(self._seconds)
        return [{name: array[i] for name, array in self._arrays.items()} for i in indices]


def measure_overlap(rounds: int, num_steps: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds a step, one figure a round, for each way of reading."""
    arrays = make_source("digits")

    @jax.jit
    def step(total: Any, batch: Any, repeats: Any) -> Any:
        matrix = jnp.full((256, 256), total * 1e-9 + batch["x"].mean() * 1e-9)
        product = jax.lax.fori_loop(0, repeats, lambda _, m: (m @ m) * 1e-3 + 1e-3, matrix)
        return product.mean()

    def loader() -> et.data.Loader:
        return et.data.Loader(Waiting(arrays, seconds), 128)

    held = et.data.Loader(arrays, 128).batch(0)
    zero = jnp.zeros(())

    def alone(repeats: int) -> float:
        times = [timed(lambda: step(zero, held, repeats).block_until_ready()) for _ in range(5)]
        return statistics.median(times)

    # As many products as take about as long as the source.
    alone(1)
    repeats = max(round(1000 * seconds / alone(1000)), 1)

    def read() -> None:
        for _ in itertools.islice(loader(), num_steps):
            pass

    def compute() -> None:
        for _ in range(num_steps):
            step(zero, held, repeats).block_until_ready()

    def waiting() -> None:
        for batch in itertools.islice(loader(), num_steps):
            step(zero, batch, repeats).block_until_ready()

    def plain() -> None:
        total = zero
        for batch in itertools.islice(loader(), num_steps):
            total = step(total, batch, repeats)
        total.block_until_ready()

    def prefetch_2() -> None:
        with et.data.prefetch(loader(), depth=2) as batches:
            for batch in itertools.islice(batches, num_steps):
                step(zero, batch, repeats).block_until_ready()

    takes = {
        "read": read,
        "step": compute,
        "waiting": waiting,
        "plain": plain,
        "prefetch_2": prefetch_2,
    }
    figures: dict[str, list[float]] = {name: [] for name in takes}
    order, shuffle = list(takes), random.Random(0).shuffle
    for round_ in range(rounds + 1):
        shuffle(order)
        for name in order:
            elapsed = timed(takes[name])
            if round_:  # the first is for the caches
                figures[name].append(elapsed * 1e6 / num_steps)
    return figures


def spread(values: list[float], digits: int = 1) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, digits), "q1": round(q1, digits), "q3": round(q3, digits)}


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in [header, *rows]:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        return
    table = Table(title=title)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    # A table that is written to a file must not be folded to the width of a terminal.
    (console if console.is_terminal else Console(width=140)).print(table)


def quartiles(value: dict[str, float]) -> str:
    return f"{value['q1']:,.1f} - {value['q3']:,.1f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=200, help="timed batches a round")
    parser.add_argument("--steps", type=int, default=30, help="timed steps a round, for overlap")
    parser.add_argument("--delay", type=float, default=0.01, help="seconds a batch, for overlap")
    parser.add_argument("--quick", action="store_true", help="3 rounds, for a look only")
    args = parser.parse_args()
    if args.rounds < 2 or args.batches < 1 or args.steps < 1 or args.delay <= 0:
        parser.error("Quartiles need `--rounds 2` at least, and each round a batch and a step.")
    return args


def main() -> None:
    args = arguments()
    rounds = 3 if args.quick else args.rounds
    started = time.perf_counter()
    lines, goals = [], {}
    steps = {name: spread(values) for name, values in measure_steps(rounds).items()}
    for source, batch_size in BATCH.items():
        figures = measure_throughput(source, rounds, args.batches)
        table = []
        for name, values in figures.items():
            per_batch = spread(values)
            rate = batch_size * 1e6 / per_batch["median"]
            lines.append(
                {
                    "benchmark": "data",
                    "source": source,
                    "contender": name,
                    "us_a_batch": per_batch,
                    "examples_a_second": round(rate),
                }
            )
            table.append(
                [name, f"{rate:,.0f}", f"{per_batch['median']:,.1f}", quartiles(per_batch)]
            )
        header = ["contender", "examples/s", "us a batch", "quartiles"]
        print_table(f"{source}, batches of {batch_size}", header, table)
        part = statistics.median(figures["ours"]) / steps[source]["median"]
        goals[f"{source}: ours <= {MOST_OF_A_STEP} of a step"] = part <= MOST_OF_A_STEP
    overlap = {n: spread(v) for n, v in measure_overlap(rounds, args.steps, args.delay).items()}
    table = [[n, f"{value['median']:,.1f}", quartiles(value)] for n, value in overlap.items()]
    print_table("Overlap", ["way of reading", "us a step", "quartiles"], table)
    longer = max(overlap["read"]["median"], overlap["step"]["median"])
    goals[f"prefetch_2 <= {MOST_OVER_LONGER} of the longer of read and step"] = (
        overlap["prefetch_2"]["median"] <= MOST_OVER_LONGER * longer
    )
    for line in lines:
        print(json.dumps(line))
    final = {
        "benchmark": "data",
        "step_us": steps,
        "overlap_us": overlap,
        "goals": goals,
        "rounds": rounds,
        "batches": args.batches,
        "steps": args.steps,
        "delay": args.delay,
        "load_average": round(os.getloadavg()[0], 2),
        "seconds": round(time.perf_counter() - started, 1),
        **environment(),
    }
    if importlib.util.find_spec("grain"):
        final["versions"]["grain"] = importlib.metadata.version("grain")
    print(json.dumps(final))


if __name__ == "__main__":
    main()
