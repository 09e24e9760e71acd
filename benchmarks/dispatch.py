"""Claim: a step costs the host at most 1.1 x what a raw `jax.jit` of the same arrays costs.

    python benchmarks/dispatch.py

Takes 175 seconds on two quiet cores, more on busy ones; `--quick` takes 8 rounds in place of 40 and
is for a look only. Runs on the CPU. `torch` and `rich` are used where they are installed; nothing
else is needed beyond what `eqtrain` needs.

**The step.** Adam on the mean squared error of an `eqx.nn.MLP` of L linear layers, 16 wide, with
16 rows of float32. Its TrainState has `6 L + 3` leaves: a weight and a bias a layer, two moments of
each, Adam's count, the key and the step. L is 3, 21 and 61, so 21, 129 and 369 leaves. The math is
checked: in the first steps all contenders must report the same losses, and the arrays that a JAX
contender gave away must be gone.

| contender | what is called |
| --- | --- |
| `raw` | `jax.jit`, donated: a tuple of as many arrays in and out, the key as its two uint32 |
| `raw_typed_key` | the same with a typed key, as a TrainState keeps it: an extra |
| `filter_jit` | `eqx.filter_jit`, donated, on model and optimizer state: two arrays fewer, no key |
| `torch` | eager, `zero_grad(set_to_none=True)`, the faster of fused and foreach Adam |
| `ours` | `et.pipe(loss, et.update(optax.adam(1e-3)), et.donate)` |
| `ours_guard` | with `et.guard(nonfinite="skip")`: two leaves more, and a look at a flag a call |
| `ours_repeat` | with `et.repeat(50)`: 50 steps a call, all figures for one step |

All but `torch` return the loss and the norm of the gradients; in `torch` the norm would cost extra
and is left out. Its optimizer and its threads (one or all) are what was fastest in a trial before.
`filter_jit` has `donate="all-except-first"`, since `"all"` takes the batch away too; a call costs
the same either way.

**The figures**, in microseconds a step:

- `dispatch`: from the call until it returned and the old state was let go, one call at a time, with
  the device idle before it. PyTorch works on a CPU while it is called, so there it is the step.
- `host`: of that, what the calling thread spent on a processor, and 1 us for reading the clocks.
  `dispatch` may exceed it by the step itself: where cores are few or busy, XLA's thread may run
  first while the caller waits for a core.
- `step`: 50 steps without a look at them and `block_until_ready` after the last, divided by 50.

Every round goes through all contenders in an order drawn anew, and gives one median a contender.
What is printed is the median over rounds, with its quartiles; a ratio is the median over rounds of
the ratio within a round, so that a machine that slows down slows both. Garbage is collected between
measurements and never within.

**Expected:** for `dispatch` and for `host`, `ours_over_raw` at most 1.1 at every size, and
`filter_jit_over_ours` at least 4 at 369 leaves. These are goals: the last line, which is JSON, says
under `goals` which of them came out.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

import eqtrain as et
from benchmarks.environment import environment

Batch = dict[str, Float[Array, "rows width"]]

SIZES = {21: 3, 129: 21, 369: 61}
WIDTH = ROWS = 16
LEARNING_RATE = 1e-3
FIGURES = ("dispatch", "host", "step")
RUN = 50
# So many losses agree to 1e-6; after 50 steps rounding alone makes 1%, through 61 layers and Adam.
COMPARED = 10
MOST_OVER_RAW = 1.1
LEAST_OVER_FILTER_JIT = 4.0


@dataclasses.dataclass
class Contender:
    """One way to take the step. `step` takes what it returned first; `losses` reads the second."""

    name: str
    step: Callable[[Any], tuple[Any, Any]]
    state: Any
    losses: Callable[[Any], list[float]]
    ready: Callable[[Any], Any] = jax.block_until_ready
    steps_a_call: int = 1
    note: str = ""
    first_call_seconds: float = 0.0
    # One number a round, in microseconds a step.
    figures: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {figure: [] for figure in FIGURES}
    )

    def run(self, num_steps: int) -> Any:
        """Takes so many steps and waits for the last."""
        state, out = self.state, None
        for _ in range(num_steps // self.steps_a_call):
            state, out = self.step(state)
        self.ready(out)
        self.state = state
        return out

    def measure_calls(self, calls: int) -> None:
        """Notes the median time of calls that find the device idle: `dispatch` and `host`."""
        clock, thread_clock, state = time.perf_counter, time.thread_time, self.state
        seconds, thread_seconds = [], []
        for index in range(calls + 2):  # The first two warm the caches up again.
            self.ready(state)
            thread_start = thread_clock()
            start = clock()
            state, out = self.step(state)
            elapsed = clock() - start
            thread_elapsed = thread_clock() - thread_start
            self.ready(out)
            if index >= 2:
                seconds.append(elapsed)
                thread_seconds.append(thread_elapsed)
        self.state = state
        for figure, values in (("dispatch", seconds), ("host", thread_seconds)):
            self.figures[figure].append(statistics.median(values) * 1e6 / self.steps_a_call)

    def measure_steps(self, runs: int) -> None:
        """Notes the median time of `RUN` steps and of the wait for the last: `step`."""
        self.run(self.steps_a_call)
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            self.run(RUN)
            seconds.append(time.perf_counter() - start)
        self.figures["step"].append(statistics.median(seconds) * 1e6 / RUN)


def make_model(num_layers: int) -> eqx.nn.MLP:
    """An MLP with orthogonal weights, through which a gradient reaches the first of 61 layers."""
    keys = jax.random.split(jax.random.key(0), num_layers + 1)
    model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, num_layers - 1, jnp.tanh, key=keys[-1])
    orthogonal = jax.nn.initializers.orthogonal()
    weights = [orthogonal(key, (WIDTH, WIDTH), jnp.float32) for key in keys[:-1]]
    return eqx.tree_at(lambda model: [layer.weight for layer in model.layers], model, weights)


def make_batch() -> Batch:
    x, y = jax.random.normal(jax.random.key(1), (2, ROWS, WIDTH))
    return {"x": x, "y": y}


def loss_of(model: eqx.nn.MLP, batch: Batch) -> Float[Array, ""]:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def raw(name: str, model: eqx.nn.MLP, batch: Batch, typed_key: bool) -> Contender:
    """What someone writes who wants nothing between them and the compiled step."""
    optimizer = optax.adam(LEARNING_RATE)
    params, static = eqx.partition(model, eqx.is_array)
    key = jax.random.key(2)
    key = key if typed_key else jax.random.key_data(key)
    first = (params, optimizer.init(params), key, jnp.zeros((), jnp.int32))
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.copy, first))

    def step(leaves: tuple[Array, ...], batch: Batch) -> Any:
        params, opt_state, key, count = jax.tree.unflatten(treedef, leaves)
        loss, grads = jax.value_and_grad(lambda p: loss_of(eqx.combine(p, static), batch))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        out = (params, opt_state, key, count + 1)
        return tuple(jax.tree.leaves(out)), (loss, optax.tree.norm(grads))

    jitted = jax.jit(step, donate_argnums=0)
    return Contender(name, lambda s: jitted(s, batch), tuple(leaves), lambda out: [float(out[0])])


def filter_jit(model: eqx.nn.MLP, batch: Batch) -> Contender:
    """The step of Equinox's examples, donated."""
    optimizer = optax.adam(LEARNING_RATE)
    # Its buffers are given away with the first call.
    model = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, model)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all-except-first")
    def step(batch: Batch, model: eqx.nn.MLP, opt_state: PyTree) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        model = eqx.apply_updates(model, updates)
        return (model, opt_state), (loss, optax.tree.norm(grads))

    return Contender(
        "filter_jit", lambda s: step(batch, *s), (model, opt_state), lambda out: [float(out[0])]
    )


def ours(name: str, model: eqx.nn.MLP, batch: Batch, *transforms: Any) -> Contender:
    def loss(model: eqx.nn.MLP, state: None, batch: Batch, key: Array) -> Any:
        return et.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2), state, {}

    program = et.pipe(loss, et.update(optax.adam(LEARNING_RATE)), *transforms, et.donate)
    ts = program.init(lambda key: model, key=jax.random.key(2))
    return Contender(
        name,
        lambda s: program(s, batch),
        ts,
        lambda metrics: np.ravel(metrics["loss"].value).tolist(),
    )


def ours_repeat(model: eqx.nn.MLP, batch: Batch) -> Contender:
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * RUN), batch)
    contender = ours("ours_repeat", model, stacked, et.repeat(RUN))
    return dataclasses.replace(contender, steps_a_call=RUN)


def torch_eager(model: eqx.nn.MLP, batch: Batch) -> Contender | None:
    """The fastest eager step among PyTorch's own choices; None where PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        return None

    x, y = (torch.from_numpy(np.array(batch[name])) for name in ("x", "y"))
    all_threads = torch.get_num_threads()

    def make(implementation: str, threads: int) -> Contender:
        modules: list[Any] = []
        for layer in model.layers:
            linear = torch.nn.Linear(WIDTH, WIDTH)
            with torch.no_grad():
                linear.weight.copy_(torch.from_numpy(np.array(layer.weight)))
                linear.bias.copy_(torch.from_numpy(np.array(layer.bias)))
            modules += [linear, torch.nn.Tanh()]
        net = torch.nn.Sequential(*modules[:-1])
        choice: dict[str, Any] = {implementation: True}
        optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE, **choice)

        def step(state: None) -> tuple[None, Any]:
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return None, loss.detach()

        # On a CPU there is nothing to wait for; what it is given is ready.
        return Contender(
            "torch",
            step,
            None,
            lambda loss: [float(loss)],
            ready=lambda _: None,
            note=f"{implementation}, {threads} thr.",
        )

    choices = [(name, n) for n in sorted({1, all_threads}) for name in ("fused", "foreach")]
    tried = [(threads, make(name, threads)) for name, threads in choices]
    for _ in range(8):
        for threads, contender in tried:
            torch.set_num_threads(threads)
            contender.measure_steps(1)
    threads, best = min(tried, key=lambda pair: statistics.median(pair[1].figures["step"]))
    torch.set_num_threads(threads)
    name = best.note.split(",")[0]
    return make(name, threads)


def make_contenders(leaves: int) -> list[Contender]:
    model, batch = make_model(SIZES[leaves]), make_batch()
    contenders = [
        raw("raw", model, batch, typed_key=False),
        raw("raw_typed_key", model, batch, typed_key=True),
        filter_jit(model, batch),
        torch_eager(model, batch),
        ours("ours", model, batch),
        ours("ours_guard", model, batch, et.guard(nonfinite="skip")),
        ours_repeat(model, batch),
    ]
    present = [contender for contender in contenders if contender is not None]
    for contender in present:
        if contender.name in ("raw", "raw_typed_key", "ours"):
            assert len(jax.tree.leaves(contender.state)) == leaves, contender.name
    return present


def compile_and_check(contenders: list[Contender]) -> None:
    """Makes the first call of each, and sees that all take the same steps and donate."""
    losses: dict[str, np.ndarray] = {}
    for contender in contenders:
        before = jax.tree.leaves(eqx.filter(contender.state, eqx.is_array))
        start = time.perf_counter()
        out = contender.run(contender.steps_a_call)
        contender.first_call_seconds = time.perf_counter() - start
        # Not of the key, which comes out as it went in.
        kept = [leaf for leaf in before if leaf.dtype == jnp.float32 and not leaf.is_deleted()]
        if kept:
            raise RuntimeError(f"`{contender.name}` must donate. Got {len(kept)} arrays kept.")
        found = list(contender.losses(out))
        while len(found) < COMPARED:
            found.extend(contender.losses(contender.run(contender.steps_a_call)))
        losses[contender.name] = np.array(found[:COMPARED])
    for name, found in losses.items():
        if not np.allclose(found, losses["raw"], rtol=1e-5, atol=0):
            raise RuntimeError(
                "All contenders must take the same steps. "
                f"Got the losses {found} of `{name}` and {losses['raw']} of `raw`."
            )


def measure(contenders: list[Contender], rounds: int, calls: int, runs: int) -> None:
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.freeze()  # Or every collection goes through all that tracing left behind.
    for _ in range(rounds):
        shuffle(order)
        for contender in order:
            gc.collect()
            gc.disable()
            few = calls if contender.steps_a_call == 1 else 3
            contender.measure_calls(few)
            contender.measure_steps(runs)
            gc.enable()
    gc.unfreeze()


def spread(values: list[float], digits: int = 2) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, digits), "q1": round(q1, digits), "q3": round(q3, digits)}


def ratios(contenders: list[Contender]) -> dict[str, dict[str, dict[str, float]]]:
    """The median over rounds of the ratios within a round, for each figure."""
    by_name = {contender.name: contender for contender in contenders}
    pairs = {
        "ours_over_raw": ("ours", "raw"),
        "ours_over_raw_typed_key": ("ours", "raw_typed_key"),
        "ours_guard_over_raw": ("ours_guard", "raw"),
        "ours_guard_over_ours": ("ours_guard", "ours"),
        "filter_jit_over_ours": ("filter_jit", "ours"),
        "filter_jit_over_raw": ("filter_jit", "raw"),
        "torch_over_ours": ("torch", "ours"),
        "ours_over_ours_repeat": ("ours", "ours_repeat"),
        "torch_over_ours_repeat": ("torch", "ours_repeat"),
    }
    result: dict[str, dict[str, dict[str, float]]] = {figure: {} for figure in FIGURES}
    for name, (above, below) in pairs.items():
        if above in by_name and below in by_name:
            for figure in FIGURES:
                tops, bottoms = by_name[above].figures[figure], by_name[below].figures[figure]
                paired = [top / bottom for top, bottom in zip(tops, bottoms, strict=True)]
                result[figure][name] = spread(paired, 3)
    return result


def print_table(results: dict[int, list[dict[str, Any]]]) -> None:
    columns = [column for figure in FIGURES for column in (figure, "quartiles")]
    header = ["leaves", "contender", *columns, "first s"]
    rows = []
    for leaves, lines in results.items():
        for line in lines:
            cells = [str(leaves), line["contender"]]
            for figure in FIGURES:
                value = line[f"{figure}_us"]
                cells += [f"{value['median']:,.1f}", f"{value['q1']:,.1f} - {value['q3']:,.1f}"]
            rows.append([*cells, f"{line['first_call_seconds']:.2f}"])
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in [header, *rows]:
            cells = [
                cell.ljust(width) if index == 1 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())
        return
    table = Table(title="Microseconds a step: median over rounds")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 1 else "right")
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1][0] != row[0]
        table.add_row(*row, end_section=last)
    console = Console()
    # A table that is written to a file must not be folded to the width of a terminal.
    (console if console.is_terminal else Console(width=140)).print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=20, help="timed calls a round, for `dispatch`")
    parser.add_argument("--runs", type=int, default=3, help=f"timed runs of {RUN} steps a round")
    parser.add_argument(
        "--leaves", type=int, nargs="+", choices=SIZES, default=list(SIZES), help="sizes to measure"
    )
    parser.add_argument("--quick", action="store_true", help="8 rounds, for a look only")
    args = parser.parse_args()
    if args.rounds < 2 or args.calls < 1 or args.runs < 1:
        parser.error("Quartiles need `--rounds 2` at least, and each round a call and a run.")
    return args


def main() -> None:
    args = arguments()
    rounds = 8 if args.quick else args.rounds
    started = time.perf_counter()
    results: dict[int, list[dict[str, Any]]] = {}
    compared = {}
    for leaves in args.leaves:
        contenders = make_contenders(leaves)
        compile_and_check(contenders)
        measure(contenders, rounds, args.calls, args.runs)
        compared[leaves] = ratios(contenders)
        results[leaves] = [
            {
                "benchmark": "dispatch",
                "leaves": leaves,
                "contender": contender.name,
                "note": contender.note,
                **{f"{figure}_us": spread(contender.figures[figure]) for figure in FIGURES},
                "first_call_seconds": round(contender.first_call_seconds, 3),
            }
            for contender in contenders
        ]
        print(f"{leaves} leaves measured after {time.perf_counter() - started:.0f} s", flush=True)
        del contenders
        jax.clear_caches()
    print_table(results)
    for lines in results.values():
        for line in lines:
            print(json.dumps(line))
    goals: dict[str, bool] = {}
    for figure in ("dispatch", "host"):
        for leaves in args.leaves:
            over = compared[leaves][figure]["ours_over_raw"]["median"]
            goals[f"{figure}: ours_over_raw <= {MOST_OVER_RAW} at {leaves}"] = over <= MOST_OVER_RAW
        if 369 in compared:
            over = compared[369][figure]["filter_jit_over_ours"]["median"]
            name = f"{figure}: filter_jit_over_ours >= {LEAST_OVER_FILTER_JIT:g} at 369"
            goals[name] = over >= LEAST_OVER_FILTER_JIT
    final = {
        "benchmark": "dispatch",
        "ratios": compared,
        "goals": goals,
        "rounds": rounds,
        "calls": args.calls,
        "runs": args.runs,
        "load_average": round(os.getloadavg()[0], 2),
        "seconds": round(time.perf_counter() - started, 1),
        **environment(),
    }
    print(json.dumps(final))


if __name__ == "__main__":
    main()
