"""Claim: a save in the background stops the loop for under 5% of what a blocking one takes.

    python benchmarks/checkpoint.py

Takes about a minute on two quiet cores, with 256 megabytes written some 20 times to the folder of
`--folder` (the system's for temporary files unless given); `--quick` takes 2 rounds of 64 megabytes
and is for a look only. Runs on the CPU, where the device's memory is the host's; needs the extra
`checkpoint`.

**The state.** Adam on a stack of square layers: random float32 parameters and two moments of each,
so that compression has little to find. A step multiplies a batch by all layers.

**The figures**, medians over rounds with their quartiles, in milliseconds:

- `step`: one step alone.
- `blocking`: from the call of `save` until all is on disk: `save` and `wait`. The step that made
  the state is over when the clock starts, here and in the next.
- `call`: of `save` alone, which is what the loop is stopped for.
- `beside`: what the steps take longer until the save is on disk, that is the sum of their times
  less as many times `step`. On a CPU the save and the steps share the cores; on an accelerator they
  do not.
- `restore`, with its check of every file, and `restore_unverified`.
- `disk_write`, `disk_read`: the same bytes from one array to one file with `fsync`, and back. Both
  reads may come from the system's cache.

`stall` is `call` over `blocking` within a round. The last line is JSON; `goals` says whether it is
under 0.05. Throughputs there are of the bytes of the state, in megabytes a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqtrain as et
from benchmarks.environment import environment

WIDTH = 1024
MOST_STALL = 0.05
MEGABYTE = 2**20


def make_program() -> et.Program:
    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), batch["x"], model)
        return et.mean((x**2).mean(-1)), state, {}

    return et.pipe(loss, et.update(optax.adam(1e-3)), et.donate)


def make_state(program: et.Program, megabytes: int) -> et.TrainState:
    layers = max(1, megabytes * MEGABYTE // (3 * 4 * WIDTH * WIDTH))

    def make(key: Any) -> Any:
        return jax.random.normal(key, (layers, WIDTH, WIDTH)) / WIDTH**0.5

    return program.init(make, key=jax.random.key(0))


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return 1e3 * (time.perf_counter() - start), result


def write_plain(path: Path, content: np.ndarray) -> None:
    with open(path, "wb") as file:
        file.write(content.data)
        file.flush()
        os.fsync(file.fileno())


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    program = make_program()
    ts = make_state(program, megabytes)
    size = sum(leaf.nbytes for leaf in ts.leaves)
    batch = {"x": np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)}
    plain = np.random.default_rng(1).integers(0, 255, size, np.uint8)
    times: dict[str, list[float]] = {}

    def note(name: str, milliseconds: float) -> None:
        times.setdefault(name, []).append(milliseconds)

    def step() -> None:
        nonlocal ts
        ts, metrics = program(ts, batch)
        jax.block_until_ready((ts.leaves, metrics))

    def read(verify: bool) -> tuple[Any, ...]:
        return et.checkpoint.restore(folder / "run", ts, verify=verify).leaves

    step()
    with et.checkpoint.Checkpoints(folder / "run", keep_last=1) as checkpoints:
        for number in range(rounds + 1):  # The first one warms up.
            alone = statistics.median(timed(step)[0] for _ in range(5))
            blocking = timed(lambda: (checkpoints.save(ts), checkpoints.wait()))[0]
            step()
            call = timed(lambda: checkpoints.save(ts))[0]
            beside = 0.0
            while not checkpoints.saved():
                beside += timed(step)[0] - alone
            checkpoints.wait()
            verified = timed(lambda: jax.block_until_ready(read(True)))[0]
            unverified = timed(lambda: jax.block_until_ready(read(False)))[0]
            written = timed(lambda: write_plain(folder / "plain", plain))[0]
            found = timed(lambda: np.fromfile(folder / "plain", np.uint8))[0]
            if number:
                note("step", alone)
                note("blocking", blocking)
                note("call", call)
                note("beside", beside)
                note("restore", verified)
                note("restore_unverified", unverified)
                note("disk_write", written)
                note("disk_read", found)
            step()
    stall = [a / b for a, b in zip(times["call"], times["blocking"], strict=True)]

    def throughput(name: str) -> float:
        return round(size / MEGABYTE / (statistics.median(times[name]) / 1e3), 1)

    return {
        "megabytes": round(size / MEGABYTE, 1),
        "milliseconds": {name: spread(values) for name, values in times.items()},
        "stall": spread(stall, 4),
        "megabytes_per_second": {
            name: throughput(name)
            for name in ("blocking", "restore", "restore_unverified", "disk_write", "disk_read")
        },
        "goals": {f"stall < {MOST_STALL}": statistics.median(stall) < MOST_STALL},
    }


def spread(values: list[float], digits: int = 1) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, digits), "quartiles": [round(low, digits), round(high, digits)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256, help="of the state")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="where to write; on the disk to be measured")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 64 MB, for a look only")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("Quartiles need `--rounds 2` at least.")
    megabytes, rounds = (64, 2) if args.quick else (args.megabytes, args.rounds)
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        found = measure(folder, megabytes, rounds)
    finally:
        shutil.rmtree(folder)
    for name, values in found["milliseconds"].items():
        print(f"{name:>20} {values['median']:>10.1f} ms")
    final = {
        "benchmark": "checkpoint",
        **found,
        "rounds": rounds,
        "load_average": round(os.getloadavg()[0], 2),
        "seconds": round(time.perf_counter() - started, 1),
        **environment(),
    }
    print(json.dumps(final))


if __name__ == "__main__":
    main()
