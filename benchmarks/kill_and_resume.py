"""Claim: a run that is killed at any moment, and resumed, ends as one that never was: bit for bit.

    python benchmarks/kill_and_resume.py --kills 50

Takes about 3 seconds a kill on two cores. Runs on the CPU; needs the extra `checkpoint`.

A child process trains a small network with all that carries something from step to step: dropout,
BatchNorm, an average of the parameters, a schedule, momentum, a float16 loss scale that grows and
shrinks, accumulation, a guard, and a shuffled loader of packed sequences, with a padded last batch,
behind a prefetch. It saves every third step. It is killed by SIGKILL at a random moment: nine times
of ten while it trains and saves, else while it starts, compiles and restores. Then it is started
again in the same folder, with another prefetch depth, until it comes to its end; and then the next
run begins, until there were so many kills.

Each step's loss and the ids of its rows are logged by the child, also those of steps that are done
again after a kill. All must equal those of a run that was left alone, and so must every array of
the last TrainState.

The last line is JSON. `steps_redone` are those that were done again, `in_a_save` and `in_a_start`
say what the kills met, and `bytes_lost` are those of checkpoints that were there when the child was
killed and that the next one did not go on from. `equal` says whether all was.

**Expected:** `equal` is true and `bytes_lost` 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROWS, BATCH, WIDTH, CLASSES = 140, 8, 16, 4
# Rows of 1 to 6 tokens are packed into sequences of so many.
LENGTH = 8
SAVE_EVERY = 3
STEPS = 150
# The most steps that a child takes before it is killed, on a machine of whatever speed, and the
# longest that it lives on then; and the time that it takes to start.
MOST_STEPS, LONGEST, START = 9, 0.1, 4.0


def make_source() -> list[dict[str, Any]]:
    """Rows of several tokens, each of which knows its row."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [
        {
            "id": np.full(length, row, np.int32),
            "x": rng.normal(size=(length, WIDTH)).astype(np.float32),
            "label": rng.integers(0, CLASSES, length).astype(np.int32),
        }
        for row, length in enumerate(rng.integers(1, 7, ROWS))
    ]


def make_loader(epochs: int | None = None) -> Any:
    import eqtrain as et

    packed = et.data.pack(make_source(), LENGTH, pad={"id": -1, "x": 0, "label": 0})
    return et.data.Loader(packed, batch_size=BATCH, seed=5, epochs=epochs)


def make_network(key: Any) -> Any:
    """A network with dropout and BatchNorm, and the state of the latter."""
    import equinox as eqx

    return eqx.nn.make_with_state(_network_class())(key)


def _network_class() -> type:
    import equinox as eqx
    import jax

    from models.layers import BatchNorm

    class Network(eqx.Module):
        first: eqx.nn.Linear
        norm: BatchNorm
        second: eqx.nn.Linear

        def __init__(self, key: Any):
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(WIDTH, WIDTH, key=keys[0])
            self.norm = BatchNorm(WIDTH)
            self.second = eqx.nn.Linear(WIDTH, CLASSES, key=keys[1])

    return Network


def make_program(*, mesh: Any = None) -> Any:
    """A chain with everything in it that carries something from step to step."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import PartitionSpec as P

    import eqtrain as et

    def loss(model: Any, state: Any, batch: Any, key: Any) -> Any:
        tokens, positions = batch["x"], batch["positions"].astype(batch["x"].dtype)
        counts = batch["weight"][:, None] * (batch["segment_ids"] > 0)
        hidden = jax.vmap(jax.vmap(model.first))(tokens + 0.1 * positions[:, :, None])
        flat, state = model.norm(hidden.reshape(-1, WIDTH), state, where=counts.reshape(-1))
        hidden = et.dropout(jax.nn.relu(flat.reshape(hidden.shape)), 0.2, key=key)
        logits = jax.vmap(jax.vmap(model.second))(hidden).astype(jnp.float32)
        error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return et.mean(error, where=counts), state, {}

    schedule = optax.cosine_decay_schedule(0.1, 100)
    # Grows often, so that it also overflows and shrinks.
    scaling = et.LossScaling(initial=2.0**15, period=4)
    return et.pipe(
        loss,
        et.precision("float16", loss_scaling=scaling),
        et.accumulate(2),
        *([] if mesh is None else [et.shard(mesh, batch=P("data"), model=et.fsdp("data"))]),
        et.update(optax.sgd(schedule, momentum=0.9)),
        et.ema(0.9),
        et.guard(nonfinite="skip"),
        et.donate,
    )


def digest(ts: Any) -> dict[str, str]:
    """A checksum of every array of a TrainState, by its path."""
    import numpy as np

    return {
        name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for name, leaf in zip(ts.structure.names, ts.leaves, strict=True)
    }


def train(folder: Path, steps: int, depth: int) -> None:
    """What the child does: trains to the end, from wherever a run before it came to."""
    import jax

    import eqtrain as et

    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    log = os.open(folder.with_suffix(".jsonl"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def note(**line: Any) -> None:
        os.write(log, (json.dumps(line) + "\n").encode())

    program, loader = make_program(), make_loader()
    with et.checkpoint.Checkpoints(folder, keep_last=2, keep_every=30) as checkpoints:
        ts = checkpoints.restore_or_init(
            program, make_network, key=jax.random.key(0), loader=loader
        )
        step = int(ts.step)
        note(start=step)
        with et.data.prefetch(loader, program.batch_sharding, depth=depth) as batches:
            while step < steps:
                batch = next(batches)
                # Read now, since what is donated is gone.
                counts = (batch["weight"][:, None] > 0) & (batch["segment_ids"] > 0)
                ids = batch["id"][counts].tolist()
                ts, metrics = program(ts, batch)
                step += 1
                note(step=step, loss=et.fetch(metrics)["loss"].hex(), ids=ids)
                if step % SAVE_EVERY == 0:
                    checkpoints.save(ts, loader, program=program)
        checkpoints.save(ts, loader, program=program)
        checkpoints.wait()
        note(end=digest(ts), scale=float(ts.extra["loss_scale"]["scale"]))


@dataclasses.dataclass
class Run:
    """What the logs of one run say, however many children it took."""

    steps: dict[int, tuple[str, list[int]]] = dataclasses.field(default_factory=dict)
    starts: list[int] = dataclasses.field(default_factory=list)
    # Steps by the last child, which are none before it is compiled.
    since_start: int = 0
    end: dict[str, str] | None = None
    redone: int = 0

    @classmethod
    def read(cls, path: Path) -> Run:
        """Reads a log. **Raises:** `ValueError` for a step that came out otherwise when redone."""
        run = cls()
        text = path.read_text() if path.exists() else ""
        for line in map(json.loads, text.splitlines()):
            if "start" in line:
                run.starts.append(line["start"])
                run.since_start = 0
            elif "end" in line:
                run.end = line["end"]
            else:
                got = (line["loss"], line["ids"])
                run.since_start += 1
                run.redone += line["step"] in run.steps
                if run.steps.setdefault(line["step"], got) != got:
                    raise ValueError(
                        "A step that is done again must come out the same. Got step "
                        f"{line['step']} as {got} after {run.steps[line['step']]}."
                    )
        return run

    def differences(self, expected: Run) -> list[str]:
        """What is not as in a run that was left alone."""
        steps = [
            f"step {step}: {self.steps.get(step)} in place of {found}"
            for step, found in expected.steps.items()
            if self.steps.get(step) != found
        ]
        end = self.end or {}
        leaves = [name for name, value in (expected.end or {}).items() if end.get(name) != value]
        return steps + leaves


def spawn(folder: Path, steps: int, depth: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--child", str(folder)]
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "OMP_NUM_THREADS": "1",
    }
    with open(folder.with_suffix(".err"), "ab") as errors:
        return subprocess.Popen(
            [*command, "--steps", str(steps), "--depth", str(depth)],
            env=env,
            stdout=errors,
            stderr=errors,
        )


def _finish(child: subprocess.Popen[bytes], folder: Path) -> None:
    if child.wait() != 0:
        raise RuntimeError(
            f"A child that was not killed must end well. Got exit code {child.returncode} and:\n"
            + folder.with_suffix(".err").read_text()
        )


def kill(folder: Path, child: subprocess.Popen[bytes], rng: random.Random) -> str | None:
    """Kills a child at a random moment. **Returns:** what it was at, or None if it ended before."""
    log = folder.with_suffix(".jsonl")
    starts = len(Run.read(log).starts)

    def training(steps: int = 1) -> bool:
        run = Run.read(log)
        return len(run.starts) > starts and run.since_start >= steps

    in_a_start, steps = rng.random() < 0.1, rng.randint(1, MOST_STEPS)
    while not in_a_start and not training(steps) and child.poll() is None:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, START if in_a_start else LONGEST))
    child.send_signal(signal.SIGKILL)
    if child.wait() != -signal.SIGKILL:
        return None
    if not training():
        return "in_a_start"
    names = [path.name for path in folder.iterdir()]
    if any(".orbax-checkpoint-tmp" in name or name.endswith(".deleted") for name in names):
        return "in_a_save"
    return "between_saves"


def checkpoints_of(folder: Path) -> dict[int, int]:
    """The bytes of each checkpoint that is there."""
    from eqtrain.checkpoint.metadata import steps_in

    return {
        step: sum(path.stat().st_size for path in (folder / str(step)).rglob("*") if path.is_file())
        for step in steps_in(folder)
    }


def measure(
    work: Path, kills: int, steps: int = STEPS, seed: int = 0, seconds: float | None = None
) -> dict[str, Any]:
    """Kills children so often, or for so long, and compares what became of their runs."""
    rng, started = random.Random(seed), time.perf_counter()
    (work / "alone").mkdir(parents=True)
    _finish(spawn(work / "alone", steps, depth=2), work / "alone")
    alone = Run.read(work / "alone.jsonl")
    counts = {"in_a_save": 0, "in_a_start": 0, "between_saves": 0}
    runs = resumes = redone = lost = 0
    differences: list[str] = []
    while sum(counts.values()) < kills and not (
        seconds is not None and time.perf_counter() - started > seconds
    ):
        folder = work / f"killed{runs}"
        folder.mkdir()
        runs += 1
        there, starts = dict[int, int](), 0
        while True:
            child = spawn(folder, steps, depth=rng.choice([1, 2, 5]))
            enough = sum(counts.values()) >= kills
            moment = None if enough else kill(folder, child, rng)
            if moment is None:
                _finish(child, folder)
            run = Run.read(folder.with_suffix(".jsonl"))
            if len(run.starts) > starts:
                starts = len(run.starts)
                resumes += run.starts[-1] > 0
                lost += sum(size for step, size in there.items() if step > run.starts[-1])
            there = checkpoints_of(folder)
            if moment is None:
                break
            counts[moment] += 1
        redone += run.redone
        differences += run.differences(alone)
        if seconds is None:
            print(f"{sum(counts.values())} kills, {runs} runs, {counts}", flush=True)
    return {
        "kills": sum(counts.values()),
        **counts,
        "runs": runs,
        "resumes": resumes,
        "steps": steps,
        "steps_redone": redone,
        "bytes_lost": lost,
        "equal": not differences,
        "differences": differences[:5],
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, default=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        train(args.child, args.steps, args.depth)
        return
    with tempfile.TemporaryDirectory() as work:
        result = measure(Path(work), args.kills, args.steps, args.seed)
    from benchmarks.environment import environment

    print(json.dumps({"benchmark": "kill_and_resume", **result, **environment()}))


if __name__ == "__main__":
    main()
