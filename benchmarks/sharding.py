"""Claim: placing collectives by hand is never slower than XLA's automatic partitioning of the same
model and placement, moves no more bytes, and takes less temporary memory.

    python benchmarks/sharding.py

Six to eight minutes on two free cores; `--quick` is a look at a tiny
model, and its times mean nothing. Runs on the CPU, on 4 and then on 8 devices that are forced
there, whatever the number of cores. `--no-torch` leaves out PyTorch, which needs `torch` and
`transformers`.

**The step.** AdamW on the mean negative log-likelihood of a Llama of 3.7 million parameters (4
layers, 256 wide, MLPs 768 wide, 8 query and 4 key-value heads, vocabulary 1024), 16 rows of 64
tokens, float32, each layer rematerialised, everything donated; the loss and the norm of the
gradients come out. Weights and batch are the same everywhere, and so must be the losses of the
first three steps, to 1e-4, or the run stops.

| contender | placement | what is compared with it |
| --- | --- | --- |
| `auto_replicated` | all copied, the batch split over all devices | `ours_replicated`, `pmap` |
| `auto_fsdp` | weights, moments and batch split over all devices | `ours_fsdp`, `ours_fsdp_lazy` |
| `auto_tensor` | that over `data`, and tensor-parallel over 2 devices of `model` | `ours_tensor` |
| `auto_sequence` | the same, with activations between layers split by sequence | `ours_sequence` |

`ours_...` are `et.pipe(loss, et.shard(mesh, ...), et.update(adamw), et.donate)`. `ours_fsdp`
gathers all weights before the loss, `ours_fsdp_lazy` each layer's in that layer; so do
`ours_tensor` and `ours_sequence`. `auto_...` are `jax.jit` of the global program, with the same
model and remat, the same `NamedSharding` of each parameter and moment in and out, donated, and
`with_sharding_constraint` on activations where MaxText and T5X have it. `pmap` is `jax.pmap`, with
a `pmean` of the gradients. `ordered` is `ours_replicated` with `order="tree"`, whose bits do not
depend on the number of devices: what that costs.

**The figures.** `step`: two steps and the wait for them, divided by two. Every round goes through
all contenders in an order drawn anew; printed are the medians over rounds with their quartiles, and
the median of the ratios within a round. The rest is read from the compiled programs and is of one
device: `moved`, what it sends in a step if collectives are rings (an all-reduce of b bytes on n
devices is 2 b (n-1)/n, an all-gather to b bytes half of that, and a reduce-scatter of them too);
`temporary` and `arguments`, what XLA allots. XLA's CPU compiler lacks the pass by which its GPU and
TPU compilers turn an all-reduce, of which a part is kept, into a reduce-scatter: there automatic
partitioning may move fewer bytes than here.

**A second part** has two processes on gloo, one thread each: PyTorch's FSDP2 (`fully_shard` on each
layer of transformers' LlamaForCausalLM, sdpa attention, fused AdamW, with activation checkpointing
by layer and without) against two processes of ours, and two devices of one process. Should FSDP2
fail, its error is printed, and FSDP1 or DDP takes its place. PyTorch computes no norm.

**Expected:** the goals above for each pair, and PyTorch no faster than ours. These are goals: the
last line, which is JSON, says under `goals` which of them came out. One is out of reach by intent:
`ours_fsdp` holds all weights at once, for fewer bytes moved, and needs more memory for it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import sharding_steps
from benchmarks.report import Report
from benchmarks.workers import Worker, WorkerError

HERE = Path(__file__).resolve().parent
# What is compared with what.
PAIRS = {
    "ours_replicated": "auto_replicated",
    "ours_fsdp": "auto_fsdp",
    "ours_fsdp_lazy": "auto_fsdp",
    "ours_tensor": "auto_tensor",
    "ours_sequence": "auto_sequence",
    "pmap": "auto_replicated",
    "ordered": "ours_replicated",
}
NAMES = list(dict.fromkeys([*PAIRS, *PAIRS.values()]))
TWO_PROCESSES = "two processes"
# Ours on one process and on two -> PyTorch's.
TORCH_PAIRS = {
    "ours_fsdp_lazy": "",
    "ours_fsdp_lazy, 2 processes": "",
    "ours_fsdp_no_remat": "_no_remat",
    "ours_fsdp_no_remat, 2 processes": "_no_remat",
}
COMPARED = 3
TOLERANCE = 1e-4
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclasses.dataclass
class Contender:
    """One contender, in the processes that take its step together."""

    name: str
    shown: str
    workers: list[Worker]
    costs: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)

    def ask(self, do: str, **request: Any) -> list[dict[str, Any]]:
        for worker in self.workers:
            worker.send(do=do, name=self.name, **request)
        return [worker.receive() for worker in self.workers]

    def make(self) -> None:
        self.costs = self.ask("make")[0]
        self.losses = [self.ask("run", steps=1)[0]["loss"] for _ in range(COMPARED)]

    def measure(self, steps: int) -> None:
        replies = self.ask("run", steps=steps)
        self.step_ms.append(max(reply["seconds"] for reply in replies) * 1000 / steps)


def require_same_losses(losses: dict[str, list[float]]) -> None:
    """Refuses contenders that do not take the same steps.

    **Raises:** `RuntimeError` that names the first which differs.
    """
    first, expected = next(iter(losses.items()))
    for name, found in losses.items():
        pairs = zip(found, expected, strict=True)
        if not all(abs(a - b) <= TOLERANCE * abs(b) for a, b in pairs):
            raise RuntimeError(
                "All contenders must take the same steps. "
                f"Got the losses {found} of `{name}` and {expected} of `{first}`."
            )


def measure(contenders: list[Contender], rounds: int, steps: int) -> None:
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for contender in order:
            contender.measure(steps)


def spread(values: list[float], digits: int = 1) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, digits), "q1": round(q1, digits), "q3": round(q3, digits)}


def paired(tops: list[float], bottoms: list[float]) -> dict[str, float]:
    """The spread of the ratios within a round."""
    return spread([top / bottom for top, bottom in zip(tops, bottoms, strict=True)], 3)


def lines_of(part: str, contenders: list[Contender], pairs: dict[str, str]) -> list[dict[str, Any]]:
    """A JSON line for each contender, with its ratio to the one it is compared with."""
    by_name = {contender.shown: contender for contender in contenders}
    lines = []
    for contender in contenders:
        other = pairs.get(contender.shown)
        line: dict[str, Any] = {
            "benchmark": "sharding",
            "part": part,
            "contender": contender.shown,
            "step_ms": spread(contender.step_ms),
            "losses": contender.losses,
            **contender.costs,
        }
        if other in by_name:
            against = by_name[other]
            over: dict[str, Any] = {"contender": other}
            over["step"] = paired(contender.step_ms, against.step_ms)
            for figure in ("moved_bytes", "temporary_bytes", "argument_bytes"):
                if against.costs.get(figure):
                    over[figure] = round(contender.costs[figure] / against.costs[figure], 4)
            line["over"] = over
        lines.append(line)
    return lines


def goals_of(lines: list[dict[str, Any]]) -> dict[str, bool]:
    """Which goals came out: no slower, no more bytes, less temporary memory."""
    goals = {}
    for line in lines:
        over = line.get("over")
        if over is None or not line["contender"].startswith("ours"):
            continue
        what = f"{line['part']}: {line['contender']} over {over['contender']}"
        goals[f"{what}: step <= 1"] = over["step"]["median"] <= 1
        if "moved_bytes" in over:
            goals[f"{what}: moved <= 1"] = over["moved_bytes"] <= 1
            goals[f"{what}: temporary < 1"] = over["temporary_bytes"] < 1
    return goals


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def closing(workers: list[Worker]) -> Iterator[list[Worker]]:
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


class Run:
    """The arguments of a run, and a folder for what its processes leave."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.size: str = "tiny" if args.quick else "small"
        self.rounds: int = args.rounds
        self.steps: int = args.steps
        self.names: list[str] = args.contenders
        self.texts: Path | None = args.texts
        self.folder = folder

    def jax_workers(self, devices: int, processes: int = 1) -> list[Worker]:
        command = ["benchmarks/sharding_steps.py", "--devices", str(devices), "--size", self.size]
        if processes > 1:
            command += ["--coordinator", f"127.0.0.1:{free_port()}"]
        return [
            Worker(
                [*command, "--process", str(index)],
                self.folder / f"jax-{devices}-{processes}-{index}.log",
                ONE_THREAD,
            )
            for index in range(processes)
        ]

    def torch_workers(self, weights: Path) -> list[Worker]:
        setting = {
            "config": dataclasses.asdict(sharding_steps.SIZES[self.size].config),
            "weights": str(weights),
            "learning_rate": sharding_steps.LEARNING_RATE,
            "weight_decay": sharding_steps.WEIGHT_DECAY,
        }
        command = ["benchmarks/peers/torch_fsdp.py", "--port", str(free_port())]
        command += ["--setting", json.dumps(setting)]
        return [
            Worker(
                [*command, "--process", str(index)], self.folder / f"torch-{index}.log", ONE_THREAD
            )
            for index in range(2)
        ]

    def devices_part(self, devices: int) -> list[dict[str, Any]]:
        with closing(self.jax_workers(devices)) as workers:
            contenders = [Contender(name, name, workers) for name in self.names]
            for contender in contenders:
                contender.make()
                if self.texts is not None:
                    path = self.texts.resolve() / f"{contender.name}-{devices}.txt"
                    contender.ask("text", path=str(path))
            require_same_losses({one.shown: one.losses for one in contenders})
            measure(contenders, self.rounds, self.steps)
        return lines_of(f"{devices} devices", contenders, PAIRS)

    def torch_part(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """PyTorch's two processes against ours, and what went wrong with the kinds before."""
        errors: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(closing(self.jax_workers(2)))
            two = stack.enter_context(closing(self.jax_workers(1, processes=2)))
            contenders = []
            for name in ("ours_fsdp_lazy", "ours_fsdp_no_remat"):
                contenders.append(Contender(name, name, one))
                contenders.append(Contender(name, f"{name}, 2 processes", two))
            for contender in contenders:
                contender.make()
            weights = self.folder / "weights.npz"
            one[0].send(do="save", path=str(weights))
            one[0].receive()
            pairs: dict[str, str] = {}
            for kind in ("fsdp2", "fsdp1", "ddp"):
                workers = stack.enter_context(closing(self.torch_workers(weights)))
                names = [f"torch_{kind}", f"torch_{kind}_no_remat"]
                peers = [Contender(name, name, workers) for name in names]
                try:
                    for peer in peers:
                        peer.make()
                except WorkerError as error:
                    errors[kind] = str(error)
                    continue
                contenders += peers
                pairs = {own: f"torch_{kind}{rest}" for own, rest in TORCH_PAIRS.items()}
                break
            require_same_losses({one.shown: one.losses for one in contenders})
            measure(contenders, self.rounds, self.steps)
        return lines_of(TWO_PROCESSES, contenders, pairs), errors


def table_of(lines: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table."""
    header = ["part", "contender", "step ms", "quartiles", "over", "step", "moved", "temp."]
    header += ["moved MB", "temp. MB", "args MB", "collectives"]
    rows = []
    for line in lines:
        step, over = line["step_ms"], line.get("over", {})
        ratio = over.get("step")
        collectives = line.get("collectives", {})
        rows.append(
            [
                line["part"],
                line["contender"],
                f"{step['median']:.0f}",
                f"{step['q1']:.0f} - {step['q3']:.0f}",
                over.get("contender", ""),
                f"{ratio['median']:.2f} ({ratio['q1']:.2f} - {ratio['q3']:.2f})" if ratio else "",
                *(
                    f"{over[figure]:.2f}" if figure in over else ""
                    for figure in ("moved_bytes", "temporary_bytes")
                ),
                *(
                    f"{line[figure] / 1e6:.1f}" if figure in line else ""
                    for figure in ("moved_bytes", "temporary_bytes", "argument_bytes")
                ),
                ", ".join(f"{one['times']} {kind}" for kind, one in collectives.items()),
            ]
        )
    return header, rows


def print_table(header: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in [header, *rows]:
            print(" | ".join(row))
        return
    table = Table(title="A step: medians over rounds, ratios within a round")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index in (0, 1, 4, 11) else "right")
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1][0] != row[0]
        table.add_row(*row, end_section=last)
    console = Console()
    # A table that is written to a file must not be folded to the width of a terminal.
    (console if console.is_terminal else Console(width=220)).print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps a contender takes in a round")
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8], choices=(4, 8))
    parser.add_argument("--contenders", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--no-torch", action="store_true", help="leave out the part with PyTorch")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for a look only")
    parser.add_argument("--texts", type=Path, help="a folder for the text of compiled programs")
    args = parser.parse_args()
    if args.rounds < 2 or args.steps < 1:
        parser.error("Quartiles need `--rounds 2` at least, and each round a step.")
    if args.texts is not None:
        args.texts.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = arguments()
    report = Report("sharding")
    lines: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = Run(args, Path(folder))
        for devices in args.devices:
            lines += run.devices_part(devices)
            print(f"{devices} devices measured after {report.seconds:.0f} s", flush=True)
        if not args.no_torch:
            more, errors = run.torch_part()
            lines += more
    for kind, error in errors.items():
        print(f"PyTorch's {kind} did not run: {error}")
    print_table(*table_of(lines))
    report.end(
        lines,
        goals_of(lines),
        errors=errors,
        params=sharding_steps.SIZES[run.size].num_params,
        rounds=args.rounds,
        steps=args.steps,
        quick=args.quick,
    )


if __name__ == "__main__":
    main()
